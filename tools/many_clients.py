"""Measures what a server gains from many clients: python tools/many_clients.py [--rounds N] [options of specbeam serve].

Starts a server of its own and prints, for each kind of request, the new tokens per second of the server's processor time
with one client and with eight, and their ratio. The rounds of both alternate. Other programs change processor time little.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
from pathlib import Path

from attack_server import started

KINDS = {
    "dsbd": {},
    "speculative_sampling": {"specbeam": {"method": "speculative_sampling"}},
    "4 beams": {"num_beams": 4},
    "sampling": {"specbeam": {"method": "sampling"}},
}
PROMPTS = [
    "Ein Hund läuft durch den Wald.",
    "Wo ist mein Hut?",
    "Ich habe Hunger und gehe jetzt nach Hause.",
    "Das Wetter ist heute schön.",
    "Kannst du mir bitte helfen?",
    "Die Katze schläft auf dem Sofa.",
    "Wir fahren morgen mit dem Zug nach Berlin.",
    "Er liest jeden Abend ein Buch.",
]
HEADERS = {"content-type": "application/json", "authorization": "Bearer other-key"}


def processor_s(process):
    """Return the seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_of(port, clients, requests, body):
    """Send requests, each client one after the other, and return the number of new tokens."""
    left = [*range(requests)]
    found = []

    def send():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        while left:
            number = left.pop()
            whole = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 32, "seed": number} | body
            connection.request("POST", "/v1/completions", json.dumps(whole), HEADERS)
            answer = json.loads(connection.getresponse().read())
            found.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < requests:
        raise SystemExit(f"{requests - len(found)} of {requests} requests were not answered")
    return sum(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="requests of one client; eight send twice as many")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = started(folder, options)
        try:
            for name, body in KINDS.items():
                rates = {1: [], 8: []}
                for clients in rates:  # compiles what is needed
                    tokens_of(port, clients, max(given.requests // 4, clients), body)
                for _ in range(given.rounds):
                    for clients, own in rates.items():
                        before = processor_s(process)
                        tokens = tokens_of(port, clients, given.requests * (1 if clients == 1 else 2), body)
                        own.append(tokens / (processor_s(process) - before))
                ratio = statistics.median(rates[8]) / statistics.median(rates[1])
                shown = {clients: [round(rate) for rate in own] for clients, own in rates.items()}
                print(f"{name}: one client {shown[1]}, eight {shown[8]}, ratio {ratio:.2f}", flush=True)
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
