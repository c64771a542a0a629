"""Lines of text files that have a record per line."""

from pathlib import Path

from specbeam.doors import text_of


def lines_of(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file.

    Only line breaks end a line, unlike `str.splitlines`, which also splits at U+2028 or U+0085 inside a text. Raises
    `BadPrompt`, which names the line, if the file is not UTF-8, and `MissingFile` if it cannot be read.
    """
    text = text_of(path).replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []
