"""VERIFY: the verb by which compiled turns are decided. A rule whose spec has a step `verify_turn` runs compiled."""

from typing import Any, NamedTuple

from specbeam.core.beams import Beams, Finished, Layers
from specbeam.core.forest import Forest
from specbeam.core.laws.evidence import Evidence
from specbeam.core.steps import verb


class ScoredTurn(NamedTuple):
    """A turn that the target has scored and a rule is to judge."""

    rows: Any  # the `TurnRows` of the forest's nodes; or an object that makes laws in Python
    forest: Forest  # the drafts
    live: Beams  # the roots
    widths: Any  # numbers of draws of the layers; see `control.width.asked_width`
    length: int  # number of tokens before the first layer
    finished: Finished  # scores of the beams that ended, to which a rule adds those that end in the turn


@verb(0, has_body=False, by_address=True)
def verify_turn(  # type: ignore[empty-body]
    rule: Any, turn: ScoredTurn, dice: Any, evidence: Evidence, observer: Any
) -> tuple[Layers, int]:
    """Return the layers that a turn decides, and SOUND; or DEAD or BROKEN if the target had no law to draw from.

    Args:
        rule: the spec of the rule.
        dice: the uniforms of the session.
        evidence: trials and first draws are noted in it, for audits.
        observer: an object that is shown each layer in Python, or None.
    """


@verb(0)
def ends_between_layers(rule: Any) -> bool:
    """Return whether beams may end without being in a layer, so that only Python sees their texts."""
    return False
