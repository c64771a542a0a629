"""Heads of ours in the hands of speculators 0.9.0. The package is not needed otherwise: see docs/heads.md for how it is installed."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.lab.train import DrawPlan, Schedule, train_head
from specbeam.models.heads.trees import chain_of

speculators = pytest.importorskip("speculators", reason="speculators is not installed (docs/heads.md)")

PROMPTS = [[1 + number % 7, 2 + number % 5, 3 + number % 11] for number in range(60)]
ROWS = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """On disk, as speculators reads the target of a head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval()


def trained(kind, target, out, plan):
    """A head that was trained for a moment, as it is read again."""
    draws = DrawPlan(beams=2, max_new_tokens=6)
    schedule = Schedule(epochs=2, batch_tokens=200)
    train_head(kind, sb.load(target), PROMPTS, out, plan=plan, draws=draws, schedule=schedule)
    return sb.load(target, draft=out, probe=False).draft.head


def theirs(folder):
    """The same head, loaded by speculators, with attention that runs on a CPU."""
    model = speculators.SpeculatorModel.from_pretrained(str(folder))
    config = model.config
    config.transformer_layer_config._attn_implementation = "eager"
    eager = type(model)(config)
    eager.load_state_dict(model.state_dict())
    return eager.eval()


@pytest.mark.parametrize("plan", [{}, {"draft_vocab": 20, "layers": 2}])
def test_an_eagle3_head_of_ours_is_read(plan, target, tmp_path, monkeypatch):
    """Logits of rows on true features, and of the second and third draft behind each of them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    head = trained("eagle3", target, tmp_path / "head", plan)
    model = theirs(tmp_path / "head")
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, 48, generator=generator)
    ids = torch.randint(0, 32, (ROWS,), generator=generator)
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    with torch.no_grad():
        model(
            hidden_states=states[None], input_ids=ids[None], document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            position_ids=torch.arange(1, ROWS + 1)[None], ttt_steps=3,
        )  # fmt: skip
        handle.remove()
        rows = torch.cat([states, torch.zeros(1, 48)]).chunk(3, -1)
        trees = chain_of(torch.cat([torch.tensor([0]), ids]), dict(zip(head.taps, rows, strict=True)))
        ours = head.drafts(trees, 3, torch.ones_like(trees.tokens, dtype=torch.bool))
    for step in range(3):
        found = ours[step].logits
        torch.testing.assert_close(seen[step][: len(found)], found, atol=1e-6, rtol=1e-6)
    if head.tokens is not None:
        np.testing.assert_array_equal(model.d2t + torch.arange(20), head.tokens)


@pytest.mark.parametrize("plan", [{}, {"draft_vocab": 20, "layers": 1, "depth": 3}])
def test_a_peagle_head_of_ours_is_read(plan, target, tmp_path, monkeypatch):
    """Logits of the rows of pairs, and of mask rows below the tokens that speculators chooses."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    head = trained("peagle", target, tmp_path / "head", plan)
    model = theirs(tmp_path / "head")
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, 48, generator=generator)
    ids = torch.randint(0, 32, (ROWS,), generator=generator)
    logits = []
    places = []
    handle = model.lm_head.register_forward_hook(lambda module, given, output: logits.append(output[0]))
    chosen = core.generate_cod_sample_indices

    def kept(**options):
        places.append(chosen(**options))
        return places[-1]

    monkeypatch.setattr(core, "generate_cod_sample_indices", kept)
    with torch.no_grad():
        model(
            hidden_states=states[None], input_ids=ids[None], document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, ROWS, 16), loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=head.rows, down_sample_ratio=1.0, down_sample_ratio_min=1.0,
        )  # fmt: skip
        handle.remove()
        rows = torch.cat([states, torch.zeros(1, 48)]).chunk(3, -1)
        trees = chain_of(torch.cat([torch.tensor([0]), ids]), dict(zip(head.taps, rows, strict=True)))
        ours = head.drafts(trees, head.rows, torch.ones_like(trees.tokens, dtype=torch.bool))
    compared = 0
    for anchor, far, row in zip(places[0][0].tolist(), places[0][1].tolist(), logits[0], strict=True):
        if anchor >= 0:
            at = ours[far].nodes.tolist().index(anchor + 1 + far)
            torch.testing.assert_close(row, ours[far].logits[at], atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared > 2 * ROWS


@pytest.mark.parametrize("plan", [{}, {"draft_vocab": 20, "layers": 1, "depth": 3}])
def test_a_dspark_head_of_ours_is_read(plan, target, tmp_path, monkeypatch):
    """Logits and confidences of all rows of the blocks below roots that speculators chooses."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    head = trained("dspark", target, tmp_path / "head", plan)
    model = theirs(tmp_path / "head")
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, ROWS, 48, generator=generator)
    ids = torch.randint(1, 32, (1, ROWS), generator=generator)
    mask = torch.ones(1, ROWS)
    mask[:, 0] = 0
    with torch.no_grad():
        hidden, base, _, _, places = model._backbone_forward(
            states, ids, mask, torch.zeros(1, ROWS, 16), torch.zeros(1, ROWS, dtype=torch.long), max_anchors=3
        )
        shape = (3, model.block_size, -1)
        above = ids[0, places].view(*shape[:2])
        bias = model.markov_head.block_bias(prev_token_ids=above, hidden_states=hidden.view(shape))
        logits = base.view(shape) + bias
        read = torch.cat([hidden.view(shape), model.markov_head.prev_embeddings(above)], -1)
        confidence = model.confidence_head(read)
        trees = chain_of(ids[0], dict(zip(head.taps, states[0].chunk(3, -1), strict=True)))
        ours = head.drafts(trees, head.shape.depth, torch.ones_like(trees.tokens, dtype=torch.bool))
    for block, root in enumerate(places.view(3, -1)[:, 0].tolist()):
        for deep, rows in enumerate(ours):
            at = rows.nodes.tolist().index(root + deep)
            torch.testing.assert_close(logits[block, deep], rows.logits[at], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(confidence[block, deep], rows.confidence[at], atol=1e-6, rtol=1e-5)
