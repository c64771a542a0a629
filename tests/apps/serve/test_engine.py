"""One thread decodes for all others: what anybody else does changes no text, costs nobody a place and leaves nothing behind."""

import threading
import time

import numpy as np
import pytest

import specbeam as sb
from specbeam.apps.serve.engine import Draining, Engine, EngineFailed, EngineLimits, Job, NoRoom, QueueFull, room_of
from specbeam.core.decode import Decoder, decode
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BrokenLaw, BrokenPart, Cancelled, NotSupported, TimedOut, TooFewAnswers
from specbeam.recipes.best import best_first
from tests.apps.serve.conftest import CHUNK, LONG, SHORT
from tests.support.seats import plain_logits, seat

METHODS = [sb.sampling(), sb.beam_search(3), sb.dsbd(3, 4, 2, width="dynamic"), sb.speculative_sampling(3)]
PROMPTS = [[3, 4, 5], [9, 8], LONG]
LIMITS = EngineLimits(max_running=4, max_waiting=40, chunk=CHUNK)


def sessions_of(pair, prompts, method, seed=3, **options):
    settings = Settings.given(SHORT | options, None)
    return Request.of(pair, prompts, method, settings, seed).sessions


class Ends:
    """Jobs, and a way to wait for their ends."""

    def __init__(self, sessions, **options):
        self.over = threading.Semaphore(0)
        self.jobs = [Job(session, self.watch, **options) for session in sessions]

    def watch(self, job):
        if job.is_over:
            self.over.release()

    def wait(self):
        for _ in self.jobs:
            assert self.over.acquire(timeout=60)
        return [job.session for job in self.jobs]


def left(pair):
    return pair.target.caches + pair.draft.caches


def answers(pair, method, prompts=PROMPTS):
    return [one.tokens for one in sb.generate(pair, prompts, method, seed=7, **SHORT)]


def test_each_thread_gets_the_texts_that_it_gets_alone(pair):
    """All methods at once from threads of their own, prompts known from before and not, among jobs that are cancelled."""
    expected = {method.name: answers(pair, method) for method in METHODS}
    found = {}
    with Engine(pair, LIMITS) as engine:

        def ask(method):
            found[method.name] = [one.tokens for one in engine.generate(PROMPTS, method, seed=7, **SHORT)]

        threads = [threading.Thread(target=ask, args=(method,)) for method in METHODS]
        for thread in threads:
            thread.start()
        others = Ends(sessions_of(pair, [[7, 7], LONG[::-1]], METHODS[2], max_new_tokens=40))
        engine.submit(others.jobs)
        engine.cancel(others.jobs)
        for thread in threads:
            thread.join()
        others.wait()
        assert found == expected
        assert [one.tokens for one in engine.generate(PROMPTS, METHODS[1], seed=7, **SHORT)] == expected["beam_search"]
        assert left(pair) == []
        assert pair.target.known_prompts.found > 0
    assert answers(pair, METHODS[0]) == expected["sampling"]  # the pair is free again


def test_a_second_thread_on_a_pair_is_refused_by_name(pair):
    with (
        Engine(pair, LIMITS),
        pytest.raises(NotSupported, match="thread 'specbeam engine' is decoding with this model"),
    ):
        sb.generate(pair, [3, 4], sb.greedy(), **SHORT)
    decoder = Decoder(pair.target)
    (first,) = sessions_of(pair, [[3, 4]], sb.greedy())
    decoder.add(first)
    failures = []

    def ask():
        try:
            sb.generate(pair, [3, 4], sb.greedy(), **SHORT)
        except NotSupported as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask, name="the second one")
    thread.start()
    thread.join()
    assert "so thread 'the second one' cannot" in failures[0]
    decoder.close()
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(failures) == 1  # nobody else decodes any more


