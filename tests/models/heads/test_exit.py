"""Exit heads: one layer behind the target's first layers, on the target's own cache; each layer runs once on each token."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.core.beams import Beams
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.needs import OddsMemory
from specbeam.core.control.pace import PaceMemory
from specbeam.core.decode import decode
from specbeam.core.forest import Forest, next_start, rows_of_nodes, turn_rows
from specbeam.core.ranked import whole_rows
from specbeam.core.records import Needs, Verdict
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.cpu.early import EXIT_ROWS, FIRST_ROWS, LAST_ROWS
from specbeam.engines.cpu.layers import all_layers
from specbeam.errors import BadHead, BadSetting, NotSupported
from specbeam.lab.train.head_files import write_head
from specbeam.models.heads.exit import ExitHead, ExitLM, exit_model, how_it_runs
from specbeam.models.heads.own import own_config
from specbeam.models.heads.probe import fit_of, probed_text
from specbeam.models.heads.read import is_head, read_head
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.recipes.depth import _Learnt
from specbeam.recipes.tuning.costs import CONTEXT, curve_of, rest_curve
from tests.support.seats import keeping, moved, node_paths, plain_logits, random_forest, random_turn, seat
from tests.support.tiny_models import tiny

LAYERS = 4
VOCAB = 64
LONG = [(7 * place + 3) % 60 for place in range(90)]
PROMPTS = [[3, 4, 5], LONG, [*LONG, 5], [9]]


def model_of(family="llama", layers=LAYERS, **changes):
    named = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    return tiny(family, seed=1, vocab_size=VOCAB, **named, **changes)


def head_of(model, after=2, noise=0.1):
    """An exit head: what a new one is, with noise in place of training."""
    torch.manual_seed(after)
    head = ExitHead(model, after)
    for weight in head.parameters():
        weight.data += noise * torch.randn_like(weight)
    return head.requires_grad_(False)


def exit_of(after=2, chunk=512, share_from=None, family="llama", engine="compiled", noise=0.1):
    target = HuggingFaceLM(model_of(family), chunk, engine, share_from)
    draft = exit_model(head_of(target.model, after, noise), target)
    target.curves[CONTEXT] = CostCurve(
        (1, 64), (10.0, 12.0)
    )  # for controllers that weigh costs: passes cost more than Python
    draft.curves[CONTEXT] = CostCurve((1, 64), (1.0, 1.2))
    target.learnt[draft] = _Learnt(OddsMemory(), PaceMemory())  # of no earlier test
    return draft


def pair_of(draft):
    return Pair(draft.target.model, None, None, draft.target, draft)


def pruned_at_random(rng, forest):
    """The forest without some of its drafts, and all below them."""
    known = set(forest.known.nodes.tolist())
    kept = []
    for node in range(forest.size):
        stays = forest.parents[node] < 0 or node in known or rng.random() < 0.7
        if stays and (forest.parents[node] < 0 or forest.parents[node] in kept):
            kept.append(node)
    return forest.selected(np.array(kept))


@pytest.mark.parametrize(
    ("family", "after", "keeps", "engine"),
    [
        ("llama", 1, True, "compiled"),
        ("llama", 3, False, "compiled"),
        ("qwen2-window", 2, True, "compiled"),
        ("gemma2", 2, True, "compiled"),
        ("gpt2", 1, True, "compiled"),
        ("gpt_neox", 2, False, "compiled"),
        ("opt", 2, True, "compiled"),
        ("bloom", 1, True, "compiled"),
        ("falcon-40b", 3, False, "compiled"),
        ("granite", 3, True, "compiled"),
        ("llama", 1, True, "layers"),
        ("qwen2-window", 2, False, "layers"),
    ],
)
def test_rows_are_those_of_plain_forwards(family, after, keeps, engine):
    """Over turns of trees with several roots: some drafts are not given to the target, others it is given alone, nodes are
    kept, long prompts come in pieces, and sessions come and go. The target's rows are those of its own plain forwards."""
    draft = exit_of(after, chunk=5, family=family, engine=engine)
    target = draft.target
    exited = draft.head.exited()
    needs = draft.needs_of_target
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, VOCAB, length).tolist(), keeps) for length in (1, 12)]
    for turn_number in range(6):
        forests = [random_forest(rng, [text[-1] for text in one.texts], VOCAB, 4, one.start) for one in seats]
        if turn_number != 2:  # a turn without a draft
            for one, forest, found in zip(seats, forests, draft.extend(seats, forests), strict=True):
                fresh = np.setdiff1d(np.arange(forest.size), forest.known.nodes)
                paths = node_paths(one.texts, forest)
                expected = plain_logits(exited, [paths[node] for node in fresh])
                torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)
        given = [pruned_at_random(rng, forest) for forest in forests]
        given = [forest.grown([64 - 1 - turn_number], [forest.size - 1]) for forest in given]  # nobody looked at it
        for one, forest, found in zip(seats, given, target.extend(seats, given, [needs] * len(seats)), strict=True):
            rows = turn_rows(whole_rows(found.logits.numpy()), forest.size, forest.known)
            expected = plain_logits(target.model, node_paths(one.texts, forest))
            every = torch.from_numpy(rows_of_nodes(rows, np.arange(forest.size)).logits)
            torch.testing.assert_close(every, expected, atol=3e-4, rtol=3e-4)
            turn = random_turn(rng, forest, VOCAB)
            turn = keeping(rng, turn) if keeps else turn
            target.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
            if keeps:
                last = turn.verdict.beams
                one.start = next_start(forest.tokens, forest.parents, rows, last.nodes, last.tokens, turn.verdict.kept)
        if turn_number == 4:
            target.close(seats.pop(0))
            seats.append(seat([3, 4], keeps))


