"""Readers of heads, against what other implementations compute from the same files (tests/heads/golden)."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.errors import BadHead, BadSetting, MissingFile
from specbeam.generation import turns_of
from specbeam.models.heads.eagle import read_taps
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.layers import View
from specbeam.models.heads.lm import MaskLM, TrunkLM
from specbeam.models.heads.read import is_head, read_head
from specbeam.models.heads.trees import chain_of
from tests.support.heads import chain_logits

GOLDEN = Path(__file__).parent / "golden"
SPECULATORS = ["plain", "norms", "one_norm", "two_layers", "eagle3_window"]  # EAGLE-3 as speculators 0.9.0 computes it
PEAGLE = ["peagle", "peagle_window"]  # as speculators 0.9.0 writes and computes it
EAGLE = "eagle"  # EAGLE-1 as eagle-llm 1.2.1 computes it
CLOSE = 1e-5


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.copy_(load_file(GOLDEN / f"{EAGLE}.oracle.safetensors")["head"])
    return model


@pytest.mark.parametrize("name", [*SPECULATORS, EAGLE])
def test_logits_are_those_of_another_implementation(name, target):
    """Of rows on true features, and of the second and third draft behind each of them."""
    head = read_head(GOLDEN / name, target)
    golden = load_file(GOLDEN / f"{name}.oracle.safetensors")
    with torch.inference_mode():
        features = head.features(golden["states"])
    ids = golden["ids"].tolist()
    steps = sum(key.startswith("logits") for key in golden)
    assert steps >= 2
    for step in range(steps):
        for row in range(len(ids) - step):
            text = [0, *ids[: row + 1 + step]]
            given = [*features[: row + 1], *[None] * step]
            found = chain_logits(head, text, given)
            torch.testing.assert_close(found, golden[f"logits{step}"][row], atol=CLOSE, rtol=CLOSE)


PROMPTS: list = [[3, 4, 5, 6], [7], [8, 9]]
OPTIONS: dict = {"max_new_tokens": 12, "eos_token_id": [], "seed": 5}


@pytest.mark.parametrize(
    "name", [EAGLE, "norms", *(pytest.param(name, marks=pytest.mark.slow) for name in SPECULATORS if name != "norms")]
)
def test_a_head_drafts_the_beams_of_the_target(name, target, turn_by_turn):
    """Those without a draft, and trees and searches take it."""
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    assert isinstance(pair.draft, TrunkLM)
    assert pair.draft_model is None
    plain = sb.generate(pair, PROMPTS, sb.beam_sampling(3), **OPTIONS)
    found = sb.generate(pair, PROMPTS, sb.dsbd(3, 5, 3), batch_size=3, **OPTIONS)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    drafted = sb.generate(pair, PROMPTS[:1], sb.specinfer((2, 2)), **OPTIONS)
    assert drafted[0].report.draft_passes > 0
    searched = sb.generate(pair, PROMPTS[:1], sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, PROMPTS[:1], sb.beam_search(3), max_new_tokens=12)
    assert searched[0].tokens == expected[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPECULATORS, EAGLE])
def test_a_head_drafts_where_a_draft_model_does(name, target):
    """The same beams as without a draft, one prompt and several; and chains, trees and searches take it."""
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    prompts, options = PROMPTS, OPTIONS
    for settings in ({}, {"width": "auto"}):
        plain = sb.generate(pair, prompts, sb.beam_sampling(3, **settings), **options)
        for method in (sb.dsbd(3, 5, 3, **settings), sb.dsbd(3, **settings)):
            for batch_size in (1, 3):
                found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
                assert [one.tokens for one in found] == [one.tokens for one in plain]
    for method in (sb.speculative_sampling(3), sb.specinfer((2, 2)), sb.sequoia(6, 3), sb.opt_tree(6, 3), sb.propd()):
        drafted = sb.generate(pair, prompts, method, **options)
        assert sum(one.report.draft_passes for one in drafted) > 0
    searched = sb.generate(pair, prompts, sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, prompts, sb.beam_search(3), max_new_tokens=12)
    assert [one.tokens for one in searched] == [one.tokens for one in expected]


def test_the_older_names_of_a_layer_are_read_too(target, tmp_path):
    """SafeAILab's and SpecForge's: `midlayer`, a map of tokens, hidden states by default, no base of the positions."""
    tensors = load_file(GOLDEN / "two_layers" / "model.safetensors")
    older = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items() if "layers.1." not in name}
    config = json.loads((GOLDEN / "two_layers" / "config.json").read_text())
    core = config["transformer_layer_config"]
    fields = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    own = {name: core[name] for name in fields} | {"draft_vocab_size": 20, "architectures": ["LlamaForCausalLMEagle3"]}
    write(tmp_path, own, older)
    head = read_head(tmp_path, target)
    assert head.shape.taps == (2, 4, 5)
    assert head.rotary.rope["rope_theta"] == 10000
    assert len(head.tokens) == 20
    other = read_head(GOLDEN / "two_layers", target)
    assert head.fc.weight.equal(other.fc.weight)
    assert torch.equal(head.tokens, other.tokens)


def test_windows_are_those_of_writers_that_train_them(target, tmp_path):
    """speculators does; SafeAILab's and SpecForge's heads have none, whatever they take over from a target's files."""
    tensors = load_file(GOLDEN / "eagle3_window" / "model.safetensors")
    core = json.loads((GOLDEN / "eagle3_window" / "config.json").read_text())["transformer_layer_config"]
    assert read_head(GOLDEN / "eagle3_window", target).shape.views == (View(), View(3))
    many = {"layer_types": ["sliding_attention"] * 8, "architectures": ["LlamaForCausalLMEagle3"]}
    write(tmp_path, core | many, tensors)
    assert read_head(tmp_path, target).shape.views == ()


