"""Whole texts from tiny Transformers, all methods mixed in one batch, against plain sampling enumerated from the model."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.doors.options.processors import TextFacts
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from tests.oracles.laws import warpers_of
from tests.support.tiny_models import tiny

SETTINGS = {"plain": {}, "cold": {"temperature": 0.5}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.8}}
RECIPES = {
    "speculative_sampling": lambda draft: sb.speculative_sampling(2),
    "confidence": lambda draft: sb.speculative_sampling(3, controller="confidence"),
    "thompson": lambda draft: sb.speculative_sampling(3, controller="thompson"),
    "block_verification": lambda draft: sb.block_verification(2),
    "specinfer": lambda draft: sb.specinfer((2, 2)),
    "rsd_c": lambda draft: sb.rsd_c((2, 2)),
    "rsd_s": lambda draft: sb.rsd_s(3, 2),
    "sequoia": lambda draft: sb.sequoia(5, 2),
    "spechub": lambda draft: sb.spechub(2),
    "traversal": lambda draft: sb.traversal((2, 2)),
    "traversal on rsd_s": lambda draft: sb.rsd_s(3, 2, rule="traversal"),
    "multi_draft": lambda draft: sb.multi_draft([draft], (1, 1)),
    "dyspec": lambda draft: sb.dyspec(5, 3),
    "survival": lambda draft: sb.speculative_sampling(3, controller="survival"),
    "a tree that stops": lambda draft: sb.rsd_c((2, 2), "traversal", "confidence"),
    "a tree by cost": lambda draft: sb.specinfer((2, 1, 1), controller="cost"),
    "opt_tree, path": lambda draft: sb.opt_tree(4, 2, 3, rule="path", controller="survival"),
    "opt_tree": lambda draft: sb.opt_tree(4, 2, 3),
    "gsd": lambda draft: sb.gsd(2, 2, nodes=8),
    "propd, traversal": lambda draft: sb.propd(4, 2, 1, 3, rule="traversal"),
    "propd": lambda draft: sb.propd(4, 2, 1, 3),
    "prompt_lookup": lambda draft: sb.prompt_lookup(3),
    "suffix_match": lambda draft: sb.suffix_match(3),
    "token_recycling": lambda draft: sb.token_recycling(2),
    "dsbd, one beam": lambda draft: sb.dsbd(1, 3, 2, "fixed"),
    "sampling": lambda draft: sb.sampling(),
}
PROMPT, LENGTH, END = [1, 2, 3, 2], 3, 5


@pytest.fixture(scope="module", params=["llama", "gpt2", pytest.param("gemma3", marks=pytest.mark.slow)])
def models(request):
    small = {"vocab_size": 6, "eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0}
    family = request.param
    target, draft, other = (softened(tiny(family, seed=seed, **small)) for seed in (3, 4, 5))
    return sb.load(target, draft), other


def softened(model):
    """Smaller logits: a law that is nearly sure of one text would let every method pass."""
    last_norm, part = (model.transformer.ln_f, 0.15) if hasattr(model, "transformer") else (model.model.norm, 1.0)
    with torch.no_grad():
        last_norm.weight.mul_(part)
        if model.config.model_type == "gemma3_text":  # whose norms are by one more than their weight
            last_norm.weight.sub_(0.93)
    return model


def plain_law(pair, settings):
    """Odds of every text, by plain forwards and transformers' own warpers."""
    warpers = warpers_of(Settings(**settings).warp(TextFacts((END,), len(PROMPT))).truncation)
    law = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, odds in law.items():
            if text and text[-1] == END:
                longer[text] = odds
                continue
            with torch.inference_mode():
                scores = pair.target_model(torch.tensor([[*PROMPT, *text]])).logits[:, -1].double()
            scores = warpers(torch.zeros(1, 0, dtype=torch.long), scores) if warpers else scores
            for token, chance in enumerate(scores.softmax(-1)[0].tolist()):
                if chance > 0:
                    longer[(*text, token)] = odds * chance
        law = longer
    return law


def texts_of(pair, other, settings, draws, seed):
    """Texts by recipe; sessions of all recipes stand in line in turns, so every batch mixes them."""
    methods = {name: make(other) for name, make in RECIPES.items()}
    requests = {
        name: Request.of(pair, [PROMPT] * draws, method, Settings(max_new_tokens=LENGTH, **settings), seed + place)
        for place, (name, method) in enumerate(methods.items())
    }
    line = [
        session for row in zip(*(request.sessions for request in requests.values()), strict=True) for session in row
    ]
    for _ in decode(pair.target, line, at_once=200):
        pass
    return {
        name: Counter(tuple(next(one.hypotheses()).tokens) for one in request.sessions)
        for name, request in requests.items()
    }


def p_value(counts, law):
    """Chi-square over cells of texts, alike in odds, that each hope for at least five draws."""
    total = sum(counts.values())
    assert set(counts) <= set(law), "a text that plain sampling never gives"
    cells = [(0, 0.0)]
    for text, odds in sorted(law.items(), key=lambda one: -one[1]):
        seen, hoped = cells.pop() if cells[-1][1] < 5 else (0, 0.0)
        cells.append((seen + counts[text], hoped + odds * total))
    if cells[-1][1] < 5:
        last, before = cells.pop(), cells.pop()
        cells.append((last[0] + before[0], last[1] + before[1]))
    assert len(cells) > 3, "too few texts that are frequent enough to be told apart"
    return stats.chisquare(*np.array(cells).T).pvalue


def check_each(pair, methods, settings, draws):
    """Raise `AssertionError` if the texts of a method, each decoded in batches of its own, have another law."""
    law = plain_law(pair, settings)
    values = {}
    for place, (name, method) in enumerate(methods.items()):
        request = Request.of(pair, [PROMPT] * draws, method, Settings(max_new_tokens=LENGTH, **settings), 11 + place)
        for _ in decode(pair.target, request.sessions, at_once=200):
            pass
        counts = Counter(tuple(next(one.hypotheses()).tokens) for one in request.sessions)
        values[name] = p_value(counts, law)
    assert min(values.values()) > 1e-3, values


@pytest.mark.parametrize("setting", ["cold"])
def test_mixed_batches_have_the_law_of_plain_sampling(models, setting):
    check(models, setting, draws=60)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_batches_have_the_law_of_plain_sampling_closely(models, setting):
    check(models, setting, draws=20_000)


def check(models, setting, draws):
    pair, other = models
    law = plain_law(pair, SETTINGS[setting])
    found = texts_of(pair, other, SETTINGS[setting], draws, seed=11)
    values = {name: p_value(counts, law) for name, counts in found.items()}
    assert min(values.values()) > 1e-3, values
