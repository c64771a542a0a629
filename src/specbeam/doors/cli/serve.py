"""The command `specbeam serve`: an HTTP server for many clients."""

from pathlib import Path
from typing import Any

from specbeam.errors import MissingPackage


def run(config: Path | None, given: dict[str, Any]) -> int:
    """Serve until a signal ends it, and return the exit code.

    Args:
        config: a YAML file with the names of `ServerConfig`.
        given: what was given on the command line; None: was not.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"serve needs {error.name}: pip install fastapi uvicorn prometheus-client") from error
    from specbeam.apps.serve.config import read_config
    from specbeam.apps.serve.run import serve

    return serve(read_config(config, given))
