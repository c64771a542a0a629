"""Defaults of commands from the user's file, and the options of the program itself."""

import json
import logging
import warnings

import pytest

from tests.doors.cli.test_commands import specbeam


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the file of defaults."""
    monkeypatch.setenv("SPECBEAM_CONFIG", str(tmp_path / "specbeam.toml"))
    return (tmp_path / "specbeam.toml").write_text


def test_options_have_the_defaults_of_the_file(write):
    write("[methods]\njson = true\nname = 'greedy'\n")
    code, out, _ = specbeam("methods")
    assert code == 0
    assert json.loads(out)["name"] == "greedy"
    code, out, _ = specbeam("methods", "sampling")  # the command line goes first
    assert json.loads(out)["name"] == "sampling"


def test_commands_of_groups_have_tables_inside(write):
    write("[bench.host]\nrounds = 3\n[evaluate.theory]\n")
    assert specbeam("methods", "greedy")[0] == 0
    write("[bench.host]\nbatchsize = 3\n")
    code, _, err = specbeam("methods")
    assert code == 2
    assert "[bench.host] has no option batchsize" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[generat]\nmodel = 1\n", "[generat] is not a command (did you mean generate?)"),
        ("generate = 3\n", "[generate] is not a table, but 3"),
        ("seed = 1\n", "seed = 1 is in no table of a command; write it below a line such as [generate]"),
        ("[bench]\nspeed = 3\n", "[bench.speed] is not a table, but 3"),
        ("[generate]\ntemprature = 1\n", "[generate] has no option temprature (did you mean temperature?)"),
        ("[generate\n", "is no TOML file"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(write, text, said):
    write(text)
    code, out, err = specbeam("methods")
    assert (code, out) == (2, "")
    assert said in err


def test_a_value_of_another_type_is_said_with_the_file(write, tmp_path):
    write("[generate]\ntemperature = 'hot'\n")
    code, _, err = specbeam("generate", "Hallo")
    assert code == 2
    said = " ".join(err.replace("│", " ").split())
    assert "Invalid value for '--temperature'" in said
    assert "on the command line, or in" in said


def test_a_named_file_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CONFIG", str(tmp_path / "none.toml"))
    code, _, err = specbeam("methods")
    assert code == 2
    assert "there is no such file; unset it, or write the file" in err


def test_quiet_and_verbose(monkeypatch):
    monkeypatch.delenv("SPECBEAM_PROGRESS", raising=False)
    with warnings.catch_warnings():
        assert specbeam("--quiet", "methods", "greedy")[0] == 0
    level = logging.getLogger("specbeam").level
    try:
        assert specbeam("-v", "methods", "greedy")[0] == 0
        assert logging.getLogger("specbeam").isEnabledFor(logging.INFO)
    finally:
        logging.getLogger("specbeam").setLevel(level)


@pytest.mark.parametrize("option", ["-q", "--verbose"])
def test_an_option_of_the_program_after_the_command_is_shown_its_place(option):
    code, _, err = specbeam("methods", option)
    assert code == 2
    assert f"it stands before the command: specbeam {option} methods ..." in " ".join(err.replace("│", " ").split())


def test_a_shell_can_complete_names():
    code, out, _ = specbeam("--help")
    assert code == 0
    assert "--install-completion" in out
