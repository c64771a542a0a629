"""The speed benchmark reads what is published, runs what is named, and says what it measured."""

import gzip
import json
import lzma

import pytest

from specbeam.doors.cli.widening import parameters
from specbeam.doors.prompts import PromptRow, of_record, read, spread
from specbeam.errors import BadPrompt, BadSetting, MissingFile
from specbeam.lab.bench.baselines import transformers
from specbeam.lab.bench.outcome import specbeam
from specbeam.lab.bench.speed import _quality, speed
from specbeam.lab.bench.speed_report import as_markdown, plot
from specbeam.recipes.beams import beam_sampling, dsbd, greedy
from specbeam.recipes.search import beam_search
from tests.support import words


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"question_id": 1, "category": "qa", "turns": ["first", "second"]}, PromptRow("first")),
        ({"question": "How many?", "answer": "She has 3. #### 3"}, PromptRow("How many?", "She has 3. #### 3")),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": " pass"},
            PromptRow("def f():", " pass"),
        ),
        (
            {"context": "A hat.", "question": "What?", "answers": {"text": ["hat"]}},
            PromptRow("A hat.\n\nWhat?\n", "hat"),
        ),
        ({"db_id": "x", "question": "Which?", "query": "SELECT 1"}, PromptRow("Which?", "SELECT 1")),
        ({"prompt": ["one", "two"], "prompt_id": 1}, PromptRow("one")),
        ({"text": "one"}, PromptRow("one")),
        ("plain", PromptRow("plain")),
    ],
)
def test_records_of_the_known_sets(record, row):
    assert of_record(record) == row


def test_files_are_read_packed_and_plain(tmp_path):
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "c\u2028d"))
    (tmp_path / "x.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    with lzma.open(tmp_path / "x.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("A hat.\tEin Hut.\nA dog.\tEin Hund.\n")
    for name in ("x.jsonl", "x.jsonl.gz"):
        assert read(str(tmp_path / name)) == [PromptRow("a b"), PromptRow("c\u2028d")]
    assert read(str(tmp_path / "x.tsv.xz"), 1, columns=(2, 1)) == [PromptRow("Ein Hund.", "A dog.")]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"nothing": 1}\n')
    with pytest.raises(BadPrompt, match=r"bad.jsonl, line 2: the record has none of turns"):
        read(str(tmp_path / "bad.jsonl"))
    (tmp_path / "ids.jsonl").write_text('{"prompt": [45, 456]}\n')
    with pytest.raises(
        BadPrompt, match=r"ids.jsonl, line 1: the prompt must be a text, and is \[45, 456\] of type list"
    ):
        read(str(tmp_path / "ids.jsonl"))
    (tmp_path / "one.tsv").write_text("A hat.\tEin Hut.\nA dog.\n", encoding="utf-8")
    assert read(str(tmp_path / "one.tsv")) == [PromptRow("A hat.", "Ein Hut."), PromptRow("A dog.")]
    with pytest.raises(BadPrompt, match=r"one.tsv, line 2: it has 1 column, and prompts are in column 2"):
        read(str(tmp_path / "one.tsv"), columns=(2, 1))
    (tmp_path / "bytes.txt").write_bytes(b"fine\n\xfc\n")
    with pytest.raises(BadPrompt, match=r"bytes.txt, line 2, is not UTF-8"):
        read(str(tmp_path / "bytes.txt"))
    for name in ("cut.txt.gz", "cut.txt.xz"):
        (tmp_path / name).write_bytes(b"not packed")
        with pytest.raises(BadPrompt, match=f"{name} cannot be read after line 0"):
            read(str(tmp_path / name))
    with pytest.raises(MissingFile, match="there is no file"):
        read("nowhere.txt")


def test_some_of_many_prompts_are_taken_from_all_over():
    assert spread(range(100), 4) == [12, 37, 62, 87]
    assert spread("abc", 3) == spread("abc", 9) == ["a", "b", "c"]


def test_every_batch_meets_every_contender():
    pair, options = words.pair(), {"max_new_tokens": 6}
    running = [
        transformers(pair, "sampling", **options),
        transformers(pair, "beam_sampling", 2, **options),
        transformers(pair, "assisted", **options),
        specbeam(pair, "ours", dsbd(2, 3), **options),
        specbeam(pair, "plain", beam_sampling(2), **options),
    ]
    rows = [PromptRow("abc", "x"), PromptRow("Hello", "y"), PromptRow("no", "z")]
    lines = speed(pair, running, rows, batch_size=2, repeats=3)
    assert [line.name for line in lines] == [one.name for one in running]
    assert lines[0].ratio.low == lines[0].ratio.high == 1
    assert all(line.tokens_per_second.low <= line.tokens_per_second.median for line in lines)
    assert all(0 < line.tokens <= 18 for line in lines)
    assert all(line.logp_per_token < 0 for line in lines)
    ours, plain = lines[3:]
    assert (ours.passes_per_token, plain.mean_width) != (None, None)
    assert lines[0].passes_per_token is None  # it does not tell
    assert ours.peak_kv_tokens > 5
    assert ours.quality.keys() == {"BLEU", "exact match"}
    assert len(as_markdown(lines).splitlines()) == 7


def test_the_same_tokens_are_counted_on_both_sides():
    pair = words.pair()
    for mode, method in (("greedy", greedy()), ("beam_search", beam_search(3))):
        theirs = transformers(pair, mode, 3, max_new_tokens=12).run(["abc", "Hello you"], 0)
        ours = specbeam(pair, mode, method, max_new_tokens=12).run(["abc", "Hello you"], 0)
        assert theirs.tokens == ours.tokens


def test_the_plot(tmp_path):
    pair = words.pair()
    lines = speed(pair, [specbeam(pair, "greedy", greedy(), max_new_tokens=4)], [PromptRow("abc")], repeats=2)
    plot(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_wrong_input_is_named():
    pair = words.pair(draft_seed=None)
    with pytest.raises(BadSetting, match="transformers/nothing is not known"):
        transformers(pair, "nothing")
    with pytest.raises(BadSetting, match="needs a draft model"):
        transformers(pair, "assisted")
    for text in ("many", "1.2.3M", ".", "-5", ""):
        with pytest.raises(BadSetting, match="a number like 128K"):
            parameters(text)
    assert parameters("1.5B") == 1_500_000_000
    assert parameters("100m") == 100_000_000
    assert parameters("128K") == 128_000


def test_a_table_without_sacrebleu_lacks_bleu_alone(monkeypatch):
    pair = words.pair()
    assert set(_quality(pair, [[5]], ["a"])) == {"BLEU", "exact match"}
    monkeypatch.setattr("specbeam.lab.bench.speed.has_bleu", lambda: False)
    assert set(_quality(pair, [[5]], ["a"])) == {"exact match"}