def test_an_engine_that_has_ended_leaves_its_models_as_they_were(pair):
    models = (pair.target, pair.draft)
    before = [(lm.chunk, lm.share_from) for lm in models]
    with Engine(pair, EngineLimits(chunk=2 * CHUNK)) as engine:
        engine.call(lambda: None).result()  # its thread has begun
        assert [lm.chunk for lm in models] == [2 * CHUNK, 2 * CHUNK]
        assert all(lm.known_prompts is not None for lm in models)
    assert [(lm.chunk, lm.share_from) for lm in models] == before
    assert all(lm.known_prompts is None for lm in models)


def test_a_decoder_that_is_alone_may_change_its_thread(pair):
    (session,) = sessions_of(pair, [[3, 4]], sb.greedy())
    decoder = Decoder(pair.target)
    decoder.add(session)
    for _ in range(12):
        thread = threading.Thread(target=decoder.step)
        thread.start()
        thread.join()
    assert session.failure is None
    assert session.length == 12


def test_random_arrivals_cancels_and_failures_leave_nothing_behind(pair):
    rng = np.random.default_rng(0)
    calls = []

    def breaks(input_ids, scores):
        calls.append(1)
        raise ValueError("broken on purpose")

    expected = answers(pair, METHODS[2], [PROMPTS[0]])
    with Engine(pair, EngineLimits(max_running=3, max_waiting=500, chunk=CHUNK)) as engine:
        waits = []
        kept = []
        for number in range(60):
            method = METHODS[number % len(METHODS)]
            prompt = LONG[: int(rng.integers(2, 60))]
            broken = {"logits_processor": [breaks]} if number % 7 == 3 else {}
            many = Ends(sessions_of(pair, [prompt], method, seed=number, **broken))
            engine.submit(many.jobs)
            waits.append((many, bool(broken)))
            if rng.random() < 0.4:
                engine.cancel(many.jobs)
            elif number % 10 == 9:
                kept.append([one.tokens for one in engine.generate([PROMPTS[0]], METHODS[2], seed=7, **SHORT)])
        for many, broken in waits:
            (session,) = many.wait()
            if broken:
                assert isinstance(session.failure, Exception)
            else:
                assert session.failure is None or isinstance(session.failure, Cancelled)
        assert calls
        assert all(one == expected for one in kept)
        assert (engine.waiting, engine.inside, left(pair)) == (0, [], [])
        assert not engine._line.clocks
        assert engine.counts.restarts == 0


class Held(Ends):
    """Jobs of which the first one holds the engine's thread, between two steps, from its first token on."""

    def __init__(self, sessions, **options):
        super().__init__(sessions, **options)
        self.begun = threading.Event()
        self.released = threading.Event()

    def watch(self, job):
        super().watch(job)
        self.begun.set()
        assert self.released.wait(timeout=600)


def test_a_queue_that_is_full_refuses_and_a_deadline_ends_what_waits_or_runs(pair):
    with Engine(pair, EngineLimits(max_running=1, max_waiting=2, chunk=CHUNK)) as engine:
        running = Held(sessions_of(pair, [[3, 4]], METHODS[0], max_new_tokens=150))
        engine.submit(running.jobs)
        running.begun.wait()
        late = Ends(sessions_of(pair, [[5, 6]], METHODS[0]), start_by=time.monotonic() - 1)
        engine.submit(late.jobs)
        refused = Ends(sessions_of(pair, [[5], [6], [7]], METHODS[0]))
        with pytest.raises(QueueFull, match="this request adds 3; 0 places are free, and at most 2 texts may wait"):
            engine.submit(refused.jobs)
        engine.cancel(refused.jobs)  # who asked is gone: that makes no place in the line, as they never had one
        engine.cancel(running.jobs)
        running.released.set()
        (session,) = late.wait()
        assert isinstance(session.failure, TimedOut)
        refused.wait()
        running.wait()
        assert engine.waiting == 0
        assert engine.counts.cancelled == 1
        cut = Held(sessions_of(pair, [[3, 4]], METHODS[0], max_new_tokens=150))
        engine.submit(cut.jobs)
        cut.begun.wait()
        cut.jobs[0].end_by = 0
        cut.released.set()
        (session,) = cut.wait()
        assert session.failure is None
        assert cut.jobs[0].cut == "request_timeout"
        assert 0 < session.length < 150
        engine.drain(1)
        with pytest.raises(Draining):
            engine.submit(Ends(sessions_of(pair, [[5]], METHODS[0])).jobs)


