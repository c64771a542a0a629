"""Many random calls in separate processes, so that a crash or hang of one call does not end the others."""

import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specbeam.errors import BadSetting, one_of
from specbeam.lab.fuzz.trying import BROKEN, CRASHED
from specbeam.lab.fuzz.worlds import WORLDS

HUNG = "hung"
FAULTS = (BROKEN, CRASHED, HUNG)
LONGEST_CALL_S = 900.0  # with checked indices, a first call may compile for minutes
SHARD = 100  # calls of one world in one process
_WORLD = "(the world itself)"  # stands for a call while a process builds its world


@dataclass(frozen=True)
class Fault:
    """A call that crashed, hung or broke an invariant."""

    world: str
    number: int
    call: str
    kind: str
    text: str


@dataclass
class Tally:
    """The outcomes of a campaign so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    answered_by_method: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # number of refusals by the first words of their message
    faults: list[Fault] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.outcomes.total()

    def add(self, world: str, number: int, call: str, method: str, kind: str, text: str) -> None:
        """Count an outcome."""
        self.outcomes[kind] += 1
        if kind in FAULTS:
            self.faults.append(Fault(world, number, call, kind, text))
        elif kind == "answered":
            self.answered_by_method[method] += 1
        else:
            self.refusals[" ".join(text.split()[:9])] += 1


def campaign(
    calls: int,
    seed: int,
    worlds: Sequence[str] = (),
    first: int = 0,
    processes: int = 1,
    report: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Try random calls, evenly distributed over worlds, and return their outcomes.

    Args:
        calls: total number of calls.
        seed: the same seed gives the same calls.
        worlds: names of `WORLDS`; empty: all.
        first: number of the first call of each world, to continue another campaign.
        processes: number of processes at the same time.
        report: called after each call.

    Raises `BadSetting` for an unknown world or an invalid number.
    """
    names = [*worlds] or [*WORLDS]
    for name in names:
        one_of("world", name, WORLDS)
    for name, value, least in (
        ("calls", calls, 1),
        ("processes", processes, 1),
        ("first", first, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise BadSetting(f"{name} is {value}; it must be at least {least}")
    shards: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    for shard in _shards(names, calls, first):
        shards.put(shard)
    tally = Tally()
    lock = threading.Lock()

    def add(*outcome: str) -> None:
        with lock:
            (world, number, *others) = outcome
            tally.add(world, int(number), *others)
            report(tally)

    def work() -> None:
        while True:
            try:
                (name, begin, count) = shards.get_nowait()
            except queue.Empty:
                return
            _run_shard(name, seed, begin, count, add)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _shards(names: Sequence[str], calls: int, first: int) -> Iterator[tuple[str, int, int]]:
    """Yield (world, first call, number of calls), alternating between all worlds."""
    each, more = divmod(calls, len(names))
    counts = {name: each + (place < more) for place, name in enumerate(names)}
    for begin in range(0, max(counts.values()), SHARD):
        for name in names:
            count = min(SHARD, counts[name] - begin)
            if count > 0:
                yield name, first + begin, count


def _run_shard(name: str, seed: int, first: int, count: int, add: Callable[..., None]) -> None:
    """Run the calls of a shard in a process, and continue in a new one after a call that ends its process.

    A world that cannot be built is one fault.
    """
    end = first + count
    while first < end:
        last, call, kind, text = _run_process(name, seed, first, end - first, add)
        if not kind:
            return
        add(name, str(last), call, "", kind, text)
        if call == _WORLD:
            return
        first = last + 1


def _run_process(name: str, seed: int, first: int, count: int, add: Callable[..., None]) -> tuple[int, str, str, str]:
    """Run calls in one process. Returns the call that ended it, with kind and text of the fault; "" for a whole shard."""
    command = [sys.executable, "-m", "specbeam.lab.fuzz.worker", name, str(seed), str(first), str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    clock = _Alarm(process)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    number = first
    call = _WORLD
    clock.wind()
    for line in process.stdout or ():
        clock.wind()
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if "begin" in said:
            number = said["begin"]
            call = said["call"]
        else:
            add(name, str(said["end"]), call, said["method"], said["kind"], said["text"])
            call = ""
    clock.stop()
    code = process.wait()
    reader.join(5)
    if code == 0:
        return number, "", "", ""
    if clock.rang:
        return number, call, HUNG, f"no outcome within {LONGEST_CALL_S:.0f} s"
    return number, call, CRASHED, f"exit code {code}: {''.join(errors)[-2000:]}"


class _Alarm:
    """Kills a process that has printed nothing for too long."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.rang = False
        self.timer: threading.Timer | None = None

    def wind(self) -> None:
        """Restart the timer."""
        self.stop()
        self.timer = threading.Timer(LONGEST_CALL_S, self._ring)
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        self.process.kill()