def test_keys_and_values_are_those_of_a_fresh_prompt_after_each_turn():
    """In all layers and in the exit layer, for each token of each live text; but for those that it has not seen yet."""
    draft = exit_of(2)
    target = draft.target
    store = target.runner.store
    rng = np.random.default_rng(2)
    one = seat(rng.integers(0, VOCAB, 9).tolist())
    compared = 0
    for _ in range(8):
        forest = random_forest(rng, [text[-1] for text in one.texts], VOCAB, 6)
        draft.extend([one], [forest])
        given = pruned_at_random(rng, forest)
        target.extend([one], [given], [draft.needs_of_target])
        turn = random_turn(rng, given, VOCAB)
        target.settle(one, turn)
        one.texts = moved(one.texts, given, turn)
        cache = one.state[target]
        trie = cache.trie
        behind = set(cache.waiting_feed.slots.tolist())
        for root, text in zip(trie.root_at.tolist(), one.texts, strict=True):
            leaf = root if root < trie.stored else int(trie.parents[root])
            slots = np.flatnonzero(trie.seen[leaf])
            slots = slots[trie.slot_position[slots].argsort()]
            fresh = seat(text[: len(slots)])
            draft.extend([fresh], [Forest.rooted([fresh.prompt[-1]])])
            target.extend([fresh], [Forest.rooted([fresh.prompt[-1]])], [draft.needs_of_target])
            other = fresh.state[target]
            theirs = np.flatnonzero(other.trie.used)
            theirs = theirs[other.trie.slot_position[theirs].argsort()]
            for layer in range(LAYERS + 1):
                for slot, their in zip(slots.tolist(), theirs.tolist(), strict=True):
                    if layer == LAYERS and slot in behind:
                        continue
                    (panel, column), (their_panel, their_column) = (
                        divmod(slot, store.columns),
                        divmod(their, store.columns),
                    )
                    keys = store.keys_by_panel[layer]
                    values = store.values_by_slot[layer]
                    np.testing.assert_allclose(
                        keys[cache.row, :, panel, :, column],
                        keys[other.row, :, their_panel, :, their_column],
                        atol=1e-4,
                    )
                    np.testing.assert_allclose(values[cache.row, :, slot], values[other.row, :, their], atol=1e-4)
                    compared += 1
            target.close(fresh)
    assert compared > 1000


