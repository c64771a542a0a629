"""The command `specbeam serve`: an HTTP server for many clients."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record, group
from specbeam.doors.cli.common import method_from, require_items
from specbeam.doors.cli.options import use_threads
from specbeam.doors.cli.serve_options import given_options, server_parameters
from specbeam.doors.method_names import setting_names, usual_name
from specbeam.doors.model_files import check_model, require_place_of_model
from specbeam.doors.places import require_file
from specbeam.engines.choices import check_is_model, check_kv, check_rounding, check_what_runs
from specbeam.errors import BadSetting, MissingPackage

if TYPE_CHECKING:
    from specbeam.apps.serve.config import ServerConfig


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
    from specbeam.apps.serve.leaving import ended_by_signals

    with ended_by_signals():
        return _serve(given)


def _serve(given: ServeArguments) -> int:
    """Check the options, and serve until a signal ends the server."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"serve needs {error.name}: pip install 'specbeam[serve]'") from error
    from specbeam.apps.serve.config import read_config

    config = read_config(given.config, given.options)
    if config.threads:
        use_threads(config.threads)
    _check_models(config)
    _check_files(config)
    for name in (config.method, *config.methods):
        if name not in ("", "auto") and not (name == "best_first" and name in config.methods):
            setting_names(name)
    if config.method != "auto":
        has_draft = config.draft is not None or config.model == "bundled"
        default = config.method or usual_name(has_draft)
        if config.methods and default not in config.methods:
            offered = ", ".join(config.methods)
            raise BadSetting(
                f"requests without a method get {default}, and methods is {offered}; give --method one of these"
            )
        method_from(default, config.settings)
    from specbeam.apps.serve.run import serve as serve_until_ended

    return serve_until_ended(config)


def _check_models(config: "ServerConfig") -> None:
    """Raise an error for a wrong option of `specbeam.load`, from the command line or the configuration file."""
    check_model(config.model)
    check_is_model(config.draft)
    if config.draft is not None:
        require_place_of_model(config.draft)
    check_rounding(config.quantize, "quantize")
    check_rounding(config.quantize_draft, "quantize_draft")
    check_kv(config.kv)
    check_what_runs(config.engine, config.compute, config.quantize, False, None, config.tensor_parallel)


def _check_files(config: "ServerConfig") -> None:
    """Raise `MissingFile` for a file that is missing."""
    wanted = {
        config.chat_template: "give a file with a chat template",
        config.api_key_file: "give a file of API keys",
        config.tls_cert: "give the PEM file of the certificate chain",
        config.tls_key: "give the PEM file of the private key",
    }
    for name, advice in wanted.items():
        if name:
            require_file(Path(name).expanduser(), advice)
    for name in config.catalogues:
        require_items(Path(name).expanduser())
