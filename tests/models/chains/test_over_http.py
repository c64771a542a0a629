"""Targets that a server scores, by both APIs, give the texts of specbeam's own engine."""

import json
import socket

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.beams import room_for_texts
from specbeam.core.forest import Forest
from specbeam.errors import BadSetting, MissingPackage, NotSupported, ServerGone, ServerRefused, SomeFailed
from specbeam.models.chains.chains import chains_of
from specbeam.models.chains.targets import OpenedTarget, add_target
from tests.support import words
from tests.support.scoring_server import serving

PROMPTS = ["abc", "Hello you", "xyz", "Not so fast"]
TOP = {"top_k": 5, "temperature": 0.8}
ALL = 61  # tokens of the vocabulary


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return words.saved(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def own(folders):
    return sb.load(*folders)


@pytest.fixture
def served(own, folders, request):
    """A pair whose target is scored by a server, and the server."""
    options = getattr(request, "param", {})
    with serving(own.target_model, folders[0], **options) as server:
        yield sb.load(f"openai:{server.url}", draft=folders[1]), server


def texts(pair, prompts, method, **options):
    return [
        [beam.tokens for beam in one.beams] for one in sb.generate(pair, prompts, method, max_new_tokens=12, **options)
    ]


METHODS = [
    (sb.greedy(), {}),
    (sb.beam_search(3), {}),
    (sb.speculative_beam_search(3, depth=3), {}),
    (sb.speculative_beam_search(3, depth=3), {"length_penalty": 0.5, "eos_token_id": [1, 9]}),
    (sb.beam_sampling(3), {"seed": 4} | TOP),
    (sb.dsbd(3, depth=3, width="fixed"), {"seed": 4} | TOP),
    (sb.speculative_sampling(3), {"seed": 4} | TOP),
]


@pytest.mark.parametrize("served", [{"most": 32}, {"kind": "sglang"}], indirect=True, ids=["vllm", "sglang"])
@pytest.mark.parametrize(
    ("method", "options"), METHODS, ids=[f"{number}-{one.name}" for number, (one, _) in enumerate(METHODS)]
)
def test_texts_are_those_of_our_own_engine(served, own, method, options):
    pair, _ = served
    assert texts(pair, PROMPTS, method, **options) == texts(own, PROMPTS, method, **options)


@pytest.mark.parametrize("served", [{"most": 32}], indirect=True)
def test_drafted_beams_have_the_texts_of_beam_sampling_by_seed(served):
    pair, _ = served
    for seed in range(3):
        drafted = texts(pair, PROMPTS, sb.dsbd(3, depth=3, width="fixed"), seed=seed, **TOP)
        assert drafted == texts(pair, PROMPTS, sb.beam_sampling(3), seed=seed, **TOP)


@pytest.mark.parametrize("served", [{"most": 32}], indirect=True)
def test_batches_change_no_text_and_share_round_trips(served):
    pair, _ = served
    method = sb.speculative_beam_search(3, depth=3)
    many = PROMPTS * 2
    found = {}
    trips = {}
    for size in (1, 3, 8):
        pair.target.passes = 0
        found[size] = texts(pair, many, method, batch_size=size)
        trips[size] = pair.target.passes
    assert found[1] == found[3] == found[8]
    assert trips[8] < trips[3] < trips[1]
    answer = sb.generate(pair, PROMPTS[0], method, max_new_tokens=12)[0]
    assert answer.report.target_passes < len(answer.tokens)


@pytest.mark.parametrize("served", [{"most": 32}], indirect=True)
def test_a_turn_asks_for_lists_and_no_more(served):
    pair, server = served
    server.requests.clear()
    texts(pair, PROMPTS, sb.speculative_beam_search(3, depth=3))
    counts = {body["logprobs"] for body in server.requests}
    assert max(counts) <= 32 < ALL
    assert any("prompt_logprobs" in body for body in server.requests)


@pytest.mark.parametrize("served", [{"most": 8}], indirect=True)
def test_a_law_that_needs_more_than_the_server_lists_is_refused(served):
    pair, _ = served
    with pytest.raises(
        NotSupported, match=r"exact: .* needs the probabilities of all 61 tokens, and .* lists 8: give top_k, or"
    ):
        sb.generate(pair, "abc", sb.sampling(), max_new_tokens=4, seed=1)
    with pytest.raises(
        NotSupported, match=r"needs lists of 1\d tokens, and .* lists 8: keep fewer beams or draft beams, or"
    ):
        sb.generate(pair, "abc", sb.beam_search(8), max_new_tokens=4)
    assert texts(pair, ["abc"], sb.greedy())


@pytest.mark.parametrize("served", [{"most": ALL}, {"kind": "sglang"}], indirect=True, ids=["vllm", "sglang"])
def test_a_server_that_lists_all_tokens_serves_every_law(served, own):
    pair, _ = served
    for method in (sb.sampling(), sb.speculative_sampling(3), sb.dsbd(3, depth=2), sb.prompt_lookup()):
        assert texts(pair, PROMPTS, method, seed=3) == texts(own, PROMPTS, method, seed=3)
    warm = {"seed": 5, "temperature": 0.7, "top_p": 0.8}
    assert texts(pair, PROMPTS, sb.beam_sampling(3), **warm) == texts(own, PROMPTS, sb.beam_sampling(3), **warm)


@pytest.mark.parametrize("served", [{"most": ALL}], indirect=True)
def test_stop_strings_constraints_penalties_and_streams(served, own):
    pair, _ = served
    method = sb.speculative_beam_search(3, depth=3)
    for options in ({"stop_strings": ["e", "a"]}, {"regex": "[a-e ]{3,9}"}, {"repetition_penalty": 1.3}):
        assert texts(pair, PROMPTS, method, **options) == texts(own, PROMPTS, method, **options)
    whole = sb.generate(own, "abc", sb.greedy(), max_new_tokens=12)[0].text
    assert "".join(sb.stream(pair, "abc", sb.greedy(), max_new_tokens=12)) == whole


def test_chains_cover_a_forest_and_each_leaf_ends_one():
    rng = np.random.default_rng(3)
    held = room_for_texts(None, 2, 8)
    held.sizes[:] = [2, 3, 1]
    held.tokens[:2, :3] = [[5, 6, 7], [5, 8, 9]]
    for _ in range(50):
        size = int(rng.integers(2, 12))
        parents = np.array([-1, -1, *(rng.integers(0, node) for node in range(2, size))])
        forest = Forest(np.array([7, 9, *rng.integers(0, 50, size - 2)]), parents)
        wanted = np.flatnonzero(rng.random(size) < 0.6)
        made = chains_of(held, [1, 2], forest, wanted, 4, "")
        inner = {int(forest.parents[node]) for node in range(size)}
        assert len(made.chains) <= len([node for node in range(size) if node not in inner])
        for node, chain, row in zip(wanted, made.chain_of, made.row_of, strict=True):
            path = []
            above = int(node)
            while above >= 0:
                path.insert(0, int(forest.tokens[above]))
                root = above
                above = int(forest.parents[above])
            text = [1, 2, *held.tokens[root, :2].tolist(), *path]
            found = made.chains[chain]
            assert found.tokens[: found.first + row + 1] == text


def test_a_lost_connection_is_tried_again_and_answers_stay(served, own):
    pair, server = served
    method = sb.beam_search(3)
    expected = texts(own, PROMPTS, method)
    server.broken = 1
    before = pair.target.passes
    asked = len(server.requests)
    assert texts(pair, PROMPTS, method) == expected
    answered = len(server.requests) - asked
    assert answered <= 2 * (pair.target.passes - before)  # no answered request is sent again


def test_a_dead_server_gives_a_sentence(own, folders, monkeypatch):
    monkeypatch.setattr("specbeam.models.chains.over_http.PAUSE_S", 0.01)
    with serving(own.target_model, folders[0]) as server:
        pair = sb.load(f"openai:{server.url}", draft=folders[1])
        server.left = 3
        with pytest.raises(
            SomeFailed, match=r"http://127.0.0.1:\d+ does not answer .* 3 tries\); start it and run again"
        ) as raised:
            sb.generate(pair, PROMPTS, sb.beam_search(3), max_new_tokens=12)
    assert all(isinstance(one, ServerGone) for one in raised.value.failures)
    with pytest.raises(ServerGone, match="does not answer"):
        sb.generate(pair, "abc", sb.beam_search(3), max_new_tokens=12)


def test_a_slow_server_reaches_the_time_limit(own, folders, monkeypatch):
    monkeypatch.setenv("SPECBEAM_SERVER_TIMEOUT", "0.3")
    with serving(own.target_model, folders[0]) as server:
        pair = sb.load(f"openai:{server.url}")
        server.delay_s = 1.0
        with pytest.raises(ServerGone, match=r"did not answer within 0.3 s; set SPECBEAM_SERVER_TIMEOUT"):
            sb.generate(pair, "abc", sb.greedy(), max_new_tokens=4)
        server.delay_s = 0.0
        monkeypatch.setattr("specbeam.models.chains.over_http.TRIES", 1)
        assert texts(pair, ["abc"], sb.greedy()) == texts(own, ["abc"], sb.greedy())  # by another connection
    monkeypatch.setenv("SPECBEAM_SERVER_TIMEOUT", "soon")
    with pytest.raises(BadSetting, match="SPECBEAM_SERVER_TIMEOUT is 'soon'"):
        sb.load(f"openai:{server.url}")


def test_a_closed_pair_leaves_no_connection_and_says_so(served):
    pair, _ = served
    with pair:
        assert texts(pair, ["abc"], sb.greedy())
        assert pair.target.scorer.server._open
    assert not pair.target.scorer.server._open
    with pytest.raises(ServerGone, match="was closed with its pair; load it again"):
        sb.generate(pair, "abc", sb.greedy(), max_new_tokens=4)


def test_the_key_comes_from_the_environment(own, folders, monkeypatch):
    with serving(own.target_model, folders[0], key="secret") as server:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ServerRefused, match=r"wants another key \(401\): set OPENAI_API_KEY"):
            sb.generate(sb.load(f"openai:{server.url}"), "abc", sb.greedy(), max_new_tokens=4)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert texts(sb.load(f"openai:{server.url}"), ["abc"], sb.greedy())


