"""Records that compiled functions find by their address."""

import ast
import gc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import specbeam
from specbeam.core.compiling.held import Held, address_of_record, addresses_of, held_at
from specbeam.core.steps import borrowed, step


class Inside(NamedTuple):
    numbers: Any
    factor: int


@borrowed
class Part(NamedTuple):
    x: Any
    number: int


@borrowed
class Whole(NamedTuple):
    part: Part
    y: Any
    inside: Inside
    share: float


@step
def sums_and_marks(addresses, like):
    parts = []
    for address in addresses:
        parts.append(address_of_record(held_at(address, like).part))
    found = np.empty((len(parts), 3))
    for place in range(len(parts)):
        whole = held_at(addresses[place], like)
        part = held_at(parts[place], like.part)
        found[place, 0] = part.x.sum() + part.number
        found[place, 1] = whole.inside.numbers.sum() * whole.inside.factor
        found[place, 2] = whole.share
        whole.y[0] += 1
    return found


def whole_of(number):
    part = Part(np.arange(3.0) + number, number)
    return Whole(part, np.zeros(2), Inside(np.arange(4) * number, number + 1), number / 2)


def test_each_record_is_found_at_its_address():
    records = [whole_of(number) for number in range(4)]
    held = [Held(one) for one in records]
    for turn in range(2):
        gc.collect()
        found = sums_and_marks(addresses_of(held), records[0])
        expected = [[3 + 4 * number, 6 * number * (number + 1), number / 2] for number in range(4)]
        assert found.tolist() == expected
        assert [one.y[0] for one in records] == [turn + 1] * 4


@borrowed
class Two(NamedTuple):
    share: float
    first: Part
    y: Any
    second: Part


@step
def sums_of_two(addresses, like):
    found = np.empty((len(addresses), 3))
    for place in range(len(addresses)):
        two = held_at(addresses[place], like)
        found[place, 0] = two.share
        found[place, 1] = two.first.x.sum() * two.first.number
        found[place, 2] = two.second.x.sum() * two.second.number
        two.y[0] += 1
    return found


@pytest.mark.parametrize("shared", ["first", "second", "both"])
def test_fields_shared_by_many_records_are_copied(shared):
    parts = {"first": Part(np.arange(3.0), 7), "second": Part(np.arange(5.0), 2)}
    kept = [Held(part, is_shared=True) for name, part in parts.items() if shared in (name, "both")]
    records = [Two(number / 2, parts["first"], np.zeros(2), parts["second"]) for number in range(3)]
    held = [Held(one) for one in records]
    kept.clear()
    gc.collect()
    expected = [[number / 2, 3 * 7, 10 * 2] for number in range(3)]
    assert sums_of_two(addresses_of(held), records[0]).tolist() == expected
    assert [one.y[0] for one in records] == [1, 1, 1]
    again = Held(records[0])  # nothing is shared any more
    assert sums_of_two(addresses_of([again]), records[0]).tolist() == expected[:1]


def test_records_of_other_types_are_refused():
    held = [Held(whole_of(1)), Held(whole_of(1)._replace(y=np.zeros(2, dtype=np.float32)))]
    if held[0].kind == held[1].kind:
        pytest.skip("without numba, types of arrays do not matter")
    with pytest.raises(TypeError, match="of one type"):
        addresses_of(held)


def test_functions_that_look_up_records_have_no_comprehensions():
    """In functions with a comprehension numba removes assignments to elements of looked-up records."""
    for path in Path(specbeam.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            inside = [*ast.walk(function)]
            calls = {node.func.id for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            if "held_at" in calls and function.name != "held_at":
                assert not any(isinstance(node, (ast.ListComp, ast.GeneratorExp)) for node in inside), (
                    path,
                    function.name,
                )
