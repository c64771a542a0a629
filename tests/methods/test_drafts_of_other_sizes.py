"""Texts with a draft whose vocabulary is larger or smaller than the target's: those of the method without a draft."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.source import Source
from specbeam.models.loading import vocabularies
from specbeam.models.memory.plan import MemoryPlan
from specbeam.recipes.catalogue import RECIPES
from tests.support import words
from tests.support.quick import first_quick
from tests.support.remembered import tiny_memory
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import sources, tiny_reader
from tests.test_laws_on_models import END, SETTINGS, check_each, softened
from tests.test_laws_on_models import RECIPES as RECIPES_OF_LAWS

pytestmark = pytest.mark.filterwarnings("ignore:draft has")
ROWS = 64
SIZES = (57, 96)
BEYOND = [[5, 9, 63, 60, 12], [58, 62], [7, 8, 9, 7, 8, 9, 61, 7, 8]]  # prompts with ids that the smaller draft lacks
TRIED = (
    "speculative_sampling", "block_verification", "specinfer", "rsd_c", "rsd_s", "sequoia", "spechub", "traversal",
    "multi_draft", "dyspec", "opt_tree", "gsd", "propd", "prompt_lookup", "token_recycling", "dsbd, one beam",
)  # fmt: skip
RUN = {"max_new_tokens": 12, "eos_token_id": [3]}


def resized(model, rows, noise=0.05, seed=1):
    """A model that drafts well for another one: its copy with noise, and with another number of tokens."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    other.resize_token_embeddings(rows, mean_resizing=False)
    own = model.get_output_embeddings().weight.shape[0]
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
        if rows > own:
            other.get_output_embeddings().weight[own:] *= 50  # what it would love to draft
    return other


