"""Heads of targets in bfloat16, of targets with windows or scaled embeddings, and shallow heads."""

import warnings

import pytest
import torch

import specbeam as sb
from specbeam.lab.train import DrawPlan, Schedule, drawing, train_head
from specbeam.lab.train.heads import KINDS
from tests.support.tiny_models import tiny

PROMPTS: list = [[1 + number % 7, 2 + number % 5, 3 + number % 11] for number in range(30)]


def trained(kind, target, out, **plan):
    draws = DrawPlan(beams=2, max_new_tokens=4, seed=2)
    return train_head(kind, target, PROMPTS, out, plan=plan, draws=draws, schedule=Schedule(epochs=1, batch_tokens=200))


def drafts_as_without(model, folder, probe=True):
    """Beams with the head are those without a draft, and it drafts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head that learnt for a moment fits badly
        pair = sb.load(model, draft=folder, probe=probe)
    options = {"seed": 1, "max_new_tokens": 6, "eos_token_id": []}
    found = sb.generate(pair, PROMPTS[:2], sb.dsbd(2, 3, 2), **options)
    plain = sb.generate(pair, PROMPTS[:2], sb.beam_sampling(2), **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert found[0].report.draft_passes > 0
    return pair


@pytest.mark.parametrize("kind", KINDS)
def test_targets_in_bfloat16(kind, tmp_path):
    model = tiny("llama").bfloat16()
    trained(kind, sb.load(model), tmp_path, **({} if kind == "eesd" else {"depth": 2}))
    drafts_as_without(model, tmp_path)


@pytest.mark.parametrize(("kind", "depth"), [("medusa", 1), ("dspark", 1), ("dspark", 2), ("eagle3", 1)])
def test_shallow_heads_are_tried_too(kind, depth, tmp_path):
    model = tiny("llama")
    trained(kind, sb.load(model), tmp_path, depth=depth)
    drafts_as_without(model, tmp_path)


FAMILIES = ("mistral", "gemma", "gemma2", "gemma3", "qwen2", "gpt2")
TAUGHT = [
    *(("eagle3", family) for family in FAMILIES),
    *(
        pytest.param("dspark", family, marks=() if family in ("mistral", "gemma3") else pytest.mark.slow)
        for family in FAMILIES
    ),
]


@pytest.mark.parametrize(("kind", "family"), TAUGHT)
def test_what_was_trained_is_what_is_loaded(kind, family, tmp_path, monkeypatch):
    """Also for targets with windows, and with scaled embeddings: the acceptance on held-out trees is that of the end."""
    from specbeam.lab.train.course import acceptances
    from specbeam.lab.train.heads import HeadStudent
    from specbeam.lab.train.plan import planned
    from specbeam.lab.train.trees import Trees
    from specbeam.models.heads.read import read_head

    monkeypatch.setattr(drawing, "FILE_TREES", 16)
    model = tiny(family)
    done = trained(kind, sb.load(model), tmp_path, depth=2)
    head = read_head(tmp_path, model)
    plan = planned(model, KINDS[kind].usual, {"depth": 2})
    student = HeadStudent(head, model, plan, KINDS[kind].save)
    held_out = Trees.read(tmp_path / "training" / "trees" / "held_out.npz")
    found = acceptances(student, held_out, 200, torch.device("cpu"))
    # What is learnt in float32 is written in bfloat16, which rounds weights by up to 1/256.
    assert found == pytest.approx((done.acceptance, *done.curve[-1].deeper), abs=2e-3)
    drafts_as_without(model, tmp_path, probe=False)


def test_batches_in_which_nothing_can_be_drafted_are_passed_over(tmp_path):
    """Prompts of one token, and one token below: the first node has nothing above it."""
    prompts = [[number] for number in range(3, 30)]
    draws = DrawPlan(beams=2, max_new_tokens=1)
    done = train_head("medusa", sb.load(tiny("llama")), prompts, tmp_path, draws=draws, schedule=Schedule(epochs=1))
    assert done.curve[-1].loss != done.curve[-1].loss


def test_a_mask_is_a_token_that_texts_do_not_hold():
    from specbeam.lab.train.dspark import mask_of

    model = tiny("llama")
    last = model.config.vocab_size - 1
    for padding in (-1, model.config.eos_token_id, None):
        model.config.pad_token_id = padding
        assert mask_of(model) == last
    model.config.pad_token_id = 7
    assert mask_of(model) == 7
