"""A grown model has more weights and the same function."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import specbeam as sb
from specbeam.doors.cli.widening import GrownSizes, grown_pair
from specbeam.engines.families import head_size
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.bench.widen_head import grown_head
from specbeam.lab.bench.widen_model import Size, grown, size_for, with_positions
from specbeam.lab.bench.widen_vocabulary import SHIFT, with_words
from specbeam.lab.train.head_files import write_head
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.head import Head
from specbeam.models.heads.own import extra_rows_config
from specbeam.models.heads.trees import chain_of
from specbeam.models.pair import BUNDLED
from tests.support.extra_rows import extra_head
from tests.support.tiny_models import tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-window", "qwen3")


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change", [{"layers": 2}, {"inner": 3}, {"heads": 2, "kv_heads": 2}, {"hidden": 2}, {"hidden": 3}]
)
def test_the_function_stays(family, change):
    model = tiny(family)
    own = Size.of(model.config)
    size = Size(**{name: getattr(own, name) * change.get(name, 1) for name in vars(own)})
    large = grown(model, size)
    assert large.num_parameters() > model.num_parameters()
    assert Size.of(large.config) == size
    ids = torch.randint(0, model.config.vocab_size, (3, 20), generator=torch.manual_seed(0))
    torch.testing.assert_close(logits(large, ids), logits(model, ids), atol=2e-5, rtol=1e-4)


def test_a_head_of_its_own_is_kept_whatever_the_config_says(tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    other = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(7))
    model.lm_head.weight = torch.nn.Parameter(other * model.lm_head.weight.std())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    own = Size.of(loaded.config)
    ids = torch.randint(0, loaded.config.vocab_size, (3, 20), generator=torch.manual_seed(0))
    expected = logits(loaded, ids)
    large = grown(loaded, replace(own, hidden=2 * own.hidden, layers=own.layers + 1))
    torch.testing.assert_close(logits(large, ids), expected, atol=2e-5, rtol=1e-4)
    wider = with_words(loaded, 4 * loaded.config.vocab_size)
    own_words = slice(loaded.config.vocab_size)
    torch.testing.assert_close(logits(wider, ids)[..., own_words], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("short", [True, False])
def test_numbers_are_as_short_as_those_of_the_model(short):
    model = tiny("llama")
    if short:
        model = model.bfloat16().float()
    own = Size.of(model.config)
    large = grown(model, Size(own.hidden * 2, own.layers + 1, own.inner * 2, own.heads * 2, own.kv_heads * 2))
    linears = [one.weight for one in large.modules() if isinstance(one, torch.nn.Linear)]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in linears) == short


@pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="needs the bundled pair")
def test_a_number_of_parameters_becomes_a_usual_shape():
    bundled = sb.load("bundled")
    size = size_for(bundled.target_model, 100_000_000)
    model = grown(bundled.target_model, size)
    assert abs(model.num_parameters() - 100e6) < 10e6
    assert 512 <= size.hidden <= 1280
    assert 10 <= size.layers <= 24
    ids = bundled.tokenizer("Ein Hund läuft über die Straße.", return_tensors="pt").input_ids
    torch.testing.assert_close(logits(model, ids), logits(bundled.target_model, ids), atol=1e-3, rtol=1e-4)


def test_a_number_little_above_the_own_is_not_ignored():
    model = tiny("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    own = Size.of(model.config)
    has = own.parameters(head_size(model.config), model.config.vocab_size, tied=False)
    assert size_for(model, has) == own
    for times in (1.1, 1.2):
        large = grown(model, round(times * has))
        assert large.num_parameters() == pytest.approx(times * model.num_parameters(), rel=0.06)
    with pytest.raises(BadSetting, match=f"the model has {has:,}, and the next larger size {has + 3 * 3 * 256 * 64:,}"):
        grown(model, has + 1000)


def test_a_model_does_not_shrink():
    model = tiny("llama")
    own = Size.of(model.config)
    with pytest.raises(BadSetting, match="must be at least the model's own"):
        grown(model, Size(own.hidden, own.layers - 1, own.inner, own.heads, own.kv_heads))
    with pytest.raises(BadSetting, match="already"):
        grown(model, 10)
    with pytest.raises(BadSetting, match="key-value heads"):
        grown(model, Size(own.hidden, own.layers, own.inner, own.heads * 2, own.kv_heads))


def test_other_families_are_refused():
    with pytest.raises(NotSupported, match="gpt2"):
        grown(tiny("gpt2"), 10**7)


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gpt_neox"])
def test_more_positions_leave_the_function_as_it_is(family):
    model = tiny(family)
    known = sb.load(model).target
    longer = with_positions(model, 400)
    assert model.config.max_position_embeddings == 256
    assert {id(one) for one in longer.parameters()} == {id(one) for one in model.parameters()}
    lm = sb.load(longer).target
    assert (known.max_positions, lm.max_positions) == (256, 400)
    ids = torch.randint(0, model.config.vocab_size, (1, 390), generator=torch.manual_seed(0))
    assert torch.equal(logits(longer, ids[:, :256]), logits(model, ids[:, :256]))
    assert logits(longer, ids).isfinite().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "gpt2"},
        {"family": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ],
)
def test_positions_that_do_not_go_on_by_themselves_are_refused(changes):
    with pytest.raises(NotSupported, match=r"cannot get 400 positions: its own are (not rotary|dynamic)"):
        with_positions(tiny(**changes), 400)


def test_a_model_of_a_shorter_type_grows_in_it_and_keeps_its_angles():
    model = tiny("llama").to(torch.bfloat16)
    model.model.rotary_emb.inv_freq = tiny("llama").model.rotary_emb.inv_freq  # as a checkpoint that is loaded has them
    large = grown(model, Size(64, 3, 96, 8, 4))
    assert {one.dtype for one in large.parameters()} == {torch.bfloat16}
    assert torch.equal(large.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    path = torch.tensor([[3, 4, 5, 6]])
    before, after = model(path).logits.float(), large(path).logits.float()
    assert (before - after).abs().max() < 0.1 * before.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("short", [True, False])
def test_more_words_change_no_probability(family, short):
    """New words are copies whose logits lie at least 30 lower; models of bfloat16 numbers stay such."""
    model = tiny(family)
    if short:  # weights only: rotary frequencies stay float32
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
    own = model.config.vocab_size
    large = with_words(model, own + 300)
    ids = torch.randint(0, own, (3, 20), generator=torch.manual_seed(1))
    before, after = logits(model, ids), logits(large, ids)
    assert after.shape[-1] == own + 300 == large.config.vocab_size
    torch.testing.assert_close(after.log_softmax(-1)[..., :own], before.log_softmax(-1), atol=1e-4, rtol=1e-4)
    highest = after[..., own:].amax(-1)
    assert (highest <= after[..., :own].amax(-1) - SHIFT).all()
    assert after[..., own:].std(-1).min() > 0.5 * after[..., :own].std(-1).min()
    linears = [one.weight for one in large.modules() if isinstance(one, torch.nn.Linear | torch.nn.Embedding)]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in linears) == short
    tied = model.config.tie_word_embeddings
    assert (large.lm_head.weight.data_ptr() == large.model.embed_tokens.weight.data_ptr()) == tied


def test_a_model_with_more_words_grows_further():
    model = tiny("llama")
    large = with_words(model, 200)
    own = Size.of(large.config)
    larger = grown(large, Size(own.hidden * 2, own.layers + 2, own.inner * 2, own.heads, own.kv_heads))
    ids = torch.randint(0, model.config.vocab_size, (2, 10), generator=torch.manual_seed(1))
    found = logits(larger, ids).log_softmax(-1)[..., : model.config.vocab_size]
    torch.testing.assert_close(found, logits(model, ids).log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_a_vocabulary_does_not_shrink():
    with pytest.raises(BadSetting, match="the model has 61 already"):
        with_words(tiny("llama"), 60)


@pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="needs the bundled pair")
def test_texts_of_a_pair_with_more_words_are_the_same():
    from specbeam.doors.cli.widening import GrownSizes, grown_pair

    small, large = sb.load("bundled"), grown_pair("bundled", None, GrownSizes(grow_vocab="9K"))
    assert large.target.vocab == large.draft.vocab == 9000
    prompts = ["Ein Hund läuft über die Straße.", "Wo ist mein Hut?"]
    for method in (sb.dsbd(4), sb.speculative_sampling(4), sb.beam_search(3)):
        warp = {} if method.greedy else {"top_k": 20}
        before, after = (sb.generate(pair, prompts, method, seed=2, **warp) for pair in (small, large))
        assert [one.text for one in before] == [one.text for one in after]


def heads_of(model):
    """A head of each kind that grows, none of whose weights is special."""
    exit_head = ExitHead(model, 1)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in exit_head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return [exit_head, extra_head(model, "bita"), extra_head(model, "hidden_transfer")]


@pytest.mark.parametrize("number", range(3), ids=["exit layer", "bita", "hidden transfer"])
def test_a_head_that_grows_with_its_target_drafts_the_same(number):
    model = tiny("llama")
    own = Size.of(model.config)
    size = Size(own.hidden * 2, own.layers + 2, own.inner * 2, own.heads * 2, own.kv_heads * 2)
    head = heads_of(model)[number]
    larger = grown_head(head, grown(model, size))
    tokens = torch.randint(0, model.config.vocab_size, (7,), generator=torch.manual_seed(1))
    trees = chain_of(tokens, {})
    everywhere = torch.ones(1, 7, dtype=torch.bool)
    with torch.no_grad():
        found = larger.drafts(trees, 3, everywhere)
        expected = head.drafts(trees, 3, everywhere)
    assert len(found) == len(expected) > 0
    for rows, others in zip(found, expected, strict=True):
        assert rows.nodes.tolist() == others.nodes.tolist()
        torch.testing.assert_close(rows.logits, others.logits, atol=3e-4, rtol=1e-4)
    with pytest.raises(NotSupported, match="Head does not grow with its target; exit, BiTA"):
        grown_head(Head(), model)


@pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="needs the bundled pair")
def test_the_command_line_grows_a_head_with_its_target(tmp_path):
    """The same beams are drafted for, by rows of the large target; what changes words or a draft model is refused."""
    small = sb.load("bundled")
    head = extra_head(small.target_model, "hidden_transfer")
    write_head(head, extra_rows_config(head), tmp_path, small.target_model)
    pair = grown_pair("bundled", str(tmp_path), GrownSizes("12M"))
    assert pair.target_model.num_parameters() > 10e6
    assert pair.draft.head.target is pair.target_model
    options = {"seed": 1, "max_new_tokens": 6}
    (beams,) = sb.generate(pair, "Ein Hund", sb.dsbd(2, 3, 2), **options)
    (plain,) = sb.generate(pair, "Ein Hund", sb.beam_sampling(2), **options)
    assert beams.tokens == plain.tokens
    assert beams.report.draft_passes > 0
    for refused in ({"grow_draft": "9M"}, {"grow_vocab": "8K"}):
        with pytest.raises(BadSetting, match="the draft is a head, which has the target's size and vocabulary"):
            grown_pair("bundled", str(tmp_path), GrownSizes("12M", **refused))