def pair_of(target, draft, **options):
    """The pair with the tokens taken for the same, as a tokenizer of both would tell; without one, padding has to explain
    the sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabularies, "_is_padded", lambda smaller, larger: True)
        return sb.load(target, draft, **options)


@pytest.fixture(scope="module", params=SIZES)
def pair(request):
    target = tiny("llama", vocab_size=ROWS)
    return pair_of(target, resized(target, request.param))


def tokens_of(pair, method, prompts=BEYOND, **options):
    found = sb.generate(pair, prompts, method, **RUN | options)
    return [one.tokens for one in found], found


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0}])
def test_a_seed_gives_the_beams_of_beam_sampling(pair, beams, options):
    for seed in range(3):
        ours, found = tokens_of(pair, sb.dsbd(beams, beams + 1, 3, "fixed"), seed=seed, **options)
        assert ours == tokens_of(pair, sb.beam_sampling(beams), seed=seed, **options)[0]
        assert sum(one.report.accepted for one in found) > 0


def test_a_seed_gives_the_beams_of_transformers_beam_sampling(pair):
    ours = tokens_of(pair, sb.dsbd(3, semantics="hf", width="fixed", depth=3), seed=4)[0]
    assert ours == tokens_of(pair, sb.beam_sampling(3, semantics="hf"), seed=4)[0]


@pytest.mark.parametrize("drafter", ["model", "prompt_lookup", "token_recycling", "opt_tree", "gsd"])
def test_beams_are_those_of_beam_search(pair, drafter):
    for beams in (1, 3, 6):
        own = (
            getattr(sb, drafter)().parts(pair.target, pair.draft).drafter if drafter in ("opt_tree", "gsd") else drafter
        )
        ours, found = tokens_of(pair, sb.speculative_beam_search(beams, depth=3, drafter=own))
        assert ours == tokens_of(pair, sb.beam_search(beams))[0]
        assert drafter != "model" or sum(one.report.accepted for one in found) > 0
    assert pair.draft.engine == "compiled"


AT_ONCE = [make for make in RECIPES if make.__name__ not in ("swift", "auto", "mtjd")]


@pytest.mark.parametrize("make", AT_ONCE, ids=lambda make: make.__name__)
def test_every_recipe_gives_its_text_without_chance(pair, make):
    """At temperature 0 those for one sequence give the text of greedy decoding, and exact ones of beams that without drafts."""
    method = make()
    zero = {} if method.greedy or method.search else {"temperature": 0}
    ours, _ = tokens_of(pair, method, seed=0, **zero)
    if method.exact and method.beams == 1:
        assert ours == tokens_of(pair, sb.greedy())[0]
    elif method.exact:
        plain = sb.beam_search(method.beams) if method.search else sb.beam_sampling(method.beams)
        assert ours == tokens_of(pair, plain, seed=0, **zero)[0]
    assert all(0 <= token < ROWS for text in ours for token in text)


def test_the_draft_model_drafts_nothing_that_it_does_not_know_or_the_target_lacks(pair):
    """Below nodes whose rows the target has scored already, its own laws draft, of all of its tokens."""
    known = pair.draft.shared.known
    methods = [
        sb.dsbd(3, 4, 3, "fixed"), sb.rsd_s(4, 3), sb.specinfer((3, 2)), sb.gsd(), sb.opt_tree(), sb.dyspec(),
        sb.multi_draft(), sb.mtad(), sb.speculative_beam_search(3, depth=3), sb.spechub(),
    ]  # fmt: skip
    for method in methods:
        cut = Settings(
            max_new_tokens=10, top_k=2 if method.name == "sequoia" else None
        )  # beyond it sequoia takes any token
        request = Request.of(pair, BEYOND, method, cut, 0)
        drafted = 0
        for turns in decode(pair.target, request.sessions):
            for _, turn in turns:
                forest = turn.forest
                by_model = ~np.isin(forest.parents, forest.known.nodes)
                by_model[: forest.roots] = False
                assert known[forest.tokens[by_model]].all()
                drafted += int(by_model.sum())
        assert drafted > 0


@pytest.mark.parametrize("controller", ["confidence", "tracked", "thompson", "calibrated", "survival", "cost"])
def test_controllers_see_the_law_of_what_may_be_drafted(pair, controller):
    for method in (sb.speculative_sampling(4, controller=controller), sb.rsd_c((2, 2, 1), controller=controller)):
        assert tokens_of(pair, method, temperature=0, seed=0)[0] == tokens_of(pair, sb.greedy())[0]
        assert all(one.report.tokens == len(one.tokens) for one in tokens_of(pair, method, seed=1)[1])


@pytest.mark.parametrize(
    "options",
    [
        {"width": "dynamic"},
        {"width": "auto"},
        {"coupling": "rejection"},
        {"coupling": "rejection", "replacement": True},
    ],
)
def test_widths_and_couplings_take_such_drafts(pair, options):
    for one in tokens_of(pair, sb.dsbd(3, 4, 3, **options), seed=1, audit=True)[1]:
        assert not one.report.audit.suspicious
        assert one.report.draft_passes > 0


def test_texts_stream_and_do_not_depend_on_their_batch(pair):
    method = sb.dsbd(3, 4, 3, "fixed")
    together, _ = tokens_of(pair, method, seed=5)
    assert [tokens_of(pair, method, [prompt], seed=5)[0][0] for prompt in BEYOND] == together
    with_words = replace(pair, tokenizer=words.tokenizer("()[]{}"))
    (whole,) = sb.generate(with_words, [BEYOND[0]], method, seed=5, **RUN)
    assert "".join(sb.stream(with_words, BEYOND[0], method, seed=5, **RUN)) == whole.text


@pytest.mark.parametrize("allowed", [[62], [60, 61, 63], [4, 62]])
def test_a_constraint_may_allow_what_the_draft_does_not_know(pair, allowed):
    options = {"prefix_allowed_tokens_fn": lambda *_: allowed, "eos_token_id": []}
    for method, plain in (
        (sb.dsbd(2, 3, 3, "fixed"), sb.beam_sampling(2)),
        (sb.speculative_beam_search(2, depth=3), sb.beam_search(2)),
    ):
        if len(allowed) == 1:
            method, plain = sb.dsbd(1, 2, 3, "fixed"), sb.beam_sampling(1)
        assert tokens_of(pair, method, seed=2, **options)[0] == tokens_of(pair, plain, seed=2, **options)[0]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("options", [{"quantize_draft": "int8"}, {"quantize_draft": "int4"}, {"kv": "bfloat16"}])
def test_rounded_drafts_of_another_size(rows, options):
    target = tiny("llama", vocab_size=ROWS, hidden_size=64, intermediate_size=64)
    pair = pair_of(target, resized(target, rows), **options)
    assert pair.draft.engine == options.get("quantize_draft", "compiled")
    ours, found = tokens_of(pair, sb.dsbd(3, 4, 3, "fixed"), seed=1)
    assert ours == tokens_of(pair, sb.beam_sampling(3), seed=1)[0]
    assert sum(one.report.accepted for one in found) > 0


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral"])
def test_families_with_such_a_draft(family):
    target = tiny(family, vocab_size=ROWS)
    for rows in SIZES:
        pair = pair_of(target, resized(tiny("llama", vocab_size=ROWS), rows))
        assert tokens_of(pair, sb.dsbd(2, 3, 3, "fixed"), seed=3)[0] == tokens_of(pair, sb.beam_sampling(2), seed=3)[0]


def test_a_draft_that_remembers(pair):
    remembering = sb.hmt(pair, draft_memory=(MemoryPlan(4, 1), tiny_memory(pair.draft_model)))
    ours = tokens_of(remembering, sb.dsbd(2, 3, 3, "fixed"), seed=3)[0]
    assert ours == tokens_of(pair, sb.beam_sampling(2), seed=3)[0]


def test_transformers_generate_takes_such_a_draft(tmp_path):
    target = tiny("llama", vocab_size=ROWS)
    draft = resized(target, 60)
    given = torch.tensor([BEYOND[0]])
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    plain = target.generate(given, **options)
    assert (
        target.generate(given, custom_generate=sb.hf.beam_search, draft_model=draft, **options).tolist()
        == plain.tolist()
    )


@pytest.fixture(scope="module", params=[5, 8])
def small_pair(request):
    small = {"eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0}
    target, draft, other = (
        softened(tiny("llama", seed=seed, vocab_size=rows, **small))
        for seed, rows in ((3, 6), (4, request.param), (5, 13 - request.param))
    )
    return pair_of(target, draft), other


@pytest.mark.parametrize("setting", first_quick(["cold", "plain", "top-k"]))
def test_tried_drafts_leave_the_law_as_it_is(small_pair, setting):
    pair, other = small_pair
    methods = {name: RECIPES_OF_LAWS[name](other) for name in TRIED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabularies, "_is_padded", lambda smaller, larger: True)
        check_each(pair, methods, SETTINGS[setting], 60)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_tried_drafts_leave_the_law_as_it_is_closely(small_pair, setting):
    pair, other = small_pair
    methods = {name: RECIPES_OF_LAWS[name](other) for name in TRIED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabularies, "_is_padded", lambda smaller, larger: True)
        check_each(pair, methods, SETTINGS[setting], 4_000)


def test_audits_find_nothing(small_pair):
    pair, _ = small_pair
    for method in (sb.dsbd(2, 3, 2, "fixed", coupling="rejection"), sb.rsd_s(3, 2), sb.specinfer((2, 2))):
        for one in sb.generate(pair, [[1, 2, 3, 2]] * 8, method, seed=0, max_new_tokens=6, audit=True):
            assert not one.report.audit.suspicious


@pytest.mark.parametrize("family", ["t5", "bart", "m2m_100"])
@pytest.mark.parametrize("rows", [57, 64, 96])
def test_readers_of_sources_with_another_number_of_tokens(family, rows):
    """The draft has an encoder of its own, which reads sources with tokens that it does not know."""
    target = tiny_reader(family, vocab_size=61)
    pair = pair_of(target, tiny_reader(family, seed=1, vocab_size=rows))
    assert pair.draft.engine == pair.target.engine
    given = [*sources(family), [60, 59, 4, 58, 60]]
    options = {"max_new_tokens": 8, "eos_token_id": []}
    for method, plain in ((sb.dsbd(3, 4, 3, "fixed"), sb.beam_sampling(3)), (sb.multi_draft((), (2, 1)), None)):
        ours = [one.tokens for one in sb.generate(pair, given, method, seed=1, **options)]
        if plain is not None:
            assert ours == [one.tokens for one in sb.generate(pair, given, plain, seed=1, **options)]


@pytest.mark.parametrize("rows", [57, 96])
def test_a_reader_of_sources_takes_a_causal_draft_with_another_number_of_tokens(rows):
    pair = pair_of(tiny_reader("t5", vocab_size=61), tiny("llama", vocab_size=rows))
    options = {"max_new_tokens": 8, "eos_token_id": []}
    ours = sb.generate(pair, sources("t5"), sb.dsbd(3, 4, 3, "fixed"), seed=1, **options)
    plain = sb.generate(pair, sources("t5"), sb.beam_sampling(3), seed=1, **options)
    assert [one.tokens for one in ours] == [one.tokens for one in plain]


def test_an_encoder_reads_a_stand_in_for_words_that_it_does_not_know():
    target = tiny_reader("t5", vocab_size=61)
    draft = pair_of(target, tiny_reader("t5", seed=1, vocab_size=57)).draft
    known = Source.of_tokens([4, 5, 56])
    assert draft.own_source(known) is known
    assert draft.own_source(Source.of_tokens([4, 60, 56])).inputs.tolist() == [[4, draft.shared.stand_in, 56]]