class Counting:
    """Adds up the rows that the first layers, the exit layer and the other layers compute for sessions until they are closed."""

    def __init__(self, monkeypatch, target):
        self.rows = np.zeros(3, dtype=np.int64)
        close = target.close

        def count_and_close(session):
            if hasattr(session, "parts"):  # no prompt on which passes are timed
                self.rows += session.state[target].early.counts[[FIRST_ROWS, EXIT_ROWS, LAST_ROWS]]
            close(session)

        monkeypatch.setattr(target, "close", count_and_close)

    @property
    def first(self):
        return int(self.rows[0])

    @property
    def exit(self):
        return int(self.rows[1])

    @property
    def last(self):
        return int(self.rows[2])


METHODS = {
    "chain": sb.speculative_sampling(3),
    "tree": sb.rsd_c((2, 2)),
    "best first": sb.opt_tree(6, 3),
    "beams": sb.dsbd(3, 4, 3, "fixed"),
    "beams by rejection": sb.dsbd(3, 4, 2, "fixed", coupling="rejection"),
    "beams by need": sb.dsbd(3),
    "a search": sb.speculative_beam_search(3, depth=3),
}


def run_of(draft, method, prompts=PROMPTS, tokens=12, **options):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": [], **options}, None)
    request = Request.of(pair_of(draft), prompts, method, settings, 3)
    turns = [turn for done in decode(draft.target, request.sessions) for _, turn in done]
    assert [session.failure for session in request.sessions] == [None] * len(prompts)
    assert draft.target.caches == []
    return request.sessions, turns


@pytest.mark.parametrize("name", METHODS)
def test_no_layer_runs_twice_on_a_token(name, monkeypatch):
    """The first layers run on each node of a draft once, the others on those that the target is given, once; the exit layer
    on each node that is drafted from, and once on what lives on. So a token that is accepted costs each layer one row."""
    draft = exit_of(2)
    run_of(draft, METHODS[name], [[3, 4, 5]])  # measures the costs of passes, where depth follows from them
    counting = Counting(monkeypatch, draft.target)
    (session,), turns = run_of(draft, METHODS[name], [[3, 4, 5]])
    given = sum(turn.forest.size - len(turn.forest.known.nodes) for turn in turns)
    prompt = 2  # its last token is the first root
    stored_roots = sum(int((turn.verdict.beams.nodes >= 0).sum()) for turn in turns[:-1] if not session.keeps_nodes)
    assert (counting.last, stored_roots) == (given + prompt - stored_roots, stored_roots)
    assert counting.first >= counting.last
    if name in ("chain", "tree", "beams by rejection"):  # where the target is given all that was drafted
        assert counting.first == counting.last
    assert counting.exit <= counting.first
    drafted = sum(turn.verdict.accepted for turn in turns)
    assert drafted > 0


def test_the_first_layers_run_once_for_each_draft_and_the_root(monkeypatch):
    """A chain of m drafts costs m + 1 rows of each layer, and m or m + 1 of the exit layer: the last draft waits."""
    draft = exit_of(2, noise=0.0)
    counting = Counting(monkeypatch, draft.target)
    _, turns = run_of(draft, sb.speculative_sampling(3), [[3]], tokens=9)
    nodes = sum(turn.forest.size for turn in turns)
    assert (counting.first, counting.last) == (nodes, nodes)
    accepted_whole = sum(turn.verdict.accepted == turn.forest.size - 1 for turn in turns)
    drafts = sum(turn.forest.size - 1 for turn in turns)
    assert drafts <= counting.exit <= drafts + accepted_whole


