"""Extra rows that are no tokens: learnt embeddings, a prefix that they alone see, rows that enter between layers. And the text
never sees any of them."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.decode import Decoder
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.gpu.passes import GpuPasses
from specbeam.engines.kv.trie import KVTrie
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.models.table import TableLM
from specbeam.recipes.sequence import multi_draft
from tests.support.extra_rows import DEPTH, KINDS, extra_head, slow_rows, with_extra_rows
from tests.support.seats import moved, random_forest, random_turn, seat
from tests.support.tiny_models import FAMILIES, MIXTURES, tiny

ENGINES = ["plain", "compiled"]
OURS = {"vocab_size": 64}
LENGTHS = (1, 4, 17)


def seats_of(lengths, inputs=None):
    rng = np.random.default_rng(2)
    found = [seat(rng.integers(0, 61, length).tolist()) for length in lengths]
    for one in found:
        one.extra_inputs = inputs
    return found


def turns_of(lm, seats, grow, turns=4, compact=False):
    """Let a model score random forests, always the same ones, as `grow` extends them; yield forests and rows by turn."""
    rng = np.random.default_rng(7)
    for number in range(turns):
        forests = [random_forest(rng, [text[-1] for text in one.texts], 61, 5) for one in seats]
        nodes = [nodes_of(lm, one, forest) for one, forest in zip(seats, forests, strict=True)]
        answers = lm.extend(seats, [grow(*both) for both in zip(forests, nodes, strict=True)])
        split = [answer.split(forest.size) for answer, forest in zip(answers, forests, strict=True)]
        yield [one.texts for one in seats], forests, nodes, split
        for one, forest in zip(seats, forests, strict=True):
            turn = random_turn(rng, forest, 61)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
            if compact and number % 2:
                lm.compact(one)


def nodes_of(lm, one, forest):
    """The nodes that no pass has scored yet: roots may be drafts of an earlier turn."""
    cache = one.state.get(lm)
    scored = [] if cache is None else np.flatnonzero(cache.trie.root_at < cache.trie.stored)
    return [node for node in range(forest.size) if node not in scored]


def rows_by_turn(model, engine, inputs, grow, **options):
    lm = HuggingFaceLM(model, chunk=6, engine=engine)
    seats = seats_of(LENGTHS, inputs)
    return [
        torch.cat([answer.logits for answer in split]).clone()
        for _, _, _, split in turns_of(lm, seats, grow, **options)
    ]


def unchanged(forest, nodes):
    return forest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_the_text_have_the_same_bits_with_and_without_extra_rows(family, kind):
    """In the compiled forward, which fixes the order of each sum: over several turns, prompts stored in chunks."""
    model = tiny(family, **OURS)
    inputs = extra_head(model, kind).inputs
    for options in ({}, {"compact": True}):
        plain = rows_by_turn(model, "compiled", None, unchanged, **options)
        whole = rows_by_turn(model, "compiled", inputs, with_extra_rows, **options)
        assert all(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_of_the_text_are_the_same_with_and_without_extra_rows(family, kind):
    """By transformers' own forward, in float64."""
    model = tiny(family).double()
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # the others do not multiply float64
    plain = rows_by_turn(model, "plain", None, unchanged, turns=3)
    whole = rows_by_turn(model, "plain", extra_head(model, kind).inputs, with_extra_rows, turns=3)
    for one, other in zip(plain, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_the_text_have_the_same_bits_whatever_was_learnt(engine, kind):
    """Passes of the very same shape, in every engine: nothing of an extra row or of the prefix reaches the text."""
    model = tiny("llama", **OURS)
    one, other = (extra_head(model, kind, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(3.0)
    for first, second in zip(
        *(rows_by_turn(model, engine, head.inputs, with_extra_rows) for head in (one, other)), strict=True
    ):
        assert torch.equal(first, second)


def test_a_prefix_that_the_text_saw_would_be_noticed(monkeypatch):
    """The control of the tests above."""
    model = tiny("llama", **OURS)
    feed = KVTrie.feed

    def leaky(self, most):
        found = feed(self, most)
        found.seen[:, 1 : 1 + self.prefix] = True
        return found

    plain = rows_by_turn(model, "compiled", None, unchanged)
    monkeypatch.setattr(KVTrie, "feed", leaky)
    whole = rows_by_turn(model, "compiled", extra_head(model, "bita").inputs, with_extra_rows)
    assert not any(torch.equal(one, other) for one, other in zip(plain, whole, strict=True))


def check_extra_rows(lm, head, lengths=LENGTHS, tolerance=2e-4):
    compared = 0
    for texts, forests, whole, split in turns_of(lm, seats_of(lengths, head.inputs), with_extra_rows, turns=3):
        for text, forest, nodes, answer in zip(texts, forests, whole, split, strict=True):
            roots = forest.root_of(np.arange(forest.size))
            for number, node in list(enumerate(nodes))[::2]:
                expected = slow_rows(head, text[roots[node]] + forest.path(node))
                found = answer.extra.logits[number * DEPTH : (number + 1) * DEPTH]
                torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_extra_rows_see_their_path_their_group_and_the_prefix(family, kind):
    """Against single paths, one after the other, with the prefix in transformers' own cache, or rows put in by hand.

    Windows stay open for a prefix, and close for the text; transformers' cache cannot say that, so there the prefix is empty.
    """
    model = tiny(family)
    windowed = getattr(model.config, "sliding_window", None) and kind == "bita"
    check_extra_rows(
        HuggingFaceLM(model, chunk=6, engine="plain"), extra_head(model, kind), (2,) if windowed else LENGTHS
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["compiled", "layers"])
@pytest.mark.parametrize("lengths", [(7,), LENGTHS], ids=str)
def test_engines_of_our_own_give_the_same_extra_rows(engine, kind, lengths):
    model = tiny("llama", **OURS)
    check_extra_rows(HuggingFaceLM(model, chunk=6, engine=engine), extra_head(model, kind), lengths)


def test_rows_that_enter_between_layers_are_not_in_the_layers_below(monkeypatch):
    """The layers below run the rows of the text alone, and no slot of a row is left when the turn is settled."""
    model = tiny("llama", **OURS, num_hidden_layers=3)
    head = extra_head(model, "hidden_transfer")
    assert head.layer == 2
    lm = HuggingFaceLM(model, engine="compiled")
    (one,) = seats_of((4,), head.inputs)
    counts = []
    kind = type(lm.runner.decoder)
    forward = kind.forward

    def counting(self, rows, store, vectors, layers, states=None, taps=()):
        counts.extend([len(rows.tokens)] * len(range(*layers.indices(3))))
        return forward(self, rows, store, vectors, layers, states, taps)

    monkeypatch.setattr(kind, "forward", counting)
    forest = Forest.rooted(one.prompt[-1:]).grown([3, 5], [0, 1])
    lm.extend([one], [with_extra_rows(forest)])
    before = 4 + 2  # prompt and drafts
    assert counts == [before, before, before + 3 * DEPTH]
    assert lm.held(one) == before + 3 * DEPTH
    lm.settle(one, random_turn(np.random.default_rng(0), forest, 61, most=1))
    assert lm.held(one) <= before


def test_slots_of_a_prefix_stay_when_the_cache_is_compacted_or_moved():
    model = tiny("llama", **OURS)
    head = extra_head(model, "bita")
    lm = HuggingFaceLM(model, engine="plain")
    first, last = seats_of((4, 9), head.inputs)
    grown = [with_extra_rows(Forest.rooted(one.prompt[-1:])) for one in (first, last)]
    expected = lm.extend([first, last], grown)[1].logits.clone()
    lm.close(last)
    lm.close(first)
    first, last = seats_of((4, 9), head.inputs)
    lm.extend([first], [Forest.rooted(first.prompt[-1:])])
    lm.fill([last])
    lm.extend([last], [Forest.rooted(last.prompt[-1:])])
    lm.close(first)  # the last row of the store moves to the first
    roots = Forest.rooted(last.prompt[-1:])
    lm.settle(last, random_turn(np.random.default_rng(0), roots, 61, most=1))
    lm.compact(last)
    cache = last.state[lm]
    assert cache.row == 0
    assert cache.trie.used[1 : 1 + cache.trie.reserved].all()
    layer = lm.runner.store.layers[0]
    torch.testing.assert_close(layer.keys[0, :, 1:6], head.keys[0].detach(), atol=0, rtol=0)
    assert torch.isfinite(expected).all()


def test_sessions_with_learnt_rows_share_no_prompt(monkeypatch):
    """Their first slots are reserved."""
    model = tiny("llama", **OURS)
    lm = HuggingFaceLM(model, engine="plain", share_from=4)
    prompt = list(range(3, 20))
    whole, other, plain = (seat(prompt) for _ in range(3))
    whole.extra_inputs = extra_head(model, "bita").inputs
    copy = Mock(side_effect=lm._copy_beginning)
    monkeypatch.setattr(lm, "_copy_beginning", copy)
    for one in (whole, other, plain):
        lm.extend([one], [Forest.rooted(prompt[-1:])])
    copy.assert_called_once_with(other.state[lm], plain.state[lm])


def pair_of(model, kind, engine="compiled"):
    draft = ExtraLM(extra_head(model, kind), 64)
    return Pair(model, None, None, HuggingFaceLM(model, engine=engine), draft)


def session_of(pair, method):
    settings = Settings.given({"max_new_tokens": 8, "eos_token_id": []}, None)
    return Request.of(pair, [[3, 4, 5]], method, settings, 3).sessions[0]


def test_targets_that_cannot_take_them_refuse_them_by_name(monkeypatch):
    model = tiny("llama", **OURS)
    pair = pair_of(model, "hidden_transfer")
    session = session_of(pair, sb.speculative_sampling(2))
    with pytest.raises(NotSupported, match="but the target is TableLM with another model; load them together"):
        Decoder(TableLM([1 / 64] * 64)).add(session)
    with pytest.raises(NotSupported, match="the target is HuggingFaceLM with another model"):
        Decoder(HuggingFaceLM(tiny("llama", **OURS), engine="plain")).add(session)
    on_gpu = SimpleNamespace(model=model)
    deep = replace(pair.draft.extra_inputs, layer=9)
    assert "has 2 layers" in pair.target.runner.refuses_extra_rows(deep)
    assert "has 2 layers" in GpuPasses.refuses_extra_rows(on_gpu, deep)
    monkeypatch.setattr(pair.target.runner, "refuses_extra_rows", lambda inputs: "it is on a GPU")
    with pytest.raises(NotSupported, match="it is on a GPU"):
        Decoder(pair.target).add(session)
    compiled = HuggingFaceLM(tiny("gpt2"), engine="plain")
    compiled.runner.call = object()
    assert "leave compile out" in compiled.runner.refuses_extra_rows(pair.draft.extra_inputs)
    assert compiled.runner.refuses_extra_rows(pair_of(model, "bita").draft.extra_inputs) == ""


def test_rows_below_a_node_of_an_earlier_pass_are_refused():
    model = tiny("llama", **OURS)
    for engine in ENGINES:
        lm = HuggingFaceLM(model, engine=engine)
        (one,) = seats_of((4,), extra_head(model, "hidden_transfer").inputs)
        roots = Forest.rooted(one.prompt[-1:])
        lm.extend([one], [roots])
        with pytest.raises(NotSupported, match="an earlier pass has scored that node"):
            lm.extend([one], [with_extra_rows(roots)])


def test_a_pass_takes_the_rows_of_one_drafter():
    model = tiny("llama", **OURS)
    pair = pair_of(model, "bita")
    other = ExtraLM(extra_head(model, "hidden_transfer"), 64)
    with pytest.raises(BadSetting, match="which takes extra rows from one part only"):
        session_of(pair, multi_draft([other], (1, 1))).parts.extra_owner  # noqa: B018
    assert session_of(pair, multi_draft([pair.target], (1, 1))).parts.extra_owner is pair.draft
