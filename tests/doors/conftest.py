"""Tests of the doors run on each engine that there is: without numba there is no compiled one."""

import pytest

from specbeam.core import compiling
from specbeam.models.huggingface import HuggingFaceLM


@pytest.fixture(autouse=True, scope="package")
def compiled_engine_or_skip():
    """Skip what needs the compiled engine where numba is missing."""
    if compiling.AVAILABLE:
        yield
        return
    init = HuggingFaceLM.__init__

    def init_or_skip(self, *given, **options):
        if "compiled" in (*given, *options.values()):
            pytest.skip("needs numba")
        init(self, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceLM, "__init__", init_or_skip)
        yield
