"""The command `specbeam heads inspect`: the kind of a draft head, its reading, and its fit to the target."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import complain, print_json, quiet_load
from specbeam.doors.cli.options import Engine, Json, checked
from specbeam.doors.model_files import check_model
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.models.heads.head import Head
    from specbeam.models.heads.probe import Overlap, Probed
    from specbeam.models.pair import Pair


def _check_head(path: str) -> None:
    """Raise an error if there is nothing at a path. A head on the hub has an owner: OWNER/NAME."""
    if path != "mtp" and not Path(path).expanduser().exists():
        check_model(path if "/" in path else f"./{path}")


class HeadArguments(Record):
    """Arguments of the command."""

    path: Annotated[
        str,
        typer.Argument(
            help="Draft head: a folder or a hub id; 'mtp': the modules in the target's files.",
            callback=checked(_check_head),
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Target: a path, a hub id, or 'bundled'; by default the target named in the head's files.",
            callback=checked(check_model),
        ),
    ] = None
    engine: Engine = "auto"
    probe: Annotated[
        bool, typer.Option(help="Try the head under several readings of its files, on texts drawn from the target.")
    ] = True
    json: Json = False


def inspect(given: HeadArguments) -> int:
    """Show the kind of a draft head, how its files were read, and how well it fits its target."""
    path = given.path
    if path == "mtp" and given.model is None:
        raise BadSetting(f"--model is missing; give the target whose files have the modules {path}")
    from specbeam.models.heads.read import is_head, read_head

    if not is_head(path):
        raise BadSetting(f"{path} is not a draft head of a known format; docs/heads.md lists the formats")
    stated = _stated_target(path)
    pair = quiet_load(given.model or _named(stated, path), None, engine=given.engine)
    head = read_head(path, pair.target_model)
    found = _probed(head, pair) if given.probe else None
    about = _about(head, pair, stated)
    if given.json:
        print_json(about | _as_json(found))
        return 0
    _show(path, about, found)
    return 0


def _probed(head: "Head", pair: "Pair") -> "Probed":
    """Return the fit of a head to its target under several readings."""
    from specbeam.models.heads.probe import probed
    from specbeam.models.loading.tokenizers import text_starts

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows it
        return probed(head, pair.forgetful_target, text_starts(pair.target_model, pair.tokenizer, pair.target.vocab))


def _about(head: "Head", pair: "Pair", stated: str) -> dict[str, str]:
    """Return the properties of a head by name."""
    from specbeam.models.heads.exit import ExitHead, how_it_runs

    weights = sum(weight.numel() for weight in head.parameters())
    about = {
        **head.described,
        **({"made for": stated} if stated else {}),
        "tokens": _tokens(head, pair.target.vocab),
        "weights": f"{weights / 1e6:.2f} M, including weights shared with the target",
    }
    if isinstance(head, ExitHead):
        about["drafts"] = how_it_runs(head, pair.forgetful_target)
    return about


def _show(path: str, about: dict[str, str], found: "Probed | None") -> None:
    """Print the properties of a head and its fit."""
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen
    from specbeam.models.heads.probe import POOR, TOKENS, hardly_fits

    console = Screen()
    table = Table(title=path, show_header=False)
    for name, value in about.items():
        table.add_row(name, value)
    console.print(table)
    if found is not None:
        console.print(_fits(found))
        console.print(
            f"overlap of the laws of draft and target, mean over {TOKENS} tokens that the target draws at temperature 1: "
            "the share of drafts that speculative sampling accepts there. First: drafts from the target's hidden states; "
            "second: drafts one token deeper"
        )
        if found.fit.score < POOR:
            complain(hardly_fits(found.fit))


def _stated_target(path: str) -> str:
    """Return the target named in the files of a head; "" if there is none."""
    from specbeam.models.heads.files import folder_of, read_config
    from specbeam.models.heads.mtp import is_own_modules

    if is_own_modules(path):
        return ""
    config = read_config(folder_of(path))
    named = config.get("base_model_name_or_path")
    frame = config.get("speculators_config")
    if isinstance(frame, dict) and isinstance(frame.get("verifier"), dict):
        named = frame["verifier"].get("name_or_path") or named
    return str(named or "")


def _named(stated: str, path: str) -> str:
    """Return the target named in the files of a head. Raises `BadSetting` if there is none."""
    if not stated:
        raise BadSetting(f"--model is missing; give the target, which the files of {path} do not name")
    return stated


def _tokens(head: "Head", vocab: int) -> str:
    return f"all {vocab}" if head.tokens is None else f"{len(head.tokens)} of {vocab}"


def _as_json(found: "Probed | None") -> dict[str, Any]:
    if found is None:
        return {}

    def fit(one: "Overlap") -> list[float]:
        return [round(value, 4) for value in (one.first, one.second) if value is not None]

    return {
        "as stated": fit(found.documented),
        "tried": {name: fit(one) for name, one in found.tried},
        "taken": list(found.changes),
        "fit": fit(found.fit),
    }


def _fits(found: "Probed") -> Any:
    """Return the table of readings."""
    from rich.table import Table

    table = Table(title="readings, tried on texts drawn from the target")
    table.add_column("reading")
    table.add_column("overlap, first", justify="right")
    table.add_column("second", justify="right")
    stated = "as stated in its files"
    chosen = found.changes or (stated,)
    for name, fit in ((stated, found.documented), *found.tried):
        mark = " (chosen)" if name in chosen else ""
        table.add_row(name + mark, *_numbers(fit))
    if len(found.changes) > 1:
        table.add_row("all chosen together", *_numbers(found.fit))
    return table


def _numbers(fit: "Overlap") -> list[str]:
    return [f"{value:.3f}" for value in (fit.first, fit.second) if value is not None]
