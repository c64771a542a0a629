"""The command line, as a shell sees it."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from typer.main import get_command

from specbeam.core.limits import Limits
from specbeam.doors.cli.main import app, main
from specbeam.doors.method_text import method_from
from specbeam.errors import BadSetting
from specbeam.recipes.catalogue import HEAD_RECIPES, RECIPES
from specbeam.recipes.tuning.costs import measure
from tests.support import words
from tests.support.steps import needs_numba
from tests.support.tiny_sources import tiny_reader


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, draft = words.saved(tmp_path_factory.mktemp("pair"))
    return ["-m", target, "-d", draft]


def shell(*arguments, stdin=None):
    """A process of its own, as users have it."""
    done = subprocess.run(
        [sys.executable, "-c", "from specbeam.doors.cli.main import main; main()", *arguments],
        capture_output=True, text=True, input=stdin, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def specbeam(*arguments):
    """The same in this process: a new one needs seconds to import torch and transformers."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["specbeam", *arguments])
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:  # the same mapping stays, as what is imported by then may have kept it
            os.environ.clear()
            os.environ.update(environment)
    return code, out.getvalue(), err.getvalue()


def test_help_imports_nothing_heavy():
    code, out, _ = shell("--help")
    assert code == 0
    assert "generate" in out
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, specbeam.doors.cli.main; print('torch' in sys.modules, 'numpy' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert modules.stdout.split() == ["False", "False"]


def test_prompts_come_from_arguments_files_and_standard_input(models, tmp_path):
    (tmp_path / "some.txt").write_text("first\n\nsecond\n")
    (tmp_path / "some.jsonl").write_text('{"prompt": "third", "id": 1}\n"fourth"\n')
    code, out, err = specbeam(
        "generate", "zeroth", "-f", str(tmp_path / "some.txt"), "-f", str(tmp_path / "some.jsonl"), *models, "--json",
        "--seed", "1", "--max-new-tokens", "4",
    )  # fmt: skip
    assert code == 0, err
    records = sorted(map(json.loads, out.splitlines()), key=lambda record: record["index"])
    assert [record["prompt"] for record in records] == ["zeroth", "first", "second", "third", "fourth"]
    assert all(record["report"]["law"].startswith("exact") for record in records)
    assert [record["index"] for record in records] == [0, 1, 3, 4, 5]  # the blank line has an index, too
    code, out, _ = shell("generate", *models, "--seed", "1", "--max-new-tokens", "4", stdin="first\nsecond\n")
    assert out.splitlines() == [records[1]["text"], records[2]["text"]]
    windows = "\ufefffirst\r\nsecond\r\n"
    code, from_windows, _ = shell("generate", *models, "--seed", "1", "--max-new-tokens", "4", stdin=windows)
    assert from_windows == out


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".tsv", ".jsonl", "stdin"])
def test_blank_lines_keep_their_place(models, tmp_path, suffix):
    line = {".tsv": "abc\tx\n", ".jsonl": '"abc"\n'}.get(suffix, "abc\n")
    text = f"\n{line}   \n{line}\n"
    options = [*models, "--regex", "yes"]
    if suffix == "stdin":
        code, out, err = shell("generate", *options, stdin=text)
    else:
        file = tmp_path / f"some{suffix}"
        with (gzip.open if suffix.endswith(".gz") else open)(file, "wt") as opened:
            opened.write(text)
        code, out, err = specbeam("generate", "-f", str(file), *options)
    assert (code, out) == (0, "\nyes\n\nyes\n\n"), err


def test_best_names_each_of_several_prompts(models, tmp_path):
    (tmp_path / "two.txt").write_text("abc\n\nno\n")
    arguments = ["best", "-f", str(tmp_path / "two.txt"), *models, "-n", "1", "--limit", "30", "--max-new-tokens", "3"]
    code, out, err = specbeam(*arguments)
    assert code == 0, err
    lines = out.splitlines()
    assert (len(lines), lines[0], lines[2]) == (4, "abc", "no")
    indices = [json.loads(line)["index"] for line in specbeam(*arguments, "--json")[1].splitlines()]
    assert indices == [0, 2]


