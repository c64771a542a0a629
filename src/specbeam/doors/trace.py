"""Traces: the turns of a text as JSON, and the viewer that shows them as one forest, in notebooks and on a page."""

import json
import time
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from specbeam.core.records import Turn
from specbeam.core.session import Session
from specbeam.doors.grammar.spelling import text_of_tokens
from specbeam.doors.places import require_suffix, write_output
from specbeam.doors.render import Leaf, Words, picture

VIEWER = Path(__file__).parent / "viewer"
MOST_ENDED = 16  # finished texts of a turn's record
HEIGHT = 620  # pixels of the viewer in a notebook


@dataclass
class Trace:
    """The turns of one text, recorded while it was decoded. A notebook shows them as a forest with play and scrubber.

    Attributes:
        turns: a record of each turn, see `turn_record`.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = time.perf_counter()  # when the last turn ended

    def __repr__(self) -> str:
        return f"<Trace of {len(self.turns)} turns>"

    def add(self, session: Session, turn: Turn, words: Words) -> None:
        """Record a turn.

        Args:
            session: the session after the turn.
            words: returns the text of a token.
        """
        now = time.perf_counter()
        self.turns.append(turn_record(session, turn, words, len(self.turns) + 1, 1000 * (now - self._ended)))
        self._ended = now

    def to_html(self) -> str:
        """Return a page with the forest, which needs no other file and no network."""
        style, script = viewer_parts()
        turns = json.dumps(self.turns, ensure_ascii=False).replace("<", "\\u003c")  # no text can end the script
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>The forest of a text</title>'
            f'<style>{style}</style><body class="alone"><script type="module">{script}\nalone({turns});</script></html>'
        )

    def save(self, path: str | Path) -> None:
        """Write the page with the forest to a file, whose name must end in .html. Raises `BadSetting` for another name."""
        require_suffix(Path(path), ".html", ".htm")
        write_output(Path(path), self.to_html())

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that it neither reads nor changes the notebook."""
        return (
            f'<iframe title="The forest of a text" sandbox="allow-scripts allow-downloads" style="border:0;width:100%;'
            f'height:{HEIGHT}px" srcdoc="{escape(self.to_html())}"></iframe>'
        )


def words_of(tokenizer: Any) -> Words:
    """Return a function that returns the text of a token as it stands within a text, with its spaces.

    Args:
        tokenizer: None: the text of a token is its id.
    """
    return str if tokenizer is None else lru_cache(maxsize=2**16)(partial(_word, tokenizer))


def _word(tokenizer: Any, token: int) -> str:
    text = text_of_tokens(tokenizer, [token])
    return text or str(tokenizer.decode([token], skip_special_tokens=False))  # "": a special token


@cache
def viewer_parts() -> tuple[str, str]:
    """Return the style and the script of the viewer."""
    return (VIEWER / "forest.css").read_text(encoding="utf-8"), (VIEWER / "forest.js").read_text(encoding="utf-8")


def turn_record(session: Session, turn: Turn, words: Words, number: int, milliseconds: float) -> dict[str, Any]:
    """Return a turn as JSON.

    Its fields: `n`, `ms`, the planned `depth` and `width`; `nodes` as [parent, text, fate, p, q], parents first; `live`, the
    node of each live beam, which is a root of the next turn, in the same order; `ends`, the nodes at which texts ended, as
    [node, score]; `widths` of the layers and how many were `accepted`; live `beams` as [text after the settled one, score];
    the latest `ended` texts as [text, score, finished]; and the `settled` text that all live beams share.

    Args:
        session: the session after the turn.
        words: returns the text of a token.
        number: number of the turn, from 1.
        milliseconds: duration of the turn.
    """

    def text_of(tokens: list[int]) -> str:
        return "".join(map(words, tokens))

    verdict = turn.verdict
    leaves = picture(turn, words) if verdict.trials else fates(turn, words)
    limits = session.limits
    length = session.length
    beams: list[tuple[list[int], float]] = [
        (tail.tolist(), limits.normalised(float(score), length))
        for tail, score in zip(session.tails, session.beams.scores, strict=True)
    ]
    ended: list[tuple[list[int], float, bool]] = [
        (one.tokens, limits.normalised(one.loglik, len(one.tokens)), one.finished)
        for one in session.ended[-MOST_ENDED:]
    ]
    places = _Places(leaves, turn.forest.size)
    live = [
        places.of(int(node), int(parent), words(int(token)))
        for node, parent, token in zip(verdict.beams.nodes, verdict.parents, verdict.beams.tokens, strict=True)
    ]
    ends = []
    before = length - len(verdict.steps) if len(live) else length  # the length stays if no beam lives on
    for place, step in enumerate(verdict.steps):
        for draw in np.flatnonzero(step.ended).tolist():
            text = words(int(step.beams.tokens[draw]))
            node = places.of(int(step.beams.nodes[draw]), int(step.parents[draw]), text)
            ends.append([node, limits.normalised(float(step.beams.scores[draw]), before + place + 1)])
    return {
        "n": number,
        "ms": round(milliseconds, 3),
        "depth": turn.shape.depth,
        "width": turn.shape.width,
        "nodes": [[leaf.parent, leaf.text, leaf.fate, leaf.p, leaf.q] for leaf in leaves],
        "live": live,
        "ends": ends,
        "widths": [int(step.width) for step in verdict.steps],
        "accepted": verdict.accepted,
        "beams": [[text_of(tail), score] for tail, score in beams],
        "ended": [[text_of(tokens), score, finished] for tokens, score, finished in ended],
        "settled": text_of(session.settled),
    }


class _Places:
    """The places of draws among the nodes of a picture.

    Args:
        leaves: the nodes of the forest, then the tokens that the target chose without a draft.
        drafted: number of nodes of the forest.
    """

    def __init__(self, leaves: list[Leaf], drafted: int) -> None:
        self._own = {(leaf.parent, leaf.text): place for place, leaf in enumerate(leaves) if place >= drafted}

    def of(self, node: int, parent: int, text: str) -> int:
        """Return the place of a draw: its node, or if it has none (-1) the place of the target's own choice."""
        return node if node >= 0 else self._own[parent, text]


def fates(turn: Turn, words: Words) -> list[Leaf]:
    """Return the nodes of a turn's forest with their fates, for methods that record no trials.

    Nodes that became beams are accepted, other children of live parents are rejected, and deeper nodes are unused. Tokens
    that the target chose without a draft are resampled.
    """
    forest = turn.forest
    parents = np.asarray(forest.parents)
    fate = ["root" if parent < 0 else "unused" for parent in parents.tolist()]
    fresh: list[Leaf] = []
    for step in turn.verdict.steps:
        reached = set(step.parents.tolist())
        for node, parent in enumerate(parents.tolist()):
            if parent in reached and fate[node] == "unused":
                fate[node] = "rejected"
        for parent, node, token in zip(step.parents, step.beams.nodes, step.beams.tokens, strict=True):
            if node >= 0:
                fate[int(node)] = "accepted"
            else:
                fresh.append(Leaf(int(parent), words(int(token)), "resampled"))
    nodes = [
        Leaf(int(parent), words(int(token)), what)
        for parent, token, what in zip(parents, forest.tokens, fate, strict=True)
    ]
    return nodes + fresh
