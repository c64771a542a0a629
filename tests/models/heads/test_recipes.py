"""Recipes by the names of papers on heads: they take heads of their kind, refuse others, and give the text of sampling."""

from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.heads.exit import ExitHead, ExitLM
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.feature import FeatureSizes
from specbeam.models.heads.lm import ChimeraLM, DenoiserLM, FeatureLM, ModulesLM, TrunkLM
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.modules import ModulesInARow
from specbeam.recipes.catalogue import HEAD_RECIPES, resolve
from tests.support.extra_rows import extra_head
from tests.support.heads import VOCAB, chimera_of, denoiser_of, trunk_of
from tests.support.tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
# Of the others: those of a tree.
SETTINGS = {
    "specdiff": {"steps": 2, "depth": 3},
    "eesd": {"depth": 3, "rule": "match"},
    "bita": {"nodes": 8, "depth": 3, "top": 3, "tree": "odds"},
    "hidden_transfer": {"nodes": 8, "depth": 3, "top": 3, "tree": "odds"},
}
EXACT = [make for make in HEAD_RECIPES if make is not sb.coral]  # see tests/methods/test_coral.py
TREE = {"nodes": 8, "depth": 3, "top": 3}


@pytest.fixture(scope="module")
def pairs():
    """A pair with a head of each kind, by the name of its recipe."""
    model = tiny("llama", seed=1, vocab_size=VOCAB)
    pair = sb.load(model)
    sizes = FeatureSizes(model.config.hidden_size, VOCAB, VOCAB, 3)
    drafts = {
        "eagle": TrunkLM(trunk_of(model, "eagle3"), VOCAB),
        "fspad": TrunkLM(trunk_of(model, "eagle", sampling=16, alignment=16), VOCAB),
        "medusa": FeatureLM(Medusa(sizes, 1), VOCAB),
        "mtp": ModulesLM(ModulesInARow([trunk_of(model, "mtp"), trunk_of(model, "mtp", seed=1)]), VOCAB),
        "chimera": ChimeraLM(chimera_of(model), VOCAB),
        "specdiff": DenoiserLM(denoiser_of(model), VOCAB),
        "eesd": ExitLM(ExitHead(model, 1).requires_grad_(False), pair.target),
        "bita": ExtraLM(extra_head(model, "bita"), VOCAB),
        "hidden_transfer": ExtraLM(extra_head(model, "hidden_transfer"), VOCAB),
    }
    return {name: replace(pair, draft=draft) for name, draft in drafts.items()}


@pytest.mark.parametrize("make", EXACT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_sampling(make, temperature, pairs):
    pair = pairs[make.__name__]
    options = {"seed": 4, "max_new_tokens": 12, "temperature": temperature, "eos_token_id": []}
    plain = sb.generate(pair, PROMPTS, sb.sampling(), **options)
    for batch_size in (1, 3):
        found = sb.generate(pair, PROMPTS, make(**SETTINGS.get(make.__name__, TREE)), batch_size=batch_size, **options)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert all(one.report.draft_passes > 0 for one in found)


@pytest.mark.parametrize("make", EXACT)
def test_drafts_of_heads_are_pruned_by_the_first_layers(make, pairs):
    """Whatever the head needs of the target's inner layers itself."""
    pair = pairs[make.__name__]
    options = {"seed": 4, "max_new_tokens": 8, "eos_token_id": []}
    plain = sb.generate(pair, PROMPTS, sb.sampling(), **options)
    found = sb.generate(pair, PROMPTS, sb.propd(8, 3, early=1, controller="fixed"), **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("make", EXACT)
def test_other_heads_and_other_drafts_are_refused(make, pairs):
    kinds = {
        "eagle": "EAGLE-3",
        "fspad": "FSPAD",
        "medusa": "Medusa",
        "mtp": "MTP",
        "chimera": "Chimera",
        "specdiff": "SpecDiff",
        "eesd": "EESD",
        "bita": "BiTA",
        "hidden_transfer": "HiddenTransfer",
    }
    for name, pair in pairs.items():
        if name != make.__name__:
            with pytest.raises(
                NotSupported, match=f"{make.__name__} drafts with .* of this pair is of kind {kinds[name]}:? ?"
            ):
                make().parts(pair.target, pair.draft)
    with pytest.raises(NotSupported, match="of kind HuggingFaceLM"):
        make().parts(pairs["eagle"].target, pairs["eagle"].target)
    with pytest.raises(
        NotSupported, match=f"{make.__name__} drafts with .*, and this pair has no draft: load the target with draft="
    ):
        make().parts(pairs["eagle"].target, None)


@pytest.mark.parametrize("make", EXACT)
def test_names_settings_and_laws(make):
    assert resolve(make.__name__).name == make.__name__
    assert make.__name__ in {one.name for one in sb.methods()}
    assert make().lossless
    assert make(rule="path").law == "exact: plain sampling"
    with pytest.raises(BadSetting, match="depth is 0"):
        make(depth=0)


def test_one_module_is_taken_as_several_are(pairs):
    """And what to do about a pair without any is said."""
    head = TrunkLM(trunk_of(pairs["mtp"].target_model, "mtp"), VOCAB)
    pair = replace(pairs["mtp"], draft=head)
    (found,) = sb.generate(pair, PROMPTS[:1], sb.mtp(), max_new_tokens=12, eos_token_id=[])
    assert found.report.draft_passes > 0
    with pytest.raises(NotSupported, match=r'load the target with draft="mtp" \(--draft\), if its files hold modules'):
        sb.mtp().parts(pairs["eagle"].target, pairs["eagle"].draft)


def test_chains_and_trees_of_an_exit_layer_and_who_may_judge_them():
    chain, tree = sb.eesd(4), sb.eesd(3, (3, 2))
    assert chain.law == tree.law == sb.eesd(rule="match").law == "exact: plain sampling"
    with pytest.raises(BadSetting, match=r"counts is \[0\]; it must name at least one layer"):
        sb.eesd(counts=(0,))
    with pytest.raises(BadSetting, match="chooses the size of the whole tree"):
        sb.eesd(controller="latency")
