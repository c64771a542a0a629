"""The options of `specbeam serve`, by the names of `ServerConfig`; what is not given is left to the configuration."""

from inspect import Parameter
from typing import Annotated, Any

import typer

from specbeam.doors.cli.options import Draft, KeysAndValues, QuantizeTarget, Settings, TensorParallel

Text = str | None
Number = int | None
Amount = float | None
Texts = list[str]


def option(kind: Any, help: str, *flags: str) -> Any:
    """Return the type of an option for typer.

    Args:
        flags: how it is written, if not like its name.
    """
    return Annotated[kind, typer.Option(*flags, help=help)]


MODELS = {
    "model": option(Text, "Target model: a path, a hub id, or 'bundled', the default.", "--model", "-m"),
    "draft": Draft,
    "quantize": QuantizeTarget,
    "kv": KeysAndValues,
    "tensor_parallel": TensorParallel,
    "name": option(Text, "Name of the model for requests; by default that of --model."),
    "chat_template": option(Text, "A file with a chat template, if the model has none."),
}
METHODS = {
    "method": option(
        Text,
        "Method of requests that name none; 'auto' measures the fastest exact one at start. By default dsbd, or "
        "beam_sampling without a draft model.",
    ),
    "settings": Settings,
    "methods": option(Text, "Methods that requests may name, separated by commas; by default all."),
    "default_beams": option(Number, "Beams of a search that is asked for without a width; by default 4."),
    "warm_up": option(
        bool,
        "Be ready at once: let the first requests of each kind wait until their loops are compiled.",
        "--no-warm-up",
    ),
}
PLACE = {
    "host": option(Text, "Address to listen at; by default 127.0.0.1."),
    "port": option(Number, "Port to listen at; by default 8000; 0: any that is free."),
    "allowed_hosts": option(
        Texts, "A name by which a server on this machine alone may be called; may be repeated.", "--allowed-host"
    ),
    "cors_origins": option(Texts, "An origin whose pages may call the server; may be repeated.", "--cors-origin"),
}
KEYS = {
    "api_key_file": option(
        Text, "A file with the keys of clients, a line each: name key [weight] [max_running] [priority]."
    ),
    "api_keys": option(
        Texts,
        "A key that clients must have; may be given more than once. Others on this machine may see it.",
        "--api-key",
    ),
    "metrics_key": option(Text, "The key for /metrics; by default they are for this machine, or for any key."),
    "no_auth": option(bool, "Let everybody in though others than this machine can reach the server.", "--no-auth"),
}
LIMITS = {
    "max_running": option(Number, "Texts decoded side by side; by default 8."),
    "max_running_per_key": option(Number, "Texts of one key decoded side by side; by default as many as of all."),
    "max_waiting": option(Number, "Texts that may wait besides; by default 64."),
    "max_tokens": option(Number, "Most new tokens of a text; by default 4096."),
    "max_model_len": option(Number, "Most tokens of prompt and text together; by default the model's positions."),
    "max_beams": option(Number, "Most beams of a request; by default 16."),
    "max_n": option(Number, "Most answers to a prompt; by default 16."),
    "max_prompts": option(Number, "Most prompts of a request; by default 64."),
    "max_texts": option(Number, "Most beams of a request, those of all prompts and answers; by default 256."),
    "max_body": option(Number, "Most bytes of a request; by default 1 MiB."),
    "max_audio_body": option(Number, "Most bytes of a request about audio; by default 25 MiB."),
    "max_audio_seconds": option(Amount, "Most seconds of audio of a request; by default 600."),
    "max_audio_at_once": option(Number, "Requests about audio transcribed side by side; by default 2."),
    "max_schema": option(Number, "Most characters of a JSON schema; by default 65,536."),
    "max_regex": option(Number, "Most characters of a regular expression; by default 4,096."),
    "max_grammar": option(Number, "Most characters of a grammar; by default 65,536."),
}
TIMES = {
    "queue_timeout": option(Amount, "Seconds for which a request may wait for a place; by default 60."),
    "request_timeout": option(Amount, "Seconds that a request may take; by default 300."),
    "reader_timeout": option(Amount, "Seconds for which a client may leave a stream unread; by default 60."),
    "compile_timeout": option(Amount, "Seconds for which a form may be compiled; by default 2."),
    "drain_timeout": option(Amount, "Seconds that texts may take to end after a signal; by default 30."),
    "stall_timeout": option(Amount, "Seconds without a step after which the process ends; by default 120."),
}
MEMORY = {
    "kv_gb": option(Amount, "Memory in GB for keys and values; by default half of what is free at start."),
    "chunk": option(Number, "Tokens of a prompt that are stored between turns of others; by default 64."),
    "prefix_cache_mb": option(
        Number, "Memory in MiB for beginnings of prompts that come again; by default 256; 0: none."
    ),
    "prefix_cache_shared": option(
        bool, "Let keys share these beginnings, so that times tell one what another asked.", "--prefix-cache-shared"
    ),
    "log_texts": option(bool, "Write prompts and texts into the log.", "--log-texts"),
}
SERVER_OPTIONS = {**MODELS, **METHODS, **PLACE, **KEYS, **LIMITS, **TIMES, **MEMORY}


def server_parameters() -> list[Parameter]:
    """Return the options as parameters of a command; by default nothing is given."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=_nothing_of(kind), annotation=kind)
        for name, kind in SERVER_OPTIONS.items()
    ]


def _nothing_of(kind: Any) -> Any:
    nothing: dict[Any, Any] = {Texts: [], bool: False}
    return nothing.get(kind.__origin__)


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was given, by the names of `ServerConfig`.

    Args:
        options: values of `server_parameters`, by name.
    """
    given = {name: value for name, value in options.items() if not (value is None or value is False or value == [])}
    if "methods" in given:
        given["methods"] = [name.strip() for name in given["methods"].split(",")]
    if given.pop("warm_up", False):
        given["warm_up"] = False
    return given
