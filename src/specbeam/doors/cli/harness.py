"""The command `specbeam evaluate harness`: lm-evaluation-harness, which knows the model "specbeam" besides its own."""

import sys
from importlib import import_module

from specbeam.errors import MissingPackage


def run(arguments: list[str]) -> int:
    """Run the command line of the harness with these arguments, and return the exit code."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise MissingPackage(f"the harness needs {error.name}: pip install 'lm-eval>=0.4.13'") from error
    import_module("specbeam.lab.evaluate.harness")  # it registers the model

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
    return 0
