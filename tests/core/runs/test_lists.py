"""Runs decide by lists of the best tokens: the same texts as by whole rows, however short the lists are."""

import itertools

import pytest

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.core.decoder import Decoder
from specbeam.core.ranked import WHOLE
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9] * 20, [2]]
CASES = {
    "beam sampling": (sb.beam_sampling(4), {}),
    "beam sampling with a top-k": (sb.beam_sampling(4), {"top_k": 5}),
    "beam search": (sb.beam_search(3), {}),
    "dsbd": (sb.dsbd(4, depth=2), {}),
    "dsbd with a temperature": (sb.dsbd(4, depth=2), {"temperature": 1.3}),
    "dsbd with a top-k and a top-p": (sb.dsbd(4, depth=2), {"top_k": 6, "top_p": 0.9}),
    "dsbd with a top-p": (sb.dsbd(4, depth=2), {"top_p": 0.8}),
    "dsbd with a min-p": (sb.dsbd(4, depth=2), {"min_p": 0.1, "temperature": 0.8}),
    "dsbd at temperature 0": (sb.dsbd(4, depth=2), {"temperature": 0.0}),
    "dsbd with dynamic widths": (sb.dsbd(4, width="dynamic", depth=2), {"top_k": 5}),
    "dsbd by rejection": (sb.dsbd(4, coupling="rejection", depth=2), {"top_k": 5}),
    "beams of transformers": (sb.dsbd(3, semantics="hf", depth=2), {"top_k": 5}),
    "beams of transformers without a truncation": (sb.dsbd(3, semantics="hf", depth=2), {"temperature": 0.9}),
    "speculative beam search": (sb.speculative_beam_search(3, depth=2), {}),
    "sampling": (sb.sampling(), {"temperature": 0.8}),
    "sampling with a top-p": (sb.sampling(), {"top_p": 0.8}),
    "sampling at temperature 0": (sb.sampling(), {"temperature": 0.0}),
    "speculative sampling with a top-k": (sb.speculative_sampling(3), {"top_k": 5}),
    "speculative sampling with a top-p": (sb.speculative_sampling(3), {"top_p": 0.8, "temperature": 1.2}),
    "speculative sampling at temperature 0": (sb.speculative_sampling(3), {"temperature": 0.0}),
    "block verification": (sb.block_verification(3), {"top_k": 5}),
    "trees of best drafts": (sb.opt_tree(4), {"top_k": 5}),
}


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", seed=1, vocab_size=300), draft=tiny("llama", seed=2, vocab_size=300))


def answers(pair, monkeypatch, method, options, length, **settings):
    """The texts and log-likelihoods of all beams, with lists of this length; 0: as long as planned; None: whole rows."""
    asked = []

    def listing_for(target, session, width):
        found = runs.listing_of(session, width, 2**40)
        asked.append(found.length)
        if length is None:
            return WHOLE
        return found._replace(length=length or found.length) if found.length else found

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_listing_for", listing_for)
        found = sb.generate(pair, PROMPTS, method, max_new_tokens=10, eos_token_id=[9], seed=3, **options, **settings)
    assert min(asked) > 0
    whole = sum(one.report.rows.whole for one in found)
    return [[beam.tokens for beam in one.beams] for one in found], whole


QUICK = (
    "beam sampling",
    "dsbd with a top-k and a top-p",
    "speculative sampling with a top-k",
)  # each other case compiles a loop of its own


# One token is drawn by noise or is the best one: the shortest list decides it.
NEED_ONE = ("sampling", "sampling at temperature 0", "speculative sampling at temperature 0")


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        (name, size) if size == 1 or name in QUICK else pytest.param(name, size, marks=pytest.mark.slow)
        for name in CASES
        for size in (1, 3)
    ],
)
def test_lists_of_any_length_give_the_texts_of_whole_rows(pair, monkeypatch, name, batch_size):
    if batch_size > 1:
        monkeypatch.setattr("specbeam.core.decoder.run_side_by_side", lambda *given: [])
    method, options = CASES[name]
    expected, none = answers(pair, monkeypatch, method, options, None, batch_size=batch_size)
    assert none == 0
    for length in (2, 3, 0):
        found, whole = answers(pair, monkeypatch, method, options, length, batch_size=batch_size)
        assert found == expected
        if length == 2 and name not in NEED_ONE:
            assert whole > 0


@pytest.mark.parametrize("name", ["dsbd", "dsbd with a top-k and a top-p", "dsbd with dynamic widths"])
def test_runs_may_change_the_form_of_rows_and_leave_turns_to_python(pair, monkeypatch, name):
    """Nodes that are kept from turn to turn have rows in the form of the run before."""
    method, options = CASES[name]
    settings = Settings(max_new_tokens=14, eos_token_id=[], **options)
    forms = itertools.cycle([3, 5, 0, 1000, 2])

    def listing_for(target, session, width):
        found = runs.listing_of(session, width, 2**40)
        length = next(forms)
        return found._replace(length=length) if length and found.length else WHOLE

    monkeypatch.setattr(runs, "_listing_for", listing_for)
    texts = []
    for pattern in ([0], [1], [1, 1, 0], [1, 0, 1, 0, 0]):
        (session,) = Request.of(pair, PROMPTS[:1], method, settings, 3).sessions
        turns = itertools.cycle(pattern)
        with Decoder(pair.target) as decoder:
            decoder.add(session)
            while decoder.busy:
                decoder.ahead = next(turns)
                decoder.step()
        assert session.failure is None
        texts.append([one.tokens for one in session.hypotheses()])
    assert texts[1:] == texts[:1] * 3
