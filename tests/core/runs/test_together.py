"""Runs of several sessions whose passes of the target are one for all: the same texts, scores and reports as single turns."""

import pytest

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.core.decode import decode
from specbeam.core.decoder import Decoder
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import SomeFailed
from tests.support import words
from tests.support.loops import known
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9] * 20, [2], [11, 12], [1, 7, 4]]
METHODS = {
    "sampling": sb.sampling(),
    "greedy": sb.greedy(),
    "beams": sb.beam_sampling(4),
    "independent beams": sb.beam_sampling(3, replacement=True),
    "search": sb.beam_search(3),
}
OPTIONS = [
    {},
    {"repetition_penalty": 1.3, "min_new_tokens": 9},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [5, 8]]},
]


@pytest.fixture(scope="module", params=["llama", "qwen2-window"])
def pair(request):
    """Windows of a few tokens, and none."""
    return sb.load(tiny(request.param, seed=1, vocab_size=64))


@pytest.fixture(autouse=True)
def none_by_itself(monkeypatch):
    """Let no session of several go alone, as if models were too large for it."""
    monkeypatch.setattr("specbeam.core.decoder.run_side_by_side", only_failed)


@pytest.fixture
def turns(monkeypatch):
    """The numbers of turns that runs together took, one for each session in it."""
    kept, seen = runs.Run.keep, []

    def keep(run):
        seen.append(int(run.room.numbers[runs.DONE]))
        return kept(run)

    monkeypatch.setattr(runs.Run, "keep", keep)
    return seen


def only_failed(target, sessions, most_turns, to_the_end=False):
    """Take no turn."""
    return [one for one in sessions if one.failure is not None]


def with_and_without(pair, monkeypatch, prompts, method, **options):
    """What is known of all answers, and the target's passes: with turns taken together, and one by one."""
    options = {"seed": 4, "max_new_tokens": 12, "eos_token_id": [9, 30], **options}
    found = []
    for together in (True, False):
        before = pair.target.passes
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr("specbeam.core.decoder.run_together", only_failed)
                patch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
            answers = sb.generate(pair, prompts, method, **options)
        found.append(([known(one) for one in answers], pair.target.passes - before))
    return found


DRAFTING = {
    "dsbd": sb.dsbd(3, depth=2),
    "dsbd with dynamic widths": sb.dsbd(3, width="dynamic", depth=2),
    "dsbd by rejection": sb.dsbd(3, coupling="rejection", depth=2),
    "beams of transformers": sb.dsbd(3, semantics="hf", depth=2),
    "speculative beam search": sb.speculative_beam_search(3, depth=2),
    "a chain": sb.speculative_sampling(2),
    "retrieval": sb.prompt_lookup(),
}


@pytest.fixture(scope="module")
def drafting_pair():
    """A target and a draft model that resembles it."""
    return sb.load(tiny("llama", seed=1, vocab_size=64), draft=tiny("llama", seed=2, vocab_size=64))


