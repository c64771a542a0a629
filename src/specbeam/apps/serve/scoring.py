"""Log-probabilities of texts under the model itself, whatever decoded them."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.beams import NoDraft
from specbeam.core.forest import Forest
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.lm import LM, fill_prompts
from specbeam.core.session import Parts, Session
from specbeam.core.verify.search import SearchRule
from specbeam.errors import BrokenLaw

ROWS = 64  # of a pass: its logits are as many times the vocabulary


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token after its text, and the likeliest tokens there."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # token and log-probability, best first


def score_texts(
    lm: LM, prompt: Sequence[int], texts: Sequence[Sequence[int]], top: int, namespace: str = ""
) -> Generator[None, None, list[list[TokenScore]]]:
    """Return the scores of the tokens of texts that follow a prompt; yield after each pass, so that others may go on.

    What texts have in common is computed once: they are scored as one forest. Values are those of the model's own law,
    log-softmax of its logits, without temperature, truncation, processors or constraint.

    Args:
        prompt: token ids, at least one.
        texts: token ids of each text.
        top: number of likeliest tokens to return for each token.
        namespace: of the prefix cache, see `Session.namespace`.

    Raises `BrokenLaw` if the model has no law somewhere.
    """
    tokens, parents, places = _joined(texts)
    session = _seat(list(prompt))
    session.namespace = namespace
    rows: list[tuple[dict[int, float], list[tuple[int, float]]]] = []
    wanted = _children(texts, places)
    try:
        while not fill_prompts(lm, [session], [session.parts.needs], 1)[0]:
            yield
        forest = Forest.rooted([prompt[-1]])
        for start in range(0, len(tokens) + 1, ROWS):
            stop = min(start + ROWS, len(tokens) + 1)
            fresh = slice(max(start - 1, 0), stop - 1)
            forest = forest.grown(tokens[fresh], parents[fresh])
            (scored,) = lm.extend([session], [forest])
            rows += _read(scored.logits, wanted[start:stop], top)
            yield
    finally:
        lm.close(session)
    return [
        [
            TokenScore(token, rows[place][0][token], rows[place][1])
            for token, place in zip(text, path, strict=True)
        ]
        for text, path in zip(texts, places, strict=True)
    ]  # fmt: skip


def _joined(texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the tokens and parents of the nodes below a root that texts go through, and the node before each token.

    Node 0 is the root; node k is the entry k - 1 of the tokens. The last token of a text needs no node.
    """
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    places: list[list[int]] = []
    for text in texts:
        node = 0
        path = [0][: len(text)]
        for token in text[:-1]:
            if (node, token) not in known:
                tokens.append(token)
                parents.append(node)
                known[node, token] = len(tokens)
            node = known[node, token]
            path.append(node)
        places.append(path)
    return tokens, parents, places


def _children(texts: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens whose log-probability each node is asked for."""
    size = 1 + max((node for path in places for node in path), default=0)
    wanted: list[set[int]] = [set() for _ in range(size)]
    for text, path in zip(texts, places, strict=True):
        for token, node in zip(text, path, strict=True):
            wanted[node].add(token)
    return [sorted(tokens) for tokens in wanted]


def _read(
    logits: torch.Tensor, wanted: Sequence[Sequence[int]], top: int
) -> Iterator[tuple[dict[int, float], list[tuple[int, float]]]]:
    """Yield for each row the log-probabilities of the wanted tokens, and the likeliest tokens with theirs."""
    laws = torch.log_softmax(logits.double(), dim=-1)
    if bool(laws.isnan().any()):
        raise BrokenLaw("the model returned NaN or infinite logits; try float32, or look for overflow in the weights")
    best = laws.topk(min(top, laws.shape[1]), dim=-1)
    for row, tokens in enumerate(wanted):
        likeliest = list(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True))
        yield {token: float(laws[row, token]) for token in tokens}, likeliest


def _seat(prompt: list[int]) -> Session:
    """Return a session that is not decoded: what a model needs to score forests below a prompt."""
    parts = Parts(NoDraft(), SearchRule(1), FixedShape(0, 0), "")
    return Session(prompt, parts, Warp(greedy=True), Limits(1), 0)
