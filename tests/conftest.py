"""Calls inside specbeam are checked for types and shapes while the tests run, of each function the first ones and then
some, unless SPECBEAM_TYPES=off: the slow tests draw millions of tokens and are about speed of drawing."""

import logging
import os
import tempfile
from contextlib import suppress

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook
from platformdirs import user_cache_path

import tests.support.checking  # the hook looks it up by name
import tests.support.triton

if os.environ.get("SPECBEAM_TYPES") != "off":
    tests.support.checking.sample_calls()
    install_import_hook("specbeam", "tests.support.checking.checked")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel for GPUs is defined
    tests.support.triton.patch_language_once()

hypothesis.settings.register_profile("patient", deadline=None)  # the first call of a kernel compiles it
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def forgetful(request):
    """Let no session learn from another one, so that reports are those of a first session; unless a test `remembers`."""
    with pytest.MonkeyPatch.context() as patch:
        if "remembers" not in request.keywords:
            patch.setattr("specbeam.core.control.needs.OddsMemory.add", lambda *given: None)
            patch.setattr("specbeam.core.control.pace.PaceMemory.leave", lambda *given: None)
            patch.setattr("specbeam.models.skip_search.SkipMemory.end", lambda *given: None)
        for name in ("ALONE_S", "QUICK_S"):  # costs of tiny models are measured in a moment
            patch.setattr(f"specbeam.recipes.tuning.costs.{name}", 0.02)
        yield


@pytest.fixture(autouse=True)
def logs_as_before():
    """Take back what a test changes in the logs of the server (`set_up_log`), which are those of the process."""
    logs = [logging.getLogger(name) for name in ("specbeam.serve", "uvicorn.error")]
    before = [(log.handlers[:], log.level, log.propagate) for log in logs]
    raises = logging.raiseExceptions
    yield
    for log, (handlers, level, propagate) in zip(logs, before, strict=True):
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate
    logging.raiseExceptions = raises


@pytest.fixture(autouse=True, scope="session")
def one_kind_of_words(request):
    """Let the quick tests keep all weights as float32, unless they ask for `packed`; the slow ones have them as users do.

    Weights that bfloat16 represents are otherwise packed, two in a word. The engine is compiled anew for each kind of words
    of a target and of its draft, which takes longer than most tests. The products are the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "not slow" in request.config.option.markexpr:
            for place in PACKING:
                patch.setattr(place, lambda matrix: False)
        yield


@pytest.fixture
def turn_by_turn(request, monkeypatch):
    """Let a quick test decode turn by turn, so that no run is compiled for its method; a slow one lets its turns run ahead.

    The texts are the same (tests/runs).
    """
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
        for several in ("run_side_by_side", "run_together"):
            monkeypatch.setattr(
                f"specbeam.core.decoder.{several}",
                lambda target, sessions, *_: [one for one in sessions if one.failure is not None],
            )


@pytest.fixture(autouse=True, scope="session")
def impatient():
    """Let a cost curve that is needed at once be measured a few times only, and not for half a second of each model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbeam.recipes.tuning.costs.QUICK_S", 0.0)
        yield


PACKING = ("specbeam.engines.cpu.decoder.fits_bfloat16", "specbeam.models.heads.compiled.fits_bfloat16")


@pytest.fixture
def packed(monkeypatch):
    """Let the models that a test loads have their weights packed where they are packed for users."""
    from specbeam.engines.cpu.panels import fits_bfloat16

    for place in PACKING:
        monkeypatch.setattr(place, fits_bfloat16)


# Machine code is kept from one run of the tests to the next, where it is kept for users. Figures are neither kept nor used.
with suppress(RuntimeError):  # this user has no home folder
    os.environ.setdefault("NUMBA_CACHE_DIR", os.environ.get("SPECBEAM_CACHE") or str(user_cache_path("specbeam")))
os.environ["SPECBEAM_CACHE"] = tempfile.mkdtemp(prefix="specbeam-tests-")
os.environ["XDG_CONFIG_HOME"] = os.environ["SPECBEAM_CACHE"]  # no defaults of the user's commands
os.environ.pop("SPECBEAM_CONFIG", None)
os.environ.setdefault("SPECBEAM_COMPILERS", "1")  # the tests are given their processes by pytest
