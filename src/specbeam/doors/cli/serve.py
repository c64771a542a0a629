"""The command `specbeam serve`: an HTTP server for many clients."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record, group
from specbeam.doors.cli.serve_options import given_options, server_parameters
from specbeam.doors.method_names import setting_names
from specbeam.doors.model_files import check_model
from specbeam.doors.places import require_file
from specbeam.errors import MissingPackage


class ServeArguments(Record):
    """Arguments of the command.

    Attributes:
        config: a YAML file with the names of `ServerConfig`.
        options: the options of the command line, by the same names.
    """

    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with these options (docs/serve_operator.md); the command line takes precedence."),
    ] = None
    options: dict[str, Any] = group(server_parameters(), given_options)


def serve(given: ServeArguments) -> int:
    """Start an HTTP server with OpenAI's API, beams, and a page that shows drafts."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"serve needs {error.name}: pip install fastapi uvicorn prometheus-client") from error
    from specbeam.apps.serve.config import read_config

    config = read_config(given.config, given.options)
    check_model(config.model)
    for name in (config.method, *config.methods):
        if name not in ("", "auto"):
            setting_names(name)
    if config.chat_template:
        require_file(Path(config.chat_template).expanduser(), "give a file with a chat template")
    from specbeam.apps.serve.run import serve as serve_until_ended

    return serve_until_ended(config)