def test_wrong_targets_are_explained(own, folders):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerGone, match="does not answer"):
        sb.load(f"openai:http://127.0.0.1:{port}/v1", tokenizer=folders[0])
    for wrong, match in (
        ("openai:", "names no model; give openai:MODEL"),
        ("openai:ftp://x/v1", "is no URL of a server"),
    ):
        with pytest.raises(BadSetting, match=match):
            sb.load(wrong)
    with serving(own.target_model, folders[0]) as server:
        for options, match in (({"engine": "plain"}, "engine of load"), ({"quantize": "int8"}, "quantize of load")):
            with pytest.raises(BadSetting, match=match):
                sb.load(f"openai:{server.url}", **options)
        for draft in ("swift", "int8"):
            with pytest.raises(NotSupported, match="needs the weights and hidden states of the target"):
                sb.load(f"openai:{server.url}", draft=draft)
    with serving(own.target_model, "/nowhere/at/all") as server:
        with pytest.raises(sb.SpecbeamError, match="whose config is not on this machine; give its folder"):
            sb.load(f"openai:{server.url}")
        pair = sb.load(f"openai:{server.url}", tokenizer=folders[0])
        assert texts(pair, ["abc"], sb.greedy()) == texts(own, ["abc"], sb.greedy())
    with pytest.raises(BadSetting, match="begin with 'vllm' are known already"):
        add_target("vllm", lambda wanted: OpenedTarget(None, None))


