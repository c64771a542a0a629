"""SCORE: the protocol of language models, and the decoding loop's checks of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from jaxtyping import Int64

from specbeam.core.answers import LOGITS
from specbeam.core.errors import BadPrompt, NotSupported, VocabularyMismatch
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import Needs, Scored, Turn
from specbeam.core.session import Session


@runtime_checkable
class LM(Protocol):
    """A causal language model that scores forests of many sessions in one pass.

    Its state for a session, such as a KV cache, is in `session.state[self]` until `close`. A model that stores long prompts
    in chunks also has a method `fill`, see `fill_prompts`.
    """

    vocab: int
    max_positions: int | None  # None: no limit

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """Score the nodes of each forest that this model has not scored in this turn, in one pass.

        The first call of a turn also scores the roots and all tokens before them that are not in the cache: at first the
        whole prompt. Later calls may pass a forest that has grown. The logits of a node equal the logits of a plain forward
        on its path.

        Returns one row per new node, except nodes whose rows are known (`forest.known`). Rows are on the host or on the
        model's device, and valid until the session's next turn begins. Only models with an attribute `keeps_nodes` that
        is True get such nodes: when settled, they keep the nodes `turn.verdict.kept`, and the next forest starts with
        the roots and these.

        Args:
            needs: the outputs for the rows of each session; None: logits for all. The decoding loop passes None if every
                session needs logits only. A model that cannot provide them raises `NotSupported`; it may have a method
                `lacks(needs) -> str` that returns the reason beforehand.
        """
        ...

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep the state of the surviving beams, and free the rest."""
        ...

    def peak(self, session: Session) -> int:
        """Return the largest number of tokens of the session that were stored at the same time."""
        ...

    def close(self, session: Session) -> None:
        """Free the state of a session."""
        ...


def takes_a_pass(lm: LM, layer: int) -> bool:
    """Return whether a draft model makes a pass for draft layer `layer`, counted from 0.

    A model with an attribute `drafts_blocks` that is True drafts all layers of a turn in the pass for the first one.
    """
    return layer == 0 or not getattr(lm, "drafts_blocks", False)


def checked_needs(lm: Any, sessions: int, needs: Sequence[Needs] | None) -> Sequence[Needs]:
    """Return the needs of each of `sessions` sessions, logits if `needs` is None.

    Raises `NotSupported` if the model cannot provide them.
    """
    if needs is None:
        return [LOGITS] * sessions
    for need in needs:
        check_gives(lm, need)
    return needs


def check_gives(lm: Any, needs: Needs) -> None:
    """Raise `NotSupported` if a model cannot provide these outputs."""
    if not (needs.states or needs.ranked or needs.exit_layer is not None):
        return
    lacks = getattr(lm, "lacks", None)
    why = f"{type(lm).__name__} returns logits only" if lacks is None else lacks(needs)
    if why:
        raise NotSupported(f"a part needs {needs}, but {why}")


def check_takes(lm: Any, session: Session) -> None:
    """Raise `NotSupported` if a model cannot take the context, embeddings or extra rows of a session.

    Raises `BadPrompt` if the last token of the prompt is given as an embedding.
    """
    refuses = getattr(lm, "refuses", None)
    inputs = session.extra_inputs
    if inputs is not None and inputs.model is not getattr(lm, "model", None):
        raise NotSupported(
            f"the draft adds learned extra rows to the passes of {type(inputs.model).__name__}, but the target is "
            f"{type(lm).__name__} with another model; load them together: load(target, draft=...)"
        )
    given = lm in session.context or lm in session.vectors
    why = refuses(session) if refuses else f"{type(lm).__name__} takes tokens only" if given else ""
    if why:
        raise NotSupported(why)
    if session.vectors and session.prompt[-1] < 0:
        raise BadPrompt("the last token of a prompt is given as an embedding; append a token of the vocabulary")


def check_same_vocabulary(lm: LM, target: LM) -> None:
    """Raise `VocabularyMismatch` if draft and target do not have equally many tokens."""
    if lm.vocab != target.vocab:
        raise VocabularyMismatch(
            f"draft has {lm.vocab} tokens, target has {target.vocab}; pass the model object, folder or hub id in place of a "
            "language model, so that its tokens are matched with the target's"
        )


