"""The comparison of methods: what its figures are, how they are shown."""

import dataclasses
import math
import subprocess
import time
from collections import Counter

import numpy as np
import pytest

import specbeam as sb
from specbeam.doors.cli import bench_methods
from specbeam.doors.cli.bench_methods import MethodsBenchArguments, bundled_tasks, tasks_of
from specbeam.errors import BadPrompt, BadSetting, MissingFile, MissingPackage
from specbeam.lab.bench import methods as timed
from specbeam.lab.bench.method_figures import Figure, MethodRun, Task, _quality
from specbeam.lab.bench.methods import MethodContender, contenders, measure
from specbeam.lab.bench.methods_report import as_markdown, plot
from specbeam.lab.bench.provenance import _commit, provenance
from specbeam.lab.evaluate.perplexity import perplexity
from specbeam.lab.evaluate.task import bleu, bleu_counts, bleu_of
from tests.doors.cli.test_commands import specbeam
from tests.support import words

TASK = Task("letters", "exact match", [("abc", "x"), ("Hello", "y"), ("no", "z")])


@pytest.fixture(scope="module")
def lines():
    methods = contenders(beams=2, depth=2)
    kept = {name: methods[name] for name in ("greedy", "sampling", "speculative sampling", "MTAD", "MMTAD")}
    return measure(words.pair(), TASK, kept, seeds=2, max_new_tokens=6)


def test_figures_are_those_of_the_answers(lines):
    pair = words.pair()
    prompts = [prompt for prompt, _ in TASK.rows]
    for name, method in (("sampling", sb.sampling()), ("MTAD", sb.mtad(2, 2))):
        line = next(one for one in lines if one.method == name)
        done = [sb.generate(pair, one, method, seed=seed, max_new_tokens=6)[0] for seed in range(2) for one in prompts]
        found = perplexity(pair, [one.prompt for one in done], [one.tokens for one in done])
        assert line.perplexity.value == pytest.approx(found.perplexity)
        passes = sum(one.report.target_passes for one in done)
        assert line.tokens_per_pass.value == pytest.approx(found.tokens / passes)
        assert line.tokens_per_output == found.tokens_per_output
        assert line.quality.value == 0


def test_intervals_hold_their_values_and_ratios_their_references(lines):
    named = {line.method: line for line in lines}
    for line in lines:
        for field in ("perplexity", "quality", "seconds_per_token", "tokens_per_pass"):
            figure = getattr(line, field)
            assert figure.low <= figure.value + 1e-12
            assert figure.value <= figure.high + 1e-12
        assert line.perplexity_ratio.value == pytest.approx(line.perplexity.value / named["sampling"].perplexity.value)
        expected = line.tokens_per_pass.value / named["speculative sampling"].tokens_per_pass.value
        assert line.tokens_per_pass_ratio.value == pytest.approx(expected)
    assert named["sampling"].perplexity_ratio == Figure(1.0, 1.0, 1.0)
    assert named["sampling"].tokens_per_pass.value == 1


