"""Likelihoods of the texts of a window, and of silence, by a pass over them."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from specbeam.core import logits_below
from specbeam.core.laws import Warp, on_host, processed_rows
from specbeam.engines import Source
from specbeam.models import EncoderDecoderLM


@dataclass(frozen=True)
class WindowScores:
    """Scores of the texts of one window.

    Attributes:
        logliks: log-likelihood of each text, summed over its tokens, including the end if it was written.
        no_speech: probability that the window has no speech; None if not asked for.
    """

    logliks: list[float]
    no_speech: float | None


@torch.inference_mode()
def score_window(
    lm: EncoderDecoderLM,
    source: Source,
    start: Sequence[int],
    head: int,
    texts: Sequence[Sequence[int]],
    warp: Warp,
    no_speech: int | None,
) -> WindowScores:
    """Return the scores of texts that the decoder wrote for a window.

    The law is the model's after the processors of `warp`, at temperature 1: a text has the same likelihood in beam search
    as in sampling. The common beginning of the texts is computed once: they are scored as one forest.

    Args:
        start: the first tokens of the decoder.
        head: number of its tokens up to the token that begins a transcript, after which the model predicts silence.
        texts: the tokens after `start`.
        no_speech: the token of silence; None: its probability is not computed.
    """
    tokens, parents, places = _joined(start[head:], texts)
    asked: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by node: text and place of the token that follows it
    for number, path in enumerate(places):
        for place, node in enumerate(path):
            asked[node].append((number, place))
    logliks = [0.0] * len(texts)
    silence = None
    everywhere, later, first_only = _parts_of(warp, len(start))
    with closing(logits_below(lm, start[:head], tokens, parents, context={lm: source})) as passes:
        first = 0
        for logits in passes:
            if not len(logits):  # a part of the prompt was stored
                continue
            rows = on_host(logits)
            if first == 0 and no_speech is not None:
                silence = float(torch.from_numpy(rows[0]).double().softmax(-1)[no_speech])
            rows = processed_rows(rows, everywhere, np.zeros((len(rows), 1), dtype=np.int64).copy)
            for node, row in enumerate(rows, first):
                for number, place in asked[node]:
                    so_far = np.array([[*start, *texts[number][:place]]], dtype=np.int64)
                    made = processed_rows(row[None], first_only if place == 0 else later, so_far.copy)
                    law = torch.from_numpy(made).double().log_softmax(-1)
                    logliks[number] += float(law[0, texts[number][place]])
            first += len(rows)
    return WindowScores(logliks, silence)


def _parts_of(warp: Warp, begin: int) -> tuple[Warp, Warp, Warp]:
    """Return three warps: for all rows at once, then for single rows after the first, and for the first row.

    Processors of transformers that suppress tokens look them up in the vocabulary for each row. Applying them early is
    equivalent, because a banned token stays banned.

    Args:
        begin: the number of the first row's token.
    """
    from transformers import (
        LogitsProcessorList,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )

    processors = list(warp.processors or [])
    banning = [one for one in processors if type(one) is SuppressTokensLogitsProcessor]
    at_first = [one for one in processors if one not in banning]
    later = [
        one for one in at_first if type(one) is not SuppressTokensAtBeginLogitsProcessor or one.begin_index != begin
    ]
    everywhere, following, first = (
        replace(warp, processors=LogitsProcessorList(part)) for part in (banning, later, at_first)
    )
    return everywhere, following, first


def _joined(trunk: Sequence[int], texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the tokens and parents of the nodes below a root, and for each text the node before each of its tokens.

    Node 0 is the root, the trunk hangs under it, and the texts under the trunk. Node k is entry k - 1 of the tokens. The
    last token of a text needs no node.
    """
    tokens = [*trunk]
    parents = [*range(len(trunk))]
    places: list[list[int]] = []
    for text in texts:
        path = [len(trunk)][: len(text)]
        for token in text[:-1]:
            tokens.append(token)
            parents.append(path[-1])
            path.append(len(tokens))
        places.append(path)
    return tokens, parents, places
