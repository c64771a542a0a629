"""The loop over turns is compiled once: it calls the steps of caches, drafters and rules by address."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import specbeam as sb
from specbeam.core import by_address, compiling, run_steps, together_steps
from specbeam.core.by_address import AnyRule, ByAddress
from specbeam.core.compiling.called import Called, caller
from specbeam.core.errors import UnknownKind
from specbeam.core.steps import borrowed, step
from tests.support.loops import PROMPTS, pair
from tests.support.steps import source_of_steps

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
KINDS = [
    sb.sampling(),
    sb.beam_sampling(3),
    sb.dsbd(3, 4, 2, width="dynamic"),
    sb.dsbd(3, 4, 2, width="fixed", coupling="rejection"),
    sb.speculative_beam_search(3, 4, 2),
    sb.specinfer((2, 1)),
    sb.traversal((2, 1)),
    sb.prompt_lookup(),
]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_all_methods_share_one_form_of_the_loop(pair, batch_size, monkeypatch):
    monkeypatch.setattr("specbeam.core.decoder.run_side_by_side", only_failed)
    loop = run_steps.run_turns if batch_size == 1 else together_steps.run_turns_together
    forms = []
    for method in KINDS:
        before = set(loop.overloads)
        sb.generate(pair, PROMPTS[:batch_size], method, batch_size=batch_size, seed=3, max_new_tokens=8)
        forms += [one for one in loop.overloads if one not in before]
    assert len(forms) <= 1  # another test may have compiled it
    assert loop.overloads


def only_failed(target, sessions, most_turns=0):
    """Leave all sessions to the loop over many."""
    return [session for session in sessions if session.failure is not None]


@borrowed
class Rows(NamedTuple):
    """A cache of an engine that registers no steps."""

    rows: Any


def test_a_cache_without_steps_is_refused_with_a_sentence():
    cache = Rows(np.zeros(1))
    spec = by_address._inputs().spec
    with pytest.raises(UnknownKind, match=r"extend has no step for .*Rows, only for .*@extend.of\(Rows\)"):
        ByAddress(cache, cache, spec)


call_doubled = caller("doubled", Called(1, (1.0,), 1.0))


@step
def doubled(record: Any, number: Any) -> Any:
    """Return the double of a number, by a step of the record."""
    return call_doubled(record.steps[0], (record.at, number))


def test_a_step_that_is_missing_is_not_called():
    with pytest.raises(NotImplementedError, match=r"doubled was called with a record .* no such step"):
        doubled(AnyRule(0, (0,)), 2.0)


def test_arguments_of_other_types_are_refused_when_the_loop_is_compiled():
    with pytest.raises(Exception, match=r"doubled by address takes 2 arguments, not 2: \[\(int64, float64\)\]"):
        doubled(AnyRule(0, (0,)), 2)


def test_records_stay_as_they_are_where_steps_run_as_python():
    cache = Rows(np.zeros(1))
    spec = by_address._inputs().spec
    with source_of_steps():
        found = ByAddress(cache, cache, spec)
    assert found.target is cache
    assert found.spec is spec