RUNNING = {  # method, layers before the exit, and tokens of a prompt in one pass
    "chain": (sb.speculative_sampling(3), 1, 16),
    "chain by a coin": (sb.eesd(5, controller="calibration_ts"), 1, 16),
    "beams": (sb.dsbd(3, 4, 3, "fixed"), 1, 16),
    "beams that are cut": (sb.dsbd(3), 3, 512),
}


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("name", RUNNING)
def test_turns_with_an_exit_layer_run_ahead(name, monkeypatch):
    """From the first one on. Texts and reports, and how many rows each layer computes, are those of turns one by one."""
    method, layers, chunk = RUNNING[name]
    draft = exit_of(layers, chunk, noise=0.02)
    loop, seen = runs.run_turns, []

    def run_turns(target, draft, spec, live, start, room, turns, dice):
        found = loop(target, draft, spec, live, start, room, turns, dice)
        seen.append(int(room.numbers[runs.DONE]))
        return found

    monkeypatch.setattr(runs, "run_turns", run_turns)
    options = {"max_new_tokens": 40, "eos_token_id": [60], "seed": 3}
    found = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
        draft.target.learnt[draft] = _Learnt(OddsMemory(), PaceMemory())
        with monkeypatch.context() as patch:
            counting = Counting(patch, draft.target)
            texts = [sb.generate(pair_of(draft), [prompt], method, **options)[0] for prompt in PROMPTS]
        found.append((texts, counting.rows.tolist()))
    (ahead, rows), (one_by_one, other_rows) = found
    assert rows == other_rows
    assert sum(seen) == sum(one.report.target_passes for one in ahead)
    for run, turned in zip(ahead, one_by_one, strict=True):
        assert [(beam.tokens, beam.score) for beam in run.beams] == [(beam.tokens, beam.score) for beam in turned.beams]
        for field in ("target_passes", "draft_passes", "accepted", "widths", "rows", "peak_kv_tokens"):
            assert getattr(run.report, field) == getattr(turned.report, field), field
    assert sum(one.report.accepted for one in ahead) > 0
    assert draft.target.caches == []


@pytest.mark.parametrize("share_from", [None, 8])
@pytest.mark.parametrize("name", ["beams", "beams by need", "a search"])
def test_the_same_seed_gives_the_beams_of_decoding_without_a_draft(name, share_from):
    draft = exit_of(2, chunk=16, share_from=share_from)
    plain = sb.beam_search(3) if name == "a search" else sb.beam_sampling(3)
    found, _ = run_of(draft, METHODS[name])
    expected, _ = run_of(draft, plain)
    texts = [[[one.tokens for one in session.hypotheses()] for session in sessions] for sessions in (found, expected)]
    assert texts[0] == texts[1]
    assert sum(session.count.accepted for session in found) > 0


@pytest.mark.parametrize("name", ["chain", "tree", "best first", "beams", "a search"])
def test_layers_that_torch_runs_one_by_one_give_the_same_drafts(name, monkeypatch):
    """As the compiled forward: texts, accepted drafts, tokens in the cache, and rows of each layer, over batches too."""
    found = []
    for engine in ("layers", "compiled"):
        draft = exit_of(2, chunk=16, engine=engine)
        with monkeypatch.context() as patch:
            counting = Counting(patch, draft.target)
            sessions, turns = run_of(draft, METHODS[name])
        texts = [[one.tokens for one in session.hypotheses()] for session in sessions]
        peaks = [session.count.peak_kv_tokens for session in sessions]
        found.append((texts, peaks, counting.rows.tolist(), sum(turn.verdict.accepted for turn in turns)))
    assert found[0] == found[1]
    assert found[0][3] > 0


def test_an_exit_layer_drafts_for_a_target_in_bfloat16():
    """Which the compiled forward does not take; as a model of its own the same layers give the same logits."""
    model = model_of().bfloat16()
    target = HuggingFaceLM(model, engine="layers")
    head = head_of(model, 2, 0.02)
    draft = exit_model(head, target)
    assert isinstance(draft, ExitLM)
    assert "on the target's own cache" in how_it_runs(head, target)
    one = seat([3, 4, 5, 6])
    forest = Forest.rooted([6]).grown([7, 8], [0, 0])
    (found,) = draft.extend([one], [forest])
    (whole,) = target.extend([one], [forest], [draft.needs_of_target])
    paths = node_paths(one.texts, forest)
    for rows, other in ((found, head.bfloat16().exited()), (whole, model)):
        expected = plain_logits(other, paths)
        assert float((rows.logits - expected).abs().max() / expected.std()) < 0.1
    pair = Pair(model, None, None, target, draft)
    options = {"max_new_tokens": 8, "eos_token_id": [], "seed": 2}
    beams = sb.generate(pair, PROMPTS[:1], sb.dsbd(2, 3, 2), **options)
    assert beams[0].report.draft_passes > 0


