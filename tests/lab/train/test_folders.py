"""A training has its folder alone, and says by a sentence what is wrong with a folder, a file or a disk."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import specbeam as sb
from specbeam.core import whole_files
from specbeam.errors import BadSetting
from specbeam.lab.train import (
    DrawPlan,
    MemorySchedule,
    Schedule,
    drawing,
    fitting,
    folders,
    remembering,
    train_draft,
    train_hmt,
)
from specbeam.models.memory.plan import MemoryPlan
from tests.support.tiny_models import tiny

PROMPTS: list = [[1 + number % 7, 2 + number % 5, 3 + number % 11] for number in range(24)]
HOLDS = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
HOLDS += "print('held', flush=True); time.sleep(60)"


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama"))


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(drawing, "FILE_TREES", 8)
    for module in (fitting, remembering):
        monkeypatch.setattr(module, "STATE_S", 0.0)


def draft(pair, out, **changes):
    schedule = Schedule(epochs=2, rate=0.02, embedding_rate=0.01, batch_tokens=200, seed=3)
    draws = DrawPlan(beams=2, max_new_tokens=3, seed=2)
    return train_draft(pair, PROMPTS, out, layers=1, hidden=64, draws=draws, schedule=schedule, **changes)


def memory(pair, out, **changes):
    documents = [[1 + (number * place) % 9 for place in range(40)] for number in range(1, 5)]
    schedule = MemorySchedule(((2, 3),), 1, 2, 1e-3, check_every=2, seed=5)
    return train_hmt(pair, documents, out, MemoryPlan(segment=8, sensory=2, memories=4), schedule=schedule, **changes)


TRAININGS = {"draft": draft, "memory": memory}


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_second_training_in_a_folder_is_refused_while_the_first_is_under_way(pair, tmp_path, kind):
    train = TRAININGS[kind]
    refused = []

    def report(name, done, total):
        if name != "drawing" and not refused:
            with pytest.raises(BadSetting, match=r"another process works in .*training; wait for its end") as error:
                train(pair, tmp_path)
            refused.append(error)

    train(pair, tmp_path, report=report)
    assert refused
    train(pair, tmp_path)


def test_drawing_for_a_second_training_into_the_same_folder_is_refused_too(pair, tmp_path):
    refused = []

    def report(name, done, total):
        if name == "drawing" and not refused:
            with pytest.raises(BadSetting, match=r"another process works in .*shared") as error:
                draft(pair, tmp_path / "other", trees=tmp_path / "shared")
            refused.append(error)
        elif name == "training" and len(refused) == 1:  # what is drawn may be read by several
            draft(pair, tmp_path / "other", trees=tmp_path / "shared")
            refused.append(None)

    draft(pair, tmp_path / "one", trees=tmp_path / "shared", report=report)
    assert len(refused) == 2


def test_a_killed_training_does_not_keep_its_folder(pair, tmp_path):
    training = tmp_path / "training"
    training.mkdir()
    command = [sys.executable, "-c", HOLDS, str(training / folders.LOCK)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BadSetting, match="another process works in"):
            draft(pair, tmp_path)
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    draft(pair, tmp_path)


def test_a_training_that_failed_does_not_keep_its_folder(pair, tmp_path):
    def fail(name, done, total):
        raise RuntimeError("by the user")

    with pytest.raises(RuntimeError) as error:
        draft(pair, tmp_path, report=fail)
    draft(pair, tmp_path)
    assert error.value.args == ("by the user",)


def test_where_folders_cannot_be_locked_that_is_said(pair, tmp_path, monkeypatch):
    def refuse(lock):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.FileLock, "acquire", refuse)
    with pytest.warns(
        UserWarning, match=r"training cannot be locked .*No locks available.*make sure that no other process"
    ):
        draft(pair, tmp_path)


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_flipped_bit_of_a_state_is_seen(pair, tmp_path, kind):
    """Of the weights, too, which torch reads whatever they are."""
    train = TRAININGS[kind]
    train(pair, tmp_path)
    path = tmp_path / "training" / "state.pt"
    whole = path.read_bytes()
    size = len(whole)
    refused = 0
    for place in range(size // 20, size, size // 10):
        content = bytearray(whole)
        content[place] ^= 16
        path.write_bytes(bytes(content))
        said = ""
        try:
            train(pair, tmp_path)
        except BadSetting as error:
            said = str(error)
        refused += "state.pt is broken" in said  # some bits stand between two records
    assert refused > 5
    path.write_bytes(whole)
    train(pair, tmp_path)


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_full_disk_is_a_sentence_and_the_same_call_goes_on(pair, tmp_path, monkeypatch, kind):
    train = TRAININGS[kind]
    train(pair, tmp_path / "whole")
    calls = []
    sync = os.fsync

    def fill(number):
        calls.append(number)
        if len(calls) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    for allowed in (0, 3, 7):
        calls.clear()
        limit = allowed
        with monkeypatch.context() as here:
            here.setattr(whole_files.os, "fsync", fill)
            with pytest.raises(BadSetting, match=r"cannot be written: .*No space left on device"):
                train(pair, tmp_path / "full")
        assert not list((tmp_path / "full").rglob("*.part"))
    train(pair, tmp_path / "full")
    states = [torch.load(tmp_path / name / "training" / "state.pt") for name in ("whole", "full")]
    for name in ("model", "recall"):
        if states[0].get(name) is not None:
            assert all(torch.equal(weight, states[1][name][key]) for key, weight in states[0][name].items())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_a_full_disk_is_no_error_of_torch(tmp_path):
    """Its own writer raises RuntimeError."""
    from specbeam.lab.train.state import STATE, keep_state

    (tmp_path / STATE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        keep_state(tmp_path, {"weights": torch.zeros(100_000)})


@pytest.mark.parametrize("content", ["[]", "7", "null", '{"a"', "\0"])
def test_options_of_another_kind_are_broken(pair, tmp_path, content):
    draft(pair, tmp_path)
    (tmp_path / "training" / "options.json").write_text(content)
    with pytest.raises(BadSetting, match=r"options.json is broken|holds work with"):
        draft(pair, tmp_path)


def test_what_a_killed_training_was_writing_is_deleted(pair, tmp_path):
    draft(pair, tmp_path)
    (tmp_path / "training" / ".state.pt.77.ab.part").write_bytes(b"half")
    (tmp_path / ".ab.part").mkdir()
    draft(pair, tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    shutil.rmtree(tmp_path / "training")
    assert sb.load(pair.target_model, draft=tmp_path).draft_model is not None