def test_hidden_states_are_numbered_in_two_ways(target):
    """Of a target of 8 layers: the default of all writers enters layers 2, 4 and 5, and leaves layers 1, 3 and 4."""

    def taps_of(config, count=3):
        return read_taps(Fields("files", config), target, count)[0]

    inputs = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "speculators_model_type": "eagle3"}
    assert taps_of(inputs) == (1, 4, 8)
    assert taps_of({"target_layer_ids": [0, 2, 3, 5, 7]}, 5) == (1, 3, 4, 6, 8)
    for nested, taps in (([2, 4, 5], (2, 4, 5)), ([1, 3, 4], (2, 4, 5)), ([0, 3, 6], (1, 4, 7))):
        assert taps_of({"eagle_config": {"eagle_aux_hidden_state_layer_ids": nested}}) == taps
    assert taps_of({}) == (2, 4, 5)
    with pytest.raises(BadHead, match="does not state their layers"):
        taps_of({}, 5)


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")


def changed(folder, name="two_layers", config=None, tensors=None, without=()):
    """A copy of a head with some fields and tensors changed, or left out."""
    fields = json.loads((GOLDEN / name / "config.json").read_text()) | (config or {})
    every = load_file(GOLDEN / name / "model.safetensors") | (tensors or {})
    write(folder, fields, {key: one for key, one in every.items() if key not in without})
    return folder


