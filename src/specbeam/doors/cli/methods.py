"""The command `specbeam methods`: the catalogue of methods."""

import inspect
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.options import Json, checked
from specbeam.doors.method_names import setting_names

if TYPE_CHECKING:
    from specbeam.recipes.method import Recipe


NARROW = 100  # columns


class MethodsArguments(Record):
    """Arguments of the command."""

    name: Annotated[
        str | None, typer.Argument(help="Name of a method to explain.", callback=checked(setting_names))
    ] = None
    json: Json = False


def methods(given: MethodsArguments) -> int:
    """List the decoding methods with the laws of their output, or explain one of them."""
    from specbeam.recipes.catalogue import methods as recipes

    name = given.name
    listed = [recipe for recipe in recipes() if name in (None, recipe.name)]
    if given.json:
        for recipe in listed:
            print_json(_record(recipe))
    elif name is not None:
        _explain(listed[0])
    else:
        _print_table(listed)
    return 0


def _record(recipe: "Recipe") -> dict[str, object]:
    return {
        "name": recipe.name,
        "law": recipe.law,
        "exact": recipe.exact,
        "lossless": recipe.lossless,
        "paper": recipe.paper,
        "needs": recipe.needs,
        "defaults": recipe.defaults,
    }


def _explain(recipe: "Recipe") -> None:
    defaults = ", ".join(f"{key}={value!r}" for key, value in recipe.defaults.items())
    print(f"{recipe.name}({defaults})\n\n{inspect.cleandoc(recipe.make.__doc__ or '')}")


def _print_table(listed: "list[Recipe]") -> None:
    """Print a table of methods; on a narrow terminal, which would break its words, a paragraph per method."""
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    screen = Screen()
    if screen.width < NARROW:
        for recipe in listed:
            said = f"{recipe.law} Needs {recipe.needs}. Paper: {recipe.paper}"
            print(recipe.name)
            print(fill(said, screen.width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    else:
        table = Table("method", "output law", "needs", "paper", box=None, pad_edge=False)
        for recipe in listed:
            table.add_row(recipe.name, recipe.law, recipe.needs, recipe.paper)
        screen.print(table)
    print("\n`specbeam methods NAME` explains a method.")
