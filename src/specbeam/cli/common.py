"""What several commands share: settings from text, quiet loading, records as JSON."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any, get_args

from specbeam.errors import BadSetting, MissingFile
from specbeam.pair import Pair, load
from specbeam.recipes.catalogue import RECIPES, resolve
from specbeam.recipes.method import Method
from specbeam.records import Generation


def quiet_load(
    model: str,
    draft: str | None,
    device: str | None = None,
    dtype: str = "auto",
    quantize: Any = None,
    compile: bool = False,
) -> Pair:
    """Load without the progress bars of the model library."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return load(model, draft, device=device, dtype=dtype, quantize=quantize, compile=compile)


def method_from(name: str, settings: list[str]) -> Method:
    """A method from its name and NAME=VALUE texts, each read as the type of the setting."""
    make = {make.__name__: make for make in RECIPES}.get(name)
    if make is None:
        return resolve(name)
    known = inspect.signature(make).parameters
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise BadSetting(f"--set {setting!r} has no value; write NAME=VALUE")
        if key not in known:
            raise BadSetting(f"{name} has no setting {key!r}; it has {', '.join(known) or 'none'}")
        chosen[key] = value if value in _words(known[key].annotation) else _read(key, value, _example(known[key]))
    return make(**chosen)


def _words(annotation: Any) -> list[str]:
    """Those that a type allows beside numbers: "auto", for one."""
    words = [one for one in get_args(annotation) if isinstance(one, str)]
    return sum((_words(one) for one in get_args(annotation) if not isinstance(one, str)), words)


def _example(parameter: inspect.Parameter) -> Any:
    """The default, which shows the type; where that is None, any number if a number may stand there."""
    if parameter.default is not None:
        return parameter.default
    return next((kind() for kind in get_args(parameter.annotation) if kind in (int, float)), None)


def _read(key: str, value: str, default: Any) -> Any:
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise BadSetting(f"{key} is {value!r}; it must be true or false")
        return value.lower() == "true"
    if isinstance(default, tuple) and default:
        return tuple(_read(key, part, default[0]) for part in value.split(","))
    if isinstance(default, (int, float)):
        try:
            return type(default)(value)
        except ValueError as error:
            raise BadSetting(
                f"{key} is {value!r}; it must be {'an integer' if isinstance(default, int) else 'a number'}"
            ) from error
    return int(value) if value.isdigit() else value  # "auto" or a number


def text_or_file(value: str | None, mark: str, name: str) -> str | None:
    """What the file of that name holds; if there is none, the text itself, which has `mark` in it."""
    if value is None:
        return None
    try:
        return Path(value).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadSetting(f"{value} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (OSError, ValueError) as error:  # no file, or no name of one
        if mark in value or (name == "json_schema" and value in ("true", "false")):
            return value
        if _is_there(value):
            raise MissingFile(f"{value} cannot be read: {error}") from error
        short = value if len(value) <= 60 else value[:60] + "..."
        raise MissingFile(f"there is no file {short}, and a {name} would have {mark!r} in it") from error


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def as_json(number: int, prompt: str, one: Generation) -> str:
    """One line per answer."""
    record = {"index": number, "prompt": prompt, **dataclasses.asdict(one)}
    record["prompt_tokens"] = len(one.prompt)
    record["prompt"] = prompt
    return json.dumps(record, ensure_ascii=False)
