"""Drafts by the target without some of its sublayers, on its own cache: rows, traces, choices, and what is refused."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import runs
from specbeam.core.control.cost import CostCurve
from specbeam.core.decode import decode
from specbeam.core.forest import next_start, rows_of_nodes, turn_rows
from specbeam.core.laws.reduce import SOUND
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.ranked import whole_rows
from specbeam.core.session import Session
from specbeam.doors.cli.common import method_from
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.cache_names import cache_argument, cache_of
from specbeam.engines.cpu.sums import WIDTH
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.clasp import dispensable_layers
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.models.skip_search import Found, SkipMemory, SkipSearch, expected, suggested
from specbeam.models.skipping import Skipping, SkippingLM, skipping_model
from specbeam.models.sublayers import Sublayers, alternate, choices_of, chosen, count_of
from specbeam.recipes.tuning.costs import curve_of
from tests.support.checking import refused
from tests.support.loops import known
from tests.support.seats import keeping, moved, node_paths, plain_logits, random_forest, random_turn, seat
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny

LAYERS = 5
VOCAB = 64
SKIPPED = Sublayers((1, 3), (2, 3))
PROMPTS = [[3, 4, 5], [(7 * place + 3) % 60 for place in range(40)], [9]]


def target_of(family="llama", layers=LAYERS, engine="compiled", chunk=512, share_from=None, **changes):
    model = tiny(family, seed=1, vocab_size=VOCAB, num_hidden_layers=layers, **changes)
    return HuggingFaceLM(model, chunk, engine, share_from)


def pair_of(lm, draft=None):
    return Pair(lm.model, None, None, lm, draft)


class Nothing(torch.nn.Module):
    """A sublayer that adds nothing."""

    def __init__(self, is_attention):
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states, **others):
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.is_attention else nothing


def without(model, skipped):
    """A model of transformers without some sublayers."""
    fewer = copy.deepcopy(model)
    for layer in skipped.attention:
        fewer.model.layers[layer].self_attn = Nothing(True)
    for layer in skipped.inner:
        fewer.model.layers[layer].mlp = Nothing(False)
    return fewer


@torch.inference_mode()
def drafted_logits(model, fewer, text, path):
    """Logits behind `text` and `path`, where the whole model has read the text, and `fewer` reads the path after it."""
    cache = cache_of(model(input_ids=torch.tensor([text]), use_cache=True)) if text else None
    return fewer(input_ids=torch.tensor([path]), **cache_argument(fewer, cache)).logits[0, -1]


def bytes_of(lm, cache):
    """All that a cache holds of committed tokens: the trie, and the keys and values of its slots in use."""
    trie = cache.trie
    slots = np.flatnonzero(trie.used)
    store = lm.runner.store
    if not len(slots):
        return (trie.arrays.counts[:5].copy(),)
    keys = np.stack([store.keys_by_panel[:, cache.row, :, slot // WIDTH, :, slot % WIDTH] for slot in slots])
    values = store.values_by_slot[:, cache.row][:, :, slots]
    counts = trie.arrays.counts[:5].copy()
    return counts, trie.seen.copy(), trie.used.copy(), trie.local.copy(), keys, values


@needs_numba
@pytest.mark.parametrize(
    ("family", "keeps"), [("llama", True), ("llama", False), ("qwen2", False), ("phi3", True), ("gemma3", False)]
)
def test_drafts_are_plain_forwards_after_the_whole_models_text_and_leave_no_trace(family, keeps):
    """Over turns of trees with several roots, stored ones and kept nodes among them: rows of drafts, what is in the target's
    cache before and after them bit by bit (SW-2), rows of the target afterwards, and the most tokens stored at once."""
    lm = target_of(family, chunk=5)
    draft = SkippingLM(lm, Skipping(SKIPPED))
    fewer = without(lm.model, SKIPPED)
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, VOCAB, length).tolist(), keeps) for length in (1, 12)]
    doubled = 0
    for turn_number in range(7):
        forests = [random_forest(rng, [text[-1] for text in one.texts], VOCAB, 5, one.start) for one in seats]
        parts = [seats] if turn_number % 2 else [seats[:1], seats[1:]]  # together, or one by one by compiled steps
        draft._begin(seats)
        before = [bytes_of(lm, one.state[lm]) for one in seats]
        answers = []
        for together in parts:
            answers += draft.extend(together, [forests[seats.index(one)] for one in together])
        for one, forest, found, kept in zip(seats, forests, answers, before, strict=True):
            trie = one.state[lm].trie
            for now, then in zip(bytes_of(lm, one.state[lm]), kept, strict=True):
                np.testing.assert_array_equal(now, then)
            scratch = one.state[draft].scratch.trie
            assert scratch.held - trie.held == scratch.peak - trie.held >= len(found.logits)
            assert lm.peak(one) >= scratch.held
            known = set(forest.known.nodes.tolist())
            doubled += sum(root < trie.stored and node not in known for node, root in enumerate(trie.root_at.tolist()))
            fresh = [node for node in range(forest.size) if node not in known]
            expected_rows = []
            for node in fresh:
                path = [node]
                while forest.parents[path[0]] >= 0:
                    path.insert(0, int(forest.parents[path[0]]))
                text = one.texts[path[0]][:-1]
                seen_whole = [step for step in path if step in known]
                text = text + forest.tokens[seen_whole].tolist()
                rest = forest.tokens[path[len(seen_whole) :]].tolist()
                expected_rows.append(drafted_logits(lm.model, fewer, text, rest))
            torch.testing.assert_close(found.logits, torch.stack(expected_rows), atol=3e-4, rtol=3e-4)
        for one, forest, found in zip(seats, forests, lm.extend(seats, forests), strict=True):
            rows = turn_rows(whole_rows(found.logits.numpy()), forest.size, forest.known)
            every = torch.from_numpy(rows_of_nodes(rows, np.arange(forest.size)).logits)
            expected_rows = plain_logits(lm.model, node_paths(one.texts, forest))
            torch.testing.assert_close(every, expected_rows, atol=3e-4, rtol=3e-4)
            turn = random_turn(rng, forest, VOCAB)
            turn = keeping(rng, turn) if keeps else turn
            lm.settle(one, turn)
            draft.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
            if keeps:
                last = turn.verdict.beams
                one.start = next_start(forest.tokens, forest.parents, rows, last.nodes, last.tokens, turn.verdict.kept)
        if turn_number == 3:
            for part in (draft, lm):
                part.close(seats[0])
            seats = [seats[1], seat([3, 4], keeps)]
    assert doubled or keeps


def sessions_of(lm, method, prompts=PROMPTS, tokens=14, draft=None, **settings):
    given = Settings.given({"max_new_tokens": tokens, "eos_token_id": [], **settings}, None)
    request = Request.of(pair_of(lm, draft), prompts, method, given, 3)
    for session in request.sessions:
        list(decode(lm, [session]))
    assert [session.failure for session in request.sessions] == [None] * len(request.sessions)
    return request.sessions


def texts(sessions):
    return [[one.tokens for one in session.hypotheses()] for session in sessions]


QUICK = SkipSearch(context=4, patience=20, bayes_every=3)
KINDS = {
    "bayes": {"skip": "bayes", "search": QUICK, "ratio": 0.5},
    "random, first": {"skip": "random", "search": replace(QUICK, window="first", interval=2), "ratio": 0.5},
    "clasp": {"skip": "clasp", "every": 2, "ratio": 0.3},
    "exit": {"skip": "exit", "layers": 2},
    "fixed": {"skip": "a1 m1 m3", "siblings": False, "controller": "tracked"},
    "chain": {"skip": "a1 m3", "siblings": False, "controller": "fixed", "depth": 3},
}


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_a_text_is_the_targets_greedy_one(kind):
    lm = target_of()
    plain = texts(sessions_of(lm, sb.sampling(), temperature=0.0))
    drafting = sessions_of(lm, sb.swift(**KINDS[kind]), temperature=0.0)
    assert texts(drafting) == plain
    assert any(session.count.accepted for session in drafting)
    (draft,) = lm.skipping.values()
    assert draft.rows > 0
    assert (draft.search_rows > 0) == (kind in ("bayes", "random, first", "clasp"))


@needs_numba
def test_a_batch_with_a_set_for_each_text_decodes_what_each_prompt_does_alone():
    """Also by match, with which a text does not depend on what was drafted."""
    lm = target_of()
    alone = texts(sessions_of(lm, sb.sampling()))
    given = Settings.given({"max_new_tokens": 14, "eos_token_id": []}, None)
    method = sb.swift("random", search=SkipSearch(context=3), ratio=0.5, rule="match")
    request = Request.of(pair_of(lm), PROMPTS, method, given, 3)
    list(decode(lm, list(request.sessions)))
    assert texts(request.sessions) == alone


@needs_numba
@pytest.mark.parametrize("settings", [Skipping(SKIPPED), Skipping(ratio=0.5, search=QUICK), Skipping("clasp", every=1)])
def test_beams_are_those_of_beam_sampling_whatever_is_left_out(settings):
    lm = target_of()
    draft = SkippingLM(lm, settings)
    for one in (lm, draft):
        one.curves[64] = CostCurve((1, 64), (1.0, 1.2))
    plain = texts(sessions_of(lm, sb.beam_sampling(3), tokens=10))
    for method in (sb.dsbd(3, 5, 2), sb.dsbd(3, width="auto")):
        kept = texts(sessions_of(lm, method, tokens=10, draft=draft))
        if method.law == sb.beam_sampling(3).law:
            assert kept == plain
        else:
            assert kept == texts(sessions_of(lm, sb.beam_sampling(3, width="auto"), tokens=10))


@needs_numba
def test_a_set_that_skips_nothing_accepts_everything():
    """SW-1: its law is the target's own."""
    lm = target_of()
    for rule in ("path", "traversal"):
        method = sb.swift("", siblings=False, depth=3, controller="fixed", rule=rule)
        for session in sessions_of(lm, method, tokens=13):
            assert session.count.accepted >= 13 - session.count.target_passes


