"""What the benchmarks measure is what they say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.pace import DraftsIfFaster
from specbeam.errors import BadPrompt
from specbeam.generation import turns_of
from specbeam.lab.bench.acceptance import acceptance
from specbeam.lab.bench.efficiency import as_markdown, contenders, efficiency, halves, of_paper, plot
from specbeam.lab.train.eagle3 import new_eagle3
from specbeam.lab.train.plan import planned
from specbeam.models.heads.lm import TrunkLM
from specbeam.recipes.catalogue import HEAD_RECIPES
from specbeam.recipes.tuning.acceptance import with_guess
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
            controller = make().parts(pair.target, pair.draft).controller
            assert not isinstance(controller, DraftsIfFaster), recipe  # which would measure the clock
            for turn in turns_of(pair, "abc", make(), seed=1, max_new_tokens=6):
                assert turn.forest.size - 1 <= budget, (recipe, shape)


def test_the_table_and_the_plot(tmp_path):
    cells = efficiency(words.pair(), ["abc", "Hello"], ["no"], [5], max_new_tokens=6)
    assert all(1 <= cell.low <= cell.efficiency <= cell.high for cell in cells)
    table = as_markdown(cells).splitlines()
    assert len(table) == len(cells) + 2
    assert f"**{cells[0].efficiency:.2f}**" in table[2]
    plot(cells, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert len({cell.recipe for cell in cells}) == len(cells) > 10
    assert np.isfinite([cell.nodes for cell in cells]).all()


def test_shapes_are_chosen_on_other_prompts_than_those_reported(monkeypatch):
    """Each figure that is reported is of the prompts to report, and of the shape that was best on the others."""
    import specbeam.lab.bench.efficiency as module

    measured = []

    def fake(pair, prompts, recipe, budget, shape, method, *, seed, options):
        measured.append((tuple(prompts), recipe, shape))
        good = len(shape) if prompts == ["no"] else -len(shape)  # what is best on the one kind is worst on the other
        return module.TreeCell(recipe, budget, shape, good, good, good, 1.0, 1.0)

    monkeypatch.setattr(module, "_cell", fake)
    cells = efficiency(words.pair(), ["abc", "Hello"], ["no"], [5, 10], max_new_tokens=4)
    for cell in cells:
        shapes = [shape for prompts, recipe, shape in measured if recipe == cell.recipe and prompts == ("no",)]
        assert (("abc", "Hello"), cell.recipe, cell.shape) in measured
        assert not shapes or len(cell.shape) == max(len(shape) for shape in shapes if cell.budget == 10 or shape in
                                                    contenders(5)[cell.recipe])  # fmt: skip
    with pytest.raises(BadPrompt, match="keep the lists apart"):
        efficiency(words.pair(), ["abc", "no"], ["no"], [5])
    with pytest.raises(BadPrompt, match="give some of both"):
        efficiency(words.pair(), ["abc"], [], [5])


def test_sequoia_plans_by_the_acceptance_that_was_measured(monkeypatch):
    """A target that drafts for itself accepts the first child always: the best tree of five nodes is a chain."""
    model = tiny("llama")
    pair = sb.load(model, model, tokenizer=words.tokenizer())
    found = acceptance(pair, ["abc", "Hello"], max_new_tokens=30)
    odds = with_guess(found.odds, 10_000)
    turn = next(turns_of(pair, "abc", contenders(5, None, odds)["sequoia"]["5 nodes"](), seed=1, max_new_tokens=8))
    assert turn.forest.depths().tolist() == [0, 1, 2, 3, 4, 5]


def test_halves_are_different_prompts():
    assert halves(["a", "b", "a", "c", "d"]) == (["b", "d"], ["a", "c"])
    with pytest.raises(BadPrompt, match="at least 2 are needed"):
        halves(["a", "a"])


@pytest.fixture(scope="module")
def with_head():
    """The pair that speaks, with a head in place of its draft."""
    pair = words.pair()
    torch.manual_seed(0)
    plan = planned(pair.target_model, {"layers": 1, "depth": 3}, {})
    head = new_eagle3(pair.target_model, plan, None)
    return replace(pair, draft_model=None, draft=TrunkLM(head, pair.target.vocab, "torch"))


def test_a_head_is_measured_with_every_method_and_that_of_its_paper(with_head):
    cells = efficiency(with_head, ["abc"], ["no"], [5], max_new_tokens=4)
    recipes = {cell.recipe for cell in cells}
    assert "eagle" in recipes
    assert "multi_draft" not in recipes  # of several models
    assert recipes - {"eagle"} == {name for name, shapes in contenders(5).items() if shapes} - {"multi_draft"}
    assert all(cell.efficiency >= 1 for cell in cells)


@pytest.mark.parametrize("make", [make for make in HEAD_RECIPES if make().exact])
def test_each_recipe_for_heads_has_a_shape_in_the_budget(make):
    name = make.__name__
    shapes = of_paper(name, 10)
    assert set(shapes) == {name}
    assert [shape().name for shape in shapes[name].values()] == [name]
    assert of_paper("", 10) == {}
