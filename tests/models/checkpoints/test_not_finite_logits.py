"""Models whose logits are not finite: errors say so, at load and while decoding, and name the model; others decode on."""

import pytest
import torch

import specbeam as sb
from specbeam.errors import BrokenLaw, SomeFailed
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

NAN = float("nan")
BROKEN = 50  # a token
METHODS = {
    "greedy": sb.greedy,
    "beam_search": lambda: sb.beam_search(3),
    "sampling": sb.sampling,
    "beam_sampling": lambda: sb.beam_sampling(3),
    "dsbd": lambda: sb.dsbd(3),
    "speculative_sampling": sb.speculative_sampling,
    "speculative_beam_search": lambda: sb.speculative_beam_search(3),
    "prompt_lookup": sb.prompt_lookup,
}
DRAFTING = {
    "dsbd": lambda: sb.dsbd(3, depth=2),
    "speculative_beam_search": lambda: sb.speculative_beam_search(3, depth=2),
    "speculative_sampling": lambda: sb.speculative_sampling(2),
    "rsd_s": lambda: sb.rsd_s(2, 2),
    "traversal": sb.traversal,
    "opt_tree": lambda: sb.opt_tree(controller="fixed"),
}


def made(engine, **more):
    """A tiny model that this engine runs."""
    return tiny("phi", tie_word_embeddings=False, **more) if engine == "plain" else tiny("llama", **more)


def with_broken_token(model, value=NAN):
    """The model, which makes NaN of one token, and of no other: nothing is to be seen when it is loaded."""
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN, 3] = value
    return model


def with_broken_head(model, value=NAN):
    with torch.no_grad():
        model.get_output_embeddings().weight[BROKEN, 3] = value
    return model


def texts_of(pair, prompts, method=None):
    options = {"max_new_tokens": 4, "seed": 1, "eos_token_id": []}
    return [one.tokens for one in sb.generate(pair, prompts, method or sb.greedy(), **options)]


@pytest.fixture(scope="module", params=["compiled", "plain"])
def broken_targets(request):
    engine = request.param
    return [sb.load(with_broken_token(made(engine), value), made(engine, seed=2)) for value in (NAN, torch.inf)]


@pytest.mark.parametrize("name", METHODS)
def test_a_token_whose_row_is_not_finite_is_an_error_in_every_method(name, broken_targets):
    for pair in broken_targets:
        with pytest.raises(BrokenLaw, match=r"the model returned NaN logits"):
            texts_of(pair, [[1, BROKEN, 6]], METHODS[name]())


@pytest.mark.parametrize("engine", ["compiled", "plain"])
@pytest.mark.parametrize("name", DRAFTING)
def test_a_draft_whose_row_is_not_finite_is_named(name, engine):
    pair = sb.load(made(engine), with_broken_token(made(engine, seed=2)))
    with pytest.raises(BrokenLaw, match=r"draft model: the model returned NaN"):
        texts_of(pair, [[1, BROKEN, 6]], DRAFTING[name]())


@pytest.mark.parametrize("engine", ["compiled", "plain"])
@pytest.mark.parametrize("value", [NAN, torch.inf, -torch.inf])
def test_load_says_that_logits_are_not_finite_and_in_which_weight(value, engine):
    with pytest.raises(
        BrokenLaw, match=r"logits of \w+ForCausalLM are (NaN|infinite) .* lm_head\.weight holds"
    ) as raised:
        sb.load(with_broken_head(made(engine), value))
    assert "honour" not in str(raised.value)
    with pytest.raises(BrokenLaw, match=r"logits of the draft model \w+ForCausalLM are (NaN|infinite)"):
        sb.load(made(engine), with_broken_head(made(engine), value))


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("value", [NAN, torch.inf])
def test_weights_that_are_not_finite_are_not_rounded(value, rounding):
    wide = {"intermediate_size": 64}
    with pytest.raises(BrokenLaw, match=rf"cannot be rounded to {rounding}: its weight lm_head\.weight holds"):
        sb.load(with_broken_head(tiny("llama", **wide), value), quantize=rounding)
    with pytest.raises(BrokenLaw, match="the draft model"):
        sb.load(tiny("llama", **wide), with_broken_head(tiny("llama", **wide), value), quantize_draft=rounding)


@pytest.mark.parametrize("part", ["encoder.layers.0.fc1", "decoder.layers.1.fc2"])
@pytest.mark.parametrize("family", ["marian", "whisper"])
def test_load_says_it_of_models_that_read_sources(family, part):
    model = tiny_reader(family)
    with torch.no_grad():
        model.get_parameter(f"model.{part}.weight")[1, 1] = NAN
    with pytest.raises(BrokenLaw, match=rf"NaN.*{part}\.weight holds NaN"):
        sb.load(model)
    with pytest.raises(BrokenLaw, match=r"the draft model \w+"):
        sb.load(tiny_reader(family), model)


def test_a_model_that_never_writes_some_tokens_is_loaded():
    """Their logits are -inf, whatever comes before."""
    model = tiny("phi", tie_word_embeddings=False)
    forward = model.forward

    def never(*args, **kwargs):
        found = forward(*args, **kwargs)
        found.logits[..., 7] = -torch.inf
        return found

    model.forward = never
    pair = sb.load(model)
    assert pair.target.engine == "plain"
    assert 7 not in texts_of(pair, [[1, 4, 7]])[0]


@pytest.mark.parametrize("engine", ["compiled", "plain"])
def test_a_text_that_fails_leaves_nothing_to_those_after_it(engine):
    """Its keys and values are NaN, in slots that later texts get."""
    good = [[1, 4], [3, 9, 9, 2, 5, 11]]
    bad = [1, *[BROKEN] * 20]
    pair = sb.load(with_broken_token(made(engine)), made(engine, seed=2))
    methods = [sb.greedy(), sb.speculative_sampling(2), sb.beam_search(2)]
    before = [texts_of(pair, [prompt], method) for method in methods for prompt in good]
    for method in methods:
        with pytest.raises(SomeFailed):
            texts_of(pair, [bad, bad[:9]], method)
    assert [texts_of(pair, [prompt], method) for method in methods for prompt in good] == before


def test_a_text_that_fails_does_not_end_those_at_its_side():
    pair = sb.load(with_broken_token(tiny("llama")))
    good = [[1, 4], [3, 9, 9, 2, 5, 11]]
    alone = [texts_of(pair, [prompt])[0] for prompt in good]
    with pytest.raises(SomeFailed) as raised:
        texts_of(pair, [good[0], [1, BROKEN, 6], good[1]])
    found = [one and one.tokens for one in raised.value.generations]
    assert found == [alone[0], None, alone[1]]


def test_costs_are_measured_though_a_model_cannot_decode_made_up_texts():
    """Which begin with the token 0; the prompts that come may do without it."""
    target = tiny("llama")
    with torch.no_grad():
        target.get_input_embeddings().weight[0, 3] = NAN
    pair = sb.load(target, tiny("llama", seed=2), check=False)
    parts = sb.speculative_beam_search(2).parts(pair.target, pair.draft)
    assert parts.controller is not None
