"""Runs of turns in one compiled loop against the same turns one by one: texts, scores, reports, and what models hold."""

import gc
import weakref
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specbeam as sb
from specbeam.core import compiling, run_steps, runs
from specbeam.core.control.confidence import SureDraft
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.thompson import Thompson
from specbeam.core.decode import decode
from specbeam.core.laws.reduce import BROKEN, SOUND
from specbeam.core.records import Shape
from specbeam.core.session import Session
from specbeam.core.verify.walk import PathRule
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import SomeFailed, TooFewAnswers
from specbeam.generation import turns_of
from tests.support import words
from tests.support.loops import OPTIONS, PROMPTS, known, pair
from tests.support.steps import source_of_steps
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = {
    "fixed": sb.dsbd(3, 5, 4, "fixed"),
    "dynamic": sb.dsbd(4, 5, 3, width="dynamic"),
    "narrow": sb.dsbd(4, 4, 2, threshold=0.95, min_beams=2, width="dynamic"),
    "by cost": sb.dsbd(3, width="fixed"),
    "nucleus": sb.dsbd(3, width="auto"),
    "nucleus, of one shape": sb.dsbd(4, 4, 3, "auto", min_beams=1, mass=0.7),
    "nucleus by rejection": sb.dsbd(4, 5, 3, "auto", coupling="rejection"),
    "nucleus without a draft": sb.beam_sampling(4, width="auto"),
    "one beam": sb.dsbd(1, 3, 5, "fixed"),
    "no draft": sb.beam_sampling(4),
    "one sequence": sb.sampling(),
    "chain": sb.speculative_sampling(4),
    "chain by cost": sb.speculative_sampling(6, controller="cost"),
    "tree": sb.specinfer((3, 2, 1)),
    "tree of distinct draws": sb.rsd_c((2, 2, 1)),
    "tree of fixed shape": sb.sequoia(7, 4),
    "tree of the likeliest and one": sb.spechub(3),
    "matched chain": sb.speculative_sampling(4, rule="match"),
    "block": sb.block_verification(4),
    "chain by a mixed coin": sb.speculative_sampling(5, controller="calibration_ts"),
    "tree while it pays": sb.rsd_c((2, 2, 1), controller="survival"),
    "tree from its leaves": sb.traversal((2, 2, 1)),
    "tried": sb.dsbd(3, 5, 3, "fixed", coupling="rejection"),
    "tried, dynamic": sb.dsbd(3, 4, 3, coupling="rejection", width="dynamic"),
    "tried, independent": sb.dsbd(3, 4, 3, "fixed", coupling="rejection", replacement=True),
    "no draft, independent": sb.beam_sampling(3, replacement=True),
    "transformers' sampling": sb.beam_sampling(3, semantics="hf"),
    "transformers' sampling, drafted": sb.dsbd(3, 5, 3, "fixed", semantics="hf"),
}
SEARCHES = {
    "search": sb.beam_search(3),
    "search, drafted": sb.speculative_beam_search(3, 5, 3),
    "search, drafted by cost": sb.speculative_beam_search(3),
    "greedy": sb.greedy(),
}
TREES = ["chain", "chain by cost", "tree", "tree of distinct draws", "tree of fixed shape", "block"]
TRIED = ["tried", "tried, dynamic", "no draft, independent"]
ENDS = [
    {}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 2.0}, {"num_return_sequences": 2},
    {"length_penalty": 0.0, "early_stopping": False},
]  # fmt: skip


EDITS = [
    {"repetition_penalty": 1.3, "top_k": 20}, {"repetition_penalty": 0.7, "min_new_tokens": 9},
]  # fmt: skip


class Run(NamedTuple):
    """What came of one compiled run."""

    turns: int
    condition: int


@pytest.fixture
def seen(pair, monkeypatch):
    """The runs of a test, but not those that measure what turns cost."""
    measured(pair)
    return watched_runs(monkeypatch)


@pytest.fixture(scope="module")
def speaking():
    return words.pair()


@pytest.fixture
def spoken(speaking, monkeypatch):
    """The runs of a test of the pair that speaks."""
    measured(speaking)
    return watched_runs(monkeypatch)