def test_an_unreadable_line_is_named_and_the_rest_done(models, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n{"id": "no"}\n{"prompt": "two"}\n')
    code, out, err = specbeam(
        "generate", "-f", str(tmp_path / "bad.jsonl"), *models, "--max-new-tokens", "3", "--seed", "1"
    )
    assert code == 1
    assert [bool(line) for line in out.split("\n")] == [True, False, False, True, False]
    assert "line 2: not JSON" in err
    assert "line 3: expected" in err


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_no_prompt_of_a_list_is_left_out(models, tmp_path, suffix):
    lines = [{"text": "abc"}, {"prompt": ["abc", "Hello"]}, {"prompt": [5, 6]}, {"prompt": ["no"]}]
    file = tmp_path / f"some{suffix}"
    with (gzip.open if suffix.endswith(".gz") else open)(file, "wt") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)
    code, out, err = specbeam("generate", "-f", str(file), *models, "--json", "--max-new-tokens", "2")
    assert code == 1
    assert "line 2: the prompt is a list of 2; write each prompt in a line of its own" in err
    found = {one["index"]: one["prompt"] for one in map(json.loads, out.splitlines())}
    assert found == {0: "abc", 2: [5, 6], 3: "no"}


def test_lines_of_answers_that_are_no_answers_are_said(models):
    options = [*models, "--regex", "a\nb"]
    code, out, err = specbeam("generate", "abc", "no", *options)
    assert (code, out) == (0, "a\nb\na\nb\n")
    assert err.count("note: answers have line breaks") == 1
    code, out, err = specbeam("generate", "abc", *options)
    assert (code, out, err) == (0, "a\nb\n", "")


def test_a_constraint_that_was_cut_off_is_said(models):
    code, _, err = specbeam("generate", "abc", *models, "--regex", "yesyesyes", "--max-new-tokens", "2")
    assert code == 0
    assert "note: 1 answer reached the length limit before the end of the constraint" in err


