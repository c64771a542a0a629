"""SCORE: what the loop asks of a language model."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from specbeam.core.forest import Forest
from specbeam.engines.answers import LOGITS
from specbeam.errors import BadPrompt, NotSupported
from specbeam.records import Needs, Scored, Turn
from specbeam.session import Session


@runtime_checkable
class LM(Protocol):
    """A causal language model that scores forests of many sessions in one pass.

    What it keeps per session (caches) lives in `session.state[self]` and ends with `close`.
    """

    vocab: int
    max_positions: int | None  # None: no limit

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """Score the nodes of each forest that this model has not scored in this turn, in one pass.

        The first call of a turn scores the roots too (and what lies between them and the cache: at first the whole
        prompt); a later call may bring a grown forest and gets the rows of the new nodes only. Logits of a node equal
        those of a plain forward on its path. A row per new node, on the host or on the model's device, valid until the
        session's next turn begins.

        Args:
            needs: what each session's rows have to hold; None: logits. A model that cannot give it raises `NotSupported`,
                and may say why beforehand by `lacks(needs) -> str`. The loop names none where all ask for logits alone.
        """
        ...

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep what the surviving beams need, free the rest."""
        ...

    # A model that stores long prompts in chunks has `fill`, too; see `fill_prompts`.

    def peak(self, session: Session) -> int:
        """Most tokens of the session that were stored at once."""
        ...

    def close(self, session: Session) -> None:
        """Forget the session."""
        ...


def checked_needs(lm: Any, sessions: int, needs: Sequence[Needs] | None) -> Sequence[Needs]:
    """Return what the rows of so many sessions have to hold; raise `NotSupported` if the model cannot give it."""
    if needs is None:
        return [LOGITS] * sessions
    for one in needs:
        check_gives(lm, one)
    return needs


def check_gives(lm: Any, needs: Needs) -> None:
    """Raise `NotSupported` if a model cannot give what a part needs."""
    if not (needs.states or needs.ranked):
        return
    lacks = getattr(lm, "lacks", None)
    why = f"{type(lm).__name__} gives logits alone" if lacks is None else lacks(needs)
    if why:
        raise NotSupported(f"a part needs {needs}, and {why}")


def check_takes(lm: Any, session: Session) -> None:
    """Raise `NotSupported` if a model cannot take what a session gives it besides tokens."""
    refuses = getattr(lm, "refuses", None)
    given = lm in session.context or lm in session.vectors
    why = refuses(session) if refuses else f"{type(lm).__name__} takes tokens alone" if given else ""
    if why:
        raise NotSupported(why)
    if session.vectors and session.prompt[-1] < 0:
        raise BadPrompt("the last token of a prompt is given by embedding; put a token that the model knows behind it")


def fill_prompts(lm: Any, sessions: Sequence[Session], needs: Sequence[Needs] | None, most: int) -> list[bool]:
    """Store a chunk of up to `most` prompts that are long, in one pass, if the model can.

    Returns which sessions may take a turn, for which no more than a chunk is left to store.
    """
    return list(lm.fill(sessions, needs, most)) if hasattr(lm, "fill") else [True] * len(sessions)


class Uncached:
    """What models without a cache have in common: all they keep of a session is how many nodes of the turn were scored."""

    max_positions: int | None = None

    def lacks(self, needs: Needs) -> str:
        """Say why this model cannot give what is asked for; "" if it can."""
        if needs.states:
            return f"{type(self).__name__} has no hidden states"
        return ""

    def told(self, sessions: Sequence[Session], needs: Sequence[Needs] | None) -> Sequence[Needs]:
        """Return what each session's rows have to hold. Raises `NotSupported` for what there is not."""
        return checked_needs(self, len(sessions), needs)

    def fresh(self, session: Session, forest: Forest) -> range:
        """The nodes that were not scored in this turn; from here on they count as scored."""
        start = session.state.get(self, 0)
        session.state[self] = forest.size
        return range(start, forest.size)

    def settle(self, session: Session, turn: Turn) -> None:
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        return 0

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
