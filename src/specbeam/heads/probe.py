"""How well a head fits a target, and which reading of its files fits best.

A wrong reading of a head changes no law, it only makes worse drafts, silently. So each reading that the files leave open is
tried on words of the target itself: how much of the head's law for the next token lies on the target's.
"""

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.core.forest import Forest
from specbeam.heads.eagle import BASE, ReadHead, rotary_config
from specbeam.heads.layers import PairLayer, Rotary
from specbeam.heads.unroll import unrolled
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import FINAL, Needs

TOKENS = 128  # of the text that a head is tried on
CLEARLY = 0.05  # overlap by which another reading has to be better than the documented one, to be taken
POOR = 0.2  # overlap below which a head hardly fits the target


@dataclass(frozen=True)
class Overlap:
    """How well a reading fits: the mean over a text of sum over tokens of min(p, q), for the first and the second draft.

    This is the share of drafts that speculative sampling accepts.
    """

    first: float
    second: float

    @property
    def score(self) -> float:
        """The mean of both."""
        return (self.first + self.second) / 2


@dataclass(frozen=True, eq=False)
class ProbedText:
    """A text of the target: its tokens, and what the target made of all of them but the last."""

    tokens: Int64[Tensor, " tokens"]
    states: dict[int, Float[Tensor, "before size"]]  # hidden states, by `Needs.columns`
    laws: Float[Tensor, "before vocab"]  # of the next token

    def states_at(self, taps: tuple[int, ...]) -> Float[Tensor, "before columns"]:
        """Return the hidden states at some taps, side by side."""
        return torch.cat([self.states[tap] for tap in taps], -1)


