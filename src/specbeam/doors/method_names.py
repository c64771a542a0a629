"""Names of methods and of their settings, from the source of the recipes, because importing it would import torch."""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specbeam.core.errors import BadSetting
from specbeam.core.lazy import homes_in
from specbeam.core.names import SETTINGS_ELSEWHERE, hint

PACKAGE = Path(__file__).parents[1]
_ZEROS = {"int": 0, "float": 0.0, "bool": False}
_NO_RECIPES = ("Method", "methods")  # public names of the recipes' modules that make no method


@cache
def _modules() -> dict[str, str]:
    """Return the module of each recipe."""
    homes = homes_in(PACKAGE / "__init__.pyi")
    found = {name: module for name, (module, _) in homes.items() if module.startswith("specbeam.recipes.")}
    return {name: module for name, module in found.items() if name not in _NO_RECIPES}


def method_names() -> list[str]:
    """Return the names of all recipes."""
    return [*_modules()]


def setting_names(method: str) -> tuple[str, ...]:
    """Return the names of a recipe's settings. Raises `BadSetting` if there is no such recipe."""
    return tuple(_zeros(method))


@cache
def _zeros(method: str) -> dict[str, Any]:
    """Return a value of the type of each of a recipe's settings that is a number or a truth value; None for others."""
    modules = _modules()
    if method not in modules:
        raise BadSetting(f"there is no method {method!r}{hint(method, modules)}; choose one of {', '.join(modules)}")
    file = PACKAGE.joinpath(*modules[method].split(".")[1:]).with_suffix(".py")
    for line in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.FunctionDef) and line.name == method:
            given = (*line.args.args, *line.args.kwonlyargs)
            return {one.arg: _ZEROS.get(ast.unparse(one.annotation) if one.annotation else "") for one in given}
    raise AssertionError(f"{file} does not define {method}")


def settings_in(method: str, settings: Sequence[str]) -> dict[str, str]:
    """Return the values in NAME=VALUE texts, by name.

    Raises `BadSetting` for an unknown method or setting, and for a missing value or one of another type.
    """
    known = _zeros(method)
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise BadSetting(f"the setting {setting!r} has no value; write NAME=VALUE")
        if name not in known:
            raise BadSetting(
                f"{method} has no setting {name!r}{hint(name, known)}; it has {', '.join(known) or 'none'}"
            )
        if known[name] is not None:
            read_value(name, value, known[name])
        found[name] = value
    return found


def setting_meant(name: str, preferred: Sequence[str] = ("dsbd",)) -> tuple[str, str]:
    """Return a method and its setting of this name, or of this name elsewhere; ("", "") if no method has it.

    Args:
        preferred: methods that come first.
    """
    setting = SETTINGS_ELSEWHERE.get(name, name)
    for method in (*preferred, *method_names()):
        if setting in setting_names(method):
            return method, setting
    return "", ""


def usual_name(has_draft: bool) -> str:
    """Return the name of a pair's default recipe: `dsbd` with a draft, otherwise the recipe with the same law."""
    return "dsbd" if has_draft else "beam_sampling"


def check_settings(method: str, settings: Sequence[str]) -> None:
    """Raise `BadSetting` for an unknown method, or a setting that it has not; see `settings_in`.

    Args:
        method: "": the default method of a pair, `dsbd` or `beam_sampling`.
    """
    for setting in settings:
        name = setting.partition("=")[0]
        is_only_without_drafts = name in setting_names("beam_sampling") and name not in setting_names("dsbd")
        usual = "beam_sampling" if is_only_without_drafts else "dsbd"
        settings_in(method or usual, [setting])


def read_value(key: str, value: str, default: Any) -> Any:
    """Return the value of the setting `key`, read as the type of `default`.

    Tuples have commas between their values, and may have brackets around them. Without a default, digits are an integer and
    anything else is text. Raises `BadSetting` for a value of another type.
    """
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise BadSetting(f"{key} is {value!r}; it must be true or false")
        return value.lower() == "true"
    if isinstance(default, tuple) and default:
        parts = value.strip("()[]").removesuffix(",").split(",")
        return tuple(read_value(key, part, default[0]) for part in parts)
    if isinstance(default, (int, float)):
        try:
            return type(default)(value)
        except ValueError as error:
            raise BadSetting(
                f"{key} is {value!r}; it must be {'an integer' if isinstance(default, int) else 'a number'}"
            ) from error
    return int(value) if value.isdigit() else value
