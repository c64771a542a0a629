"""Drafts by the target itself, quickly trained on the bundled target: EESD, BiTA and Hidden Transfer against transformers."""

import pytest

import specbeam as sb
from specbeam.core import compiling
from specbeam.lab.train import DrawPlan, Schedule, train_head
from specbeam.models.heads.exit import ExitLM
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.pair import BUNDLED
from tests.models.heads.test_compiled import greedy_of, sentences, words

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

PLANS = {"eesd": {"exit_layer": 2}, "bita": {"prefix": 8}, "hidden_transfer": {}}
METHODS = {
    "eesd": [
        sb.eesd(3),
        sb.eesd(3, controller="beta_ts"),
        sb.eesd(2, (2, 1), controller="fixed"),
        sb.dsbd(1, 3, 3, "fixed"),
    ],
    "bita": [sb.bita(), sb.speculative_sampling(3)],
    "hidden_transfer": [sb.hidden_transfer(), sb.speculative_sampling(3)],
}


NOUNS = ("Hund", "Tisch", "Mann", "Vogel", "Garten", "Zug", "Freund", "Lehrer", "Bruder", "Apfel", "Wagen", "Hut")


@pytest.fixture(scope="module", params=PLANS)
def drafting(request, tmp_path_factory):
    """The kind of a head, and the bundled target with a head of this kind that has learnt a little."""
    kind = request.param
    out = tmp_path_factory.mktemp(kind)
    prompts = [f"Der {one} sieht den {other}." for one in NOUNS for other in NOUNS if one != other]
    draws = DrawPlan(beams=1, max_new_tokens=12)
    schedule = Schedule(epochs=1, batch_tokens=600)
    train_head(kind, BUNDLED / "target", prompts, out, plan=PLANS[kind], draws=draws, schedule=schedule)
    loaded = sb.load(BUNDLED / "target", draft=str(out), probe=False)
    assert isinstance(loaded.draft, ExitLM if kind == "eesd" else ExtraLM)
    return kind, loaded


@pytest.mark.slow
def test_drafts_at_temperature_0_are_transformers_greedy_text_on_200_prompts(drafting):
    """One by one and sixteen at a time, in chains and in trees; and some drafts are accepted."""
    kind, pair = drafting
    prompts = [*sentences(100), *words(200)][:200]
    assert len(prompts) == 200
    expected = greedy_of(pair, prompts, 12)
    options = {"max_new_tokens": 12, "temperature": 0.0}
    for method in METHODS[kind]:
        for batch_size in (1, 16):
            found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
            assert [one.tokens for one in found] == expected, (method.name, batch_size)
        assert sum(one.report.draft_passes for one in found) > 0, method.name
        assert sum(one.report.accepted for one in found) > 0, method.name


@pytest.mark.slow
def test_sixteen_at_once_have_the_texts_of_each_alone(drafting):
    """With drawn tokens, for one seed; those matched to the target's own draws are those of sampling."""
    kind, pair = drafting
    prompts = sentences(32)
    options = {"max_new_tokens": 12, "seed": 5}
    plain = sb.generate(pair, prompts, sb.sampling(), **options)
    make = {"eesd": lambda: sb.eesd(3, rule="match"), "bita": sb.bita, "hidden_transfer": sb.hidden_transfer}[kind]
    for batch_size in (1, 16):
        found = sb.generate(pair, prompts, make(), batch_size=batch_size, **options)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