class StepLM(Protocol):
    """A model or draft head that compiled steps may be able to run."""

    vocab: int

    def cache_for_steps(
        self, session: Any, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> AbstractContextManager[Any]:
        """Yield a session's cache as arrays for steps; None if steps cannot run this model for this session.

        Args:
            fresh: maximum number of new nodes in a pass of the steps.
            more: capacity for further nodes that are stored later.
            needs: the outputs for each row.
        """
        ...


class RunLM(LM, Protocol):
    """A model or draft head that compiled runs of whole turns can run.

    Its caches are records whose kind has registered the steps of `core.passes`. An optional method `prepare_run(session)`
    is called before the caches of a run are taken. An optional attribute `returns_lists` says whether passes return the
    lists of tokens that a run plans (laws/ranked.py), because whole rows are slow to hand over.
    """

    supports_runs: bool  # False: no session of it can run compiled

    def for_run(
        self, session: Any, fresh: int, beams: int, more: int, needs: Needs = LOGITS
    ) -> AbstractContextManager[Any] | None:
        """Return a context in which a session's cache is a record for steps; None if runs cannot take this session now.

        The record has capacity for a turn, and is valid until any session gets more. The context yields None if a run cannot
        do the next pass, such as the one of a long prompt. A draft model is asked after the target has allocated its rows.

        Args:
            fresh: maximum number of nodes that a turn drafts.
            beams: maximum number of live beams.
            more: capacity for further nodes that are stored later.
            needs: the outputs for each row.
        """
        ...

    def finish_run(self, session: Any, passes: int, roots: int) -> None:
        """Update the counters and the session's cache after a run that made `passes` passes in whole turns.

        Args:
            roots: number of live beams at its end.
        """
        ...


def runs_turns(lm: Any) -> TypeGuard[RunLM]:
    """Return whether compiled runs can take whole turns with a model."""
    return bool(getattr(lm, "supports_runs", False))


def shares_passes(lm: Any) -> TypeGuard[RunLM]:
    """Return whether one pass of a model can serve the runs of many sessions: its attribute `shares_passes` is True.

    Its kind of cache then has a step of `core.passes.extend_all`.
    """
    return runs_turns(lm) and bool(getattr(lm, "shares_passes", False))


def runs_in_steps(lm: Any) -> TypeGuard[StepLM]:
    """Return whether compiled steps may be able to run a model or draft head: it has a method `cache_for_steps`."""
    return hasattr(lm, "cache_for_steps")


def fill_prompts(lm: Any, sessions: Sequence[Session], needs: Sequence[Needs] | None, most: int) -> list[bool]:
    """Store the next chunk of each of up to `most` long prompts, in one pass, if the model has a method `fill`.

    Returns for each session whether it may take a turn: whether at most one chunk of its prompt is left to store.
    """
    return list(lm.fill(sessions, needs, most)) if hasattr(lm, "fill") else [True] * len(sessions)


class Uncached:
    """A base class of models without a cache. Their only state is the number of nodes scored in a session's turn."""

    max_positions: int | None = None
    keeps_nodes = True

    def lacks(self, needs: Needs) -> str:
        """Return the reason why this model cannot provide these outputs; "" if it can."""
        if needs.states:
            return f"{type(self).__name__} has no hidden states"
        return ""

    def needs_of_each(self, sessions: Sequence[Session], needs: Sequence[Needs] | None) -> Sequence[Needs]:
        """Return the needs of each session, logits if `needs` is None; raise `NotSupported` if the model lacks them."""
        return checked_needs(self, len(sessions), needs)

    def take_new_nodes(self, session: Session, forest: Forest) -> Int64[np.ndarray, " n"]:
        """Return the forest nodes that were not scored in this turn yet and are not known, and mark them as scored."""
        start = session.state.get(self, 0)
        session.state[self] = forest.size
        return unknown_nodes(start, forest.size, forest.known.nodes)

    def settle(self, session: Session, turn: Turn) -> None:
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        return 0

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