def test_a_bad_prompt_costs_itself_only(models, tmp_path):
    (tmp_path / "long.txt").write_text("good\n" + "x" * 400 + "\nfine\n")
    code, out, err = specbeam(
        "generate", "-f", str(tmp_path / "long.txt"), *models, "--max-new-tokens", "3", "--seed", "1"
    )
    assert code == 1
    assert [bool(line) for line in out.split("\n")] == [True, False, True, False]
    assert "long.txt, line 2 has 400 tokens" in err
    assert "positions" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "-m", "./nowhere"], "there is no folder"),
        (["generate", "x", "-f", "missing.txt"], "there is no file missing.txt"),
        (["generate", "x", "-s", "beams"], "write NAME=VALUE"),
        (["generate", "x", "-s", "beams=many"], "must be an integer"),
        (["generate", "x", "-s", "speed=9"], "no setting 'speed'"),
        (["generate", "x", "--method", "magic"], "no method 'magic'"),
        (["methods", "magic"], "no method 'magic'"),
        (["evaluate", "diff", "--prompt", "x", "--beams", "1"], "Invalid value for '--beams'"),
        (["evaluate", "diff", "--prompt", "x", "--rows", "0"], "Invalid value for '--rows'"),
        (["evaluate", "diff", "--prompt", "x", "--batch-size", "-1"], "Invalid value for '--batch-size'"),
        (["evaluate", "diff", "--prompt", "x", "--dtype", "bfloat17"], "it must be one of auto, float32, bfloat16"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(arguments, message):
    code, out, err = specbeam(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_prompts_are_given_in_the_same_ways_to_all_commands():
    """As an option of a command that has other arguments, too, and in files of every kind."""
    import typer.main

    commands = typer.main.get_command(app).commands
    reading = [commands["generate"], commands["inspect"], commands["tune"]]
    reading += [commands["evaluate"].commands[name] for name in ("same-beams", "diff")]
    reading += [commands["bench"].commands[name] for name in ("efficiency", "acceptance", "speed")]
    for command in reading:
        options = {name for parameter in command.params for name in parameter.opts}
        assert {"--prompt", "-p", "--file", "-f"} <= options, command.name
    for command in (commands["bench"].commands["methods"], *commands["train"].commands.values()):
        assert {"--file", "-f"} <= {name for parameter in command.params for name in parameter.opts}, command.name


def test_files_of_prompts_may_be_tables_or_packed(models, tmp_path):
    (tmp_path / "two.tsv").write_text("abc\tx\nHello\ty\n")
    with gzip.open(tmp_path / "one.txt.gz", "wt") as file:
        file.write("no\n")
    (tmp_path / "turns.jsonl").write_text('{"turns": ["abc", "and then"]}\n')
    files = [part for name in ("two.tsv", "one.txt.gz", "turns.jsonl") for part in ("-f", str(tmp_path / name))]
    code, out, err = specbeam(
        "generate", "-p", "abc", *files, *models, "--json", "--seed", "1", "--max-new-tokens", "2"
    )
    assert code == 0, err
    found = sorted((one["index"], one["prompt"]) for one in map(json.loads, out.splitlines()))
    assert [prompt for _, prompt in found] == ["abc", "abc", "Hello", "no", "abc"]


def test_an_interrupt_leaves_finished_answers_written(models, tmp_path):
    """There are more prompts than could be answered before the interrupt comes; the first one's answer has to be there."""
    (tmp_path / "many.txt").write_text("\n".join(["a"] * 400))
    process = subprocess.Popen(
        [sys.executable, "-c", "from specbeam.doors.cli.main import main; main()", "generate", "-f", str(tmp_path / "many.txt"),
         *models, "--max-new-tokens", "60", "--batch-size", "1", "--seed", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first.strip() != ""
    assert len(rest.splitlines()) < 399
    assert "finished answers are written" in err
    assert "Traceback" not in err


def test_methods_are_listed_and_explained():
    code, out, _ = specbeam("methods", "--json")
    assert code == 0
    listed = {record["name"]: record for record in map(json.loads, out.splitlines())}
    assert {"greedy", "sampling", "beam_sampling", "dsbd"} <= set(listed)
    assert listed["dsbd"]["defaults"]["beams"] == 4
    code, out, _ = specbeam("methods", "dsbd")
    assert "arXiv 2409.16560" in out


def test_inspect_draws_a_forest(models, tmp_path):
    code, out, err = specbeam("inspect", "hello", *models, "--svg", str(tmp_path / "f.svg"))
    assert code == 0, err
    assert "●" in out
    svg = (tmp_path / "f.svg").read_text()
    assert svg.startswith("<svg")
    assert svg.count("<circle") > 5
    code, out, _ = specbeam("inspect", "hello", *models, "--json")
    nodes = json.loads(out)["nodes"]
    assert {"root"} < {node["fate"] for node in nodes} <= {"root", "accepted", "rejected", "resampled", "unused"}


@needs_numba
def test_int8_weights_are_asked_for_by_name(models):
    code, out, err = specbeam("generate", "hello", *models, "--quantize", "int8", "--json", "--max-new-tokens", "4")
    assert code == 0, err
    report = json.loads(out)["report"]
    assert report["law"].endswith("of the target in int8")
    assert report["tokens_per_pass"] == report["tokens"] / report["target_passes"]
    code, _, err = shell("generate", "hello", *models, "--quantize", "int3")
    assert code == 2
    assert "must be one of 'int8', 'int4'" in err


def test_a_profile_says_where_the_time_goes(models):
    code, out, err = specbeam("generate", "hello", *models, "--profile", "--seed", "1", "--max-new-tokens", "6")
    assert code == 0, err
    assert len(out.splitlines()) >= 1
    for part in ("plan", "draft/model", "score/model", "verify", "settle", "outside models"):
        assert part in err


def test_an_audited_run_says_how_it_went(models):
    code, _, err = specbeam(
        "generate", "hello", *models, "--audit", "--method", "speculative_sampling", "--max-new-tokens", "20"
    )
    assert code == 0
    assert "audit passed: evidence" in err


def test_settings_that_are_lists(models):
    for counts in ("2,1", "(2,1)", "[2, 1]"):
        assert method_from("rsd_c", [f"counts={counts}"]).name == "rsd_c"
    more = ("--method", "rsd_c", "--set", "counts=(2,1)", "--seed", "1", "--max-new-tokens", "3")
    code, _, err = specbeam("generate", "abc", *models, *more)
    assert code == 0, err
    code, _, err = specbeam("generate", "abc", *models, "--method", "rsd_c", "--set", "counts=2,x")
    assert code == 2
    assert "counts is 'x'; it must be an integer" in err


def test_settings_without_a_default_are_read_as_their_type(models):
    more = ("--method", "mtad", "--seed", "1", "--max-new-tokens", "3")
    code, _, err = specbeam("generate", "abc", *models, *more, "--set", "beams=2", "--set", "controller=confidence")
    assert code == 0, err
    for name, value in (("depth", "auto"), ("width", "auto"), ("depth", "2")):
        one = ("--method", "dsbd", "--max-new-tokens", "3", "--set", f"{name}={value}")
        code, _, err = specbeam("generate", "abc", *models, *one)
        assert code == 0, err
    code, _, err = specbeam("generate", "abc", *models, *more, "--set", "beams=two")
    assert code == 2
    assert "beams is 'two'; it must be an integer" in err


@pytest.mark.parametrize("make", [*RECIPES, *HEAD_RECIPES], ids=lambda make: make.__name__)
def test_no_method_ignores_its_settings(make):
    """Also those that draft with a head, of which no pair is needed to read them."""
    with pytest.raises(BadSetting, match="has no setting 'speed'"):
        method_from(make.__name__, ["speed=9"])
    if make in HEAD_RECIPES and make().exact:
        assert method_from(make.__name__, ["depth=2", "rule=match"]).exact
        with pytest.raises(BadSetting, match="depth is 0"):
            method_from(make.__name__, ["depth=0"])


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_diff_compares_with_transformers(models):
    prompts = ("--prompt", "abc", "--prompt", "no", "--beams", "2", "--max-new-tokens", "6")
    code, out, err = specbeam("evaluate", "diff", *models, *prompts)
    assert code == 0, err
    for line, method in zip(out.splitlines(), ("beam_search", "speculative_beam_search"), strict=True):
        assert line.startswith(f"{method}: 2 of 2 prompts give the same 2 beams, scores within ")
        assert "differ" not in line
    code, out, err = specbeam("evaluate", "diff", *models[:2], *prompts, "--every-option", "--json")
    assert code == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) > 10
    assert {one["prompt"] for one in records} == {0, 1}
    assert all(one["difference"] is None for one in records)
    assert all(len(one["options"]) > 3 for one in records)
    code, out, err = specbeam("evaluate", "diff", *models[:2], *prompts, "--prompt", "a" * 300)
    assert code == 1, err
    assert "argument 3, beam_search: prompt 0 has 300 tokens" in out
    assert "2 of 3 prompts give the same 2 beams" in out
    assert "; 1 failed" in out


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_diff_explains_what_differs(models, monkeypatch):
    monkeypatch.setattr(Limits, "normalised", lambda limits, loglik, length: loglik)
    code, out, err = specbeam("evaluate", "diff", "abc", *models[:2], "--beams", "2", "--max-new-tokens", "6")
    assert code == 1, err
    assert (
        "argument 1, beam_search: token 1 of beam 1 differs, logits 0.61 apart: NOT rounding: on specbeam's logits, transformers"
        in out
    )
    assert "0 of 1 prompts give the same 2 beams" in out
    assert "; 1 differ otherwise" in out


def test_methods_that_change_the_law_say_so(models):
    code, out, err = specbeam("generate", "abc", *models, "--method", "mtad", "--json", "--max-new-tokens", "8")
    assert code == 0
    assert "note: mtad is approximate: changes the output law on purpose" in err
    report = json.loads(out)["report"]
    assert report["law"].startswith("approximate: changes the output law")
    assert "certificate" in report
    code, out, _ = specbeam("methods", "--json")
    listed = {record["name"]: record for record in map(json.loads, out.splitlines())}
    assert [listed[name]["exact"] for name in ("dsbd", "mtad", "mjsd", "mmtad")] == [True, False, False, False]
    assert [listed[name]["lossless"] for name in ("dsbd", "mtjd", "mmtad")] == [True, False, False]
    assert "changes the output law on purpose" in listed["mtad"]["law"]
    code, _, err = specbeam("generate", "abc", *models, "--method", "mtad", "--audit")
    assert code == 2
    assert "leave audit out" in err
    code, _, err = specbeam("generate", "abc", *models, "--method", "mtjd", "--max-new-tokens", "2")
    assert code == 0
    assert "not the law of sampling" in err


def test_outputs_are_scored(models, tmp_path):
    files = [str(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
    for file, text in zip(files, ("some text", "ababababab"), strict=True):
        record = {"prompt": "abc", "text": text, "reference": "some text"}
        Path(file).write_text("\n".join([json.dumps(record)] * 2))
    code, out, err = specbeam("evaluate", "perplexity", *files, *models[:2], "--json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["file"] for one in found] == files
    assert all(one["outputs"] == 2 and one["low"] <= one["perplexity"] <= one["high"] for one in found)
    assert [one["exact_match"] for one in found] == [1, 0]
    assert found[1]["repeated"] > found[0]["repeated"] == 0
    code, out, _ = specbeam("evaluate", "perplexity", *files, *models[:2])
    assert code == 0
    assert "Low perplexity alone proves little" in out


def test_outputs_of_models_that_read_sources_are_scored(tmp_path):
    tiny_reader("marian").save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "outputs.jsonl"
    file.write_text(
        json.dumps({"prompt": [5, 6, 2], "tokens": [4, 7]}) + "\n" + json.dumps({"prompt": "ab", "text": "c"})
    )
    code, out, err = specbeam("evaluate", "perplexity", str(file), "--model", str(tmp_path), "--json")
    assert code == 0, err
    assert json.loads(out)["outputs"] == 2


def test_rejections_are_counted_beside_the_theory(models, tmp_path):
    plot = tmp_path / "plot.png"
    asked = ["evaluate", "theory", "abc", "Hello", *models, "--depth", "2", "--max-new-tokens", "6"]
    code, out, err = specbeam(*asked, "--plot", str(plot), "--json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert {"acceptance", "rejections", "accepted tokens", "optimum", "batch"} <= {one["check"] for one in found}
    assert all(one["low"] <= one["measured"] <= one["high"] for one in found)
    assert plot.stat().st_size > 5_000
    code, _, err = specbeam(*asked, "--temperature", "0")
    assert code == 2
    assert "nothing is drawn" in err


def test_methods_are_compared(models, tmp_path):
    (tmp_path / "letters.tsv").write_text("abc\tx\nHello\ty\n")
    code, out, err = specbeam(
        "bench", "methods", "-f", str(tmp_path / "letters.tsv"), *models, "--metric", "exact match", "--seeds", "1", "--beams", "2",
        "--depth", "2", "--max-new-tokens", "4", "--plot", str(tmp_path / "plot.png"),
    )  # fmt: skip
    assert code == 0, err
    assert out.startswith("| letters | output perplexity |")
    assert "| MTAD * |" in out
    assert "changes the law of the output" in out
    assert "commit: " in out
    assert (tmp_path / "plot.png").is_file()


def test_methods_are_compared_with_rounded_weights(models, monkeypatch):
    loaded = []

    def noted(*models, **options):
        loaded.append(options)
        raise BadSetting("seen")

    monkeypatch.setattr("specbeam.doors.cli.widening.quiet_load", noted)
    rounding = ["--quantize", "int8", "--quantize-draft", "int4", "--compute", "bfloat16", "--draft-vocab", "40"]
    code, _, err = specbeam("bench", "methods", *models, *rounding)
    assert (code, "seen" in err) == (2, True)
    options = {"quantize": "int8", "quantize_draft": "int4", "compute": "bfloat16", "draft_vocab": 40}
    assert loaded[0].items() >= options.items()


def test_passes_are_timed(models, tmp_path):
    asked = ["bench", "passes", *models[:2], "--repeats", "1", "--length", "20", "--beams", "2"]
    for rows in ("1", "2", "4", "8"):
        asked += ["--rows", rows]
    code, out, err = specbeam(*asked, "--length", "300", "--plot", str(tmp_path / "plot.png"))
    assert code == 0, err
    assert out.startswith("| ms of a pass, by rows | 20 cached | 300 cached |")
    assert "| 2 beams | 22 (0 MB) | 302 (0 MB) |" in out
    assert "positions: 301, for timing only; the model's own are 256" in out
    assert (tmp_path / "plot.png").is_file()
    code, out, err = specbeam(*asked, "--json")
    assert code == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [one["record"] for one in records] == ["cell"] * 4 + ["ms by rows"]
    assert {one["provenance"]["positions"] for one in records} == {"the model's own"}
    code, _, err = specbeam(*asked, "--rows", "0")
    assert code == 2
    assert "Invalid value for '--rows'" in err


def test_answers_that_are_missing_cost_nothing_else(models):
    arguments = ["generate", "abc", *models, "-s", "beams=4", "--method", "beam_search", "--max-new-tokens", "5"]
    code, out, err = specbeam(*arguments, "--num-return-sequences", "4", "--regex", "yes|no")
    assert code == 1
    assert sorted(out.split()) == ["no", "yes"]
    assert "argument 1 has 2 answers, num_return_sequences is 4" in err


def test_tune_shows_between_what_controllers_choose(models, monkeypatch):
    monkeypatch.setattr("specbeam.recipes.tuning.costs.NODES", (1, 4, 8))
    monkeypatch.setattr("specbeam.recipes.tuning.costs.measure", partial(measure, least_s=0.0))
    code, out, err = specbeam("tune", *models, "--explain", "--context", "8", "--beams", "3")
    assert code == 0, err
    out = " ".join(out.split())
    assert "milliseconds of a pass" in out
    assert "3 beams of fixed width: a draft is scored" in out
    assert "by rejection: 3 beams, 5 draft nodes per layer" in out
    assert "acceptance of the first" not in out


def test_tune_measures_acceptance_by_rank(models, monkeypatch, tmp_path):
    monkeypatch.setattr("specbeam.recipes.tuning.costs.NODES", (1, 4))
    monkeypatch.setattr("specbeam.recipes.tuning.costs.measure", partial(measure, least_s=0.0))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nno\n")
    code, out, err = specbeam("tune", *models, "--context", "8", "-f", str(prompts), "--json")
    assert code == 0, err
    found = json.loads(out)["acceptance"]
    assert len(found["odds"]) == 5
    assert found["nodes"] > 0


def test_without_a_draft_the_default_method_has_the_same_law_and_takes_settings(models):
    """What only drafts have is refused by the name of the recipe."""
    target = models[1]
    code, out, err = specbeam("generate", "abc", "-m", target, "--seed", "3", "--max-new-tokens", "4", "--json")
    assert code == 0, err
    assert "4 beams, without replacement; decoded without drafts" in json.loads(out)["report"]["law"]
    code, out, err = specbeam("generate", "abc", "-m", target, "-s", "beams=2", "--max-new-tokens", "4", "--json")
    assert code == 0, err
    assert len(json.loads(out)["beams"]) == 2
    code, _, err = specbeam("generate", "abc", "-m", target, "-s", "depth=2")
    assert code == 2
    assert "beam_sampling has no setting 'depth'" in err


def test_every_command_that_generates_has_the_same_options():
    """One entry of the table is a flag of all of them."""
    root = get_command(app)
    for names in (["generate"], ["batch"], ["chat"], ["inspect"], ["bench", "speed"], ["evaluate", "theory"]):
        command = root
        for name in names:
            command = command.commands[name]
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {"--no-repeat-ngram-size", "--typical-p", "--stop"} <= flags, names


def test_best_writes_texts_in_order_with_their_bounds(models):
    code, out, err = specbeam("best", "Hallo", *models, "-n", "3", "--limit", "60", "--max-new-tokens", "8", "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert all(row["certain"] == (row["score"] >= row["bound"]) for row in rows)
    assert specbeam("best", "Hallo", *models, "--drafter", "luck")[0] == 2
    assert specbeam("best", "Hallo", *models, "--top-p", "0.5")[0] == 2
