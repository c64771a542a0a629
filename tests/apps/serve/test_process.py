"""The server as a process of its own: signals, and what it says."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specbeam.errors import BadSetting
from specbeam.models.pair import BUNDLED

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from specbeam.apps.serve.run import bound_sockets  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout"),
]
BODY = {"prompt": "Ein Hund läuft durch den Wald.", "seed": 7, "num_beams": 4, "max_tokens": 60}


HANGS = """
import sys, threading, time
import specbeam as sb
from specbeam.apps.serve import run
from specbeam.apps.serve.config import ServerConfig

start = run.BeamServer.start

def start_and_hang(server):
    start(server)
    waiting = server.engine.call(lambda: time.sleep(3600))  # as a step that never ends
    server.pool.submit(waiting.result)
    server.pool.submit(threading.Event().wait)  # a thread that nobody can wake up

run.BeamServer.start = start_and_hang
run.LAST_S = 1.0
sys.exit(run.serve(ServerConfig(port=0, warm_up=False, stall_timeout=1.0)))
"""


def test_a_server_whose_engine_hangs_ends_with_an_error_for_its_supervisor():
    process = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 1, process.stderr
    assert "the engine is dead" in process.stderr


DRAINS = HANGS.replace("waiting.result)", "os.kill, os.getpid(), signal.SIGTERM)").replace(
    "import sys", "import os, signal, sys"
)
DRAINS = DRAINS.replace("stall_timeout=1.0", "drain_timeout=0.5").replace("run.LAST_S", "run.CUT_S")


def test_a_signal_ends_a_server_within_its_time_although_a_step_hangs():
    process = subprocess.run([sys.executable, "-c", DRAINS], capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode == 0, process.stderr
    assert "shutting down by force" in process.stderr


TWICE = DRAINS.replace("drain_timeout=0.5", "drain_timeout=600").replace(
    "os.kill, os.getpid(), signal.SIGTERM)",
    "lambda: [(os.kill(os.getpid(), signal.SIGTERM), time.sleep(1)) for _ in range(2)])",
)


def test_a_second_signal_ends_a_server_at_once_and_is_no_error():
    process = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    assert "shutting down at once: 0 requests are cut off" in process.stderr
    assert "Traceback" not in process.stderr


def children_of(process):
    """The processes that any thread of this one has started."""
    found = []
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        found += (thread / "children").read_text().split()
    return [int(one) for one in found]


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_server_that_compiles_at_once_and_the_processes_that_compile_for_it(number, tmp_path):
    environment = os.environ | {"SPECBEAM_CACHE": str(tmp_path), "SPECBEAM_COMPILERS": "2"}
    environment.pop("NUMBA_CACHE_DIR", None)  # of the tests, with their compiled steps
    command = [sys.executable, "-m", "specbeam", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while "compiling for this processor, once" not in process.stderr.readline():
            assert process.poll() is None
        workers = children_of(process)
        assert workers != []
        process.send_signal(number)
        _, log = process.communicate(timeout=30)  # compiling takes minutes
        assert process.returncode == 0, log
        assert "the server was not ready yet" in log
        end = time.monotonic() + 30
        while any(map(is_alive, workers)):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no/folder/is/here"], "there is no folder no/folder/is/here"),
        (["--max-running", "100000000"], "not enough memory to decode max_running=100000000"),
        (["--port", "-1"], "port is -1; it must be 0 (any free port) to 65535"),
        (["--port", "70000"], "port is 70000"),
        (["--host", "203.0.113.7", "--no-auth"], "the server cannot listen at 203.0.113.7:8000"),
        (["--host", "nowhere.invalid", "--no-auth"], "host is 'nowhere.invalid', which is no address of this machine"),
        (["--set", "beams=0"], "beams is 0"),
    ],
)
def test_a_server_that_cannot_start_ends_with_one_sentence(options, message):
    command = [sys.executable, "-m", "specbeam", "serve", *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert process.returncode != 0
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stderr.count("\n") <= 2


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadSetting, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            bound_sockets("127.0.0.1", port)
    for host in ("", "localhost", "127.0.0.1"):
        sockets = bound_sockets(host, 0)
        assert sockets
        for one in sockets:
            one.close()


FAMILIES = ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))


@pytest.mark.parametrize("where", ["socket", "bind"])
def test_a_machine_without_ipv6_listens_at_its_other_addresses(where, monkeypatch):
    """As in many containers, whose names still have an address of IPv6."""
    real = socket.socket

    class Without(real):
        def __init__(self, family, *given):
            if where == "socket" and family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *given)

        def bind(self, address):
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    addresses = [(family, socket.SOCK_STREAM, 6, "", (host, 0)) for family, host in FAMILIES]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: addresses)
    monkeypatch.setattr(socket, "socket", Without)
    (one,) = bound_sockets("localhost", 0)
    assert one.family == socket.AF_INET
    one.close()
    addresses.pop()
    with pytest.raises(BadSetting, match="the server cannot listen at localhost:0"):
        bound_sockets("localhost", 0)


class Process:
    """A server on a port that is free; its address as soon as it can answer."""

    def __init__(self, tmp_path):
        config = tmp_path / "server.yaml"
        config.write_text("warm_up: false\nport: 0\n")
        command = [sys.executable, "-m", "specbeam", "serve", "--config", str(config)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = ""
        for line in self.process.stderr:
            found = re.search(r"at (http://\S+) ", line)
            if found:
                self.url = found.group(1)
                break
        self.rest = threading.Thread(target=self.process.stderr.read)
        self.rest.start()


def test_a_signal_lets_what_is_decoded_end_and_a_killed_server_comes_back_with_the_same_texts(tmp_path):
    server = Process(tmp_path)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        first = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 200}) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            server.process.send_signal(signal.SIGTERM)
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert server.process.wait(timeout=60) == 0
    server = Process(tmp_path)
    server.process.kill()
    server.process.wait()
    server = Process(tmp_path)
    assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=120).json()["choices"][0]["text"] == first
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=60) == 0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_signal_reads_the_keys_again_while_the_log_cannot_be_written(tmp_path):
    """Standard error is a disk that is full: nothing that the server says is lost on anybody but its operator."""
    keys = tmp_path / "keys.txt"
    keys.write_text("ann old\n")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "specbeam",
        "serve",
        "--no-warm-up",
        "--port",
        str(port),
        "--api-key-file",
        str(keys),
    ]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stderr=full, stdout=full)
    url = f"http://127.0.0.1:{port}"

    def status(key):
        body = {"prompt": "Ein Hund", "max_tokens": 2}
        return httpx.post(
            url + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=300
        ).status_code

    def is_ready():
        try:
            return httpx.get(url + "/health", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        while not is_ready():
            assert process.poll() is None
            time.sleep(0.2)
        assert [status(key) for key in ("old", "new")] == [200, 401]
        keys.write_text("ann\n")  # no key: all stays as it is
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert [status(key) for key in ("old", "new")] == [200, 401]
        keys.write_text("ann new\n")
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while status("new") != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert status("old") == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
