"""Lines of text files that have a record per line."""

from pathlib import Path

from specbeam.errors import BadPrompt


def lines_of(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file.

    Only line breaks end a line, unlike `str.splitlines`, which also splits at U+2028 or U+0085 inside a text. Raises
    `BadPrompt`, which names the line, if the file is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadPrompt(
            f"{path}, line {line}: byte {error.object[error.start]:#x} is no UTF-8; save it as UTF-8"
        ) from error
    return text.removesuffix("\n").split("\n") if text else []
