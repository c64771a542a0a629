"""DRAFT: the verbs by which compiled turns draft. A drafter whose spec has a step `draft_turn` runs compiled."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, Layers, Texts
from specbeam.core.compiling.held import held_at
from specbeam.core.control.needs import NodeOdds, no_node_odds
from specbeam.core.forest import Forest, TurnRows
from specbeam.core.laws.edits import Edits
from specbeam.core.laws.reduce import SOUND
from specbeam.core.ranked import Listing
from specbeam.core.steps import Array, borrowed, step, verb


class Cut(NamedTuple):
    """The part of a draft that the target scores, and the whole draft, which the draft model knows."""

    forest: Forest  # of the nodes that the target scores or knows
    whole: Forest
    node_map: Array  # int64[nodes of `forest`]: the same nodes in `whole`
    odds: NodeOdds  # of the nodes of `whole`; none if the draft is not cut


@step
def uncut(forest: Forest) -> Cut:
    """Return a draft whose nodes the target all scores."""
    return Cut(forest, forest, np.arange(len(forest.tokens)), no_node_odds())


class DraftTask(NamedTuple):
    """The input of a drafter for one turn."""

    roots: Forest  # a root for each live beam, then nodes whose rows are known
    live: Beams
    texts: Texts  # of the live beams so far
    depth: int
    width: int
    edits: Edits  # of the draft model's rows
    listing: Listing  # the lists from which layers are chosen; WHOLE: whole rows


@verb(0, has_body=False, by_address=True)
def draft_turn(  # type: ignore[empty-body]
    drafts: Any, model: Any, task: DraftTask, dice: Any, spent: Array
) -> tuple[Cut, int]:
    """Return the draft of a turn, and SOUND, DEAD or BROKEN; or UNDECIDED if it has to be drafted again with whole rows.

    Args:
        drafts: the spec of the drafter.
        model: the session's cache in the draft model; in the target if the drafter has no model.
        spent: int64[2], to which the number of passes and the processor's cycles in the model are added.
    """


@verb(0, by_address=True)
@step
def draft_all(
    drafts: Any, like: Any, jobs: Array, models: list[Any], tasks: list[DraftTask], spent: Array
) -> list[tuple[Cut, int]]:
    """Return for each of many sessions the result of `draft_turn`.

    A drafter whose sessions can share the passes of the draft model registers a step for its spec.

    Args:
        drafts: the spec of any of the drafters.
        like, jobs: see `together_steps.run_turns_together`.
        models: where each cache in the draft model is held, see `passes.extend_all`.
        spent: int64[sessions, 2], as in `draft_turn`.
    """
    return draft_one_by_one(drafts, like, jobs, models, tasks, spent)


@step
def draft_one_by_one(
    drafts: Any, like: Any, jobs: Array, models: list[Any], tasks: list[DraftTask], spent: Array
) -> list[tuple[Cut, int]]:
    """Return the drafts of many sessions, one after the other; see `draft_all`."""
    found = []
    for number in range(len(tasks)):
        job = held_at(jobs[number], like)
        found.append(draft_turn(job.spec.drafts, job.draft, tasks[number], job.dice, spent[number]))
    return found


@verb(0)
@step
def own_spec(drafts: Any, like: Any) -> Any:
    """Return the spec of a drafter, which a loop may know only by its address (`core.by_address`).

    Args:
        like: a spec of the same type.
    """
    return drafts


@verb(0, by_address=True)
def nodes_of(drafts: Any, roots: int, depth: int, width: int) -> int:
    """Return the maximum number of nodes that a draft of this shape adds."""
    return depth * width


@verb(0, by_address=True)
def uniforms_of(drafts: Any, roots: int, depth: int, width: int) -> int:
    """Return the maximum number of uniforms that a draft of this shape takes, beyond two per node."""
    return nodes_of(drafts, roots, depth, width)


@verb(0)
def rows_kept(drafts: Any, beams: int, depth: int, width: int) -> int:
    """Return the maximum number of rows of logits that a draft of this shape passes on to the rule."""
    return 0


@verb(0, by_address=True)
def learn_from(drafts: Any, drafted: Cut, layers: Layers, rows: TurnRows) -> None:
    """Learn for later drafts, from the accepted layers or from the target's rows.

    Args:
        rows: of the nodes of `drafted.forest`, before the edits.
    """
    return


@verb(0, by_address=True)
def tosses_of(drafts: Any) -> int:
    """Return the number of used coins of a controller that ends drafts between layers by coins."""
    return 0


@verb(0, by_address=True)
def keep_tosses(drafts: Any, used: int) -> None:
    """Undo the tosses after the first `used` coins."""
    return


@borrowed
class NoDraftSpec(NamedTuple):
    """The spec of `NoDraft`: nothing is drafted."""

    vocab: int


@draft_turn.of(NoDraftSpec)
@step
def draft_nothing(drafts: NoDraftSpec, model: Any, task: DraftTask, dice: Any, spent: Array) -> tuple[Cut, int]:
    """Return the roots; see `draft_turn`."""
    return uncut(task.roots), SOUND


@nodes_of.of(NoDraftSpec)
def no_nodes(drafts: NoDraftSpec, roots: int, depth: int, width: int) -> int:
    """Return 0."""
    return 0
