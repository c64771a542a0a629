"""Reports on a terminal and in files, and numbers in words."""

import re
import warnings

import pytest

from specbeam.doors.cli.main import word_warnings
from specbeam.doors.cli.reports import parts_of, print_report
from specbeam.errors import counted
from specbeam.lab.words import of_rounds
from tests.doors.cli.test_commands import specbeam

TABLE = """| method | tokens/s | lazy layers | perplexity |
| --- | --- | --- | --- |
| `dsbd` | **91.5** (90 to 92) |  | 1.43 |
| sampling | 20.1 |  | 1.93 |

Ratios are to [dsbd]."""


def test_in_a_file_a_report_is_markdown(capsys):
    print_report(TABLE)
    assert capsys.readouterr().out == TABLE + "\n"


@pytest.mark.parametrize("width", [80, 30])
def test_on_a_terminal_tables_are_drawn_without_empty_columns_and_fit_the_width(capsys, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    print_report(TABLE)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert all(len(line) <= width for line in shown.splitlines())
    assert "|" not in shown
    assert "lazy" not in shown
    whole = ["dsbd", "91.5", "(90", "to", "92)", "1.43"]
    assert (whole in lines) == (width == 80)
    assert (["dsbd", *whole[1:-1]] in lines and ["dsbd", "1.43"] in lines) == (width == 30)
    assert lines[-1] == ["Ratios", "are", "to", "[dsbd]."]


def test_parts_of_a_table_have_all_columns_once_after_the_first():
    table = [list("abcd"), ["---"] * 4, ["1", "22", "", "333"], ["4", "", "", "5"]]
    assert parts_of(table, 100) == [[["a", "b", "d"], ["1", "22", "333"], ["4", "", "5"]]]
    assert parts_of(table, 10) == [[["a", "b"], ["1", "22"], ["4", ""]], [["a", "d"], ["1", "333"], ["4", "5"]]]


def test_numbers_have_the_noun_in_their_number():
    assert [counted(number, "pass") for number in (0, 1, 2000)] == ["0 passes", "1 pass", "2,000 passes"]
    assert [counted(number, "row") for number in (1, 2)] == ["1 row", "2 rows"]
    assert [of_rounds(number) for number in (1, 7)] == ["1 round", "median of 7 rounds, smallest to largest"]


def test_warnings_of_commands_are_sentences_without_a_line_of_the_source(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    word_warnings()
    shown = warnings.formatwarning("the head hardly fits", UserWarning, "drafts.py", 234, "found = probed()")
    assert shown == "specbeam: warning: the head hardly fits\n"


def test_outputs_are_scored_by_argument_or_option(tmp_path):
    file = tmp_path / "outputs.jsonl"
    file.write_text('{"prompt": "Der Hund schläft.", "text": "The dog is sleeping."}\n')
    by_argument = specbeam("evaluate", "perplexity", str(file))
    assert by_argument[0] == 0
    assert specbeam("evaluate", "perplexity", "-f", str(file))[:2] == by_argument[:2]
    code, out, err = specbeam("evaluate", "perplexity")
    assert (code, out) == (2, "")
    assert "there is no file of outputs; give one as an argument or with --file" in err