@needs_numba
def test_what_is_computed_twice_and_what_is_stored_is_counted():
    lm = target_of()
    method = sb.swift(SKIPPED, siblings=False, depth=4, controller="fixed")
    (session,) = sessions_of(lm, method, PROMPTS[:1], tokens=12)
    (draft,) = lm.skipping.values()
    assert draft.passes == session.count.draft_passes
    assert draft.rows == draft.passes  # each pass runs one row: the root, and then all drafts but the last
    (plain,) = sessions_of(lm, sb.speculative_sampling(4), PROMPTS[:1], tokens=12, draft=HuggingFaceLM(lm.model))
    assert session.count.peak_kv_tokens <= plain.count.peak_kv_tokens + 4


@needs_numba
def test_the_cost_of_drafts_is_measured_on_a_stored_prompt():
    draft = SkippingLM(target_of(), Skipping(SKIPPED))
    curve = curve_of(draft)
    assert min(curve.seconds) > 0
    assert not draft.lm.caches


RUNS = {
    "chain": sb.swift(SKIPPED, siblings=False, depth=4, controller="fixed"),
    "chain by odds": sb.swift("exit", layers=2, siblings=False, depth=6),
    "chain by a coin, matched": sb.swift("a1 m3", siblings=False, depth=5, controller="beta_ts", rule="match"),
    "a search that is over": sb.swift("random", 0.5, search=SkipSearch(context=2, most=1), siblings=False, depth=3),
    "siblings": sb.swift(SKIPPED, depth=5),
    "siblings by a coin": sb.swift(SKIPPED, depth=5, controller="calibration_ts"),
    "beams": sb.dsbd(3, 5, 3, "fixed"),
}
RARE_RUNS = {
    "tree": sb.rsd_c((2, 2)),
    "tree from its leaves": sb.traversal((2, 1, 1)),
    "beams by rejection": sb.dsbd(3, 4, 2, "fixed", coupling="rejection"),
    "search": sb.speculative_beam_search(3, 5, 2),
}