def measured(pair):
    for method in (METHODS | SEARCHES).values():
        method.parts(pair.target, pair.draft)
    return pair


def watched_runs(monkeypatch):
    """A list to which each run from now on is added."""
    seen = []

    def run_turns(target, draft, spec, live, start, room, turns, dice):
        loop = run_steps.run_turns  # its source, inside `source_of_steps`
        live, start, condition = loop(target, draft, spec, live, start, room, turns, dice)
        seen.append(Run(int(room.numbers[runs.DONE]), condition))
        return live, start, condition

    monkeypatch.setattr(runs, "run_turns", run_turns)
    return seen


def turn_by_turn(patch):
    """Let no turn be taken in a run."""
    patch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
    patch.setattr("specbeam.core.decoder.run_together", lambda target, sessions, *_: [])


def both(pair, prompt, method, monkeypatch, **options):
    """What comes of a generation with runs and without them."""
    options = {"seed": 4, "max_new_tokens": 12, "eos_token_id": [9, 30], **options}
    found = answers(pair, prompt, method, **options)
    with monkeypatch.context() as patch:
        turn_by_turn(patch)
        expected = answers(pair, prompt, method, **options)
    return found, expected


def answers(*given, **options):
    """What is known of each answer; of one that fails, what is said."""
    try:
        found = sb.generate(*given, **options)
    except TooFewAnswers as error:  # a dynamic width may leave fewer beams than were asked for
        found = error.generations
    except sb.SpecbeamError as error:
        return [str(error)]
    return [known(one) for one in found]


def check_every_prompt(pair, method, monkeypatch, **options):
    """Check that a generation with runs is that without them."""
    for prompt in PROMPTS:
        found, expected = both(pair, prompt, method, monkeypatch, **options)
        assert found == expected


def check_every_turn_ran(seen):
    assert len(seen) >= len(PROMPTS)
    assert {one.condition for one in seen} == {SOUND}


@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_runs_are_their_source(pair, seen, name):
    """The loop itself run by Python, with the passes of the compiled engine: the same texts, scores and reports."""
    method = (METHODS | SEARCHES)[name]
    options = {"seed": 4, "max_new_tokens": 8, "eos_token_id": [9, 30]}
    expected = answers(pair, PROMPTS[0], method, **options)
    with source_of_steps(compiled_from="specbeam.engines"):
        found = answers(pair, PROMPTS[0], method, **options)
    assert len(seen) >= 2
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    for one, other in zip(found, expected, strict=True):
        assert one[1:] == other[1:]
        assert [(tokens, finished) for tokens, _, finished in one[0]] == [
            (tokens, finished) for tokens, _, finished in other[0]
        ]
        # Compiled sums over float32 rows may be made in another order.
        assert [score for _, score, _ in one[0]] == pytest.approx([score for _, score, _ in other[0]], abs=1e-5)


STOPS = {
    "a coin": "beta_ts",
    "one rate a turn": Thompson("round", most=5, forget=0.9, censored=False),
    "a moving threshold": "tracked",
    "a threshold": SureDraft(0.2, most=5),
    "an odd one, in Python": Thompson(most=5, calibrated=True),
}


@pytest.mark.parametrize("name", STOPS)
def test_turns_that_end_between_layers_run_ahead(pair, seen, monkeypatch, name):
    method = sb.speculative_sampling(5, controller=STOPS[name])
    check_every_prompt(pair, method, monkeypatch, temperature=1.5, max_new_tokens=24)
    assert bool(seen) == (name != "an odd one, in Python")


def favour(tokens, scores):
    """Make tokens likelier that follow the last one, as a processor of the user's."""
    liked = scores.clone()
    for row, last in enumerate(tokens[:, -1].tolist()):
        liked[row, last % 7 :: 7] += 1.5
    return liked


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_texts_and_reports_are_the_same(pair, seen, monkeypatch, name, options):
    check_every_prompt(pair, METHODS[name], monkeypatch, **options)
    check_every_turn_ran(seen)


