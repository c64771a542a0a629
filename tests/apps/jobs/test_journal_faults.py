"""Journals that are damaged, planted, locked or on a full disk: a sentence, or the texts of an undisturbed job."""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import cache
from importlib.util import find_spec

import pytest

import specbeam as sb
import specbeam.apps.jobs.batch as jobs
from specbeam.apps.jobs import journal
from specbeam.apps.jobs.answering import ANSWER_COLUMNS, AnsweredRow, Work
from specbeam.apps.jobs.journal import Journal
from specbeam.apps.jobs.tables import read_table
from specbeam.errors import BadPrompt, BadSetting, CannotWrite, SpecbeamError
from tests.support import words

ROWS = 60
KEPT = 40  # answers in the journal of the job that was ended


def made_up_text(row):
    """A text that depends on the row alone, as that of a model does."""
    return f"text of {row.name}: {row.digest * 6}"


def answer_rows(work, rows, after_step):
    """Stands in for models: what is tested here is what becomes of answers."""
    for row in rows:
        record = dict.fromkeys(ANSWER_COLUMNS)
        failed = row.number % 7 == 0
        record |= {"id": row.id, "text": None if failed else made_up_text(row), "error": "wrong" if failed else None}
        yield AnsweredRow(row, record)
        after_step()


@pytest.fixture(autouse=True)
def _without_models(monkeypatch):
    monkeypatch.setattr(jobs, "answer_rows", answer_rows)


@cache
def no_models():
    """A pair whose models are never called."""
    return Work(words.pair(check=False), sb.greedy())


def run(folder, **options):
    return jobs.batch(
        no_models, folder / "in.jsonl", folder / "out.jsonl", {"model": "tiny", "seed": 3}, **{"resume": True} | options
    )


