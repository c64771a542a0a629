"""A server whose target is spread over two processes: rank 0 answers, and no rank that is lost leaves anybody waiting."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

import specbeam as sb
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.models.test_spread import rank_processes
from tests.support import words
from tests.support.figures import show

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found in /proc"),
]
KINDS = {
    "sampling": (sb.sampling(), {"specbeam": {"method": "sampling"}}),
    "beams": (sb.beam_search(4), {"specbeam": {"method": "beam_search", "beams": 4}}),
    "dsbd": (sb.dsbd(3, 5, 3), {"specbeam": {"method": "dsbd", "beams": 3, "draft_beams": 5, "depth": 3}}),
}
PROMPTS = ["abc def", "hello", "why, oh why"]
LONG = {"prompt": "abc", "n": 16, "max_tokens": 200, "ignore_eos": True, "seed": 5, "specbeam": {"method": "sampling"}}


class SpreadServer:
    """A server of two processes that torchrun has started, as soon as it is ready."""

    def __init__(self, folder):
        target, draft = words.saved(folder)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr",
                   "127.0.0.1", "-m", "specbeam", "serve", "--tensor-parallel", "--prefix-cache-mb", "0", "--no-warm-up",
                   "--name", "tiny", "--port", str(port), "-m", target, "-d", draft, "--max-running", "4"]  # fmt: skip
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            self.until(self.is_ready, 300)
        except BaseException:
            self.end()
            raise

    def is_ready(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(self.url + "/health", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def ask(self, body):
        answer = httpx.post(self.url + "/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    def under_way(self):
        return httpx.get(self.url + "/v1/specbeam/requests", timeout=60).json()["data"]

    def end(self):
        """End whatever is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def expected():
    """What one process answers by the same engine, by kind and prompt."""
    pair = words.pair(check=False)
    whole = HuggingFaceLM(pair.target_model, engine="plain")
    pair = Pair(pair.target_model, pair.draft_model, pair.tokenizer, whole, pair.draft)
    found = {}
    for name, (method, _) in KINDS.items():
        for prompt in PROMPTS:
            found[name, prompt] = sb.generate(pair, prompt, method, seed=7, max_new_tokens=20)[0].text
    return found


def pieces_of(lines):
    """The text of each choice of a stream, and whether it was told to be over."""
    texts = {}
    is_over = False
    for line in lines:
        if line == "data: [DONE]":
            is_over = True
        elif line.startswith("data: "):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)], is_over


def test_clients_side_by_side_get_the_texts_of_one_process_and_who_leaves_costs_nobody_else(tmp_path, expected):
    server = SpreadServer(tmp_path)
    try:

        def check_all():
            asked = {
                (name, prompt): {"prompt": prompt, "seed": 7, "max_tokens": 20, **body}
                for name, (_, body) in KINDS.items()
                for prompt in PROMPTS
            }
            with ThreadPoolExecutor(3) as clients:
                answers = clients.map(server.ask, asked.values())
                assert {key: texts[0] for key, texts in zip(asked, answers, strict=True)} == expected

        check_all()
        left = threading.Event()

        def leave():
            with httpx.stream(
                "POST", server.url + "/v1/completions", json=LONG | {"stream": True}, timeout=300
            ) as stream:
                next(stream.iter_lines())
                assert len(server.under_way()) >= 1
            left.set()

        leaving = threading.Thread(target=leave)
        leaving.start()
        check_all()
        leaving.join()
        assert left.is_set()
        server.until(lambda: server.under_way() == [], 10)
        figures = httpx.get(server.url + "/metrics", timeout=60).text
        cancelled = [line for line in figures.splitlines() if line.startswith("specbeam:cancelled_total{")]
        assert sum(float(line.split()[-1]) for line in cancelled) >= 1
        time.sleep(35)  # longer than ranks wait for each other, while nothing is asked
        check_all()

        whole = server.ask(LONG)
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG | {"stream": True}, timeout=300) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            texts, is_over = pieces_of([first, *lines])
        assert is_over
        assert texts == whole
        server.process.wait(60)
        assert rank_processes(server.process.pid) == {}
    finally:
        server.end()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_ends_the_server_with_a_sentence_and_its_clients_wait_no_longer(tmp_path, lost):
    server = SpreadServer(tmp_path)
    try:
        ranks = rank_processes(server.process.pid)
        assert set(ranks) == {0, 1}
        ends = []

        def ask():
            try:
                status = httpx.post(server.url + "/v1/completions", json=LONG, timeout=300).status_code
            except httpx.HTTPError:
                status = 0
            ends.append((status, time.monotonic()))

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        server.until(lambda: len(server.under_way()) == 3, 60)
        began = time.monotonic()
        os.kill(ranks[lost], signal.SIGKILL)
        assert server.process.wait(120) != 0
        for client in clients:
            client.join(60)
        assert [status for status, _ in ends if status == 200] == []
        assert len(ends) == 3
        seconds = max(end for _, end in ends) - began
        show(
            f"\nrank {lost} was killed: clients knew after {seconds:.1f} s, the job had ended after {time.monotonic() - began:.1f} s"
        )
        assert time.monotonic() - began < 60
        said = server.log.read_text()
        assert (
            f"specbeam: rank {1 - lost} failed while" in said or "SIGTERM" in said
        )  # torchrun may end the other first
        assert rank_processes(server.process.pid) == {}
    finally:
        server.end()
