"""A window of tokens ahead that a copy of a target is taught, and the head that reads it."""

import copy

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.train import DrawPlan, MemorySchedule, Schedule, train_coral
from specbeam.lab.train.coral import LearntWindow, drafted_tokens
from specbeam.models.heads.head import DraftRows
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.trees import chain_of
from specbeam.models.heads.window import TextWindows
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


def test_a_window_behind_is_learned_on_corrupted_texts_and_read_by_coral(tmp_path):
    """The loss is that of the true tokens: of a model that knows them it is 0, and replaced tokens are drawn ones alone."""
    pair = sb.load(tiny("llama", num_hidden_layers=3), tokenizer=words.tokenizer())
    prompts = ["abc", "Hello", "you", "cab"]
    draws = DrawPlan(beams=1, max_new_tokens=6)
    plan = {"depth": 2, "enters": 2, "behind": 3}
    train_coral(pair, prompts, tmp_path, draws=draws, schedule=Schedule(epochs=1), plan=plan)
    taught = sb.load(tmp_path, draft=tmp_path / "window", tokenizer=words.tokenizer(), probe=False)
    assert taught.draft.head.behind == 3
    found = sb.generate(taught, "abc", sb.coral(), temperature=0, max_new_tokens=10)[0]
    assert found.report.target_passes <= found.report.tokens
    with pytest.raises(BadSetting, match="behind is 4, but the target has learned 3"):
        sb.generate(taught, "abc", sb.coral(behind=4), temperature=0)


def test_rows_behind_are_those_that_decoding_reads():
    """The loss of training, and the logits of `TextWindows` for the same text with a wrong token."""
    model = tiny("llama", num_hidden_layers=3)
    true = [3, 14, 15, 9, 26, 5]
    wrong = [3, 14, 15, 8, 26, 5]
    behind = 2
    window = LearntWindow(copy.deepcopy(model), 2, 1, behind)
    drawn = torch.tensor([[False, False, False, True, True, True]])
    loss = window.behind_loss(trees_of(model, true, 1), trees_of(model, wrong, 1), drawn)
    states = trees_of(model, wrong, 1).states[1][0]
    logits = TextWindows(window).logits(states, 0, behind)
    rows = [(place, back) for place in range(len(true)) for back in range(behind) if place - back >= 3]
    losses = [-logits[place, back].log_softmax(-1)[true[place - back]] for place, back in rows]
    assert len(rows) == 5
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_corrupted_tokens_are_draws_from_the_window_ahead():
    """Of the laws below their parents; the first token has none."""
    model = tiny("llama", num_hidden_layers=3)
    trees = trees_of(model, [3, 14, 15, 9], 1)
    sure = torch.full((2, 64), -1e9)
    sure[0, 7] = sure[1, 8] = 0.0
    drafts = [DraftRows(torch.tensor([1, 2]), sure)]
    assert drafted_tokens(trees, drafts).tolist() == [[-1, -1, 7, 8]]
