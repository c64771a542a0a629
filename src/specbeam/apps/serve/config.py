"""The configuration of the server: defaults, checks and file."""

import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

from specbeam.doors import hint
from specbeam.errors import BadSetting, MissingFile

# pydantic-settings would read every variable SPECBEAM_*, some of which are not the server's, and its errors name none of the
# three places where a setting may come from. Types and bounds of a dataclass need no package on the command line.
MIB = 2**20


@dataclass(frozen=True)
class ServerConfig:
    """The operator's settings. A configuration file uses the same names; the command line overrides it.

    Args:
        model, draft: see `specbeam.load`.
        quantize, quantize_draft, draft_vocab, kv, compute, engine: see `specbeam.load`.
        threads: number of CPU threads; 0: torch's choice.
        name: name of the model in requests; "": `model`.
        method, settings: method of requests that do not choose one, and its settings as NAME=VALUE; "": `dsbd`, or
            `beam_sampling` without a draft, with at least as many beams as answers are asked for. "auto": the fastest,
            measured at start.
        methods: the methods that requests may choose; empty: all.
        catalogues: files of items (`specbeam.catalogue`); a request names one by its file's name without the suffix.
        host, port: address to listen on.
        api_keys: accepted API keys; empty: no key is needed. By default from the environment variable
            SPECBEAM_API_KEYS, separated by commas.
        api_key_file: a file with a key per line: name, key, weight, max_running, smallest priority; the last three are
            optional.
        no_auth: allow a server without keys that other machines can reach.
        metrics_key: key for /metrics; "": /metrics answers this machine, and clients with an API key.
        open_metrics: whether /metrics needs no key, for collectors that send none. It has no texts and no names of keys.
        allowed_hosts: further host names accepted in requests, if the server listens on this machine only.
        cors_origins: origins whose pages may call the server.
        tls_cert, tls_key: PEM files with the certificate chain and the private key; "": HTTP without TLS.
        max_connections, max_connections_per_address: maximum numbers of open connections. Further ones take the places of
            the oldest without a request.
        header_timeout: seconds in which the head of a request must arrive.
        log_level: "debug", "info", "warning" or "error".
        max_running, max_waiting: maximum numbers of texts decoded at the same time, and waiting.
        max_running_per_key: maximum number of texts of a key decoded at the same time; 0: `max_running`; if there
            are several keys, the key's part of it by weight among those in use.
        queue_timeout: seconds that a request may wait for its start.
        request_timeout: seconds from the arrival of a request to its end.
        drain_timeout: seconds that running requests get to finish when the server shuts down.
        reader_timeout: seconds after which a client that does not read its stream is disconnected.
        stall_timeout: seconds without a step after which the engine counts as dead, and the process ends. Compiling a step
            takes time, too.
        warm_up: whether usual requests are compiled and timed before the server is ready.
        max_tokens: maximum number of new tokens of a text.
        max_model_len: maximum number of tokens of prompt and text together; 0: the number of positions of the models.
        max_beams, max_n, max_prompts: maximum numbers of beams, answers per prompt, and prompts of a request.
        max_texts: maximum number of beams of a request, summed over its prompts and answers.
        max_body: maximum number of bytes of a request.
        max_audio_body, max_audio_seconds: maximum number of bytes and seconds of the audio of a request.
        max_audio_at_once: maximum number of audio requests transcribed at the same time.
        max_schema, max_regex, max_grammar: maximum number of characters of a constraint.
        compile_timeout: maximum number of seconds to compile a constraint.
        kv_gb: memory for the KV cache in GB; 0: half of the free memory at start.
        prefix_cache_mb: memory of the prefix cache in MiB; 0: no prefix cache.
        prefix_cache_shared: whether API keys share the prefix cache; response times then reveal prompts of other keys.
        chunk: number of prompt tokens stored between the turns of other requests.
        default_beams: number of beams of a beam search that names none.
        chat_template: a file with a Jinja chat template.
        log_texts: whether prompts and answers are logged.
        tensor_parallel: whether the target is spread over the processes that torchrun has started.
    """

    model: str = "bundled"
    draft: str | None = None
    quantize: str | None = None
    quantize_draft: str | None = None
    draft_vocab: int | None = None
    kv: str | None = None
    compute: str | None = None
    engine: str = "auto"
    threads: int = 0
    name: str = ""
    method: str = ""
    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    catalogues: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""
    no_auth: bool = False
    metrics_key: str = field(default="", repr=False)
    open_metrics: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    header_timeout: float = 10.0
    log_level: str = "info"
    max_running: int = 8
    max_waiting: int = 64
    max_running_per_key: int = 0
    queue_timeout: float = 60.0
    request_timeout: float = 300.0
    drain_timeout: float = 30.0
    reader_timeout: float = 60.0
    stall_timeout: float = 120.0
    warm_up: bool = True
    max_tokens: int = 4096
    max_model_len: int = 0
    max_beams: int = 16
    max_n: int = 16
    max_prompts: int = 64
    max_texts: int = 256
    max_body: int = MIB
    max_audio_body: int = 25 * MIB
    max_audio_seconds: float = 600.0
    max_audio_at_once: int = 2
    max_schema: int = 65536
    max_regex: int = 4096
    max_grammar: int = 65536
    compile_timeout: float = 2.0
    kv_gb: float = 0.0
    prefix_cache_mb: int = 256
    prefix_cache_shared: bool = False
    chunk: int = 64
    default_beams: int = 4
    chat_template: str = ""
    log_texts: bool = False
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel and self.prefix_cache_mb:
            raise BadSetting(
                "tensor_parallel does not support the prefix cache, which would be spread over the ranks; give "
                "--prefix-cache-mb 0"
            )
        for one in fields(self):
            value = getattr(self, one.name)
            expected = _EXPECTED.get(one.type)
            if expected is not None and (not isinstance(value, expected) or _is_misplaced_bool(value, expected)):
                kind = "a list" if expected == (tuple,) else f"of type {expected[0].__name__}"
                raise BadSetting(f"{one.name} is {value!r}; it must be {kind}")
            if expected == (tuple,) and not all(isinstance(part, str) for part in value):
                raise BadSetting(f"{one.name} is {[*value]!r}; all of its values must be texts: put quotes around them")
        if not all(key.strip() for key in self.api_keys):
            raise BadSetting(
                "api_keys has an empty key, so everybody could use the server; give a key, or leave it out"
            )
        for name in (
            "max_running",
            "max_tokens",
            "max_beams",
            "max_n",
            "max_prompts",
            "max_texts",
            "chunk",
            "max_body",
            "max_audio_body",
            "max_audio_at_once",
            "max_connections",
            "max_connections_per_address",
            "default_beams",
        ):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "queue_timeout",
            "request_timeout",
            "reader_timeout",
            "compile_timeout",
            "stall_timeout",
            "max_audio_seconds",
            "header_timeout",
        ):
            if not getattr(self, name) > 0:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")
        if not 0 <= self.port <= LAST_PORT:
            raise BadSetting(f"port is {self.port}; it must be 0 (any free port) to {LAST_PORT}")
        if self.log_level not in LOG_LEVELS:
            raise BadSetting(f"log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
        if self.open_metrics and self.metrics_key:
            raise BadSetting(
                "open_metrics lets everybody read /metrics, and metrics_key only who has it; give one of them"
            )
        if self.tls_key and not self.tls_cert:
            raise BadSetting("tls_key is given without tls_cert; give the file of the certificate, too")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise BadSetting(
                    f"cors_origins has {origin!r}; give each origin as browsers send it, in lower case and without a path, "
                    "such as https://page.example or http://localhost:3000"
                )
        if not math.isfinite(self.max_audio_seconds):
            raise BadSetting(
                f"max_audio_seconds is {self.max_audio_seconds}; it must be finite, because memory grows with it"
            )
        for name in (
            "threads",
            "max_waiting",
            "max_running_per_key",
            "prefix_cache_mb",
            "kv_gb",
            "drain_timeout",
            "max_model_len",
            "max_schema",
            "max_regex",
            "max_grammar",
        ):
            if not getattr(self, name) >= 0:  # also for NaN
                raise BadSetting(f"{name} is {getattr(self, name)}; it must not be negative")
        self._check_each_has_an_effect()

    def _check_each_has_an_effect(self) -> None:
        """Raise `BadSetting` for a setting that others make useless."""
        has_keys = bool(self.api_keys or self.api_key_file)
        is_above = self.default_beams > self.max_beams and self.default_beams != ServerConfig.default_beams
        useless = {
            "settings are for a method that is named, and method is 'auto'": self.settings and self.method == "auto",
            "no_auth is for a server without API keys, and some are given": self.no_auth and has_keys,
            "allowed_hosts is for a host of this machine only": self.allowed_hosts and not self.is_local,
            "prefix_cache_shared needs API keys and a prefix cache": self.prefix_cache_shared
            and not (has_keys and self.prefix_cache_mb),
            f"default_beams is {self.default_beams}, and max_beams is {self.max_beams}": is_above,
        }
        found = [reason for reason, is_so in useless.items() if is_so]
        if found:
            raise BadSetting(f"{'; '.join(found)}; leave it out, or change the other setting")

    @property
    def is_local(self) -> bool:
        """Whether the server listens on this machine only."""
        return self.host in ("127.0.0.1", "::1", "localhost")

    def check_open(self) -> None:
        """Raise `BadSetting` if other machines could call the server without a key, unless `no_auth` allows it."""
        if not (self.is_local or self.api_keys or self.api_key_file or self.no_auth):
            raise BadSetting(
                f"host is {self.host!r}, so other machines can reach the server without a key; give --api-key-file, or "
                "--no-auth if this is intended"
            )


LAST_PORT = 65_535
LOG_LEVELS = ("debug", "info", "warning", "error")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*A-Z\s]+|null")
_EXPECTED: dict[Any, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (float, int), str: (str,), tuple[str, ...]: (tuple,),
    str | None: (str, NoneType), int | None: (int, NoneType),
}  # fmt: skip


