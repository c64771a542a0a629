"""Running the server as a process: signals, watchdog, shutdown and log."""

import errno
import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from specbeam import Pair
from specbeam.apps.serve.app import BeamServer, make_app
from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.connections import Connections, GuardedConnection, most_connections
from specbeam.apps.serve.leaving import end_now
from specbeam.apps.serve.logs import CompilationLog, json_alone, set_up_log
from specbeam.doors import load_by_name, silence_transformers
from specbeam.errors import BadSetting

LOG = logging.getLogger("specbeam.serve")
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # such as IPv6 in many containers
WATCH_S = 1.0  # seconds between two checks of the engine
LAST_S = 5.0  # seconds to send the last answers before the process is ended by force
CUT_S = 5.0  # seconds after `drain_timeout` in which the engine cuts the texts that remain


class _Uvicorn(uvicorn.Server):
    """A server that drains at the first SIGINT or SIGTERM, and ends at once at the second one.

    Before it can answer, it ends at once: there are no requests, and its threads may compile for minutes.
    """

    def __init__(self, config: uvicorn.Config, server: BeamServer) -> None:
        super().__init__(config)
        self.beams = server
        self.code = 0
        self._ending: threading.Thread | None = None
        self._end_by = float("inf")  # clock time at which a server that drains ends by force

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ending is not None or sig not in (signal.SIGINT, signal.SIGTERM):
            LOG.info("shutting down at once: %d requests are cut off", len(self.beams.asking))
            end_now(self.code)
        if self.beams.state == "loading":
            LOG.info("shutting down: the server was not ready yet, so there are no requests to finish")
            end_now(0)
        drain_s = self.beams.config.drain_timeout
        LOG.info("shutting down: running requests have %g seconds to finish", drain_s)
        self._end_by = time.monotonic() + drain_s + CUT_S
        self.beams.state = "draining"
        self._ending = threading.Thread(target=self._drain, name="specbeam end", daemon=True)
        self._ending.start()

    def _drain(self) -> None:
        self.beams.drain()
        self.should_exit = True

    def watch(self) -> None:
        """End the process with an error if the engine is dead, so that a supervisor can restart it.

        It ends by force, because Python would wait for threads that wait for a hanging engine. So does a server that drains
        while its engine compiles a step or hangs.
        """
        compilation = CompilationLog(lambda: [*self.beams.asking])
        while not self.should_exit:
            time.sleep(WATCH_S)
            compilation.look(time.monotonic())
            if time.monotonic() > self._end_by:
                LOG.warning("shutting down by force: the engine was still in a step after drain_timeout")
                end_now(self.code)
            if self.beams.state == "failed" and not self.beams.has_started:
                self.code = self.beams.exit_code
                self.should_exit = True
                return
            if reason := self.beams.cause_of_death():
                LOG.error("the engine is dead: %s", reason)
                self.code = 1
                self.beams.give_up(reason)
                self.force_exit = True
                self.should_exit = True
        if self.force_exit:
            time.sleep(LAST_S)
            end_now(self.code)


def serve(config: ServerConfig) -> int:
    """Serve until a signal ends the server; return the exit code.

    Raises `BadSetting` if other machines could call the server without a key, unless `no_auth` allows it, or if it cannot
    listen.
    """
    config.check_open()
    set_up_log(config.log_level)
    if config.tensor_parallel and os.environ.get("RANK", "0") != "0":
        load_pair(config)  # follows rank 0 and does not return
    _check_tls(config)
    server = BeamServer(config, partial(load_pair, config))
    sockets = bound_sockets(config.host, config.port)  # before minutes of loading
    LOG.info("loading %s", config.model if config.draft is None else f"{config.model} with the draft {config.draft}")
    runner = _Uvicorn(uvicorn_config(make_app(server), config), server)
    threading.Thread(target=runner.watch, name="specbeam watch", daemon=True).start()
    threading.Thread(target=_say_when_ready, args=(server, runner), name="specbeam greeting", daemon=True).start()
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, lambda *_: _read_keys(server))
    with json_alone():
        runner.run(sockets)
    return runner.code


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of a host that this machine has. Raises `BadSetting` if one cannot be bound."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BadSetting(f"host is {host!r}, which is no address of this machine: {error.strerror}") from error
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(socket.socket(family, kind, protocol), address))
        except OSError as error:
            if failure is None or error.errno not in _NOT_HERE:
                failure = error
    if failure is None or (sockets and failure.errno in _NOT_HERE):
        return sockets
    for opened in sockets:
        opened.close()
    raise BadSetting(
        f"the server cannot listen at {host}:{port}: {failure.strerror}; is another server there? Give another --port or "
        "--host"
    ) from failure


