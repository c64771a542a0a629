"""The command `specbeam serve`: an HTTP server for many clients."""

from pathlib import Path
from typing import Any

from specbeam.doors.cli.arguments import Record, group
from specbeam.doors.cli.serve_options import given_options, option, server_parameters
from specbeam.errors import MissingPackage


class ServeArguments(Record):
    """What the command is given.

    Attributes:
        config: a YAML file with the names of `ServerConfig`.
        options: what was given on the command line, by these names.
    """

    config: option(Path | None, "A YAML file with these options (docs/serve.md); what is given here goes before it.") = None  # type: ignore[valid-type]  # fmt: skip
    options: dict[str, Any] = group({one.name: one for one in server_parameters()}, given_options)


def serve(given: ServeArguments) -> int:
    """Serve OpenAI's API with beams over HTTP, and a page that shows forests."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"serve needs {error.name}: pip install fastapi uvicorn prometheus-client") from error
    from specbeam.apps.serve.config import read_config
    from specbeam.apps.serve.run import serve as serve_until_ended

    return serve_until_ended(read_config(given.config, given.options))
