"""Methods with settings that are given as texts, as on a command line or in a configuration."""

import inspect
from collections.abc import Sequence
from typing import Any, get_args

from specbeam.errors import BadSetting
from specbeam.recipes.catalogue import HEAD_RECIPES, RECIPES, resolve
from specbeam.recipes.method import Method


def method_from(name: str, settings: Sequence[str]) -> Method:
    """Return a method by its name, with settings from NAME=VALUE texts.

    Methods that draft with a head have settings as all others. Each value is read as the type of its setting. Raises
    `BadSetting` if there is no such method or setting, or if a text has no value.
    """
    make = {recipe.__name__: recipe for recipe in (*RECIPES, *HEAD_RECIPES)}.get(name)
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
