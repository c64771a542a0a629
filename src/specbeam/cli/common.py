"""Functions that several commands share: settings from text, loading without progress bars, records as JSON."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any, get_args

from specbeam.errors import BadSetting, MissingFile
from specbeam.hmt import hmt
from specbeam.memory.files import backbone_of, holds_memory
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
    """Load a pair as `specbeam.load` does, without the progress bars and messages of the model library.

    The folder of a memory (`specbeam train hmt`) stands for its model with this memory, as target and as draft.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = [None if name is None else backbone_of(name) if holds_memory(name) else name for name in (model, draft)]
    assert names[0] is not None
    pair = load(names[0], names[1], device=device, dtype=dtype, quantize=quantize, compile=compile)
    memories = [name if name is not None and holds_memory(name) else None for name in (model, draft)]
    return hmt(pair, memories[0], draft_memory=memories[1]) if any(memories) else pair


def method_from(name: str, settings: list[str]) -> Method:
    """Return a method by its name, with settings from NAME=VALUE texts.

    Each value is read as the type of its setting. Raises `BadSetting` if there is no such method or setting, or if a
    text has no value.
    """
    make = {recipe.__name__: recipe for recipe in RECIPES}.get(name)
    if make is None:
        return resolve(name)  # raises an error that names the methods there are
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
    """Return the words that a type allows in `Literal`, such as "auto"."""
    words = []
    for argument in get_args(annotation):
        words += [argument] if isinstance(argument, str) else _words(argument)
    return words


def _example(parameter: inspect.Parameter) -> Any:
    """Return a value of a parameter's type: its default, or zero if the type allows numbers, or None."""
    if parameter.default is not None:
        return parameter.default
    return next((kind() for kind in get_args(parameter.annotation) if kind in (int, float)), None)


def _read(key: str, value: str, default: Any) -> Any:
    """Read the value of the setting `key` as the type of `default`.

    A tuple is read from values between commas. Without a default, digits are an integer and all else is text. Raises
    `BadSetting` if the value does not fit.
    """
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
    return int(value) if value.isdigit() else value


def text_or_file(value: str | None, mark: str, name: str) -> str | None:
    """Return the content of the file named `value`, or `value` itself if there is no such file.

    Args:
        value: a file name or a text; None is returned as it is.
        mark: a part that every such text has, which tells a text from the name of a missing file.
        name: what the text is, for errors.

    Raises:
        BadSetting: the file is not UTF-8.
        MissingFile: the file cannot be read, or there is none and the value does not contain `mark`.
    """
    if value is None:
        return None
    try:
        return Path(value).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadSetting(f"{value} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (OSError, ValueError) as error:  # there is no such file, or `value` cannot be a file name
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


def as_json(number: int, prompt: str, generation: Generation) -> str:
    """Return an answer as a line of JSON; `number` and `prompt` are those of its prompt."""
    record = {"index": number, "prompt": prompt, **dataclasses.asdict(generation)}
    record["prompt_tokens"] = len(generation.prompt)
    record["prompt"] = prompt  # the text, where `asdict` has put the token ids
    return json.dumps(record, ensure_ascii=False)
