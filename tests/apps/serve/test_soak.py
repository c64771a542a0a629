"""Many requests leave nothing behind: neither memory nor places nor rows of the store."""

import gc
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest

import specbeam as sb
from specbeam.apps.serve.engine import Engine, EngineLimits
from specbeam.errors import SpecbeamError
from tests.apps.serve.conftest import CHUNK, LONG, SHORT

SOAK_S = float(os.environ.get("SOAK_S", "60"))


@pytest.mark.slow
def test_memory_stays_flat_over_many_requests(pair):
    """Mixed traffic by four threads for `SOAK_S` seconds; what Python and numpy hold then is compared with what they held at half time."""
    rng = np.random.default_rng(0)
    methods = [sb.sampling(), sb.beam_search(3), sb.dsbd(3, 4, 2), sb.speculative_sampling(3)]
    done = [0, 0]
    end = time.monotonic() + SOAK_S
    limits = EngineLimits(max_running=4, max_waiting=64, chunk=CHUNK, prefix_bytes=2**18)
    with Engine(pair, limits) as engine:

        def ask(number):
            own = np.random.default_rng(number)
            while time.monotonic() < end:
                prompt = LONG[: int(own.integers(2, 60))]
                try:
                    bad = {"logits_processor": [lambda ids, scores: scores[:, :1]]} if own.random() < 0.05 else {}
                    engine.generate([prompt], methods[int(own.integers(4))], seed=int(own.integers(9)), **SHORT, **bad)
                    done[0] += 1
                except SpecbeamError:
                    done[1] += 1

        tracemalloc.start()
        threads = [threading.Thread(target=ask, args=(int(number),)) for number in rng.integers(0, 1000, 4)]
        for thread in threads:
            thread.start()
        time.sleep(SOAK_S / 2)
        gc.collect()
        before, first = tracemalloc.get_traced_memory()[0], done[0]
        for thread in threads:
            thread.join()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert done[0] - first > 10
        assert grown < 2**20
        assert (engine.inside, engine.waiting, pair.target.caches, pair.draft.caches) == ([], 0, [], [])