def test_methods_that_change_the_law_are_marked(lines, tmp_path):
    table = as_markdown(lines).splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == [
        "greedy", "sampling", "speculative sampling", "MTAD *", "MMTAD *",
    ]  # fmt: skip
    assert {len(row.split("|")) for row in table} == {12}
    plot(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    with_energy = [dataclasses.replace(line, joules_per_token=Figure(1.0, 0.9, 1.1)) for line in lines]
    assert "1.00 (0.90 to 1.10)" in as_markdown(with_energy)
    plot(with_energy, tmp_path / "energy.png")


def test_bleu_has_an_interval():
    task = Task("echo", "BLEU", [("abc", "a b c d e"), ("no", "f g h i j")])
    (line,) = measure(words.pair(), task, {"greedy": MethodContender(sb.greedy(), {})}, seeds=1, max_new_tokens=4)
    assert 0 <= line.quality.low <= line.quality.high <= 100
    assert line.perplexity_ratio is None
    assert line.tokens_per_pass_ratio is None
    assert math.isfinite(line.perplexity.value)


def test_contenders_are_compared_at_equal_depth_and_beams():
    for name, one in contenders(beams=3, depth=2).items():
        assert one.method.beams in (1, 3)
        assert one.method.lossless == (not name.startswith(("MTAD", "MMTAD")))


def test_provenance_names_what_matters():
    found = provenance()
    assert {"command", "commit", "torch", "machine", "threads"} <= set(found)
    assert np.all([bool(value) for value in found.values()])


def test_provenance_can_be_repeated(monkeypatch):
    """The command goes into a shell as it is; a machine without a load average has none."""
    monkeypatch.setattr("sys.argv", ["specbeam", "bench", "methods", "my task.tsv", "--metric", "exact match"])
    monkeypatch.delattr("os.getloadavg")
    assert provenance()["command"] == "specbeam bench methods 'my task.tsv' --metric 'exact match'"
    assert provenance()["load"] == "unknown"


def test_the_commit_is_that_of_specbeam(tmp_path):
    """Installed in an environment inside of somebody's repository it has none."""
    inside = tmp_path / ".venv" / "lib" / "site-packages" / "specbeam" / "bench" / "provenance.py"
    inside.parent.mkdir(parents=True)
    inside.touch()
    (tmp_path / "pyproject.toml").touch()
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "theirs"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert _commit(inside) == "none"
    own = tmp_path / "src" / "specbeam" / "bench" / "provenance.py"
    own.parent.mkdir(parents=True)
    assert _commit(own) != "none"
    assert _commit(tmp_path.parent / "nowhere" / "x.py") == "none"


def test_task_files_are_checked(tmp_path):
    (tmp_path / "good.tsv").write_text("a b\tanswer\u2028two\nc\td\n", encoding="utf-8")
    assert tasks_of([tmp_path / "good.tsv"], "BLEU") == [Task("good", "BLEU", [("a b", "answer\u2028two"), ("c", "d")])]
    (tmp_path / "bad.tsv").write_text("a\tb\nno tab\n")
    (tmp_path / "empty.tsv").write_text("")
    (tmp_path / "latin.tsv").write_bytes(b"a\tb\nc\t\xfc\n")
    for name, message in (
        ("bad", "line 2: found 1 columns"),
        ("empty", "is empty"),
        ("latin", "line 2: byte 0xfc is not UTF-8"),
    ):
        with pytest.raises(BadPrompt, match=message):
            tasks_of([tmp_path / f"{name}.tsv"], "BLEU")
    with pytest.raises(MissingFile, match="there is no file"):
        tasks_of([tmp_path / "none.tsv"], "BLEU")
    assert [task.metric for task in bundled_tasks()] == ["BLEU", "exact match"]


def test_tasks_of_one_name_stay_apart(tmp_path):
    files = [tmp_path / folder / f"{name}.tsv" for folder, name in (("a", "test"), ("b", "test"), ("b", "other"))]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x\ty\n")
    assert [task.name for task in tasks_of(files, "BLEU")] == [str(files[0]), str(files[1]), "other"]
    with pytest.raises(BadSetting, match="given twice"):
        tasks_of([files[0], files[0]], "BLEU")


# What the published programs got wrong: rows dropped, scoring timed as decoding, processor time for time.


@pytest.fixture
def clock(monkeypatch):
    """A clock that decoding moves by a second and scoring by a thousand."""

    class Clock:
        now, prompts = 0.0, []
        perf_counter = lambda self: self.now  # noqa: E731

    clock, real_generate, real_score = Clock(), timed.generate, timed.log_likelihoods

    def slow_generate(pair, prompt, *rest, **options):
        clock.now += 1
        clock.prompts.append(prompt)
        return real_generate(pair, prompt, *rest, **options)

    def slow_score(*arguments, **options):
        clock.now += 1000
        return real_score(*arguments, **options)

    monkeypatch.setattr(timed, "time", clock)
    monkeypatch.setattr(timed, "generate", slow_generate)
    monkeypatch.setattr(timed, "log_likelihoods", slow_score)
    return clock


def test_time_is_that_of_decoding_and_every_row_is_answered(clock):
    rows = [("a" * number, "x") for number in range(1, 13)]
    methods = {"greedy": MethodContender(sb.greedy(), {}), "sampling": MethodContender(sb.sampling(), {})}
    for line in measure(words.pair(), Task("many", "exact match", rows), methods, seeds=2, max_new_tokens=3):
        assert line.seconds_per_token.value * line.tokens_per_output == pytest.approx(1.0)
    asked = Counter(clock.prompts)
    assert asked.pop("a") == 2 * 2 + 2  # and one round of warm-up
    assert asked == dict.fromkeys([prompt for prompt, _ in rows[1:]], 2 * 2)


def test_time_is_wall_time(monkeypatch):
    """Waiting costs as much as computing."""
    real = timed.generate
    monkeypatch.setattr(timed, "generate", lambda *given, **options: (time.sleep(0.1), real(*given, **options))[1])
    (line,) = measure(words.pair(), TASK, {"greedy": MethodContender(sb.greedy(), {})}, seeds=1, max_new_tokens=2)
    assert line.seconds_per_token.value * line.tokens_per_output >= 0.1


# Quality.


def answered(*texts):
    done = [sb.Generation(text, [1], [], sb.Report("", tokens=1), [0]) for text in texts]
    return MethodRun(done, [1.0] * len(texts), list(range(len(texts))), [-1.0] * len(texts))


def test_answers_that_are_all_right_prove_no_certainty():
    rows = [("a", "x")] * 10
    right, wrong = (_quality(Task("t", "exact match", rows), answered(*[text] * 10)) for text in "xy")
    assert (right.value, right.low, right.high) == (1, pytest.approx(0.7225, abs=1e-4), 1)
    assert (wrong.value, wrong.low, wrong.high) == (0, 0, pytest.approx(0.2775, abs=1e-4))
    half = _quality(Task("t", "exact match", rows), answered(*"xyxyxyxyxy"))
    assert (half.low, half.value, half.high) == (pytest.approx(0.2, abs=0.1), 0.5, pytest.approx(0.8, abs=0.1))


def test_bleu_is_added_up_from_its_counts():
    texts = ["the old man feeds the birds", "a cat", "", "no one knows what it is like"]
    answers = ["the old woman feeds birds", "a cat", "something", "no one knows what it was like to be"]
    assert bleu_of(np.sum(bleu_counts(texts, answers), 0).tolist()) == pytest.approx(bleu(texts, answers))
    assert bleu_of(np.sum(bleu_counts(texts[1:3], answers[1:3]), 0).tolist()) == pytest.approx(
        bleu(texts[1:3], answers[1:3])
    )


# Nothing is lost that was measured.


def compared(files, metric=None, picture=None):
    given = MethodsBenchArguments(
        file=files, model="nowhere", metric=metric, beams=2, depth=2, rows=9, seeds=1, plot=picture
    )
    return bench_methods.methods(given)


def test_what_would_fail_at_the_end_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "t.tsv").write_text("a\tb\n")
    for picture in (tmp_path / "none" / "plot.png", tmp_path):
        code, _, err = specbeam(
            "bench", "methods", "-f", str(tmp_path / "t.tsv"), "-m", "nowhere", "--plot", str(picture)
        )
        assert code == 2
        assert "a plot cannot be written to" in err
    with pytest.raises(BadSetting, match="--metric is for --file"):
        compared([], "BLEU")
    assert "Invalid value for '--metric'" in specbeam("bench", "methods", "--metric", "WER")[2]
    monkeypatch.setattr("specbeam.lab.bench.pictures.find_spec", lambda name: None)
    code, _, err = specbeam("bench", "methods", "-m", "nowhere", "--plot", str(tmp_path / "plot.png"))
    assert code == 2
    assert "matplotlib" in err
    monkeypatch.setattr("specbeam.lab.evaluate.task.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="sacrebleu"):
        compared([tmp_path / "t.tsv"])


def test_figures_are_printed_before_they_are_drawn(tmp_path, monkeypatch, capsys, lines):
    monkeypatch.setattr("specbeam.doors.cli.widening.grown_pair", lambda *given, **options: words.pair())
    monkeypatch.setattr("specbeam.lab.bench.methods.measure", lambda *given: lines)

    def broken(lines, path):
        raise OSError("the disk is full")

    monkeypatch.setattr("specbeam.lab.bench.methods_report.plot", broken)
    (tmp_path / "t.tsv").write_text("a\tb\n")
    with pytest.raises(OSError, match="full"):
        compared([tmp_path / "t.tsv"], picture=tmp_path / "plot.png")
    assert "| MTAD * |" in capsys.readouterr().out
