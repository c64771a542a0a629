"""Laws and beams under forms: the same with and without drafts, those of transformers, and what counts as an answer."""

import json
import re

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.constraint import Constrained, Form
from specbeam.core.decode import decode
from specbeam.doors.grammar.compiled import compiled
from specbeam.doors.grammar.spelling import text_of_tokens
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from tests.doors.grammar.forms import FORMS, PERSON, POINTS, WORDS, characters
from tests.support import words
from tests.test_beam_search import METHODS, by_transformers
from tests.test_generation import beams_of

PROMPTS = ["abc", "Hello world", "x", "The end.", "no yes no yes", "why"]


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
    ("limit", {"max_new_tokens": 7}),
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
    """Beams that the limit cut off too, which in transformers stand where their score puts them."""
    pair, vocab = characters(), len(words.tokenizer(words.JSON))
    form = FORMS.get(form, {"regex": "[a-z]{3}( [a-z]{20})?"})
    options = {"max_new_tokens": 30} | options
    asked = Form(*next((name, text) for name, text in form.items()))
    bans = Constrained(compiled(asked, "llguidance", pair.tokenizer, vocab, (1,)), (1,), 0)
    for prompt, beams in (("abc", 3), ("Hello there", 4)):
        length = len(pair.tokenizer(prompt)["input_ids"])

        def allowed(batch, tokens, length=length):
            return np.flatnonzero(bans.allowed(tokens[None, length:].numpy(), vocab)[0]).tolist()

        plain = {name: value for name, value in options.items() if name != "max_new_tokens"}
        expected = by_transformers(
            pair, prompt, beams, options["max_new_tokens"], prefix_allowed_tokens_fn=allowed, **plain
        )
        for name in ("plain", "drafted", "prompt_lookup"):
            (one,) = sb.generate(pair, prompt, METHODS[name](beams), **form, **options)
            found = [(beam.tokens, pytest.approx(beam.score, abs=1e-4)) for beam in one.beams]
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
    mixed, form = 0, {"regex": "[a-z]{3}( [a-z]{20})?"}
    for one in sb.generate(characters(), PROMPTS, sb.beam_sampling(4), seed=0, max_new_tokens=7, **form):
        finished = [beam.finished for beam in one.beams]
        assert finished == sorted(finished, reverse=True)
        mixed += len(set(finished)) == 2
        assert not finished[0] or re.fullmatch("[a-z]{3}", one.text)
    assert mixed > 0


def test_what_a_stop_string_cut_off_goes_behind_what_is_complete():
    """Such a beam is finished, and yet its text does not keep to the form."""
    mixed, form = 0, {"regex": "[a-z]{2}( [a-z]{20})?", "stop_strings": " "}
    for one in sb.generate(characters(), PROMPTS, sb.beam_sampling(4), seed=0, max_new_tokens=7, **form):
        complete = [beam.tokens[-1] == 1 for beam in one.beams]
        assert complete == sorted(complete, reverse=True)
        mixed += len(set(complete)) == 2 and all(beam.finished for beam in one.beams)
    assert mixed > 0


def test_an_end_token_that_is_text_ends_a_text_only_where_it_may_and_is_not_part_of_it():
    pair = characters()
    newline = pair.tokenizer.convert_tokens_to_ids("\n")
    for one in sb.generate(pair, ["a", "b", "c"], "sampling", seed=0, regex="[a-z\n]{2}", eos_token_id=[newline]):
        assert one.tokens.index(newline) == 2
        assert re.fullmatch("[a-z]{2}", one.text)


def test_texts_are_not_tidied_up():
    pair = characters()
    pair.tokenizer.clean_up_tokenization_spaces = True
    (one,) = sb.generate(pair, "abc", "sampling", seed=0, regex="a , b")
    assert one.text == "a , b"


def test_a_space_at_the_beginning_stays_where_the_decoder_would_drop_it():
    """Like the tokenizer of Llama 2."""
    from tokenizers import decoders

    pair = characters()
    pair.tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert pair.tokenizer.decode(pair.tokenizer(" a")["input_ids"]) == "a"
    tokens = pair.tokenizer(" ab")["input_ids"]
    assert text_of_tokens(pair.tokenizer, tokens) == " ab"


def test_a_session_holds_one_walker_per_live_beam():
    settings = Settings.given({"max_new_tokens": 60, "json_schema": PERSON}, None)
    request = Request.of(pair := characters(), "abc", sb.dsbd(3, 5, 3, width="dynamic"), settings, 1)
    (session,) = request.sessions
    for _ in decode(pair.target, [session]):
        assert len(session.warp.constraint) == (0 if session.over else session.beams.size)


def test_padding_is_no_part_of_the_text():
    """Of a padded batch, logits processors see the padding."""
    plain, padded = (
        Request.of(characters(), "abc", sb.dsbd(3, 5, 3, width="dynamic"), Settings(max_new_tokens=20, regex=WORDS), 1)
        for _ in range(2)
    )
    padded.sessions[0].pad([2, 2, 2])
    for request in (plain, padded):
        list(decode(request.pair.target, request.sessions))
        assert request.sessions[0].failure is None
    assert plain.answers(plain.sessions[0])[0].beams == padded.answers(padded.sessions[0])[0].beams
