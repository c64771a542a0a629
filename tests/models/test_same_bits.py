"""Texts and scores of compiled engines: the same to the last bit with any drafts, in any batch, with shared beginnings."""

import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

BEGINNING = [5, 9, 17, 33, 8, 41, 12, 50, 7, 29, 31, 44]
PROMPTS = [[*BEGINNING, 3 + number, 20 + number] for number in range(4)]
# Windows, a bound of scores, biases by distance and by position, experts.
FAMILIES = ("llama", "qwen2-window", "gemma2", "falcon-rw", "mixtral")
ROUNDED = ({"quantize": "int8"}, {"quantize": "int4"}, {"kv": "bfloat16"})
WAYS = [
    *((name, {}) for name in FAMILIES),
    *(("llama", options) for options in ROUNDED),
    ("gemma2", {"quantize": "int8"}),
]


def loaded(name, options, **more):
    """A pair whose draft is its target with other last bits, so that some drafts are accepted and some are not."""
    target = tiny(name, intermediate_size=64)
    draft = tiny(name, intermediate_size=64)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.05 * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0
    return sb.load(target, draft, engine="auto", **options, **more)


def beams_of(pair, method, prompts):
    found = sb.generate(pair, prompts, method, max_new_tokens=24, seed=3)
    return [[(beam.tokens, beam.score) for beam in one.beams] for one in found]


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_drafts_and_batches_change_no_bit(name, options):
    pair = loaded(name, options)
    assert pair.target.engine in ("compiled", "int8", "int4")
    drawn = beams_of(pair, sb.beam_sampling(4), PROMPTS)
    assert drawn == beams_of(pair, sb.dsbd(4), PROMPTS)
    assert drawn == [beams_of(pair, sb.dsbd(4, depth=3), [prompt])[0] for prompt in PROMPTS]
    searched = beams_of(pair, sb.beam_search(4), PROMPTS)
    assert searched == beams_of(pair, sb.speculative_beam_search(4), PROMPTS)
    assert searched == [beams_of(pair, sb.beam_search(4), [prompt])[0] for prompt in PROMPTS]


def test_a_shared_beginning_changes_no_bit():
    alone = beams_of(loaded("llama", {}), sb.beam_sampling(4), PROMPTS)
    pair = loaded("llama", {}, share_from=8)
    assert beams_of(pair, sb.beam_sampling(4), PROMPTS) == alone
    assert beams_of(pair, sb.dsbd(4), PROMPTS) == alone
