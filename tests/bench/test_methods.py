"""The comparison of methods: what its figures are, how they are shown."""

import dataclasses
import math

import numpy as np
import pytest

import specbeam as sb
from specbeam.bench.methods import Contender, Figure, Task, contenders, measure
from specbeam.bench.methods_shown import as_markdown, plot
from specbeam.bench.provenance import provenance
from specbeam.cli.bench_methods import bundled_tasks, task_of
from specbeam.errors import BadPrompt, MissingFile
from specbeam.evaluate.perplexity import perplexity
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
    (line,) = measure(words.pair(), task, {"greedy": Contender(sb.greedy(), {})}, seeds=1, max_new_tokens=4)
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


def test_task_files_are_checked(tmp_path):
    (tmp_path / "good.tsv").write_text("a b\tanswer\nc\td\n")
    assert task_of(tmp_path / "good.tsv", "BLEU") == Task("good", "BLEU", [("a b", "answer"), ("c", "d")])
    (tmp_path / "bad.tsv").write_text("a\tb\nno tab\n")
    with pytest.raises(BadPrompt, match="line 2: found 1 columns"):
        task_of(tmp_path / "bad.tsv", "BLEU")
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(BadPrompt, match="is empty"):
        task_of(tmp_path / "empty.tsv", "BLEU")
    with pytest.raises(MissingFile, match="there is no file"):
        task_of(tmp_path / "none.tsv", "BLEU")
    assert [task.metric for task in bundled_tasks()] == ["BLEU", "exact match"]
