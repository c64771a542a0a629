"""The examples run: each can be imported, and what needs no training does its work on the bundled pair."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import specbeam as sb
from specbeam.models.pair import BUNDLED

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))
needs_pair = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


def loaded(name, monkeypatch):
    """What an example defines; its main function does not run."""
    path = EXAMPLES / name
    monkeypatch.syspath_prepend(str(path.parent))
    before = set(sys.modules)
    try:
        return runpy.run_path(str(path))
    finally:
        for module in set(sys.modules) - before:
            if (
                getattr(sys.modules[module], "__file__", None)
                and EXAMPLES in Path(sys.modules[module].__file__).parents
            ):
                del sys.modules[module]


@pytest.mark.parametrize("name", FILES)
def test_examples_find_what_they_import(name, monkeypatch):
    found = loaded(name, monkeypatch)
    assert "main" in found or not (EXAMPLES / name).read_text().rstrip().endswith("typer.run(main)")


@needs_pair
def test_a_trained_pair_is_measured(monkeypatch):
    found = loaded("train_pair/measure.py", monkeypatch)
    pair = sb.load("bundled")
    assert (
        0.3 < found["acceptance"](pair, ["Der alte Mann füttert jeden Morgen die Vögel.", "Sie liest ein Buch."]) <= 1
    )
    assert min(found["costs"](pair)) > 0


@needs_pair
def test_speeds_are_compared(monkeypatch, capsys):
    """The table of the README, on one sentence and in one round, without the models that are enlarged for it."""
    found = loaded("speed.py", monkeypatch)
    pair = sb.load("bundled")
    rows = found["_demo"]()[:1]
    what, theirs, ours = next(iter(found["duels"](pair)))
    first, second = found["speed"](pair, [theirs, ours], rows, repeats=1)
    assert what in found["row"](what, first, second)


@pytest.mark.parametrize("stride", [16, 64])
def test_each_word_of_a_held_out_book_is_scored_once_behind_what_its_window_holds(stride, monkeypatch):
    books = loaded("remember/books.py", monkeypatch)
    model = books["new_model"](0).eval()
    window = books["WINDOW"]
    tokens = torch.randint(books["WORDS"], (2, 150), generator=torch.Generator().manual_seed(1))
    found = books["by_windows"](model, tokens, stride)
    for place in (1, window - 1, window, window + 1, window + stride, 149):
        start = max(-(-(place - window) // stride), 0) * stride
        with torch.no_grad():
            logits = model(input_ids=tokens[:, start:place]).logits[:, -1]
        expected = -logits.log_softmax(-1)[torch.arange(2), tokens[:, place]]
        assert found[:, place - 1].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_sums_know_which_lines_are_right(monkeypatch):
    found = loaded("search/sums.py", monkeypatch)
    asked = found["ASKED"] + "10 + 5 + 12<|im_end|>\n<|im_start|>assistant\n"
    shown = found["ASKED"] + "1 + 2\n1 + 2 = 4\n"  # an earlier problem of the prompt does not count
    right = "10 + 5 = 15\n15 + 12 = 27\nAnswer: 27"
    assert found["value"](shown + asked) == 1
    assert found["value"](shown + asked + "10 + 5 = 15\n") == 1
    assert found["value"](shown + asked + "10 + 5 = 6\n") == 0
    assert found["value"](shown + asked + right + "\nAnswer: 27") == 0
    assert not found["is_solved"](asked + "10 + 5 = 15\n15 + 12 = 27")
    assert not found["is_solved"](asked + "Answer: 27")
    assert found["is_solved"](shown + asked + right)
