"""Turns in equal parts: how many jobs a key has running slows down nobody else."""

from dataclasses import dataclass

import pytest

import specbeam as sb
from specbeam.apps.serve.engine import Engine, EngineLimits, length_of
from specbeam.apps.serve.pacing import MOST_CLIENTS, MOST_S, REFUSALS_PER_S, RefusalPace
from specbeam.apps.serve.turn_shares import next_jobs
from tests.apps.serve.conftest import CHUNK
from tests.apps.serve.test_engine import Ends, sessions_of
from tests.apps.serve.test_fairness import Held


@dataclass(eq=False)
class Running:
    key: str
    last_step: int = 0


def many(**counts):
    return [Running(key, number) for key, count in counts.items() for number in range(count)]


def turns_of(jobs, weights=(), absent=(), at_once=1, steps=12):
    """The number of turns of each job."""
    found = [0] * len(jobs)
    for step in range(10, 10 + steps):
        moving = next_jobs(jobs, {}, dict(weights), absent, at_once)
        for job in moving:
            job.last_step = step
            found[jobs.index(job)] += 1
    return found


@pytest.mark.parametrize(
    ("counts", "weights", "expected"),
    [
        ({"a": 4}, {}, {"a": 4}),
        ({"a": 4, "b": 1}, {}, {"a": 1, "b": 1}),
        ({"a": 4, "b": 2}, {}, {"a": 2, "b": 2}),
        ({"a": 6, "b": 1}, {"a": 3.0}, {"a": 3, "b": 1}),
        ({"a": 1, "b": 6}, {"a": 3.0}, {"a": 1, "b": 1}),
        ({"a": 5, "b": 3, "c": 1}, {}, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_keys_take_turns_for_as_many_jobs_by_weight(counts, weights, expected):
    jobs = many(**counts)
    turns = turns_of(jobs, weights)
    found = {key: sum(count for job, count in zip(jobs, turns, strict=True) if job.key == key) for key in counts}
    assert found == {key: 12 * part for key, part in expected.items()}


def test_all_jobs_of_a_key_come_to_their_turns():
    assert turns_of(many(a=4, b=1), steps=8) == [2, 2, 2, 2, 8]


def test_a_key_that_may_come_back_finds_no_more_turns_before_its_own_than_processors():
    assert turns_of(many(a=4), absent={"b"}, steps=8) == [2, 2, 2, 2]
    assert turns_of(many(a=4), absent={"b"}, at_once=2, steps=8) == [4, 4, 4, 4]
    assert turns_of(many(a=4), absent={"a"}, steps=8) == [8, 8, 8, 8]


def test_processors_are_not_left_idle():
    assert len(next_jobs(many(a=4, b=1), {}, {}, (), 4)) == 4
    assert len(next_jobs(many(a=4, b=1), {}, {}, (), 8)) == 5


def test_the_key_with_the_least_work_comes_first():
    jobs = many(a=2, b=2)
    for clocks in ({"a": 5.0, "b": 1.0}, {"a": 1.0, "b": 5.0}):
        keys = [job.key for job in next_jobs(jobs, clocks, {}, (), 1)]
        assert keys == sorted(keys, key=clocks.get)


def test_a_key_with_one_text_takes_a_turn_for_each_turn_of_a_key_with_many(pair, monkeypatch):
    if not getattr(pair.target, "is_small", False):
        pytest.skip("its jobs share their passes")
    monkeypatch.setattr("specbeam.apps.serve.engine.allowed_threads", lambda: 1)
    monkeypatch.setattr("specbeam.apps.serve.engine.ACTIVE_S", 600.0)
    limits = EngineLimits(max_running=8, max_waiting=40, chunk=CHUNK)
    taking_part = []
    with Engine(pair, limits, {"flood": 1.0, "other": 1.0}) as engine:
        flood = Ends(sessions_of(pair, [[3, 4, 5]] * 6, sb.sampling(), max_new_tokens=60), key="flood")
        other = Ends(sessions_of(pair, [[3, 4]], sb.sampling(), max_new_tokens=20), key="other")
        step = engine._decoder.step

        def watched(moving):
            taking_part.append(({job.key for job in engine.inside}, len(moving)))
            return step(moving)

        monkeypatch.setattr(engine._decoder, "step", watched)
        held = Held(engine)
        engine.submit([*flood.jobs])
        engine.submit([*other.jobs])
        held.goes_on.set()
        lengths = [length_of(session) for session in (*flood.wait(), *other.wait())]
    assert lengths == [60] * 6 + [20]
    assert all(moving == len(keys) for keys, moving in taking_part)
    assert max(len(keys) for keys, _ in taking_part) == 2


def test_the_first_step_of_a_text_is_not_cut_short_by_its_own_arrival(pair, monkeypatch):
    asked = []
    with Engine(pair, EngineLimits(max_running=4, max_waiting=40, chunk=CHUNK)) as engine:
        step = engine._decoder.step

        def watched(moving):
            asked.append(engine._decoder.early_end.is_asked)
            return step(moving)

        monkeypatch.setattr(engine._decoder, "step", watched)
        alone = Ends(sessions_of(pair, [[3, 4, 5]], sb.sampling(), max_new_tokens=20))
        engine.submit(alone.jobs)
        alone.wait()
    assert asked
    assert not any(asked)


def test_a_client_that_is_refused_again_and_again_is_told_later():
    now = [0.0]
    pace = RefusalPace(lambda: now[0])
    delays = [pace.delay("a") for _ in range(20)]
    assert delays[0] == 0.0
    assert delays[:3] == [0.0, 1 / REFUSALS_PER_S, 2 / REFUSALS_PER_S]
    assert max(delays) == MOST_S
    assert pace.delay("b") == 0.0
    now[0] = 2.0
    assert pace.delay("a") == 0.0


def test_clients_that_were_refused_are_forgotten():
    now = [0.0]
    pace = RefusalPace(lambda: now[0])
    for number in range(3 * MOST_CLIENTS):
        now[0] += 1.0
        pace.delay(str(number))
    assert len(pace._next) <= MOST_CLIENTS
