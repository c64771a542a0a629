"""Draws of steps: texts continued by a recipe up to a separator, each with a separate seed, decoded together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbeam import Generation, Method, Pair, decode
from specbeam.core import TURNS
from specbeam.doors import Request, Settings
from specbeam.errors import SpecbeamError


@dataclass(frozen=True)
class Draw:
    """A text to be continued.

    Attributes:
        prompt: token ids.
        seed: seed of its random numbers.
        most: maximum number of tokens of the continuation.
        stop: text that ends the continuation; None: only the model or the limit ends it.
    """

    prompt: list[int]
    seed: int
    most: int
    stop: str | None


@dataclass(frozen=True)
class Drawn:
    """A continuation.

    Attributes:
        tokens: the new token ids.
        text: the text of these tokens.
        finished: whether the model ended the text.
        complete: whether the separator or the model ended it, as opposed to the limit.
        law: law of the continuation.
        target_passes: number of passes of the target.
    """

    tokens: list[int]
    text: str
    finished: bool
    complete: bool
    law: str
    target_passes: int


def seed_of(seed: int, *numbers: int) -> int:
    """Return the seed of a draw: a function of the search's seed and of numbers that identify the draw."""
    (state,) = np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)
    return int(state >> np.uint64(1))


def drawn(
    pair: Pair, draws: Sequence[Draw], method: Method, batch_size: int, options: dict[str, Any]
) -> list[Drawn | SpecbeamError]:
    """Return the continuation of each text, or the error that ended it.

    Law: each is an independent draw from the method's law of the text after its prompt, up to the separator.

    Args:
        batch_size: maximum number of texts decoded at the same time.
        options: as for `specbeam.generate`, without max_new_tokens and stop_strings.
    """
    requests = []
    for draw in draws:
        settings = Settings(**options, max_new_tokens=draw.most, stop_strings=draw.stop)
        requests.append(Request.of(pair, [draw.prompt], method, settings, draw.seed))
    waiting = [session for request in requests for session in request.sessions]
    waiting.sort(key=lambda session: -len(session.prompt))
    for _ in decode(pair.target, waiting, batch_size, ahead=TURNS):
        pass
    found: list[Drawn | SpecbeamError] = []
    for request, draw in zip(requests, draws, strict=True):
        if request.refused:
            found.append(next(iter(request.refused.values())))
            continue
        result = request.result(request.sessions[0])
        found.append(result if isinstance(result, SpecbeamError) else _drawn(request, draw, result[0]))
    return found


def _drawn(request: Request, draw: Draw, answer: Generation) -> Drawn:
    tokens = answer.tokens
    finished = bool(tokens) and tokens[-1] in request.eos
    has_stop = draw.stop is not None and draw.stop in answer.text
    report = answer.report
    return Drawn(tokens, answer.text, finished, finished or has_stop, report.law, report.target_passes)
