"""Folders of work that a killed run goes on in: each says of what it is, and that of another work is refused."""

import json
from pathlib import Path
from typing import Any

from specbeam.errors import BadSetting
from specbeam.train.trees import read_or_refuse
from specbeam.whole_files import write_whole

OPTIONS = "options.json"


def open_folder(folder: Path, options: dict[str, Any], leftovers: str) -> None:
    """Make a folder of work if it is missing.

    Args:
        options: what the work depends on; see `keep_options`.
        leftovers: a pattern of files that only a folder with options may hold.

    Raises `BadSetting` if it cannot be written, or holds work with other options.
    """
    path = folder / OPTIONS
    options = json.loads(json.dumps(options))  # as they are read again
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(f"{folder} cannot be written: {error}; choose another folder") from error
    if not path.exists():
        if any(folder.glob(leftovers)):
            raise BadSetting(
                f"{folder} holds {leftovers}, and no {OPTIONS} says of what; delete it, or choose another folder"
            )
        return
    before = read_or_refuse(path, lambda: json.loads(path.read_text()))
    other = {name: before.get(name) for name in {**before, **options} if before.get(name) != options.get(name)}
    if other:
        said = ", ".join(f"{name} {value!r} (now {options.get(name)!r})" for name, value in sorted(other.items()))
        raise BadSetting(f"{folder} holds work with {said}; choose another folder, or delete this one")


def keep_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of a folder, once all that can be wrong with them has been tried."""
    write_whole(folder / OPTIONS, (json.dumps(options, indent=2) + "\n").encode())
