"""The tool that compares beams seed by seed, and explains a difference."""

import specbeam as sb
from specbeam.lab.evaluate.same_beams import differences
from tests.support import words


def test_no_difference_in_float32():
    pair = words.pair()
    for beams in (1, 3):
        assert (
            differences(pair, ["abc", "Hello", "no"], sb.dsbd(beams, beams + 2, 3, "fixed"), 1, 2, max_new_tokens=10)
            == []
        )


def test_a_difference_is_found_at_its_step_and_its_gap_is_judged():
    """A dynamic width draws fewer beams: no rounding. A rounded target flips near ties only."""
    pair = words.pair()
    found = differences(pair, ["abc", "Hello"], sb.dsbd(4, 6, 3, "dynamic", threshold=0.99), 1, max_new_tokens=10)
    assert found
    assert all(one.step < 10 and one.gap > 0 and set(one.plain) != set(one.other) for one in found)
    assert not all(one.is_rounding for one in found)
