"""VERIFY: the verb by which compiled turns are decided. A rule whose spec has a step `verify_turn` runs compiled."""

from typing import Any

from specbeam.core.beams import Beams, Finished, Layers
from specbeam.core.forest import Forest
from specbeam.core.laws.evidence import Evidence
from specbeam.core.steps import verb


@verb(3, has_body=False)
def verify_turn(  # type: ignore[empty-body]
    rows: Any, forest: Forest, live: Beams, rule: Any, widths: Any, length: int, finished: Finished, dice: Any,
    evidence: Evidence, observer: Any,
) -> tuple[Layers, int]:  # fmt: skip
    """Return the layers that a turn decides, and SOUND; or DEAD or BROKEN if the target had no law to draw from.

    Args:
        rows: the `TurnRows` of the forest's nodes; or an object that makes laws in Python.
        forest: the drafts.
        live: the live beams, which are the roots.
        rule: the spec of the rule.
        widths: how many draws a layer gets; see `control.width.asked_width`.
        length: number of tokens before the first layer.
        finished: scores of the beams that ended; those that end here are added.
        dice: the uniforms of the session.
        evidence: trials and first draws are noted in it, for audits.
        observer: an object that sees each layer in Python; None: there is none.
    """


@verb(0)
def ends_between_layers(rule: Any) -> bool:
    """Return whether beams may end without being in a layer, so that only Python sees their texts."""
    return False