QUICK = ("dsbd", "a chain")  # each other method compiles a loop of its own


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTING]
)
def test_sessions_with_drafts_take_turns_together(drafting_pair, turns, monkeypatch, name, options):
    (together, _), (single, _) = with_and_without(drafting_pair, monkeypatch, PROMPTS, DRAFTING[name], **options)
    assert together == single
    assert sum(turns) > len(PROMPTS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_texts_and_reports_are_those_of_single_turns(pair, turns, monkeypatch, name, options):
    together, single = with_and_without(pair, monkeypatch, PROMPTS, METHODS[name], **options)
    assert together == single
    assert sum(turns) > len(PROMPTS)


def test_a_session_that_ends_makes_room_for_another(pair, turns, monkeypatch):
    prompts = [*PROMPTS, *PROMPTS]
    (together, _), (single, _) = with_and_without(pair, monkeypatch, prompts, sb.sampling(), batch_size=3)
    assert together == single
    assert sum(turns) > len(prompts)


@pytest.mark.parametrize("batch_size", [5, 9])
def test_sessions_that_are_over_do_not_hold_up_the_others(pair, turns, monkeypatch, batch_size):
    """Nobody waits for their places, so each session has a single run, and they end at different lengths."""
    options = {"batch_size": batch_size, "max_new_tokens": 20, "eos_token_id": [*range(20, 30)]}
    together, single = with_and_without(pair, monkeypatch, PROMPTS, sb.sampling(), **options)
    assert together == single
    assert len(turns) == len(PROMPTS)
    assert len(set(turns)) > 1


def test_some_may_draft(pair, turns):
    """Those that do take their turns one by one, beside the others."""
    methods = [sb.sampling(), sb.prompt_lookup(), sb.greedy(), sb.beam_search(3)]
    found = []
    for ahead in (32, 0):
        settings = Settings(max_new_tokens=12, eos_token_id=[9, 30])
        each = [
            Request.of(pair, [prompt], method, settings, 3) for prompt, method in zip(PROMPTS, methods, strict=False)
        ]
        sessions = [session for request in each for session in request.sessions]
        for _ in decode(pair.target, sessions, ahead=ahead):
            pass
        found.append([(one.beams.tokens.tolist(), one.settled, one.count.target_passes) for one in sessions])
    assert found[0] == found[1]
    assert turns


@pytest.mark.parametrize("options", [{"stop_strings": ["q", "ab"]}, {"regex": "[a-f ]*"}], ids=str)
def test_stop_strings_and_constraints_hold(monkeypatch, turns, options):
    prompts = ["abc", "Hello you.", "b"]
    speaking = words.pair()
    (together, _), (single, _) = with_and_without(
        speaking, monkeypatch, prompts, sb.beam_sampling(4), eos_token_id=[1], **options
    )
    assert together == single
    assert turns


def test_a_row_without_a_law_fails_its_own_prompt(monkeypatch):
    """Its turn is taken back, and taken again by itself, which says what is wrong."""
    own = sb.load(tiny("llama", seed=1, vocab_size=64), check=False)
    own.target.model.get_input_embeddings().weight.data[40] = float("nan")
    with pytest.raises(SomeFailed, match="prompt 1") as failed:
        sb.generate(own, [[1, 2], [40, 3], [5]], sb.sampling(), max_new_tokens=6, seed=1)
    alone = sb.generate(own, [[1, 2]], sb.sampling(), max_new_tokens=6, seed=1)
    assert failed.value.generations[0].tokens == alone[0].tokens
    assert len(failed.value.generations[2].tokens) > 0


def test_a_loop_that_fails_ends_the_sessions_in_it(pair, monkeypatch):
    loop, calls = runs.run_turns_together, []

    def broken(jobs, *given):
        calls.append(len(jobs))
        if len(calls) == 2:
            raise MemoryError("no room")
        return loop(jobs, *given)

    monkeypatch.setattr(runs, "run_turns_together", broken)
    with pytest.raises(SomeFailed, match=r"2 prompts failed.*MemoryError: no room"):
        sb.generate(pair, PROMPTS[2:4], sb.sampling(), max_new_tokens=4, eos_token_id=[])
    assert calls == [2, 2]
    assert sb.generate(pair, PROMPTS[:1], sb.sampling(), max_new_tokens=4)


def test_a_long_run_is_left_so_that_users_can_interrupt(pair, turns, monkeypatch):
    monkeypatch.setattr(runs, "PATIENCE", 0.0)
    sb.generate(pair, PROMPTS, sb.sampling(), max_new_tokens=4, eos_token_id=[])
    assert turns == [1] * 4 * len(PROMPTS)


def test_a_bad_token_in_a_shared_pass_costs_one_prompt(pair):
    settings = Settings(max_new_tokens=4, eos_token_id=[])
    sessions = [*Request.of(pair, PROMPTS, sb.sampling(), settings, 3).sessions]
    sessions[4].prompt[1] = 64
    for _ in decode(pair.target, sessions, ahead=32):
        pass
    assert [one.failure is None for one in sessions] == [True, True, True, True, False]
    assert "IndexError: a token is outside" in str(sessions[4].failure)
    assert [one.length for one in sessions if one.failure is None] == [4] * 4


@pytest.mark.parametrize(("sharpness", "beams"), [(100, 16), (400, 12)])
def test_caches_have_room_for_every_turn(monkeypatch, turns, sharpness, beams):
    """Beams that never come together need more slots each turn than a run made room for."""
    model = tiny("llama", seed=1, vocab_size=64)
    model.lm_head.weight.data *= sharpness
    sharp = sb.load(model)
    prompts = [[1, 7, 3], [5, 6, 7]]
    (together, _), (single, _) = with_and_without(
        sharp, monkeypatch, prompts, sb.beam_search(beams), max_new_tokens=60, eos_token_id=[]
    )
    assert together == single
    assert sum(turns) >= 100


def test_a_constraint_that_broke_is_not_called_again(monkeypatch, turns):
    moved = []

    def broken(self, *numbers):
        moved.append(numbers)
        raise ValueError("no more")

    monkeypatch.setattr(runs.RowsOfSession, "_move", broken)
    with pytest.raises(SomeFailed, match="2 prompts failed"):
        sb.generate(words.pair(), ["abc", "b"], sb.sampling(), max_new_tokens=6, seed=1, regex="[a-f ]*")
    assert len(moved) <= 2


@pytest.mark.parametrize("options", [{}, {"audit": True}, {"num_return_sequences": 2}], ids=str)
def test_what_a_run_found_out_serves_the_next_one(pair, turns, monkeypatch, options):
    found_out, spec = [], runs.planned_run
    monkeypatch.setattr(runs, "planned_run", lambda *given: found_out.append(given) or spec(*given))
    monkeypatch.setattr(runs, "PATIENCE", 0.0)
    prompts = [*PROMPTS, *PROMPTS]
    method = sb.beam_sampling(3)
    (together, _), (single, _) = with_and_without(pair, monkeypatch, prompts, method, batch_size=4, **options)
    assert together == single
    assert len(turns) > 2 * len(prompts)
    assert len(found_out) < 2 * len(prompts)  # one for each, and the last of all goes on alone


def test_a_session_that_went_on_by_itself_is_looked_at_anew(pair):
    settings = Settings(max_new_tokens=40, eos_token_id=[])
    sessions = [*Request.of(pair, PROMPTS[:2], sb.sampling(), settings, 3).sessions]
    one = sessions[0]
    with Decoder(pair.target, ahead=2) as decoder:
        for session in sessions:
            decoder.add(session)
        decoder.step()
        paused = one.state[runs.PausedRun]
        assert paused.fits(one, 2)
        assert not paused.fits(one, 3)
        decoder.ahead = 0
        decoder.step()
        assert not paused.fits(one, 2)
        decoder.ahead = 2
        decoder.step()
        assert one.state[runs.PausedRun] is not paused
        assert one.length == 5
        while decoder.busy:
            decoder.step()
    assert [runs.PausedRun in session.state for session in sessions] == [False, False]
