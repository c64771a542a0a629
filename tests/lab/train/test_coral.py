"""A window of tokens ahead that a copy of a target is taught, and the head that reads it."""

import copy

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.train import DrawPlan, MemorySchedule, Schedule, train_coral
from specbeam.lab.train.coral import LearntWindow
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.trees import chain_of
from specbeam.models.loading.language_models import language_model
from tests.support import words
from tests.support.checking import refused
from tests.support.tiny_models import tiny


@torch.no_grad()
def trees_of(model, text, layer):
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[layer]
    return chain_of(torch.tensor(text), {layer: states[0]})


@torch.no_grad()
def test_what_is_learnt_is_what_hidden_transfer_with_maps_of_the_identity_reads():
    """Laws of the model itself, and of window rows under some nodes, by the code of training and by that of heads."""
    model = tiny("llama", num_hidden_layers=3)
    text = [3, 14, 15, 9, 26, 5]
    window = LearntWindow(copy.deepcopy(model), 3, 1)
    trees = trees_of(model, text, 1)
    wanted = torch.ones(1, len(text), dtype=torch.bool)
    own, *ahead = window.drafts(trees, 3, wanted)
    torch.testing.assert_close(own.logits, model(torch.tensor([text])).logits[0], atol=1e-4, rtol=1e-4)
    expected = HiddenTransfer(model, 3, 1, 32).drafts(trees, 3, wanted)
    assert len(ahead) == len(expected) == 3
    for found, row in zip(ahead, expected, strict=True):
        assert found.nodes.tolist() == row.nodes.tolist()
        torch.testing.assert_close(found.logits, row.logits, atol=1e-4, rtol=1e-4)


def test_a_taught_copy_drafts_for_itself_and_the_target_stays_as_it_was(tmp_path):
    model = tiny("llama", num_hidden_layers=3)
    before = copy.deepcopy(model.state_dict())
    pair = sb.load(model, tokenizer=words.tokenizer())
    prompts = ["abc", "Hello", "you", "cab"]
    draws = DrawPlan(beams=1, max_new_tokens=6)
    trained = train_coral(
        pair, prompts, tmp_path, draws=draws, schedule=Schedule(epochs=2), plan={"depth": 2, "enters": 2}
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    first, *_, last = trained.curve
    assert first.acceptance == pytest.approx(1, abs=1e-3)  # untaught, its law is the target's
    assert last.acceptance < first.acceptance
    assert len(last.deeper) == 2
    taught = sb.load(tmp_path, draft=tmp_path / "window", tokenizer=words.tokenizer(), probe=False)
    changed = {
        name
        for name, weight in taught.target_model.state_dict().items()
        if not torch.equal(weight, before[name].bfloat16().float())
    }
    assert changed
    assert all(name.startswith(("model.layers.2.", "model.norm.")) for name in changed)
    plain = sb.generate(taught, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=10)[0]
    drafted = sb.generate(taught, "abc", sb.dsbd(3, 3, 2), seed=1, max_new_tokens=10)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.report.draft_passes > 0


def test_what_cannot_be_taught_is_refused(tmp_path):
    pair = sb.load(tiny("llama"), tokenizer=words.tokenizer())
    with refused("rank is 4, but windows do not use it"):
        train_coral(pair, ["abc", "cab"], tmp_path, plan={"rank": 4})
    with pytest.raises(BadSetting, match="enters is 2"):
        train_coral(pair, ["abc", "cab"], tmp_path, plan={"enters": 2})
    other = sb.load(tiny("gpt2"), tokenizer=words.tokenizer())
    with pytest.raises(NotSupported, match="GPT2LMHeadModel"):
        train_coral(other, ["abc", "cab"], tmp_path)
    assert language_model(pair.target_model) is pair.target
    rounded = sb.load(tiny("llama"), tokenizer=words.tokenizer(), quantize="int8")
    with pytest.warns(UserWarning, match="rounded to int8"), refused("rank is 4"):
        train_coral(rounded, ["abc", "cab"], tmp_path, plan={"rank": 4})
    with pytest.raises(BadSetting, match="but the model is frozen"):
        MemorySchedule(frozen=True, rate=1e-3)
