"""A small server that scores token ids with a real model, by the API of vLLM or by that of SGLang."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class ScoringServer(ThreadingHTTPServer):
    """Answers on a free port of this machine.

    Args:
        model: of transformers.
        root: its folder, as the server names it.
        kind: "vllm" or "sglang".
        most: tokens of the longest list.
        key: that requests must have; "": none.
    """

    daemon_threads = True

    def __init__(self, model, root, kind="vllm", most=20, key=""):
        super().__init__(("127.0.0.1", 0), Answers)
        self.model = model
        self.root = str(root)
        self.kind = kind
        self.most = most
        self.key = key
        self.delay_s = 0.0
        self.left = None  # requests that are still answered; None: all
        self.broken = 0  # connections that are closed without an answer
        self.requests = []
        self._lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def is_up(self):
        """Whether the next request is answered."""
        with self._lock:
            if self.broken > 0:
                self.broken -= 1
                return False
            if self.left is not None:
                self.left -= 1
            return self.left is None or self.left >= 0

    @torch.inference_mode()
    def best(self, tokens, count):
        """Token ids and log-probabilities of the likeliest tokens after each token."""
        logp = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        values, ids = logp.topk(count)
        return ids.tolist(), values.tolist()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *given):
        pass

    def do_GET(self):
        paths = {"/v1/models": {"data": [{"id": "tiny", "root": self.server.root, "max_model_len": 256}]}}
        if self.server.kind == "sglang":
            paths["/get_model_info"] = {"model_path": self.server.root, "is_generation": True}
        self.send(*((200, paths[self.path]) if self.path in paths else (404, {"message": "unknown path"})))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.server.is_up():
            self.close_connection = True
            return
        time.sleep(self.server.delay_s)
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.send(401, {"error": {"message": "Unauthorized"}})
            return
        self.server.requests.append(body)
        answer = {"/v1/completions": self.completions, "/generate": self.generate}[self.path]
        self.send(*answer(body))

    def completions(self, body):
        count = body["logprobs"]
        if count > self.server.most:
            what = f"Requested sample logprobs of {count}, which is greater than max allowed: {self.server.most}"
            return 400, {"error": {"message": what}}
        choices = []
        for index, tokens in enumerate(body["prompt"]):
            ids, values = self.server.best(tokens, count)
            rows = [dict(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
            choice = {"index": index, "prompt_logprobs": None}
            named = {f"token_id:{token}": value for token, value in rows[-1].items()}
            choice["logprobs"] = {"top_logprobs": [named]}
            if "prompt_logprobs" in body:
                shown = [{str(token): {"logprob": value} for token, value in row.items()} for row in rows[:-1]]
                choice["prompt_logprobs"] = [None, *shown]
            choices.append(choice)
        return 200, {"choices": choices[::-1]}

    def generate(self, body):
        count = body["top_logprobs_num"]
        answers = []
        for tokens, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
            ids, values = self.server.best(tokens, count)
            rows = [
                [[value, token, None] for token, value in zip(*row, strict=True)]
                for row in zip(ids, values, strict=True)
            ]
            meta = {"input_top_logprobs": [None, *rows[start:-1]], "output_top_logprobs": [rows[-1]]}
            answers.append({"meta_info": meta})
        return 200, answers

    def send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(*given, **options):
    """A server that runs until the context is left."""
    server = ScoringServer(*given, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
