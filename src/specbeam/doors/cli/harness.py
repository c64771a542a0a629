"""The command `specbeam evaluate harness`: lm-evaluation-harness with the additional model type "specbeam"."""

import sys
from importlib import import_module

import typer

from specbeam.errors import MissingPackage

AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True}  # passed on to the harness


def harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness with its own options and the additional model type specbeam.

    Example: specbeam evaluate harness run --model specbeam --tasks gsm8k
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise MissingPackage(f"the harness needs {error.name}: pip install 'specbeam[harness]'") from error
    import_module("specbeam.lab.evaluate.harness")  # registers the model type

    sys.argv = ["lm-eval", *context.args]
    cli_evaluate()
