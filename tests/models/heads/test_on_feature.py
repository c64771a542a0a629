"""Heads on one feature: logits of other implementations, the same beams, rows that follow the path, and refusals by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.errors import BadHead
from specbeam.models.heads.feature import FeatureSizes
from specbeam.models.heads.lm import BlockLM, FeatureLM, MaskLM, TrunkLM
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.read import is_head, read_head
from specbeam.models.heads.recurrent import Hydra, MLPSpeculator, ReDrafter
from specbeam.models.heads.trees import chain_of
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.recipes.tuning.costs import curve_of
from tests.support.heads import VOCAB, Comparing, block_of, masked_of, trunk_of
from tests.support.tiny_models import tiny

GOLDEN = Path(__file__).parent / "golden"
# As FasterDecoding/Medusa, zankner/Hydra, foundation-model-stack/fms-extras and apple/ml-recurrent-drafter compute them.
FILES = ["medusa", "hydra", "mlp_speculator", "mlp_speculator_tied", "redrafter", "redrafter_sum"]
CLOSE = 1e-5
PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


def golden_of(name):
    return load_file(GOLDEN / f"{name}.oracle.safetensors")


@pytest.fixture(scope="module")
def target():
    """With the embedding that those heads read whose files do not hold one."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(golden_of("redrafter")["embedding"])
    return model


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_another_implementation(name, target):
    """Head k on the feature of token i, with the tokens after it: the law behind token i + 1 + k."""
    assert is_head(GOLDEN / name)
    head = read_head(GOLDEN / name, target)
    golden = golden_of(name)
    trees = chain_of(golden["ids"], {-1: golden["states"]})
    with torch.inference_mode():
        drafts = head.drafts(trees, 3, torch.ones_like(trees.tokens, dtype=torch.bool))
    assert len(drafts) == 3
    for far, rows in enumerate(drafts, 1):
        expected = golden[f"logits{far - 1}"]
        count = min(len(expected), len(rows.nodes))
        assert rows.nodes[:count].tolist() == list(range(far, far + count))
        torch.testing.assert_close(rows.logits[:count], expected[:count], atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", FILES)
def test_a_head_drafts_where_a_draft_model_does(name, target):
    """The same beams as without a draft, one prompt and several; and chains, trees and searches take it."""
    pair = sb.load(target, draft=str(GOLDEN / name), probe=False)
    assert isinstance(pair.draft, FeatureLM)
    prompts = [[3, 4, 5, 6], [7], [8, 9]]
    options = {"max_new_tokens": 12, "eos_token_id": [], "seed": 5}
    plain = sb.generate(pair, prompts, sb.beam_sampling(3), **options)
    for method in (sb.dsbd(3, 5, 3), sb.dsbd(3), sb.dsbd(3, 5, 6)):
        for batch_size in (1, 3):
            found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
    for method in (sb.speculative_sampling(3), sb.specinfer((2, 2)), sb.opt_tree(6, 3)):
        drafted = sb.generate(pair, prompts, method, **options)
        assert sum(one.report.draft_passes for one in drafted) > 0
    searched = sb.generate(pair, prompts, sb.speculative_beam_search(3, 5, depth=2), max_new_tokens=12)
    expected = sb.generate(pair, prompts, sb.beam_search(3), max_new_tokens=12)
    assert [one.tokens for one in searched] == [one.tokens for one in expected]


def head_of(model, kind):
    """A head with random weights."""
    torch.manual_seed(4)
    width = model.config.hidden_size
    sizes = FeatureSizes(width, VOCAB, VOCAB, 3)
    embedding = model.get_input_embeddings()
    heads = {
        "medusa": lambda: Medusa(sizes, 2),
        "hydra": lambda: Hydra(sizes, 2, embedding),
        "mlp speculator": lambda: MLPSpeculator(sizes, 12, scales_input=True),
        "redrafter": lambda: ReDrafter(sizes, 1, 20, is_recurrent=True, embedding=embedding),
    }
    return heads[kind]()


class Checked(Comparing, FeatureLM):
    """A head on one feature whose rows are compared with those of separate paths."""

    def expected(self, tokens, features, is_scored):
        start = is_scored.index(False)
        states = self.head.start(features[start - 1 : start])
        for far, token in enumerate(tokens[start:], 1):
            states = self.head.step(far, states, torch.tensor([token]))
        return self.head.logits(min(len(tokens) - start, self.head.sizes.depth), states)[0]


METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "deeper than the heads": sb.dsbd(2, 3, 5),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "chain": sb.speculative_sampling(3),
    "tree": sb.specinfer((2, 2)),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "beams") for kind in ("medusa", "hydra", "redrafter")), *(("mlp speculator", name) for name in METHODS)],
)
def test_rows_of_the_tree_are_those_of_paths(kind, name, model):
    """Over several turns, with beams that end, and prompts of one token."""
    head = Checked(head_of(model, kind), VOCAB).of(model)
    pair = replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine="plain"), draft=head)
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_names_of_another_server_are_read_too(target, tmp_path):
    """Medusa as vLLM stored it."""
    tensors = torch.load(GOLDEN / "medusa" / "medusa_lm_head.pt", weights_only=True)
    renamed = {}
    for name, tensor in tensors.items():
        head, place, *rest = name.split(".")
        renamed[
            f"medusa_heads.blocks.{head}.layers.{place}.{rest[-1]}"
            if len(rest) > 1
            else f"medusa_heads.lm_heads.{head}.weight"
        ] = tensor
    save_file({name: one.clone() for name, one in renamed.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "num_heads": 3}))
    ours, expected = read_head(tmp_path, target), read_head(GOLDEN / "medusa", target)
    assert all(torch.equal(one, expected.state_dict()[name]) for name, one in ours.state_dict().items())


