"""Calls inside specbeam are checked for types and shapes while the tests run, of each function the first ones and then
some, unless SPECBEAM_TYPES=off: the slow tests draw millions of tokens and are about speed of drawing."""

import os
import tempfile

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

import tests.support.checking  # the hook looks it up by name

if os.environ.get("SPECBEAM_TYPES") != "off":
    tests.support.checking.sample_calls()
    install_import_hook("specbeam", "tests.support.checking.checked")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel for GPUs is defined

hypothesis.settings.register_profile("patient", deadline=None)  # the first call of a kernel compiles it
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def forgetful(request):
    """Let no session learn from another one, so that reports are those of a first session; unless a test `remembers`."""
    with pytest.MonkeyPatch.context() as patch:
        if "remembers" not in request.keywords:
            patch.setattr("specbeam.control.needs.OddsMemory.add", lambda *given: None)
            patch.setattr("specbeam.control.pace.PaceMemory.leave", lambda *given: None)
        yield


os.environ["SPECBEAM_CACHE"] = tempfile.mkdtemp(prefix="specbeam-tests-")  # nothing measured here is kept, or used
