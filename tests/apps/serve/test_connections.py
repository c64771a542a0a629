"""Connections that send nothing, too slowly, or no more: they cost their owner, and nobody else."""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import replace

import pytest

uvicorn = pytest.importorskip("uvicorn")

from specbeam.apps.serve.config import ServerConfig  # noqa: E402
from specbeam.apps.serve.connections import GRACE_S  # noqa: E402
from specbeam.apps.serve.run import uvicorn_config  # noqa: E402
from specbeam.errors import BadSetting  # noqa: E402

CONFIG = ServerConfig(port=0, max_connections=40, max_connections_per_address=30, header_timeout=0.5)
GET = b"GET /now HTTP/1.1\r\nhost: localhost\r\n\r\n"


class App:
    """Answers /now at once, and other paths when `goes_on` is set or their client has gone."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.gone = 0
        self.waiting = 0

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/now":
            await self.wait(receive)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def wait(self, receive):
        while (await receive()).get("more_body"):
            pass
        self.waiting += 1
        leaving = asyncio.ensure_future(receive())
        while not self.goes_on.is_set() and not leaving.done():
            await asyncio.sleep(0.005)
        self.gone += leaving.done()
        leaving.cancel()


@contextlib.contextmanager
def listening(config=CONFIG):
    """A port of a server with its application."""
    app = App()
    options = uvicorn_config(app, config)
    options.lifespan = "off"
    runner = uvicorn.Server(options)
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not runner.started:
        time.sleep(0.005)
    try:
        yield runner.servers[0].sockets[0].getsockname()[1], app
    finally:
        app.goes_on.set()
        runner.should_exit = True
        thread.join()


def opened(port, sent=b""):
    one = socket.create_connection(("127.0.0.1", port), timeout=30)
    one.sendall(sent)
    return one


def read(one):
    """All that a connection sends until its end."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65536):
            found += piece
    return found


def taken(one, answers=1):
    """What a connection that stays open sends up to the end of some answers."""
    found = b""
    while found.count(b"\r\nok") < answers:
        piece = one.recv(65536)
        assert piece, found
        found += piece
    return found


def answer(port, sent=GET):
    one = opened(port, sent.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    return read(one)


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_silent_connections_give_their_places_to_requests():
    with listening(replace(CONFIG, header_timeout=60.0)) as (port, _):
        silent = [opened(port) for _ in range(100)]
        half = [opened(port, b"GET /now HT") for _ in range(100)]
        time.sleep(1.2 * GRACE_S)
        for _ in range(20):
            assert answer(port).endswith(b"ok")
        assert read(silent[0]) == b""  # the oldest are closed
        for one in silent + half:
            one.close()


def test_connections_with_requests_keep_their_places():
    with listening() as (port, app):
        asking = [
            opened(port, b"GET /later HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n") for _ in range(35)
        ]
        until(lambda: app.waiting == 35)
        silent = [opened(port) for _ in range(60)]
        assert answer(port).endswith(b"ok")
        app.goes_on.set()
        assert all(read(one).endswith(b"ok") for one in asking)
        for one in silent:
            one.close()


def test_a_head_that_does_not_arrive_in_time_ends_its_connection():
    with listening() as (port, _):
        began = time.monotonic()
        assert read(opened(port)) == b""
        assert read(opened(port, b"GET /now HTTP/1.1\r\nhost:")).startswith(b"HTTP/1.1 408 ")
        later = opened(port, GET)
        assert taken(later)
        later.sendall(b"GET /n")  # the second request of a connection
        assert read(later).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began > 1.4
        slow = opened(port)
        for byte in GET[:-1]:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                slow.sendall(bytes([byte]))
            time.sleep(0.02)
        assert not read(slow).endswith(b"ok")


def test_requests_on_one_connection_are_answered_in_order_and_each_has_its_time():
    with listening() as (port, _):
        one = opened(port)
        for _ in range(4):
            one.sendall(GET)
            assert taken(one)
            time.sleep(0.3)
        one.sendall(GET * 3)
        assert taken(one, 3).count(b"HTTP/1.1 200") == 3
        one.close()


@pytest.mark.parametrize("body", [b"", b"abc"])
def test_a_client_that_closes_its_own_side_only_is_answered(body):
    with listening() as (port, app):
        head = b"POST /later HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        one = opened(port, head + body)
        one.shutdown(socket.SHUT_WR)
        until(lambda: app.waiting == 1)
        time.sleep(0.2)
        app.goes_on.set()
        found = read(one)
        assert found.count(b"HTTP/1.1 ") == found.count(b"HTTP/1.1 100 ") + 1
        assert found.endswith(b"ok")
        assert app.gone == 0


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_has_gone_is_noticed_while_it_waits(version):
    with listening() as (port, app):
        for number in range(1, 4):
            one = opened(port, b"GET /later HTTP/%s\r\nhost: localhost\r\n\r\n" % version)
            until(lambda number=number: app.waiting == number)
            one.close()
            until(lambda number=number: app.gone == number)


def test_half_a_body_is_not_waited_for():
    with listening() as (port, app):
        one = opened(port, b"POST /later HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nabc")
        one.shutdown(socket.SHUT_WR)
        assert read(one) in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        until(lambda: app.waiting == 1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
               "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_a_server_with_a_certificate_speaks_https(certificate):
    cert, key = certificate
    with listening(replace(CONFIG, tls_cert=cert, tls_key=key)) as (port, _):
        context = ssl.create_default_context(cafile=cert)
        with context.wrap_socket(opened(port), server_hostname="localhost") as one:
            one.sendall(GET)
            assert taken(one)


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_is_loaded(certificate, tmp_path):
    from specbeam.apps.serve.run import serve

    cert, key = certificate
    for given in ({"tls_cert": str(tmp_path / "none")}, {"tls_cert": key, "tls_key": cert}):
        with pytest.raises(BadSetting, match="tls_cert"):
            serve(ServerConfig(model="no/folder/is/here", **given))
    with pytest.raises(BadSetting, match="without tls_cert"):
        ServerConfig(tls_key=key)


def test_the_log_has_a_line_of_json_for_each_event(capfd):
    from specbeam.apps.serve.logs import LOG, set_up_log

    set_up_log("warning")
    LOG.info("not written")
    LOG.warning("first\nline", extra={"fields": {"id": "a", "status": 400}})
    try:
        raise ValueError("broken")
    except ValueError:
        LOG.exception("request %s failed", "a")
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["level"], first["message"], first["status"]) == ("warning", "first\nline", 400)
    assert second["level"] == "error"
    assert "ValueError: broken" in second["traceback"]