@pytest.mark.parametrize("width", ["auto", "dynamic"])
def test_beams_of_other_widths_are_those_of_beam_sampling_with_them(width):
    draft = exit_of(2)
    found, _ = run_of(draft, sb.dsbd(4, width=width))
    if width == "auto":
        expected, _ = run_of(draft, sb.beam_sampling(4, width=width))
        assert [[one.tokens for one in session.hypotheses()] for session in found] == [
            [one.tokens for one in session.hypotheses()] for session in expected
        ]
    assert sum(session.count.accepted for session in found) > 0


NAMED = ("fixed", "beta_ts", "calibration_ts", "survival", "thompson", "confidence")


@pytest.mark.parametrize("after", [1, 2, 3])
def test_at_temperature_0_texts_are_those_of_transformers(after):
    draft = exit_of(after)
    expected = []
    for prompt in PROMPTS[:2]:
        out = draft.target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
        )
        expected.append(out[0, len(prompt) :].tolist())
    methods = [sb.eesd(depth, controller=name) for name, depth in zip(NAMED, (1, 2, 4, 8, 16, 5), strict=True)]
    methods += [sb.eesd(3, (2, 1), controller="fixed"), sb.eesd(4, (2, 2, 1), rule="traversal")]
    for method in methods:
        sessions, _ = run_of(draft, method, PROMPTS[:2], tokens=14, temperature=0.0)
        assert [next(session.hypotheses()).tokens for session in sessions] == expected


def test_a_copy_of_the_last_layer_behind_all_others_is_the_target():
    """A new head begins as such a copy, so every draft of it is accepted."""
    draft = exit_of(LAYERS - 1, noise=0.0)
    _, turns = run_of(draft, sb.speculative_sampling(3), [[3, 4, 5]], tokens=13)
    assert [turn.verdict.accepted for turn in turns] == [turn.forest.layers for turn in turns]


@pytest.mark.parametrize("name", ["chain", "tree", "beams"])
def test_nothing_but_the_exit_layer_is_stored_besides_the_target(name):
    """As many tokens as the target stores when a model of its own drafts the same, and one layer more for each of them."""
    draft = exit_of(2)
    target = draft.target
    store = target.runner.store
    assert (len(store.keys_by_panel), len(store.values_by_slot)) == (LAYERS + 1, LAYERS + 1)
    sessions, _ = run_of(draft, METHODS[name], [PROMPTS[0]])
    apart = HuggingFaceLM(target.model, engine="compiled")
    other = HuggingFaceLM(draft.head.exited(), engine="compiled")
    settings = Settings.given({"max_new_tokens": 12, "eos_token_id": []}, None)
    request = Request.of(Pair(target.model, None, None, apart, other), [PROMPTS[0]], METHODS[name], settings, 3)
    list(decode(apart, request.sessions))
    texts = [[one.tokens for one in some[0].hypotheses()] for some in (sessions, request.sessions)]
    assert texts[0] == texts[1]
    assert sessions[0].count.peak_kv_tokens == request.sessions[0].count.peak_kv_tokens
    stores = (store, apart.runner.store)
    per_slot = [one.keys_by_panel.nbytes / (one.caches * one.slots) for one in stores]
    assert per_slot[0] / per_slot[1] == (LAYERS + 1) / LAYERS


def test_an_exit_layer_that_is_gone_leaves_its_room_to_the_next():
    draft = exit_of(1)
    target = draft.target
    place = draft.layer.place
    second = ExitLM(head_of(target.model, 2), target)
    assert (place, second.layer.place) == (LAYERS, LAYERS + 1)
    del draft
    assert ExitLM(head_of(target.model, 3), target).layer.place == place
    assert len(target.runner.store.keys_by_panel) == LAYERS + 2


