"""COrAL (arXiv 2410.09675): windows ahead and behind vote on a block of tokens, and passes refine it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported, SomeFailed
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.window import TextWindows, offsets_of
from specbeam.recipes.joint.refined_block import Voting
from tests.support import words
from tests.support.tiny_models import tiny

BEHIND = 4
PROMPTS = ["abc", "Hello world", "x", "The end.", "no yes no yes"]


@pytest.fixture(scope="module")
def pair():
    """A target that has not learned its windows: their votes are bad, and their positions what they should be."""
    model = tiny("llama", num_hidden_layers=3)
    loaded = sb.load(model, tokenizer=words.tokenizer())
    head = HiddenTransfer(model, 3, 1, model.config.hidden_size, behind=BEHIND)
    return replace(loaded, draft=ExtraLM(head, loaded.target.vocab))


@torch.no_grad()
def states_at(model, text, layer):
    return model(torch.tensor([text]), output_hidden_states=True).hidden_states[layer][0]


@torch.no_grad()
def slow_window(model, text, layer, place, offsets):
    """The logits of rows that enter at a layer below one token, all in a single plain forward, each seeing what it should."""
    count = len(offsets)
    ahead = [number for number, offset in enumerate(offsets) if offset > 0]
    length = place + 1
    seen = torch.zeros(length + count, length + count, dtype=torch.bool)
    seen[:length, :length] = torch.ones(length, length).tril()
    seen[length:, :length] = True
    for number in range(count):
        own = [*ahead[: number + 1]] if number in ahead else [number]
        seen[length + number, [length + other for other in own]] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    positions = torch.tensor([[*range(length), *(max(place + offset, 0) for offset in offsets)]])

    def enter(module, given, named):
        states = (given[0] if given else named["hidden_states"]).clone()
        states[0, length:] = states[0, place]
        return ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})

    handle = model.model.layers[layer].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        tokens = torch.tensor([[*text[:length], *[0] * count]])
        return model(tokens, attention_mask=mask, position_ids=positions).logits[0, length:]
    finally:
        handle.remove()


def test_windows_are_rows_of_the_last_layers_at_other_positions():
    """Of tokens after stored ones, by a cache, and of each alone by a plain forward; storing nothing."""
    model = tiny("llama", num_hidden_layers=3)
    text = [3, 14, 15, 9, 26, 5]
    windows = TextWindows(HiddenTransfer(model, 2, 1, model.config.hidden_size, behind=3))
    states = states_at(model, text, 1)
    windows.append(states[:1])
    windows.append(states[1:3])
    offsets = offsets_of(2, 3)
    assert offsets == [1, 2, -1, -2, -3]
    for _ in range(2):
        found = windows.logits(states[3:], 2, 3)
        assert windows.length == 3
        for row, place in enumerate((3, 4, 5)):
            torch.testing.assert_close(found[row], slow_window(model, text, 1, place, offsets), atol=1e-4, rtol=1e-4)


def test_votes_are_weighted_by_distance_and_those_behind_can_overrule_the_next_token():
    """Two rows, one vote ahead, one behind: the second row's vote behind is about the first token of the block."""
    logp = torch.log(torch.tensor([
        [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]],
        [[0.2, 0.2, 0.6], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05]],
    ]))  # fmt: skip
    voting = Voting.of(logp, 1, 1, 16)
    assert voting.places.tolist() == [[0, 1, -1], [1, 2, 0]]
    near = math.exp(-2 / 8)  # the vote two tokens later would weigh 1
    torch.testing.assert_close(voting.weights, torch.tensor([1.0, math.exp(-8), near]))
    first = np.log([0.6, 0.3, 0.1]) + near * np.log([0.05, 0.9, 0.05])
    assert voting.best().tolist() == [int(first.argmax()), 2, 2] == [1, 2, 2]
    alone = Voting.of(logp[:, :2], 1, 0, 16)
    assert alone.best().tolist() == [0, 2, 2]
    support = voting.support(torch.tensor([0]))
    assert support.tolist() == pytest.approx([1 / (1 + near)])  # 0.6 is typical of the first law, 0.05 not of the other
    assert Voting.of(logp, 1, 1, 1).best().tolist() == [1]  # a block of one token


def test_a_threshold_that_nothing_reaches_without_windows_behind_is_greedy_decoding(pair):
    """Then each pass emits the target's best token. With windows behind the text is another one."""
    options = {"temperature": 0, "max_new_tokens": 20}
    plain = sb.generate(pair, PROMPTS, sb.greedy(), **options)
    never = sb.coral(behind=0, refinements=100)
    found = sb.generate(pair, PROMPTS, never, **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(one.report.target_passes == one.report.tokens for one in found)
    voted = sb.generate(pair, PROMPTS, sb.coral(refinements=100), **options)
    assert [one.tokens for one in voted] != [one.tokens for one in plain]


def test_each_pass_emits_a_token_and_lower_thresholds_emit_more(pair):
    options = {"temperature": 0, "max_new_tokens": 30, "eos_token_id": []}
    passes = []
    for threshold in (1.0, 0.0):
        found = sb.generate(pair, PROMPTS, sb.coral(threshold=threshold), **options)
        assert all(len(one.tokens) == 30 for one in found)
        assert all(one.report.tokens == one.report.target_passes + one.report.accepted for one in found)
        assert all(one.report.law.startswith("approximate: changes the output law on purpose") for one in found)
        passes.append(sum(one.report.target_passes for one in found))
    assert passes[1] < passes[0]


def test_texts_do_not_depend_on_batches_and_repeat(pair):
    options = {"temperature": 0, "max_new_tokens": 20}
    alone = [sb.generate(pair, prompt, sb.coral(), **options)[0].tokens for prompt in PROMPTS]
    together = sb.generate(pair, PROMPTS, sb.coral(), batch_size=3, **options)
    assert [one.tokens for one in together] == alone


def test_the_method_says_that_it_changes_the_law():
    method = sb.coral()
    assert not method.exact
    assert not method.lossless
    (entry,) = (one for one in sb.methods() if one.name == "coral")
    assert entry.law == "approximate: changes the output law on purpose, for fewer passes"


def test_what_cannot_be_refined_is_refused(pair):
    for settings, message in (
        ({"threshold": 1.5}, "threshold is 1.5; it is a probability"),
        ({"size": 0}, "size is 0"),
        ({"ahead": 0}, "ahead is 0"),
        ({"behind": -1}, "behind is -1; it must be an integer of at least 0"),
        ({"refinements": -2}, "refinements is -2; it must be an integer of at least 0"),
    ):
        with pytest.raises(BadSetting, match=message):
            sb.coral(**settings)
    with pytest.raises(BadSetting, match=f"behind is 9, but the target has learned {BEHIND}"):
        sb.generate(pair, "abc", sb.coral(behind=9), temperature=0)
    with pytest.raises(NotSupported, match="an audit tests"):
        sb.generate(pair, "abc", sb.coral(), temperature=0, audit=True)
    with pytest.raises((NotSupported, SomeFailed), match="processors and grammars do not reach"):
        sb.generate(pair, "abc", sb.coral(), temperature=0, repetition_penalty=1.5)
    plain = replace(pair, draft=pair.target)
    with pytest.raises(NotSupported, match="coral needs a target with windows behind"):
        sb.generate(plain, "abc", sb.coral(), temperature=0)
