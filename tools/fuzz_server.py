"""Sends random bodies to a server of its own: python tools/fuzz_server.py COUNT [--seed S] [options of specbeam serve].

Most bodies are valid ones with a few fields replaced, removed or added, from the fields of the server's own OpenAPI
description and values of all kinds; a quarter of them are damaged as bytes: cut, flipped, repeated or joined. Prints a
line of JSON: the answers by path and status, and the faults, each of which is printed with its body, too. Faults are a
status of 500 or more, an answer that is no JSON, a refusal without OpenAI's fields, a stream that does not end or ends in
an error of the server, a second connection without an answer, and a server that is not healthy afterwards. Exits with 1
if there are any.
"""

import argparse
import http.client
import json
import random
import string
import sys
import tempfile
import threading
from collections import Counter
from copy import deepcopy

from attack_server import started

USER = {"role": "user", "content": "Ein Hund läuft."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
VALID = {
    "/v1/completions": [
        {"prompt": "Ein Hund läuft."}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [5, 6, 7]},
        {"prompt": [[5], [6, 7]]},
        {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}, {"prompt": "a", "best": 2},
        {"prompt": "a", "num_beams": 3},
        {"prompt": "a", "stop": ["b", ""], "seed": 3, "presence_penalty": 1.0, "logit_bias": {"5": -100}},
        {"prompt": "a", "structured_outputs": {"regex": "a+"}}, {"prompt": "a", "best_of": 3, "temperature": 0.7},
        {"prompt": "a", "stream": True, "n": 2}, {"prompt": "a", "stream": True, "specbeam": {"trace": True}},
    ],
    "/v1/chat/completions": [
        {"messages": [USER]}, {"messages": [USER], "logprobs": True, "top_logprobs": 3},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/responses": [
        {"input": "Ein Hund läuft."}, {"input": [USER], "instructions": "x"},
        {"input": [USER, {"type": "reasoning", "summary": []}]}, {"input": "a", "stream": True},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
    ],
    "/tokenize": [{"prompt": "Ein Hund"}, {"messages": [USER]}],
    "/detokenize": [{"tokens": [5, 6]}],
}  # fmt: skip
KINDS = {
    "/v1/completions": "CompletionBody", "/v1/chat/completions": "ChatBody", "/v1/responses": "ResponsesBody",
    "/tokenize": "TokenizeBody", "/detokenize": "DetokenizeBody",
}  # fmt: skip
METHODS = ["dsbd", "beam_search", "sampling", "greedy", "speculative_sampling", "prompt_lookup", "auto", "x", 3]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CLIENTS = 4
OBJECTS = [USER, CALL, TOOL, SCHEMA, {"type": "json_object"}, {"name": "f"}, {"5": 1}]
DEEP = [[[[[["a"]]]]], {"a": {"b": {"c": [None]}}}, "\ud800", "\u0000", "a" * 5000, 10**400, -(10**30), 1e308, -0.0]


class Bodies:
    """Random bodies.

    Args:
        fields: the names of the fields of each path.
    """

    def __init__(self, seed, fields):
        self.dice = random.Random(seed)
        self.fields = fields

    def next(self):
        """Return a path and the bytes of a body."""
        path = self.dice.choice([*VALID])
        body = deepcopy(self.dice.choice(VALID[path]))
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        if path.startswith("/v1") and "max_tokens" not in body:
            body[limit] = self.dice.randint(1, 6)
        for _ in range(self.dice.choice([0, 0, 1, 1, 1, 2, 3])):
            self.change(path, body)
        raw = json.dumps(body, ensure_ascii=self.dice.random() < 0.5).encode("utf-8", "surrogatepass")
        return path, raw if self.dice.random() < 0.75 else self.damaged(raw)

    def change(self, path, body):
        """Remove, replace or add a field, at the top or inside."""
        place = body
        while self.dice.random() < 0.4:
            inner = [
                one
                for one in (place.values() if isinstance(place, dict) else place)
                if isinstance(one, dict | list) and one
            ]
            if not inner:
                break
            place = self.dice.choice(inner)
        if isinstance(place, list):
            place[self.dice.randrange(len(place))] = self.value()
            return
        name = self.dice.choice([*self.fields[path], *place, "x", "", "model_config", "__class__"])
        if self.dice.random() < 0.2:
            place.pop(name, None)
        elif name == "specbeam":
            setting = self.dice.choice(["beams", "depth", "trace", "stream", "report"])
            place[name] = {"method": self.dice.choice(METHODS), setting: self.value()}
        elif name in LIMITS:
            place[name] = self.dice.choice([0, 1, 5, -1, 2.5, "3", None, 10**9])
        else:
            place[name] = self.value()

    def value(self, depth=0):
        """Return a JSON value."""
        kind = self.dice.randrange(10 if depth < 3 else 6)
        if kind == 0:
            return self.dice.choice([None, True, False])
        if kind in (1, 2):
            return self.dice.choice([0, 1, 2, 3, 5, -1, 64, 2**31, 2**63, self.dice.randint(-9, 9)])
        if kind == 3:
            return self.dice.choice([0.0, 0.5, 1.0, -2.5, 1e-9, 1e30])
        if kind in (4, 5):
            return "".join(self.dice.choices(string.printable + "äß\U0001f600\u202e", k=self.dice.randrange(12)))
        if kind == 6:
            return deepcopy(self.dice.choice(DEEP))
        if kind == 7:
            return [self.value(depth + 1) for _ in range(self.dice.randrange(4))]
        if kind == 8:
            return deepcopy(self.dice.choice(OBJECTS))
        return {
            self.dice.choice(["type", "name", "a", "content", "schema"]): self.value(depth + 1)
            for _ in range(self.dice.randrange(3))
        }

    def damaged(self, raw):
        """Return bytes that are cut, flipped, repeated or joined."""
        place = self.dice.randrange(len(raw))
        way = self.dice.randrange(5)
        if way == 0:
            return raw[:place]
        if way == 1:
            return raw[:place] + bytes([self.dice.randrange(256)]) + raw[place + 1 :]
        if way == 2:
            return raw[:place] + raw[place : place + 9] * self.dice.choice([2, 500]) + raw[place:]
        if way == 3:
            return raw + raw
        return bytes(self.dice.choices(b'{}[]",:0123456789.eE+-truefalsn\\\x00\xff ', k=self.dice.randrange(60)))


