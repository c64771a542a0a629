"""The costs of passes: what is timed, how lines are drawn through it, what is shown."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from specbeam.engines.cache_names import cache_argument
from specbeam.lab.bench import passes as timed
from specbeam.lab.bench.cost_fits import knee_fit, straight_fit
from specbeam.lab.bench.passes import OURS, THEIRS, PassPlan, fits, passes
from specbeam.lab.bench.passes_report import as_markdown, as_records, plot
from specbeam.lab.bench.transformers_cache import CopiedPrompt, token_bytes
from specbeam.recipes.tuning.stored_prompt import StoredPrompt, TurnCost
from tests.support import words
from tests.support.tiny_models import tiny

SIZE = 2 * 2 * 2 * 8 * 4  # bytes of a token: keys and values, layers, heads, head size, float32
PLAN = PassPlan(lengths=(10, 30, 90), rows=(1, 2, 4, 8, 70), beams=(1, 3), repeats=2, copies_gb=100 * SIZE / 1e9)


@pytest.fixture(scope="module")
def cells():
    told = []
    found = passes(words.pair(draft_seed=None).target, PLAN, lambda: told.append(None))
    assert len(told) == PLAN.steps - 2  # the cell that is not made, in two rounds
    return found


def test_every_size_meets_every_length(cells):
    assert [(one.engine, one.length, one.rows) for one in cells] == [
        *((OURS, length, rows) for length in (10, 30, 90) for rows in (1, 2, 3, 4, 8, 70)),
        *((THEIRS, length, beams) for length in (10, 30, 90) for beams in (1, 3)),
    ]
    for one in cells:
        tokens = one.length + one.rows if one.engine == OURS else one.rows * (one.length + 1)
        assert (one.kv_tokens, one.kv_mb) == (tokens, tokens * SIZE / 1e6)
    assert [one for one in cells if one.turn_ms is None] == [cells[-1]]  # 3 copies of 90 tokens take too much
    for one in cells[:-1]:
        assert 0 < one.pass_ms.low <= one.pass_ms.median <= one.pass_ms.high < one.turn_ms.high


def test_both_sides_have_the_prompt_in_their_caches():
    """And the same row behind it costs the same arithmetic: its logits are equal."""
    lm = words.pair(draft_seed=None).target
    context, copies = StoredPrompt(lm, 30), CopiedPrompt(lm.model, 30)
    assert context.session.prompt == copies.prompt[0].tolist()
    assert copies.cache.get_seq_length() == 30
    assert copies.turn(3).kv_tokens == 93
    assert copies.cache.get_seq_length() == 30  # the next turn meets the same
    assert token_bytes(lm.model) == SIZE
    forest = context.root.grown([5, 7], [0, 0])
    found = lm.extend([context.session], [forest])[0].logits[1:]
    with torch.inference_mode():
        copies.cache.batch_repeat_interleave(2)
        plain = lm.model(input_ids=torch.tensor([[5], [7]]), **cache_argument(lm.model, copies.cache)).logits[:, -1]
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


def test_other_families_have_copies_too():
    for family in ("gpt2", "mistral"):
        assert CopiedPrompt(tiny(family), 20).turn(2).kv_tokens > 0


def test_a_knee_is_found():
    rows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    for knee in (1.0, 6.25, 12.0, 40.0):
        fit = knee_fit(rows, [3 + 0.5 * max(0, n - knee) for n in rows])
        assert (fit.start, fit.slope, fit.knee, fit.r2) == pytest.approx((3, 0.5, knee, 1), abs=1e-9)
    noise = np.random.default_rng(0).normal(0, 1, 12)
    fit = knee_fit(rows, [3 + 0.5 * max(0, n - 12) + e for n, e in zip(rows, noise, strict=True)])
    assert fit.r2 > 0.99
    assert fit.slope == pytest.approx(0.5, abs=0.02)
    assert knee_fit(rows, [2.0] * 12).at(1000) == pytest.approx(2.0)
    steps = knee_fit(rows, [0.0] * 11 + [9.0])  # one point makes no slope
    assert steps.knee < 64


def test_a_line_is_found():
    fit = straight_fit([128, 512, 4096], [1.128, 1.512, 5.096])
    assert (fit.start, fit.slope, fit.knee, fit.r2) == pytest.approx((1, 0.001, 0, 1))


@pytest.fixture
def priced(monkeypatch):
    """Costs by a formula, in place of a clock."""
    monkeypatch.setattr(timed.StoredPrompt, "turn", lambda self, rows: _priced(len(self.session.prompt), rows, 1))
    monkeypatch.setattr(timed.CopiedPrompt, "turn", lambda self, beams: _priced(self.prompt.shape[1], beams, beams))
    cells = passes(words.pair(draft_seed=None).target, dataclasses.replace(PLAN, copies_gb=1))
    return cells, fits(cells, dataclasses.replace(PLAN, copies_gb=1))


def _priced(length, rows, copies):
    return TurnCost(1e-3 * (2 + (0.25 + 0.01 * length) * max(0, rows - 3)), 1e-3 * length * copies, length + rows)


def test_fits_tell_rows_from_cached_tokens(priced):
    found = priced[1]
    assert {length: fit.slope for length, fit in found.by_length.items()} == pytest.approx(
        {10: 0.35, 30: 0.55, 90: 1.15}
    )
    assert [(fit.start, fit.knee) for fit in found.by_length.values()] == [pytest.approx((2, 3))] * 3
    assert (found.row.start, found.row.slope) == pytest.approx((0.25, 0.01))
    assert {key: fit.slope for key, fit in found.by_beams.items()} == pytest.approx(
        {(OURS, 1): 1, (THEIRS, 1): 1, (OURS, 3): 1, (THEIRS, 3): 3}
    )


def test_tables_and_records_hold_all_of_it(priced, cells):
    table = as_markdown(*priced, PLAN)
    assert "| 70 | 25.4 | 38.9 | 79.0 |" in table
    assert "| 30 | 2.00 | 3.0 | 0.550 | 1.0000 |" in table
    assert "A row beyond the knee costs 0.250 ms, and 10.000 ms more per 1,000 cached tokens (R² 1.000)." in table
    assert "| transformers, 3 beams | 32.0 | 92.0 | 272 | 3000.00 |" in table
    assert "not made, 0.0 GB" in as_markdown(cells, fits(cells, PLAN), PLAN)
    records = as_records(*priced)
    assert len(records) == 6 * 3 + 2 * 3 + 3 + 1 + 4
    assert json.loads(json.dumps(records)) == records


def test_few_sizes_have_no_fit(tmp_path):
    plan = PassPlan(lengths=(10,), rows=(1, 2, 4), beams=(2,), repeats=1, copies_gb=0)
    found = passes(words.pair(draft_seed=None).target, plan)
    lines = fits(found, plan)
    assert (lines.by_length, lines.row, lines.by_beams) == ({}, None, {})
    assert len(as_markdown(found, lines, plan).splitlines()) == 5 + 1 + 4 + 1 + 4
    plot(found, lines, plan, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_plot(priced, tmp_path):
    plot(*priced, PLAN, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 20_000
