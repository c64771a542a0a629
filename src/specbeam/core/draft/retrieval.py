"""DRAFT without a model, as steps: chains of tokens that followed earlier occurrences of the last tokens of a text."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import BEAMS, Texts, is_end
from specbeam.core.draft.indexes import find_after, read_text
from specbeam.core.draft.turns import Cut, DraftTask, draft_turn, nodes_of, uncut
from specbeam.core.forest import LOST, Forest, find_child, groups_without_laws
from specbeam.core.laws.reduce import SOUND
from specbeam.core.steps import Array, borrowed, step


@borrowed
class RetrievalSpec(NamedTuple):
    """How chains are retrieved from the text."""

    index: Any  # a `GramIndex` or a `SuffixIndex`, which grows with the text of the session
    offset: int  # number of tokens before the first new one: the source of an encoder-decoder, and the prompt
    eos: Array  # int64[ends]


@step
def find_chains(spec: RetrievalSpec, texts: Texts, depth: int) -> tuple[Array, Array]:
    """Return the continuation of each live beam, by its start and stop in the text of the index, int64[beams] each."""
    index = spec.index
    read_text(index, spec.offset, texts)
    beams = texts.sizes[BEAMS]
    starts = np.zeros(beams, dtype=np.int64)
    stops = np.zeros(beams, dtype=np.int64)
    for beam in range(beams):
        starts[beam], stops[beam] = find_after(index, spec.offset, texts, beam, depth)
    return starts, stops


@step
def hang_chains(roots: Forest, tokens: Array, starts: Array, stops: Array, eos: Array) -> Forest:
    """Return a forest with a chain under each root, the tokens from starts[k] to before stops[k] under root k.

    A chain ends before its first end token or negative token; the latter stands for an embedding in a prompt. Tokens
    that already are nodes of the forest get no second node. All groups are LOST.

    Args:
        roots: the forest that a turn starts with, without groups of siblings.
        tokens: int64[n].
        starts, stops: int64[roots].
    """
    begun = len(roots.tokens)
    most = 0
    for root in range(len(starts)):
        most += stops[root] - starts[root]
    new_tokens = np.empty(most, dtype=np.int64)
    new_parents = np.empty(most, dtype=np.int64)
    draw_tokens = np.empty(most, dtype=np.int64)
    draw_parents = np.empty(most, dtype=np.int64)
    draw_nodes = np.empty(most, dtype=np.int64)
    born = 0
    draws = 0
    for root in range(len(starts)):
        parent = root
        for place in range(starts[root], stops[root]):
            token = tokens[place]
            if token < 0 or is_end(token, eos):
                break
            node = -1
            if parent < begun:
                node = find_child(roots.tokens, roots.parents, parent, token)
            if node < 0:
                node = begun + born
                new_tokens[born] = token
                new_parents[born] = parent
                born += 1
            draw_tokens[draws] = token
            draw_parents[draws] = parent
            draw_nodes[draws] = node
            draws += 1
            parent = node
    ends = np.arange(1, draws + 1)
    groups = groups_without_laws(LOST, draw_parents[:draws], ends, draw_tokens[:draws], draw_nodes[:draws])
    return Forest(
        np.concatenate((roots.tokens, new_tokens[:born])),
        np.concatenate((roots.parents, new_parents[:born])),
        groups,
        roots.logq,
        roots.beams,
        roots.frontier_rows,
        roots.known,
    )


@draft_turn.of(RetrievalSpec)
@step
def draft_retrieved(drafts: RetrievalSpec, model: Any, task: DraftTask, dice: Any, spent: Array) -> tuple[Cut, int]:
    """Return a retrieved chain under each root; see `draft_turn`."""
    starts, stops = find_chains(drafts, task.texts, task.depth)
    return uncut(hang_chains(task.roots, drafts.index.text, starts, stops, drafts.eos)), SOUND


@nodes_of.of(RetrievalSpec)
def nodes_of_chains(drafts: RetrievalSpec, roots: int, depth: int, width: int) -> int:
    """Return the most nodes of a chain under each root; see `nodes_of`."""
    return roots * depth
