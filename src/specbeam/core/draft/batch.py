"""DRAFT: drafts for all live sessions. Sessions that share a drafter are drafted together."""

from collections.abc import Sequence
from typing import Any

from specbeam.core.errors import BrokenPart, naming, warn
from specbeam.core.forest import Forest
from specbeam.core.lm import LM
from specbeam.core.records import Shape
from specbeam.core.session import Drafter, Session, failing_together


def drafted(sessions: list[Session], shapes: list[Shape], vocab: int) -> list[Forest]:
    """Return a forest per session, of tokens below `vocab`.

    Sessions whose drafter fails, and sessions for which a draft model is not ready, get forests without drafts. The failure
    of a drafter ends its own sessions only.
    """
    forests = {session: session.undrafted for session in sessions}
    shape_of = dict(zip(sessions, shapes, strict=True))
    for drafter in dict.fromkeys(session.parts.drafter for session in sessions):
        batch = [session for session in sessions if session.parts.drafter == drafter and _is_ready(session)]
        with failing_together(batch, "draft: "):
            with naming(drafter, "draft"):
                drafts = drafter.draft(batch, [shape_of[session] for session in batch])
            is_list = isinstance(drafts, Sequence) and len(drafts) == len(batch)
            if not is_list or not all(isinstance(forest, Forest) for forest in drafts):
                raise BrokenPart(
                    f"the drafter {type(drafter).__name__} returned {str(drafts)[:80]}; expected {len(batch)} Forest"
                )
            for session, forest in zip(batch, drafts, strict=True):
                with session.failing_alone("draft: "):
                    most_layers = max(shape_of[session].depth, session.remaining)
                    forests[session] = forest.fitting(vocab, most_layers)
    return [*forests.values()]


def most_nodes(session: Session) -> int:
    """Return the maximum number of nodes in a session's forests, as its parts state it; 0 if they do not."""
    drafter: Any = session.parts.drafter
    shape: Shape = getattr(session.parts.controller, "largest", Shape(0, 0))
    if hasattr(drafter, "most_nodes"):
        return int(drafter.most_nodes(session.limits.keep, shape))
    return shape.depth * shape.width


def _is_ready(session: Session) -> bool:
    """Return whether all draft models of a session can draft for it, by their optional method `is_ready`."""
    models = models_of(session.parts.drafter) or ()
    return all(getattr(model, "is_ready", _always)(session) for model in models)


def _always(session: Session) -> bool:
    return True


def with_extra_rows(session: Session, forest: Forest) -> Forest:
    """Return the forest followed by the extra rows of the session's drafter; the same forest if there are none.

    The drafter or one of its models has a method `extra_rows(session, forest) -> ExtraRows`.
    """
    extra_owner = session.parts.extra_owner
    if extra_owner is not None and session.failure is None:
        with session.failing_alone("draft: "):
            extra = extra_owner.extra_rows(session, forest)
            return forest.grown(*extra) if len(extra.tokens) else forest
    return forest


def fill_drafters(sessions: list[Session], most: int) -> list[Session]:
    """Store the next chunk of up to `most` long prompts in each draft model; return the sessions with more to store.

    Drafters with models have a method `fill(sessions, most) -> list[bool]`, which returns whether each session may take a
    turn.
    """
    unready: list[Session] = []
    for drafter in dict.fromkeys(session.parts.drafter for session in sessions):
        batch = [session for session in sessions if session.parts.drafter == drafter]
        fill = getattr(drafter, "fill", None)
        if fill is not None:
            with failing_together(batch, "draft: "):
                filled = fill(batch, most)
                unready += [session for session, is_filled in zip(batch, filled, strict=True) if not is_filled]
    return unready


def models_of(drafter: Drafter) -> tuple[LM, ...] | None:
    """Return the models that a drafter runs, from its attribute `models`; None if it has no such attribute."""
    return getattr(drafter, "models", None)


def close_drafters(sessions: list[Session]) -> None:
    """Free the state of sessions that are over in their drafters; a failure becomes a warning."""
    for session in sessions:
        try:
            close_drafter(session.parts.drafter, session)
        except Exception as error:  # the text is complete, and the work of the other sessions must not be lost
            warn(f"prompt {session.number}: the drafter could not close: {error!r}")


def close_drafter(drafter: Drafter, session: Session) -> None:
    """Call the optional method `close` of a drafter for a session that is over."""
    close = getattr(drafter, "close", None)
    if close is not None:
        close(session)
