"""Block heads: their logits are those of another implementation, their rows in trees are those of chains, beams stay the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.errors import BadHead
from specbeam.models.heads.layers import View
from specbeam.models.heads.lm import BlockLM
from specbeam.models.heads.read import is_head, read_head
from specbeam.models.heads.trees import chain_of
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.heads import BLOCKS, VOCAB, Comparing, block_logits, block_of
from tests.support.tiny_models import tiny

GOLDEN = Path(__file__).parent / "golden"
DRAFTS = {  # by file, how many tokens a block drafts
    # as speculators 0.9.0 writes and computes them
    "dflash": 3, "dflash_window": 3, "dflash_window_both": 3, "dspark": 4, "dspark_gated": 4, "dspark_rnn": 4,
    "dspark_rnn_slots": 3, "dflash2": 3, "dflash2_window": 4, "xpress": 3, "xpress_anchored": 4,
    # as specforge 0.2.0 does
    "dflash_window_row": 3, "dspark_rnn_forge": 4, "domino": 4, "domino_slots": 3,
}  # fmt: skip
DRAFTING = ["dflash", "dspark", "dspark_gated", "dspark_rnn", "domino", "dflash2", "xpress"]
CLOSE = 1e-5
PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


def golden_of(name):
    return load_file(GOLDEN / f"{name}.oracle.safetensors")


@pytest.fixture(scope="module")
def target():
    """With the embedding and the head of the target whose logits are kept: block heads read them."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(golden_of("dflash")["embedding"])
        model.lm_head.weight.copy_(golden_of("dflash")["head"])
    return model


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


@pytest.mark.parametrize("name", DRAFTS)
def test_logits_are_those_of_another_implementation(name, target):
    """Of all rows of blocks below several roots: a row stands for the token below a node of the text."""
    head = read_head(GOLDEN / name, target)
    assert head.shape.depth == DRAFTS[name]
    golden = golden_of(name)
    found, confidence = drafted(head, golden)
    assert len(found) == len(golden["anchors"]) * head.shape.depth
    for (number, deep), logits in found.items():
        row = head.shape.first_row + deep
        torch.testing.assert_close(logits, golden["logits"][number, row], atol=CLOSE, rtol=CLOSE)
        if "confidence" in golden:
            torch.testing.assert_close(
                confidence[number, deep], golden["confidence"][number, row], atol=CLOSE, rtol=CLOSE
            )


def drafted(head, golden):
    """The logits, and the confidence, of drafts below the kept roots, by the number of the root and how deep they are."""
    trees = chain_of(golden["ids"], dict(zip(head.taps, golden["states"].chunk(3, -1), strict=True)))
    with torch.inference_mode():
        drafts = head.drafts(trees, 9, torch.ones_like(trees.tokens, dtype=torch.bool))
    logits = {}
    confidence = {}
    for number, root in enumerate(golden["anchors"].tolist()):
        for deep, rows in enumerate(drafts):
            at = rows.nodes.tolist().index(root + deep)
            logits[number, deep] = rows.logits[at]
            confidence[number, deep] = None if rows.confidence is None else rows.confidence[at]
    return logits, confidence


MISTAKES = {  # ways to compute a head that must not give the kept numbers
    "dflash_window": lambda head: head.changed(views=()),
    "dflash_window_both": lambda head: head.changed(
        views=(View(), View(2))
    ),  # which ends at the root, and not before it
    "dflash_window_row": lambda head: head.changed(views=(View(4, is_causal=True), View())),
    "dspark_rnn": lambda head: forgetting(head),
    "dspark_rnn_slots": lambda head: forgetting(head),
    "domino": lambda head: forgetting(head),
    "xpress": lambda head: forgetting(head),
    "xpress_anchored": lambda head: forgetting(head),
}


def forgetting(head):
    """The same head, but that nothing is handed down from draft to draft."""
    changed = head.changed()
    corrected = changed.corrected
    changed.corrected = lambda far, rows, tokens, states: corrected(far, rows, tokens, torch.zeros_like(states))
    return changed


@pytest.mark.parametrize("name", MISTAKES)
def test_a_head_that_is_computed_in_another_way_has_other_logits(name, target):
    golden = golden_of(name)
    head = read_head(GOLDEN / name, target)
    found, _ = drafted(MISTAKES[name](head), golden)
    errors = [
        float((logits - golden["logits"][number, head.shape.first_row + deep]).abs().max())
        for (number, deep), logits in found.items()
    ]
    assert max(errors) > 100 * CLOSE


