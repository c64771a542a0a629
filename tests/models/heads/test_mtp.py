"""Modules of multi-token prediction, as they are read from a target's own files and from speculators' folders."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import specbeam as sb
from specbeam.core.records import FINAL, Shape
from specbeam.errors import BadHead, BadSetting, MissingFile
from specbeam.generation import turns_of
from specbeam.models.heads.files import read_files
from specbeam.models.heads.lm import ModulesLM, TrunkLM
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.probe import TextStarts, drawn_text, probed, probed_text
from specbeam.models.heads.read import read_head
from specbeam.models.heads.trees import chain_of
from specbeam.models.heads.trunk import PairTrunk
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.heads import Comparing, chain_logits
from tests.support.mtp import (
    SIZES,
    layer_of,
    loaded,
    modules_in,
    tiny_target,
    with_fitting_modules,
    with_modules,
    written,
)

GOLDEN = Path(__file__).parent / "golden"
CLOSE = 1e-5
CLOSE_ROWS = 2e-4  # logits of modules in a row: float32 sums in another order; a wrong row is above 0.01
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
    is_glm = name == "mtp_glm"
    head = read_head("mtp", loaded(GOLDEN / name)) if is_glm else read_head(GOLDEN / name, speculators_target)
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
    own = {
        name: one
        for name, one in tensors.items()
        if not name.startswith(("model.layers.2", "model.layers.3", "model.layers.4"))
    }
    shared = modules_in(own, "qwen", 1)
    more = {
        f"mtp.layers.{number}.{name}": one
        for number in range(1, count)
        for name, one in layer_of(tensors, 2 + number).items()
    }
    more = {
        name: one
        for name, one in more.items()
        if not name.split(".", 3)[3].startswith(("enorm", "hnorm", "eh_proj", "shared"))
    }
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
    around = {
        name: torch.randn(16, generator=generator) * 0.2
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    joins = torch.randn(16, 32, generator=generator) * 0.3
    mtp = {f"mtp.layers.0.{name}": one for name, one in inner.items()} | {
        f"mtp.{name}.weight": one for name, one in around.items()
    }
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
    """Modules whose rows are compared with those of whole texts: each `step`-th of them, so that many turns are looked at."""

    seen = 0
    step = 1

    def compare(self, *arguments):
        self.seen += 1
        if self.seen % self.step == 0:
            super().compare(*arguments)

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
    "chain": sb.mtp(4, 4, controller="fixed"),
    "tree": sb.specinfer((2, 2, 1), controller="fixed"),
    "search": sb.speculative_beam_search(3, 5, depth=3),
    "best trees": sb.opt_tree(9, 4, controller="fixed"),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Targets with one to three modules, by kind and number."""
    made = {}
    for kind, count in (("qwen3", 1), ("qwen3", 2), ("qwen3", 3), ("glm", 2), ("deepseek", 1), ("deepseek", 2)):
        made[kind, count] = with_modules(tmp_path_factory.mktemp("target"), tiny_target(kind), count=count)
    return made


def checked(target, head, step=1):
    """A pair whose draft compares its rows with those of chains."""
    draft = CheckedTrunk(head, 32) if isinstance(head, PairTrunk) else CheckedModules(head, 32)
    draft.step = step
    return replace(sb.load(target), target=HuggingFaceLM(target, chunk=3, engine="plain"), draft=draft.of(target))


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        *(("qwen3", 3, name) for name in METHODS),
        ("qwen3", 1, "beams"), ("qwen3", 2, "best trees"), ("glm", 2, "beams"), ("deepseek", 1, "beams"),
        ("deepseek", 2, "tree"),
    ],
)  # fmt: skip
def test_rows_of_the_tree_are_those_of_chains(kind, count, name, targets):
    """Turn after turn: with prompts of fewer tokens than there are modules, beams that end, drafts deeper than the modules."""
    target = targets[kind, count]
    pair = checked(target, read_head("mtp", target), 1 if name in ("chain", "tree") else 4)
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < CLOSE_ROWS