def test_compacting_moves_what_the_exit_layer_has_not_seen():
    """Between a turn that leaves drafts behind the exit layer and the next one, slots are moved to the front."""
    draft = exit_of(2)
    target = draft.target
    exited = draft.head.exited()
    rng = np.random.default_rng(5)
    one = seat([3, 4, 5])
    moves = 0
    for _ in range(8):
        forest = random_forest(rng, [text[-1] for text in one.texts], VOCAB, 8)
        (found,) = draft.extend([one], [forest])
        expected = plain_logits(exited, node_paths(one.texts, forest))
        torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)
        leaves = forest.grown([1, 2], [forest.size - 1, forest.size - 2])
        target.extend([one], [leaves], [draft.needs_of_target])
        turn = random_turn(rng, leaves, VOCAB)
        target.settle(one, turn)
        one.texts = moved(one.texts, leaves, turn)
        before = one.state[target].trie.extent
        target.compact(one)
        moves += before > one.state[target].trie.extent
    assert moves > 0


def test_after_many_turns_without_drafts_few_nodes_wait_for_the_exit_layer():
    """And the next draft is made from all of them."""
    draft = exit_of(2)
    target = draft.target
    one = seat([3, 4, 5])
    waiting = []
    for number in range(80):
        forest = Forest.rooted([one.texts[0][-1]])
        target.extend([one], [forest], [draft.needs_of_target])
        cache = one.state[target]
        waiting.append(cache.waiting)
        token = np.array([number % 50])
        none = np.zeros(1, dtype=np.int64)
        beams = Beams(none - 1, token, np.zeros(1), none + 1, np.zeros(1, dtype=np.uint64))
        turn = random_turn(np.random.default_rng(0), forest, VOCAB, most=1)
        layers = turn.verdict.layers._replace(beams=beams, parents=none)
        target.settle(one, replace(turn, verdict=Verdict(layers)))
        one.texts = [[*one.texts[0], int(token[0])]]
    assert 30 < max(waiting) <= 65
    (found,) = draft.extend([one], [Forest.rooted([one.texts[0][-1]])])
    expected = plain_logits(draft.head.exited(), one.texts)
    torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)


def test_a_session_of_another_method_shares_no_prefix_with_one_that_has_an_exit_layer(monkeypatch):
    """Its tokens have no rows in the exit layer."""
    draft = exit_of(2, chunk=16, share_from=8)
    settings = Settings.given({"max_new_tokens": 8, "eos_token_id": [], "temperature": 0.0}, None)
    pair = pair_of(draft)
    methods = (sb.sampling(), sb.eesd(3), sb.sampling(), sb.eesd(3))
    requests = [Request.of(pair, [LONG], method, settings, 3) for method in methods]
    sessions = [session for request in requests for session in request.sessions]
    copied = set()
    copy = draft.target._copy_beginning

    def watched(leader, cache):
        copied.add((leader.needs.exit_layer is None, cache.needs.exit_layer is None))
        copy(leader, cache)

    monkeypatch.setattr(draft.target, "_copy_beginning", watched)
    list(decode(draft.target, sessions))
    assert copied == {(True, True), (False, False)}
    texts = [next(session.hypotheses()).tokens for session in sessions]
    assert texts.count(texts[0]) == 4


ELSEWHERE = [("llama", "plain"), ("gpt2", "plain"), ("gemma2", "plain"), ("opt", "plain")]


