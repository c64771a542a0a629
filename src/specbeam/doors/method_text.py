"""Methods from text, with settings as NAME=VALUE, for command lines and configuration files."""

import inspect
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from specbeam.core.errors import BadSetting
from specbeam.doors.method_names import read_value, setting_names, settings_in
from specbeam.recipes.catalogue import HEAD_RECIPES, RECIPES
from specbeam.recipes.method import Method


def method_from(name: str, settings: Sequence[str]) -> Method:
    """Return a method by name, with settings from NAME=VALUE texts.

    Each value is read as the type of its setting. Raises `BadSetting` for an unknown method or setting, for a missing or
    wrong value, and for settings whose values are objects without a text form.
    """
    setting_names(name)  # raises an error for an unknown method
    make = {recipe.__name__: recipe for recipe in (*RECIPES, *HEAD_RECIPES)}[name]
    known = inspect.signature(make).parameters
    given = settings_in(name, settings)
    return make(**{key: _value_of(name, known[key], value) for key, value in given.items()})


def _value_of(name: str, parameter: inspect.Parameter, value: str) -> Any:
    """Return the value of a setting of the method `name` from text."""
    if value in _words(parameter.annotation):
        return value
    kinds = _kinds(parameter.annotation)
    example = _example(parameter)
    if kinds == {str}:
        return value
    if kinds and not example and not kinds & {bool, int, float, str, tuple}:
        wanted = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise BadSetting(
            f"{parameter.name} of {name} is {value!r}; it takes a {wanted}, which has no text form: leave it out, or make "
            "the method in Python"
        )
    return read_value(parameter.name, value, example)


def _kinds(annotation: Any) -> set[type]:
    """Return the classes in a type annotation, without None; empty if it has none."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for argument in get_args(annotation) for kind in _kinds(argument)}
    if get_origin(annotation) is Literal:
        return {type(word) for word in get_args(annotation)}
    kind = get_origin(annotation) or annotation
    return {kind} if isinstance(kind, type) and kind is not NoneType else set()


def _words(annotation: Any) -> list[str]:
    """Return the strings of `Literal` in a type annotation, such as "auto"."""
    words = []
    for argument in get_args(annotation):
        words += [argument] if isinstance(argument, str) else _words(argument)
    return words


def _example(parameter: inspect.Parameter) -> Any:
    """Return a value of a parameter's type: its default; else zero or (zero,) if the type allows numbers; else None."""
    if parameter.default is not None:
        return parameter.default
    for kind in get_args(parameter.annotation):
        if kind in (int, float):
            return kind()
        if get_origin(kind) is Sequence and get_args(kind)[0] in (int, float):
            return (get_args(kind)[0](),)
    return None
