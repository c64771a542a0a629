"""The examples run: each can be imported, and what needs no training does its work on the bundled pair."""

import runpy
import sys
from pathlib import Path

import pytest

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
