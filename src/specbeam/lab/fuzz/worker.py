"""A process that tries calls of one world: it prints a line before each call and one after it."""

import json
import sys

from specbeam.lab.fuzz.calls import random_call
from specbeam.lab.fuzz.trying import tried
from specbeam.lab.fuzz.worlds import world


def work(name: str, seed: int, first: int, calls: int) -> None:
    """Try calls `first` to `first + calls` of a world; print JSON lines with "begin", "call" and "outcome"."""
    held = world(name)
    for number in range(first, first + calls):
        call = random_call(held, name, seed, number)
        print(json.dumps({"begin": number, "call": str(call)}), flush=True)
        outcome = tried(held, call)
        print(json.dumps({"end": number, "method": call.method, **outcome.as_dict()}), flush=True)


if __name__ == "__main__":
    (name, seed, first, calls) = sys.argv[1:]
    work(name, int(seed), int(first), int(calls))
