"""`bench anchors`: published models beside other programs. The bundled target stands in for a model's folder."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from specbeam.errors import MissingFile
from specbeam.lab.bench.anchors import OURS, AnchorPlan, anchors
from specbeam.lab.bench.anchors_report import as_markdown, summary
from specbeam.lab.words import ANCHOR_MODELS
from specbeam.models.pair import BUNDLED
from tests.doors.cli.test_commands import specbeam

MODEL = "qwen2.5-coder-0.5b"
DRAFTED = "qwen2.5-coder-1.5b"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(BUNDLED / "target", folder / DRAFTED)
    shutil.copytree(BUNDLED / "target", folder / MODEL)
    return folder


def plan_of(models, **settings):
    small = {"max_new_tokens": 4, "rows": 2, "repeats": 2, "rivals": ("transformers",), "bits": (16,)}
    return AnchorPlan(models=models, **{"anchors": (MODEL,), **small, **settings})


def test_rows_have_the_fastest_setting_of_each_program(models):
    seen = []
    rows = anchors(plan_of(models), seen.append)
    assert rows == seen
    assert [(row.hub, row.bits, row.mode) for row in rows] == [
        (ANCHOR_MODELS[MODEL], 16, "greedy"),
        (ANCHOR_MODELS[MODEL], 16, "beam_search"),
    ]
    for row in rows:
        assert [one.program for one in row.best] == [OURS, "transformers"]
        assert [one.name for one in row.settings] == ["specbeam", "transformers bfloat16", "transformers float32"]
        rates = {one.name: one.rate.median for one in row.settings}
        own, rival = row.best
        assert own.ours.median == own.ours_by_processor.median == 1
        assert rates[rival.name] == max(rates["transformers bfloat16"], rates["transformers float32"])
        assert 0 < rival.ours.low <= rival.ours.median <= rival.ours.high


def test_a_draft_is_another_setting_of_specbeam(models):
    (row,) = anchors(plan_of(models, anchors=(DRAFTED,), rivals=(), modes=("beam_search",)))
    assert [one.name for one in row.settings] == ["specbeam", "specbeam with drafts"]
    assert len(row.best) == 1


def test_programs_that_cannot_run_are_named_with_the_reason(models):
    (row,) = anchors(plan_of(models, rivals=("llama.cpp",), bits=(4,), modes=("greedy",)))
    assert [one.program for one in row.best] == [OURS]
    assert len(row.left_out) == 2  # two forms of four bits
    assert row.left_out[0].startswith("llama.cpp Q4_0: there is no file ")


def test_the_table_has_a_column_for_each_rival_that_ran_and_single_rounds_have_no_interval(models):
    rows = anchors(plan_of(models, modes=("greedy",), repeats=1))
    table = as_markdown(rows, ("transformers", "ctranslate2"))
    head, _, line = table.split("\n")
    assert head.endswith("| specbeam, tokens/s | transformers, ratio |")  # ctranslate2 has not run
    assert re.fullmatch(rf"\| {ANCHOR_MODELS[MODEL]} \| 16 \| greedy \| [0-9.]+ \| [0-9.]+; [0-9.]+ \w+ \|", line)
    assert summary(rows).startswith("Ratio to the fastest rival, over 1 row: median ")
    assert summary([]) == ""


def test_missing_models_and_recordings_are_named(models):
    with pytest.raises(MissingFile, match="smollm2-135m; give the models' folder"):
        anchors(plan_of(models, anchors=("smollm2-135m",)))
    with pytest.raises(MissingFile, match="whisper-base hears speech, and there is no recording"):
        anchors(plan_of(models, anchors=("whisper-base",)))


def test_the_command_prints_a_record_per_row_with_the_threads_of_its_contenders(models, monkeypatch):
    arguments = f"--models {models} --only {MODEL} --rival transformers --bits 16 --mode greedy --rows 1 --repeats 1"
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)  # as on a machine with more processors
    code, out, _ = specbeam("bench", "anchors", *arguments.split(), "--max-new-tokens", "4", "--json")
    assert code == 0
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert record["anchor"] == MODEL
    assert record["provenance"]["threads"] == "1"
    assert {one["program"] for one in record["best"]} == {OURS, "transformers"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--only gpt-5", "--only is 'gpt-5'; it must be one of smollm2-135m"),
        ("--bits 5", "--bits is '5'; it must be one of 16, 8, 4"),
        ("--mode dsbd", "--mode is 'dsbd'; it must be one of greedy, beam_search"),
        ("--models /nowhere", "/nowhere"),
    ],
    ids=["model", "bits", "mode", "folder"],
)
def test_wrong_options_are_named(arguments, said):
    code, _, err = specbeam("bench", "anchors", *arguments.split())
    assert code == 2
    assert said in " ".join(err.split())


def test_every_model_has_a_kind():
    from specbeam.lab.bench.anchors import DRAFTS, KINDS

    assert {*KINDS} == {*ANCHOR_MODELS}
    assert {*DRAFTS, *DRAFTS.values()} <= {*ANCHOR_MODELS}
    assert all(Path(name).name == name for name in KINDS)
