"""What leaves the program can be read by other programs: pictures, JSON, files and terminals, whatever a model writes."""

import errno
import io
import json
import random
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.table import Table

from specbeam.doors import places, plain, render
from specbeam.doors.cli.common import print_json, say
from specbeam.doors.cli.screen import Screen
from specbeam.doors.prompts import read
from specbeam.errors import BadPrompt, CannotWrite, MissingFile
from specbeam.lab.evaluate.lines import lines_of

ODD = [
    "\ud800",
    "\udfff",
    "\ufffe",
    "\uffff",
    "\U0001fffe",
    "\u2028",
    "\u2029",
    "\u200f",
    "\u202e",
    "\ufeff",
    "]]>",
    "&",
    "<",
]
LETTERS = [chr(code) for code in range(256)] + ODD


def label_of(text):
    """The text that a program shows which reads the picture of a forest with this token."""
    nodes = [render.Leaf(-1, "root", "root"), render.Leaf(0, text, "accepted", 0.5, 0.25)]
    root = ElementTree.fromstring(str(render.as_svg(nodes)))
    (shown,) = [one.text or "" for one in root.iter() if one.get("font-size") == "13" and one.text != "root"]
    return shown


@pytest.mark.parametrize("letter", LETTERS, ids=lambda letter: "-".join(f"{ord(one):x}" for one in letter))
def test_a_picture_is_xml_whatever_a_token_holds(letter):
    shown = label_of(f"a{letter}b")
    assert shown.startswith("a")
    assert shown.endswith("b")
    assert shown == f"a{letter}b" or shown == f"a{letter.encode('unicode_escape').decode()}b"


def test_a_picture_is_xml_for_random_texts():
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(chr(rng.choice((rng.randrange(0x110000), rng.randrange(256)))) for _ in range(20))
        assert label_of(text) == plain.for_xml(text)


def test_labels_of_plots_hold_no_formulas(tmp_path):
    """A file of prompts may be called so; a dollar sign begins a formula, which may be a broken one."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the font has no such letters
        for number, text in enumerate(["a $\\frac$ b", "$", "\x00\x1b[1m", "\ud800", "a_b^c{"]):
            figure = Figure()
            figure.subplots().set_title(render.as_label(text))
            for end in (".png", ".svg"):
                path = tmp_path / f"{number}{end}"
                render.save_figure(figure, path)
                assert path.stat().st_size > 1000
                if end == ".svg":
                    ElementTree.fromstring(path.read_bytes())


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": NAN, "b": [float("inf"), 1.5], "c": (-float("inf"), {"d": NAN})}, {"a": None, "b": [None, 1.5], "c": [None, {"d": None}]}),
        ([1, 2.5, True, None, "ä\x00\x1b"], [1, 2.5, True, None, "ä\x00\x1b"]),
        ("\ud800 and \u2028", "\ud800 and \u2028"),
        ({1: 2}, {"1": 2}),
    ],
)  # fmt: skip
def test_json_is_what_any_reader_takes(value, read):
    for is_ascii in (False, True):
        text = plain.as_json(value, is_ascii)
        text.encode("utf-8")  # so no half of a character is in it
        assert "\n" not in text
        assert json.loads(text, parse_constant=pytest.fail) == read


def test_no_command_prints_json_by_itself():
    """Or NaN would be in it, which is no JSON."""
    import specbeam.doors.cli

    for path in Path(specbeam.doors.cli.__file__).parent.rglob("*.py"):
        assert "json.dumps" not in path.read_text(), path
        assert "json_format.dumps" not in path.read_text(), path
        assert path.name in ("screen.py", "compiling.py") or " Console(" not in path.read_text(), path


class Stream(io.TextIOWrapper):
    """Standard output in an encoding, of a terminal or not."""

    def __init__(self, encoding, terminal=False):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def test_json_is_ascii_where_no_other_letters_are_taken(monkeypatch):
    for encoding, expected in (("utf-8", '"ä"\n'), ("ascii", '"\\u00e4"\n'), ("latin-1", '"\\u00e4"\n')):
        stream = Stream(encoding)
        monkeypatch.setattr("sys.stdout", stream)
        print_json("ä")
        assert stream.text() == expected


def test_a_text_cannot_steer_a_terminal_and_reaches_a_pipe_as_it_is(monkeypatch):
    text = "a\x1b]0;title\x07\x1b[2J\x9b1m\r\tb\nc\u202e\xa0"
    for terminal, expected in ((True, "a\\x1b]0;title\\x07\\x1b[2J\\x9b1m\\r\tb\nc\u202e\xa0\n"), (False, text + "\n")):
        stream = Stream("utf-8", terminal)
        monkeypatch.setattr("sys.stdout", stream)
        say(text)
        assert stream.text() == expected


def test_the_console_shows_texts_as_they_are():
    """Nothing in them is markup, the name of an emoji, or an order to the terminal; in tables neither."""
    texts = ["[bold]a[/bold]", "[/x]", ":smile:", "\x1b[31mred", "[link=http://x]y[/link]", "\\[a]"]
    file = io.StringIO()
    screen = Screen(file=file, width=60, force_terminal=False)
    table = Table(*texts)
    for text in texts:
        screen.print(text)
        table.add_row(*[text] * len(texts))
    lines = file.getvalue().splitlines()
    assert lines == [plain.for_terminal(text) for text in texts]
    Screen(file=file, width=300).print(table)
    shown = file.getvalue()
    assert "\x1b" not in shown
    for text in texts:
        assert shown.count(plain.for_terminal(text)) >= len(texts)
    assert isinstance(screen, Console)


def test_a_reader_that_is_gone_is_an_error_of_the_pipe():
    """And no exit code that rich chooses."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Screen(file=Gone()).print("a")


