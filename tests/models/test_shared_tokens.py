"""Draft models with another number of tokens than their target, or that draft few: rows of its tokens, by every engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbeam.core.forest import Forest
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from tests.support.quick import once_each
from tests.support.steps import needs_numba
from tests.support.tiny_models import NO_SDPA, tiny

COMPILED = [pytest.param(engine, marks=needs_numba) for engine in ("compiled", "int8", "int4")]
OWN = 61
PROMPT = [7, 63, 5, 60, 2, 66, 9]
FOREST = Forest.rooted([9]).grown([62, 3, 61, 58, 5, 67], [0, 0, 1, 2, 3, 3])
SIZES = {"padded": 68, "cut": 50, "few": 69}
BELOW = {69: 21}  # by size: the number of tokens of which some are drafted
DEEP = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # for groups of int4


def shared_of(vocab, without=()):
    known = np.arange(vocab) < OWN
    known[list(without)] = False
    return SharedTokens(known, 3, BELOW.get(vocab))


def within(tokens, vocab):
    return [token % vocab for token in tokens]


def rows_of(lm, prompt, forest):
    owner = SimpleNamespace(prompt=list(prompt), state={}, context={})
    try:
        return lm.extend([owner], [forest])[0].logits.clone()
    finally:
        lm.close(owner)


def check_rows(lm, alone, shared):
    """The rows are those of the same engine on its own tokens, in the places of the target's."""
    vocab = shared.vocab
    assert lm.vocab == vocab
    prompt = within(PROMPT, vocab)
    tokens = np.array(within(FOREST.tokens.tolist(), vocab))
    found = rows_of(lm, prompt, FOREST._replace(tokens=tokens))
    own = rows_of(alone, shared.read(np.array(prompt)).tolist(), FOREST._replace(tokens=shared.read(tokens)))
    assert found.shape == (FOREST.size, vocab)
    drafted = torch.from_numpy(shared.drafted)
    both = min(vocab, OWN)
    torch.testing.assert_close(found[:, :both][:, drafted[:both]].float(), own[:, :both][:, drafted[:both]].float())
    assert (found[:, ~drafted] == -torch.inf).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", [*COMPILED, "layers", "plain"])
def test_every_engine_has_a_row_of_the_targets_tokens(engine, size):
    model = tiny("llama", **DEEP)
    for without in ((), (4, 11)):
        shared = shared_of(SIZES[size], without)
        check_rows(HuggingFaceLM(model, engine=engine, shared=shared), HuggingFaceLM(model, engine=engine), shared)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_what_torch_compiles_has_such_rows_too(size):
    model = tiny("llama")
    shared = shared_of(SIZES[size])
    check_rows(HuggingFaceLM(model, engine="torch", shared=shared), HuggingFaceLM(model, engine="plain"), shared)


@needs_numba
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "family", ["gemma2", "granite", "gpt2", "qwen3", "opt-350m", pytest.param("mixtral", marks=pytest.mark.slow)]
)
def test_families_with_caps_divisors_and_places_keep_theirs(family, size):
    model = tiny(family)
    shared = shared_of(SIZES[size], (4,))
    lm = language_model(model, shared=shared)
    assert lm.engine == "compiled"
    check_rows(lm, HuggingFaceLM(model, engine="compiled"), shared)
    check_rows(HuggingFaceLM(model, engine="plain", shared=shared), HuggingFaceLM(model, engine="plain"), shared)


@pytest.mark.parametrize(("family", "size"), once_each(["llama", "gemma2", "gpt2", "opt-350m"], SIZES))
def test_the_forward_for_gpus_has_such_rows_in_the_interpreter(family, size):
    pytest.importorskip("triton")
    model = tiny(family, attention="eager" if family in NO_SDPA else None)
    shared = shared_of(SIZES[size], (4,))
    check_rows(HuggingFaceLM(model, engine="gpu", shared=shared), HuggingFaceLM(model, engine="gpu"), shared)


@pytest.mark.parametrize("engine", [*COMPILED[:2], "plain"])
def test_such_a_model_is_checked_on_a_token_tree(engine):
    model = tiny("llama")
    for size in SIZES.values():
        check_scores_forests(HuggingFaceLM(model, engine=engine, shared=shared_of(size)))


@needs_numba
def test_several_sessions_have_such_rows_side_by_side():
    model = tiny("llama")
    shared = shared_of(68)
    for engine in ("compiled", "plain"):
        lm = HuggingFaceLM(model, engine=engine, shared=shared)
        prompts = [[7, 63, 5], [66], [1, 2, 67, 65, 9]]
        owners = [SimpleNamespace(prompt=prompt, state={}, context={}) for prompt in prompts]
        forests = [Forest.rooted([prompt[-1]]).grown([62, 4], [0, 1]) for prompt in prompts]
        together = [scored.logits.clone() for scored in lm.extend(owners, forests)]
        for owner in owners:
            lm.close(owner)
        for found, prompt, forest in zip(together, prompts, forests, strict=True):
            torch.testing.assert_close(found, rows_of(lm, prompt, forest))


@needs_numba
def test_a_token_that_the_target_lacks_is_an_error():
    lm = HuggingFaceLM(tiny("llama"), engine="compiled", shared=shared_of(68))
    with pytest.raises(IndexError):
        rows_of(lm, [1, 68], Forest.rooted([68]))
    with pytest.raises(IndexError):
        rows_of(HuggingFaceLM(tiny("llama"), engine="plain", shared=shared_of(68)), [1, 68], Forest.rooted([68]))
