"""DRAFT: the draft of a single session in one compiled call, for turns that Python decides."""

from typing import Any

import numpy as np

from specbeam.core.draft.turns import Cut, DraftTask, draft_turn, nodes_of, rows_kept, uniforms_of
from specbeam.core.errors import BrokenLaw
from specbeam.core.forest import Forest, no_frontier_rows
from specbeam.core.laws.edits import NO_EDITS
from specbeam.core.laws.reduce import BROKEN
from specbeam.core.lm import runs_in_steps
from specbeam.core.ranked import WHOLE
from specbeam.core.records import Shape
from specbeam.core.session import Session


def drafted_by_steps(lm: Any, session: Session, shape: Shape, spec: Any, roots: Forest) -> Cut | None:
    """Return the draft of a session; None if steps cannot run the model, or Python has to see the rows.

    If the model's logits are broken, the session fails, and the draft up to there is returned.

    Args:
        lm: the draft model.
        spec: the spec of the drafter.
        roots: the forest that the turn starts with.
    """
    if shape.depth <= 0 or not session.warp.takes_raw_rows or not runs_in_steps(lm):
        return None
    beams = session.beams
    nodes = int(nodes_of(spec, beams.size, shape.depth, shape.width))
    dice = session.dice.ready(int(uniforms_of(spec, beams.size, shape.depth, shape.width)))
    with lm.cache_for_steps(session, nodes) as model:
        if model is None:
            return None
        rows = rows_kept(spec, beams.size, shape.depth, shape.width)
        frontier_rows = no_frontier_rows(rows, lm.vocab if rows else 0, np.float32)
        spent = np.zeros(2, dtype=np.int64)
        begun = roots._replace(frontier_rows=frontier_rows)
        with model.count_passes(spent):
            task = DraftTask(begun, beams, session.texts, shape.depth, shape.width, NO_EDITS, WHOLE)
            drafted, condition = draft_turn(spec, model.arrays, task, dice, spent)
    session.count.draft_passes += int(spent[0])
    if condition == BROKEN:
        with session.failing_alone("draft model: "):
            raise BrokenLaw("the model returned NaN or +inf logits; try float32, or look for overflow in the weights")
    found: Cut = drafted
    return found