def folder_of_others(tmp_path):
    """Places that no file can be written to, with what is said of each."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    return {
        "folder": "is a folder",
        "missing/file": "there is no folder",
        "file/inside": "is not a folder",
        "x" * 300: "File name too long",
        "folder/" + "y" * 256: "File name too long",
    }


def test_places_that_cannot_be_written_are_named_before_the_work(tmp_path):
    for name, expected in folder_of_others(tmp_path).items():
        with pytest.raises(CannotWrite, match=expected):
            places.require_place(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    places.require_folder_place(tmp_path / "new" / "and" / "deep")
    with pytest.raises(CannotWrite, match="is not a folder"):
        places.require_folder_place(tmp_path / "file" / "deep")


def test_an_output_is_whole_or_written_to_a_device(tmp_path):
    path = tmp_path / "out"
    path.write_text("before")
    places.write_output(path, "ä")
    assert path.read_bytes() == "ä".encode()
    (tmp_path / "link").symlink_to("out")
    places.write_output(tmp_path / "link", b"again")
    assert path.read_bytes() == b"again"
    assert (tmp_path / "link").is_symlink()
    places.write_output(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()
    with pytest.raises(CannotWrite, match="/dev/full cannot be written: No space left on device"):
        places.write_output(Path("/dev/full"), "text")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "out"]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin").write_bytes("ä\n".encode("latin-1"))
    (tmp_path / "cut.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "plain.xz").write_bytes(b"plain")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    for name, kind, expected in [
        ("folder", MissingFile, "is a folder"),
        ("missing", MissingFile, "there is no file"),
        ("latin", BadPrompt, "line 1"),
        ("cut.gz", BadPrompt, "cut.gz"),
        ("plain.xz", BadPrompt, "plain.xz"),
        ("latin/inside", MissingFile, "there is no file|Not a directory"),
        ("x" * 300, MissingFile, "File name too long"),
    ]:
        with pytest.raises(kind, match=expected):
            lines_of(tmp_path / name)
        with pytest.raises(kind, match=expected):
            read(str(tmp_path / name))
    assert lines_of(tmp_path / "marked") == ["a", "b"]
    assert [row.prompt for row in read(str(tmp_path / "marked"))] == ["a", "b"]


def test_advice_on_a_file_that_cannot_be_written_follows_the_error(tmp_path):
    folder = tmp_path / "no" / "where"
    with pytest.raises(
        CannotWrite, match=rf"No such file or directory; create the folder {folder}, or give another name$"
    ):
        places.write_output(folder / "x.html", "text")
    for number, advice in (
        (errno.ENOSPC, "make room"),
        (errno.EACCES, "change its permissions"),
        (errno.EIO, "give another"),
    ):
        with pytest.raises(CannotWrite, match=f"; {advice}"), places.writing(tmp_path / "x"):
            raise OSError(number, "broken")
