"""Callbacks of compiled runs into Python, for logits processors and constraints."""

import ctypes
import threading
import weakref
from functools import partial

import numpy as np
from jaxtyping import Float, Int64

from specbeam.core.callbacks import Callback, array_at, integers_at
from specbeam.core.errors import BrokenProcessor
from specbeam.core.forest import Forest
from specbeam.core.laws.edits import ban
from specbeam.core.laws.reduce import log_probabilities
from specbeam.core.laws.warp import check_rows, processed_rows
from specbeam.core.session import Session
from specbeam.core.turn_steps import RunSpec

_ONE_AT_A_TIME = threading.Lock()  # held by the callback that runs


class RowsOfSession:
    """Callbacks through which a run processes a session's rows in Python, by logits processors and constraints.

    If a processor raises, the turn is undone, and turn-by-turn decoding then raises and reports the same error. An
    error of the constraint between two turns ends the run, and `Run.keep` raises it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        here = weakref.ref(self)  # a strong reference would keep the session until garbage collection
        self.rows = Callback(lambda *numbers: _alive(here)._process(*numbers))
        self.moved = Callback(lambda *numbers: _alive(here)._move(*numbers))
        processors = session.warp.processors or []
        self.constraint = session.warp.constraint if len(processors) == 1 else None  # if only it changes rows

    def for_run(self, spec: RunSpec) -> RunSpec:
        """Return the spec of a run with these callbacks; this object has to outlive the run."""
        constrained = self.session.warp.constraint is not None
        edits = spec.edits._replace(callback=self.rows.address)
        return spec._replace(edits=edits, moved=self.moved.address if constrained else 0)

    def raise_what_remains(self) -> None:
        """Raise errors of the constraint, and interrupts; turn-by-turn decoding raises other errors of processors again."""
        for failure in (self.moved.failure, self.rows.failure):
            if failure is not None and (failure is self.moved.failure or not isinstance(failure, Exception)):
                raise failure

    def _process(self, *numbers: int) -> None:
        """Process rows of forest nodes in place; `laws.edits` passes the numbers.

        One call at a time in the whole process: runs go in parallel threads, and the sessions of a request share processors,
        which may have a state.
        """
        rows, count, vocab, wide, tokens, parents, nodes, wanted = numbers
        kind = ctypes.c_double if wide == 8 else ctypes.c_float
        raw = array_at(rows, count * vocab, kind).reshape(count, vocab)
        forest_tokens = integers_at(tokens, nodes)
        forest_parents = integers_at(parents, nodes)
        wanted_nodes = integers_at(wanted, count).copy()
        with _ONE_AT_A_TIME:
            self._process_rows(raw, forest_tokens, forest_parents, wanted_nodes)

    def _process_rows(
        self,
        raw: Float[np.ndarray, "rows vocab"],
        forest_tokens: Int64[np.ndarray, " nodes"],
        forest_parents: Int64[np.ndarray, " nodes"],
        wanted_nodes: Int64[np.ndarray, " rows"],
    ) -> None:
        if self.constraint is not None:
            check_rows(raw)
            if self.session.warp.search:
                raw[:] = log_probabilities(raw)
            ban_below = getattr(self.constraint, "ban_below", None)
            if ban_below is not None:
                ban_below(raw, forest_tokens, forest_parents, wanted_nodes)
                return
            ban(raw, self.constraint.allowed_below(forest_tokens, forest_parents, wanted_nodes, raw.shape[1]))
            return
        forest = Forest(forest_tokens.copy(), forest_parents.copy())
        depths = forest.depths()[wanted_nodes]
        for depth in np.unique(depths):  # processors see texts of one length
            at = np.flatnonzero(depths == depth)
            there = raw[at]
            session = self.session
            changed = processed_rows(there, session.warp, partial(session.paths, forest, wanted_nodes[at]))
            if changed.dtype != raw.dtype:
                raise BrokenProcessor(f"a logits processor returned {changed.dtype} for {raw.dtype}")
            raw[at] = changed

    def _move(self, tokens: int, count: int, over: int, *_: int) -> None:
        """Drop all paths of the constraint but those of the live beams, which end with these tokens."""
        live = integers_at(tokens, count).copy() if count > 0 and not over else np.zeros(0, dtype=np.int64)
        with _ONE_AT_A_TIME:
            self.session.keep_constraint(live)


def _alive(reference: "weakref.ref[RowsOfSession]") -> RowsOfSession:
    """Return the object, which the run keeps alive until it is over."""
    found = reference()
    assert found is not None
    return found
