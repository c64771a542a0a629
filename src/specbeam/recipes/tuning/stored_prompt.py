"""A prompt in a model's cache, to time turns of the model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbeam.core.beams import Beams, Layers
from specbeam.core.forest import Forest
from specbeam.core.lm import LM
from specbeam.core.records import Scored, Shape, Turn, Verdict
from specbeam.core.threads import allowed_threads
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.made_up import made_up_prompt, made_up_rows


@dataclass(frozen=True)
class TurnCost:
    """The cost of one turn of one model, without drafting and without the rule.

    Attributes:
        pass_s: seconds of the pass.
        settle_s: seconds of the update of the cache, which keeps the tokens of the surviving beams.
        kv_tokens: number of tokens in the cache after the pass.
    """

    pass_s: float
    settle_s: float
    kv_tokens: int


def made_up_context(*models: LM) -> dict[LM, Any]:
    """Return the context of a session for these models: a made-up source for each model with an encoder."""
    return {lm: lm.made_up_source() for lm in models if isinstance(lm, EncoderDecoderLM)}


class StoredPrompt:
    """A prompt in the cache, to time turns. Models with an encoder get a short made-up source.

    The rows of a turn are children of the last token of the prompt, like beams that share the prompt. The tokens that a turn
    stores are dropped after it, so all turns start with the same cache.

    Attributes:
        session: stands in for the session that owns the cache.
        root: the forest with only the last token of the prompt.
    """

    def __init__(self, lm: HuggingFaceLM, length: int) -> None:
        """Store a prompt of `length` tokens, at least 1."""
        self.lm = lm
        prompt = made_up_prompt(length, lm.vocab)
        self.session: Any = SimpleNamespace(prompt=prompt, state={}, context=made_up_context(lm))
        self.root = Forest.rooted(prompt[-1:])
        lm.extend([self.session], [self.root])
        self._keep_only(self.root)

    def turn(self, rows: int) -> TurnCost:
        """Time a pass over `rows` rows, one per beam, and settling it.

        Every other beam ends, and the others get two successors each.
        """
        self.lm.extend([self.session], [self.root])  # runs no pass, because the root's row is known
        nodes = np.arange(rows, dtype=np.int64)
        forest = made_up_rows(self.root, rows, self.lm.vocab)
        turn = _turn(forest, np.append(0, np.full(rows, -1)), np.append(0, 1 + nodes // 2))
        works_alone = self.lm.is_compiled and allowed_threads() == 1
        pass_s = seconds_of(self.lm.device, lambda: self.lm.extend([self.session], [forest]), works_alone)
        kv_tokens = self.lm.held(self.session)
        settle_s = seconds_of(self.lm.device, lambda: self.lm.settle(self.session, turn), works_alone)
        self._keep_only(Forest.rooted(turn.verdict.beams.tokens))
        return TurnCost(pass_s, settle_s, kv_tokens)

    def _keep_only(self, forest: Forest) -> None:
        """Settle a turn after which only the root of the forest survives."""
        none = np.zeros(1, dtype=np.int64)
        self.lm.settle(self.session, _turn(forest, none, none))

    def close(self) -> None:
        """Free the cache."""
        self.lm.close(self.session)


def _turn(forest: Forest, nodes: np.ndarray, parents: np.ndarray) -> Turn:
    """Return a turn after which these nodes survive.

    A node of -1 stands for a token outside the forest, below the parent at the same index.
    """
    count = len(nodes)
    tokens = np.where(nodes < 0, 0, forest.tokens[nodes])
    beams = Beams(nodes, tokens, np.zeros(count), np.ones(count, dtype=np.int64), np.arange(count, dtype=np.uint64))
    layers = Layers(
        parents=parents,
        beams=beams,
        ended=np.zeros(count, dtype=bool),
        draw_ends=np.array([count]),
        widths=np.array([count]),
        passed=np.zeros(1, dtype=bool),
        sources=np.zeros((1, 3), dtype=np.int64),
        edges=np.full(1, np.nan),
    )
    return Turn(Shape(1, count), forest, Scored(), Verdict(layers))


def seconds_of(device: torch.device, work: Callable[[], object], is_of_thread: bool = False) -> float:
    """Return the seconds of some work; the device is idle before and after it.

    Args:
        is_of_thread: whether the current thread does all the work. Then time in which other programs use its processor does
            not count.
    """
    _wait(device)
    began = time.perf_counter()
    began_in_thread = time.thread_time()
    work()
    _wait(device)
    in_thread = time.thread_time() - began_in_thread
    seconds = time.perf_counter() - began
    return min(seconds, in_thread) if is_of_thread else seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
