"""Laws and beams under forms: the same with and without drafts, those of transformers, and what counts as an answer."""

import json
import re

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.constraint import Constrained, Form
from specbeam.grammar.compiled import compiled
from specbeam.request import Request
from specbeam.settings import Settings
from tests.grammar.forms import FORMS, PERSON, POINTS, WORDS, characters
from tests.support import words
from tests.test_beam_search import METHODS, by_transformers
from tests.test_generation import beams_of


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize(
    ("beams", "form"),
    [
        (3, "words"),
        (1, "sum"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "words"), (3, "sum"), (4, "person"))),
    ],
)
def test_same_seed_same_beams_with_and_without_a_draft(beams, form, options):
    pair, prompts = characters(), ["abc", "x"]
    plain, fast = (
        sb.generate(pair, prompts, method, seed=5, max_new_tokens=60, **FORMS[form], **options)
        for method in (sb.beam_sampling(beams), sb.dsbd(beams, beams + 2, 3, "fixed"))
    )
    assert beams_of(fast) == beams_of(plain)


SEARCHES = [
    ("words", {"length_penalty": 2.0, "early_stopping": True}),
    ("sum", {}),
    *(
        pytest.param(form, options, marks=pytest.mark.slow)
        for form in ("words", "sum")
        for options in (
            {"repetition_penalty": 1.4},
            {"length_penalty": -0.5},
            {"early_stopping": "never", "min_new_tokens": 4},
        )
    ),
]


@pytest.mark.parametrize(("form", "options"), SEARCHES, ids=str)
def test_beam_search_is_that_of_transformers_with_the_same_masks(form, options):
    pair, vocab = characters(), len(words.tokenizer(words.JSON))
    asked = Form(*next((name, text) for name, text in FORMS[form].items()))
    bans = Constrained(compiled(asked, "llguidance", pair.tokenizer, vocab, (1,)), (1,), 0)
    for prompt, beams in (("abc", 3), ("Hello there", 5)):
        length = len(pair.tokenizer(prompt)["input_ids"])

        def allowed(batch, tokens, length=length):
            return np.flatnonzero(bans.allowed(tokens[None, length:].numpy(), vocab)[0]).tolist()

        expected = by_transformers(pair, prompt, beams, 30, prefix_allowed_tokens_fn=allowed, **options)
        for name in ("plain", "drafted", "prompt_lookup"):
            made = METHODS[name](beams)
            (one,) = sb.generate(pair, prompt, made, max_new_tokens=30, **FORMS[form], **options)
            found = [(beam.tokens, pytest.approx(beam.score, abs=1e-4)) for beam in one.beams if beam.finished]
            real = [(tokens, score) for tokens, score in expected if score > -1e6]  # it fills up with beams of -1e9
            assert found[: len(real)] == real
            assert len(real) > 1


def test_at_temperature_zero_all_are_greedy():
    pair = characters()
    options = {"max_new_tokens": 60, "json_schema": json.dumps(POINTS)}
    plain = sb.generate(pair, "abc", "greedy", **options)[0]
    for recipe in (sb.speculative_sampling(), sb.traversal(), sb.opt_tree(), sb.gsd()):
        assert sb.generate(pair, "abc", recipe, temperature=0, **options)[0].tokens == plain.tokens


def test_every_token_has_the_renormalised_law():
    """Scores of a sampled text, computed again from plain forwards: odds over the allowed tokens."""
    pair = characters()
    (one,) = sb.generate(pair, "abc", sb.rsd_s(), seed=1, max_new_tokens=40, regex=WORDS)
    bans = Constrained(compiled(Form("regex", WORDS), "llguidance", pair.tokenizer, 86, (1,)), (1,), 0)
    with torch.inference_mode():
        logits = pair.target_model(torch.tensor([one.prompt + one.tokens])).logits[0, len(one.prompt) - 1 : -1].double()
    score = 0.0
    for place, token in enumerate(one.tokens):
        allowed = bans.allowed(np.array([one.tokens[:place]], dtype=np.int64), logits.shape[1])[0]
        score += float(logits[place].masked_fill(~torch.from_numpy(allowed), -torch.inf).log_softmax(-1)[token])
    assert one.beams[0].score * len(one.tokens) == pytest.approx(score, abs=1e-4)
    assert one.report.law == "exact: plain sampling; constrained by regex"


def test_a_text_that_is_cut_off_goes_behind_those_that_ended():
    mixed, prompts = 0, ["abc", "Hello world", "x", "The end.", "no yes no yes", "why"]
    form = {"regex": "[a-z]{3}( [a-z]{20})?"}
    for one in sb.generate(characters(), prompts, sb.beam_sampling(4), seed=0, max_new_tokens=7, **form):
        finished = [beam.finished for beam in one.beams]
        assert finished == sorted(finished, reverse=True)
        mixed += len(set(finished)) == 2
        assert not finished[0] or re.fullmatch("[a-z]{3}", one.text)
    assert mixed > 0


def test_an_end_token_that_is_text_ends_a_text_only_where_it_may():
    pair = characters()
    newline = pair.tokenizer.convert_tokens_to_ids("\n")
    for one in sb.generate(pair, ["a", "b", "c"], "sampling", seed=0, regex="[a-z\n]{2}", eos_token_id=[newline]):
        assert one.tokens.index(newline) == 2


def test_the_last_bits_of_a_session_are_few():
    pair = characters()
    request = Request(
        pair, "abc", sb.dsbd(3, 5, 3), Settings.given({"max_new_tokens": 60, "json_schema": PERSON}, None), 1
    )
    from specbeam.decode import decode

    held = [len(request.sessions[0].warp.constraint) for _ in decode(pair.target, request.sessions)]
    assert max(held) <= 3 + 3 * 5
