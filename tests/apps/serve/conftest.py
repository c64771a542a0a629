"""A tiny pair, which many tests of the engine and the server share: passes cost next to nothing."""

import pytest

from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import BUNDLED, Pair
from tests.support.tiny_models import tiny

CHUNK = 16
LONG = [(5 * place + 3) % 60 for place in range(100)]
SHORT = {"max_new_tokens": 12, "eos_token_id": []}


def pair_on(engine):
    models = [tiny("llama", seed=seed, vocab_size=64) for seed in (1, 2)]
    return Pair(*models, None, *[HuggingFaceLM(model, chunk=CHUNK, engine=engine, share_from=None) for model in models])


@pytest.fixture(scope="session", params=["plain", "compiled"])
def pair(request):
    return pair_on(request.param)


@pytest.fixture(scope="session")
def worded():
    """The tiny models with the words of the bundled pair, and what the library itself answers with them."""
    folder = BUNDLED / "target"
    if not folder.is_dir():
        pytest.skip("the bundled pair is not in this checkout")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = [tiny("llama", seed=seed, vocab_size=len(tokenizer)) for seed in (1, 2)]
    lms = [HuggingFaceLM(model, chunk=CHUNK, engine="compiled", share_from=None) for model in models]
    return Pair(*models, tokenizer, *lms)
