import pytest

from specbeam.grammar.compiled import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param)
    return request.param
