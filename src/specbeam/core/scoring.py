"""Logits of a model for given continuations of a prompt."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.beams import NoDraft
from specbeam.core.forest import Forest
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.lm import LM, fill_prompts
from specbeam.core.session import Parts, Session
from specbeam.core.verify.search import SearchRule

ROWS = 64  # nodes of a pass, which limits the memory for logits


def logits_below(
    lm: LM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    context: Mapping[LM, Any] | None = None,
    namespace: str = "",
) -> Generator[torch.Tensor, None, None]:
    """Yield the logits at the end of a prompt and at the nodes of a forest below it, float[rows, vocab] for each pass.

    Each pass reads up to `ROWS` nodes, in their order. A pass that only stores a chunk of a long prompt yields no rows.

    Args:
        prompt: token ids, at least one. Its last token is node 0.
        tokens: the tokens of the nodes 1, 2, ...
        parents: the parent of each of them; parents come before their children.
        context: inputs of the models other than the prompt, see `Session.context`.
        namespace: of the prefix cache, see `Session.namespace`.
    """
    parts = Parts(NoDraft(), SearchRule(1), FixedShape(0, 0), "")
    session = Session(list(prompt), parts, Warp(greedy=True), Limits(1), 0)
    session.context = dict(context or {})
    session.namespace = namespace
    try:
        while not fill_prompts(lm, [session], [session.parts.needs], 1)[0]:
            yield torch.empty(0, lm.vocab)
        forest = Forest.rooted([prompt[-1]])
        for start in range(0, len(tokens) + 1, ROWS):
            stop = min(start + ROWS, len(tokens) + 1)
            fresh = slice(max(start - 1, 0), stop - 1)
            forest = forest.grown(tokens[fresh], parents[fresh])
            (scored,) = lm.extend([session], [forest])
            yield scored.logits
    finally:
        lm.close(session)