MAP = load_file(GOLDEN / "two_layers" / "model.safetensors")["d2t"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": ["fc.weight"]}, "no tensor fc.weight"),
        ({"without": ["layers.1.mlp.up_proj.weight"]}, r"no tensor layers.1.mlp.up_proj.weight; it has"),
        ({"tensors": {"norm.weight": torch.ones(7)}}, r"norm.weight is \[7\], and \[16\] was expected"),
        ({"tensors": {"layers.0.extra.weight": torch.ones(7)}}, "tensors that are not known: layers.0.extra.weight"),
        ({"tensors": {"layers.0.kv_a_proj_with_mqa.weight": torch.ones(7)}}, "latent attention"),
        ({"tensors": {"fc.weight": torch.ones(16, 40)}}, "not a multiple of the target's width of 16"),
        ({"tensors": {"fc.weight": torch.ones(16, 32)}}, "reads 2 hidden states, and 3 are named"),
        ({"config": {"norm_before_residual": "yes"}}, "norm_before_residual is 'yes' in config.json"),
        ({"config": {"draft_vocab_size": "many"}}, "draft_vocab_size is 'many'"),
        ({"config": {"draft_vocab_size": 21}}, "lm_head.weight has 20 rows, and 21 by draft_vocab_size"),
        ({"config": {"fc_norm": True}}, "fc_norm is True in config.json; it must be false, as its tensors show"),
        ({"config": {"target_hidden_size": 24}}, "target_hidden_size is 24 in config.json; it must be the width"),
        ({"without": ["d2t", "t2d"]}, "20 of 32 tokens, and no map d2t"),
        ({"tensors": {"d2t": MAP.flip(0)}}, "do not ascend|names tokens from"),
        ({"tensors": {"d2t": MAP + 40}}, "names tokens from"),
        ({"tensors": {"d2t": torch.zeros(20, dtype=torch.int64)}, "without": ["t2d"]}, "all zero"),
        ({"tensors": {"t2d": torch.ones(32, dtype=torch.bool)}}, "t2d and d2t name different tokens"),
        ({"tensors": {"d2t": MAP[:7]}}, "d2t has 7 entries, and the head has 20"),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_head_is_refused_by_name(change, message, target, tmp_path):
    folder = changed(tmp_path / "head", **change)
    with pytest.raises(BadHead, match=message) as raised:
        read_head(folder, target)
    assert str(folder) in str(raised.value)


def test_files_that_cannot_be_read_are_named(target, tmp_path):
    folder = changed(tmp_path / "head")
    (folder / "config.json").write_text("{")
    with pytest.raises(BadHead, match=r"config.json cannot be read"):
        read_head(folder, target)
    shutil.copy(GOLDEN / "plain" / "config.json", folder)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(BadHead, match=r"model.safetensors cannot be read"):
        read_head(folder, target)
    (folder / "model.safetensors").unlink()
    for content in (b"no pickle", pickle.dumps([1])):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(BadHead, match=r"pytorch_model.bin cannot be read"):
            read_head(folder, target)
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    with pytest.raises(BadHead, match=r"pytorch_model.bin cannot be read: it does not hold tensors by name"):
        read_head(folder, target)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(MissingFile, match=r"neither model\.safetensors nor"):
        read_head(folder, target)
    (folder / "config.json").write_text('{"model_type": "accelerator", "eagle_config": {}}')
    save_file({"0.0.linear.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(BadHead, match="kind 'accelerator', which cannot be read"):
        read_head(folder, target)
    wide = changed(tmp_path / "wide", EAGLE, {"hidden_size": 24})
    with pytest.raises(BadHead, match=r"hidden_size is 24 in config\.json; it must be the target's, 16"):
        read_head(wide, target)


def test_loading_tries_a_head_on_words_of_the_target(target, tmp_path):
    """One that is sure of random tokens fits nothing; it drafts all the same."""
    sure = load_file(GOLDEN / "plain" / "model.safetensors")["lm_head.weight"] * 100
    folder = changed(tmp_path / "sure", "plain", tensors={"lm_head.weight": sure})
    with pytest.warns(UserWarning, match="hardly fits the target"):
        pair = sb.load(target, draft=folder)
    assert isinstance(pair.draft, TrunkLM)


def test_a_head_for_a_target_with_fewer_layers_is_refused(target):
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 3, "layer_types": None})
    with pytest.raises(BadHead, match="3 layers, so taps are numbers from 0 to 3: is it for another target"):
        read_head(GOLDEN / "plain", LlamaForCausalLM(config))


def test_a_target_with_few_positions_writes_a_shorter_text(target):
    config = LlamaConfig(**{**target.config.to_dict(), "max_position_embeddings": 24})
    model = LlamaForCausalLM(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert isinstance(sb.load(model, draft=GOLDEN / "plain").draft, TrunkLM)


def test_what_is_a_head(target, tmp_path):
    for name in (*SPECULATORS, EAGLE):
        assert is_head(GOLDEN / name)
    target.save_pretrained(tmp_path)
    assert not is_head(tmp_path)
    assert not is_head(target)
    assert not is_head(tmp_path / "nothing here")
    with pytest.raises(BadSetting, match="the draft is a head"):
        sb.load(target, draft=GOLDEN / "plain", quantize_draft="int8")


def test_a_head_reads_its_own_rows_of_tokens_that_it_knows(target):
    """A restricted vocabulary: the other tokens have no odds in the draft."""
    pair = sb.load(target, draft=GOLDEN / "two_layers", probe=False)
    known = set(pair.draft.head.tokens.tolist())
    for turn in turns_of(pair, [3, 4, 5], sb.dsbd(2, 4, 3), max_new_tokens=12, seed=1):
        forest = turn.forest
        below_drafts = (forest.parents >= 0) & ~np.isin(forest.parents, forest.known.nodes)
        assert {*forest.tokens[below_drafts].tolist()} <= known  # below known nodes drafts are the target's own


@pytest.mark.parametrize("name", [*SPECULATORS, EAGLE])
def test_whole_texts_are_unrolled_as_drafts_are_made(name, target):
    """All rows of a step at once, against the other implementation, whose row r is that of token r + 1."""
    head = read_head(GOLDEN / name, target)
    golden = load_file(GOLDEN / f"{name}.oracle.safetensors")
    steps = sum(key.startswith("logits") for key in golden)
    states = torch.cat([golden["states"], torch.zeros(1, golden["states"].shape[1])])
    tokens = torch.cat([torch.tensor([0]), golden["ids"]])
    parts = dict(zip(head.taps, states.chunk(len(head.taps), -1), strict=True))
    trees = chain_of(tokens, parts)
    with torch.inference_mode():
        drafts = head.drafts(trees, steps, torch.ones_like(trees.tokens, dtype=torch.bool))
    for step, (nodes, logits, *_) in enumerate(drafts):
        assert nodes.tolist() == list(range(step + 1, len(tokens)))
        torch.testing.assert_close(logits, golden[f"logits{step}"][: len(nodes)], atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", PEAGLE)
def test_mask_rows_are_those_of_another_implementation(name, target):
    """Row k below a token: the law behind the token k after it, whatever those between are. Drafts of all roots at once."""
    head = read_head(GOLDEN / name, target)
    golden = load_file(GOLDEN / f"{name}.oracle.safetensors")
    found = masked_drafts(head, golden)
    assert len(found) == len(golden["logits"]) == 27
    for logits, expected in zip(found, golden["logits"], strict=True):
        torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=CLOSE)


def masked_drafts(head, golden):
    """The logits of the kept rows, each given by its anchor and how far after it it is."""
    states = torch.cat([golden["states"], torch.zeros(1, golden["states"].shape[1])])
    tokens = torch.cat([torch.tensor([0]), golden["ids"]])
    trees = chain_of(tokens, dict(zip(head.taps, states.chunk(len(head.taps), -1), strict=True)))
    with torch.inference_mode():
        drafts = head.drafts(trees, head.rows, torch.ones_like(trees.tokens, dtype=torch.bool))
    found = []
    for anchor, far in zip(golden["anchors"].tolist(), golden["depths"].tolist(), strict=True):
        at = drafts[far].nodes.tolist().index(anchor + 1 + far)
        found.append(drafts[far].logits[at])
    return found


@pytest.mark.parametrize("change", ["window from the root", "no window", "another mask"])
def test_mask_rows_that_are_computed_in_another_way_have_other_logits(change, target):
    head = read_head(GOLDEN / "peagle_window", target)
    if change == "another mask":
        head = head.changed()
        head.mask += 1
    else:
        views = () if change == "no window" else (head.shape.views[0]._replace(from_row=False), head.shape.views[1])
        head = head.changed(views=views)
    golden = load_file(GOLDEN / "peagle_window.oracle.safetensors")
    errors = [(one - two).abs().max() for one, two in zip(masked_drafts(head, golden), golden["logits"], strict=True)]
    assert max(errors) > 100 * CLOSE


@pytest.mark.parametrize("name", PEAGLE)
def test_a_head_with_mask_rows_drafts_where_a_draft_model_does(name, target):
    """The same beams as without a draft, one prompt and several; and chains, trees and searches take it."""
    assert is_head(GOLDEN / name)
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    assert isinstance(pair.draft, MaskLM)
    prompts = [[3, 4, 5, 6], [7], [8, 9]]
    options = {"max_new_tokens": 12, "eos_token_id": [], "seed": 5}
    plain = sb.generate(pair, prompts, sb.beam_sampling(3), **options)
    for method in (sb.dsbd(3, 5, 3), sb.dsbd(3), sb.dsbd(3, 5, 6)):
        for batch_size in (1, 3):
            found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
    for method in (sb.speculative_sampling(3), sb.specinfer((2, 2)), sb.eagle(8, 3)):
        drafted = sb.generate(pair, prompts, method, **options)
        assert sum(one.report.draft_passes for one in drafted) > 0
    searched = sb.generate(pair, prompts, sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, prompts, sb.beam_search(3), max_new_tokens=12)
    assert [one.tokens for one in searched] == [one.tokens for one in expected]


def test_the_mask_token_has_three_names(target, tmp_path):
    """speculators', and those that vLLM looks for in other files; there the learnt state may have fewer dimensions."""
    config = json.loads((GOLDEN / "peagle" / "config.json").read_text())
    tensors = load_file(GOLDEN / "peagle" / "model.safetensors")
    core = config["transformer_layer_config"]
    for name, shape in (("pard_token", (1, 48)), ("ptd_token_id", (48,)), ("mask_token_id", (1, 1, 48))):
        own = {**core, name: 3, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
        write(tmp_path, own, tensors | {"mask_hidden": tensors["mask_hidden"].reshape(shape)})
        head = read_head(tmp_path, target)
        assert (head.mask, head.rows, head.taps) == (3, 8, (2, 4, 5))
        assert head.mask_hidden.equal(read_head(GOLDEN / "peagle", target).mask_hidden)
    write(tmp_path, core | {"architectures": ["LlamaForCausalLMEagle3"]}, tensors)
    with pytest.raises(BadHead, match=r"config\.json has no mask_token_id"):
        read_head(tmp_path, target)
    lost = changed(tmp_path / "lost", "peagle", without=["mask_hidden"])
    with pytest.raises(BadHead, match="has no tensor mask_hidden"):
        read_head(lost, target)


def test_readings_of_mask_rows_that_are_tried(target):
    """Those of EAGLE-3, but for what is fed back: nothing is."""
    head = read_head(GOLDEN / "peagle", target)
    assert [name for name, _ in head.other_readings(8)] == [
        "hidden states one layer earlier", "hidden states one layer later", "attention added to the normed feature",
    ]  # fmt: skip
    assert "feeds back" not in head.described
    assert head.described["kind"].startswith("P-EAGLE: drafts 4 tokens in one pass")


def test_custom_generate_takes_a_head_and_reads_it_once(target):
    """In the place of a draft model: the beams of decoding without a draft."""
    ids = torch.tensor([[3, 4, 5, 6]])
    options = {"num_beams": 3, "do_sample": True, "max_new_tokens": 8, "seed": 2, "num_return_sequences": 3}
    options |= {"eos_token_id": [], "pad_token_id": 0, "top_k": 0}
    plain = target.generate(ids, custom_generate=sb.hf.beam_sampling, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head of random weights fits nothing
        for _ in range(2):
            found = target.generate(ids, custom_generate=sb.hf.dsbd, draft_model=str(GOLDEN / "plain"), **options)
            assert found.tolist() == plain.tolist()
    pair = sb.load(target, draft=str(GOLDEN / "plain"))
    assert (str(GOLDEN / "plain"), True) in pair.target.heads
    assert sb.load(target, draft=str(GOLDEN / "plain")).draft is pair.draft


def test_a_head_that_was_written_anew_is_read_anew(target, tmp_path):
    folder = changed(tmp_path / "head", "plain")
    first = sb.load(target, draft=folder, probe=False).draft
    changed(folder, "plain", tensors={"norm.weight": torch.full((16,), 2.0)})
    second = sb.load(target, draft=folder, probe=False).draft
    assert second is not first
    assert second.head.norm.weight[0] == 2