def write_rows(path, count=ROWS):
    rows = [{"id": f"row-{number}", "prompt": f"prompt {number}"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a job that was ended after some answers, with the answers of an undisturbed one."""
    folder = tmp_path_factory.mktemp("begun")
    write_rows(folder / "in.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "answer_rows", answer_rows)
        jobs.batch(no_models, folder / "in.jsonl", folder / "undisturbed.jsonl", {"model": "tiny", "seed": 3})
        (folder / "undisturbed.jsonl.job").unlink()

        def interrupt(progress):
            if progress.done == KEPT:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(folder, on_progress=interrupt)
    assert (folder / "out.jsonl.job").stat().st_size > 5 * 4096
    return folder


@pytest.fixture
def folder(begun, tmp_path):
    """A copy of it."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


def journal_of(folder):
    return folder / "out.jsonl.job"


def changed(change):
    """A fault of the bytes of the file."""

    def fault(path):
        path.write_bytes(change(path.read_bytes()))

    return fault


def said(*statements):
    """A fault that is made in the language of the database."""

    def fault(path):
        with closing(sqlite3.connect(path)) as base:
            for statement in statements:
                base.execute(statement)
            base.commit()

    return fault


def flipped(place, bit=0x10):
    def flip(raw):
        at = place if place >= 0 else len(raw) + place
        return raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]

    return changed(flip)


def without_page(number):
    return changed(lambda raw: raw[: 4096 * number] + bytes(4096) + raw[4096 * (number + 1) :])


def as_folder(path):
    path.unlink()
    path.mkdir()


def linked_to(goal):
    def fault(path):
        path.unlink()
        path.symlink_to(goal)

    return fault


def beside(end, content):
    """A fault of a file that SQLite keeps beside its own."""

    def fault(path):
        place = path.with_name(path.name + end)
        if content is None:
            place.mkdir()
        else:
            place.write_bytes(content if isinstance(content, bytes) else content(path))

    return fault


def rollback_of_another(path):
    """The rollback journal that a process left which was killed while it wrote to another database."""
    code = (
        "import os, sqlite3, sys; base = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "base.execute('pragma cache_size = 1'); base.execute('create table t (x)'); "
        "base.executemany('insert into t values (?)', [(str(n) * 500,) for n in range(200)]); base.execute('begin'); "
        "base.execute('update t set x = x || 1'); os.kill(os.getpid(), 9)"
    )
    other = path.with_name("other")
    subprocess.run([sys.executable, "-c", code, str(other)], check=False)
    return other.with_name("other-journal").read_bytes()


SAME = ""  # no error: the texts of a job that was not disturbed
ANY = None  # either
ANEW = "delete it and start again|delete the file and start again"
FAULTS = {
    "empty": (changed(lambda raw: b""), SAME),
    "one byte": (changed(lambda raw: raw[:1]), SAME),
    "its header alone": (changed(lambda raw: raw[:100]), ANY),
    "one page": (changed(lambda raw: raw[:4096]), ANEW),
    "half of it": (changed(lambda raw: raw[: len(raw) // 2]), ANY),
    "without its last page": (changed(lambda raw: raw[:-4096]), ANY),
    "without its last byte": (changed(lambda raw: raw[:-1]), ANY),
    "with another page": (changed(lambda raw: raw + b"x" * 4096), SAME),
    "with another byte": (changed(lambda raw: raw + b"x"), SAME),
    "twice": (changed(lambda raw: raw + raw), SAME),
    "junk": (changed(lambda raw: random.Random(1).randbytes(len(raw))), ANEW),
    "a text": (changed(lambda raw: b"no database" * 400), ANEW),
    "lines of JSON": (changed(lambda raw: b'{"id": 1}\n' * 400), ANEW),
    "packed": (changed(gzip.compress), ANEW),
    "lines that end as on another system": (changed(lambda raw: raw.replace(b"\n", b"\r\n")), ANY),
    "only zeros": (changed(lambda raw: bytes(len(raw))), ANY),
    "magic number": (flipped(3), ANEW),
    "size of pages": (flipped(16), ANY),
    "format of the file": (flipped(18, 3), ANY),
    "encoding": (flipped(59, 3), ANY),
    "first page": (without_page(0), ANY),
    "second page": (without_page(1), ANY),
    "third page": (without_page(2), ANY),
    "fourth page": (without_page(3), ANY),
    "last page": (changed(lambda raw: raw[:-4096] + bytes(4096)), ANY),
    "junk in the middle": (changed(lambda raw: raw[:9000] + random.Random(2).randbytes(600) + raw[9600:]), ANY),
    "a letter of a text": (changed(lambda raw: raw.replace(b"text of row-8:", b"test of row-8:")), SAME),
    "a byte that is no text": (changed(lambda raw: raw.replace(b"text of row-8:", b"t\xff\xfft of row-8:")), SAME),
    "a text changed": (said("update answers set record = replace(record, 'text of', 'words of')"), SAME),
    "a failure denied": (said("update answers set failed = 0"), SAME),
    "a failure made up": (said("update answers set failed = 1 where name = 'row-1'"), SAME),
    "an answer under another name": (said("update answers set name = 'row-x' where name = 'row-1'"), SAME),
    "two answers exchanged": (
        said(
            "update answers set record = (select record from answers where name = 'row-2') where name = 'row-1'",
            "update answers set seal = (select seal from answers where name = 'row-2') where name = 'row-1'",
        ),
        SAME,
    ),
    "an answer to another prompt": (said("update answers set digest = 'other' where name = 'row-1'"), SAME),
    "no JSON": (said("update answers set record = '{' where name = 'row-1'"), SAME),
    "an answer that is a number": (said("update answers set record = 5 where name = 'row-1'"), SAME),
    "an answer that is bytes": (said("update answers set record = x'ff00' where name = 'row-1'"), SAME),
    "answers to rows that there are not": (
        said("insert into answers select name || '!', digest, failed, record, seal from answers"),
        SAME,
    ),
    "rows out of range": (said("update rows set number = number + 1000000"), SAME),
    "rows of another job": (said("delete from rows", "insert into rows values (1, 'a', 'b', 0)"), SAME),
    "no rows": (said("drop table rows"), SAME),
    "no answers": (said("delete from answers"), SAME),
    "no table of answers": (said("drop table answers"), SAME),
    "no table of the job": (said("drop table job"), ANEW),
    "no description": (said("delete from job"), ANEW),
    "two descriptions": (said("insert into job select * from job"), ANEW),
    "another description": (said("update job set description = replace(description, 'tiny', 'tine')"), ANEW),
    "another database": (said("pragma application_id = 7"), "is a database other than a journal"),
    "a newer version": (said("pragma user_version = 2"), "format 2, but this version of specbeam writes format 1"),
    "an older version": (said("pragma user_version = 0"), "format 0, but this version"),
    "write-ahead": (said("pragma journal_mode = wal"), SAME),
    "in use": (said("create table further (a)", "create index by_digest on answers (digest)"), SAME),
    "a folder": (as_folder, "is a folder"),
    "a loop of links": (linked_to("out.jsonl.job"), "cannot be opened"),
    "a link into a missing folder": (linked_to("missing/file"), "cannot be opened"),
    "a link to a folder": (linked_to("."), "is a folder"),
    "a link to a device": (linked_to("/dev/full"), "is a device or a pipe"),
    "a link to another place": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), SAME),
    "junk as its rollback": (beside("-journal", b"junk" * 3000), SAME),
    "the rollback of another": (beside("-journal", rollback_of_another), ANY),
    "a folder as its rollback": (beside("-journal", None), ANY),
    "junk as its log": (beside("-wal", b"junk" * 3000), SAME),
    "junk where it is mended": (
        lambda path: (beside(".new", b"junk" * 3000)(path), said("update answers set failed = 0")(path)),
        SAME,
    ),
    "a folder where it is mended": (
        lambda path: (beside(".new", None)(path), said("update answers set failed = 0")(path)),
        "cannot be written",
    ),
}  # fmt: skip


def outcome(folder):
    """What a damaged job comes to: its answers, or the sentence that it is refused with."""
    try:
        run(folder)
    except SpecbeamError as error:
        return None, str(error)
    return (folder / "out.jsonl").read_text(), ""


def check(folder, fault, expected):
    fault(journal_of(folder))
    answers, error = outcome(folder)
    if answers is not None:
        assert expected in (SAME, ANY)
        assert answers == (folder / "undisturbed.jsonl").read_text()
        return
    assert expected != SAME, error
    assert "out.jsonl.job" in error
    assert "\n" not in error
    if expected is not ANY:
        assert any(part in error for part in expected.split("|")), error
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_journal_is_named_or_its_rows_are_decoded_again(folder, name):
    check(folder, *FAULTS[name])


def test_no_flipped_bit_changes_a_text(begun, tmp_path):
    """Any bit of the file: headers, the names of rows, texts, and what SQLite finds them by."""
    rng = random.Random(7)
    size = journal_of(begun).stat().st_size
    whole = 0
    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("in.jsonl", "undisturbed.jsonl", "out.jsonl.job"):
            shutil.copy(begun / name, folder / name)
        check(folder, flipped(rng.randrange(size), 1 << rng.randrange(8)), ANY)
        whole += (folder / "out.jsonl").exists()
    assert whole > 100


def test_what_can_be_read_of_a_damaged_journal_is_kept(folder, monkeypatch, caplog):
    """One page is gone, in the middle of the answers; only what was on it is decoded again, and a line says so."""
    decoded = []

    def counting(work, rows, after_step):
        for row, record in answer_rows(work, rows, after_step):
            decoded.append(row.name)
            yield AnsweredRow(row, record)

    monkeypatch.setattr(jobs, "answer_rows", counting)
    place = journal_of(folder).read_bytes().index(b"text of row-22:") // 4096
    check(folder, without_page(place), SAME)
    assert ROWS - KEPT < len(decoded) < ROWS - KEPT // 2
    assert "was damaged" in caplog.text
    assert f"{ROWS - len(decoded)} answers" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == [
        "in.jsonl", "out.jsonl", "out.jsonl.job", "undisturbed.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("other", [{"model": "other"}, {"seed": 4}, {"method": "greedy"}, {"specbeam": "0"}])
def test_a_journal_of_another_job_is_refused(folder, other):
    (name,) = other
    with pytest.raises(BadSetting, match=rf"out\.jsonl\.job has {name} "):
        jobs.batch(
            no_models, folder / "in.jsonl", folder / "out.jsonl", {"model": "tiny", "seed": 3} | other, resume=True
        )
    assert run(folder).done == ROWS


def test_a_table_that_changes_while_it_is_decoded_loses_no_row_silently(folder, monkeypatch):
    """It is read twice: for its ids, and for the prompts."""
    source = folder / "in.jsonl"

    def changing():
        write_rows(source, ROWS - 5)
        return no_models()

    with pytest.raises(
        BadPrompt, match=r"in\.jsonl was changed while its rows were decoded, and 5 rows have no answer"
    ):
        jobs.batch(changing, source, folder / "new.jsonl")
    assert not (folder / "new.jsonl").exists()
    assert jobs.batch(no_models, source, folder / "new.jsonl", resume=True).done == ROWS - 5


class Full:
    """A connection to a database on a disk that is full from some statement on."""

    def __init__(self, base, left):
        self.base = base
        self.left = left

    def __getattr__(self, name):
        return getattr(self.base, name)

    def execute(self, statement, *values):
        self.left[0] -= 1
        if self.left[0] == 0:
            self.base.execute("pragma max_page_count = 1")  # SQLite takes no less than there are
        return self.base.execute(statement, *values)


@pytest.mark.parametrize("after", [1, 3, 6, 20, 90, 150])
def test_a_disk_that_fills_up_costs_no_answer(tmp_path, monkeypatch, after):
    write_rows(tmp_path / "in.jsonl")
    connect = journal._connection
    left = [after]
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_connection", lambda path: Full(connect(path), left))
        with pytest.raises(CannotWrite, match=r"out\.jsonl\.job cannot be opened or written: database or disk is full"):
            run(tmp_path, resume=False)
    assert not (tmp_path / "out.jsonl").exists()
    run(tmp_path)
    jobs.batch(no_models, tmp_path / "in.jsonl", tmp_path / "undisturbed.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "undisturbed.jsonl").read_text()


def in_a_process(folder, prepare):
    """What a job comes to in a process of its own, which is prepared first."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            os.write(tell, (outcome(folder)[1] or "done").encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told, encoding="utf-8") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


@needs_fork
def test_files_that_cannot_grow_are_named(folder):
    """As on a disk that is full, for every file of the process."""
    size = journal_of(folder).stat().st_size

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2048, size + 2048))

    assert "cannot be opened or written" in in_a_process(folder, limit)
    assert outcome(folder)[0] == (folder / "undisturbed.jsonl").read_text()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="another user is played by root")
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: journal_of(folder).chmod(0o444), "out.jsonl.job is not writable by this user"),
        (lambda folder: journal_of(folder).chmod(0), "out.jsonl.job is not writable by this user"),
        (lambda folder: folder.chmod(0o555), "is not writable by this user"),
        (lambda folder: folder.chmod(0), "Permission denied"),
        (lambda folder: (folder / "in.jsonl").chmod(0), "in.jsonl is not readable by this user"),
    ],
)
def test_files_of_others_are_named(folder, change, found):
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)
    for above in folder.parents:
        if above.stat().st_mode & 0o555 != 0o555:  # those that pytest has made for itself
            above.chmod(0o755)
    change(folder)

    def become_another():
        os.setgid(65534)
        os.setuid(65534)

    said = in_a_process(folder, become_another)
    folder.chmod(0o777)
    assert found in said
    journal_of(folder).chmod(0o666)
    (folder / "in.jsonl").chmod(0o666)
    assert outcome(folder)[0] == (folder / "undisturbed.jsonl").read_text()


@needs_fork
def test_a_job_under_way_keeps_others_out_until_its_process_ends(folder):
    """Also if that ends by SIGKILL, and if the file is being mended."""
    said("update answers set failed = 0 where name = 'row-6'")(journal_of(folder))
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        held = Journal(journal_of(folder), {}, resume=True)
        os.write(tell, b"x")
        while held:
            time.sleep(1)
    try:
        os.read(ready, 1)
        with pytest.raises(BadSetting, match="another process works on the job"):
            run(folder)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert outcome(folder)[0] == (folder / "undisturbed.jsonl").read_text()


@needs_fork
def test_processes_that_begin_one_job_together_write_it_once(folder):
    """Each is refused, or finds the answers of the one that was first."""
    journal_of(folder).unlink()
    told, tell = os.pipe()
    children = []
    for _ in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                _, error = outcome(folder)
                os.write(tell, f"{error or 'done'}\n".encode())
            finally:
                os._exit(0)
    os.close(tell)
    with open(told, encoding="utf-8") as file:
        said = file.read().splitlines()
    for child in children:
        os.waitpid(child, 0)
    assert len(said) == 8
    assert "done" in said
    for one in said:
        assert one == "done" or "another process works on the job" in one or "locked" in one, one
    assert (folder / "out.jsonl").read_text() == (folder / "undisturbed.jsonl").read_text()


def test_an_output_that_appears_while_the_job_begins_is_kept(folder, monkeypatch):
    """Another process has ended the same job in between."""
    journal_of(folder).unlink()

    class Late(Journal):
        def __init__(self, *given):
            super().__init__(*given)
            (folder / "out.jsonl").write_text("of another process")

    monkeypatch.setattr(jobs, "Journal", Late)
    with pytest.raises(BadSetting, match="already exists"):
        run(folder, resume=False)
    assert (folder / "out.jsonl").read_text() == "of another process"
    assert not journal_of(folder).exists()


PLACES = {
    "into a missing folder": ("missing/out.jsonl", "there is no folder"),
    "into a file": ("in.jsonl/out.jsonl", "is not a folder"),
    "onto a folder": ("folder.jsonl", "is a folder"),
    "onto its own table": ("in.jsonl", "write the answers to another file"),
    "onto a link to its table": ("link.jsonl", "write the answers to another file"),
    "onto another name of its table": ("hard.jsonl", "write the answers to another file"),
    "onto another file": ("undisturbed.jsonl", "already exists"),
    "under too long a name": ("x" * 300 + ".jsonl", "File name too long"),
    "under no kind": ("out", "must end in"),
    "under another kind": ("out.txt", "must end in"),
    "into a folder that cannot be": ("/proc/out.jsonl", "cannot be"),
}


@pytest.mark.parametrize("name", PLACES)
def test_answers_are_refused_where_they_cannot_be_written_before_models_are_loaded(folder, name):
    (folder / "folder.jsonl").mkdir()
    (folder / "link.jsonl").symlink_to("in.jsonl")
    os.link(folder / "in.jsonl", folder / "hard.jsonl")
    out, expected = PLACES[name]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    def no_work():
        raise AssertionError("models were loaded")

    with pytest.raises(SpecbeamError, match=expected):
        jobs.batch(no_work, folder / "in.jsonl", folder / out)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [("folder.jsonl", "is a folder"), ("none.jsonl", "there is no file"), ("pipe.jsonl", "is a pipe or a device")],
)
def test_tables_that_are_no_files_are_named(folder, name, expected):
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(SpecbeamError, match=expected):
        jobs.batch(no_models, folder / name, folder / "new.jsonl")
    assert not (folder / "new.jsonl.job").exists()


def test_answers_that_cannot_be_written_stay_in_the_journal(folder, monkeypatch):
    """The disk is full when all rows are decoded."""

    def full(*given):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "write_table", full)
        with pytest.raises(
            CannotWrite, match=r"out\.jsonl cannot be written: No space left on device; make room, and continue"
        ):
            run(folder)
    monkeypatch.setattr(jobs, "answer_rows", lambda *given: pytest.fail("a row is decoded again"))
    assert run(folder).done == ROWS
    assert (folder / "out.jsonl").read_text() == (folder / "undisturbed.jsonl").read_text()


def test_a_file_is_packed_by_the_name_of_the_whole_one(folder):
    jobs.batch(no_models, folder / "in.jsonl", folder / "new.jsonl.gz")
    assert (
        gzip.decompress((folder / "new.jsonl.gz").read_bytes()).decode() == (folder / "undisturbed.jsonl").read_text()
    )


def test_the_journal_takes_any_text(tmp_path, monkeypatch):
    """Also halves of characters, which no encoding has; JSON has an escape for them."""
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "b"}\n')
    odd = "\ud800 \x00 \u2028 \ufffe ä"
    record = dict.fromkeys(ANSWER_COLUMNS) | {"id": "a", "text": odd, "score": float("nan")}
    monkeypatch.setattr(jobs, "answer_rows", lambda work, rows, _: (AnsweredRow(row, dict(record)) for row in rows))
    kinds = [".jsonl", ".csv", ".parquet"] if find_spec("pyarrow") else [".jsonl", ".csv"]
    for end in kinds:
        jobs.batch(no_models, tmp_path / "in.jsonl", tmp_path / f"out{end}")
    (line,) = (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["text"] == odd
    assert found["score"] is None
    for end in kinds[1:]:
        (row,) = read_table(tmp_path / f"out{end}")
        assert row.fields["text"] == odd.replace("\ud800", "\\ud800")