def test_without_vllm_the_package_is_named():
    with pytest.raises(MissingPackage, match=r"vLLM is not installed: pip install 'specbeam\[vllm\]'"):
        sb.load("vllm:some/model")


@pytest.mark.slow
def test_a_job_stops_when_the_server_dies_and_resumes(own, folders, tmp_path, monkeypatch):
    from specbeam.apps.jobs.answering import work_of
    from specbeam.apps.jobs.batch import batch

    monkeypatch.setattr("specbeam.models.chains.over_http.PAUSE_S", 0.01)
    monkeypatch.setattr("specbeam.apps.jobs.batch.COMMIT_S", 0.0)
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"id": number, "prompt": text}) + "\n" for number, text in enumerate(PROMPTS * 5))
    )
    out = tmp_path / "out.jsonl"

    def work_with(pair):
        return lambda: work_of(pair, sb.speculative_beam_search(3, depth=3), 1, 2, {"max_new_tokens": 10})

    with serving(own.target_model, folders[0], most=32) as server:
        pair = sb.load(f"openai:{server.url}", draft=folders[1])
        server.left = 25
        with pytest.raises(ServerGone, match="does not answer"):
            batch(work_with(pair), source, out)
    assert not out.exists()
    with serving(own.target_model, folders[0], most=32) as server:
        pair = sb.load(f"openai:{server.url}", draft=folders[1])
        progress = batch(work_with(pair), source, out, resume=True)
    assert progress.rows == progress.done == 20
    assert progress.failed == 0
    batch(work_with(own), source, tmp_path / "own.jsonl")
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert found == [json.loads(line)["text"] for line in (tmp_path / "own.jsonl").read_text().splitlines()]
