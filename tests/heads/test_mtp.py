"""Modules of multi-token prediction, as they are read from a target's own files and from speculators' folders."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import specbeam as sb
from specbeam.errors import BadHead, BadSetting, MissingFile
from specbeam.generation import turns_of
from specbeam.heads.files import read_files
from specbeam.heads.lm import ModulesLM, TrunkLM
from specbeam.heads.modules import ModulesInARow
from specbeam.heads.probe import probed, probed_text, written_text
from specbeam.heads.read import read_head
from specbeam.heads.trees import chain_of
from specbeam.heads.trunk import PairTrunk
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import FINAL, Shape
from tests.support.heads import Comparing, chain_logits
from tests.support.mtp import KINDS, SIZES, layer_of, loaded, modules_in, tiny_target, with_modules, written

GOLDEN = Path(__file__).parent / "golden"
CLOSE = 1e-5
PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


def drafted(head, tokens, states, depth):
    """The logits of the drafts 1 to `depth` deep behind a text of scored tokens."""
    trees = chain_of(tokens, {FINAL: states})
    with torch.inference_mode():
        return [one.logits for one in head.drafts(trees, depth, torch.ones_like(trees.tokens, dtype=torch.bool))]


def target_of_speculators():
    config = json.loads((GOLDEN / "mtp_speculators" / "config.json").read_text())["transformer_layer_config"]
    golden = load_file(GOLDEN / "mtp_speculators.oracle.safetensors")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(golden["embed"])
        model.lm_head.weight.copy_(golden["head"])
    return model


@pytest.fixture(scope="module")
def speculators_target():
    return target_of_speculators()


@pytest.mark.parametrize("name", ["mtp_glm", "mtp_speculators"])
def test_logits_are_those_of_another_implementation(name, speculators_target):
    """Of all rows: those of two modules with experts by transformers' MtpModel, and of one in three places by speculators."""
    golden = load_file(GOLDEN / f"{name}.oracle.safetensors")
    if name == "mtp_glm":
        head = read_head("mtp", loaded(GOLDEN / name))
    else:
        head = read_head(GOLDEN / name, speculators_target)
    depth = sum(key.startswith("logits") for key in golden)
    assert depth == {"mtp_glm": 2, "mtp_speculators": 3}[name]
    for step, logits in enumerate(drafted(head, golden["ids"], golden["states"], depth)):
        theirs = golden[f"logits{step}"]
        assert len(theirs) > 7
        torch.testing.assert_close(logits[: len(theirs)], theirs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("kind", ["glm", "deepseek"])
def test_modules_are_those_of_transformers(kind, tmp_path):
    """With experts, with partial rotation, and with latent attention; by the code of transformers itself."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    from transformers.cache_utils import MtpCache

    target = with_modules(tmp_path, tiny_target(kind, num_nextn_predict_layers=2), count=2)
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*", r"model\.layers\.3.*"]
    theirs = layers.MtpModel.from_pretrained(target).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (9,), generator=generator)
    states = torch.randn(9, 16, generator=generator)
    cache = MtpCache(config=target.config.get_mtp_config())
    found = drafted(read_head("mtp", target), ids, states, 2)
    above = states[None]
    for number in range(2):
        rows = 8 - number
        places = torch.arange(number + 1, 9)[None]
        with torch.no_grad():
            above = theirs.forward_layer(number, above[:, :rows], places, cache, input_ids=ids[None, number + 1 :])
            logits = theirs.shared_head(above)[0]
        torch.testing.assert_close(found[number], logits, atol=CLOSE, rtol=CLOSE)


def test_one_module_goes_on_by_its_own_states(tmp_path):
    """Row by row: the second and third draft of a module that stands alone read what it made before."""
    target = with_modules(tmp_path, tiny_target("qwen3"))
    head = read_head("mtp", target)
    assert isinstance(head, PairTrunk)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (7,), generator=generator)
    states = torch.randn(7, 16, generator=generator)
    for step, logits in enumerate(drafted(head, ids, states, 3)):
        for row, found in enumerate(logits):
            text = ids[: row + 2 + step].tolist()
            given = [*states[: row + 1], *[None] * step]
            torch.testing.assert_close(chain_logits(head, text, given), found, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("count", [1, 3])
def test_the_names_of_all_writers_are_read(count, tmp_path):
    """Of the same weights: DeepSeek's and GLM's, MiMo's, which has the feature first, and Qwen's, whose modules share norms."""
    model = tiny_target("qwen2")
    read = {}
    for form in ("deepseek", "mimo"):
        (tmp_path / form).mkdir()
        read[form] = read_head("mtp", with_modules(tmp_path / form, model, form, count))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (7,), generator=generator)
    states = torch.randn(7, 16, generator=generator)
    found = {form: drafted(head, ids, states, count) for form, head in read.items()}
    for one, other in zip(found["deepseek"], found["mimo"], strict=True):
        torch.testing.assert_close(one, other, atol=CLOSE, rtol=CLOSE)
    tensors = load_file(tmp_path / "deepseek" / "model.safetensors")
    own = {name: one for name, one in tensors.items() if not name.startswith(("model.layers.2", "model.layers.3", "model.layers.4"))}
    shared = modules_in(own, "qwen", 1)
    more = {f"mtp.layers.{number}.{name}": one for number in range(1, count) for name, one in layer_of(tensors, 2 + number).items()}
    more = {name: one for name, one in more.items() if not name.split(".", 3)[3].startswith(("enorm", "hnorm", "eh_proj", "shared"))}
    (tmp_path / "qwen").mkdir()
    model.save_pretrained(tmp_path / "qwen")
    head = read_head("mtp", written(tmp_path / "qwen", own | shared | more))
    found["qwen"] = drafted(head, ids, states, count)
    torch.testing.assert_close(found["qwen"][0], found["deepseek"][0], atol=CLOSE, rtol=CLOSE)
    if count > 1:
        first, second, third = head.modules_in_a_row
        assert first.fc.weight.equal(second.fc.weight)
        assert not torch.allclose(first.layers[0].inner.mlp.up_proj.weight, third.layers[0].inner.mlp.up_proj.weight)


def test_gated_attention_and_norms_that_add_one_are_those_of_the_target(tmp_path):
    """Qwen3-Next's module, whose layer is its full attention. The target itself cannot score trees, and is refused by name."""
    settings = SIZES | {
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **settings)).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    inner = {name: torch.randn(one.shape, generator=generator) * 0.2 for name, one in layer_of(tensors, 3).items()}
    assert "self_attn.q_proj.weight" in inner
    around = {name: torch.randn(16, generator=generator) * 0.2 for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    joins = torch.randn(16, 32, generator=generator) * 0.3
    mtp = {f"mtp.layers.0.{name}": one for name, one in inner.items()} | {f"mtp.{name}.weight": one for name, one in around.items()}
    target = written(tmp_path, tensors | mtp | {"mtp.fc.weight": joins})
    head = read_head("mtp", target)

    ids = torch.randint(0, 32, (6,), generator=generator)
    states = torch.randn(6, 16, generator=generator)
    layer = type(target.model.layers[3])(target.config, 3).eval()
    layer.load_state_dict(head.layers[0].inner.state_dict())

    def normed(x, weight):
        return (1 + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + target.config.rms_norm_eps)

    with torch.no_grad():
        embedded = normed(target.model.embed_tokens(ids[1:]), around["pre_fc_norm_embedding"])
        x = torch.cat([embedded, normed(states[:-1], around["pre_fc_norm_hidden"])], -1) @ joins.T
        places = torch.arange(5)[None]
        mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
        layer.self_attn.config._attn_implementation = "eager"
        x = layer(x[None], position_embeddings=target.model.rotary_emb(x[None], places), attention_mask=mask)[0]
        expected = target.lm_head(normed(x, around["norm"]))
    torch.testing.assert_close(drafted(head, ids, states, 1)[0], expected, atol=CLOSE, rtol=CLOSE)
    with pytest.raises(sb.errors.SpecbeamError, match="Qwen3Next"):
        sb.load(target, draft="mtp")


class Checked(Comparing):
    """Modules whose rows are compared with those of whole texts."""

    def expected(self, tokens, features, is_scored):
        deep = len(is_scored) - sum(is_scored)
        return drafted(self.head, torch.tensor(tokens), features, deep)[-1][-1]


class CheckedTrunk(Checked, TrunkLM):
    """One module."""


class CheckedModules(Checked, ModulesLM):
    """Modules in a row."""


METHODS = {
    "beams": sb.dsbd(3, 5, 4),
    "beams by rejection": sb.dsbd(3, 5, 4, coupling="rejection"),
    "chain": sb.mtp(4, 4),
    "tree": sb.specinfer((2, 2, 1)),
    "search": sb.speculative_beam_search(3, 5, depth=3),
    "best trees": sb.opt_tree(9, 4),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Targets with one to three modules, by kind and number."""
    made = {}
    for kind, count in (("qwen3", 1), ("qwen3", 2), ("qwen3", 3), ("glm", 2), ("deepseek", 1), ("deepseek", 2)):
        made[kind, count] = with_modules(tmp_path_factory.mktemp("target"), tiny_target(kind), count=count)
    return made


def checked(target, head):
    """A pair whose draft compares its rows with those of chains."""
    draft = CheckedTrunk(head, 32) if isinstance(head, PairTrunk) else CheckedModules(head, 32)
    return replace(sb.load(target), target=HuggingFaceLM(target, chunk=3, engine="plain"), draft=draft.of(target))


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        *(("qwen3", 3, name) for name in METHODS),
        ("qwen3", 1, "beams"), ("qwen3", 2, "beams"), ("qwen3", 2, "best trees"), ("glm", 2, "beams"), ("deepseek", 1, "beams"),
        ("deepseek", 2, "tree"),
    ],
)  # fmt: skip
def test_rows_of_the_tree_are_those_of_chains(kind, count, name, targets):
    """Turn after turn: with prompts of fewer tokens than there are modules, beams that end, drafts deeper than the modules."""
    target = targets[kind, count]
    pair = checked(target, read_head("mtp", target))
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < 5e-5


def test_rows_of_one_module_in_three_places_are_those_of_chains(speculators_target):
    pair = checked(speculators_target, read_head(GOLDEN / "mtp_speculators", speculators_target))
    assert pair.draft.head.is_one
    sb.generate(pair, PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < 5e-5


def test_long_prompts_are_taken_in_pieces(targets, monkeypatch):
    monkeypatch.setattr("specbeam.heads.cache.CHUNK", 2)
    target = targets["qwen3", 3]
    pair = checked(target, read_head("mtp", target))
    sb.generate(pair, PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < 5e-5


@dataclass
class Uneven:
    """A controller that plans another depth in each turn."""

    depths: tuple[int, ...]
    turns: int = 0

    def plan(self, session):
        self.turns += 1
        return Shape(min(self.depths[self.turns % len(self.depths)], session.remaining - 1), 1)

    def settle(self, session, turn):
        pass


@pytest.mark.parametrize("depths", [(1, 1, 4), (2, 0, 3), (1, 2, 3, 4, 3, 2)])
def test_a_module_that_was_not_run_for_some_turns_takes_what_it_has_missed(depths, targets):
    target = targets["qwen3", 3]
    pair = checked(target, read_head("mtp", target))
    method = sb.speculative_sampling(4, controller=Uneven(depths))
    sb.generate(pair, PROMPTS, method, batch_size=1, **(OPTIONS | {"max_new_tokens": 16}))
    assert pair.draft.compared > 20
    assert pair.draft.largest < 5e-5
