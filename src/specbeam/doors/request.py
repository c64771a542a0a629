"""The sessions of a planned call and their answers."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from specbeam.core.agenda import Agenda
from specbeam.core.limits import Ended
from specbeam.core.records import Beam, Generation
from specbeam.core.session import Parts, Session
from specbeam.core.turn import Turns
from specbeam.doors.grammar.spelling import text_of_tokens
from specbeam.doors.growing_text import GrowingText
from specbeam.doors.plan import CallPlan, PlannedText
from specbeam.doors.trace import Trace, words_of
from specbeam.errors import SpecbeamError, TooFewAnswers, counted
from specbeam.models.pair import Pair
from specbeam.recipes.method import Method


class Request:
    """The running sessions of a plan.

    Attributes:
        plan: the planned call.
        sessions: in the order of their places.
        refused: the error of each rejected prompt, by place.
        traces: the turns of each session, by place, if the method records them.
    """

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.sessions: list[Session] = []
        self.refused: dict[int, SpecbeamError] = {}
        self.traces: dict[int, Trace] = {}
        self._words = words_of(plan.pair.known("tokenizer"))
        for place, text in enumerate(plan.texts):
            if isinstance(text, PlannedText):
                self.sessions.append(_session(plan, place, text))
            else:
                self.refused[place] = text

    @classmethod
    def of(cls, *arguments: Any, **options: Any) -> "Request":
        """Plan a call and make its sessions; the arguments and errors are those of `CallPlan.of`."""
        return cls(CallPlan.of(*arguments, **options))

    @property
    def pair(self) -> Pair:
        """The models."""
        return self.plan.pair

    @property
    def method(self) -> Method:
        """The method that decodes."""
        return self.plan.method

    @property
    def parts(self) -> Parts:
        """The parts that decode."""
        return self.plan.parts

    @property
    def eos(self) -> tuple[int, ...]:
        """The end tokens."""
        return self.plan.eos

    @property
    def prompt_of(self) -> tuple[int, ...]:
        """The number of the prompt at each place."""
        return self.plan.prompt_of

    @property
    def answers_per_session(self) -> int:
        """The number of answers of each session."""
        return self.plan.answers_per_session

    def see(self, turns: Turns) -> None:
        """Record the turns of a step, if the method records its turns."""
        if getattr(self.parts.rule, "trace", False):
            for session, turn in turns:
                self.traces.setdefault(session.place, Trace()).add(session, turn, self._words)

    def text_of(self, tokens: list[int], shows_special: bool = False) -> str:
        """Return the text of new tokens; "" without a tokenizer.

        With a constraint, this is the exact constrained text, without the end token.

        Args:
            tokens: token ids.
            shows_special: whether special tokens are included; ignored with a constraint.
        """
        tokenizer = self.pair.known("tokenizer")
        if tokenizer is None:
            return ""
        if self.plan.constraint is None:
            return str(tokenizer.decode(tokens, skip_special_tokens=not shows_special))
        return text_of_tokens(tokenizer, tokens[:-1] if self._is_complete(tokens) else tokens)

    def growing_text(self, shows_special: bool = False) -> GrowingText:
        """Return a streaming decoder whose pieces add up to `text_of` of all tokens."""
        if self.plan.constraint is None:
            return GrowingText(self.pair.known("tokenizer"), shows_special)
        return GrowingText(self.pair.known("tokenizer"), is_exact=True, ends=self.eos)

    def _is_complete(self, tokens: list[int]) -> bool:
        """Return whether a text has its end token; a constrained text then satisfies the constraint."""
        return bool(tokens) and tokens[-1] in self.eos

    def result(self, session: Session) -> list[Generation] | SpecbeamError:
        """Return the answers of a finished session, or its error.

        With fewer answers than return sequences, the error is a `TooFewAnswers` that contains them.
        """
        if session.failure is not None:
            return session.failure
        answers = self.answers(session)
        wanted = self.answers_per_session
        if len(answers) == wanted:
            return answers
        return TooFewAnswers(
            f"prompt {self.prompt_of[session.place]} has {counted(len(answers), 'answer')}, num_return_sequences is "
            f"{wanted}: a constraint, top-k, top-p, a ban or a collapse left fewer beams; they are in .generations",
            answers,
        )

    def answers(self, session: Session) -> list[Generation]:
        """Return the best hypotheses of a session, best first; at most `answers_per_session`."""
        limits = session.limits

        def score(text: Ended) -> float:
            return limits.normalised(text.loglik, len(text.tokens))

        has_prefixes = Agenda in session.state  # the live beam of a best-first search is its prompt, which is no text
        texts = sorted(session.ended if has_prefixes else session.hypotheses(), key=score, reverse=True)
        if session.remaining > 0:
            # The session stopped before its length limit and abandoned its live beams: finished beams come first. At the
            # limit, unfinished beams compete by score, as in transformers.
            texts.sort(key=lambda text: not text.finished)
        if self.plan.constraint is not None and not self.method.search:
            # A truncated text does not satisfy the constraint: complete texts come first.
            texts.sort(key=lambda text: not self._is_complete(text.tokens))
        found = [self.beam(session, text) for text in texts]
        beams = found[: self.method.beams]
        others = found[self.method.beams :]
        count = min(self.answers_per_session, len(beams))
        return [self._generation(session, beams, others, number) for number in range(count)]

    def beam(self, session: Session, text: Ended) -> Beam:
        """Return a text of a session as a beam."""
        score = session.limits.normalised(text.loglik, len(text.tokens))
        item = None
        if self.plan.catalogue is not None:
            item = self.plan.catalogue.item_of(self.pair.tokenizer, text.tokens, self.eos)
        return Beam(text.tokens, score, self.text_of(text.tokens), text.finished, text.bound, item)

    def _generation(self, session: Session, beams: list[Beam], others: list[Beam], number: int) -> Generation:
        """Return beam `number` of a session's best beams as an answer; `others` go into its report."""
        answer = beams[number]
        report = replace(session.report(len(answer.tokens)), other_beams=others)
        trace = self.traces.get(session.place)
        first_place = bisect_left(self.prompt_of, self.prompt_of[session.place])
        sequence = (session.place - first_place) * self.answers_per_session + number
        return Generation(answer.text, answer.tokens, beams, report, session.prompt, trace, sequence)


def _session(plan: CallPlan, place: int, text: PlannedText) -> Session:
    """Return the session of a text."""
    session = Session(text.prompt, plan.parts, text.warp, text.limits, text.key, place, plan.audit, text.number)
    if text.read is not None:
        session.context = text.context
        session.read = text.read
    return session