@pytest.mark.parametrize("options", EDITS, ids=str)
@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_what_options_change_in_rows_is_done_in_runs(pair, seen, monkeypatch, name, options):
    """Turn by turn it is done by transformers' processors."""
    method = (METHODS | SEARCHES)[name]
    if method.greedy:  # it refuses warpers
        options = {key: value for key, value in options.items() if key != "top_k"}
    check_every_prompt(pair, method, monkeypatch, **options)
    check_every_turn_ran(seen)


@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_rows_are_processed_by_python_in_runs(pair, seen, monkeypatch, name):
    """By processors that no step knows: several of them, and one of the user's own."""
    options = {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[3], [5, 8]],
        "logits_processor": LogitsProcessorList([favour]),
    }
    method = (METHODS | SEARCHES)[name]
    if not method.greedy:  # which refuses warpers
        options["top_k"] = 20
    check_every_prompt(pair, method, monkeypatch, **options)
    check_every_turn_ran(seen)


class Scatterbrained(LogitsProcessor):
    """A processor that keeps what it is given between two lines: two calls at once would mix it up."""

    def __call__(self, input_ids, scores):
        self.last = input_ids[:, -1].tolist()
        scores = scores.clone()
        torch.sort(scores)  # releases the interpreter
        for row, last in enumerate(self.last):
            scores[row, last % 5 :: 5] += 2.0
        return scores


def test_processors_of_a_batch_are_called_one_at_a_time(pair):
    """Sessions of a batch run in threads and share their processors."""
    options = {"logits_processor": LogitsProcessorList([Scatterbrained()]), "seed": 1, "max_new_tokens": 12}
    prompts = [*PROMPTS, *PROMPTS]
    method = sb.dsbd(2, 3, 2, "fixed")
    together = sb.generate(pair, prompts, method, **options)
    each = sb.generate(pair, prompts, method, batch_size=1, **options)
    assert [one.tokens for one in together] == [one.tokens for one in each]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through_processors_in_runs(pair, seen, kind):
    def interrupted(tokens, scores):
        raise kind

    with pytest.raises(kind):
        sb.generate(pair, PROMPTS[0], "sampling", seed=1, logits_processor=LogitsProcessorList([interrupted]))


