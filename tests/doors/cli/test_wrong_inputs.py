"""Every command with every kind of wrong input: an exit code and a sentence, before any model is loaded."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import typer.main

from specbeam.doors.cli.generate import placed_prompts
from specbeam.doors.cli.main import app, main
from tests.doors.cli.test_commands import specbeam
from tests.support import words

# How each command is called with what is right; FILE, OUT and FOLDER stand for what is wrong in a test.
READING = {
    "generate": ["generate", "-f", "FILE"],
    "batch": ["batch", "FILE", "answers.jsonl"],
    "inspect": ["inspect", "-f", "FILE"],
    "chat": ["chat", "--chat-template", "FILE"],
    "tune": ["tune", "-f", "FILE"],
    "evaluate same-beams": ["evaluate", "same-beams", "-f", "FILE"],
    "evaluate diff": ["evaluate", "diff", "-f", "FILE"],
    "evaluate perplexity": ["evaluate", "perplexity", "FILE"],
    "evaluate theory": ["evaluate", "theory", "-f", "FILE"],
    "bench efficiency": ["bench", "efficiency", "-f", "FILE"],
    "bench acceptance": ["bench", "acceptance", "-f", "FILE"],
    "bench specbench": ["bench", "specbench", "FILE"],
    "bench methods": ["bench", "methods", "-f", "FILE"],
    "bench paper": ["bench", "paper", "dsbd", "--squad", "FILE"],
    "bench speed": ["bench", "speed", "-f", "FILE"],
    "bench serve": ["bench", "serve", "http://127.0.0.1:9", "-f", "FILE"],
    "train draft": ["train", "draft", "-o", "new", "-f", "FILE"],
    "train eagle3": ["train", "eagle3", "-o", "new", "-f", "FILE"],  # as all kinds of heads
    "train hmt": ["train", "hmt", "-o", "new", "-f", "FILE"],
    "generate with a grammar": ["generate", "x", "--grammar", "FILE"],
    "generate with a schema": ["generate", "x", "--json-schema", "FILE"],
    "serve": ["serve", "--config", "FILE"],
    "heads inspect": ["heads", "inspect", "FILE"],
}
WRITING = {
    "batch": ["batch", "good.jsonl", "OUT.jsonl"],
    "inspect": ["inspect", "x", "--svg", "OUT"],
    "bench efficiency": ["bench", "efficiency", "--plot", "OUT.png"],
    "bench methods": ["bench", "methods", "--plot", "OUT.png"],
    "bench paper": ["bench", "paper", "dsbd", "--plot", "OUT.png"],
    "bench speed": ["bench", "speed", "--plot", "OUT.png"],
    "bench passes": ["bench", "passes", "--plot", "OUT.png"],
    "evaluate theory": ["evaluate", "theory", "--plot", "OUT.png"],
    "bench cliffs": ["bench", "cliffs", "--markdown", "OUT"],
    "bench cliffs in JSON": ["bench", "cliffs", "--json", "OUT"],
}
FOLDERS = {
    "bench specbench": ["bench", "specbench", "good.jsonl", "--answers", "FOLDER"],
    "bench paper": ["bench", "paper", "dsbd", "--out", "FOLDER"],
    "train draft": ["train", "draft", "-f", "good.jsonl", "-o", "FOLDER"],
    "train eagle3": ["train", "eagle3", "-f", "good.jsonl", "-o", "FOLDER"],
    "train hmt": ["train", "hmt", "-f", "good.jsonl", "-o", "FOLDER"],
    "train draft from trees": ["train", "draft", "-f", "good.jsonl", "-o", "new", "--trees", "FOLDER"],
}
NO_FILES = ["missing", "folder", "good.jsonl/inside", "missing/file", "x" * 300]
NO_TEXTS = ["latin", "binary", "cut.gz", "plain.xz"]
NO_PLACES = ["folder", "missing/file", "good.jsonl/inside", "x" * 300]
NO_FOLDERS = ["good.jsonl", "good.jsonl/inside", "x" * 300]


def commands_of(group, path=()):
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_of(one, (*path, name))
        else:
            yield " ".join((*path, name)), one


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return words.saved(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of right and wrong files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "abc"}\n')
    (tmp_path / "folder").mkdir()
    for end in (".jsonl", ".png"):
        (tmp_path / f"folder{end}").mkdir()
    (tmp_path / "latin").write_bytes("schön\n".encode("latin-1"))
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "plain.xz").write_bytes(b"plain\n")
    return tmp_path


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def load(*given, **named):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("specbeam.doors.with_memory.load_by_name", load)
    monkeypatch.setattr("specbeam.doors.cli.widening.quiet_load", load)


def check_refused(code, out, err, named=""):
    """One sentence, ours or typer's, which names what is wrong."""
    assert code == 2, (out, err)
    assert out == ""
    assert err.strip().splitlines()[-1].startswith("specbeam: ") or "Invalid value for" in err
    assert "Traceback" not in err
    assert named[:60] in err