def _bound(one: socket.socket, address: Any) -> socket.socket:
    """Bind a socket, and return it; close it if that fails."""
    try:
        if os.name == "posix":  # elsewhere it would share the port with others
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one.family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration for an application."""
    most = most_connections(config.max_connections)
    connections = Connections(most, min(most, config.max_connections_per_address), config.header_timeout)
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=partial(GuardedConnection, connections),
        ws="none",
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
        log_config=None,
        access_log=False,
        backlog=4096,  # a burst of connections beyond it waits for seconds, because the kernel drops it first
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        server_header=False,
    )


def load_pair(config: ServerConfig) -> Pair:
    """Return the pair of a configuration, without transformers' progress bars and messages.

    With `tensor_parallel`, all ranks but the first follow rank 0, and end with `SystemExit` when it ends.
    """
    silence_transformers()
    quantize: Any = config.quantize
    quantize_draft: Any = config.quantize_draft
    kv: Any = config.kv
    compute: Any = config.compute
    engine: Any = config.engine
    return load_by_name(
        config.model,
        config.draft,
        quantize=quantize,
        quantize_draft=quantize_draft,
        draft_vocab=config.draft_vocab,
        share_from=None,
        tensor_parallel=config.tensor_parallel,
        kv=kv,
        compute=compute,
        engine=engine,
    )


def _read_keys(server: BeamServer) -> None:
    """Reload the API keys, and log the outcome."""
    try:
        server.read_keys()
    except Exception as error:  # in the handler of a signal it would end the server
        LOG.error("the API keys were not reloaded, the old ones stay valid: %s", error)
        return
    if server.config.api_key_file:
        LOG.info("%s was read again: %s API keys are in use", server.config.api_key_file, len(server.keys.weights))
    else:
        LOG.warning("there is no file of API keys to reload")


def _say_when_ready(server: BeamServer, runner: _Uvicorn) -> None:
    """Log the address of the server as soon as it is ready; a terminal gets an example request, too."""
    while (server.state == "loading" or not runner.started) and not runner.should_exit:
        time.sleep(0.05)
    if server.state != "ready":
        return
    scheme = "https" if server.config.tls_cert else "http"
    host = server.config.host
    port = server.config.port
    for one in runner.servers:
        for listening in one.sockets:
            port = listening.getsockname()[1]
    served = server.served
    address = f"{scheme}://{host}:{port}"
    LOG.info(
        "specbeam serves %s at %s (web page and API). Default method: %s, %s.",
        served.name,
        address,
        served.method.name,
        served.method.law,
    )
    if sys.stderr is not None and sys.stderr.isatty() and not served.hears:  # in a file each line is JSON
        print(_example(server, address), file=sys.stderr, flush=True)


def _example(server: BeamServer, address: str) -> str:
    """Return a command that sends a request, with a prompt in the language of the model."""
    key = " -H 'authorization: Bearer KEY'" if server.keys.needed else ""
    prompt = "Ein Hund läuft." if server.config.model == "bundled" else "The dog runs"
    body = json.dumps({"prompt": prompt, "n": 3, "use_beam_search": True}, ensure_ascii=False)
    return f"  curl -s {address}/v1/completions -H 'content-type: application/json'{key} -d '{body}'"


def _check_tls(config: ServerConfig) -> None:
    """Raise `BadSetting` if the certificate and the key cannot be used, before a model is loaded."""
    if not config.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key or None, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise BadSetting(
            f"tls_cert {config.tls_cert!r} and tls_key {config.tls_key!r} cannot be used: {error}; give PEM files, the key "
            "without a passphrase, and --tls-key unless the file of the certificate holds the key"
        ) from error
