"""The argument for cached keys and values, by its name in each version of transformers."""

from types import SimpleNamespace

import pytest
from transformers import DynamicCache

from specbeam.engines.cache_names import NAMES, cache_argument, cache_of


class Newer:
    def forward(self, input_ids, cache=None, past_key_values=None):
        return input_ids


class Older:
    def forward(self, input_ids, past_key_values=None):
        return input_ids


def test_a_forward_gets_the_name_that_it_has():
    held = DynamicCache()
    assert cache_argument(Newer(), held) == {"cache": held}
    assert cache_argument(Older(), held) == {"past_key_values": held}


@pytest.mark.parametrize("name", NAMES)
def test_an_output_has_its_cache_under_one_name(name):
    assert cache_of(SimpleNamespace(**{name: 7})) == 7
