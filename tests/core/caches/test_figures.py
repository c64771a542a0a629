"""Measured figures are read only if they are whole and make sense, of every kind."""

import copy
import json
import math

import numpy as np
import pytest

from specbeam.core.control import needs, pace
from specbeam.core.measure.saved_figures import ChoiceField, Figures, FlagField, NumberField, RecordFields, folder
from specbeam.doors import fastest
from specbeam.lab.train import exit_choice
from specbeam.models import skip_search
from specbeam.recipes.tuning import acceptance, costs

SET = np.array([True, False, True, False])
CURVE = {"nodes": [1, 2, 4], "seconds": [0.5, 0.5, 0.75]}
KINDS = {
    "pass": (costs._PASS, CURVE),
    "turns": (
        costs._TURNS,
        {"target": {**CURVE, "draft_layer_s": 0.0}, "draft": {**CURVE, "draft_layer_s": 0.25}},
    ),
    "host": (costs._HOST_COST, {"turn_s": 0.5, "draft_s": 0.0, "judge_s": 0.25}),
    "acceptance": (acceptance._ACCEPTANCE, {"odds": [0.5, 0.25, 0.0]}),
    "pace": (
        pace._PACE,
        {"drafted": [0.5], "undrafted": [], "drafts": True, "best": False, "wait": 12, "until_trial": 0},
    ),
    "odds": (needs._ODDS, {name: cells.tolist() for name, cells in needs.prior_odds()._asdict().items()}),
    "sublayers": (
        skip_search._figures_of(SET),
        skip_search._record_of(skip_search.Found(SET, 0.5, SET[None], np.array([0.5]), 1, 0)),
    ),
    "auto": (fastest._figures_of(["one", "other"]), {"name": "one", "tokens_per_second": {"one": 5.0, "other": 4.5}}),
}
NONSENSE = [math.nan, math.inf, -math.inf, -1, 1e300, 10**400, "many", None, True, [], {}, [[1.0]]]

MAY_BE_EMPTY = {"drafted", "undrafted"}


class Anything(RecordFields):
    """Fields of any record, so that nonsense is kept as a record that makes sense would be."""

    def accepts(self, value):
        return True


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))


def places(value, path=()):
    """The paths of all values inside a record, numbers in lists by their first one only."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def at(record, path):
    for name in path:
        record = record[name]
    return record


def changed(record, path, value):
    """A copy of a record with another value at a path."""
    copied = copy.deepcopy(record)
    at(copied, path[:-1])[path[-1]] = value
    return copied


def spoiled(record):
    """Records that make no sense, each with where it is wrong."""
    for path in places(record):
        now = at(record, path)
        for value in NONSENSE:
            is_allowed = isinstance(now, bool) if value is True else value == [] and path[-1] in MAY_BE_EMPTY
            if not is_allowed:
                yield path, changed(record, path, value)
        if isinstance(now, list) and now and path[-1] not in MAY_BE_EMPTY:
            yield path, changed(record, path, now[:-1])
            yield path, changed(record, path, [now, now])
        if isinstance(path[-1], str):
            without = copy.deepcopy(record)
            del at(without, path[:-1])[path[-1]]
            yield path, without
    yield (), {**record, "another": 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_figures_that_make_no_sense_are_measured_again(kind):
    (figures, record) = KINDS[kind]
    assert figures.kind == kind
    figures.keep("key", record)
    assert figures.load("key") == record
    assert figures.load("another key") is None
    tried = 0
    for path, nonsense in spoiled(record):
        Figures(kind, Anything({})).keep("key", nonsense)
        if kind == "acceptance" and isinstance(nonsense.get("odds"), list) and nonsense["odds"] == [0.5, 0.25]:
            continue  # that is a law, too
        found = figures.load("key")
        assert found is None, (path, nonsense)
        figures.keep("key", nonsense)
        assert not list(folder().glob(f"{kind}-*"))
        tried += 1
    assert tried > 20


WRONG_TOGETHER = {
    "nodes descend": (costs._PASS, {"nodes": [2, 1], "seconds": [0.5, 0.5]}),
    "nodes repeat": (costs._PASS, {"nodes": [1, 1], "seconds": [0.5, 0.5]}),
    "more nodes are cheaper": (costs._PASS, {"nodes": [1, 2], "seconds": [0.5, 0.25]}),
    "no nodes": (costs._PASS, {"nodes": [], "seconds": []}),
    "half a node": (costs._PASS, {"nodes": [1.5], "seconds": [0.5]}),
    "no odds": (acceptance._ACCEPTANCE, {"odds": []}),
    "odds above one": (acceptance._ACCEPTANCE, {"odds": [0.75, 0.75]}),
    "too many paces": (pace._PACE, {**KINDS["pace"][1], "drafted": [0.5] * 999}),
    "another name": (KINDS["auto"][0], {**KINDS["auto"][1], "name": "third"}),
    "sublayers of another number": (KINDS["sublayers"][0], {**KINDS["sublayers"][1], "best": [1, 1, 1, 0]}),
    "more hits than trials": (needs._ODDS, changed(KINDS["odds"][1], ("live", 0), [9.0, 8.0])),
    "no trials": (needs._ODDS, changed(KINDS["odds"][1], ("needed", 0), [0.0, 0.0])),
}


@pytest.mark.parametrize("fault", WRONG_TOGETHER)
def test_figures_that_do_not_go_together_are_measured_again(fault):
    (figures, nonsense) = WRONG_TOGETHER[fault]
    Figures(figures.kind, Anything({})).keep("key", nonsense)
    assert figures.load("key") is None


def test_a_kept_record_is_a_line_of_json():
    (figures, record) = KINDS["pass"]
    figures.keep("key", record)
    (path,) = folder().glob("pass-*.json")
    assert {**record, "digest": json.loads(path.read_text())["digest"]} == json.loads(path.read_text())


def test_fields_say_what_they_accept():
    number = NumberField(least=1, most=5, is_whole=True)
    assert [number.accepts(value) for value in (1, 5, 0, 6, 2.0, True)] == [True, True, False, False, False, False]
    assert FlagField().accepts(False)
    assert not FlagField().accepts(0)
    assert ChoiceField(("a", "b")).accepts("a")
    assert not ChoiceField(("a", "b")).accepts(["a"])
    assert RecordFields({"x": number}).accepts({"x": 1})
    assert not RecordFields({"x": number}).accepts({"x": 1, "y": 1})


def test_a_number_of_layers_is_chosen_by_figures_that_make_sense():
    figures = {"after": 2, "acceptance": 0.5, "draft_s": 0.25, "rest_s": 1.0, "depth": 3, "speed": 1.5}
    (kept,) = exit_choice._figures_in([figures])
    assert kept.after == 2
    for nonsense in ([{**figures, "speed": math.nan}], [{**figures, "after": 0}], [{}], {}, None):
        with pytest.raises(ValueError, match="exit layers"):
            exit_choice._figures_in(nonsense)