@pytest.mark.parametrize(("family", "engine"), ELSEWHERE)
def test_where_a_range_of_layers_cannot_run_the_first_layers_run_twice_and_this_is_said(family, engine):
    target = HuggingFaceLM(model_of(family), engine=engine)
    head = head_of(target.model, 2, 0.01)
    draft = exit_model(head, target)
    assert type(draft) is HuggingFaceLM
    assert draft.head is head
    assert f"engine '{engine}' runs all layers of the target at once" in how_it_runs(head, target)
    assert "are computed twice" in how_it_runs(head, target)
    pair = Pair(target.model, None, None, target, draft)
    options = {"seed": 2, "max_new_tokens": 9, "eos_token_id": []}
    prompts = [PROMPTS[0], PROMPTS[3]]
    ours = sb.generate(pair, prompts, sb.dsbd(2, 3, 2), **options)
    plain = sb.generate(pair, prompts, sb.beam_sampling(2), **options)
    assert [one.tokens for one in ours] == [one.tokens for one in plain]
    greedy = sb.generate(pair, prompts, sb.eesd(3), **options | {"temperature": 0.0})
    expected = sb.generate(pair, prompts, sb.greedy(), **options)
    assert [one.tokens for one in greedy] == [one.tokens for one in expected]
    assert ours[0].report.draft_passes > 0


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi", "opt", "falcon"])
def test_what_is_learnt_is_what_drafts(family):
    """The logits that training sees are those of the model that drafts, in each family's own way to call a layer."""
    model = model_of(family)
    head = head_of(model, 2, 0.02)
    target = HuggingFaceLM(model, engine="plain")
    text = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    (rows,) = head.drafts(probed_text(target, text, ()).trees, 3, torch.ones(1, 11, dtype=torch.bool))
    expected = plain_logits(head.exited(), [text[: place + 1] for place in range(11)])
    torch.testing.assert_close(rows.logits, expected, atol=2e-4, rtol=2e-4)


def test_gradients_reach_the_layer_and_its_norm_alone():
    model = model_of()
    head = ExitHead(model, 2)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    text = probed_text(HuggingFaceLM(model, engine="plain"), [3, 4, 5, 6, 7], ())
    (rows,) = head.drafts(text.trees, 1, torch.ones(1, 4, dtype=torch.bool))
    rows.logits.logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in head.parameters())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {"layer", "norm"}


@pytest.fixture
def folder(tmp_path):
    """The folder of a head, and its target."""
    model = model_of()
    head = head_of(model, 2)
    write_head(head, own_config("eesd", head, model), tmp_path, model)
    return tmp_path, model, head


def test_a_folder_is_read_as_it_was_written(folder):
    path, model, head = folder
    assert is_head(path)
    found = read_head(path, model)
    assert found.after == 2
    for (name, ours), (_, theirs) in zip(found.named_parameters(), head.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert not ours.requires_grad
    pair = sb.load(model, draft=path, probe=False)
    assert isinstance(pair.draft, ExitLM)
    assert sb.load(model, draft=str(path), probe=False).draft is not None
    assert "on the target's own cache" in how_it_runs(found, pair.target)
    assert found.described["kind"] == "EESD: an exit layer after the target's first 2 of 4 layers"


CHANGES = [
    ({"exit_layer": 4}, {}, "after 4 layers; LlamaForCausalLM has 4: it must be after 1 to 3"),
    ({"exit_layer": 0}, {}, "exit_layer is 0"),
    ({"exit_layer": None}, {}, "no exit_layer"),
    ({"target": None}, {}, "no target"),
    (
        {"target": {"model_type": "qwen2"}},
        {},
        "target.model_type is 'qwen2' in config.json; it must be the target's, 'llama'",
    ),
    ({}, {"norm.weight": torch.ones(31)}, "norm.weight is"),
    ({}, {"layer.more": torch.ones(3)}, "tensors that are not known: layer.more"),
]


@pytest.mark.parametrize(("config", "tensors", "said"), CHANGES)
def test_a_head_of_another_target_or_a_broken_one_is_refused_by_name(folder, config, tensors, said):
    path, model, _ = folder
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stated | config))
    save_file(load_file(path / "model.safetensors") | tensors, path / "model.safetensors")
    with pytest.raises(BadHead, match=said):
        read_head(path, model)