class _Owner:
    """Stands in for the session that owns a cache."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.state: dict[Any, Any] = {}


def written_text(target: HuggingFaceLM, start: list[int], tokens: int = TOKENS) -> list[int]:
    """Return `start` with what the target writes after it, its likeliest token each time."""
    text = [*start]
    tokens = min(tokens, target.max_positions or tokens)
    while len(text) < tokens:
        owner = _Owner(text)
        (scored,) = target.extend([owner], [Forest.rooted(text[-1:])])
        target.close(owner)
        text = [*text, int(scored.logits[0].argmax())]
    return text


def probed_text(target: HuggingFaceLM, text: list[int], taps: tuple[int, ...]) -> ProbedText:
    """Return a text with the target's laws, and with its hidden states at these taps and those that its head reads.

    The text is scored as a draft of one chain, so that the laws are those that decoding sees.
    """
    layers = tuple(sorted({tap for tap in taps if tap != FINAL}))
    needs = Needs(logits=True, hidden=True, taps=layers)
    owner = _Owner(text[:1])
    chain = Forest.rooted(text[:1]).grown(text[1:-1], np.arange(len(text) - 2))
    (scored,) = target.extend([owner], [chain], [needs])
    # Copies may be read where gradients are wanted, and after the cache is closed.
    laws = scored.logits.clone().float().softmax(-1)
    parts = scored.hidden.clone().chunk(len(needs.columns), -1)
    target.close(owner)
    return ProbedText(torch.tensor(text), dict(zip(needs.columns, parts, strict=True)), laws)


@torch.inference_mode()
def fit_of(head: ReadHead, text: ProbedText) -> Overlap:
    """Return how well a head fits the target that has made a text."""
    trunk = head.trunk
    device = trunk.fc.weight.device
    features = trunk.features(text.states_at(trunk.shape.taps).to(device))
    steps = unrolled(trunk, text.tokens[1:].to(device), features, 2)
    overlaps = []
    for step, states in enumerate(steps):
        drafted = trunk.logits(states).float().softmax(-1)
        # Row i of step s stands at token i + 1 + s, and so drafts what the target's law behind that token is for.
        wanted = text.laws[1 + step : 1 + step + len(drafted)]
        if head.tokens is not None:
            wanted = wanted[:, head.tokens.to(wanted.device)]
        overlaps.append(float(torch.minimum(wanted.cpu(), drafted[: len(wanted)].cpu()).sum(-1).mean()))
    return Overlap(*overlaps)


def other_readings(head: ReadHead, layers: int) -> Iterator[tuple[str, ReadHead]]:
    """Yield the readings of a head that differ from this one in one thing that writers of heads disagree about.

    Args:
        layers: number of layers of the target.
    """
    shape = head.trunk.shape
    taps = tuple(tap for tap in shape.taps if tap != FINAL)
    for offset, name in ((-1, "hidden states one layer earlier"), (1, "hidden states one layer later")):
        moved = tuple(tap + offset for tap in taps)
        if moved and min(moved) >= 0 and max(moved) <= layers:
            yield name, _changed(head, taps=moved)
    if head.rope["rope_theta"] != BASE:
        yield f"positions of base {BASE:g}", _changed(head, rope={**head.rope, "rope_theta": BASE})
    if head.rope["rope_type"] != "default":
        plain = {"rope_type": "default", "rope_theta": head.rope["rope_theta"]}
        yield "positions without scaling", _changed(head, rope=plain)
    if shape.pairs == "attention":
        name = "feature" if shape.norms_residual else "normed feature"
        yield f"attention added to the {name}", _changed(head, norms_residual=not shape.norms_residual)
    if shape.norms_output:
        name = "states before the norm" if shape.feeds_normed else "normed states"
        yield f"{name} fed back", _changed(head, feeds_normed=not shape.feeds_normed)


def _changed(head: ReadHead, rope: dict[str, Any] | None = None, **shape: Any) -> ReadHead:
    """Return a head that shares all weights with this one, and is read in another way."""
    trunk = copy.copy(head.trunk)
    trunk._modules = dict(trunk._modules)
    trunk.shape = replace(trunk.shape, **shape)
    if rope is not None:
        like = trunk.fc.weight
        trunk.rotary = Rotary(
            rotary_config(trunk.shape.sizes, {"max_position_embeddings": trunk.rotary.positions}, rope)
        ).to(like.device)
    first, *others = trunk.layers
    if isinstance(first, PairLayer) and first.norms_residual != trunk.shape.norms_residual:
        first = copy.copy(first)
        first.norms_residual = trunk.shape.norms_residual
        trunk.layers = torch.nn.ModuleList([first, *others])
    return replace(head, trunk=trunk, rope=head.rope if rope is None else rope)


@dataclass(frozen=True, eq=False)
class Probed:
    """The reading of a head that fits best.

    Attributes:
        documented: the fit of the reading that its files state.
        fit: that of the best reading.
        changes: in what the best reading differs from the stated one.
    """

    head: ReadHead
    documented: Overlap
    fit: Overlap
    changes: tuple[str, ...]


def probed(head: ReadHead, target: HuggingFaceLM, start: list[int]) -> Probed:
    """Try other readings of a head on a text that the target writes, and return the one that fits best.

    Another reading than the stated one is taken only if it is clearly better. Then, and if none fits, a warning says so.

    Args:
        start: the tokens that the text begins with.
    """
    layers = target.model.config.get_text_config().num_hidden_layers
    taps = {tap for tap in head.trunk.shape.taps if tap != FINAL}
    near = {tap + offset for tap in taps for offset in (-2, -1, 0, 1, 2) if 0 <= tap + offset <= layers}
    text = probed_text(target, written_text(target, start), tuple(near))
    documented = best = fit_of(head, text)
    found = head
    changes: tuple[str, ...] = ()
    while True:
        others = [(name, one, fit_of(one, text)) for name, one in other_readings(found, layers)]
        others = [(name, one, fit) for name, one, fit in others if name not in changes]
        if not others:
            break
        name, other, fit = max(others, key=lambda one: one[2].score)
        if fit.score <= best.score + CLEARLY:
            break
        found, best, changes = other, fit, (*changes, name)
    if changes:
        warnings.warn(
            f"the head is read with {', '.join(changes)}, against its files: on words of the target {best.score:.2f} of its "
            f"law lies on the target's so, and {documented.score:.2f} as its files say",
            stacklevel=2,
        )
    elif best.score < POOR:
        warnings.warn(
            f"the head hardly fits the target: {best.score:.2f} of its law lies on the target's; is it for another one?",
            stacklevel=2,
        )
    return Probed(found, documented, best, changes)