def test_sessions_are_freed_when_their_runs_are_over(pair, monkeypatch):
    """Without the garbage collector: what a run calls in Python does not hold the session."""
    made = []
    init = Session.__init__

    def noted(self, *given, **options):
        init(self, *given, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Session, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        sb.generate(pair, PROMPTS[0], "sampling", seed=1, max_new_tokens=6, no_repeat_ngram_size=2)
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_constraints_hold_in_runs(speaking, spoken, monkeypatch, name):
    for prompt, form in (("abc", "[a-f ]*"), ("Hello you.", "(ab|cd)+e?")):
        options = {"regex": form, "eos_token_id": [1], "max_new_tokens": 20}
        found, expected = both(speaking, prompt, (METHODS | SEARCHES)[name], monkeypatch, **options)
        assert found == expected
    assert len(spoken) >= 2
    assert {one.condition for one in spoken} == {SOUND}


@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_runs_are_audited(pair, seen, monkeypatch, name, options):
    """With the same evidence as turn by turn, up to rounding: sums over many turns are added up in another order."""
    for prompt in PROMPTS:
        options = {"audit": True, "seed": 4, "max_new_tokens": 12, **options}
        found = audits(pair, prompt, METHODS[name], **options)
        with monkeypatch.context() as patch:
            turn_by_turn(patch)
            expected = audits(pair, prompt, METHODS[name], **options)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    check_every_turn_ran(seen)


def audits(*given, **options):
    """The numbers of the audits of each answer."""
    try:
        found = sb.generate(*given, **options)
    except TooFewAnswers as error:
        found = error.generations
    return [np.hstack(astuple(one.report.audit)) for one in found]


@pytest.mark.parametrize("stops", [["q", "ab"], ["e"], ["~"]], ids=str)
@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_texts_end_at_stop_strings_in_runs(speaking, spoken, monkeypatch, name, stops):
    """Runs stop before turns that may complete one, which Python takes; "e" comes often, "~" never."""
    method = (METHODS | SEARCHES)[name]
    for prompt in ("abc", "Hello you."):
        options = {"stop_strings": stops, "eos_token_id": [1], "max_new_tokens": 20}
        found, expected = both(speaking, prompt, method, monkeypatch, **options)
        assert found == expected
    conditions = {one.condition for one in spoken}
    assert conditions <= {SOUND, runs.LOOK}
    if "transformers' sampling" in name:  # whose candidates Python has to see
        return
    assert conditions == {SOUND} or stops != ["~"]


@pytest.mark.parametrize("name", METHODS | SEARCHES)
def test_a_run_stops_before_a_turn_that_completes_a_stop_string(speaking, spoken, name):
    """A character from the middle of the text that comes without stop strings."""
    method = (METHODS | SEARCHES)[name]
    options = {"seed": 4, "eos_token_id": [1], "max_new_tokens": 12}
    options["min_new_tokens"] = 12
    text = sb.generate(speaking, "abc", method, **options)[0].text
    spoken.clear()
    sb.generate(speaking, "abc", method, stop_strings=[text[len(text) // 2]], **options)
    if "transformers' sampling" in name:  # whose candidates Python has to see
        assert not spoken
    else:
        assert runs.LOOK in {one.condition for one in spoken}


def test_greedy_texts_are_edited_in_runs(pair, seen, monkeypatch):
    for options in ({"repetition_penalty": 1.3}, {"min_new_tokens": 6}):
        found, expected = both(pair, PROMPTS[0], sb.greedy(), monkeypatch, **options)
        assert found == expected
    assert len(seen) >= 2


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_find_the_same(pair, seen, monkeypatch, name):
    for prompt in PROMPTS:
        for ends in ENDS:
            found, expected = both(pair, prompt, SEARCHES[name], monkeypatch, **ends_of(name, ends))
            assert found == expected
    assert len(seen) >= len(PROMPTS) * len(ENDS)
    assert {one.condition for one in seen} == {SOUND}


def ends_of(name, ends):
    """Greedy search has one answer, and no scores to compare."""
    return {} if name == "greedy" else ends


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(
    "name", ["fixed", "dynamic", "no draft", "chain", "tree", "tried", "transformers' sampling, drafted"]
)
def test_ends_come_where_they_came(pair, seen, monkeypatch, name, ends):
    """Beams end often, and each of them may be enough."""
    options = {"top_k": 12, **ends, "eos_token_id": list(range(0, 60, 6))}
    for seed in range(4):
        found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, seed=seed, **options)
        assert found == expected
    assert seen


@pytest.mark.parametrize("name", ["fixed", "dynamic", "by cost", "nucleus", "one sequence", *TREES, *TRIED])
def test_long_texts_take_several_runs(pair, seen, monkeypatch, name):
    options = {"max_new_tokens": 250, "eos_token_id": [], "top_k": 8}
    found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, **options)
    assert found == expected
    assert len(seen) > 3
    assert sum(one.turns for one in seen) == found[0][1]


@pytest.mark.parametrize("name", ["dynamic", "nucleus", "tried, dynamic"])
def test_laws_with_a_long_support_are_run_too(pair, seen, monkeypatch, name):
    """All tokens are left by a wide top-k, more of them than there are places in the races that a width is chosen by."""
    found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, top_k=64, temperature=3.0)
    assert found == expected
    assert {one.condition for one in seen} == {SOUND}


@pytest.mark.parametrize("name", [*TREES, "fixed", "tried"])
def test_a_flat_row_is_run_too(seen, monkeypatch, name):
    """After it, top-p keeps a great part of a large vocabulary."""
    flat, own = tiny("llama", seed=1, vocab_size=2048), tiny("llama", seed=2, vocab_size=2048)
    flat.lm_head.weight.data.mul_(0.01)
    for target, draft in ((flat, own), (own, flat)):
        pair = measured(sb.load(target, draft))
        seen.clear()
        found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, top_p=0.9)
        assert found == expected
        assert {one.condition for one in seen} == {SOUND}


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("name", ["fixed", "dynamic", "chain", "tree from its leaves", "tried"])
def test_a_turn_without_a_law_is_taken_back_and_goes_turn_by_turn(seen, monkeypatch, name, broken):
    """Of some tokens a model makes NaN: those that come upon them say so, at the same step."""
    measured(pair_with_holes(broken=None))
    options = {"temperature": 1.5, "max_new_tokens": 12, "eos_token_id": [9, 30]}
    refused, failed = 0, 0
    for seed in range(8):
        seen.clear()
        found = answers(pair_with_holes(broken), PROMPTS[0], METHODS[name], seed=seed, **options)
        with monkeypatch.context() as patch:
            turn_by_turn(patch)
            expected = answers(pair_with_holes(broken), PROMPTS[0], METHODS[name], seed=seed, **options)
        assert found == expected
        refused += any(one.condition == BROKEN for one in seen)
        failed += isinstance(found[0], str) and "NaN" in found[0]
    assert refused >= failed > 0