def test_a_job_that_was_ended_before_it_was_submitted_does_not_wait(pair):
    with Engine(pair, LIMITS) as engine:
        ends = Ends(sessions_of(pair, [[3, 4], [5, 6]], sb.sampling()))
        engine.cancel(ends.jobs)
        ends.wait()
        engine.submit(ends.jobs)
        engine.call(lambda: None).result()
        assert engine.waiting == 0
        assert all(job.group == () for job in ends.jobs)
        began = time.monotonic()
        engine.drain(20)
        assert time.monotonic() - began < 10


def test_who_ends_lets_a_request_end_of_which_a_text_has_begun_and_refuses_those_that_wait(pair):
    with Engine(pair, EngineLimits(max_running=1, max_waiting=9, chunk=CHUNK)) as engine:
        begun = Ends(sessions_of(pair, [[3, 4], [5, 6], [7, 8]], METHODS[0], max_new_tokens=60))
        waiting = Ends(sessions_of(pair, [[9], [1]], METHODS[0]))
        engine.submit(begun.jobs)
        while not engine.inside:
            time.sleep(0.001)
        engine.submit(waiting.jobs)
        engine.drain(60)
        assert [(session.failure, session.length) for session in begun.wait()] == [(None, 60)] * 3
        assert all(isinstance(session.failure, Draining) for session in waiting.wait())
    assert left(pair) == []


def test_a_search_at_its_time_limit_ends_with_the_texts_that_it_has_found(pair):
    """The proved ones come first, those that may not be certain after them, and the prompt alone is no text."""
    settings = Settings.given(
        {"max_new_tokens": 6, "eos_token_id": [5], "length_penalty": 0.0} | {"num_return_sequences": 5000}, None
    )
    expected = [one.tokens for one in sb.best(pair, [3, 4], 4, max_new_tokens=6, eos_token_id=[5])]
    with Engine(pair, LIMITS) as engine:
        request = Request.of(pair, [3, 4], best_first(5000), settings)
        ends = Ends(request.sessions)
        proved = []

        def see(session, turn):
            if session.ended and not proved:
                proved.extend(session.ended)
                ends.jobs[0].end_by = 0

        ends.jobs[0].see = see
        engine.submit(ends.jobs)
        (session,) = ends.wait()
    error = request.result(session)
    assert isinstance(error, TooFewAnswers)
    found = [one.tokens for one in error.generations]
    assert found[: len(proved)] == [one.tokens for one in proved]
    assert found[0] == expected[0]
    assert all(found)
    certain = [beam.certain for beam in error.generations[0].beams]
    assert certain == sorted(certain, reverse=True)
    assert left(pair) == []


def test_a_search_that_has_found_nothing_at_its_time_limit_fails_by_it(pair):
    settings = Settings.given({"max_new_tokens": 200, "eos_token_id": [5], "min_new_tokens": 150}, None)
    with Engine(pair, LIMITS) as engine:
        ends = Ends(Request.of(pair, [3, 4], best_first(2), settings).sessions)
        ends.jobs[0].see = lambda session, turn: setattr(ends.jobs[0], "end_by", 0)
        engine.submit(ends.jobs)
        (session,) = ends.wait()
    assert isinstance(session.failure, TimedOut)