@pytest.mark.parametrize("file", NO_FILES, ids=lambda file: file[:20])
@pytest.mark.parametrize("command", READING)
def test_a_file_that_is_none_is_named(here, nothing_is_loaded, command, file):
    check_refused(*specbeam(*[file if one == "FILE" else one for one in READING[command]]), file)


@pytest.mark.parametrize("file", NO_TEXTS)
@pytest.mark.parametrize(
    "command", [one for one in READING if one not in ("heads inspect", "train hmt", "evaluate perplexity")]
)
def test_a_file_that_is_no_text_is_named(here, nothing_is_loaded, command, file):
    if command == "batch":
        name = f"table.jsonl{(here / file).suffix}"
        (here / file).rename(here / name)
        if (here / name).suffix == ".jsonl":
            pytest.skip("each line of such a table has its own error")
        file = name
    packed = file.endswith((".gz", ".xz"))
    if packed and ("with a" in command or command == "serve"):
        pytest.skip("it is not unpacked")
    code, out, err = specbeam(*[file if one == "FILE" else one for one in READING[command]])
    check_refused(code, out, err, file)


@pytest.mark.parametrize(
    "command", [name for name, given in READING.items() if "-f" in given and name != "bench methods"]
)
@pytest.mark.parametrize("file", ["table.csv", "table.parquet", "table.json"])
def test_a_table_is_not_read_as_lines(here, nothing_is_loaded, command, file):
    (here / file).write_text("id,prompt\n1,abc\n")
    arguments = [file if one == "FILE" else one for one in READING[command]]
    check_refused(*specbeam(*arguments), f"{file} has no prompt per line")


def test_prompts_that_look_like_files_and_lines_of_json_are_said_to_be_texts(here, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "abc"}\n'))
    sources, _, _ = placed_prompts([], [], str)
    assert [one.text for one in sources] == ['{"prompt": "abc"}']
    assert "seems to be JSON lines, but is read as text" in capsys.readouterr().err
    placed_prompts(["good.jsonl", "x" * 5000, "folder", "no.jsonl"], [], str)
    assert capsys.readouterr().err.count("is read as a prompt; --file reads the file") == 1


def test_files_of_outputs_and_of_long_texts_are_read_with_the_model(here, models):
    for file in NO_TEXTS:
        for command in ("train hmt", "evaluate perplexity"):
            arguments = [file if one == "FILE" else one for one in READING[command]]
            check_refused(*specbeam(*arguments, "-m", models[0]), file)


@pytest.mark.parametrize("place", NO_PLACES, ids=lambda place: place[:20])
@pytest.mark.parametrize("command", WRITING)
def test_a_place_that_cannot_be_written_is_named(here, nothing_is_loaded, command, place):
    if "--plot" in WRITING[command]:
        pytest.importorskip("matplotlib")
    before = sorted(path.name for path in here.iterdir())
    check_refused(*specbeam(*[one.replace("OUT", place) for one in WRITING[command]]), place.split("/")[0])
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize("folder", NO_FOLDERS, ids=lambda folder: folder[:20])
@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_made_is_named(here, nothing_is_loaded, command, folder):
    check_refused(*specbeam(*[folder if one == "FOLDER" else one for one in FOLDERS[command]]), folder.split("/")[0])


def test_every_file_of_every_command_is_in_these_tables():
    """So that a new one is tried with what is wrong, too."""
    tried = {*READING, *WRITING, *FOLDERS}
    for name, command in commands_of(typer.main.get_command(app)):
        annotations = command.callback.__annotations__
        for parameter in command.params:
            is_path = "Path" in str(annotations.get(parameter.name, ""))
            assert not is_path or name in tried or name == "transcribe" or name.startswith("train "), (
                name,
                parameter.name,
            )