def pair_with_holes(broken):
    """A pair of which the model named `broken` makes NaN of four tokens; a new one, for NaN stays in a cache."""
    own = sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64), check=False)
    if broken is not None:
        embedding = getattr(own, broken).model.get_input_embeddings().weight.data
        embedding[40:44] = float("nan")
    return own


@pytest.mark.parametrize("name", ["fixed", "dynamic", "by cost", "nucleus", "search, drafted", *TREES, *TRIED])
def test_single_turns_may_follow(pair, monkeypatch, name):
    """A run leaves behind what single turns would have."""
    measured(pair)
    states = []
    for most_turns in (32, 3, 0):
        settings = Settings(max_new_tokens=60, eos_token_id=[], **({} if name in SEARCHES else {"top_k": 6}))
        request = Request.of(pair, [PROMPTS[0]], (METHODS | SEARCHES)[name], settings, 3)
        (session,) = request.sessions
        for _ in decode(pair.target, [session], ahead=most_turns):
            turn_by_turn(monkeypatch)
        states.append(state_of(session))
        monkeypatch.undo()
    assert states[0] == states[2]
    assert states[1] == states[2]


def state_of(session):
    """Texts, counters, and the chance that is to come."""
    count = session.count
    texts = [(one.tokens, one.loglik) for one in session.hypotheses()]
    numbers = count.target_passes, count.draft_passes, count.accepted, count.peak_kv_tokens
    return texts, numbers, count.widths, session.dice.uniform((4,)).tolist()


@pytest.mark.parametrize("name", ["fixed", "nucleus", "tree", "tried, dynamic"])
def test_runs_of_any_length_give_the_same(pair, name):
    measured(pair)
    states = []
    for most_turns in (0, 1, 2, 5):
        settings = Settings(max_new_tokens=40, top_k=6, eos_token_id=[])
        (session,) = Request.of(pair, [PROMPTS[0]], METHODS[name], settings, 3).sessions
        for _ in decode(pair.target, [session], ahead=most_turns):
            pass
        states.append(state_of(session))
    assert states == states[:1] * 4


def test_a_pass_is_counted_once(pair, monkeypatch):
    """By the models too, which know passes that ran no layer."""
    counts = []
    for runs_turns in (True, False):
        if not runs_turns:
            turn_by_turn(monkeypatch)
        before = pair.target.passes, pair.draft.passes
        sb.generate(pair, PROMPTS[0], METHODS["fixed"], seed=1, max_new_tokens=24, top_k=6)
        counts.append((pair.target.passes - before[0], pair.draft.passes - before[1]))
    assert counts[0] == counts[1]


def test_turns_that_are_shown_do_not_run_ahead(pair, seen):
    turns = [*turns_of(pair, PROMPTS[0], METHODS["fixed"], max_new_tokens=6, seed=1)]
    assert len(turns) > 0
    assert not seen


@pytest.mark.parametrize("more", [{"collapse": True}, {"trace": True}], ids=str)
def test_what_python_does_after_each_turn_is_no_run(pair, seen, more):
    sb.generate(pair, PROMPTS[0], sb.dsbd(3, 5, 2, "fixed", **more), seed=1, max_new_tokens=6, top_k=5)
    assert not seen


