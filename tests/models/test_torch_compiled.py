"""compile=True: models that transformers runs, by torch.compile."""

import os
import shutil

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from tests.models.test_huggingface import check_random_turns
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny


@needs_numba
def test_models_that_specbeam_runs_itself_are_refused():
    with pytest.raises(BadSetting, match="leave it out"):
        sb.load(tiny("llama"), tiny("llama", seed=1), compile=True)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotSupported, match="C\\+\\+ compiler"):
        sb.load(tiny("phi"), compile=True)


def test_what_torch_cannot_compile_is_said(monkeypatch):
    def fails(*given, **options):
        raise RuntimeError("a graph that breaks")

    monkeypatch.setattr(torch, "compile", lambda forward, **options: fails)
    with pytest.raises(NotSupported, match="could not compile PhiForCausalLM: RuntimeError: a graph that breaks"):
        sb.load(tiny("phi"), compile=True)


def test_a_model_that_drafts_for_itself_is_compiled_twice(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    model = tiny("phi")
    pair = sb.load(model, model, compile=True)
    assert [lm.engine for lm in (pair.target, pair.draft)] == ["torch", "torch"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(os.environ.get("SPECBEAM_TYPES") != "off", reason="wrappers that check types count their calls")
def test_a_compiled_model_is_the_same_model(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    target, draft = tiny("phi"), tiny("phi", seed=1)
    plain = sb.load(tiny("phi"), tiny("phi", seed=1))
    compiled = sb.load(target, draft, compile=True)
    assert [lm.engine for lm in (compiled.target, compiled.draft)] == ["torch", "torch"]
    for method in (sb.dsbd(3, 4, 3, width="dynamic"), sb.speculative_sampling(3)):
        found, expected = (
            [one.tokens for one in sb.generate(pair, [[3, 4, 5], [7] * 30], method=method, seed=3, top_k=8)]
            for pair in (compiled, plain)
        )
        assert found == expected
    assert any((tmp_path / "torch").rglob("*.so"))
    check_random_turns(HuggingFaceLM(target, engine="torch"), target)
    assert "recompile_limit" not in caplog.text  # then torch would go on without what it compiled
