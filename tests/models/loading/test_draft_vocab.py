"""`load(draft_vocab=)`: a draft model drafts only the first tokens of a vocabulary, and texts stay as they are."""

import copy

import numpy as np
import pytest

import specbeam as sb
from specbeam import errors
from specbeam.engines.cpu.sums import WIDTH
from specbeam.models.loading.drafts import check_draft_options
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

METHODS = [sb.dsbd(3, 4, 2), sb.speculative_beam_search(3, 4, 2), sb.speculative_sampling(2)]
PROMPTS = [[1, 2, 3], [4, 60, 5, 6]]


def models():
    """A target, and a copy of it that drafts."""
    return tiny("llama"), copy.deepcopy(tiny("llama"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_drafts_are_among_the_first_tokens(method):
    """Under shared noise, and in searches, texts are the same."""
    target, draft = models()
    pairs = [sb.load(target, draft, tokenizer=False, draft_vocab=below) for below in (None, 40)]
    assert pairs[1].draft.shared.drafted.nonzero()[0].tolist() == [*range(40)]
    assert len(pairs[1].draft.runner.decoder.head) == -(-40 // WIDTH)
    texts, scores = [], []
    for pair in pairs:
        outs = sb.generate(pair, PROMPTS, method, max_new_tokens=12, seed=4)
        assert sum(out.report.target_passes for out in outs) < 24  # some drafts are accepted
        texts.append([[beam.tokens for beam in out.beams] for out in outs])
        scores.append([beam.score for out in outs for beam in out.beams])
    if method.name != "speculative_sampling":
        assert texts[0] == texts[1]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_as_many_tokens_as_there_are_change_nothing():
    target, draft = models()
    assert sb.load(target, draft, tokenizer=False, draft_vocab=61).draft.shared is None


def test_a_target_that_drafts_in_8_bits_can_draft_few_tokens():
    pair = sb.load(models()[0], "int8", tokenizer=False, draft_vocab=32)
    assert pair.draft.shared.head_rows == 32
    assert pair.target.shared is None
    outs = sb.generate(pair, PROMPTS, sb.dsbd(3, 4, 2), max_new_tokens=12, seed=4)
    alone = sb.generate(pair, PROMPTS, sb.beam_sampling(3), max_new_tokens=12, seed=4)
    assert [out.beams[0].tokens for out in outs] == [out.beams[0].tokens for out in alone]


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_drafts_of_models_with_sources_can_draft_few_tokens(kind):
    target = tiny_reader(kind)
    texts = []
    for below in (None, 20):
        pair = sb.load(target, copy.deepcopy(target), tokenizer=False, draft_vocab=below)
        outs = sb.generate(pair, [[5, 6, 7], [8, 9]], METHODS[0], max_new_tokens=8, seed=2)
        texts.append([[beam.tokens for beam in out.beams] for out in outs])
    assert pair.draft.shared.head_rows == 20
    assert texts[0] == texts[1]


def test_tokens_that_are_not_drafted_are_read():
    target, draft = models()
    pair = sb.load(target, draft, tokenizer=False, draft_vocab=20)
    whole = sb.load(target, draft, tokenizer=False)
    assert np.array_equal(pair.draft.shared.read_as, np.arange(61))
    found = pair.draft.runner.decoder.model
    expected = whole.draft.runner.decoder.model
    assert np.array_equal(found.embedding, expected.embedding)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "32k", True])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(errors.BadSetting, match=r"draft_vocab is .*; it is a number of tokens, at least 1"):
        check_draft_options("draft", None, wrong)


def test_it_is_for_draft_models():
    with pytest.raises(errors.BadSetting, match="draft_vocab is for draft models, and there is none"):
        sb.load(models()[0], tokenizer=False, draft_vocab=8)
    with pytest.raises(errors.BadSetting, match="the draft is the target without some sublayers"):
        sb.load(models()[0], "swift", tokenizer=False, draft_vocab=8)
