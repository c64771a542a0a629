"""Commands that look at draft heads."""

from typing import Annotated

import typer

from specbeam.doors.cli.options import (
    Json,
)

heads = typer.Typer(no_args_is_help=True, help="Look at draft heads.")


@heads.callback()
def _heads() -> None:
    """Look at draft heads."""


@heads.command("inspect")
def inspect_head(
    path: Annotated[
        str, typer.Argument(help="Draft head: a folder or a hub id; 'mtp': the modules in the target's own files.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Its target: a path, a hub id, or 'bundled'; by default what its files name."
        ),
    ] = None,
    probe: Annotated[bool, typer.Option(help="Try the head on words of the target, read in different ways.")] = True,
    json: Json = False,
) -> None:
    """Show what kind of head files hold, how they were read, and how well the head fits its target."""
    from specbeam.doors.cli.heads import run_inspect

    raise typer.Exit(run_inspect(path, model, probe, json))
