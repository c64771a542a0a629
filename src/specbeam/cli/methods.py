"""`specbeam methods`: the catalogue."""

import inspect
import json as json_format

from specbeam.recipes.catalogue import methods, resolve
from specbeam.recipes.method import Recipe


def run(name: str | None, json: bool) -> int:
    if name is not None:
        resolve(name)  # refuses an unknown name
    listed = [one for one in methods() if name in (None, one.name)]
    if json:
        for one in listed:
            print(json_format.dumps(_record(one), ensure_ascii=False))
    elif name is not None:
        _explain(listed[0])
    else:
        _table(listed)
    return 0


def _record(one: Recipe) -> dict[str, object]:
    return {
        "name": one.name,
        "law": one.law,
        "exact": one.exact,
        "lossless": one.lossless,
        "paper": one.paper,
        "needs": one.needs,
        "defaults": one.defaults,
    }


def _explain(one: Recipe) -> None:
    defaults = ", ".join(f"{key}={value!r}" for key, value in one.defaults.items())
    print(f"{one.name}({defaults})\n\n{inspect.cleandoc(one.make.__doc__ or '')}")


def _table(listed: list[Recipe]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "output law", "needs", "paper", box=None, pad_edge=False)
    for one in listed:
        table.add_row(one.name, one.law, one.needs, one.paper)
    Console().print(table)
    print("\n`specbeam methods NAME` explains one.")
