"""Who comes in next: fairly between keys, by priority, and nobody waits for ever."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from specbeam.apps.serve.line import AGE_S, Line


@dataclass(eq=False)
class Waiter:
    key: str
    arrived: float = 0.0
    priority: int = 0
    size: int = 1


def everything(job):
    return True


def no_limit(key):
    return 10**9


def test_keys_share_by_weight_whatever_their_numbers():
    line = Line({"a": 1.0, "b": 3.0})
    for key in 400 * ["a"] + 400 * ["b"]:
        line.add(Waiter(key))
    served = []
    for _ in range(80):
        job = line.pop(0.0, everything, no_limit)
        served.append(job.key)
        line.charge(job.key, 1.0)
        line.leave(job.key)
    assert 18 <= served.count("a") <= 22


def test_a_pause_saves_nothing_up():
    line = Line()
    line.add(Waiter("busy"))
    for _ in range(50):
        line.add(Waiter("busy"))
        job = line.pop(0.0, everything, no_limit)
        line.charge(job.key, 10.0)
        line.leave(job.key)
    line.add(Waiter("back"))
    assert line.clocks["back"] == line.clocks["busy"] == 500.0


def test_priority_goes_first_and_waiting_lifts_low_ones_to_the_usual_one():
    line = Line()
    patient, urgent = Waiter("a", 0.0, 2), Waiter("b", 0.0, -2)
    line.add(patient)
    line.add(urgent)
    assert line.pop(1.0, everything, no_limit) is urgent
    usual = Waiter("c", 1.0)
    line.add(usual)
    line.charge("c", 5.0)
    assert line.pop(2 * AGE_S, everything, no_limit) is patient


def test_who_floods_the_line_does_not_hold_up_others_however_long_it_waits():
    line = Line()
    for _ in range(100):
        line.add(Waiter("flood"))
    for _ in range(50):
        job = line.pop(0.0, everything, no_limit)
        line.charge(job.key, 1.0)
        line.leave(job.key)
    line.add(Waiter("other", 99 * AGE_S))
    line.charge("flood", 1.0)
    assert line.pop(100 * AGE_S, everything, no_limit).key == "other"


def test_who_comes_next_waits_for_room_and_no_smaller_one_passes_it():
    line = Line()
    large, small = Waiter("a", 0.0, size=9), Waiter("a", 1.0)
    line.add(large)
    line.add(small)
    assert line.pop(2.0, lambda job: job.size < 5, no_limit) is None
    assert line.pop(2.0, everything, no_limit) is large


def test_a_key_at_its_limit_holds_nobody_else_up():
    line = Line()
    for key in ("a", "a", "b"):
        line.add(Waiter(key))
    assert line.pop(0.0, everything, lambda key: 1).key == "a"
    assert line.pop(0.0, everything, lambda key: 1).key == "b"
    assert line.pop(0.0, everything, lambda key: 1) is None
    line.leave("a")
    assert line.pop(0.0, everything, lambda key: 1).key == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.integers(0, 9)), max_size=40))
def test_everybody_is_served_once_and_nothing_is_left(arrivals):
    line = Line()
    jobs = [Waiter(key, float(time), priority) for key, priority, time in arrivals]
    gone = set()
    for number, job in enumerate(jobs):
        line.add(job)
        if number % 3 == 2:
            assert line.remove(jobs[number - 1]) == (id(jobs[number - 1]) not in gone)
            gone.add(id(jobs[number - 1]))
    served = []
    while (job := line.pop(100.0, everything, no_limit)) is not None:
        served.append(id(job))
        line.charge(job.key, 1.0)
        line.leave(job.key)
    assert sorted(served) == sorted(id(job) for job in jobs if id(job) not in gone)
    assert (len(line), line.clocks, line.running) == (0, {}, {})
