"""Targets on an unmodified vLLM, for CPUs, by `make test-vllm`; elsewhere the tests are skipped."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.errors import NotSupported, ServerGone
from specbeam.models.pair import BUNDLED
from tests.support import words
from tests.support.tiny_models import tiny

vllm = pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

TARGET = str(BUNDLED / "target")
DRAFT = str(BUNDLED / "draft")
SENTENCES = [line.split("\t")[0] for line in (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()[1:]]
TOP = {"top_k": 10, "temperature": 0.8}
NEAR = 2e-5  # difference of scores of float32 log-probabilities; beams that are nearer are ties


@pytest.fixture(scope="module")
def own():
    return sb.load("bundled")


@pytest.fixture(scope="module")
def pair():
    return sb.load(f"vllm:{TARGET}", draft=DRAFT)


def beams_of(answers):
    return [[(beam.tokens, beam.score) for beam in one.beams] for one in answers]


def assert_same_but_for_ties(found, expected):
    """The beams of each prompt are the same, except where scores are as good as equal."""
    ties = 0
    for mine, theirs in zip(beams_of(found), beams_of(expected), strict=True):
        for (tokens, score), (other, best) in zip(mine, theirs, strict=True):
            assert abs(score - best) < NEAR
            ties += tokens != other
    assert ties <= len(found) // 50


@pytest.fixture(scope="module")
def hundred():
    """The bundled sentences, and beginnings of them."""
    shorter = [" ".join(one.split()[:-1]) for one in SENTENCES]
    return [*SENTENCES, *shorter][:100]


@pytest.mark.parametrize(
    "method", [sb.beam_search(4), sb.speculative_beam_search(4, depth=4)], ids=["plain", "drafted"]
)
def test_beams_of_a_hundred_prompts_are_those_of_our_engine(pair, own, hundred, method):
    found = sb.generate(pair, hundred, method, max_new_tokens=24)
    assert_same_but_for_ties(found, sb.generate(own, hundred, sb.beam_search(4), max_new_tokens=24))
    if method.name == "speculative_beam_search":
        trips = sum(one.report.target_passes for one in found)
        assert trips / sum(len(one.tokens) for one in found) <= 0.45


def test_drafted_beams_have_the_texts_of_beam_sampling_by_seed(pair):
    for seed in (1, 2):
        drafted = sb.generate(
            pair, SENTENCES[:12], sb.dsbd(4, depth=3, width="fixed"), seed=seed, max_new_tokens=16, **TOP
        )
        plain = sb.generate(pair, SENTENCES[:12], sb.beam_sampling(4), seed=seed, max_new_tokens=16, **TOP)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_batches_change_no_text(pair):
    method = sb.speculative_beam_search(4, depth=3)
    found = []
    for size in (1, 4, 16):
        found.append(
            [one.tokens for one in sb.generate(pair, SENTENCES[:16], method, max_new_tokens=16, batch_size=size)]
        )
    assert found[0] == found[1] == found[2]


def test_stop_strings_constraints_and_streams(pair, own):
    method = sb.speculative_beam_search(4, depth=3)
    for options in ({"stop_strings": ["e "]}, {"regex": "[A-Za-z ]{4,20}"}):
        found = sb.generate(pair, SENTENCES[:4], method, max_new_tokens=12, **options)
        expected = sb.generate(own, SENTENCES[:4], method, max_new_tokens=12, **options)
        assert [one.text for one in found] == [one.text for one in expected]
    whole = sb.generate(own, SENTENCES[0], sb.greedy(), max_new_tokens=16)[0].text
    assert "".join(sb.stream(pair, SENTENCES[0], sb.greedy(), max_new_tokens=16)) == whole


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory):
    """An engine for a random model with few tokens, whose heads are as wide as vLLM's attention wants them."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny("llama", seed=3, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
    model.save_pretrained(folder)
    words.tokenizer().save_pretrained(folder)
    return model, sb.load(f"vllm:{folder}"), folder


def test_truncated_sampling_has_its_law(tiny_engine):
    """Two tokens of many texts, against the law that the model itself gives for them."""
    from scipy import stats

    model, pair, _ = tiny_engine
    prompt = [5, 9, 20, 4]
    top_k, temperature = 3, 1.3
    law = Counter()
    with torch.inference_mode():

        def kept(tokens):
            logits = model(torch.tensor([tokens])).logits[0, -1] / temperature
            values, ids = logits.topk(top_k)
            return zip(ids.tolist(), values.softmax(-1).tolist(), strict=True)

        for first, p in kept(prompt):
            for second, q in kept([*prompt, first]):
                law[first, second] += p * q
    settings = {"top_k": top_k, "temperature": temperature, "max_new_tokens": 2, "eos_token_id": []}
    for method in (sb.sampling(), sb.beam_sampling(1)):
        found = sb.generate(pair, [prompt], method, seed=7, num_return_sequences=1, **settings)
        assert len(found[0].tokens) == 2
        texts = Counter()
        for seed in range(8):
            answers = sb.generate(pair, [prompt] * 64, method, seed=seed, batch_size=64, **settings)
            texts.update(tuple(one.tokens) for one in answers)
        assert set(texts) <= set(law)
        keys = sorted(law)
        seen = np.array([texts[key] for key in keys], dtype=float)
        hoped = np.array([law[key] for key in keys]) * seen.sum()
        assert stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue > 1e-3, method.name


