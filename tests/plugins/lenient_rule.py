"""A rule of one's own: accept a draft whose logit is at most `margin` below the best one. One sequence, approximate."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specbeam.core.beams import Stop, is_end
from specbeam.core.laws.reduce import SOUND, condition_of_norm
from specbeam.core.steps import borrowed, step
from specbeam.core.verify.turns import verify_turn
from specbeam.core.verify.walk import (
    COUNT,
    NODE,
    emit,
    emitted_layers,
    look_at_token,
    norm_of,
    row_at,
    start_walk,
    verdict_by_step,
)


@borrowed
class LenientSpec(NamedTuple):
    margin: float
    stop: Stop


@verify_turn.of(LenientSpec)
@step
def verify_leniently(rule, turn, dice, evidence, observer):
    forest = turn.forest
    walk = start_walk(len(forest.tokens))
    going = True
    while going:
        node = walk.state[NODE]
        ranked = row_at(turn.rows, node)
        norm = norm_of(ranked)
        condition = condition_of_norm(norm)
        if condition != SOUND:
            return emitted_layers(walk), condition
        row = ranked.logits[0]
        token = np.argmax(row)
        least = row[token] - rule.margin
        child = -1
        for draft in range(node + 1, len(forest.tokens)):
            if child < 0 and forest.parents[draft] == node and row[forest.tokens[draft]] >= least:
                token = forest.tokens[draft]
                child = draft
        ended = is_end(token, rule.stop.eos) or look_at_token(observer, node, token)
        emit(walk, turn.live, np.float64(row[token]) - norm, token, child, ended, child >= 0)
        going = child >= 0 and not ended and turn.length + walk.state[COUNT] < rule.stop.most
    return emitted_layers(walk), SOUND


@dataclass(frozen=True)
class LenientRule:
    margin: float
    law: ClassVar[str] = "approximate: greedy decoding that keeps drafts nearly as likely as the best token"

    def spec(self, session: Any) -> LenientSpec:
        return LenientSpec(self.margin, session.limits.stop)

    def verify(self, session: Any, forest: Any, scored: Any) -> Any:
        return verdict_by_step(session, forest, scored, self.spec(session))