@pytest.mark.parametrize(
    "method",
    [best_first(None, 1000), sb.dsbd(2, 40, 8, width="fixed"), sb.opt_tree(nodes=200, depth=12, controller="fixed")],
    ids=lambda method: method.name,
)
def test_the_room_of_a_text_covers_the_nodes_that_a_method_holds(pair, method):
    """Prefixes of a search, and drafts that are larger than the text."""
    settings = Settings.given({"max_new_tokens": 16, "eos_token_id": [5]}, None)
    (session,) = Request.of(pair, [3, 4], method, settings, 3).sessions
    rooms = {lm: room_of(lm, session) for lm in (pair.target, pair.draft)}
    most = dict.fromkeys(rooms, 0)
    for _ in decode(pair.target, [session]):
        for lm in rooms:
            held = [cache.trie.held for cache in lm.caches]
            most[lm] = max(most[lm], *held, session.count.peak_kv_tokens * (lm is pair.target))
    assert session.failure is None
    assert most[pair.target] > len(session.prompt) + 16 + 16 + 64
    assert all(most[lm] <= room.slots for lm, room in rooms.items())


def test_a_job_that_can_never_fit_is_refused_and_others_wait_for_room(pair):
    per_text = (3 + 12 + 1 + 16 + 64) * (pair.target.slot_bytes + pair.draft.slot_bytes)
    with Engine(pair, EngineLimits(max_running=8, kv_bytes=2 * per_text, chunk=CHUNK)) as engine:
        with pytest.raises(NoRoom, match="ask for fewer new tokens"):
            engine.submit(Ends(sessions_of(pair, [LONG], METHODS[0], max_new_tokens=150)).jobs)
        most = []
        many = Ends(sessions_of(pair, [[1, 2, place] for place in range(6)], METHODS[0]))
        watch = many.watch
        for job in many.jobs:
            job.watch = lambda job: (most.append(len(engine.inside)), watch(job))
        engine.submit(many.jobs)
        assert all(session.failure is None for session in many.wait())
        assert max(most) <= 2


def test_what_breaks_the_decoder_costs_those_inside_and_nobody_later(pair, monkeypatch):
    expected = answers(pair, METHODS[0])
    with Engine(pair, LIMITS) as engine:
        step = Decoder.step

        def fail_once(decoder, moving):
            monkeypatch.setattr(Decoder, "step", step)
            raise MemoryError("no room")

        monkeypatch.setattr(Decoder, "step", fail_once)
        broken = Ends(sessions_of(pair, [[3, 4]], METHODS[0]))
        engine.submit(broken.jobs)
        (session,) = broken.wait()
        assert isinstance(session.failure, EngineFailed)
        assert "MemoryError: no room" in str(session.failure)
        assert [one.tokens for one in engine.generate(PROMPTS, METHODS[0], seed=7, **SHORT)] == expected
        assert engine.counts.restarts == 1
        assert left(pair) == []


def test_a_fault_that_one_job_alone_repeats_is_its_own_and_one_that_two_repeat_is_the_engines(pair):
    engine = Engine(pair, LIMITS)
    sessions = sessions_of(pair, [[3, 4], [3, 5], [3, 6]], METHODS[0])
    engine.inside = [Job(session, print) for session in sessions]
    engine._note_fault(1.0)
    assert [*engine._restarted] == [1.0]
    counted = []
    for number, session in enumerate(sessions):
        engine.inside = [Job(session, print, alone=True, again_after=1.0)]
        engine._note_fault(2.0 + number)
        counted.append(len(engine._restarted))
    assert counted == [0, 1, 1]


def test_a_drafter_that_raises_costs_its_own_request(pair):
    class Breaks:
        def draft(self, sessions, shapes):
            raise RuntimeError("no drafts today")

        def settle(self, session, turn):
            pass

    expected = answers(pair, METHODS[3], [PROMPTS[0]])
    with Engine(pair, LIMITS) as engine:
        broken = Ends(sessions_of(pair, [[3, 4]], METHODS[3].with_parts(drafter=Breaks())))
        engine.submit(broken.jobs)
        assert [one.tokens for one in engine.generate([PROMPTS[0]], METHODS[3], seed=7, **SHORT)] == expected
        (session,) = broken.wait()
        assert isinstance(session.failure, BrokenPart)