def test_texts_in_the_prefix_cache_are_scored_right(tiny_engine):
    """The same long prompt again, whose rows vLLM does not compute."""
    _, pair, _ = tiny_engine
    prompt = [(7 * place) % 50 + 4 for place in range(100)]
    first = sb.generate(
        pair, [prompt], sb.speculative_beam_search(3, depth=4, drafter="prompt_lookup"), max_new_tokens=20
    )
    again = sb.generate(
        pair, [prompt], sb.speculative_beam_search(3, depth=4, drafter="prompt_lookup"), max_new_tokens=20
    )
    plain = sb.generate(pair, [prompt], sb.beam_search(3), max_new_tokens=20)
    assert [beam.tokens for beam in first[0].beams] == [beam.tokens for beam in again[0].beams]
    assert [beam.tokens for beam in first[0].beams] == [beam.tokens for beam in plain[0].beams]


def test_heads_and_self_drafts_are_refused(pair):
    engine = pair.target.scorer.of_vllm
    with pytest.raises(NotSupported, match="needs the weights and hidden states of the target"):
        sb.load(engine, draft="int8")


def test_an_asynchronous_engine_gives_the_same_beams(tiny_engine):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    _, pair, folder = tiny_engine
    options = AsyncEngineArgs(model=str(folder), dtype="float32", enforce_eager=True, max_logprobs=-1, block_size=32)

    async def beams():
        engine = AsyncLLM.from_engine_args(options)
        other = sb.load(engine)
        decode = asyncio.get_running_loop().run_in_executor
        try:
            return await decode(None, lambda: sb.generate(other, [[5, 9, 4]], sb.beam_search(3), max_new_tokens=8))
        finally:
            engine.shutdown()

    found = asyncio.run(beams())
    expected = sb.generate(pair, [[5, 9, 4]], sb.beam_search(3), max_new_tokens=8)
    assert [beam.tokens for beam in found[0].beams] == [beam.tokens for beam in expected[0].beams]


@contextmanager
def server(log):
    """A vLLM server for the bundled target, with specbeam's plug-in: its process and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`: it asks for the version of a package vllm, and the wheel for CPUs has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, "--port", str(port)]
    command += ["--dtype", "float32"]
    command += ["--enforce-eager", "--max-logprobs", "-1", "--block-size", "32"]
    settings = {"VLLM_PLUGINS": "specbeam", "SPECBEAM_DRAFT": DRAFT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield process, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)
        with suppress(ProcessLookupError):  # a killed server leaves its engine behind
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(process, url, log):
    """Wait until a server answers."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-2000:])


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def test_a_vllm_server_runs_our_loop_scores_for_others_and_may_die(own, tmp_path):
    from specbeam.apps.jobs.answering import work_of
    from specbeam.apps.jobs.batch import batch

    with server(tmp_path / "server.log") as (process, url):
        expected = sb.generate(own, SENTENCES[:3], sb.beam_search(4), max_new_tokens=20)
        asked = {"model": TARGET, "prompt": SENTENCES[:3], "max_tokens": 20, "n": 4, "use_beam_search": True}
        answer = post(f"{url}/completions", asked)
        assert [one["text"] for one in answer["choices"]] == [beam.text for one in expected for beam in one.beams]
        field = {"method": "dsbd", "settings": {"width": "fixed", "depth": 3}, "seed": 3} | TOP
        drawn = post(f"{url}/completions", asked | {"use_beam_search": False, "specbeam": field})
        mine = sb.generate(
            own, SENTENCES[:3], sb.beam_sampling(4), seed=3, max_new_tokens=20, num_return_sequences=4, **TOP
        )
        assert [one["text"] for one in drawn["choices"]][::4] == [one.text for one in mine][::4]
        refused = post(f"{url}/completions", asked | {"specbeam": {"method": "dsbdd"}})
        assert "did you mean" in str(refused) or "must be one of" in str(refused)
        plain = post(f"{url}/completions", {"model": TARGET, "prompt": SENTENCES[0], "max_tokens": 4})
        assert len(plain["choices"]) == 1
        pair = sb.load(f"openai:{url}", draft=DRAFT)
        found = sb.generate(pair, SENTENCES[:8], sb.speculative_beam_search(4, depth=4), max_new_tokens=20)
        expected = sb.generate(own, SENTENCES[:8], sb.beam_search(4), max_new_tokens=20)
        assert_same_but_for_ties(found, expected)
        source = tmp_path / "in.jsonl"
        rows = [json.dumps({"id": number, "prompt": text}) for number, text in enumerate(SENTENCES[:24])]
        source.write_text("\n".join(rows))
        out = tmp_path / "out.jsonl"
        current = [pair]

        def work():
            return work_of(current[0], sb.beam_search(4), 1, 2, {"max_new_tokens": 16})

        def kill(progress):
            if progress.done >= 4:
                process.kill()

        with pytest.raises(ServerGone, match="does not answer"):
            batch(work, source, out, on_progress=kill)
    again = batch(lambda: work_of(own, sb.beam_search(4), 1, 2, {"max_new_tokens": 16}), source, tmp_path / "own.jsonl")
    assert again.done == 24
    assert Path(f"{out}.job").exists()
    with server(tmp_path / "second.log") as (_, url):
        current[0] = sb.load(f"openai:{url}", draft=DRAFT)
        assert batch(work, source, out, resume=True).failed == 0
    texts = [
        [json.loads(line)["text"] for line in path.read_text().splitlines()] for path in (out, tmp_path / "own.jsonl")
    ]
    assert texts[0] == texts[1]
