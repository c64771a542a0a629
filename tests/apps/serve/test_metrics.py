"""The figures of a server: what is counted turn by turn and in compiled runs, and what is read of it."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import specbeam as sb
from specbeam.apps.serve.buckets import Buckets
from specbeam.apps.serve.engine import Engine, EngineLimits, NoRoom, room_of
from specbeam.core.decode import decode
from specbeam.core.forest import Forest
from specbeam.core.runs import TURNS
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import new_recall
from tests.apps.serve.conftest import CHUNK, LONG, SHORT, pair_on
from tests.apps.serve.test_engine import Ends, sessions_of
from tests.apps.serve.test_faults import answer_of, started, told

ROOT = Path(__file__).parents[3]
METHODS = [
    sb.speculative_sampling(),
    sb.dsbd(3, 4, 2),
    sb.speculative_beam_search(2, depth=2),
    sb.specinfer(),
    sb.sampling(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_drafts_are_counted_alike_turn_by_turn_and_in_runs(pair, method):
    """Against the forests themselves: nodes that a turn adds to those that it starts with, and layers that passed, by depth."""
    if not pair.target.supports_runs:
        pytest.skip("its turns are not compiled")
    drafted, passed, counts = 0, np.zeros(16, dtype=int), []
    for ahead in (0, TURNS):
        (session,) = Request.of(pair, [[3, 4]], method, Settings(**SHORT), 7).sessions
        kept = 0
        for turns in decode(pair.target, [session], ahead=ahead):
            for _, turn in turns if ahead == 0 else ():
                assert isinstance(turn.forest, Forest)
                roots = int((np.asarray(turn.forest.parents) < 0).sum())
                drafted += turn.forest.size - roots - kept
                kept = len(turn.verdict.kept)
                passed[: turn.verdict.layers.size] += turn.verdict.layers.passed
        counts.append((session.count.drafted, dict(session.count.passed), session.count.accepted))
    assert counts[0] == counts[1]
    assert counts[0][1] == {depth: count for depth, count in enumerate(passed.tolist()) if count}
    assert counts[0][2] == passed.sum()
    if method.name == "sampling":
        assert counts[0] == (0, {}, 0)
    else:
        assert counts[0][0] == drafted > 0


def figures_of(server):
    found = {}
    for line in server.metrics.text().decode().splitlines():
        if line.startswith("specbeam:"):
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("specbeam:").replace('model_name="tiny"', "").replace('engine="0"', "")] = float(
                value
            )
    return found


def test_figures_of_drafts_tokens_and_the_store_are_told(pair):
    with started(pair) as (server, app):

        async def ask(body):
            return answer_of(await told(app, {"prompt": [3, 4, 5], "max_tokens": 12, "seed": 1} | body))

        chain = {"specbeam": {"method": "speculative_sampling"}}
        answers = [asyncio.run(ask(body)) for body in (chain, {"num_beams": 3}, {"specbeam": {"method": "sampling"}})]
        for _ in range(2):  # the engine counts what is stored after it has told the owner of a text
            server.engine.call(lambda: None).result()
        found = figures_of(server)
        reports = [answer["specbeam"]["report"] for answer in answers]
        drafted = sum(report["drafted"] for report in reports)
        accepted = sum(report["accepted"] for report in reports)
        assert found["spec_decode_num_draft_tokens_total{,}"] == drafted > accepted
        assert found["spec_decode_num_accepted_tokens_total{,}"] == accepted
        by_depth = [
            value for name, value in found.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos")
        ]
        assert sum(by_depth) == accepted
        assert by_depth == sorted(by_depth, reverse=True)  # a layer passes only if those above it have
        assert reports[2]["drafted"] == 0
        passes = sum(report["target_passes"] for report in reports)
        assert found["target_passes_total{,}"] == passes
        assert found['pass_seconds_bucket{,le="+Inf",}'] == found["pass_seconds_count{,}"] == passes
        later = found["inter_token_latency_seconds_count{,}"]
        assert 0 < later < found["generation_tokens_total{,}"] * 3  # first tokens are none
        for role in ("target", "draft"):
            assert found[f'lanes{{,,role="{role}"}}'] == 0
            assert found[f'kv_tokens{{,,role="{role}"}}'] == 0
        assert found["kv_cache_usage_perc{,}"] == 0
        assert found["audit_failures_total{,}"] == 0
        told_of = {re.split(r"[{ ]", line)[0] for line in server.metrics.text().decode().splitlines()}
        told_of |= {
            line.split()[2] for line in server.metrics.text().decode().splitlines() if line.startswith("# TYPE")
        }
        board = (ROOT / "examples" / "serve" / "dashboard.json").read_text()
        for name in re.findall(r"specbeam:\w+", board):
            assert name in told_of, name
        page = (ROOT / "docs" / "serve_operator.md").read_text().partition("## Figures")[2]
        names = re.findall(r"`(\w+)(?:\{[\w,]+\})?`", page)
        assert len(names) > 30
        optional = {"position", "role", "kv_gb", "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"}
        for name in set(names) - optional - {"energy_joules_total"}:
            assert {f"specbeam:{name}", f"specbeam:{name}_count"} & told_of, name


def test_what_is_stored_is_told_while_it_is(pair):
    seen = []
    with Engine(pair, EngineLimits(chunk=CHUNK, kv_bytes=2**30)) as engine:
        one = Ends(sessions_of(pair, [LONG], sb.dsbd(3, 4, 2)))
        watch = one.jobs[0].watch
        one.jobs[0].watch = lambda job: (seen.append((dict(engine.counts.kv_tokens), engine.kv_share)), watch(job))
        one.jobs[0].see = lambda session, turn: None  # turn by turn, so that it is looked at before the end
        engine.submit(one.jobs)
        one.wait()
        engine.call(lambda: None).result()
        engine.call(lambda: None).result()
        assert set(engine.counts.kv_tokens.values()) == {0}
        assert engine.kv_share == 0
    stored, shares = zip(*seen[1:-1], strict=True)
    assert all(tokens[pair.target] >= len(LONG) - 1 for tokens in stored)
    assert all(0 < share < 1 for share in shares)


def test_a_histogram_counts_values_up_to_each_bound():
    buckets = Buckets((1, 2.5))
    for value, times in ((0.5, 1), (1, 2), (2, 3), (9, 1)):
        buckets.add(value, times)
    assert buckets.cumulated == [("1", 3), ("2.5", 6), ("+Inf", 7)]
    assert buckets.total == 0.5 + 2 + 6 + 9


@pytest.mark.parametrize("method", [sb.greedy(), sb.dsbd(3, 4, 3)], ids=lambda method: method.name)
def test_a_session_with_windows_is_admitted_by_the_room_that_its_windows_take(method):
    """What admission reckons with is at least what the stores then hold, however long the text is."""
    plain = pair_on("plain")
    lms = [HuggingFaceLM(model, engine="plain", share_from=None) for model in (plain.target_model, plain.draft_model)]
    recall = new_recall(plain.target_model.get_input_embeddings().weight, 8, 0)
    draft = MemoryLM(lms[1], MemoryPlan(12, 12, recall="initial"), None)
    pair = replace(plain, target=MemoryLM(lms[0], MemoryPlan(12, 4), recall), draft=draft)
    (session,) = sessions_of(pair, [LONG], method, max_new_tokens=40)
    (longer,) = sessions_of(pair, [LONG * 20], method, max_new_tokens=40)
    rooms = [room_of(lm, session) for lm in (pair.target, pair.draft)]
    assert rooms == [room_of(lm, longer) for lm in (pair.target, pair.draft)]
    most = np.zeros((2, 2), dtype=int)
    for _ in decode(pair.target, [session]):
        for number, lm in enumerate(lms):
            held = [cache.trie.held for cache in lm.caches]
            most[number] = np.maximum(most[number], (len(lm.caches), max(held, default=0)))
    assert session.failure is None
    assert most[0].all()
    for (rows, slots), room in zip(most, rooms, strict=True):
        assert rows <= room.rows
        assert slots <= room.slots

    needed = sum(room.rows * room.slots * lm.slot_bytes for room, lm in zip(rooms, lms, strict=True))
    with Engine(pair, EngineLimits(chunk=CHUNK, kv_bytes=needed - 1)) as engine, pytest.raises(NoRoom):
        engine.submit(Ends([longer]).jobs)
    with Engine(pair, EngineLimits(chunk=CHUNK, kv_bytes=needed)) as engine:
        ends = Ends(sessions_of(pair, [LONG], method, max_new_tokens=20))
        engine.submit(ends.jobs)
        (done,) = ends.wait()
        assert done.failure is None
