"""Attacks a server of its own and measures what another client notices: python tools/attack_server.py [SCENE ...].

Scenes: flood (one key sends requests of 64 prompts), silent (connections that send nothing), bodies (of 1 MiB), bombs
(regular expressions, schemas and grammars that are expensive to compile or to follow). The other client sends one short
request after the other, before the attack (idle) and during it. Prints a line of JSON per scene: the other client's waiting
times, in the queue, of decoding and to the answer, the times of /health, and how both were answered. The attacker is a
process of low priority, for it stands for other machines.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

WORDS = "Ein Hund läuft durch den Wald. "
SHORT = {"prompt": "Wo ist mein Hut?", "max_tokens": 8, "seed": 1, "specbeam": {"method": "speculative_sampling"}}
MANY = {"prompt": [WORDS] * 64, "max_tokens": 32, "seed": 1, "specbeam": {"method": "speculative_sampling"}}
LARGE = [
    {"prompt": WORDS * 30_000},
    {"prompt": "a" * 10**6},
    {"prompt": [WORDS * 450] * 64},
    {"messages": [{"role": "user", "content": " " * 10**6}]},
]
HARD = [
    {"regex": "(a|b)*a(a|b){400}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(.*a){20}.{60}"},
    {"regex": "|".join(f".*{chr(97 + number)}.{{{number + 20}}}" for number in range(26))},
    {"json": {"properties": {f"p{n}": {"pattern": f"(a|b)*a(a|b){{{n % 50 + 30}}}"} for n in range(200)}}},
    {"json": {"anyOf": [{"properties": {f"p{a}_{b}": {"minimum": a} for b in range(30)}} for a in range(30)]}},
    {"grammar": "start: a0\n" + "\n".join(f'a{n}: (a{n + 1} | "x" a{n + 1} "y")*' for n in range(500)) + '\na500: "z"'},
]
BOMBS = [{"prompt": WORDS, "max_tokens": 64, "structured_outputs": HARD[number % len(HARD)]} for number in range(28)]


def asked(port, key, body, path="/v1/completions", method="POST"):
    """Return status, seconds and JSON of an answer; status 0 if the connection broke."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return 0, time.perf_counter() - began, {}
    finally:
        connection.close()
    return answer.status, time.perf_counter() - began, found


class Bystander(threading.Thread):
    """Sends one short request after the other, and asks for the health of the server after each."""

    def __init__(self, port):
        super().__init__()
        self.port = port
        self.is_over = threading.Event()
        self.statuses = Counter()
        self.answer_s, self.queue_s, self.decoding_s, self.health_s = [], [], [], []

    def run(self):
        while not self.is_over.is_set():
            status, seconds, found = asked(self.port, "other-key", SHORT)
            self.statuses[str(status)] += 1
            if status == 200:
                self.answer_s.append(seconds)
                self.queue_s.append(found["metrics"]["queue_time_ms"] / 1000)
                self.decoding_s.append(found["metrics"]["generation_time_ms"] / 1000)
            status, seconds, _ = asked(self.port, "", None, "/health", "GET")
            self.statuses[f"health {status}"] += 1
            self.health_s.append(seconds)

    def figures(self):
        """Median, 99 % and maximum of each time in seconds, and the statuses."""
        times = {
            "answer_s": self.answer_s, "queue_s": self.queue_s, "decoding_s": self.decoding_s, "health_s": self.health_s,
        }  # fmt: skip
        return {name: three_of(values) for name, values in times.items()} | {"statuses": dict(self.statuses)}


def three_of(values):
    """Return median, 99th percentile and maximum."""
    if len(values) < 2:
        return values
    return [round(one, 4) for one in (statistics.median(values), statistics.quantiles(values, n=100)[-1], max(values))]


def noticed(port, scene, seconds, count):
    """What a bystander notices during an attack, and how the attack was answered; without a scene, while there is none."""
    one = Bystander(port)
    one.start()
    answered = {}
    if scene:
        fresh = multiprocessing.get_context("spawn")
        here, there = fresh.Pipe(duplex=False)
        attacker = fresh.Process(target=attack, args=(scene, port, seconds, count, there))
        attacker.start()
        answered = here.recv()
        attacker.join()
    else:
        time.sleep(seconds)
    one.is_over.set()
    one.join()
    return one.figures(), answered


def attack(scene, port, seconds, count, answered):
    """Attack for some seconds, and send how it was answered."""
    os.nice(19)
    end = time.monotonic() + seconds
    statuses = ATTACKS[scene](port, end, count)
    time.sleep(max(end - time.monotonic(), 0))
    answered.send(dict(statuses))


def sends_all(port, bodies, end, again):
    """Send each body from a thread of its own, again and again until `end` if wanted; return the statuses."""
    statuses = Counter()

    def send(body):
        while True:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            status, _, found = asked(port, "attacker-key", body, path)
            code = found.get("error", {}).get("code", "")
            statuses[f"{status} {code}".strip()] += 1
            if not again or time.monotonic() > end:
                return

    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def silent(port, count, end):
    """Open connections that send nothing, and keep them to the end."""
    kept = []
    statuses = Counter()
    for number in range(count):
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=10)
            if number % 2:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
            kept.append(one)
            statuses["opened"] += 1
        except OSError:
            statuses["refused"] += 1
    while time.monotonic() < end:
        time.sleep(0.05)
    for one in kept:
        one.close()
    return statuses


ATTACKS = {
    "flood": lambda port, end, _: sends_all(port, [MANY] * 8, end, again=True),
    "silent": lambda port, end, count: silent(port, count, end),
    "bodies": lambda port, end, _: sends_all(port, LARGE * 2, end, again=False),
    "bombs": lambda port, end, _: sends_all(port, BOMBS, end, again=False),
}


def started(folder, options):
    """Start a server with two keys; return its process and port."""
    keys = Path(folder) / "keys.txt"
    keys.write_text("attacker attacker-key\nother other-key\n")
    command = [sys.executable, "-m", "specbeam", "serve", "--port", "0", "--api-key-file", str(keys), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"at http://127\.0\.0\.1:(\d+) ", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found.group(1))
    raise SystemExit(f"the server did not start; it said:\n{''.join(said)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="*", default=[*ATTACKS])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each scene")
    parser.add_argument("--silent", type=int, default=5000, help="number of silent connections")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = started(folder, options)
        try:
            noticed(port, "", 3.0, 0)  # compiles what the bystander needs
            for scene in given.scenes:
                idle, _ = noticed(port, "", given.seconds / 2, 0)
                during, answered = noticed(port, scene, given.seconds, given.silent)
                print(json.dumps({"scene": scene, "idle": idle, "during": during, "attack": answered}), flush=True)
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
