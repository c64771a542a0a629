import pytest

from specbeam.doors.grammar.compiled import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param)
    return request.param
