"""Jobs by Ray Data: the answers of `specbeam batch`, block by block, and each id once after a kill."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from specbeam.apps.jobs.answering import ANSWER_COLUMNS, work_of
from specbeam.apps.jobs.batch import batch
from specbeam.apps.jobs.rows import Columns
from specbeam.doors.method_text import method_from
from specbeam.errors import BadSetting
from tests.apps.jobs.test_batch import prompts, read_jsonl, write_jsonl
from tests.support import words
from tests.support.figures import show

pytest.importorskip("ray", reason="ray is not installed (pip install 'ray[data]')")
SETTINGS = ["beams=2", "depth=2"]


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    from specbeam.apps.ray import Decode

    target, draft = words.saved(tmp_path_factory.mktemp("pair"))
    return Decode(target, draft, settings=SETTINGS, seed=3, batch_size=4, max_new_tokens=6)


def answered(decode, rows):
    """The rows of a block, as `map_batches` hands it over and takes it back."""
    block = {name: np.array([row.get(name) for row in rows], dtype=object) for name in rows[0]}
    found = decode(block)
    assert set(found) == set(ANSWER_COLUMNS) - {"id"} | {decode.columns.id}
    assert len({len(column) for column in found.values()}) == 1
    return found


def test_a_block_has_the_answers_of_a_batch_job_whatever_else_is_in_it(decode, tmp_path):
    rows = prompts(7)
    rows[2]["prompt"] = ""
    rows[4]["prompt"] = np.array(decode.work.pair.tokenizer(rows[4]["prompt"])["input_ids"])
    found = answered(decode, rows)
    source = [row | {"prompt": list(map(int, row["prompt"])) if not isinstance(row["prompt"], str) else row["prompt"]}
              for row in rows]  # fmt: skip
    work = work_of(decode.work.pair, method_from("dsbd", SETTINGS), 3, 4, {"max_new_tokens": 6})
    batch(lambda: work, write_jsonl(tmp_path / "in.jsonl", source), tmp_path / "out.jsonl")
    expected = read_jsonl(tmp_path / "out.jsonl")
    assert list(found["id"]) == [record["id"] for record in expected]
    assert list(found["text"]) == [record["text"] or "" for record in expected]
    assert list(found["error"]) == [record["error"] or "" for record in expected]
    assert json.loads(found["beams"][0])[0]["tokens"] == expected[0]["beams"][0]["tokens"]
    assert np.isnan(found["score"][2])
    assert found["target_passes"][2] == -1
    part = answered(decode, rows[3:5])
    assert list(part["text"]) == list(found["text"][3:5])


def test_columns_have_the_same_types_in_each_block_and_rows_need_ids(decode):
    good = answered(decode, prompts(2))
    bad = answered(decode, [{"id": "a", "prompt": ""}])
    for name in ANSWER_COLUMNS:
        assert good[name].dtype == bad[name].dtype, name
    numbered = decode({"id": np.array([4, 5]), "prompt": np.array(["abc", ""], dtype=object)})
    assert (numbered["id"].dtype, numbered["id"].tolist()) == (np.dtype(np.int64), [4, 5])
    nameless = answered(decode, [{"prompt": "abc"}])
    assert "the id of the row is None" in nameless["error"][0]


def test_ids_are_written_under_their_own_name(decode, monkeypatch):
    monkeypatch.setattr(decode, "columns", Columns(id="key"))
    found = answered(decode, [{"key": "a", "prompt": "abc"}, {"key": "b", "prompt": ""}])
    assert list(found["key"]) == ["a", "b"]
    with pytest.raises(BadSetting, match="id_column is 'text', which is a column of answers"):
        type(decode)(id_column="text")


JOB = """
import glob, os, signal, sys, threading, time
import ray

ray.init(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, logging_level="ERROR")
from specbeam.apps.ray import decode_table

folder, target, draft, kill, delay = sys.argv[1:]

def watch():
    while len(glob.glob(folder + "/out/*.parquet")) < int(kill):
        time.sleep(0.05)
    time.sleep(float(delay))
    os.kill(os.getpid(), 9)

if int(kill):
    threading.Thread(target=watch, daemon=True).start()
decode_table(folder + "/in.jsonl", folder + "/out", folder + "/checkpoint", rows_of_block=8, target=target, draft=draft,
             settings=["beams=2", "depth=2"], seed=3, max_new_tokens=6)
ray.shutdown()
"""


@pytest.mark.slow
def test_a_job_whose_driver_is_killed_goes_on_and_has_each_id_once(tmp_path):
    """Three kills, each at most half a second after further blocks were written."""
    parquet = pytest.importorskip("pyarrow.parquet")
    target, draft = words.saved(tmp_path)
    source = write_jsonl(tmp_path / "in.jsonl", prompts(192))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
    command = [sys.executable, "-c", JOB, str(tmp_path), target, draft]
    rng = random.Random(2)
    written = [set()]
    for _ in range(3):
        wanted = len(written[-1]) + rng.randrange(1, 4)
        arguments = [str(wanted), str(0.5 * rng.random())]
        killed = subprocess.run([*command, *arguments], env=environment, check=False, timeout=1200)
        assert killed.returncode == -signal.SIGKILL
        time.sleep(10)  # until the workers have seen that their driver is gone
        files = set((tmp_path / "out").glob("*.parquet"))
        assert written[-1] < files
        written.append(files)
    assert len(written[-1]) < 24
    for _ in range(2):  # said again after the end, it writes nothing twice
        assert subprocess.run([*command, "0", "0"], env=environment, check=False, timeout=1200).returncode == 0
    rows = [row for file in (tmp_path / "out").glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    assert written[-1] <= set((tmp_path / "out").glob("*.parquet"))  # what was done is not done again
    work = work_of(words.pair(check=False), method_from("dsbd", SETTINGS), 3, 4, {"max_new_tokens": 6})
    batch(lambda: work, source, tmp_path / "alone.jsonl")
    expected = {record["id"]: record["text"] for record in read_jsonl(tmp_path / "alone.jsonl")}
    show(f"blocks of 8 rows written at each kill: {[len(one) for one in written[1:]]}")
    assert len(rows) == 192
    assert {row["id"]: row["text"] for row in rows} == expected
