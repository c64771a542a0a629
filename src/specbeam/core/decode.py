"""Decoding of many sessions: iterators over `Decoder.step`. The loop itself is run_steps.py, or turn.py in Python."""

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import length_hint

from specbeam.core.decoder import Decoder
from specbeam.core.lm import LM
from specbeam.core.runs import TURNS
from specbeam.core.session import Session
from specbeam.core.turn import Turns, turns

__all__ = ["Decoder", "Turns", "decode", "decode_live", "turns"]
DELAY_S = 0.02  # seconds for which a stream may hold back text, too short to notice


def decode(target: LM, waiting: Iterable[Session], at_once: int = 32, ahead: int = 0) -> Iterator[Turns]:
    """Decode sessions until all are over, and yield the turns of each step (see `Decoder.step`).

    Sessions may differ in everything except the target. A session that fails keeps its error in `session.failure`,
    yields no turn, and does not affect the others. When a session is over, the next one of `waiting` takes its place;
    `waiting` is advanced before each step.

    Args:
        target: the target model.
        waiting: the sessions. An iterator that knows its length (`__length_hint__`) lets the last ones run to their ends
            together.
        at_once: maximum number of sessions decoded at the same time.
        ahead: maximum number of turns in one compiled run; such turns are not yielded.
    """
    line = iter(waiting)
    with Decoder(target, at_once, ahead, filling=at_once) as decoder:
        while True:
            for session in islice(line, decoder.free):
                decoder.add(session)
            if not decoder.busy:
                return
            decoder.is_last = decoder.free > 0 or length_hint(line, 1) == 0
            yield decoder.step()


def decode_live(target: LM, session: Session) -> Iterator[None]:
    """Decode one session as a stream: yield after every turn, or after the turns of `DELAY_S` seconds.

    The grouping of turns depends on the machine, the text does not.
    """
    with Decoder(target, ahead=1) as decoder:
        decoder.add(session)
        while decoder.busy:
            began = time.perf_counter()
            before = session.count.target_passes
            decoder.step()
            turns_taken = max(session.count.target_passes - before, 1)
            seconds_per_turn = (time.perf_counter() - began) / turns_taken
            decoder.ahead = min(max(int(DELAY_S / seconds_per_turn), 1), TURNS)
            yield