NUMBERS = [
    ["generate", "x", "--temperature", "-1"],
    ["generate", "x", "--temperature", "nan"],
    ["generate", "x", "--top-p", "2"],
    ["generate", "x", "--top-k", "-1"],
    ["generate", "x", "--min-p", "nan"],
    ["generate", "x", "--max-new-tokens", "0"],
    ["generate", "x", "--max-new-tokens", "99999999999"],
    ["generate", "x", "--num-return-sequences", "0"],
    ["generate", "x", "--batch-size", "0"],
    ["generate", "x", "--length-penalty", "inf"],
    ["generate", "x", "--repetition-penalty", "0"],
    ["generate", "x", "--stop", ""],
    ["generate", "x", "--stop", "\udcff"],
    ["generate", "\udcff"],
    ["generate", "x", "--grammar-backend", "other"],
    ["generate", "x", "--set", "beams=0"],
    ["generate", "x", "--method", "other"],
    ["batch", "good.jsonl", "out.jsonl", "--temperature", "-1"],
    ["batch", "good.jsonl", "out.jsonl", "--batch-size", "-1"],
    ["batch", "good.jsonl", "out.jsonl", "--method", "other"],
    ["batch", "good.jsonl", "out.jsonl", "--set", "other=1"],
    ["inspect", "x", "--turn", "0"],
    ["inspect", "x", "--temperature", "-1"],
    ["inspect", "x", "--set", "beams=0"],
    ["chat", "--temperature", "-1"],
    ["chat", "--method", "other"],
    ["tune", "--context", "0"],
    ["tune", "--beams", "0"],
    ["generate", "x", "--num-return-sequences", "6"],
    ["generate", "x", "--set", "beams=0"],
    ["batch", "good.jsonl", "out.jsonl", "--num-return-sequences", "6"],
    ["chat", "--set", "beams=0"],
    ["tune", "--odds", "1"],
    ["evaluate", "same-beams", "x", "--batch-size", "0"],
    ["evaluate", "same-beams", "x", "--top-p", "0"],
    ["evaluate", "diff", "x", "--beams", "0"],
    ["evaluate", "diff", "x", "--max-new-tokens", "0"],
    ["evaluate", "diff", "x", "--set", "depth=0"],
    ["evaluate", "theory", "x", "--temperature", "nan"],
    ["bench", "efficiency", "a", "b", "--budget", "2"],
    ["bench", "efficiency", "a", "b", "--max-new-tokens", "0"],
    ["bench", "acceptance", "x", "--temperature", "-1"],
    ["bench", "speed", "greedy", "-p", "x", "--max-new-tokens", "0"],
    ["bench", "passes", "--rows", "0"],
    ["bench", "cliffs", "--batch-sizes", "0"],
    ["bench", "methods", "--beams", "0"],
    ["bench", "serve", "http://127.0.0.1:9", "--requests", "1"],
    ["bench", "serve", "nonsense", "--requests", "1"],
    ["bench", "serve", "--body", "[]"],
    ["chat", "--url", "http://127.0.0.1:9"],
    ["chat", "--url", "nonsense"],
    ["bench", "acceptance", "-f", "empty.txt"],
    ["bench", "efficiency", "-f", "empty.txt"],
]


@pytest.mark.parametrize("arguments", NUMBERS, ids=lambda arguments: repr(" ".join(arguments)))
def test_a_setting_that_is_wrong_for_any_model_is_refused_before_one_is_loaded(here, nothing_is_loaded, arguments):
    (here / "empty.txt").write_text("\n")
    check_refused(*specbeam(*arguments))
    assert not list(here.glob("out*"))


def run(arguments, shell="", **streams):
    """A process of its own, whose streams are chosen; `shell` is a redirection."""
    line = f'exec "$0" -c "from specbeam.doors.cli.main import main; main()" "$@" {shell}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *arguments], timeout=120, check=False, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams,
    )  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
