"""Model objects that transformers runs although their files would run compiled: a warning says so."""

import warnings

import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.models import engines
from tests.support.tiny_models import tiny

pytestmark = pytest.mark.skipif(not compiling.AVAILABLE, reason="needs the compiled forward")


def loaded(model, **options):
    """The engine of a model, and what its loading warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair = sb.load(model, tokenizer=False, **options)
    return pair.target.engine, [str(one.message) for one in caught if "object" in str(one.message)]


def test_a_large_object_is_said_to_run_compiled_from_its_files(monkeypatch):
    monkeypatch.setattr(engines, "LARGEST_WIDENED", 1000)
    (engine, (said,)) = loaded(tiny("llama"))
    assert engine == "plain"
    assert "LlamaForCausalLM object, because it has" in said
    assert "sb.load(FOLDER) runs its files compiled, 5 times as fast where it was measured" in said


def test_so_is_an_object_in_bfloat16(tmp_path):
    model = tiny("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    named = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    (engine, (said,)) = loaded(named)
    assert engine == "plain"
    assert f"sb.load({str(tmp_path)!r}) runs its files compiled" in said
    assert loaded(str(tmp_path)) == ("compiled", [])
    assert loaded(named, engine="compiled") == ("compiled", [])


def test_so_is_a_draft(monkeypatch):
    monkeypatch.setattr(engines, "LARGEST_WIDENED", 1000)
    (_, said) = loaded(tiny("llama"), draft=tiny("llama", seed=1))
    assert len(said) == 2


def test_others_are_not(monkeypatch):
    assert loaded(tiny("llama")) == ("compiled", [])
    monkeypatch.setattr(engines, "LARGEST_WIDENED", 1000)
    assert loaded(tiny("llama"), engine="plain") == ("plain", [])  # as asked
    assert loaded(tiny("llama"), quantize="int8") == ("int8", [])


def test_so_are_files_that_are_loaded_in_a_type(tmp_path):
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="without dtype runs its files compiled"):
        pair = sb.load(tmp_path, tokenizer=False, dtype="bfloat16")
    assert pair.target.engine == "plain"
