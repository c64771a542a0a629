"""The command `specbeam transcribe`: what is said in audio files, in one of several formats."""

from pathlib import Path
from typing import Any

from specbeam.apps.speech.audio import check_file
from specbeam.apps.speech.formats import check_format, formatted
from specbeam.apps.speech.transcribe import transcribe
from specbeam.core.whole_files import write_whole
from specbeam.doors.cli.common import complain, method_from, quiet_load
from specbeam.errors import BadAudio, BadSetting, MissingFile

ENDINGS = {"text": "txt", "json": "json", "verbose_json": "json", "srt": "srt", "vtt": "vtt"}


def run(
    files: list[Path],
    model: str,
    draft: str | None,
    loaded: dict[str, Any],
    method_name: str | None,
    settings: list[str],
    options: dict[str, Any],
    format: str,
    lines: dict[str, int | None],
    output: Path | None,
) -> int:
    """Transcribe files one after the other, and return the exit code: 0, or 1 if a file could not be read.

    Args:
        loaded: options of `quiet_load` besides the models.
        options: as for `specbeam.transcribe`.
        lines: limits of the lines of subtitles, as for `formatted`.
        output: a folder for a file per audio; None: standard output.
    """
    check_format(format, **lines)
    if settings and method_name is None:
        raise BadSetting("--set is for the settings of a method; give --method too")
    method = None if method_name is None else method_from(method_name, settings)
    targets = [] if output is None else _targets(files, output, format)
    readable = [number for number, file in enumerate(files) if _is_readable(file)]
    if not readable and not any(loaded.values()):  # otherwise it shows whether the model can be loaded like this
        return 1
    pair = quiet_load(model, draft, sources=True, **loaded)
    failed = len(files) - len(readable)
    for number in readable:
        try:
            (found,) = transcribe(pair, files[number], method, **options)
        except (BadAudio, MissingFile) as error:
            complain(str(error))
            failed += 1
            continue
        text = formatted(found, format, **lines)
        if output is None:
            print(text, end="", flush=True)
        else:
            write_whole(targets[number], text.encode("utf-8"))
    return 1 if failed else 0


def _is_readable(file: Path) -> bool:
    """Return whether a file can be read, as far as its beginning shows; complain if it cannot."""
    try:
        check_file(file)
    except (BadAudio, MissingFile) as error:
        complain(str(error))
        return False
    return True


def _targets(files: list[Path], folder: Path, format: str) -> list[Path]:
    """Return the file that the transcript of each audio is written to. Raises `BadSetting` if two have one name."""
    if folder.exists() and not folder.is_dir():
        raise BadSetting(f"{folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / f"{file.stem}.{ENDINGS[format]}" for file in files]
    twice = {target for target in targets if targets.count(target) > 1}
    if twice:
        raise BadSetting(
            f"several files would be written to {min(twice)}; give them other names, or transcribe them apart"
        )
    return targets
