"""The user's defaults for commands: specbeam.toml in the configuration folder, or the file that SPECBEAM_CONFIG names.

    [generate]
    model = "bundled"
    temperature = 0.7

    [bench.speed]
    threads = 1

Each table is a command, and each key an option of it, with `-` or `_` between words.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from specbeam.core.names import hint
from specbeam.errors import BadSetting, MissingFile

VARIABLE = "SPECBEAM_CONFIG"


def place_of_defaults() -> Path:
    """Return the path of the user's file, which need not exist unless `SPECBEAM_CONFIG` names it."""
    named = os.environ.get(VARIABLE, "")
    return Path(named) if named else user_config_path() / "specbeam.toml"


def read_defaults(commands: Any) -> dict[str, Any]:
    """Return the defaults of all commands, nested by command, with the names of parameters as keys.

    Args:
        commands: the group of all commands.

    Raises:
        MissingFile: `SPECBEAM_CONFIG` names no file.
        BadSetting: the file is no TOML, or names an unknown command or option.
    """
    place = place_of_defaults()
    if not place.is_file():
        if os.environ.get(VARIABLE):
            raise MissingFile(f"{VARIABLE} is {str(place)!r}, and there is no such file; unset it, or write the file")
        return {}
    try:
        found = tomllib.loads(place.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(f"{place} is no TOML file: {error}") from error
    return _of_group(found, commands, place, ())


def _of_group(found: Mapping[str, Any], group: Any, place: Path, path: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of the commands of a group."""
    defaults = {}
    for name, table in found.items():
        command = group.commands.get(name)
        inside = (*path, name)
        if command is None and not isinstance(table, dict):
            above = ".".join(path) or "generate"
            raise BadSetting(
                f"{place}: {name} = {table!r} is in no table of a command; write it below a line such as [{above}]"
            )
        title = f"[{'.'.join(inside)}]"
        if command is None:
            raise BadSetting(f"{place}: {title} is not a command{hint(name, group.commands)}")
        if not isinstance(table, dict):
            raise BadSetting(f"{place}: {title} is not a table, but {table!r}")
        has_commands = hasattr(command, "commands")
        defaults[name] = (_of_group if has_commands else _of_command)(table, command, place, inside)
    return defaults


def _of_command(table: Mapping[str, Any], command: Any, place: Path, path: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of a command by the names of its parameters."""
    known = {}
    for parameter in command.params:
        for flag in parameter.opts:
            known[flag.lstrip("-").replace("-", "_")] = parameter.name
        known[parameter.name] = parameter.name
    defaults = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            near = hint(name, known)
            help = f"specbeam {' '.join(path)} --help"
            raise BadSetting(f"{place}: [{'.'.join(path)}] has no option {key}{near}; see {help}")
        defaults[known[name]] = value
    return defaults
