"""Targets "openai:URL": a server that lists log-probabilities of token ids scores chains, by the API of vLLM or SGLang."""

import http.client
import json
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np

from specbeam.core.errors import BadSetting, ServerGone, ServerRefused
from specbeam.models.chains.chains import Chain, Likeliest, joined, single_rows

TIMEOUT_S = 120.0  # for each request, unless SPECBEAM_SERVER_TIMEOUT is set
TRIES = 3  # of a request that got no answer; scoring changes nothing on the server
PAUSE_S = 0.5  # before the second try, then twice as long
BUSY = (429, 502, 503, 504)  # HTTP status of servers that may answer later
AT_ONCE = 4  # requests of a round trip that are sent side by side
CHEAP = 16  # tokens that a server computes again for a row whose text it has in its prefix cache
LOWEST = -9999.0  # what servers write for a log-probability of -inf
USUAL_MOST = 20  # vLLM's own `max_logprobs`


class Server:
    """The HTTP side of a server: one connection per thread, time limits, and repeated tries.

    The key is taken from OPENAI_API_KEY.

    Args:
        url: with http:// or https://.

    Raises `BadSetting` if the URL is wrong.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadSetting(f"{url!r} is no URL of a server; give openai:http://HOST:PORT/v1")
        self.parts: SplitResult = parts
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.path = parts.path.rstrip("/")
        self.timeout_s = _timeout()
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in [*self._open]:
            connection.close()
        self._open.clear()

    def get(self, path: str) -> Any:
        """Return the JSON answer of a GET request; None if the server does not know the path."""
        status, answer = self._answer("GET", path, None)
        if status == 404:
            return None
        self._check(path, status, answer)
        return answer

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON answer of a POST request. Raises `ServerRefused` with the server's message if it refuses."""
        status, answer = self._answer("POST", path, json.dumps(body).encode())
        self._check(path, status, answer)
        return answer

    def _check(self, path: str, status: int, answer: Any) -> None:
        if status == 401 or status == 403:
            raise ServerRefused(f"{self.url} wants another key ({status}): set OPENAI_API_KEY")
        if status != 200:
            raise ServerRefused(f"{self.url}{path} answered {status}: {_message_in(answer)}")

    def _answer(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        """Return status and content of an answer; requests without one are repeated."""
        problem = ""
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE_S * 2 ** (number - 1))
            try:
                status, content = self._once(method, path, body)
            except TimeoutError:
                raise ServerGone(
                    f"{self.url} did not answer within {self.timeout_s:g} s; set SPECBEAM_SERVER_TIMEOUT to wait longer"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status not in BUSY:
                return status, _parsed(content)
            problem = f"it answered {status}: {_message_in(_parsed(content))}"
        raise ServerGone(f"{self.url} does not answer ({problem}; {TRIES} tries); start it and run again")

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except BaseException:  # a late answer to this request would be read as that of the next one
            self._forget()
            raise

    def _connection(self) -> http.client.HTTPConnection:
        """Return the connection of this thread."""
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            secure = self.parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            found = kind(self.parts.hostname or "", self.parts.port, timeout=self.timeout_s)
            self._local.connection = found
            self._open.add(found)
        return found

    def _forget(self) -> None:
        """Close the connection of this thread, so that the next request opens a new one."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._open.discard(connection)
            self._local.connection = None


class HttpScorer(ABC):
    """Scores chains by requests to a server, a list of texts in each."""

    engine = "server"
    more_listed = "start the server with longer lists (vLLM: --max-logprobs -1)"

    def __init__(self, server: Server, name: str, vocab: int, max_positions: int | None, most_listed: int) -> None:
        self.server = server
        self.name = name
        self.vocab = vocab
        self.max_positions = max_positions
        self.most_listed = most_listed
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="specbeam http")
        self._is_closed = False

    def score(self, chains: Sequence[Chain]) -> list[Likeliest]:
        """See `Scorer.score`; chains of the same form are one request, and requests are sent side by side."""
        texts = [self.split(chain) for chain in chains]
        flat = [text for own in texts for text in own]
        groups: dict[tuple[int, bool], list[int]] = {}
        for place, text in enumerate(flat):
            groups.setdefault((text.listed, text.rows > 1), []).append(place)
        answers: list[Likeliest | None] = [None] * len(flat)
        asked = {places[0]: places for places in groups.values()}
        if self._is_closed:
            raise ServerGone(f"the connection to {self.server.url} was closed with its pair; load it again")
        sent = {first: self._pool.submit(self.ask, [flat[place] for place in asked[first]]) for first in asked}
        for first, answer in sent.items():
            for place, found in zip(asked[first], answer.result(), strict=True):
                answers[place] = self.checked(found, flat[place])
        found_of = iter(answers)
        return [joined([one for one in (next(found_of) for _ in own) if one is not None]) for own in texts]

    def split(self, chain: Chain) -> list[Chain]:
        """Return the texts by which a chain is scored."""
        return [chain]

    @abstractmethod
    def ask(self, texts: Sequence[Chain]) -> list[Likeliest]:
        """Return the rows of texts of the same form."""

    def checked(self, found: Likeliest, chain: Chain) -> Likeliest:
        """Return rows that a server has returned. Raises `ServerRefused` if tokens are missing or unknown."""
        if found.tokens.shape != (chain.rows, chain.listed) or found.tokens.max(initial=0) >= self.vocab:
            raise ServerRefused(
                f"{self.name} listed {found.tokens.shape[1]} tokens of up to {found.tokens.max(initial=0)} in each of "
                f"{found.tokens.shape[0]} rows; expected {chain.listed} tokens below {self.vocab} in {chain.rows}. Give "
                "the tokenizer of the model that the server runs: load(tokenizer=...)"
            )
        return found

    def close(self) -> None:
        """End the threads that send requests, and close their connections."""
        self._is_closed = True
        self._pool.shutdown(wait=False)
        self.server.close()


class VllmServer(HttpScorer):
    """vLLM's own API: log-probabilities of a prompt, and of the token after it.

    vLLM computes a whole prompt when log-probabilities of it are wanted, and finds all other prompts in its prefix cache. So
    few rows of a long text are cheaper one by one.
    """

    model = ""

    def split(self, chain: Chain) -> list[Chain]:
        return single_rows(chain) if chain.rows * CHEAP < len(chain.tokens) else [chain]

    def ask(self, texts: Sequence[Chain]) -> list[Likeliest]:
        first = texts[0]
        body = {
            "model": self.model,
            "prompt": [text.tokens for text in texts],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": first.listed,
            "return_tokens_as_token_ids": True,
        }
        if first.rows > 1:
            body["prompt_logprobs"] = first.listed
        if first.namespace:
            body["cache_salt"] = first.namespace
        answer = self.server.post(f"{self.server.path}/completions", body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return [_of_choice(choice, text) for choice, text in zip(choices, texts, strict=True)]


def _of_choice(choice: dict[str, Any], text: Chain) -> Likeliest:
    """Return the rows of a text from vLLM's answer."""
    rows = []
    if text.rows > 1:
        within = choice["prompt_logprobs"][text.first + 1 :]
        rows += [[(int(token), float(one["logprob"])) for token, one in given.items()] for given in within]
    last = choice["logprobs"]["top_logprobs"][0]
    rows.append([(int(token.removeprefix("token_id:")), float(value)) for token, value in last.items()])
    return _likeliest(rows, text.listed)


class SglangServer(HttpScorer):
    """SGLang's native API: top log-probabilities of the input from a position on, and of the token after it."""

    def ask(self, texts: Sequence[Chain]) -> list[Likeliest]:
        count = texts[0].listed
        body = {
            "input_ids": [text.tokens for text in texts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": [text.first for text in texts],
            "top_logprobs_num": count,
        }
        answers = self.server.post("/generate", body)
        return [_of_meta(answer["meta_info"], text) for answer, text in zip(answers, texts, strict=True)]


def _of_meta(meta: dict[str, Any], text: Chain) -> Likeliest:
    """Return the rows of a text from SGLang's answer; those of the input are counted from its end."""
    rows = []
    if text.rows > 1:
        within = meta["input_top_logprobs"][-(text.rows - 1) :]
        rows += [[(int(one[1]), float(one[0])) for one in given] for given in within]
    rows.append([(int(one[1]), float(one[0])) for one in meta["output_top_logprobs"][0]])
    return _likeliest(rows, text.listed)


def _likeliest(rows: Sequence[Sequence[tuple[int, float]]], count: int) -> Likeliest:
    """Return the `count` likeliest of the listed tokens of each row; a server may list the text's own token, too."""
    tokens = np.zeros((len(rows), count), dtype=np.int64)
    logp = np.full((len(rows), count), -np.inf)
    shortest = count
    for number, row in enumerate(rows):
        best = sorted(row, key=lambda one: (-one[1], one[0]))[:count]
        shortest = min(shortest, len(best))
        for place, (token, value) in enumerate(best):
            tokens[number, place] = token
            logp[number, place] = value if value > LOWEST else -math.inf
    return Likeliest(tokens[:, :shortest], logp[:, :shortest])


def http_scorer(server: Server, card: dict[str, Any], vocab: int) -> HttpScorer:
    """Return the scorer of a server.

    Args:
        card: the server's description of its model.
        vocab: number of tokens of the model.

    Raises:
        ServerGone: the server does not answer.
        ServerRefused: it does not list log-probabilities of token ids.
    """
    most = card.get("max_model_len")
    positions = int(most) if most else None
    name = f"the server {server.url}"
    if (server.get("/get_model_info") or {}).get("model_path"):
        return SglangServer(server, name, vocab, positions, vocab)
    scorer = VllmServer(server, name, vocab, positions, vocab)
    scorer.model = str(card["id"])
    scorer.most_listed = _most_listed(scorer)
    return scorer


def opened_server(url: str) -> Server:
    """Return the HTTP side of a server; without a path in the URL, its API is below /v1."""
    server = Server(url)
    server.path = server.path or "/v1"
    return server


def model_card(server: Server) -> dict[str, Any]:
    """Return the first model that a server lists. Raises `ServerRefused` if there is none."""
    listed = server.get(f"{server.path}/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not models:
        raise ServerRefused(f"{server.url}{server.path}/models lists no model; give openai:http://HOST:PORT/v1")
    found: dict[str, Any] = models[0]
    return found


def _most_listed(scorer: VllmServer) -> int:
    """Return the longest lists that a server returns, by asking for all tokens."""
    try:
        scorer.ask([Chain([0], 0, scorer.vocab)])
    except ServerRefused as error:
        allowed = re.search(r"max allowed: (\d+)", str(error))
        return min(int(allowed[1]), scorer.vocab) if allowed else min(USUAL_MOST, scorer.vocab)
    return scorer.vocab


def _timeout() -> float:
    """Return the time limit of a request in seconds. Raises `BadSetting` if the environment has a wrong one."""
    given = os.environ.get("SPECBEAM_SERVER_TIMEOUT")
    try:
        found = TIMEOUT_S if given is None else float(given)
    except ValueError:
        found = -1.0
    if not found > 0:
        raise BadSetting(f"SPECBEAM_SERVER_TIMEOUT is {given!r}; it is a number of seconds above 0")
    return found


def _parsed(content: bytes) -> Any:
    """Return the JSON value of an answer; its text if it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _message_in(answer: Any) -> str:
    """Return the message of an error answer."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:300]
