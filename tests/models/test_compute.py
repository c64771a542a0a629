"""Products in bfloat16: `load(compute="bfloat16")`."""

import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.quantised import rounding_of
from tests.support.checking import refused
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9] * 5, [2]]
pytestmark = pytest.mark.usefixtures("packed")


def in_bfloat16(model):
    """Return a model whose weights, still in float32, are numbers of bfloat16."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def pair_in_bfloat16(**options):
    target, draft = (in_bfloat16(tiny("llama", seed=seed, vocab_size=64)) for seed in (1, 2))
    return sb.load(target, draft=draft, **options)


@pytest.fixture
def pair():
    return pair_in_bfloat16(compute="bfloat16")


def found(pair, prompts, method):
    answers = sb.generate(pair, prompts, method, seed=3, max_new_tokens=12, eos_token_id=[])
    return [[(beam.tokens, beam.score) for beam in one.beams] for one in answers]


def test_scores_are_near_those_in_float32_and_not_the_same(pair):
    rounded, exact = (found(one, [[1, 7, 3]], sb.beam_search(3))[0][0] for one in (pair, pair_in_bfloat16()))
    assert rounded[1] != exact[1]
    assert rounded[1] == pytest.approx(exact[1], abs=0.05)


def test_both_models_compute_so_and_reports_say_it(pair):
    assert [pair.target.engine, pair.draft.engine] == ["bfloat16", "bfloat16"]
    assert rounding_of(pair.target) == "bfloat16 products"
    (answer,) = sb.generate(pair, [[1, 2]], sb.sampling(), max_new_tokens=2, seed=1)
    assert "of the target in bfloat16 products" in answer.report.law


@pytest.mark.parametrize("method", [sb.sampling(), sb.beam_search(3)], ids=["sampling", "beam search"])
def test_a_text_does_not_depend_on_its_batch(pair, method):
    alone = [found(pair, [prompt], method)[0] for prompt in PROMPTS]
    assert found(pair, PROMPTS, method) == alone


def test_drafts_change_no_beam(pair):
    assert found(pair, PROMPTS, sb.dsbd(3, depth=2)) == found(pair, PROMPTS, sb.beam_sampling(3))


def test_a_draft_in_float32_stays_in_float32():
    target = in_bfloat16(tiny("llama", seed=1, vocab_size=64))
    pair = sb.load(target, draft=tiny("llama", seed=2, vocab_size=64), compute="bfloat16")
    assert [pair.target.engine, pair.draft.engine] == ["bfloat16", "compiled"]


def test_a_target_in_float32_is_refused():
    with pytest.raises(NotSupported, match=r"compute='bfloat16' cannot run this .* are not numbers of bfloat16"):
        sb.load(tiny("llama", seed=1, vocab_size=64), compute="bfloat16")


def test_other_values_and_a_second_choice_of_products_are_refused():
    model = in_bfloat16(tiny("llama", seed=1, vocab_size=64))
    with refused("compute is 'float16'; it must be 'bfloat16', or None"):
        sb.load(model, compute="float16")
    with pytest.raises(BadSetting, match="compute and quantize both choose"):
        sb.load(model, compute="bfloat16", quantize="int8")
    with pytest.raises(BadSetting, match="engine and compute both choose"):
        sb.load(model, compute="bfloat16", engine="plain")
    with refused("engine is 'bfloat16'; give compute='bfloat16' instead"):
        sb.load(model, engine="bfloat16")


def test_a_model_object_in_bfloat16_is_taken():
    model = tiny("llama", seed=1, vocab_size=64).to(torch.bfloat16)
    assert sb.load(model, compute="bfloat16").target.engine == "bfloat16"