def test_heads_may_share_the_matrix_of_the_target(target, tmp_path):
    tensors = torch.load(GOLDEN / "medusa" / "medusa_lm_head.pt", weights_only=True)
    kept = {name: one.clone() for name, one in tensors.items() if "linear" in name}
    save_file(kept, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "version": "2"}))
    head = read_head(tmp_path, target)
    assert head.matrices[2].weight is target.lm_head.weight


@pytest.mark.parametrize(
    ("name", "config", "without", "message"),
    [
        ("medusa", {}, ["1.0.linear.bias"], "no tensor blocks.1.0.linear.bias"),
        ("medusa", {}, "all", "holds no Medusa heads"),
        ("hydra", {"hydra_head_arch": "prefix-mlp"}, [], "hydra_head_arch is 'prefix-mlp'"),
        ("hydra", {"grounded_heads": False}, [], "grounded_heads False"),
        ("mlp_speculator", {"n_predict": None}, [], "no n_predict"),
        ("mlp_speculator", {"emb_dim": 24}, [], "emb_dim is 24 in config.json; it must be the width of the target, 16"),
        ("mlp_speculator", {"n_predict": 2}, [], "n_predict is 2 in config.json; it must be 3, the number of heads"),
        ("redrafter", {"hidden_size": 24}, [], "hidden_size is 24 in config.json; it must be the width of the target"),
        ("redrafter", {"exit_dim": 20}, [], "network.2.weight has 32 columns, and 20 by exit_dim in config.json"),
    ],
)
def test_a_broken_or_foreign_head_is_refused_by_name(name, config, without, message, target, tmp_path):
    fields = json.loads((GOLDEN / name / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (file,) = [path for path in (GOLDEN / name).iterdir() if path.name != "config.json"]
    tensors = torch.load(file, weights_only=True) if file.suffix == ".pt" else load_file(file)
    kept = {key: one.clone() for key, one in tensors.items() if without != "all" and key not in without}
    save_file(kept or {"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadHead, match=message):
        read_head(tmp_path, target)


def test_what_a_pass_costs_is_measured_for_every_kind(model):
    """The controller of depth looks at it."""
    for head in (
        TrunkLM(trunk_of(model, "eagle3"), VOCAB),
        MaskLM(masked_of(model), VOCAB),
        BlockLM(block_of(model, "anchored"), VOCAB),
    ):
        assert 0 < curve_of(head).seconds[0] < 1
    head = FeatureLM(head_of(model, "mlp speculator"), VOCAB)
    assert 0 < curve_of(head).seconds[0] < 1
    assert curve_of(head) is curve_of(head)