@needs_numba
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE_RUNS)])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "temperature": 1.4}], ids=str)
def test_whole_turns_run_ahead_and_give_the_texts_of_turns_one_by_one(name, options, monkeypatch):
    """Reports and the counts of what drafts have computed too."""
    lm = target_of()
    draft = SkippingLM(lm, Skipping(SKIPPED))
    made = []
    loop = runs.run_turns

    def run_turns(*given):
        live, start, condition = loop(*given)
        made.append((int(given[5].numbers[runs.DONE]), condition))
        return live, start, condition

    monkeypatch.setattr(runs, "run_turns", run_turns)
    (RUNS | RARE_RUNS)[name].parts(lm, draft)  # measures what passes cost, where that is asked
    found = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
        for each in (draft, *lm.skipping.values()):
            each.passes = 0
            each.rows = 0
        settings = {"seed": 4, "max_new_tokens": 14, "eos_token_id": [9, 30], **options}
        if name == "search":
            settings = {"max_new_tokens": 14, "eos_token_id": [9, 30]}
        texts = [
            known(sb.generate(pair_of(lm, draft), prompt, (RUNS | RARE_RUNS)[name], **settings)[0])
            for prompt in PROMPTS
        ]
        counts = [(each.passes, each.rows) for each in (draft, *lm.skipping.values())]
        found.append((texts, counts))
    assert found[0] == found[1]
    assert sum(rows for _, rows in found[0][1]) > 0
    assert sum(turns for turns, _ in made) > len(PROMPTS)
    assert {condition for _, condition in made} == {SOUND}


