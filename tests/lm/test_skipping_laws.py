"""Texts of a target that drafts without some of its sublayers have the law of plain sampling, counted on two families."""

from collections import Counter
from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.decode import decode
from specbeam.lm.skipping import Skipping, skipping_model
from specbeam.lm.sublayers import Sublayers
from specbeam.options.settings import Settings
from specbeam.request import Request
from tests.support.tiny_models import tiny
from tests.test_laws_on_models import END, LENGTH, PROMPT, p_value, plain_law, softened

SKIPPED = Sublayers((1,), (2,))
LAWS = {
    "chain": lambda: sb.swift(SKIPPED, siblings=False, depth=2, controller="fixed"),
    "chain by a coin": lambda: sb.swift(SKIPPED, siblings=False, depth=3, controller="beta_ts"),
    "siblings": lambda: sb.swift(SKIPPED, depth=3),
    "matched": lambda: sb.swift(SKIPPED, siblings=False, depth=2, rule="match"),
    "tree": lambda: sb.rsd_c((2, 2)),
    "one beam by rejection": lambda: sb.dsbd(1, 3, 2, coupling="rejection"),
}
SETTINGS = {"plain": {}, "cold": {"temperature": 0.7, "top_p": 0.9, "top_k": 3}}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_without_sublayers_have_the_law_of_plain_sampling(family):
    check_laws(family, "cold", draws=40)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_without_sublayers_have_the_law_of_plain_sampling_closely(family, setting):
    check_laws(family, setting, draws=20_000)


def check_laws(family, setting, draws):
    small = {"vocab_size": 6, "eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0}
    layers = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    pair = sb.load(softened(tiny(family, seed=3, **small, **layers)))
    pair = replace(pair, draft=skipping_model(pair.target, Skipping(SKIPPED)))
    settings = SETTINGS[setting]
    law = plain_law(pair, settings)
    values = {}
    for place, (name, make) in enumerate(LAWS.items()):
        request = Request(pair, [PROMPT] * draws, make(), Settings(max_new_tokens=LENGTH, **settings), 11 + place)
        for _ in decode(pair.target, request.sessions, at_once=200):
            pass
        counts = Counter(tuple(next(one.hypotheses()).tokens) for one in request.sessions)
        values[name] = p_value(counts, law)
    assert min(values.values()) > 1e-3, values
