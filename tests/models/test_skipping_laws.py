"""Texts of a target that drafts without some of its sublayers have the law of plain sampling, counted on two families."""

from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.models.skipping import Skipping, skipping_model
from specbeam.models.sublayers import Sublayers
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny
from tests.test_laws_on_models import END, check_each, softened

SKIPPED = Sublayers((1,), (2,))
LAWS = {
    "chain": sb.swift(SKIPPED, siblings=False, depth=2, controller="fixed"),
    "chain by a coin": sb.swift(SKIPPED, siblings=False, depth=3, controller="beta_ts"),
    "siblings": sb.swift(SKIPPED, depth=3),
    "matched": sb.swift(SKIPPED, siblings=False, depth=2, rule="match"),
    "tree": sb.rsd_c((2, 2)),
    "one beam by rejection": sb.dsbd(1, 3, 2, coupling="rejection"),
}
SETTINGS = {"plain": {}, "cold": {"temperature": 0.7, "top_p": 0.9, "top_k": 3}}


@needs_numba
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_without_sublayers_have_the_law_of_plain_sampling(family):
    check_laws(family, "cold", draws=40)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@needs_numba
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_without_sublayers_have_the_law_of_plain_sampling_closely(family, setting):
    check_laws(family, setting, draws=20_000)


def check_laws(family, setting, draws):
    small = {"vocab_size": 6, "eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0}
    layers = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    pair = sb.load(softened(tiny(family, seed=3, **small, **layers)))
    pair = replace(pair, draft=skipping_model(pair.target, Skipping(SKIPPED)))
    check_each(pair, LAWS, SETTINGS[setting], draws)
