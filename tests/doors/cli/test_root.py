"""The options of the program itself, the help of each command, and what a bug report needs."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

import specbeam as sb
from specbeam.doors.cli.main import app
from specbeam.errors import BadSetting
from tests.doors.cli.test_commands import shell, specbeam


def commands(group, path=()):
    """The paths of all commands and groups."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("path", commands(get_command(app)), ids=" ".join)
def test_every_command_has_help_with_whole_names(path, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = specbeam(*path, "--help")
    assert (code, err) == (0, "")
    assert "Usage: " in out
    assert specbeam(*path, "-h")[1] == out
    command = get_command(app)
    for name in path:
        command = command.commands[name]
    flags = [
        flag
        for one in command.params
        if not one.hidden
        for flag in (*one.opts, *one.secondary_opts)
        if flag.startswith("-")
    ]
    assert set(flags) <= set(re.findall(r"[-\w.]+", out))
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert "<bool>" not in out
    names = [line for line in out.splitlines() if line.lstrip().startswith("-")]
    wide = [line for line in out.splitlines() if len(line) > columns and line not in names]
    assert not wide


def test_the_version_is_printed_without_a_command():
    assert shell("--version") == (0, f"{sb.__version__}\n", "")


def test_without_a_command_the_help_is_shown():
    code, out, err = specbeam()
    assert code in (0, 2)  # versions of click differ
    assert "Usage: " in out + err


ROOT_OPTIONS = {
    "--version": ["--version"],
    "--verbose": ["--verbose", "methods", "greedy"],
    "--quiet": ["--quiet", "methods", "greedy"],
    "--install-completion": ["--install-completion", "bash"],
    "--show-completion": ["--show-completion", "bash"],
    "--help": ["--help"],
}


@pytest.mark.parametrize("option", ROOT_OPTIONS)
def test_every_option_of_the_program_runs(option, tmp_path, monkeypatch):
    """Also those of typer, which its newest version may change."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # by the process that started this one
    code, out, err = shell(*ROOT_OPTIONS[option])
    assert (code, err) == (0, "")
    assert out


def test_these_are_all_options_of_the_program():
    command = get_command(app)
    context = command.make_context("specbeam", ["methods"], resilient_parsing=True)
    assert {max(option.opts, key=len) for option in command.get_params(context)} == ROOT_OPTIONS.keys()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("specbeam generate --method speculative_b", {"speculative_beam_search"}),
        ("specbeam generate --method beam_search -s be", {"beams="}),
        ("specbeam transcribe -m MODEL --language d", {"de"}),
    ],
)
def test_the_shell_completes_names(typed, completed, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"lang_to_id": {"<|de|>": 1, "<|en|>": 2}}')
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    words = typed.replace("MODEL", str(tmp_path))
    asked = {"_SPECBEAM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "from specbeam.doors.cli.main import app; app(prog_name='specbeam')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | asked, check=False
    )
    assert set(done.stdout.split()) == completed


def test_a_wrong_file_of_defaults_does_not_hide_the_help(monkeypatch):
    monkeypatch.setenv("SPECBEAM_CONFIG", "/no/such/file.toml")
    code, out, err = specbeam("generate", "--help")
    assert (code, "Usage: " in out) == (0, True)
    assert "there is no such file" in err
    assert specbeam("methods")[0] == 2


@pytest.mark.parametrize("columns", [None, "60"])
def test_tables_are_whole_in_a_pipe_and_fit_a_stated_width(columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    lines = specbeam("methods")[1].splitlines()
    laws = [recipe.law for recipe in sb.methods()]
    assert all(line == line.rstrip() for line in lines)
    if columns:
        assert max(map(len, lines)) <= int(columns)
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
        assert {recipe.name for recipe in sb.methods()} <= {line.split()[0] for line in lines if line}
    else:
        assert all(any(law in line for line in lines) for law in laws)


def test_a_bug_report_gets_what_it_needs(monkeypatch):
    monkeypatch.setenv("SPECBEAM_API_KEYS", "hidden-key")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, _ = specbeam("env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["specbeam"].startswith(sb.__version__)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["SPECBEAM_API_KEYS"] == "(set)"
    assert {"python", "torch", "transformers", "numba", "machine", "measurements", "compiled steps"} <= found.keys()
    assert re.fullmatch(r"[\d.]+ GB, [\d.]+ GB free for this process", found["memory"])
    code, lines, _ = specbeam("env")
    assert code == 0
    assert "hidden-key" not in lines
    assert [line.split()[0] for line in lines.splitlines()][:3] == ["specbeam", "python", "torch"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sb.dsbd(num_beams=4), r"dsbd\(\) has no setting num_beams \(did you mean beams\?\); it has beams, "),
        (lambda: sb.speculative_sampling(gamma=4), r"no setting gamma \(did you mean depth\?\)"),
        (lambda: sb.beam_search(beem=4), r"no setting beem \(did you mean beams\?\)"),
        (lambda: sb.greedy(beams=4), r"greedy\(\) has no setting beams; it has none"),
    ],
)
def test_an_unknown_setting_of_a_method_is_named_with_the_meant_one(make, said):
    with pytest.raises(BadSetting, match=said):
        make()


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("dsdb", r"there is no method 'dsdb' \(did you mean dsbd\?\); choose one of greedy, "),
        (sb.dsbd, r"the method is a recipe that was not called; write sb\.dsbd\(\)"),
        (len, r"the method is <built-in function len>; give its name, or a method such as"),
        (4, r"the method is 4; give its name, or a method such as sb\.dsbd\(beams=4\)"),
    ],
)
def test_what_is_no_method_is_said(method, said):
    from specbeam.recipes.catalogue import resolve

    with pytest.raises(BadSetting, match=said):
        resolve(method)


def test_a_name_that_the_package_lacks_can_be_suggested():
    """Python appends "Did you mean: 'generate'?" to errors with a name and an object."""
    with pytest.raises(AttributeError) as caught:
        sb.generat  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("generat", sb)
    assert "generate" in dir(sb)


def test_a_method_shows_its_name_and_law():
    assert repr(sb.dsbd(beams=2)) == "<dsbd: exact: beam sampling, 2 beams, without replacement>"


@pytest.mark.parametrize("command", ["generate x", "inspect x", "bench acceptance", "chat", "tune"])
@pytest.mark.parametrize("option", ["-m", "-d"])
def test_a_model_that_is_not_there_is_said_before_anything_is_imported(command, option, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)  # importing it would fail
    code, out, err = specbeam(*command.split(), option, "/no/such/folder")
    assert (code, out) == (2, "")
    assert "there is no folder /no/such/folder; give a folder that save_pretrained wrote, or a hub id" in err


def test_a_missing_file_of_prompts_is_said_before_torch_is_imported():
    program = (
        "import sys; from specbeam.doors.cli.main import app\n"
        "try: app(['generate', '-f', '/no/such/file'], standalone_mode=False)\n"
        "except Exception as error: print(error, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "there is no file /no/such/file" in done.stdout
    assert done.stdout.strip().endswith("False")
