"""A prompt in a model's cache, to time turns of the model on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbeam.core.beams import Beams, Layers
from specbeam.core.forest import Forest
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Scored, Shape, Turn, Verdict


@dataclass(frozen=True)
class TurnCost:
    """What a turn of one model costs, drafts and verdict left out."""

    pass_s: float
    settle_s: float  # keeping what the surviving beams need
    kv_tokens: int  # stored after the pass


class Context:
    """A prompt in the cache, to time turns on. The rows of a turn hang under its last token, as beams that share it do; what
    a turn stores is dropped behind it, so that every turn meets the same cache.

    Args:
        length: tokens of the prompt, at least 1.
    """

    def __init__(self, lm: HuggingFaceLM, length: int) -> None:
        self.lm = lm
        prompt = [(7 * place + 3) % lm.vocab for place in range(length)]
        self.seat: Any = SimpleNamespace(prompt=prompt, state={})
        self.root = Forest.rooted(prompt[-1:])
        lm.extend([self.seat], [self.root])
        self._only_root(self.root)

    def turn(self, rows: int) -> TurnCost:
        """A pass over so many rows, a beam each, and settling it: every other beam ends, the others get two successors."""
        self.lm.extend([self.seat], [self.root])  # its row is known: no pass
        nodes = np.arange(rows, dtype=np.int64)
        forest = self.root.grown(nodes % self.lm.vocab, np.zeros_like(nodes))
        turn = _turn(forest, np.append(0, np.full(rows, -1)), np.append(0, 1 + nodes // 2))
        pass_s = timed(self.lm.device, lambda: self.lm.extend([self.seat], [forest]))
        kv_tokens = self.lm.held(self.seat)
        settle_s = timed(self.lm.device, lambda: self.lm.settle(self.seat, turn))
        self._only_root(Forest.rooted(turn.verdict.beams.tokens))
        return TurnCost(pass_s, settle_s, kv_tokens)

    def _only_root(self, forest: Forest) -> None:
        none = np.zeros(1, dtype=np.int64)
        self.lm.settle(self.seat, _turn(forest, none, none))

    def close(self) -> None:
        self.lm.close(self.seat)


def _turn(forest: Forest, nodes: np.ndarray, parents: np.ndarray) -> Turn:
    """A turn after which these nodes live on; where one is -1, a token without a node under that parent."""
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
    )
    return Turn(Shape(1, count), forest, Scored(), Verdict(layers))


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds, from an idle device to an idle device."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
