"""A target that is spread over processes: the texts, scores and keys of one process, and no job that hangs."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

import specbeam as sb
from specbeam.errors import BadSetting, MissingFile, MissingPackage, NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support import words
from tests.support.tiny_sources import tiny_reader

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
PROMPTS = ["abc def", "hello", "why, oh why", "x"]
RUN = """
import json, sys
import specbeam as sb
from specbeam.engines.torch import repeated
from tests.models.test_spread import PROMPTS, methods

repeated.TIMEOUT_S = 8.0
pair = sb.load(sys.argv[1], sys.argv[2], tensor_parallel=True)
if sys.argv[3] == "lose":
    print("ready", flush=True)
    for number in range(10_000):
        sb.generate(pair, PROMPTS, sb.beam_search(beams=3), max_new_tokens=30)
found = []
for method in methods():
    answers = sb.generate(pair, PROMPTS, method, seed=3, max_new_tokens=10)
    found.append([[(beam.tokens, beam.score) for beam in one.beams] for one in answers])
sb.generate(pair, PROMPTS, sb.sampling(), max_new_tokens=4)  # without a seed: nothing has to be equal on the ranks
store = pair.target.runner.store
print(json.dumps({"found": found, "shape": list(store.layers[0].keys.shape), "engine": pair.target.engine}))
"""


def methods():
    return [
        sb.dsbd(beams=3, depth="auto"),
        sb.beam_search(beams=3),
        sb.speculative_beam_search(beams=3, depth="auto"),
        sb.dsbd(beams=3, width="dynamic", depth=3),
        sb.traversal(),
        sb.speculative_sampling(depth=3),
    ]


def start(folder, what):
    target, draft = words.saved(folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "--local-addr", "127.0.0.1", "--no-python", sys.executable, "-c", RUN, target, draft, what]  # fmt: skip
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def rank_processes(parent):
    """The processes of the ranks, by rank, of the process of torchrun."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                above = int(file.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{entry}/environ", "rb") as file:
                names = dict(part.split(b"=", 1) for part in file.read().split(b"\0") if b"=" in part)
        except (OSError, ValueError):
            continue
        if above == parent and b"RANK" in names:
            found[int(names[b"RANK"])] = int(entry)
    return found


@needs_accelerate
@pytest.mark.slow
def test_two_processes_give_the_texts_scores_and_keys_of_one(tmp_path):
    process = start(tmp_path, "run")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    both = json.loads(out.splitlines()[-1])
    pair = sb.load(str(tmp_path / "target"), str(tmp_path / "draft"))
    whole = HuggingFaceLM(pair.target_model, engine="plain")
    pair = Pair(pair.target_model, pair.draft_model, pair.tokenizer, whole, pair.draft)
    for method, found in zip(methods(), both["found"], strict=True):
        answers = sb.generate(pair, PROMPTS, method, seed=3, max_new_tokens=10)
        for one, beams in zip(answers, found, strict=True):
            assert [beam.tokens for beam in one.beams] == [tokens for tokens, _ in beams], method.name
            scores = [score for _, score in beams]
            assert [beam.score for beam in one.beams] == pytest.approx(scores, abs=1e-5)  # sums in another order
    caches, heads, _, size = whole.runner.store.layers[0].keys.shape
    assert both["shape"][:2] + both["shape"][3:] == [caches, heads // 2, size]
    assert both["engine"] == "parallel"


@needs_accelerate
@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found in /proc")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_ends_the_job_with_a_sentence(tmp_path, lost):
    process = start(tmp_path, "lose")
    assert process.stdout.readline()
    ranks = rank_processes(process.pid)
    assert set(ranks) == {0, 1}
    time.sleep(1)
    began = time.monotonic()
    os.kill(ranks[lost], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert (
        f"specbeam: rank {1 - lost} failed while" in err or "SIGTERM" in err
    )  # torchrun may be first to end the other
    assert time.monotonic() - began < 60
    assert rank_processes(process.pid) == {}


def test_a_target_is_spread_by_torchrun_alone_and_from_files(tmp_path, monkeypatch):
    target, _ = words.saved(tmp_path)
    model = words.pair(draft_seed=None, check=False).target_model
    with pytest.raises(BadSetting, match="already an object"):
        sb.load(model, tensor_parallel=True)
    with pytest.raises(BadSetting, match="give one of them"):
        sb.load(target, tensor_parallel=True, device_map="auto")
    with pytest.raises(BadSetting, match="leave quantize out"):
        sb.load(target, tensor_parallel=True, quantize="int8")
    with pytest.raises(BadSetting, match="leave compile out"):
        sb.load(target, device_map="auto", compile=True)
    if find_spec("accelerate") is None:
        with pytest.raises(MissingPackage, match="needs accelerate"):
            sb.load(target, tensor_parallel=True)
        return
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadSetting, match="RANK is not set; run torchrun"):
        sb.load(target, tensor_parallel=True)


def test_what_cannot_be_is_refused_before_weights_are_spread(tmp_path, monkeypatch):
    """Other ranks would wait for that of rank 0. Without torchrun, spreading weights is refused in words of its own."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "specbeam.models.loading.spread.find_spec", lambda name: True
    )  # nothing here gets as far as accelerate
    target, _ = words.saved(tmp_path)
    reader = tmp_path / "reader"
    tiny_reader("bart").save_pretrained(reader)
    for name, options, error, message in (
        (reader, {}, NotSupported, "has an encoder; leave them out"),
        (target, {"draft": "swift"}, NotSupported, "draft='swift' is the target run by specbeam's own forward"),
        (target, {"draft": "int8"}, NotSupported, "draft='int8' is the target run by specbeam's own forward"),
        (target, {"draft": tmp_path / "none"}, MissingFile, "there is no folder"),
        (target, {"draft": "mtp", "quantize_draft": "int8"}, BadSetting, "the draft is a head"),
        (target, {"tokenizer": tmp_path / "none"}, MissingFile, "there is no folder"),
    ):
        with pytest.raises(error, match=message):
            sb.load(name, tensor_parallel=True, **options)


def test_spread_weights_are_refused_where_one_process_would_run_them(monkeypatch):
    model = words.pair(draft_seed=None, check=False).target_model
    monkeypatch.setattr(type(next(model.parameters())), "to_local", lambda self: self, raising=False)
    with pytest.raises(NotSupported, match="sharded over several processes"):
        HuggingFaceLM(model)


def test_a_target_whose_layers_are_on_disk_gives_the_same_texts(tmp_path):
    pytest.importorskip("accelerate")
    target, draft = words.saved(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    placed = sb.load(target, draft, device_map=places)
    assert placed.target.engine == "plain"
    whole = sb.load(target, draft)
    for method in (sb.beam_search(beams=2), sb.dsbd(beams=2, depth=2)):
        there, here = (sb.generate(pair, "abc def", method, seed=1, max_new_tokens=6)[0] for pair in (placed, whole))
        assert [beam.tokens for beam in there.beams] == [beam.tokens for beam in here.beams]
