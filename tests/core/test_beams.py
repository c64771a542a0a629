"""Steps that stop texts."""

import numpy as np
import pytest

from specbeam.core.beams import FEW_ENDS, is_end
from specbeam.core.limits import Limits


@pytest.mark.parametrize("count", [0, 1, FEW_ENDS, FEW_ENDS + 1, 300])
def test_end_tokens_are_found_however_many_there_are(count):
    ends = Limits(5, eos=tuple(np.random.default_rng(count).permutation(400)[:count].tolist()))
    stop = ends.stop
    assert [token for token in range(400) if is_end(token, stop.eos)] == sorted(ends.eos)
    assert not is_end(10**9, stop.eos)
