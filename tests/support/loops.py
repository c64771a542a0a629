"""What tests of the loops share: methods whose parts go step by step, and the same texts asked for of both."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

import specbeam as sb
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.draft.tree import TreeDrafter
from tests.support.steps import source_of_steps
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


class LayersOfTrees(TreeDrafter):
    """Grows trees with a pass of the model per layer, called from Python."""

    def draft(self, sessions, shapes):
        """Return the trees. A drafter that drafts in its own way takes part in no run of turns."""
        return super().draft(sessions, shapes)

    def _drafted_by_steps(self, session, shape):
        """Leave every layer to Python."""


class LayersOfBeams(BeamDrafter):
    """Drafts beams with a pass of the model per layer, called from Python."""

    def draft(self, sessions, shapes):
        """Return the drafts. A drafter that drafts in its own way takes part in no run of turns."""
        return super().draft(sessions, shapes)

    def _drafted_by_steps(self, session, shape):
        """Leave every layer to Python."""


@dataclass(frozen=True)
class FromSource:
    """A rule that runs as Python. It takes part in no run of turns."""

    rule: Any

    def verify(self, session, forest, scored):
        """Return what lives on."""
        with source_of_steps():
            return self.rule.verify(session, forest, scored)

    def __getattr__(self, name):
        if name in ("rule", "spec"):
            raise AttributeError(name)
        return getattr(self.rule, name)


def layer_by_layer(drafter):
    """Return the same drafter with a pass per layer, called from Python."""
    kind = LayersOfTrees if isinstance(drafter, TreeDrafter) else LayersOfBeams
    return kind(**{field.name: getattr(drafter, field.name) for field in fields(drafter)})


def step_by_step(method, part):
    """Return the method with a "drafter" that drafts layer by layer, or a "rule" that runs from source."""
    change = layer_by_layer if part == "drafter" else FromSource

    def build(target, draft):
        parts = method.build(target, draft)
        return replace(parts, **{part: change(getattr(parts, part))})

    return replace(method, build=build)


def known(one):
    """Return what an answer says of itself."""
    report = one.report
    beams = [(beam.tokens, beam.score, beam.finished) for beam in one.beams]
    return beams, report.target_passes, report.draft_passes, report.accepted, report.widths, report.peak_kv_tokens


def assert_same(pair, method, part, options, prompts=PROMPTS):
    """Check that texts, scores and reports are the same with a part that goes step by step."""
    options = {"eos_token_id": [9, 30], **options}
    for prompt in prompts:
        found, expected = (
            known(sb.generate(pair, prompt, one, seed=4, max_new_tokens=12, **options)[0])
            for one in (method, step_by_step(method, part))
        )
        assert found[1:] == expected[1:]
        assert [(tokens, finished) for tokens, _, finished in found[0]] == [
            (tokens, finished) for tokens, _, finished in expected[0]
        ]
        # Compiled sums over float32 rows may be made in another order.
        assert [score for _, score, _ in found[0]] == pytest.approx([score for _, score, _ in expected[0]], abs=1e-5)
