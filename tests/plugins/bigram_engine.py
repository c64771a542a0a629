"""An engine of one's own: a language model whose next token depends on the last one, as a table of logits."""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from specbeam.core.lm import Uncached
from specbeam.core.passes import extend, has_room_for, rewind, settle_target
from specbeam.core.records import Scored
from specbeam.core.steps import Array, borrowed, step


@borrowed
class BigramCache(NamedTuple):
    logits: Array  # float32[vocab, vocab], by the last token


@extend.of(BigramCache)
@step
def extend_bigrams(cache, tokens, parents, wanted):
    rows = np.empty((len(wanted), cache.logits.shape[1]), dtype=np.float32)
    for place in range(len(wanted)):
        rows[place] = cache.logits[tokens[wanted[place]]]
    return rows


@has_room_for.of(BigramCache)
def has_always_room(cache, fresh, beams):
    return True


@rewind.of(BigramCache)
def rewind_nothing(cache, nodes):
    return


@settle_target.of(BigramCache)
def settle_nothing(cache, tree, nodes, tokens, parents, kept):
    return


class BigramLM(Uncached):
    supports_runs = True

    def __init__(self, logits):
        self.cache = BigramCache(np.ascontiguousarray(logits, dtype=np.float32))
        self.vocab = logits.shape[1]
        self.passes = 0

    def extend(self, sessions, forests, needs=None):
        self.passes += 1
        self.needs_of_each(sessions, needs)
        answers = []
        for session, forest in zip(sessions, forests, strict=True):
            fresh = self.take_new_nodes(session, forest)
            answers.append(Scored(torch.from_numpy(self.cache.logits[forest.tokens[fresh]])))
        return answers

    @contextmanager
    def _cache(self):
        yield self.cache

    def for_run(self, session, fresh, beams, more, needs=None):
        return self._cache()

    def finish_run(self, session, passes, roots):
        self.passes += passes
