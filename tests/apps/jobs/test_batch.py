"""Jobs from a file to a file: each id once, bad rows kept, and the same texts whenever the process was killed."""

import csv
import gzip
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import specbeam as sb
from specbeam.apps.jobs.answering import ANSWER_COLUMNS, answer_rows, work_of
from specbeam.apps.jobs.batch import batch
from specbeam.apps.jobs.journal import Journal
from specbeam.apps.jobs.rows import USUAL_COLUMNS, row_of, row_seed
from specbeam.apps.jobs.tables import read_table, write_table
from specbeam.errors import BadPrompt, BadSetting, MissingFile, NotSupported
from tests.doors.cli.test_commands import specbeam
from tests.support import words
from tests.support.figures import show
from tests.support.tiny_sources import sources, tiny_reader

METHOD = sb.dsbd(beams=2, depth=2, width="fixed")
OPTIONS = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def pair():
    return words.pair(check=False)


@pytest.fixture
def make_work(pair):
    return lambda: work_of(pair, METHOD, 3, 4, OPTIONS)


def prompts(count=12):
    rng = random.Random(5)
    texts = ["".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(3, 9))) + "x" for _ in range(count)]
    return [{"id": f"row-{number}", "prompt": text} for number, text in enumerate(texts)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_in(records):
    return {record["id"]: (record["text"], [beam["tokens"] for beam in record["beams"]]) for record in records}


def test_a_text_depends_on_its_id_and_not_on_order_batch_or_neighbours(pair, make_work, tmp_path):
    rows = prompts()
    rows += [{"id": "again", "prompt": rows[0]["prompt"]}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    done = batch(make_work, source, tmp_path / "out.jsonl")
    assert (done.rows, done.done, done.failed) == (13, 13, 0)
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [row["id"] for row in rows]
    assert set(records[0]) == set(ANSWER_COLUMNS)
    assert not (tmp_path / "out.jsonl.job").exists()

    write_jsonl(tmp_path / "turned.jsonl", rows[::-1][:7])
    alone = work_of(pair, METHOD, 3, 1, OPTIONS)
    batch(lambda: alone, tmp_path / "turned.jsonl", tmp_path / "turned_out.jsonl")
    turned = texts_in(read_jsonl(tmp_path / "turned_out.jsonl"))
    assert turned == {name: text for name, text in texts_in(records).items() if name in turned}
    assert len(turned) == 7

    (again,) = sb.generate(pair, rows[3]["prompt"], METHOD, seed=records[3]["seed"], **OPTIONS)
    assert again.text == records[3]["text"]
    assert again.beams[0].score == pytest.approx(records[3]["score"], abs=1e-5)  # one rounding of float32 per token
    assert records[0]["seed"] != records[-1]["seed"]  # equal prompts, different ids
    assert records[0]["beams"] != records[-1]["beams"]


BAD = [
    ({"id": "no prompt"}, "BadPrompt: the row has no prompt"),
    ({"id": "empty", "prompt": ""}, "is empty"),
    ({"id": "number", "prompt": 5}, "must be a text"),
    ({"id": 1.5, "prompt": "abc"}, "must be a text or an integer"),
    ({"id": None, "prompt": "abc"}, "must be a text or an integer"),
    ({"id": "two", "prompt": "abc", "prompt_token_ids": [5, 6]}, "fill only one"),
    ({"id": "unknown token", "prompt_token_ids": [5, 999]}, "has token id 999"),
    ({"id": "long", "prompt": "x" * 400}, "positions"),
    ({"id": "chat", "messages": [{"role": "user", "content": "hi"}]}, "no chat template"),
    ({"id": "no chat", "messages": ["hi"]}, "dictionaries with a role"),
    ({"id": "half", "prompt": "\ud800"}, "half a surrogate pair"),
    ({"id": "half a name", "prompt": "abc", "settings": {"\ud800": 2}}, r"no setting '\ud800'"),
    ({"id": 10**30, "prompt": "abc"}, "which exceeds 64 bits"),
    ({"id": "token", "prompt_token_ids": [5, 10**30]}, "token"),
    ({"id": "large", "prompt": "abc", "settings": {"top_k": 10**30}}, "no larger than 2,147,483,647"),
    ({"id": "huge", "prompt": "abc", "settings": {"temperature": 10**400}}, "BadSetting"),
    ({"id": "texts", "prompt": "abc", "settings": {"num_return_sequences": 1025}}, "at most 1,024 texts"),
    ({"id": "unknown", "prompt": "abc", "settings": {"speed": 2}}, "no setting 'speed'"),
    ({"id": "wrong", "prompt": "abc", "settings": {"top_k": "many"}}, "BadSetting"),
    ({"id": "seed", "prompt": "abc", "settings": {"seed": -1}}, "seed is -1"),
    ({"id": "no json", "prompt": "abc", "settings": "{"}, "not JSON"),
]


def test_bad_rows_are_kept_with_their_errors_and_cost_nobody_else(make_work, tmp_path):
    good = prompts(4)
    rows = [*good[:2], *(row for row, _ in BAD), *good[2:]]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    with source.open("ab") as file:
        file.write(b'{"id": "cut\n\n\xff\n[1, 2]\n')
    done = batch(make_work, source, tmp_path / "out.jsonl")
    records = read_jsonl(tmp_path / "out.jsonl")
    assert done.rows == len(rows) + 3
    assert done.failed == len(BAD) + 3
    for (row, message), record in zip(BAD, records[2:], strict=False):
        assert message in record["error"], row
        assert record["text"] is None
    assert [record["id"] for record in records[-3:]] == [None] * 3
    assert "must be an object" in records[-1]["error"]
    whole = {record["id"]: record["text"] for record in records if record["error"] is None}
    batch(make_work, write_jsonl(tmp_path / "good.jsonl", good), tmp_path / "good_out.jsonl")
    assert whole == {record["id"]: record["text"] for record in read_jsonl(tmp_path / "good_out.jsonl")}


def test_rows_have_settings_forms_of_prompts_and_several_answers_of_their_own(pair, make_work, tmp_path):
    ids = pair.tokenizer("abc def")["input_ids"]
    rows = [
        {"prompt": "abc def", "settings": {"seed": 9}},
        {"prompt_token_ids": ids, "settings": {"seed": 9}},
        {"prompt": ids, "settings": json.dumps({"seed": 9, "max_new_tokens": 2})},
        {"question": "abc def", "settings": {"seed": 9, "num_return_sequences": 2}},
        {"messages": [{"role": "user", "content": "abc def"}], "settings": {"seed": 9}},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    pair.tokenizer.chat_template = template
    try:
        batch(make_work, source, tmp_path / "out.jsonl")
        chosen = lambda: work_of(pair, sb.sampling(), 3, 4, OPTIONS)  # noqa: E731
        batch(chosen, source, tmp_path / "samples.jsonl")
    finally:
        pair.tokenizer.chat_template = None
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [1, 2, 3, 4, 5]  # without ids rows are numbered
    assert len({record["text"] for number, record in enumerate(records) if number != 2}) == 1
    assert records[2]["new_tokens"] == 2
    assert records[2]["finish_reason"] == "length"
    assert all(record["seed"] == 9 for record in records)
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [len(record["beams"]) for record in samples] == [1, 1, 1, 2, 1]
    both = sb.generate(pair, "abc def", sb.sampling(), seed=9, num_return_sequences=2, **OPTIONS)
    assert [beam["tokens"] for beam in samples[3]["beams"]] == [one.tokens for one in both]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl.gz", ".parquet"])
def test_tables_of_all_kinds_give_the_same_answers(make_work, tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    rows = [row | {"settings": '{"top_k": 9}' if number % 2 else ""} for number, row in enumerate(prompts(5))]
    rows[4]["id"] = 'ä, "quoted"\nid'
    rows[3]["prompt"] = "x" * 400  # too long
    write_jsonl(tmp_path / "in.jsonl", rows)
    batch(make_work, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    source = tmp_path / f"in{suffix}"
    write_table(source, f".{suffix.split('.')[1]}", dict.fromkeys(rows[0], "text"), rows)
    batch(make_work, source, tmp_path / f"out{suffix}")
    expected = read_jsonl(tmp_path / "out.jsonl")
    found = [fields for fields, _ in read_table(tmp_path / f"out{suffix}")]
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    assert [row["text"] or None for row in found] == [row["text"] for row in expected]
    beams = found[0]["beams"]
    beams = json.loads(beams) if isinstance(beams, str) else beams
    assert [beam["tokens"] for beam in beams] == [beam["tokens"] for beam in expected[0]["beams"]]
    assert "positions" in found[3]["error"]


def test_rows_of_a_broken_csv_are_named(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"id,prompt\na,first\nb\nc,third,more\nd,\xff\ne,fifth\n")
    found = list(read_table(tmp_path / "in.csv"))
    assert [one.fields is None for one in found] == [False, True, True, True, False]
    assert [one.error for one in found if one.error] == [
        "the row has 1 fields, and the table has 2 columns",
        "the row has 3 fields, and the table has 2 columns",
        "the row is not UTF-8; save the table as UTF-8",
    ]
    (tmp_path / "long.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    assert len(next(read_table(tmp_path / "long.csv")).fields["prompt"]) == 200_000
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(BadPrompt, match="first line must name"):
        list(read_table(tmp_path / "empty.csv"))
    with pytest.raises(MissingFile, match="there is no file"):
        read_table(tmp_path / "none.csv")


def test_each_line_of_a_text_is_a_prompt(make_work, tmp_path):
    """Blank lines keep their place, with an error; texts are read only."""
    source = tmp_path / "in.txt"
    source.write_bytes(b"\xef\xbb\xbfa b\r\n\n b \nc\xff\n")
    assert [one.fields and one.fields["prompt"] for one in read_table(source)] == ["a b", "", " b ", None]
    source.write_text("a b\n\nb\n")
    progress = batch(make_work, source, tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert (progress.done, progress.failed) == (3, 1)
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    with pytest.raises(BadSetting, match=r"must end in \.jsonl, \.csv, \.parquet"):
        batch(make_work, source, tmp_path / "out.txt")


def test_what_would_spoil_a_job_is_refused_before_anything_is_decoded(pair, make_work, tmp_path):
    def no_work():
        raise AssertionError("models were loaded")

    source = write_jsonl(
        tmp_path / "in.jsonl", [{"id": 1, "prompt": "a"}, {"id": "b", "prompt": "b"}, {"id": "1", "prompt": "c"}]
    )
    with pytest.raises(BadPrompt, match="rows 1 and 3 have the same id, '1'"):
        batch(no_work, source, tmp_path / "out.jsonl")
    with pytest.raises(BadSetting, match="write the answers to another file"):
        batch(no_work, source, source)
    with pytest.raises(BadSetting, match="must end in"):
        batch(no_work, source, tmp_path / "out.txt")
    with pytest.raises(NotSupported, match="cannot use method 'auto'"):
        work_of(pair, "auto", 0, 4, {})
    with pytest.raises(BadSetting, match="batch_size is 0"):
        work_of(pair, METHOD, 0, 0, {})
    with pytest.raises(BadSetting, match="keeps 2 beams"):
        work_of(pair, METHOD, 0, 4, {"num_return_sequences": 3})
    good = write_jsonl(tmp_path / "good.jsonl", prompts(2))
    batch(make_work, good, tmp_path / "good_out.jsonl")
    with pytest.raises(BadSetting, match="already exists"):
        batch(no_work, good, tmp_path / "good_out.jsonl")
    assert batch(no_work, good, tmp_path / "good_out.jsonl", resume=True).done == 2


def test_a_finished_job_answers_its_own_rows_only(make_work, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", prompts(3))
    out = tmp_path / "out.csv"
    batch(make_work, source, out, {"seed": 3})
    found = batch(make_work, source, out, {"seed": 3}, resume=True)
    assert (found.done, found.was_finished) == (3, True)
    with pytest.raises(BadSetting, match="row 1 has another seed than this call; its journal is gone"):
        batch(make_work, source, out, {"seed": 4}, resume=True)
    for count, message in ((2, "more rows than the table"), (4, "3 rows, but the table has more")):
        other = write_jsonl(tmp_path / "other.jsonl", prompts(count))
        with pytest.raises(BadSetting, match=message):
            batch(make_work, other, out, resume=True)
    renamed = write_jsonl(tmp_path / "renamed.jsonl", [row | {"id": f"new {row['id']}"} for row in prompts(3)])
    with pytest.raises(BadSetting, match="its row 1 has the id"):
        batch(make_work, renamed, out, resume=True)


def test_a_table_without_a_column_of_prompts_is_refused_at_once(tmp_path):
    def no_work():
        raise AssertionError("models are loaded")

    source = tmp_path / "in.csv"
    source.write_text("id;prompt\n1;abc\n")
    with pytest.raises(BadPrompt, match="no column prompt, messages or prompt_token_ids, only 'id;prompt'"):
        batch(no_work, source, tmp_path / "out.jsonl")
    assert not list(tmp_path.glob("out*"))


def interrupted_after(count, make_work, source, out, **options):
    """A job that an interrupt ends when this number of answers was kept."""
    left = [count]

    def interrupt(progress):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch(make_work, source, out, on_progress=interrupt, **options)


def test_a_job_goes_on_with_its_own_settings_only_and_follows_its_table(make_work, tmp_path):
    rows = prompts(6)
    rows[1]["prompt"] = ""
    out = tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    interrupted_after(4, make_work, source, out, described={"seed": 3})
    job = tmp_path / "out.jsonl.job"
    assert job.exists()
    assert not out.exists()
    with pytest.raises(BadSetting, match="continue it with --resume"):
        batch(make_work, source, out, {"seed": 3})
    with pytest.raises(BadSetting, match=r"has seed 3, but this call has 4 \(different settings: seed\)"):
        batch(make_work, source, out, {"seed": 4}, resume=True)
    held = Journal(job, {"seed": 3}, resume=True)
    with pytest.raises(BadSetting, match="another process works on the job"):
        batch(make_work, source, out, {"seed": 3}, resume=True)
    held.close()

    seen = []

    def counting():
        work = make_work()
        seen.append(work)
        return work

    rows[1]["prompt"] = "mended"
    changed = write_jsonl(tmp_path / "in.jsonl", [*rows[1:], {"id": "new", "prompt": "abc"}])
    with pytest.raises(BadSetting, match=r"1 of 3 texts .* not in this table \(the first is 'row-0'\)"):
        batch(counting, changed, out, {"seed": 3}, resume=True)
    done = batch(counting, changed, out, {"seed": 3}, resume=True, drops_answers=True)
    assert (done.rows, done.done, done.failed) == (6, 6, 0)
    records = read_jsonl(out)
    assert [record["id"] for record in records] == [*(row["id"] for row in rows[1:]), "new"]
    batch(make_work, changed, tmp_path / "anew.jsonl")
    assert texts_in(records) == texts_in(read_jsonl(tmp_path / "anew.jsonl"))
    job.write_bytes(b"no database" * 100)
    out.unlink()
    with pytest.raises(BadSetting, match="is not a journal"):
        batch(make_work, source, out, resume=True)


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_wrong_table_costs_no_answer(make_work, tmp_path, has_ids):
    rows = [row if has_ids else {"prompt": row["prompt"]} for row in prompts(6)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    interrupted_after(4, make_work, source, out)
    others = [row | {"prompt": f"{row['prompt']}a"} for row in rows]
    if has_ids:
        others = [row | {"id": f"other {row['id']}"} for row in others]
    other = write_jsonl(tmp_path / "other.jsonl", others)
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    for wrong in (other, empty):
        with pytest.raises(BadSetting, match=r"4 of 4 texts .* give the table of the job"):
            batch(make_work, wrong, out, resume=True)
    decoded = []

    def on_progress(progress):
        decoded.append(progress.done)

    rows[5]["prompt"] = "changed before it was decoded"
    batch(make_work, write_jsonl(source, rows), out, resume=True, on_progress=on_progress)
    assert decoded == [4, 5, 6]


def test_a_job_refuses_to_go_on_with_other_weights_and_decodes_failed_rows_again_if_told(make_work, tmp_path):
    rows = prompts(5)
    rows[0]["prompt"] = "x" * 400
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out.jsonl"
    interrupted_after(3, make_work, source, out)
    other = words.pair(draft_seed=2, check=False)
    with pytest.raises(BadSetting, match="has draft weights"):
        batch(lambda: work_of(other, METHOD, 3, 4, OPTIONS), source, out, resume=True)
    decoded = []

    def noting():
        work = make_work()
        decoded.append(work)
        return work

    done = batch(noting, source, out, resume=True, retry_failed=True)
    assert (done.rows, done.done, done.failed) == (5, 5, 1)
    assert len(decoded) == 1

    with pytest.raises(
        BadSetting, match="remains because rows failed; decode those again with --resume --retry-failed"
    ):
        batch(noting, source, out)
    whole = out.read_text()
    assert batch(noting, source, out, resume=True) == done
    assert out.read_text() == whole
    assert len(decoded) == 1
    batch(noting, source, out, resume=True, retry_failed=True)  # it is over, and is tried again all the same
    assert len(decoded) == 2
    job = tmp_path / "out.jsonl.job"
    job.unlink()
    with pytest.raises(BadSetting, match=r"the journal .* is missing"):
        batch(noting, source, out, resume=True, retry_failed=True)


def test_a_command_that_was_wrong_leaves_no_journal_behind(make_work, tmp_path):
    def no_work():
        raise MissingFile("there is no such model")

    out = tmp_path / "out.jsonl"
    with pytest.raises(MissingFile, match="there is no file"):
        batch(make_work, tmp_path / "none.jsonl", out, {"seed": 3})
    source = write_jsonl(tmp_path / "in.jsonl", prompts(2))
    with pytest.raises(MissingFile, match="no such model"):
        batch(no_work, source, out, {"model": "wrong"})
    assert not (tmp_path / "out.jsonl.job").exists()
    Journal(tmp_path / "out.jsonl.job", {"model": "wrong"}, resume=False).close()  # as after a kill before any answer
    done = batch(make_work, source, out, {"model": "right"}, resume=True)
    assert (done.rows, done.done, done.failed) == (2, 2, 0)


def test_damaged_tables_are_named(tmp_path):
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in prompts(400)).encode())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadPrompt, match=r"cut\.jsonl\.gz is damaged"):
        list(read_table(cut))
    plain = tmp_path / "plain.csv.gz"
    plain.write_bytes(b"id,prompt\n1,a\n")
    with pytest.raises(BadPrompt, match=r"plain\.csv\.gz is damaged"):
        list(read_table(plain))
    spoilt = tmp_path / "spoilt.jsonl.xz"
    spoilt.write_bytes(b"no xz at all")
    with pytest.raises(BadPrompt, match=r"spoilt\.jsonl\.xz is damaged"):
        list(read_table(spoilt))
    pytest.importorskip("pyarrow")
    parquet = tmp_path / "spoilt.parquet"
    rows = [{"id": str(number), "prompt": "abc" * number} for number in range(400)]
    write_table(parquet, ".parquet", {"id": "text", "prompt": "text"}, rows)
    whole = parquet.read_bytes()
    parquet.write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])
    with pytest.raises(BadPrompt, match=r"spoilt\.parquet is damaged"):
        list(read_table(parquet))


KILLED = """
import os, signal, sys
from pathlib import Path
import specbeam.apps.jobs.batch as jobs
from specbeam.apps.jobs.journal import Journal
from tests.apps.jobs.test_batch import METHOD, OPTIONS
from tests.support import words

pair = words.pair(check=False)
folder = Path(sys.argv[1])
keep = Journal.keep
records = Journal.records
jobs.COMMIT_S = 0.0
for method, point in [("keep", int(sys.argv[2])), ("keep", int(sys.argv[3])), ("records", int(sys.argv[4]))]:
    child = os.fork()
    if child == 0:
        left = point

        def one_less():
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def killing_keep(self, row, record):
            keep(self, row, record)
            one_less()

        def killing_records(self):
            for record in records(self):
                yield record
                one_less()

        setattr(Journal, method, {"keep": killing_keep, "records": killing_records}[method])
        jobs.batch(lambda: jobs.Work(pair, METHOD, 3, 4, OPTIONS), folder / "in.jsonl", folder / "out.jsonl", resume=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    assert not (folder / "out.jsonl").exists()
    print(child, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_job_that_is_killed_thrice_has_each_id_once_and_the_texts_of_an_undisturbed_one(make_work, tmp_path):
    """Twice while rows are decoded and once while the answers are written, at seeded points, by SIGKILL."""
    rows = [*prompts(16), {"id": "bad", "prompt": ""}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    rng = random.Random(20)
    points = [str(rng.randrange(2, 6)), str(rng.randrange(2, 6)), str(rng.randrange(3, 16))]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *points],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3

    def no_work():
        raise AssertionError("the third process has decoded all rows, and they are decoded again")

    end = batch(no_work, source, tmp_path / "out.jsonl", resume=True)
    assert (end.rows, end.done, end.failed) == (17, 17, 1)
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [row["id"] for row in rows]
    batch(make_work, source, tmp_path / "undisturbed.jsonl")
    undisturbed = read_jsonl(tmp_path / "undisturbed.jsonl")
    assert texts_in(records[:-1]) == texts_in(undisturbed[:-1])
    assert records[-1] == undisturbed[-1]


def test_rows_are_taken_when_there_is_a_place_for_them(pair):
    """So that no job holds its rows, and wrong ones are answered at once."""
    work = work_of(pair, METHOD, 0, 4, {"max_new_tokens": 2})
    taken = 0

    def rows():
        nonlocal taken
        for number in range(1, 41):
            taken += 1
            yield row_of(number, {"prompt": "" if number % 3 == 0 else f"ab {number}"}, USUAL_COLUMNS)

    given = 0
    for _ in answer_rows(work, rows()):
        given += 1
        assert taken - given <= 4
    assert given == 40
    assert pair.target.caches == []


def test_seeds_of_rows_are_fixed_by_seed_and_id():
    """By these numbers published answers can be drawn again."""
    row = row_of(1, {"id": "a", "prompt": "x"}, USUAL_COLUMNS)
    assert row_seed(0, row) == 7635241192072670218
    assert row_seed(1, row) != row_seed(0, row)
    assert row_seed(0, replace(row, id="b")) != row_seed(0, row)
    assert row_seed(0, replace(row, settings={"seed": 5})) == 5


def test_the_command_decodes_and_says_what_it_did(tmp_path):
    target, draft = words.saved(tmp_path)
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["key", "text"], ["a", "abc"], ["b", ""]])
    arguments = [
        "batch", str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl.gz"), "-m", target, "-d", draft, "--id-column", "key",
        "--prompt-column", "text", "--max-new-tokens", "4", "-s", "beams=2", "-s", "depth=2", "--seed", "1",
    ]  # fmt: skip
    code, out, err = specbeam(*arguments)
    assert code == 1, err
    assert "2 rows, 1 of them with an error" in out
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as file:
        assert [json.loads(line)["id"] for line in file] == ["a", "b"]
    assert specbeam(*arguments)[0] == 2
    code, out, _ = specbeam(*arguments, "--resume", "--json")
    assert (code, json.loads(out)["failed"]) == (1, 1)


def test_sources_of_a_translation_model_are_decoded_and_models_that_hear_are_refused(tmp_path):
    folder = tmp_path / "model"
    model = tiny_reader("marian")
    model.save_pretrained(folder)
    words.tokenizer().save_pretrained(folder)
    given = sources("marian")
    rows = [{"id": number, "prompt_token_ids": ids} for number, ids in enumerate(given)]
    write_jsonl(tmp_path / "in.jsonl", [*rows, {"id": "long", "prompt_token_ids": [7] * 65}])
    arguments = ["--method", "beam_search", "-s", "beams=3", "--max-new-tokens", "8"]
    code, _, err = specbeam(
        "batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "-m", str(folder), *arguments
    )
    assert code == 1, err
    *records, refused = read_jsonl(tmp_path / "out.jsonl")
    assert "65 tokens" in refused["error"]
    answers = sb.generate(sb.load(model), given, sb.beam_search(3), max_new_tokens=8)
    assert [record["beams"][0]["tokens"] for record in records] == [answer.beams[0].tokens for answer in answers]
    assert [record["prompt_tokens"] for record in records] == [len(ids) for ids in given]
    code, _, err = specbeam(
        "batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out2.jsonl"), "-m", str(folder), "--target-language", "fr"
    )
    assert (code, "leave the target language out" in err) == (2, True)

    tiny_reader("whisper").save_pretrained(tmp_path / "ears")
    words.tokenizer().save_pretrained(tmp_path / "ears")
    code, _, err = specbeam(
        "batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out3.jsonl"), "-m", str(tmp_path / "ears")
    )
    assert (code, "specbeam transcribe" in err) == (2, True)


def answers_kept(path):
    """The number of answers in the journal of a job that another process may be running."""
    try:
        with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as journal:  # it is locked
            return journal.execute("select count(*) from answers").fetchone()[0]
    except sqlite3.DatabaseError:  # it is not made yet, or is being written
        return 0


@pytest.mark.slow
def test_the_command_survives_kills_at_random_moments(tmp_path):
    """Three kills, each up to half a second after further answers were kept, however fast the machine is."""
    target, draft = words.saved(tmp_path)
    source = write_jsonl(tmp_path / "in.jsonl", prompts(800))
    shell = [sys.executable, "-c", "from specbeam.doors.cli.main import main; main()", "batch"]
    rest = ["-m", target, "-d", draft, "--max-new-tokens", "40", "--seed", "3", "--batch-size", "2"]
    resumed = [*shell, str(source), str(tmp_path / "out.jsonl"), *rest, "--resume"]
    journal = tmp_path / "out.jsonl.job"
    rng = random.Random(1)
    kept = [0]
    for _ in range(3):
        process = subprocess.Popen(resumed)
        while answers_kept(journal) == kept[-1]:
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5 * rng.random())
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was over before it was killed three times; give it more rows"
        kept.append(answers_kept(journal))
    assert 0 < kept[1] < kept[2] < kept[3] < 800
    assert subprocess.run(resumed, check=False).returncode == 0
    assert subprocess.run([*shell, str(source), str(tmp_path / "once.jsonl"), *rest], check=False).returncode == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [f"row-{number}" for number in range(800)]
    assert texts_in(records) == texts_in(read_jsonl(tmp_path / "once.jsonl"))
    show(f"answers kept at each kill: {kept[1:]}")


MANY = """
import resource, sys
from pathlib import Path
from specbeam.apps.jobs.batch import batch
from specbeam.apps.jobs.answering import work_of
from tests.support import words
import specbeam as sb

def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

def show(progress):
    if progress.done and progress.done % 10_000 == 0:
        print(progress.done, f"{megabytes():.1f}", flush=True)

pair = words.pair(check=False)
work = work_of(pair, sb.sampling(), 0, 16, {"max_new_tokens": 2})
batch(lambda: work, Path(sys.argv[1]), Path(sys.argv[2]), on_progress=show)
print("end", f"{megabytes():.1f}", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_over_a_hundred_thousand_rows(tmp_path):
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(100_000):
            file.write(json.dumps({"id": f"prompt {number}", "prompt": f"abc {number % 977}"}) + "\n")
    code = [sys.executable, "-c", MANY, str(source), str(tmp_path / "out.jsonl")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == 11
    assert max(sizes[2:]) - sizes[1] < 10  # MiB, over 80,000 rows after the first 20,000 and while they are written
    assert sum(1 for _ in (tmp_path / "out.jsonl").open()) == 100_000


def test_a_row_with_several_prompts_is_an_error_and_none_is_left_out():
    row = row_of(1, {"prompt": ["abc", "no"]}, USUAL_COLUMNS)
    assert row.error == "BadPrompt: the prompt is a list of 2; write each prompt in a line of its own"