def test_logits_that_are_no_law_cost_their_own_request(pair):
    def spoil(input_ids, scores):
        return scores * float("nan")

    expected = answers(pair, METHODS[2], [PROMPTS[0]])
    with Engine(pair, LIMITS) as engine:
        spoilt = Ends(sessions_of(pair, [[3, 4]], METHODS[2], logits_processor=[spoil]))
        engine.submit(spoilt.jobs)
        assert [one.tokens for one in engine.generate([PROMPTS[0]], METHODS[2], seed=7, **SHORT)] == expected
        (session,) = spoilt.wait()
        assert isinstance(session.failure, BrokenLaw)


def test_other_threads_go_on_while_turns_are_taken(pair):
    if not pair.target.supports_runs:
        pytest.skip("its turns are not compiled")
    with Engine(pair, LIMITS) as engine:
        engine.generate([3, 4], METHODS[2], seed=1, **SHORT)  # what has to be compiled is
        many = Ends(sessions_of(pair, [[3, 4]], METHODS[2], max_new_tokens=200))
        engine.submit(many.jobs)
        ticks = 0
        while not many.jobs[0].is_over:
            time.sleep(0.0005)
            ticks += 1
        many.wait()
        assert ticks > 3


def test_a_step_with_more_jobs_than_before_takes_fewer_turns(pair):
    """Their turns take longer than those that were timed, and others wait for the step's end."""
    (session,) = sessions_of(pair, [[3, 4, 5]], sb.sampling())
    engine = Engine(pair, LIMITS)
    engine._turn_s = 0.005
    turns = []
    for count in (1, 4):
        engine.inside = [Job(session, lambda job: None) for _ in range(count)]
        turns.append(engine._turns_ahead(count))
    assert turns == [10, 2]


def test_scores_are_those_of_the_model_itself(pair):
    texts = [[5, 6, 7, 8], [5, 6, 9], [11]]
    for prompt in ([3], [3, 4, 5], LONG):
        with Engine(pair, LIMITS) as engine:
            scored = engine.score(prompt, texts, 3).result()
        for text, tokens in zip(texts, scored, strict=True):
            paths = [prompt + text[:place] for place in range(len(text))]
            laws = plain_logits(pair.target_model, paths).double().log_softmax(-1)
            for place, one in enumerate(tokens):
                assert one.token == text[place]
                assert one.logprob == pytest.approx(float(laws[place, one.token]), abs=1e-4)
                assert [token for token, _ in one.top] == laws[place].topk(3).indices.tolist()
        assert left(pair) == []


def test_what_is_known_of_a_prompt_gives_logits_of_the_same_bits(pair):
    """All beginnings, some longer and some shorter than what is known; another namespace knows nothing of it."""
    lm = pair.target
    root = Forest.rooted([9])

    def rows(prompt, namespace=""):
        one = seat([*prompt, 9])
        one.namespace = namespace
        one.recalled = {}
        (scored,) = lm.extend([one], [root])
        found = scored.logits.clone()
        lm.close(one)
        return found, one.recalled.get(lm, 0)

    lm.remember_prompts(CHUNK, 0)
    prompts = [LONG, LONG[:70], LONG[:33] + [1, 2, 3] * 9, LONG[:15], LONG[:16], LONG[:17], LONG[1:]]
    cold = [rows(prompt)[0] for prompt in prompts]
    lm.remember_prompts(CHUNK, 2**30)
    known = []
    for _ in range(2):
        for prompt, expected in zip(prompts, cold, strict=True):
            found, recalled = rows(prompt)
            assert (found == expected).all()
            known.append(recalled)
    assert known == [0, 64, 32, 0, 16, 16, 0, 96, 64, 48, 0, 16, 16, 96]
    assert rows(LONG, "another")[1] == 0
    size = lm.known_prompts.size // len(lm.known_prompts)
    lm.remember_prompts(CHUNK, 3 * size)
    for prompt, expected in zip(prompts, cold, strict=True):
        assert (rows(prompt)[0] == expected).all()
        assert lm.known_prompts.size <= 3 * size
    assert lm.known_prompts.dropped > 0
    lm.remember_prompts(CHUNK, 0)
