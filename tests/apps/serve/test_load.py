"""A load on a server in a process of its own: no answer is wrong or lost, and nothing is left of it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import specbeam as sb
from specbeam.models.pair import BUNDLED

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from specbeam.lab.bench.serving import Load, measure_load  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout"),
]
SOAK_S = float(os.environ.get("SOAK_S", "60"))
RATE = float(os.environ.get("SOAK_RATE", "4"))
LOOK_S = 2.0  # seconds between two looks at the memory
MOST_GROWTH = 1.0  # MB per 1,000 requests
CHECKED = 60  # answers that are decoded again, of each kind
TOKENS = 48
KINDS = [
    ({}, sb.dsbd(), {}),
    ({"num_beams": 4, "n": 2}, sb.speculative_beam_search(4), {"num_return_sequences": 2}),
    (
        {"specbeam": {"method": "dsbd", "beams": 4}, "top_k": 10, "top_p": 0.9},
        sb.dsbd(beams=4),
        {"top_k": 10, "top_p": 0.9},
    ),
    ({"specbeam": {"method": "sampling"}, "n": 2}, sb.sampling(), {"num_return_sequences": 2}),
]


class Watch:
    """Looks at the memory of a process, in MB, every `LOOK_S` seconds until it is closed.

    What is its own counts, in memory or swapped out: pages of files come and go as the machine has room for them.
    """

    def __init__(self, pid):
        self.file = Path(f"/proc/{pid}/status")
        self.seen = []
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()

    def look(self):
        began = time.monotonic()
        while not self.ends.wait(LOOK_S):
            sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", self.file.read_text()))
            self.seen.append((time.monotonic() - began, (int(sizes["RssAnon"]) + int(sizes["VmSwap"])) / 1024))

    def close(self):
        self.ends.set()
        self.thread.join()

    def slope(self):
        """MB per second in the second half of the time, and the standard error of that."""
        seconds, size = np.array(self.seen[len(self.seen) // 2 :]).T
        (slope, _), covariance = np.polyfit(seconds, size, 1, cov=True)
        return float(slope), float(np.sqrt(covariance[0, 0]))


def tell(text):
    """Show a figure, as `pytest -s` does."""
    sys.stdout.write(f"{text}\n")


def figures(url):
    found = {}
    for line in httpx.get(url + "/metrics").text.splitlines():
        if line.startswith("specbeam:"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def of(name, found):
    return sum(value for key, value in found.items() if key.startswith(f"specbeam:{name}{{"))


def test_an_hours_load_of_many_clients_who_come_and_go_leaves_nothing_behind(tmp_path):
    """64 clients, Poisson arrivals, a fifth of whom go away, for `SOAK_S` seconds (60; an hour by hand)."""
    config = tmp_path / "server.yaml"
    config.write_text("port: 0\nmax_waiting: 256\nqueue_timeout: 600\nrequest_timeout: 900\nstall_timeout: 900\n")
    command = [sys.executable, "-m", "specbeam", "serve", "--config", str(config)]
    with open(tmp_path / "log.txt", "w") as log:
        process = subprocess.Popen(command, stderr=log)
    url = ""
    while not url:
        time.sleep(0.2)
        assert process.poll() is None
        found = re.search(r"at (http://\S+) ", (tmp_path / "log.txt").read_text())
        url = found.group(1) if found else ""
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    prompts = [line.split("\t")[0] for line in lines if line][:31]  # no multiple of the kinds: all meet all
    bodies = [body for body, _, _ in KINDS]
    watch = Watch(process.pid)
    load = Load(prompts, {"max_tokens": TOKENS}, 64, 10**6, RATE, 0.2, True, seed=1, seconds=SOAK_S, kinds=bodies)
    report = measure_load(url, load)
    watch.close()
    slope, error = watch.slope()
    per_thousand = [1000 * value * report.seconds / report.requests for value in (slope, error)]
    tell(report)
    tell("MB per 1,000 requests: {:.3f}, standard error {:.3f}".format(*per_thousand))
    tell(f"MB: {[round(size) for _, size in watch.seen[:: max(len(watch.seen) // 40, 1)]]}")

    assert report.answered + report.gone == report.requests, report.statuses
    time.sleep(1)
    after = figures(url)
    for name in ("lanes", "kv_tokens", "num_requests_running", "num_requests_waiting", "engine_restarts_total"):
        assert of(name, after) == 0, name
    assert of("kv_cache_usage_perc", after) == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0

    pair = sb.load("bundled", share_from=None)
    chosen = [one for one in report.once if one.status == 200]
    checked = chosen[:: max(len(chosen) // (CHECKED * len(KINDS)), 1)]
    assert {one.number % len(KINDS) for one in checked} == set(range(len(KINDS)))
    for one in checked:
        body, method, options = KINDS[one.number % len(KINDS)]
        seed = load.fields(one.number)["seed"]
        prompt = load.fields(one.number)["prompt"]
        answers = sb.generate(pair, prompt, method, seed=seed, max_new_tokens=TOKENS, **options)
        assert one.texts == tuple(answer.text for answer in answers), (body, prompt, seed)
    tell(f"{len(checked)} answers are those of sb.generate")
    assert per_thousand[0] - 2 * per_thousand[1] < MOST_GROWTH