def test_rows_of_one_module_in_three_places_are_those_of_chains(speculators_target):
    pair = checked(speculators_target, read_head(GOLDEN / "mtp_speculators", speculators_target), 4)
    assert pair.draft.head.is_one
    sb.generate(pair, PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < CLOSE_ROWS


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_drafts_that_outlived_a_turn_would_be_found(count, targets, monkeypatch):
    """The mistake that engines have made: what was computed below drafts is taken for what the target's states give."""
    target = targets["qwen3", count]
    pair = checked(target, read_head("mtp", target))
    monkeypatch.setattr("specbeam.models.heads.cache.PairCache.rewind", lambda self, nodes: None)
    options = OPTIONS | {"max_new_tokens": 16, "temperature": 3.0}
    sb.generate(pair, PROMPTS[:1], sb.dsbd(3, 9, 4, coupling="rejection"), **options)
    assert pair.draft.largest > 0.01


def test_long_prompts_are_taken_in_pieces(targets, monkeypatch):
    monkeypatch.setattr("specbeam.models.heads.cache.CHUNK", 2)
    target = targets["qwen3", 3]
    pair = checked(target, read_head("mtp", target), 4)
    sb.generate(pair, PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert pair.draft.compared > 20
    assert pair.draft.largest < CLOSE_ROWS


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
    assert pair.draft.largest < CLOSE_ROWS


@pytest.fixture(scope="module", params=[1, 2])
def fitting(request, tmp_path_factory):
    """A target with experts, and the number of its modules, which fit so well that some of their drafts are accepted."""
    target = with_fitting_modules(tmp_path_factory.mktemp("fitting"), "glm", request.param)
    return target, request.param


def test_drafts_and_texts_are_those_of_transformers(fitting, monkeypatch):
    """Turn by turn the drafts of generate(use_mtp=True); and both texts are those of greedy decoding."""
    target, count = fitting
    generator = pytest.importorskip("transformers.generation.candidate_generator")
    if not hasattr(generator, "MTPCandidateGenerator"):
        pytest.skip("this transformers does not draft with modules")
    monkeypatch.setattr(
        target, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{2 + number}.*" for number in range(count)]
    )
    original = generator.MTPCandidateGenerator.get_candidates
    theirs = []

    def spied(self, input_ids, *arguments, **named):
        found = original(self, input_ids, *arguments, **named)
        theirs.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    monkeypatch.setattr(generator.MTPCandidateGenerator, "get_candidates", spied)
    pair = sb.load(target, draft="mtp", probe=False)
    for prompt in PROMPTS:
        theirs.clear()
        ids = torch.tensor([prompt])
        text = target.generate(ids, use_mtp=True, do_sample=False, max_new_tokens=16)
        assert text.tolist() == target.generate(ids, do_sample=False, max_new_tokens=16).tolist()
        ours = []
        method = sb.mtp(nodes=count, depth=count)
        for turn in turns_of(pair, prompt, method, max_new_tokens=16, temperature=0, eos_token_id=[]):
            ours.append(turn.forest.tokens[1:].tolist())
        assert ours[0] == theirs[0] == []
        assert ours[:-1] == theirs[: len(ours) - 1]
        assert len(ours) == len(theirs)
        assert ours[-1] == theirs[-1][: len(ours[-1])]  # no more than may still be emitted
        (found,) = sb.generate(pair, [prompt], method, max_new_tokens=16, temperature=0, eos_token_id=[])
        assert [*prompt, *found.tokens] == text[0].tolist()
        assert 1 < 16 / len(ours) < count + 1  # some drafts were accepted, and some were not


@pytest.mark.parametrize(
    ("kind", "settings"), [(("qwen3", 1), {}), (("qwen3", 3), {}), (("qwen3", 3), {"width": "auto"})]
)
def test_beams_are_those_without_a_draft(kind, settings, targets):
    """With the same seed, one prompt and several side by side, whatever the modules draft."""
    pair = sb.load(targets[kind], draft="mtp", probe=False)
    plain = sb.generate(pair, PROMPTS, sb.beam_sampling(3, **settings), **OPTIONS)
    for method, batch_size in (
        (sb.dsbd(3, 5, 4, **settings), 1),
        (sb.dsbd(3, 5, 4, **settings), 3),
        (sb.dsbd(3, **settings), 3),
    ):
        found = sb.generate(pair, PROMPTS, method, batch_size=batch_size, **OPTIONS)
        assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("kind", [("glm", 2), ("deepseek", 1)])
def test_modules_of_a_target_in_halves_draft_in_halves(kind, targets):
    """All but what the target's own layers keep in float32."""
    target = AutoModelForCausalLM.from_pretrained(targets[kind].name_or_path, dtype=torch.bfloat16).eval()
    pair = sb.load(target, draft="mtp", probe=False)
    assert {weight.dtype for weight in pair.draft.head.parameters()} == {torch.bfloat16}
    buffers = [buffer for name, buffer in pair.draft.head.named_buffers() if name.endswith("e_score_correction_bias")]
    assert {buffer.dtype for buffer in buffers} == {torch.float32}
    assert len(buffers) == kind[1]
    found = sb.generate(pair, PROMPTS, sb.dsbd(3, 5, 4), batch_size=3, **OPTIONS)
    assert all(one.report.draft_passes > 0 for one in found)


def test_what_is_timed_is_one_pass_of_one_module(targets):
    """On a made-up prompt: over some nodes below the root, which are taken back after it."""
    lm = sb.load(targets["qwen3", 3], draft="mtp", probe=False).draft
    with lm.stored(20) as prompt:
        cache = prompt.session.state[lm]
        sizes = []
        for rows in (5, 1, 5):
            before = lm.passes
            assert prompt.pass_s(rows) > 0
            assert lm.passes == before + 1
            sizes.append([one.trie.size for one in cache.caches])
        assert sizes[0] == sizes[1] == sizes[2]


def test_a_level_of_drafts_takes_one_pass_of_one_module(targets):
    """So a turn has as many passes as layers; the first one has none, for the target has scored nothing yet."""
    pair = sb.load(targets["qwen3", 3], draft="mtp", probe=False)
    forests = []
    passes = [pair.draft.passes]
    for turn in turns_of(
        pair, PROMPTS[0], sb.speculative_sampling(4, controller="fixed"), max_new_tokens=30, seed=1, eos_token_id=[]
    ):
        forests.append(turn.forest.size)
        passes.append(pair.draft.passes)
    assert forests[0] == 1
    assert [after - before for before, after in pairwise(passes)][:7] == [0, *[4] * 6]


def test_readings_that_are_tried(targets):
    """Of all modules alike: the feature before the target's last norm, the order of what is projected, what is fed back."""
    names = [
        "hidden states before the target's last norm",
        "feature before embedding",
        "states before the norm fed back",
    ]
    for kind in (("qwen3", 1), ("qwen3", 3)):
        head = read_head("mtp", targets[kind])
        readings = dict(head.other_readings(2))
        assert [*readings] == names
        modules = [head] if isinstance(head, PairTrunk) else head.modules_in_a_row
        for reading in readings.values():
            theirs = [reading] if isinstance(reading, PairTrunk) else reading.modules_in_a_row
            assert all(one.fc.weight is other.fc.weight for one, other in zip(theirs, modules, strict=True))
        assert readings[names[0]].taps == (2,)
        back = dict(readings[names[0]].other_readings(2))
        assert back["hidden states after the target's last norm"].taps == (FINAL,)


def test_one_module_in_several_places_is_tried_as_engines_run_it(speculators_target):
    head = read_head(GOLDEN / "mtp_speculators", speculators_target)
    readings = dict(head.other_readings(2))
    assert readings["rows that all drafts share"] is head.modules_in_a_row[0]
    assert readings["feature before embedding"].is_one


def test_a_module_that_reads_what_is_before_the_last_norm_is_recognised(tmp_path):
    """It was taught so, and read as its files say: what the target's head reads."""
    model = tiny_target("qwen3")
    with torch.no_grad():
        model.model.norm.weight.uniform_(-3, 3, generator=torch.Generator().manual_seed(1))
    target = with_modules(tmp_path, model)
    lm = HuggingFaceLM(target, engine="plain")
    head = read_head("mtp", target).changed(taps=(2,))
    learning = [weight for name, weight in head.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    for weight in learning:
        weight.requires_grad_(True)
    optimiser = torch.optim.Adam(learning, 1e-2)
    rng = np.random.default_rng(1)
    texts = [probed_text(lm, drawn_text(lm, [first, first + 1], 38, (), rng), (2,)) for first in range(2, 10)]
    for step in range(120):
        trees, laws, _ = texts[step % len(texts)]
        loss = torch.zeros(())
        for nodes, logits, *_ in head.drafts(trees, 2, torch.ones_like(trees.tokens, dtype=torch.bool)):
            loss = loss - (laws[nodes] * logits.log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    wrong = head.changed(taps=(FINAL,))
    with pytest.warns(UserWarning, match="read with hidden states before the target's last norm, against its files"):
        found = probed(wrong, lm, TextStarts([[3, 4]]))
    assert found.changes[0] == "hidden states before the target's last norm"
    assert found.head.taps == (2,)


def test_tables_that_are_the_targets_are_shared_and_others_are_read(tmp_path):
    """DeepSeek's files hold embedding and matrix once more for each module."""
    model = tiny_target("llama")
    embedding, matrix = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    copies = {
        "model.layers.2.embed_tokens.weight": embedding.clone(),
        "model.layers.2.shared_head.head.weight": matrix.clone(),
    }
    target = with_modules(tmp_path, model, **copies)
    head = read_head("mtp", target)
    assert head.embed_tokens is target.model.embed_tokens
    assert head.lm_head is target.lm_head
    others = {name: one + 1 for name, one in copies.items()}
    head = read_head("mtp", with_modules(tmp_path, model, **others))
    torch.testing.assert_close(head.embed_tokens.weight, embedding + 1)
    torch.testing.assert_close(head.lm_head.weight, matrix + 1)


def test_shards_are_read_as_one_file_is(tmp_path):
    model = tiny_target("qwen2")
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    one = read_head("mtp", with_modules(tmp_path / "one", model, count=2))
    four = read_head("mtp", with_modules(tmp_path / "four", model, count=2, shards=4))
    for (name, weight), (other_name, other) in zip(one.named_parameters(), four.named_parameters(), strict=True):
        assert name == other_name
        assert weight.equal(other)


def test_a_target_that_is_loaded_by_its_path_is_read_once(tmp_path):
    with_modules(tmp_path, tiny_target("qwen3"))
    with pytest.warns(UserWarning, match="the head"):  # random modules fit nothing
        pair = sb.load(str(tmp_path), draft="mtp")
    assert isinstance(pair.draft, TrunkLM)
    assert pair.draft_model is None
    assert sb.load(pair.target_model, draft="mtp").draft is pair.draft
    with pytest.raises(BadSetting, match="the draft is a head"):
        sb.load(pair.target_model, draft="mtp", quantize_draft="int8")


def test_a_folder_called_mtp_is_given_as_a_path(speculators_target, tmp_path, monkeypatch):
    (tmp_path / "mtp").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "mtp" / file).write_bytes((GOLDEN / "mtp_speculators" / file).read_bytes())
    monkeypatch.chdir(tmp_path)
    for source in ("./mtp", Path("mtp")):
        assert isinstance(sb.load(speculators_target, draft=source, probe=False).draft.head, ModulesInARow)
    with pytest.raises(MissingFile, match=r'names none.*"./mtp" if that is its name'):
        sb.load(speculators_target, draft="mtp")


def test_custom_generate_takes_the_targets_own_modules(targets):
    target = targets["qwen3", 3]
    ids = torch.tensor([[3, 4, 5, 6]])
    options = {"num_beams": 3, "do_sample": True, "max_new_tokens": 8, "seed": 2, "num_return_sequences": 3}
    options |= {"eos_token_id": [], "pad_token_id": 0, "top_k": 0}
    sb.load(target, draft="mtp", probe=False)
    plain = target.generate(ids, custom_generate=sb.hf.beam_sampling, **options)
    with pytest.warns(UserWarning, match="the head"):
        found = target.generate(ids, custom_generate=sb.hf.dsbd, draft_model="mtp", **options)
    assert found.tolist() == plain.tolist()


def test_targets_without_modules_are_told_what_to_do(tmp_path):
    model = tiny_target("qwen3")
    with pytest.raises(MissingFile, match=r"this model object names none: load the target by its folder or hub id"):
        sb.load(model, draft="mtp")
    model.save_pretrained(tmp_path)
    message = r"holds no modules of multi-token prediction: none of its tensors is model\.layers\.2\.\*, mtp\.\*, .*; leave draft"
    with pytest.raises(BadHead, match=message):
        sb.load(loaded(tmp_path), draft="mtp")
    (tmp_path / "model.safetensors").unlink()
    model.name_or_path = str(tmp_path)
    with pytest.raises(MissingFile, match="holds no safetensors file"):
        read_head("mtp", model)
    model.name_or_path = str(tmp_path / "gone")
    with pytest.raises(MissingFile, match=r"from the files of the target: .*gone is neither a folder nor a repository"):
        read_head("mtp", model)


def stored(folder):
    return load_file(folder / "model.safetensors")


LAYER = "model.layers.2."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": [LAYER + "hnorm.weight"]}, r"module 0 has no tensor hnorm\.weight"),
        ({LAYER + "eh_proj.weight": torch.zeros(16, 16)}, r"model\.layers\.2\.eh_proj\.weight is \[16, 16\], and \[16, 32\] was expected"),
        ({LAYER + "enorm.weight": torch.zeros(7)}, r"enorm\.weight is \[7\], and \[16\] was expected"),
        ({LAYER + "mlp.up_proj.weight": torch.zeros(9, 16)}, r"mlp\.up_proj\.weight is \[9, 16\], and \[24, 16\] was expected"),
        ({"without": [LAYER + "mlp.up_proj.weight"]}, r"other tensors than the layers of Qwen3ForCausalLM have; it lacks mlp\.up_proj\.weight"),
        ({LAYER + "self_attn.sinks": torch.zeros(4)}, r"Qwen3ForCausalLM have; it has self_attn\.sinks"),
        ({LAYER + "eh_proj.weight": torch.zeros(16, 32, dtype=torch.int8)}, r"eh_proj\.weight is stored as int8; modules of rounded"),
        ({"model.layers.4.enorm.weight": torch.zeros(16)}, r"module 1 has no tensor enorm\.weight"),
        ({LAYER + "embed_tokens.weight": torch.zeros(5, 16)}, r"embed_tokens\.weight is \[5, 16\]"),
        ({"mtp.norm.weight": torch.zeros(16), "without": LAYER}, r"no modules .*though config|holds no modules"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_read_are_refused_by_name(change, message, tmp_path):
    model = tiny_target("qwen3")
    without = change.pop("without", ()) if isinstance(change, dict) else ()
    if isinstance(without, str):
        without = [
            without + name.split(".", 3)[3]
            for name in modules_in(
                {f"model.layers.1.{n}": w for n, w in model.model.layers[1].state_dict().items()}, "deepseek"
            )
        ]
    target = with_modules(tmp_path, model, without=without, **change)
    with pytest.raises(BadHead, match=message) as raised:
        read_head("mtp", target)
    assert str(tmp_path) in str(raised.value)


def test_targets_whose_layers_cannot_be_borrowed_are_refused(tmp_path):
    (tmp_path / "window").mkdir()
    with pytest.raises(
        BadHead, match="MistralAttention asks its attention for sliding_window, which heads cannot compute"
    ):
        read_head("mtp", with_modules(tmp_path / "window", tiny_target("window")))


def test_stated_modules_that_are_missing_are_named(tmp_path):
    model = tiny_target("glm", num_nextn_predict_layers=3)
    with pytest.raises(BadHead, match=r"num_nextn_predict_layers is 3 in config.json, and its files hold 1 modules"):
        read_head("mtp", with_modules(tmp_path, model))
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        BadHead, match=r"though config\.json states num_nextn_predict_layers 3: were they lost in a conversion"
    ):
        read_head("mtp", loaded(tmp_path))
    tensors = stored(tmp_path) | {"model.mtp_block.0.norm.weight": torch.ones(16)}
    with pytest.raises(BadHead, match=r"the name model\.mtp_block\.0\.norm\.weight is unknown"):
        read_head("mtp", written(tmp_path, tensors))


def test_an_expert_that_is_missing_is_named(tmp_path):
    model = tiny_target("glm")
    with pytest.raises(BadHead, match=r"lacks a tensor: mlp\.experts\.1\.up_proj\.weight"):
        read_head("mtp", with_modules(tmp_path, model, without=[LAYER + "mlp.experts.1.up_proj.weight"]))


def test_shards_that_are_missing_or_broken_are_named(tmp_path):
    target = with_modules(tmp_path, tiny_target("qwen3"), shards=3)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    held = {name: shard for shard in shards for name in load_file(shard)}
    shard = held[LAYER + "eh_proj.weight"]
    kept = shard.read_bytes()
    shard.write_bytes(b"no tensors")
    with pytest.raises(BadHead, match=f"{shard.name} cannot be read"):
        read_head("mtp", target)
    shard.unlink()
    with pytest.raises(MissingFile, match=f"holds no {shard.name}, which model.safetensors.index.json names"):
        read_head("mtp", target)
    shard.write_bytes(kept)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadHead, match=r"index\.json cannot be read: KeyError"):
        read_head("mtp", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer_layer_config": None}, "config.json has no transformer_layer_config"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2 in config.json; it must be 1"),
        (
            {"inner": {"model_type": "llama"}},
            "transformer_layer_config.model_type is 'llama' in config.json; it must be the target's, 'qwen3'",
        ),
        (
            {"inner": {"hidden_size": 24}},
            "transformer_layer_config.hidden_size is 24 in config.json; it must be the width of the target, 16",
        ),
        ({"tensors": {"extra": torch.ones(2)}}, "tensors that are not known: extra"),
        ({"tensors": {"mtp_layers.1.final_layernorm.weight": torch.ones(16)}}, "has 2 modules mtp_layers"),
    ],
)
def test_folders_of_speculators_that_cannot_be_read_are_refused_by_name(change, message, speculators_target, tmp_path):
    config = json.loads((GOLDEN / "mtp_speculators" / "config.json").read_text())
    tensors = load_file(GOLDEN / "mtp_speculators" / "model.safetensors") | change.get("tensors", {})
    config |= {name: one for name, one in change.items() if name not in ("inner", "tensors")}
    if "inner" in change:
        config["transformer_layer_config"] |= change["inner"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadHead, match=message) as raised:
        read_head(tmp_path, speculators_target)
    assert str(tmp_path) in str(raised.value)


def test_a_folder_that_names_no_drafts_holds_one_module(speculators_target, tmp_path):
    config = json.loads((GOLDEN / "mtp_speculators" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"speculators_config": None}))
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "mtp_speculators" / "model.safetensors").read_bytes())
    assert isinstance(read_head(tmp_path, speculators_target), PairTrunk)
    assert sorted(read_files(tmp_path).tensors)[0].startswith("mtp_layers.0.")
