"""The costs of passes: what is timed, how lines are drawn through it, what is shown."""

import json

import numpy as np
import pytest

from specbeam.lab.bench import passes as timed
from specbeam.lab.bench.cost_fits import knee_fit, straight_fit
from specbeam.lab.bench.passes import PassPlan, fits, passes, token_bytes
from specbeam.lab.bench.passes_report import as_markdown, as_records, plot
from specbeam.recipes.tuning.stored_prompt import TurnCost
from tests.support import words
from tests.support.tiny_models import tiny

SIZE = 2 * 2 * 2 * 8 * 4  # bytes of a token: keys and values, layers, heads, head size, float32
PLAN = PassPlan(lengths=(10, 30, 90), rows=(1, 2, 4, 8, 70), beams=(1, 3), repeats=2)


@pytest.fixture(scope="module")
def cells():
    told = []
    found = passes(words.pair(draft_seed=None).target, PLAN, lambda: told.append(None))
    assert len(told) == PLAN.steps
    return found


def test_every_size_meets_every_length(cells):
    assert [(one.length, one.rows) for one in cells] == [
        (length, rows) for length in (10, 30, 90) for rows in (1, 2, 3, 4, 8, 70)
    ]
    for one in cells:
        tokens = one.length + one.rows
        assert (one.kv_tokens, one.kv_mb) == (tokens, tokens * SIZE / 1e6)
        assert 0 < one.pass_ms.low <= one.pass_ms.median <= one.pass_ms.high < one.turn_ms.high


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_a_token_has_keys_and_values_in_all_layers(family):
    model = tiny(family)
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = config.hidden_size // config.num_attention_heads
    assert token_bytes(model) == 2 * config.num_hidden_layers * heads * width * 4


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
    monkeypatch.setattr(timed.StoredPrompt, "turn", lambda self, rows: _priced(len(self.session.prompt), rows))
    cells = passes(words.pair(draft_seed=None).target, PLAN)
    return cells, fits(cells, PLAN)


def _priced(length, rows):
    return TurnCost(1e-3 * (2 + (0.25 + 0.01 * length) * max(0, rows - 3)), 1e-3 * length, length + rows)


def test_fits_tell_rows_from_cached_tokens(priced):
    found = priced[1]
    assert {length: fit.slope for length, fit in found.by_length.items()} == pytest.approx(
        {10: 0.35, 30: 0.55, 90: 1.15}
    )
    assert [(fit.start, fit.knee) for fit in found.by_length.values()] == [pytest.approx((2, 3))] * 3
    assert (found.row.start, found.row.slope) == pytest.approx((0.25, 0.01))
    assert {beams: fit.slope for beams, fit in found.by_beams.items()} == pytest.approx({1: 1, 3: 1})


def test_tables_and_records_hold_all_of_it(priced):
    table = as_markdown(*priced, PLAN)
    assert "| 70 | 25.4 | 38.9 | 79.0 |" in table
    assert "| 30 | 2.00 | 3.0 | 0.550 | 1.0000 |" in table
    assert "A row beyond the knee costs 0.250 ms, and 10.000 ms more per 1,000 cached tokens (R² 1.000)." in table
    assert "| 3 beams | 12.0 | 32.0 | 92.0 | 1000.00 |" in table
    records = as_records(*priced)
    assert len(records) == 6 * 3 + 3 + 1 + 2
    assert json.loads(json.dumps(records)) == records


def test_few_sizes_have_no_fit(tmp_path):
    plan = PassPlan(lengths=(10,), rows=(1, 2, 4), beams=(2,), repeats=1)
    found = passes(words.pair(draft_seed=None).target, plan)
    lines = fits(found, plan)
    assert (lines.by_length, lines.row, lines.by_beams) == ({}, None, {})
    assert len(as_markdown(found, lines, plan).splitlines()) == 5 + 1 + 3 + 1 + 3
    plot(found, lines, plan, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_plot(priced, tmp_path):
    plot(*priced, PLAN, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 20_000