@pytest.mark.parametrize(
    ("arguments", "shell", "code", "said"),
    [
        (["methods"], ">/dev/full", 2, "specbeam: No space left on device"),
        (["generate"], "<&- >&-", 2, "specbeam: there is no prompt"),
        pytest.param(
            ["methods", "--json"], ">/dev/full", 2, "specbeam: No space left on device", marks=pytest.mark.slow
        ),
        pytest.param(["methods"], ">&-", 0, "", marks=pytest.mark.slow),
        pytest.param(["methods", "other"], "2>&-", 2, "", marks=pytest.mark.slow),
        (["methods", "--json"], "> >(head -c 10 >/dev/null)", 141, ""),
        pytest.param(["methods"], "> >(head -c 10 >/dev/null)", 141, "", marks=pytest.mark.slow),
    ],
)
def test_streams_that_are_full_closed_or_gone(arguments, shell, code, said):
    """A closed one is no error: the caller wants it so."""
    for _ in range(3):  # a pipe takes what little there is, unless its reader was faster
        done = run(arguments, shell)
        if done.returncode == code or code != 141:
            break
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == code or (code == 141 and done.returncode == 0)
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) <= 1


def test_languages_of_the_terminal(tmp_path):
    """Bytes that are no text, letters that the terminal lacks, and no home."""
    bare = {name: value for name, value in os.environ.items() if name not in ("HOME", "LANG", "LC_ALL", "PYTHONUTF8")}
    done = subprocess.run(
        [sys.executable, "-c", "from specbeam.doors.cli.main import main; main()", "generate"],
        input=b"abc\xff\n", capture_output=True, env=bare | {"LC_ALL": "C"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(b"specbeam: standard input is not valid utf-8")
    done = run(["env"], env=bare | {"PYTHONIOENCODING": "ascii", "SPECBEAM_CACHE": str(tmp_path / "für später")})
    assert done.returncode == 2
    assert re.fullmatch(
        "specbeam: standard output is in ascii, which has no .*; set PYTHONIOENCODING=utf-8\n", done.stderr
    )


def test_errors_of_the_system_and_files_that_end_too_early_are_sentences(monkeypatch, capsys):
    """Whatever part of the program they come from."""
    catalogue = "specbeam.recipes.catalogue.methods"
    for error, said in [
        (PermissionError(13, "Permission denied", "some/file"), "specbeam: some/file: Permission denied"),
        (
            OSError(5, "Input/output error"),
            "specbeam: Input/output error: standard output or another file cannot be used",
        ),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "specbeam: a and b: Invalid cross-device link"),
        (EOFError("Compressed file ended"), "specbeam: a file ends too early: Compressed file ended"),
    ]:

        def fail(*given, error=error):
            raise error

        monkeypatch.setattr(catalogue, fail)
        code, out, err = specbeam("methods")
        assert (code, out, err) == (2, "", said + "\n")
    monkeypatch.setattr(catalogue, lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    assert specbeam("methods")[0] == 130
    assert callable(main)


def test_an_interrupt_of_a_job_keeps_its_answers_and_says_how_to_go_on(models, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n' * 2000)
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", "from specbeam.doors.cli.main import main; main()", "batch", str(source), str(out), "-m", models[0],
         "-d", models[1], "--max-new-tokens", "60", "--batch-size", "1"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    journal = tmp_path / "out.jsonl.job"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > 4096 * 60):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out_text, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert re.search(r"interrupted; \d+ of 2,000 rows saved: continue with --resume", err)
    assert "Traceback" not in err
    assert out_text == ""
    assert journal.exists()
    assert not out.exists()


NEEDING_HEADS = {
    "generate": ["generate", "abc", "--method", "eesd"],
    "generate with coral": ["generate", "abc", "--method", "coral"],
    "batch": ["batch", "good.jsonl", "new.jsonl", "--method", "medusa"],
    "chat": ["chat", "--method", "eagle"],
    "bench speed": ["bench", "speed", "sampling", "bita nodes=20"],
    "bench specbench": ["bench", "specbench", "good.jsonl", "chimera"],
    "a method of the target's own modules": ["bench", "speed", "mtp"],
}


@pytest.mark.parametrize("command", NEEDING_HEADS)
def test_a_method_of_heads_without_a_head_is_refused_before_a_model_is_loaded(here, nothing_is_loaded, command):
    code, out, err = specbeam(*NEEDING_HEADS[command])
    check_refused(code, out, err, "drafts with")
    assert ("--draft mtp" if "modules" in command else "--draft FOLDER") in err