# What a search chooses.


def matchness_of(weights):
    return lambda choice: float(1 - weights[choice].sum() / weights.sum())


def test_a_search_keeps_to_the_size_and_to_the_inner_layers():
    """SW-3, for random sets, suggested ones and the first."""
    stream = np.random.default_rng(0)
    for layers, ratio in itertools.product((3, 4, 7, 22), (0.2, 0.45, 0.9)):
        count = count_of(layers, ratio)
        found = Found(alternate(layers, count))
        for number in range(30):
            choice = found.next(SkipSearch(bayes_every=5), stream)
            found.learn(choice, float(stream.random()))
            skipped = chosen(choice)
            assert len(skipped) == count
            assert not {0, layers - 1} & {*skipped.attention, *skipped.inner}
            if number == 0:
                assert {layer % 2 for layer in chosen(choice).attention} <= {1} or ratio == 0.9


def test_the_best_matchness_never_falls_within_a_window_and_a_search_ends():
    """SW-4, and the stop rule: by a good set, by patience, by the number of trials."""
    stream = np.random.default_rng(1)
    weights = np.random.default_rng(2).random(choices_of(10))
    score = matchness_of(weights)
    ends = {"patience": SkipSearch(patience=15), "most": SkipSearch(most=7), "enough": SkipSearch(enough=0.3)}
    for name, search in ends.items():
        found = Found(alternate(10, count_of(10, 0.45)))
        best = 0.0
        while not found.is_over(search):
            choice = found.next(search, stream)
            found.learn(choice, score(choice))
            assert found.matchness >= best
            best = found.matchness
            assert found.matchness == pytest.approx(score(found.best))
        assert {"patience": found.failures == 15, "most": found.tries == 7, "enough": best > 0.3}[name]
    assert Found(np.zeros(4, dtype=bool)).is_over(SkipSearch())


def test_bayesian_optimisation_finds_better_sets_than_random_ones():
    """Of sublayers that each cost some matchness by themselves, over as many trials."""
    gains = []
    for seed in range(3):
        weights = np.random.default_rng(seed).random(choices_of(14)) ** 2
        score = matchness_of(weights)
        bests = []
        for bayes_every in (0, 2):
            stream = np.random.default_rng(seed)
            found = Found(alternate(14, count_of(14, 0.45)))
            for _ in range(40):
                choice = found.next(SkipSearch(bayes_every=bayes_every), stream)
                found.learn(choice, score(choice))
            bests.append(found.matchness)
        gains.append(bests[1] - bests[0])
    assert np.mean(gains) > 0.02


def test_the_gaussian_process_goes_through_what_was_seen_and_is_unsure_elsewhere():
    stream = np.random.default_rng(3)
    tried = stream.random((25, 20)) < 0.5
    scores = tried @ np.linspace(0.0, 0.1, 20)
    mean, deviation = expected(tried, scores, tried)
    assert np.abs(mean - scores).max() < 0.1 * scores.std()
    other, unsure = expected(tried, scores, ~tried)
    assert deviation.max() < unsure.min()
    assert np.corrcoef(other, ~tried @ np.linspace(0.0, 0.1, 20))[0, 1] > 0.5
    found = Found(tried[0], 0.0, tried, scores)
    assert suggested(found, stream).sum() == tried[int(np.argmax(scores))].sum()