def test_prompts_one_after_the_other(pair, seen):
    """A batch of one is run; the last of a batch is as soon as it is alone."""
    alone = sb.generate(pair, PROMPTS, METHODS["fixed"], seed=2, max_new_tokens=20, top_k=5, batch_size=1)
    assert len(seen) >= len(PROMPTS)
    together = sb.generate(pair, PROMPTS, METHODS["fixed"], seed=2, max_new_tokens=20, top_k=5, batch_size=3)
    assert [one.tokens for one in alone] == [one.tokens for one in together]


@dataclass(frozen=True)
class Shallower(FixedShape):
    """Somebody's own: it decides otherwise than the part that it is derived from."""

    def plan(self, session):
        return Shape(min(2, session.remaining - 1), 1)


class Counting(PathRule):
    def verify(self, session, forest, scored):
        verdicts.append(verdict := super().verify(session, forest, scored))
        return verdict


verdicts = []


def test_parts_that_are_derived_are_obeyed(pair, seen):
    verdicts.clear()
    own = sb.speculative_sampling(4, controller=Shallower(4, 1))
    (found,) = sb.generate(pair, PROMPTS[0], own, seed=3, max_new_tokens=12, top_k=6, eos_token_id=[])
    assert found.report.draft_passes <= 2 * found.report.target_passes
    plain = sb.speculative_sampling(4)
    parts = replace(plain.parts(pair.target, pair.draft), rule=Counting())
    method = replace(plain, build=lambda target, draft: parts)
    (found,) = sb.generate(pair, PROMPTS[0], method, seed=3, max_new_tokens=12, top_k=6)
    assert len(verdicts) == found.report.target_passes
    assert not seen


@pytest.mark.parametrize("name", METHODS)
def test_one_new_token_and_no_draft_at_all(pair, monkeypatch, name):
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 2, "eos_token_id": []}):
        found, expected = both(pair, PROMPTS[1], METHODS[name], monkeypatch, top_k=6, **options)
        assert found == expected
    shape = sb.speculative_sampling(3, controller=FixedShape(0, 1))
    found, expected = both(pair, PROMPTS[0], shape, monkeypatch, top_k=6)
    assert found == expected


@pytest.mark.parametrize("name", ["fixed", "dynamic", "chain", "tree"])
def test_long_prompts_go_in_by_chunks(seen, monkeypatch, name):
    own = sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64))
    own.target.chunk = own.draft.chunk = 24
    for length in (10, 23, 24, 40, 100):
        prompt = [*range(3, 60), *range(3, 60)][:length]
        found, expected = both(measured(own), prompt, METHODS[name], monkeypatch, top_k=6)
        assert found == expected
    assert seen


def test_what_goes_wrong_costs_one_prompt(pair, monkeypatch):
    loop, calls = runs.run_turns, []

    def broken(*given):
        calls.append(given)
        if len(calls) == 1:
            raise IndexError("a token is outside the model's vocabulary")
        return loop(*given)

    monkeypatch.setattr(runs, "run_turns", broken)
    with pytest.raises(SomeFailed, match=r"prompt 0.*IndexError: a token is outside") as failed:
        sb.generate(pair, [PROMPTS[0]] * 2, METHODS["fixed"], max_new_tokens=4, batch_size=1)
    assert len(failed.value.generations[1].tokens) > 0


def test_what_goes_wrong_before_a_run_costs_one_of_those_side_by_side(pair, monkeypatch):
    caches, calls = runs.Run.caches, []

    def broken(run, stack):
        calls.append(run)
        if len(calls) == 1:
            raise OverflowError("too large for the loop")
        return caches(run, stack)

    monkeypatch.setattr(runs.Run, "caches", broken)
    monkeypatch.setattr(runs, "allowed_threads", lambda: 1)
    with pytest.raises(SomeFailed, match=r"prompt 0.*OverflowError: too large") as failed:
        sb.generate(pair, [PROMPTS[0]] * 2, METHODS["no draft"], max_new_tokens=4)
    assert len(failed.value.generations[1].tokens) > 0
