"""The doors of the forward for GPUs: on one where there is one, otherwise in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from specbeam.core.forest import Forest
from specbeam.core.records import Needs
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.seats import check_rows_and_settle, seat
from tests.support.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def model():
    return tiny("llama").to(DEVICE)


def test_rows_of_sessions_that_share_are_those_of_their_paths(model):
    lm = HuggingFaceLM(model, 5, "gpu", share_from=4)
    rng = np.random.default_rng(1)
    beginning = list(range(20, 29))
    seats = [seat([*beginning, *rng.integers(0, 61, 2).tolist()]) for _ in range(3)]
    for turn_number in range(4):
        check_rows_and_settle(lm, model, rng, seats, [3] * len(seats), 3e-4)
        assert len(lm.caches) == len(seats)
        if turn_number == 1:  # who stored what they share leaves
            lm.close(seats.pop(0))


def test_ranked_rows_are_made_of_logits(model):
    lm, one = HuggingFaceLM(model, engine="gpu"), seat([3, 4])
    (found,) = lm.extend([one], [Forest.rooted([4])], [Needs(logits=True, ranked=3)])
    assert found.ranked.tokens.tolist() == found.logits.topk(3).indices.sort().values.tolist()


def test_what_no_engine_has_is_refused(model):
    lm = HuggingFaceLM(model, engine="gpu")
    root = Forest.rooted([4])
    with pytest.raises(NotSupported, match="LlamaForCausalLM has 2 layers, so taps are numbers from 0 to 2"):
        lm.extend([seat([3, 4])], [root], [Needs(taps=(3,))])
    with_context = seat([3, 4])
    with_context.context = {lm: {"encoder_hidden_states": torch.zeros(1, 2, 32)}}
    with pytest.raises(NotSupported, match="encoder_hidden_states, which LlamaForCausalLM does not take"):
        lm.extend([with_context], [root])
    assert lm.caches == []
    assert lm.engine == "gpu"
