"""The options of `specbeam serve`, by the names of `ServerConfig`. Missing ones are left to the configuration file."""

from inspect import Parameter
from typing import Annotated, Any

import typer

from specbeam.doors.cli.arguments import parameter
from specbeam.doors.cli.options import (
    Compute,
    Draft,
    DraftVocab,
    KeysAndValues,
    QuantizeDraft,
    QuantizeTarget,
    Settings,
    TensorParallel,
    Threads,
)

Text = str | None
Number = int | None
Amount = float | None
Texts = list[str]
NOT_SET: dict[Any, Any] = {Texts: [], bool: False}  # by type; None for all others


def option(kind: Any, help: str, *flags: str) -> Any:
    """Return the type of an option for typer.

    Args:
        flags: the flags; none: the name of the option.
    """
    return Annotated[kind, typer.Option(*flags, help=help)]


MODELS = {
    "model": option(Text, "Target model: a path, a hub id, or 'bundled', the default.", "--model", "-m"),
    "draft": Draft,
    "quantize": QuantizeTarget,
    "quantize_draft": QuantizeDraft,
    "draft_vocab": DraftVocab,
    "kv": KeysAndValues,
    "compute": Compute,
    "engine": option(
        Text,
        "Engine of the models: 'gpu', 'compiled', 'plain' or 'layers'; by default the fastest that fits (docs/models.md).",
    ),
    "threads": Threads,
    "tensor_parallel": TensorParallel,
    "name": option(Text, "Name of the model in requests; by default that of --model."),
    "chat_template": option(Text, "File with a chat template, for a model without one."),
}
METHODS = {
    "method": option(
        Text,
        "Default method; 'auto' measures the fastest exact method at start. By default dsbd, or beam_sampling without a "
        "draft model.",
    ),
    "settings": Settings,
    "methods": option(Text, "Methods that requests may choose, separated by commas; by default all."),
    "catalogues": option(
        Texts,
        "File of items to which a request may confine its answers, by the file's name without suffix. May be given several "
        "times.",
        "--catalogue",
    ),
    "default_beams": option(Number, "Number of beams of searches without num_beams; by default 4."),
    "warm_up": option(
        bool,
        "Skip the warm-up at start: the first request of each kind then waits for compilation.",
        "--no-warm-up",
    ),
}
PLACE = {
    "host": option(Text, "Address to listen on; by default 127.0.0.1."),
    "port": option(Number, "Port to listen on; by default 8000; 0: any free port."),
    "allowed_hosts": option(
        Texts,
        "Further host name accepted in requests, if the server listens on this machine only. May be given several times.",
        "--allowed-host",
    ),
    "cors_origins": option(
        Texts, "Origin of web pages that may call the server. May be given several times.", "--cors-origin"
    ),
    "tls_cert": option(Text, "PEM file with the certificate chain, for HTTPS."),
    "tls_key": option(Text, "PEM file with the private key of --tls-cert, without a passphrase."),
}
KEYS = {
    "api_key_file": option(
        Text, "File of API keys: on each line a name, a key and, optionally, weight, max_running and priority."
    ),
    "api_keys": option(
        Texts,
        "API key of clients. May be given several times. Other users of this machine can see it.",
        "--api-key",
    ),
    "metrics_key": option(
        Text, "Key for /metrics; by default, requests from this machine or with any API key are accepted."
    ),
    "open_metrics": option(bool, "Serve /metrics to everybody, for collectors that send no key.", "--open-metrics"),
    "no_auth": option(bool, "Accept requests from other machines without API keys.", "--no-auth"),
}
LIMITS = {
    "max_running": option(Number, "Maximum number of texts decoded together; by default 8."),
    "max_running_per_key": option(
        Number,
        "Maximum number of texts of an API key decoded together; by default --max-running, or the key's part of it by "
        "weight among the keys in use.",
    ),
    "max_waiting": option(Number, "Maximum number of waiting texts; by default 64."),
    "max_connections": option(Number, "Maximum number of open connections; by default 4096."),
    "max_connections_per_address": option(
        Number, "Maximum number of open connections of an address, or of a proxy; by default 1024."
    ),
    "max_tokens": option(Number, "Maximum number of new tokens per text; by default 4096."),
    "max_model_len": option(
        Number, "Maximum number of tokens of prompt and text together; by default the model's positions."
    ),
    "max_beams": option(Number, "Maximum number of beams per text; by default 16."),
    "max_n": option(Number, "Maximum number of answers per prompt; by default 16."),
    "max_prompts": option(Number, "Maximum number of prompts per request; by default 64."),
    "max_texts": option(Number, "Maximum number of beams per request, over all prompts and answers; by default 256."),
    "max_body": option(Number, "Maximum size of a request in bytes; by default 1 MiB."),
    "max_audio_body": option(Number, "Maximum size of a request with audio in bytes; by default 25 MiB."),
    "max_audio_seconds": option(Amount, "Maximum length of audio in seconds; by default 600."),
    "max_audio_at_once": option(Number, "Maximum number of requests transcribed together; by default 2."),
    "max_schema": option(Number, "Maximum length of a JSON schema in characters; by default 65,536."),
    "max_regex": option(Number, "Maximum length of a regular expression in characters; by default 4,096."),
    "max_grammar": option(Number, "Maximum length of a grammar in characters; by default 65,536."),
}
TIMES = {
    "header_timeout": option(Amount, "Maximum time for the head of a request in seconds; by default 10."),
    "queue_timeout": option(Amount, "Maximum waiting time of a request in seconds; by default 60."),
    "request_timeout": option(Amount, "Maximum total time of a request in seconds; by default 300."),
    "reader_timeout": option(
        Amount, "Seconds after which a stream that the client does not read is ended; by default 60."
    ),
    "compile_timeout": option(
        Amount, "Maximum time in seconds to compile a schema, expression or grammar; by default 2."
    ),
    "drain_timeout": option(Amount, "Seconds for running requests to finish at shutdown; by default 30."),
    "stall_timeout": option(Amount, "Seconds without progress after which the process exits; by default 120."),
}
MEMORY = {
    "kv_gb": option(Amount, "Memory for KV caches in GB; by default half of the free memory at start."),
    "chunk": option(Number, "Tokens of a prompt computed between two turns of other requests; by default 64."),
    "prefix_cache_mb": option(
        Number, "Memory in MiB for cached beginnings of prompts; by default 256; 0: no prefix cache."
    ),
    "prefix_cache_shared": option(
        bool,
        "Share the prefix cache between API keys; response times then reveal prompts of other keys.",
        "--prefix-cache-shared",
    ),
    "log_level": option(Text, "Lowest level in the log: debug, info (default), warning or error."),
    "log_texts": option(bool, "Log prompts and texts.", "--log-texts"),
}
SERVER_OPTIONS = {**MODELS, **METHODS, **PLACE, **KEYS, **LIMITS, **TIMES, **MEMORY}


def server_parameters() -> list[Parameter]:
    """Return the options as parameters of a command, by default not set."""
    return [parameter(name, kind, NOT_SET.get(kind.__origin__)) for name, kind in SERVER_OPTIONS.items()]


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set, by the names of `ServerConfig`.

    Args:
        options: values of `server_parameters`, by name.
    """
    given = {name: value for name, value in options.items() if not (value is None or value is False or value == [])}
    if "methods" in given:
        given["methods"] = [name.strip() for name in given["methods"].split(",")]
    if given.pop("warm_up", False):
        given["warm_up"] = False
    return given
