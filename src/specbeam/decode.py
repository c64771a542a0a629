"""THE LOOP: one Turn per session and pass of the target."""

from collections.abc import Iterable, Iterator
from itertools import islice

from specbeam.decoder import Decoder
from specbeam.lm.base import LM
from specbeam.session import Session
from specbeam.turn import Turns, turns

__all__ = ["Decoder", "Turns", "decode", "turns"]


def decode(target: LM, waiting: Iterable[Session], at_once: int = 32, ahead: int = 0) -> Iterator[Turns]:
    """Decode sessions until all are over; yield the turns of each step (see `Decoder.step`).

    Sessions may differ in all but the target. One that fails keeps its error in `session.failure`, has no turn, and takes
    nothing from the others. When one is over its place goes to the next in line, who is asked for before each step.

    Args:
        at_once: the most sessions side by side.
        ahead: the most turns that may be one compiled run, which are not shown.
    """
    line = iter(waiting)
    with Decoder(target, at_once, ahead, filling=at_once) as decoder:
        while True:
            for session in islice(line, decoder.free):
                decoder.add(session)
            if not decoder.busy:
                return
            yield decoder.step()
