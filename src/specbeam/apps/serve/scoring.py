"""Log-probabilities of texts under the target model, independent of the method that decoded them."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specbeam.core import LM, logits_below
from specbeam.errors import BrokenLaw


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of a token given the tokens before it, and the likeliest tokens at its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # token and log-probability, best first


class _NodeScores(NamedTuple):
    """Log-probabilities after a node: of requested tokens, and of the likeliest ones, best first."""

    logprobs: dict[int, float]
    best: list[tuple[int, float]]


def score_texts(
    lm: LM, prompt: Sequence[int], texts: Sequence[Sequence[int]], top: int, namespace: str = ""
) -> Generator[None, None, list[list[TokenScore]]]:
    """Return the scores of the tokens of texts that follow a prompt; yield after each pass, so that other work can run.

    Common prefixes of texts are computed once: the texts are scored as one forest. Log-probabilities are the log-softmax
    of the model's logits, without temperature, truncation, processors or constraint.

    Args:
        prompt: token ids, at least one.
        texts: token ids of each text.
        top: number of likeliest tokens to return for each token.
        namespace: namespace of the prefix cache, see `Session.namespace`.

    Raises `BrokenLaw` if logits are NaN or infinite.
    """
    tokens, parents, places = _joined(texts)
    wanted = _children(texts, places)
    found: list[_NodeScores] = []
    with closing(logits_below(lm, prompt, tokens, parents, namespace=namespace)) as passes:
        for logits in passes:
            if len(logits):
                found += _read(logits, wanted[len(found) : len(found) + len(logits)], top)
            yield
    scores = []
    for text, path in zip(texts, places, strict=True):
        nodes = [found[place] for place in path]
        scores.append(
            [TokenScore(token, node.logprobs[token], node.best) for token, node in zip(text, nodes, strict=True)]
        )
    return scores


def _joined(texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return texts as a tree: tokens and parents of the nodes below the root, and the node before each token of each text.

    Node 0 is the root; node k is entry k - 1 of the tokens. The last token of a text needs no node.
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
    """Return the tokens whose log-probabilities are needed after each node."""
    size = 1 + max((node for path in places for node in path), default=0)
    wanted: list[set[int]] = [set() for _ in range(size)]
    for text, path in zip(texts, places, strict=True):
        for token, node in zip(text, path, strict=True):
            wanted[node].add(token)
    return [sorted(tokens) for tokens in wanted]


def _read(logits: torch.Tensor, wanted: Sequence[Sequence[int]], top: int) -> Iterator[_NodeScores]:
    """Yield the scores of each row."""
    laws = torch.log_softmax(logits.double(), dim=-1)
    if bool(laws.isnan().any()):
        raise BrokenLaw("the model returned NaN or infinite logits; try float32, or look for overflow in the weights")
    best = laws.topk(min(top, laws.shape[1]), dim=-1)
    for row, tokens in enumerate(wanted):
        likeliest = list(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True))
        logprobs = {token: float(laws[row, token]) for token in tokens}
        yield _NodeScores(logprobs, likeliest)
