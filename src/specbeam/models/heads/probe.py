"""The fit of a head to a target, and the reading of its files that fits best.

A wrong reading of a head changes no law; it only makes worse drafts, silently. So each reading that the files allow is tried
on texts drawn from the target itself: the measure is the overlap of the head's and the target's laws of the next token.
Greedy texts would not do: small models repeat themselves in them, and any head guesses a repetition.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specbeam.core.errors import warn
from specbeam.core.forest import Forest
from specbeam.core.records import FINAL, Needs
from specbeam.models.heads.head import Head
from specbeam.models.heads.trees import ScoredTrees, chain_of
from specbeam.models.huggingface import HuggingFaceLM

TOKENS = 128  # number of drawn tokens on which a head is tried
LONGEST = 64  # tokens that are drawn for one text
CLEARLY = 0.05  # overlap by which a reading must exceed the documented one to replace it
POOR = 0.2  # overlap below which a head hardly fits the target


@dataclass(frozen=True)
class Overlap:
    """The fit of a reading: the mean over drawn tokens of the sum over the vocabulary of min(p, q), for two drafts.

    On texts drawn from the target this is the acceptance rate of speculative sampling.
    """

    first: float
    second: float | None = None  # None: the head makes no second draft

    @property
    def score(self) -> float:
        """The mean of both."""
        return self.first if self.second is None else (self.first + self.second) / 2


class TextStarts(NamedTuple):
    """The beginnings of the texts that a target draws, and the tokens that end a text."""

    starts: Sequence[list[int]]
    ends: tuple[int, ...] = ()


class ProbedText(NamedTuple):
    """A text of the target without its last token, and the target's law of the next token at each of its tokens."""

    trees: ScoredTrees
    laws: Float[Tensor, "tokens vocab"]
    given: int = 1  # number of tokens at its beginning that the target did not draw


def drawn_texts(target: HuggingFaceLM, texts: TextStarts, tokens: int = TOKENS) -> list[tuple[list[int], int]]:
    """Return texts drawn from the target at temperature 1, `tokens` new ones in all, each with the length of its start.

    A text ends with an end token, or after `LONGEST` tokens. The draws are the same on each call.
    """
    rng = np.random.default_rng(0)
    found = []
    for start in itertools.cycle(texts.starts):
        most = min(LONGEST, tokens, (target.max_positions or len(start) + tokens) - len(start))
        text = drawn_text(target, start, most, texts.ends, rng)
        found.append((text, len(start)))
        tokens -= max(len(text) - len(start), 1)  # a start that fills the model's positions ends this, too
        if tokens <= 0:
            break
    return found


def drawn_text(
    target: HuggingFaceLM, start: list[int], most: int, ends: tuple[int, ...], rng: np.random.Generator
) -> list[int]:
    """Return `start` with up to `most` tokens drawn from the target's law, until an end token."""
    text = [*start]
    while len(text) < len(start) + most:
        owner: Any = SimpleNamespace(prompt=text, state={})
        (scored,) = target.extend([owner], [Forest.rooted(text[-1:])])
        target.close(owner)
        law = scored.logits[0].double().softmax(-1).cpu().numpy()
        token = int(np.searchsorted(law.cumsum(), rng.random() * law.sum(), side="right"))
        text = [*text, min(token, len(law) - 1)]
        if token in ends:
            break
    return text


def probed_text(target: HuggingFaceLM, text: list[int], taps: tuple[int, ...], given: int = 1) -> ProbedText:
    """Return a text with the target's laws and its hidden states at these taps; FINAL is the input of its head.

    A head without taps needs no hidden states, which not every engine provides. The text is scored as a draft of one chain,
    so that the laws are the same as in decoding.

    Args:
        given: number of tokens at the text's beginning that the target did not draw.
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
    return ProbedText(chain_of(tokens, states), laws, given)


@torch.inference_mode()
def fit_of(head: Head, texts: Sequence[ProbedText]) -> Overlap:
    """Return the fit of a head to the target at the drawn tokens of texts."""
    overlaps: tuple[list[Tensor], list[Tensor]] = ([], [])
    for text in texts:
        trees = text.trees.to(head.device)
        everywhere = torch.ones_like(trees.tokens, dtype=torch.bool)
        for depth, rows in enumerate(head.drafts(trees, 2, everywhere)):
            drafted = rows.logits.float().softmax(-1)
            wanted = text.laws.to(drafted.device)[rows.nodes]
            if head.tokens is not None:
                wanted = wanted[:, head.tokens.to(wanted.device)]
            is_drawn = rows.nodes >= text.given - 1  # a node's law is that of the token after it
            overlaps[depth].append(torch.minimum(wanted, drafted).sum(-1)[is_drawn])
    return Overlap(*(float(torch.cat(each).mean()) for each in overlaps if each))


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


def probed(head: Head, target: HuggingFaceLM, texts: TextStarts) -> Probed:
    """Try other readings of a head on texts that the target draws, and return the one that fits best.

    Another reading replaces the stated one only if it is clearly better, with a warning. It also warns if no reading
    fits.

    Args:
        texts: the beginnings of the texts.
    """
    layers = target.model.config.get_text_config().num_hidden_layers
    every = [head, *(one for _, one in head.other_readings(layers))]
    taps = {tap for one in every for tap in one.taps}
    moved = {tap + offset for tap in taps - {FINAL} for offset in (-2, -1, 0, 1, 2)}
    near = {tap for tap in moved if 0 <= tap <= layers}
    wanted = tuple(near | (taps & {FINAL}))
    drawn = [probed_text(target, text, wanted, given) for text, given in drawn_texts(target, texts)]
    documented = best = fit_of(head, drawn)
    found = head
    changes: tuple[str, ...] = ()
    tried: tuple[tuple[str, Overlap], ...] = ()
    while True:
        others = [(name, one, fit_of(one, drawn)) for name, one in found.other_readings(layers)]
        others = [(name, one, fit) for name, one, fit in others if name not in changes]
        tried = tried or tuple((name, fit) for name, _, fit in others)
        if not others:
            break
        name, other, fit = max(others, key=lambda one: one[2].score)
        if fit.score <= best.score + CLEARLY:
            break
        found, best, changes = other, fit, (*changes, name)
    if changes:
        warn(
            f"the head is read with {', '.join(changes)}, against its files: its overlap with the target's law is "
            f"then {best.score:.2f} instead of {documented.score:.2f}",
        )
    elif best.score < POOR:
        warn(hardly_fits(best))
    return Probed(found, documented, best, changes, tried)


def hardly_fits(fit: Overlap) -> str:
    """Return the sentence about a head with such a fit, which is below `POOR`."""
    return (
        f"the head hardly fits the target: the overlap of their laws is {fit.score:.2f}; is it for another target, or "
        "hardly trained?"
    )