@needs_numba
@pytest.mark.remembers
def test_what_a_session_finds_is_kept_on_disk_and_the_next_one_goes_on_from_there(tmp_path, monkeypatch):
    """By target, task and number of sublayers; and the state of a search is that of a session (SW-7)."""
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    search = SkipSearch(context=4, enough=1.0, window="first")
    method = sb.swift("random", task="tales", search=search, ratio=0.5)
    lm = target_of()
    sessions_of(lm, method, PROMPTS[:1], tokens=40)
    known = skipping_model(lm, Skipping("random", 0.5, task="tales", search=search)).memory.begin()
    assert known.tries > 3
    assert len(known.scores) == known.tries
    again = target_of()
    resumed = skipping_model(again, Skipping("random", 0.5, task="tales", search=search)).memory.begin()
    assert resumed.tries == known.tries
    np.testing.assert_array_equal(resumed.best, known.best)
    for other in (Skipping("random", 0.5, task="news", search=search), Skipping("random", 0.7, task="tales")):
        assert skipping_model(again, other).memory.begin().tries == 0
    for file in tmp_path.rglob("sublayers-*.json"):
        file.write_text('{"best": 7}')
    assert SkipMemory(known.best, "other key").begin().tries == 0
    assert skipping_model(target_of(), Skipping("random", 0.5, task="tales")).memory.begin().tries == 0
    draft = SkippingLM(lm, Skipping("random", 0.5, search=search))
    drafter = method.parts(lm).drafter
    one, other = (
        Session(prompt, replace(method.parts(lm), drafter=replace(drafter, lm=draft)), Warp(), Limits(20), key)
        for key, prompt in enumerate(PROMPTS[:2])
    )
    first = draft.skipped(other)
    list(decode(lm, [one]))
    assert draft.skipped(other) == first


@needs_numba
def test_the_set_in_use_is_measured_again_where_the_text_has_moved_on():
    lm = target_of()
    settings = Skipping("random", 0.5, search=SkipSearch(context=8, enough=1.0, interval=1))
    draft = SkippingLM(lm, settings)
    parts = sb.swift("random", rule="match").parts(lm)
    parts = replace(parts, drafter=replace(parts.drafter, lm=draft))
    session = Session(PROMPTS[0], parts, Warp(), Limits(40), 5)
    measured = []
    for _ in decode(lm, [session]):
        if draft in session.state:
            measured.append(session.state[draft].measured_at)
    moves = sorted({start for start in measured if start is not None})
    assert len(moves) > 2
    assert min(np.diff(moves)) >= 4


# CLaSp.


def test_dynamic_programming_is_brute_force_where_layers_add_constants():
    """SW-6: each layer adds a constant of a direction of its own, so the shortest ones are dispensable."""
    rng = np.random.default_rng(4)
    for layers, count in ((4, 1), (6, 3), (7, 5)):
        constants = np.zeros((layers, layers + 1), dtype=np.float32)
        constants[np.arange(layers), np.arange(layers)] = rng.random(layers) + 0.1
        first = np.zeros(layers + 1, dtype=np.float32)
        first[-1] = 1.0
        rows = []

        def run(layer, states, constants=constants, rows=rows):
            rows.append(len(states))
            return states + constants[layer]

        found = dispensable_layers(run, first, layers, count)
        whole = first + constants.sum(0)

        def nearness(gone, first=first, constants=constants, whole=whole):
            state = first + np.delete(constants, list(gone), 0).sum(0)
            return state @ whole / np.linalg.norm(state) / np.linalg.norm(whole)

        assert found == max(itertools.combinations(range(layers), count), key=nearness)
        assert max(rows) <= count + 1


@needs_numba
def test_clasp_finds_the_layers_that_do_nothing():
    """On the states that the target's own layers make of the newest token, which are the plain forward's."""
    lm = target_of(layers=6)
    with torch.no_grad():
        for layer in (2, 4):
            for weight in (lm.model.model.layers[layer].self_attn.o_proj, lm.model.model.layers[layer].mlp.down_proj):
                weight.weight.mul_(1e-3)
    lm = HuggingFaceLM(lm.model, engine="compiled", share_from=None)
    method = sb.swift("clasp", ratio=0.34, every=1)
    sets = set()
    (session,) = Request.of(pair_of(lm), PROMPTS[:1], method, Settings.given({"max_new_tokens": 8}, None), 3).sessions
    for _ in decode(lm, [session]):
        (draft,) = lm.skipping.values()
        sets |= {session.state[draft].skipped} if draft in session.state else set()
    assert sets == {Sublayers.of_layers((2, 4))}


@needs_numba
def test_clasp_waits_until_a_token_after_the_first_is_stored():
    lm = target_of(layers=6)
    greedy = texts(sessions_of(lm, sb.greedy(), [[3], [3, 4]], tokens=6))
    assert texts(sessions_of(lm, sb.swift("clasp", every=1), [[3], [3, 4]], tokens=6, temperature=0)) == greedy
    (draft,) = lm.skipping.values()
    request = Request.of(pair_of(lm), [[3], [3, 4]], sb.greedy(), Settings.given({"max_new_tokens": 2}, None), 3)
    for session in request.sessions:
        (cache,) = lm.caches_before_roots([session])
        assert draft._by_states(session, cache) is None
        lm.close(session)