@pytest.mark.parametrize("name", DRAFTING)
def test_a_block_head_drafts_the_beams_of_the_target(name, target, turn_by_turn):
    """Those without a draft, and trees and searches take it. A turn is drafted in one pass."""
    assert is_head(GOLDEN / name)
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    assert isinstance(pair.draft, BlockLM)
    options = {"max_new_tokens": 12, "eos_token_id": [], "seed": 5}
    plain = sb.generate(pair, PROMPTS, sb.beam_sampling(3), **options)
    found = sb.generate(pair, PROMPTS, sb.dsbd(3, 5, 6), batch_size=3, **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    before = pair.draft.passes
    (drafted,) = sb.generate(pair, PROMPTS[:1], sb.specinfer((2, 2)), **options)
    assert 0 < drafted.report.draft_passes < drafted.report.target_passes
    assert pair.draft.passes - before == drafted.report.draft_passes
    searched = sb.generate(pair, PROMPTS[:1], sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, PROMPTS[:1], sb.beam_search(3), max_new_tokens=12)
    assert searched[0].tokens == expected[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTING)
def test_a_block_head_drafts_where_a_draft_model_does(name, target):
    """The same beams as without a draft, one prompt and several; and chains, trees and searches take it."""
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    prompts = [[3, 4, 5, 6], [7], [8, 9]]
    options = {"max_new_tokens": 12, "eos_token_id": [], "seed": 5}
    plain = sb.generate(pair, prompts, sb.beam_sampling(3), **options)
    for method in (sb.dsbd(3, 5, 3), sb.dsbd(3), sb.dsbd(3, 5, 6)):
        for batch_size in (1, 3):
            found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
    for method in (sb.speculative_sampling(3), sb.specinfer((2, 2)), sb.opt_tree(6, 3)):
        before = pair.draft.passes
        drafted = sb.generate(pair, prompts, method, **options)
        passes = [(one.report.draft_passes, one.report.target_passes) for one in drafted]
        assert all(0 < own < target_passes for own, target_passes in passes)  # a pass drafts all layers of a turn
        assert 0 < pair.draft.passes - before <= sum(own for own, _ in passes)
    searched = sb.generate(pair, prompts, sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, prompts, sb.beam_search(3), max_new_tokens=12)
    assert [one.tokens for one in searched] == [one.tokens for one in expected]


class Checked(Comparing, BlockLM):
    """A block head whose rows are compared with those of chains."""

    def expected(self, tokens, features, is_scored):
        return block_logits(self.head, tokens, features, is_scored.index(False))


COMPILED = ("anchored", "mask rows")  # kinds that compiled layers can run
METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "deeper than a block": sb.dsbd(2, 3, 5),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "chain": sb.speculative_sampling(3, controller="fixed"),
    "tree": sb.specinfer((2, 2), controller="fixed"),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.mark.parametrize(
    ("kind", "name", "engine"),
    [
        *((kind, "beams", "torch") for kind in BLOCKS),
        *((kind, "beams", "compiled") for kind in COMPILED),
        *(("anchored", name, engine) for name in METHODS if name != "beams" for engine in ("torch", "compiled")),
        *(("recurrent mask rows", name, "torch") for name in ("deeper than a block", "tree")),
    ],
)
def test_rows_of_the_tree_are_those_of_chains(kind, name, engine, model):
    """Over several turns, with beams that end, and prompts of one token."""
    head = Checked(block_of(model, kind), VOCAB, engine).of(model)
    pair = replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine="plain"), draft=head)
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_long_prompts_are_taken_in_pieces(model, monkeypatch):
    monkeypatch.setattr("specbeam.models.heads.cache.CHUNK", 2)
    head = Checked(block_of(model, "anchored"), VOCAB, "torch").of(model)
    pair = replace(sb.load(model), target=HuggingFaceLM(model, engine="plain"), draft=head)
    sb.generate(pair, PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def changed(folder, name, config=None, tensors=None, without=()):
    """A copy of a head with some fields and tensors changed, or left out."""
    fields = json.loads((GOLDEN / name / "config.json").read_text()) | (config or {})
    every = load_file(GOLDEN / name / "model.safetensors") | (tensors or {})
    folder.mkdir(exist_ok=True)
    kept = {key: one for key, one in fields.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file({key: one for key, one in every.items() if key not in without}, folder / "model.safetensors")
    return folder


def test_the_names_and_fields_of_other_writers_are_read_too(target, tmp_path):
    """z-lab's and SpecForge's: fields at the top, `dflash_config`, numbers of what leaves a layer; and DeepSpec's."""
    core = json.loads((GOLDEN / "dflash" / "config.json").read_text())["transformer_layer_config"]
    tensors = load_file(GOLDEN / "dflash" / "model.safetensors")
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    fields = {key: one for key, one in core.items() if key not in ("layer_types", "architectures")}
    expected = read_head(GOLDEN / "dflash", target)
    own = {
        "z-lab": {
            **fields, "architectures": ["DFlashDraftModel"], "block_size": 4,
            "dflash_config": {"target_layer_ids": [1, 3, 7], "mask_token_id": 0},
        },
        "deepspec": {
            **fields, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "target_layer_ids": [1, 3, 7], "mask_token_id": 0,
        },
    }  # fmt: skip
    for name, config in own.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        names = renamed if name == "z-lab" else {}
        save_file({names.get(key, key): one for key, one in tensors.items()}, folder / "model.safetensors")
        assert is_head(folder)
        head = read_head(folder, target)
        assert head.taps == expected.taps == (2, 4, 8)
        assert head.shape.first_row == (1 if name == "z-lab" else 0)
        assert head.fc.weight.equal(expected.fc.weight)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dflash", {"without": ["block_size"]}, "no block_size"),
        ("dflash", {"without": ["mask_token_id"]}, "no mask_token_id"),
        ("dflash", {"config": {"block_size": 1}}, "block_size is 1 in config.json; it must be an integer of at least 2"),
        ("dflash", {"config": {"mask_token_id": 1.7}}, "mask_token_id is 1.7 in config.json; it must be an integer"),
        ("dflash", {"config": {"use_swa": True}}, "use_swa is set in config.json"),
        ("dflash", {"config": {"transformer_layer_config": "x"}}, "transformer_layer_config is 'x' in config.json; it must be"),
        ("dflash", {"config": {"aux_hidden_state_layer_ids": "abc"}}, "aux_hidden_state_layer_ids is 'abc' .* a list of int"),
        ("dflash", {"config": {"mask_token_id": 99}}, "mask_token_id is 99; the target has 32 tokens"),
        ("dflash", {"without": ["aux_hidden_state_layer_ids"]}, "lacks target_layer_ids"),
        ("dflash", {"config": {"aux_hidden_state_layer_ids": [2, 4]}}, "reads 3 hidden states, and 2 are named"),
        ("dflash", {"config": {"aux_hidden_state_layer_ids": [2, 4, 9]}}, "8 layers, so taps are numbers from 0 to 8"),
        ("dflash", {"without": ["hidden_norm.weight"]}, "no tensor hidden_norm.weight"),
        ("dflash", {"tensors": {"prefix_gru.weight_ih_l0": torch.ones(2)}}, "not known: domino.prefix_gru.weight_ih_l0"),
        ("dspark", {"tensors": {"markov_head.joint_proj.weight": torch.ones(2)}}, "markov_head_type is 'vanilla' .* 'rnn'"),
        ("dflash", {"config": {"attention_sink_bias": True}}, "attention_sink_bias is set in config.json"),
        ("dflash", {"config": {"input_embedding_scale": 4.0}}, "input_embedding_scale is 4.0 in config.json; it must be 1"),
        ("dflash_window_row", {"config": {"sliding_window": 3}}, "sliding_window is 3 in config.json; .* block_size, 4"),
        ("dflash_window_row", {"config": {"layer_types": ["sliding_attention"]}}, "layer_types is .* each of 2 layers"),
        ("dflash_window_row", {"without": ["sliding_window"]}, "config.json has no sliding_window"),
        ("dflash_window_row", {"config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu' in config.json; it must be 'silu'"),
        ("domino", {"without": ["embed_proj.2.weight"]}, "no tensor domino.embed_proj.2.weight"),
        ("dflash2", {"config": {"conv_group_size": 3}}, "conv_group_size is 3 in config.json; .* a divisor"),
        ("dflash2", {"config": {"selector_top_k": 33}}, "selector_top_k 33"),
        ("xpress", {"config": {"block_size": 5}}, "block_size is 5 in config.json; it must be 4"),
        ("dspark", {"config": {"sample_from_anchor": "yes"}}, "sample_from_anchor is 'yes'"),
        ("dspark_gated", {"without": ["d2t", "t2d"]}, "no map d2t"),
        ("dspark_gated", {"without": ["lm_head.weight"]}, "has no lm_head.weight, and 20 tokens"),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_block_head_is_refused_by_name(name, change, message, target, tmp_path):
    folder = changed(tmp_path / "head", name, **change)
    with pytest.raises(BadHead, match=message):
        read_head(folder, target)


def test_logits_are_scaled_and_capped_before_they_are_corrected(target, tmp_path):
    """As DeepSpec and z-lab state it: multiplied, kept within bounds by a hyperbolic tangent, then corrected."""
    golden = golden_of("dspark")
    plain = read_head(GOLDEN / "dspark", target)
    fields = {"final_logit_softcapping": 0.5, "output_multiplier": 3.0}
    capped = read_head(changed(tmp_path / "head", "dspark", config=fields), target)
    trees = chain_of(golden["ids"], dict(zip(plain.taps, golden["states"].chunk(3, -1), strict=True)))
    everywhere = torch.ones_like(trees.tokens, dtype=torch.bool)
    with torch.inference_mode():
        (before,) = plain.drafts(trees, 1, everywhere)
        (after,) = capped.drafts(trees, 1, everywhere)
        added = plain.markov_head.markov_w2(plain.markov_head.markov_w1(golden["ids"][before.nodes]))
    expected = 0.5 * torch.tanh(3.0 * (before.logits - added) / 0.5) + added
    torch.testing.assert_close(after.logits, expected, atol=CLOSE, rtol=CLOSE)


def test_layers_that_are_stated_to_be_causal(target, tmp_path):
    """z-lab's field: all layers, those without a window too, and rows of a block look at those before them."""
    for stated, views in ((True, (View(4, True, True), View(0, False, True))), (False, (View(4, True), View()))):
        head = read_head(changed(tmp_path / "head", "dflash_window_row", config={"is_causal": stated}), target)
        assert head.shape.views == views


def test_windows_are_stated_in_two_ways(target, tmp_path):
    """By layer, or as transformers does for a Qwen: from a layer on."""
    by_layer = read_head(GOLDEN / "dflash_window_row", target)
    config = json.loads((GOLDEN / "dflash_window_row" / "config.json").read_text())
    deepspec = config.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"]}
    folder = changed(tmp_path / "deepspec", "dflash_window_row", config=deepspec, without=["dflash_config"])
    with pytest.raises(BadHead, match=r"layer_types is .* as all of DeepSpec's heads have it"):
        read_head(folder, target)
    fields = {"use_sliding_window": True, "max_window_layers": 1}
    from_layer = changed(tmp_path / "head", "dflash_window_row", config=fields, without=["layer_types"])
    assert by_layer.shape.views == (View(4, True, True), View())
    assert read_head(from_layer, target).shape.views == (View(), View(4, True, True))


def test_readings_of_a_head_that_reads_two_kinds_of_states(model):
    """What the target's head reads has no layer before or after it."""
    moved = {name: one.taps for name, one in block_of(model, "mask rows").other_readings(2)}
    assert moved["hidden states one layer later"] == (-1, 2)
    alone = block_of(model, "mask rows").changed(taps=(-1,))
    assert "hidden states one layer later" not in dict(alone.other_readings(2))


def test_readings_that_are_tried(model):
    names = [name for name, _ in block_of(model, "anchored").other_readings(2)]
    assert names == [
        "the first mask row for the first draft"
    ]  # the taps are all there are, and the base is the usual one
    windowed = [name for name, _ in block_of(model, "windows from the root").other_readings(2)]
    assert windowed[0] == "rows that attend to all rows of their block in layers with windows"
    assert not [name for name, _ in block_of(model, "refiner").other_readings(2) if "first draft" in name]
    moved = block_of(model, "mask rows").changed(rope={"rope_type": "default", "rope_theta": 5e5}, taps=(1,))
    assert [name for name, _ in moved.other_readings(2)] == [
        "hidden states one layer earlier", "hidden states one layer later", "positions of base 10000",
        "the row of the root for the first draft",
    ]  # fmt: skip
