"""What tests of the loops share: methods whose parts go step by step, and the same texts asked for of both."""

from dataclasses import replace

import pytest

import specbeam as sb
from tests.support.tiny_models import tiny

OPTIONS = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 0}, {"top_k": 5}, {"top_k": 3, "temperature": 0.4},
    {"top_p": 0.9}, {"top_p": 0.99, "top_k": 40}, {"min_p": 0.05, "top_k": 30},
]  # fmt: skip
PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9] * 20, [2]]


@pytest.fixture(scope="module", params=["llama", "qwen2-window"])
def pair(request):
    """64 words fill the panels, 61 do not; windows of a few tokens."""
    family, vocab = request.param, 64 if request.param == "llama" else 61
    return sb.load(tiny(family, seed=1, vocab_size=vocab), tiny(family, seed=2, vocab_size=vocab))


def step_by_step(method, part):
    """The method with a "drafter" or a "rule" that leaves its loop alone."""

    def build(target, draft):
        parts = method.build(target, draft)
        return replace(parts, **{part: replace(getattr(parts, part), at_once=False)})

    return replace(method, build=build)


def known(one):
    report = one.report
    beams = [(beam.tokens, beam.score, beam.finished) for beam in one.beams]
    return beams, report.target_passes, report.draft_passes, report.accepted, report.widths, report.peak_kv_tokens


def assert_same(pair, method, part, options, prompts=PROMPTS):
    """Texts, scores and reports of both."""
    options = {"eos_token_id": [9, 30], **options}
    for prompt in prompts:
        found, expected = (
            known(sb.generate(pair, prompt, one, seed=4, max_new_tokens=12, **options)[0])
            for one in (method, step_by_step(method, part))
        )
        assert found == expected
