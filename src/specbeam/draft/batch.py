"""DRAFT for all live sessions: those that share a drafter are drafted together."""

import warnings

from specbeam.core.forest import Forest
from specbeam.lm.base import LM
from specbeam.records import Shape
from specbeam.session import Drafter, Session, failing_together


def drafted(sessions: list[Session], shapes: list[Shape], vocab: int) -> list[Forest]:
    """A forest per session, of tokens below `vocab`.

    Where a drafter fails, its sessions have failed and get their roots alone; those of others go on.
    """
    forests = {session: Forest.rooted(session.beams.tokens) for session in sessions}
    for drafter in dict.fromkeys(session.parts.drafter for session in sessions):
        mine = {one: shape for one, shape in zip(sessions, shapes, strict=True) if one.parts.drafter == drafter}
        with failing_together([*mine], "draft: "):
            for one, forest in zip(mine, drafter.draft([*mine], [*mine.values()]), strict=True):
                with one.failing_alone("draft: "):
                    forests[one] = forest.fitting(vocab)
    return [*forests.values()]


def with_probes(session: Session, forest: Forest) -> Forest:
    """Return the forest with the rows behind it that its drafter wants to be scored, too.

    A drafter that wants any has `probes(session, forest) -> Probes`.
    """
    ask = getattr(session.parts.drafter, "probes", None)
    if ask is not None and session.failure is None:
        with session.failing_alone("draft: "):
            return forest.grown(*ask(session, forest))
    return forest


def fill_drafters(sessions: list[Session], most: int) -> list[Session]:
    """Store a chunk of up to `most` long prompts in each draft model; return the sessions that have more to store.

    A drafter with a model has `fill(sessions, most) -> list[bool]`, which says which are filled; others store nothing.
    """
    unready: list[Session] = []
    for drafter in dict.fromkeys(session.parts.drafter for session in sessions):
        mine = [one for one in sessions if one.parts.drafter == drafter]
        fill = getattr(drafter, "fill", None)
        if fill is not None:
            with failing_together(mine, "draft: "):
                unready += [one for one, is_filled in zip(mine, fill(mine, most), strict=True) if not is_filled]
    return unready


def models_of(drafter: Drafter) -> tuple[LM, ...] | None:
    """Return the models that a drafter runs, which it has in `models`; None if it does not say."""
    return getattr(drafter, "models", None)


def close_drafters(sessions: list[Session]) -> None:
    """Let drafters forget sessions that are over."""
    for session in sessions:
        try:
            close_drafter(session.parts.drafter, session)
        except Exception as error:  # the text is there, and nobody else's work should be lost
            warnings.warn(f"prompt {session.number}: the drafter could not close: {error!r}", stacklevel=2)


def close_drafter(drafter: Drafter, session: Session) -> None:
    """Let a drafter forget a session that is over, if it remembers any."""
    close = getattr(drafter, "close", None)
    if close is not None:
        close(session)
