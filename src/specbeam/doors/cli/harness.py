"""The command `specbeam evaluate harness`: lm-evaluation-harness, which knows the model "specbeam" besides its own."""

import sys
from importlib import import_module

import typer

from specbeam.errors import MissingPackage

AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True}  # all arguments are the harness's


def harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness by its own options, with one model more: run --model specbeam --tasks ..."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise MissingPackage(f"the harness needs {error.name}: pip install 'lm-eval>=0.4.13'") from error
    import_module("specbeam.lab.evaluate.harness")  # it registers the model

    sys.argv = ["lm-eval", *context.args]
    cli_evaluate()