# What is refused.


@needs_numba
def test_what_cannot_work_is_refused_with_a_reason():
    plain = target_of(engine="plain")
    with pytest.raises(NotSupported, match="swift needs the compiled forward"):
        sb.swift().parts(plain)
    with pytest.raises(NotSupported, match="transformers model"):
        sb.swift().parts(None)
    lm = target_of()
    for settings, why in (
        ({"skip": "a9"}, "layers 0 to 4"),
        ({"skip": " ".join(f"a{n} m{n}" for n in range(LAYERS))}, "at least one must run"),
        ({"skip": "exit", "layers": LAYERS}, "5 layers: choose 1 to 4"),
        ({"skip": "exit"}, "needs layers"),
        ({"skip": "best"}, "names no sublayer"),
        ({"skip": "a1", "ratio": 0.5}, "ignores ratio"),
        ({"skip": "bayes", "every": 3}, "ignores every"),
        ({"ratio": 1.0}, "share in"),
        ({"sure": 0.5, "controller": "fixed"}, "ignores sure"),
        ({"sure": 2}, "probability"),
        ({"skip": "clasp", "every": 0}, "at least 1"),
        ({"controller": "cost"}, "have no fixed sizes"),
    ):
        with pytest.raises(BadSetting, match=why):
            sb.swift(**settings).parts(lm)
    for wrong, why in (
        ({"window": "last"}, "window"),
        ({"context": 0}, "context is 0"),
        ({"enough": 2.0}, "enough is 2.0"),
        ({"bayes_every": -1}, "bayes_every is -1"),
    ):
        with refused(why):
            SkipSearch(**wrong)
    for few, settings, why in (
        (2, {}, "0.45 of the 0 sublayers"),
        (2, {"skip": "random", "ratio": 0.9}, "0.9 of the 0 sublayers"),
        (3, {}, "0.45 of the 2 sublayers"),
        (2, {"skip": "clasp"}, "0.45 of the 2 layers"),
    ):
        with pytest.raises(NotSupported, match=f"{why}.* each draft would cost a whole pass"):
            sb.swift(**settings).parts(target_of(layers=few))
    assert sb.swift(ratio=0.5).parts(target_of(layers=3)).law  # one of the two


@needs_numba
def test_drafts_on_free_slots_go_with_a_copied_beginning():
    prompt = list(range(3, 12))
    texts = []
    for share_from in (None, 4):
        target = target_of(share_from=share_from)
        settings = Settings.given({"max_new_tokens": 5}, None)
        sessions = list(Request.of(pair_of(target), [prompt, prompt], sb.swift("a1"), settings, 3).sessions)
        list(decode(target, sessions))
        texts.append([session.settled for session in sessions])
    assert texts[0] == texts[1]
    assert all(texts[0])


@needs_numba
def test_load_takes_it_as_a_draft_for_any_method():
    model = target_of().model
    pair = sb.load(model, draft="swift")
    assert isinstance(pair.draft, SkippingLM)
    assert sb.load(model, draft=Skipping("a1")).draft.skipped(seat([1])) == Sublayers((1,))
    with pytest.raises(BadSetting, match="quantize_draft"):
        sb.load(model, draft="swift", quantize_draft="int8")
    outs = [
        sb.generate(pair, [4, 5], method, seed=2, max_new_tokens=6)[0].tokens
        for method in (sb.opt_tree(4, 2), sb.sampling())
    ]
    assert outs[0] == outs[1]


@needs_numba
def test_the_command_line_names_sets_and_searches(capsys):
    assert method_from("swift", ["skip=exit", "layers=2", "depth=4"]).name == "swift"
    assert method_from("swift", ["skip=a1 m2", "siblings=false"]).exact
    lm = target_of()
    method_from("swift", ["task=2024"]).parts(lm)
    (settings,) = lm.skipping
    assert settings.task == "2024"
    with pytest.raises(BadSetting, match="search of swift is '8'; it takes a SkipSearch, which has no text form"):
        method_from("swift", ["search=8"])
    with pytest.raises(BadSetting, match="takes a Sequence"):
        method_from("multi_draft", ["others=x"])
    with pytest.raises(BadSetting, match="the setting 'task' has no value"):
        method_from("swift", ["task"])
    assert method_from("sequoia", ["acceptance=0.7,0.2"]).name == "sequoia"  # as `specbeam bench acceptance` says