def test_a_head_of_a_target_of_other_layers_is_refused(folder):
    path, _, _ = folder
    with pytest.raises(BadHead, match=r"num_hidden_layers is 4 in config.json; it must be the target's, 5"):
        sb.load(model_of(layers=5), draft=path)


def test_what_a_pass_costs_is_measured_and_the_rest_of_the_target_is_cheaper():
    draft = exit_of(2)
    draft.curves.clear()
    draft.target.curves.clear()
    steps = curve_of(draft)
    whole = curve_of(draft.target)
    assert len(steps.seconds) == len(steps.nodes) > 3
    assert min(steps.seconds) > 0
    rest = rest_curve(whole, steps, LAYERS, 2)
    assert all(part <= all_s for part, all_s in zip(rest.seconds, whole.seconds, strict=True))
    assert draft.target.caches == []


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_its_weights_are_rounded_as_those_of_the_target(kind, packed):
    """To bfloat16 where those of the target are such numbers, to 8 bits where the target's are rounded."""
    model = model_of(hidden_size=64, intermediate_size=64)
    if kind == "bfloat16":
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
    target = HuggingFaceLM(model, engine="int8" if kind == "int8" else "compiled")
    draft = ExitLM(head_of(model, 2, 0.01), target)
    assert target.runner.decoder.kind.removesuffix(" tiles") == kind
    assert draft.layer.weights.qkv.dtype == target.runner.decoder.weights.qkv.dtype
    one = seat([3, 4, 5, 6])
    forest = Forest.rooted([6]).grown([7, 8], [0, 0])
    (found,) = draft.extend([one], [forest])
    expected = plain_logits(draft.head.exited(), node_paths(one.texts, forest))
    limit = 0.05 if kind == "bfloat16" else 0.3
    assert float((found.logits - expected).abs().max() / expected.std()) < limit


def test_its_norms_are_rounded_to_float16_with_its_matrices():
    model = model_of()
    head = head_of(model, 2, 0.01)
    head.norm.weight.data += 0.0003
    target = HuggingFaceLM(model_of().half(), engine="compiled")
    assert target.runner.decoder.kind == "float16"
    layer = target.runner.exit_layer(head.layer, head.norm, head.after)
    assert np.array_equal(layer.norm, head.norm.weight.detach().half().float().numpy())
    assert not np.array_equal(layer.norm, head.norm.weight.detach().numpy())


def test_the_compiled_layers_are_the_same_function_for_both():
    """An exit layer asks for no compiled form of its own: its arrays have the types of those of the target."""
    draft = exit_of(2)
    before = len(getattr(all_layers, "signatures", ()))
    run_of(draft, sb.speculative_sampling(2), [[3, 4]], tokens=4)
    one = len(getattr(all_layers, "signatures", ()))
    run_of(draft, sb.speculative_sampling(2), [[3, 4]], tokens=4)
    assert len(getattr(all_layers, "signatures", ())) == one <= before + 1


def test_rows_need_be_logits():
    draft = exit_of(2)
    with pytest.raises(NotSupported, match="ExitLM returns logits only"):
        draft.extend([seat([3])], [Forest.rooted([3])], [Needs(hidden=True)])
    other = ExitLM(head_of(draft.target.model, 1), draft.target)
    with pytest.raises(BadSetting, match="by different exit layers"):
        _ = draft.needs_of_target | other.needs_of_target
    one = seat([3, 4])
    draft.target.extend([one], [Forest.rooted([4])])
    with pytest.raises(NotSupported, match="has stored tokens without the exit layer"):
        draft.extend([one], [Forest.rooted([4])])


def test_a_head_fits_the_target_better_the_more_layers_are_before_it():
    model = model_of()
    target = HuggingFaceLM(model, engine="plain")
    text = probed_text(target, np.random.default_rng(0).integers(0, VOCAB, 40).tolist(), ())
    fits = [fit_of(head_of(model, after, 0.0), [text]) for after in (1, 2, 3)]
    assert fits[0].first < fits[2].first
    assert fits[2].first == pytest.approx(1.0, abs=1e-4)
    assert fits[0].second is None
