"""Garbage is looked for more rarely while many objects are made that stay, and then as before."""

import gc

import pytest

from specbeam.core.garbage import rarely_collected


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    gc.set_threshold(600, 7, 8)
    if gc.get_threshold() != (600, 7, 8):
        gc.set_threshold(*before)
        pytest.skip("this version of Python keeps no third number")
    yield
    gc.set_threshold(*before)


def test_all_objects_are_looked_through_more_rarely_inside():
    with rarely_collected():
        assert gc.get_threshold() == (20_000, 7, 200)
        with rarely_collected():
            assert gc.get_threshold() == (20_000, 7, 200)
        assert gc.get_threshold() == (20_000, 7, 200)
    assert gc.get_threshold() == (600, 7, 8)


def test_of_two_threads_that_overlap_the_last_one_sets_the_threshold_back():
    first = rarely_collected()
    second = rarely_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (20_000, 7, 200)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (600, 7, 8)


def test_a_threshold_that_somebody_sets_inside_stays():
    with rarely_collected():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
