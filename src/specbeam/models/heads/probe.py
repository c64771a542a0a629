"""The fit of a head to a target, and the reading of its files that fits best.

A wrong reading of a head changes no law; it only makes worse drafts, silently. So each reading that the files allow is tried
on a text of the target itself: the measure is the overlap of the head's and the target's laws of the next token.
"""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specbeam.core.forest import Forest
from specbeam.core.records import FINAL, Needs
from specbeam.models.heads.head import Head
from specbeam.models.heads.trees import ScoredTrees, chain_of
from specbeam.models.huggingface import HuggingFaceLM

TOKENS = 128  # length of the text on which a head is tried
CLEARLY = 0.05  # overlap by which a reading must exceed the documented one to replace it
POOR = 0.2  # overlap below which a head hardly fits the target


@dataclass(frozen=True)
class Overlap:
    """The fit of a reading: the mean over a text of the sum over tokens of min(p, q), for the first and the second draft.

    This is the acceptance rate of speculative sampling.
    """

    first: float
    second: float | None = None  # None: the head makes no second draft

    @property
    def score(self) -> float:
        """The mean of both."""
        return self.first if self.second is None else (self.first + self.second) / 2


class ProbedText(NamedTuple):
    """A text of the target without its last token, and the target's law of the next token at each of its tokens."""

    trees: ScoredTrees
    laws: Float[Tensor, "tokens vocab"]


def written_text(target: HuggingFaceLM, start: list[int], tokens: int = TOKENS) -> list[int]:
    """Return `start` with the target's greedy continuation."""
    text = [*start]
    tokens = min(tokens, target.max_positions or tokens)
    while len(text) < tokens:
        owner: Any = SimpleNamespace(prompt=text, state={})
        (scored,) = target.extend([owner], [Forest.rooted(text[-1:])])
        target.close(owner)
        text = [*text, int(scored.logits[0].argmax())]
    return text


def probed_text(target: HuggingFaceLM, text: list[int], taps: tuple[int, ...]) -> ProbedText:
    """Return a text with the target's laws and its hidden states at these taps; FINAL is the input of its head.

    A head without taps needs no hidden states, which not every engine provides. The text is scored as a draft of one chain,
    so that the laws are the same as in decoding.
    """
    layers = tuple(sorted({tap for tap in taps if tap != FINAL}))
    needs = Needs(logits=True, hidden=FINAL in taps, taps=layers)
    owner: Any = SimpleNamespace(prompt=text[:1], state={})
    chain = Forest.rooted(text[:1]).grown(text[1:-1], np.arange(len(text) - 2))
    (scored,) = target.extend([owner], [chain], [needs])
    # Copies can be used with gradients, and after the cache is closed.
    laws = scored.logits.clone().float().softmax(-1)
    states = {}
    if needs.states:
        parts = scored.hidden.to(laws.device, copy=True).chunk(len(needs.columns), -1)
        states = dict(zip(needs.columns, parts, strict=True))
    target.close(owner)
    tokens = torch.tensor(text[:-1], device=laws.device)
    return ProbedText(chain_of(tokens, states), laws)


@torch.inference_mode()
def fit_of(head: Head, text: ProbedText) -> Overlap:
    """Return the fit of a head to the target of a text."""
    trees = text.trees.to(head.device)
    everywhere = torch.ones_like(trees.tokens, dtype=torch.bool)
    overlaps = []
    for rows in head.drafts(trees, 2, everywhere):
        drafted = rows.logits.float().softmax(-1)
        wanted = text.laws.to(drafted.device)[rows.nodes]
        if head.tokens is not None:
            wanted = wanted[:, head.tokens.to(wanted.device)]
        overlaps.append(float(torch.minimum(wanted, drafted).sum(-1).mean()))
    return Overlap(*overlaps)


@dataclass(frozen=True, eq=False)
class Probed:
    """The reading of a head that fits best.

    Attributes:
        documented: the fit of the reading that its files state.
        fit: the fit of the best reading.
        changes: differences of the best reading from the stated one.
        tried: readings that differ from the stated one in one thing, and their fit.
    """

    head: Head
    documented: Overlap
    fit: Overlap
    changes: tuple[str, ...]
    tried: tuple[tuple[str, Overlap], ...] = ()


def probed(head: Head, target: HuggingFaceLM, start: list[int]) -> Probed:
    """Try other readings of a head on a text that the target writes, and return the one that fits best.

    Another reading replaces the stated one only if it is clearly better, with a warning. It also warns if no reading
    fits.

    Args:
        start: the first tokens of the text.
    """
    layers = target.model.config.get_text_config().num_hidden_layers
    every = [head, *(one for _, one in head.other_readings(layers))]
    taps = {tap for one in every for tap in one.taps}
    moved = {tap + offset for tap in taps - {FINAL} for offset in (-2, -1, 0, 1, 2)}
    near = {tap for tap in moved if 0 <= tap <= layers}
    text = probed_text(target, written_text(target, start), tuple(near | (taps & {FINAL})))
    documented = best = fit_of(head, text)
    found = head
    changes: tuple[str, ...] = ()
    tried: tuple[tuple[str, Overlap], ...] = ()
    while True:
        others = [(name, one, fit_of(one, text)) for name, one in found.other_readings(layers)]
        others = [(name, one, fit) for name, one, fit in others if name not in changes]
        tried = tried or tuple((name, fit) for name, _, fit in others)
        if not others:
            break
        name, other, fit = max(others, key=lambda one: one[2].score)
        if fit.score <= best.score + CLEARLY:
            break
        found, best, changes = other, fit, (*changes, name)
    if changes:
        warnings.warn(
            f"the head is read with {', '.join(changes)}, against its files: its overlap with the target's law is "
            f"then {best.score:.2f} instead of {documented.score:.2f}",
            stacklevel=2,
        )
    elif best.score < POOR:
        warnings.warn(
            f"the head hardly fits the target: the overlap of their laws is {best.score:.2f}; is it for another target?",
            stacklevel=2,
        )
    return Probed(found, documented, best, changes, tried)