def fault_in(status, kind, content):
    """Return what is wrong with an answer; "" for nothing."""
    if status >= 500:
        return f"status {status}"
    if kind.startswith("text/event-stream"):
        lines = content.decode().strip().split("\n\n")
        if any('"server_error"' in line for line in lines):
            return "an error of the server in a stream"
        return "" if lines[-1] == "data: [DONE]" or '"type":"response.' in lines[-1] else "a stream without an end"
    try:
        found = json.loads(content)
    except ValueError:
        return "an answer that is no JSON"
    if status >= 400 and set(found.get("error", ())) != {"message", "type", "param", "code"}:
        return "a refusal of another form"
    return ""


class Sender(threading.Thread):
    """Sends its part of the bodies over one connection."""

    def __init__(self, port, bodies, count):
        super().__init__()
        self.port = port
        self.bodies = bodies
        self.count = count
        self.answers = Counter()
        self.faults = []

    def run(self):
        try:
            self.send_all()
        except Exception as error:
            self.faults.append(f"the sender broke: {error!r}")
            raise

    def send_all(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"content-type": "application/json", "authorization": "Bearer other-key"}
        for _ in range(self.count):
            path, raw = self.bodies.next()
            try:
                answer, content = self.asked(connection, path, raw, headers)
                fault = fault_in(answer.status, answer.headers.get("content-type", ""), content)
                self.answers[f"{path} {answer.status}"] += 1
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                content = b""
                fault = f"no answer: {type(error).__name__}: {error}"
            if fault:
                self.faults.append(fault)
                print(
                    json.dumps(
                        [fault, path, raw.decode(errors="replace")[:2000], content.decode(errors="replace")[:500]]
                    ),
                    flush=True,
                )

    def asked(self, connection, path, raw, headers):
        """Return an answer and its content, by a second connection if the kept one is closed while a request is sent."""
        try:
            return self.once(connection, path, raw, headers)
        except (ConnectionError, http.client.HTTPException):
            connection.close()
            return self.once(connection, path, raw, headers)

    @staticmethod
    def once(connection, path, raw, headers):
        connection.request("POST", path, raw, headers)
        answer = connection.getresponse()
        return answer, answer.read()


def fields_of(port):
    """Return the names of the fields of each path, from the server's OpenAPI description."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/openapi.json", headers={"authorization": "Bearer other-key"})
    schemas = json.loads(connection.getresponse().read())["components"]["schemas"]
    return {path: [*schemas[kind]["properties"]] for path, kind in KINDS.items()}


def health_of(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics", headers={"authorization": "Bearer other-key"})
    figures = connection.getresponse().read().decode()
    restarts = [line for line in figures.splitlines() if line.startswith("specbeam:engine_restarts_total")]
    connection.request("GET", "/health")
    return connection.getresponse().status, float(restarts[0].split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="number of bodies")
    parser.add_argument("--seed", type=int, default=0)
    given, options = parser.parse_known_args()
    limits = ["--max-tokens", "64", "--max-texts", "32", "--max-waiting", "256"]
    with tempfile.TemporaryDirectory() as folder:
        process, port = started(folder, [*limits, *options])
        try:
            fields = fields_of(port)
            senders = []
            for number in range(CLIENTS):
                count = given.count // CLIENTS + (number < given.count % CLIENTS)
                senders.append(Sender(port, Bodies(CLIENTS * given.seed + number, fields), count))
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            status, restarts = health_of(port)
        finally:
            process.terminate()
            process.wait(60)
    answers = sum((sender.answers for sender in senders), Counter())
    faults = Counter(fault for sender in senders for fault in sender.faults)
    if (status, restarts) != (200, 0):
        faults[f"health {status} after {restarts:g} restarts"] += 1
    print(
        json.dumps(
            {"bodies": given.count, "seed": given.seed, "answers": dict(sorted(answers.items())), "faults": faults}
        )
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