def _is_misplaced_bool(value: object, expected: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in expected


def read_config(path: str | Path | None, given: dict[str, Any]) -> ServerConfig:
    """Return the configuration in a YAML file (None: the defaults), overridden by the given values that are not None.

    Raises:
        MissingFile: the file does not exist, or is not YAML.
        BadSetting: a name is unknown, or a value is invalid.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_file(Path(path).expanduser())
    values |= {name: value for name, value in given.items() if value is not None}
    if keys := os.environ.get("SPECBEAM_API_KEYS"):
        values.setdefault("api_keys", [key.strip() for key in keys.split(",") if key.strip()])
    known = {one.name for one in fields(ServerConfig)}
    if unknown := sorted(set(values) - known):
        named = [f"{name}{hint(name, known)}" for name in unknown]
        raise BadSetting(f"unknown settings: {', '.join(named)}; the configuration has {', '.join(sorted(known))}")
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        chosen[name] = tuple(value) if isinstance(value, list) else value
    return ServerConfig(**chosen)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        tree = yaml.compose(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MissingFile(f"could not read the configuration {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadSetting(f"{path} holds a {type(values).__name__}; it must map names to values, like 'port: 8000'")
    names = [str(key.value).replace("-", "_") for key, _ in tree.value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadSetting(f"{path} gives {', '.join(twice)} twice; leave one out")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
