"""What the benchmarks measure is what they say."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.bench.acceptance import acceptance
from specbeam.bench.efficiency import as_markdown, contenders, efficiency, plot
from specbeam.generation import turns_of
from tests.support import words
from tests.support.tiny_models import tiny


def test_acceptance_of_a_target_that_drafts_for_itself():
    """The first draw from the target's own law is always accepted."""
    model = tiny("llama")
    pair = sb.load(model, model, tokenizer=words.tokenizer())
    found = acceptance(pair, ["abc", "Hello"], children=3, max_new_tokens=8)
    assert found.odds == (1.0, 0.0, 0.0)
    assert found.nodes >= 2
    assert found.error == (0.0, 0.0, 0.0)


def test_acceptance_counts_each_rank():
    found = acceptance(words.pair(), ["abc", "Hello", "no"], children=4, max_new_tokens=30)
    assert 0 < sum(found.odds) <= 1
    assert sum(odds > 0 for odds in found.odds) > 1


@pytest.mark.parametrize("budget", [5, 10])
def test_no_contender_scores_more_nodes_than_the_budget(budget):
    pair = words.pair()
    for recipe, shapes in contenders(budget).items():
        for shape, make in shapes.items():
            for turn in turns_of(pair, "abc", make(), seed=1, max_new_tokens=6):
                assert turn.forest.size - 1 <= budget, (recipe, shape)


def test_the_table_and_the_plot(tmp_path):
    cells = efficiency(words.pair(), ["abc", "Hello"], [5], max_new_tokens=6)
    assert all(1 <= cell.low <= cell.efficiency <= cell.high for cell in cells)
    table = as_markdown(cells).splitlines()
    assert len(table) == len(cells) + 2
    assert f"**{cells[0].efficiency:.2f}**" in table[2]
    plot(cells, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert len({cell.recipe for cell in cells}) == len(cells) > 10
    assert np.isfinite([cell.nodes for cell in cells]).all()
