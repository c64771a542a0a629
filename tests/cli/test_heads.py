"""The command that shows what a draft head is."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import specbeam as sb
from specbeam.cli import heads
from specbeam.cli.main import app
from specbeam.errors import BadSetting

GOLDEN = Path(__file__).parent.parent / "heads" / "golden"


@pytest.fixture
def target(monkeypatch):
    """Stands for the target of the heads in `golden`, whatever its name."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    pair = sb.load(LlamaForCausalLM(config).eval())
    asked = []

    def load(name, draft):
        asked.append(name)
        return pair

    monkeypatch.setattr(heads, "quiet_load", load)
    return asked


def shown(*arguments):
    done = CliRunner().invoke(app, ["heads", "inspect", *arguments], env={"COLUMNS": "160"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_it_shows_what_was_read_and_what_was_tried(target):
    found = shown(str(GOLDEN / "two_layers"))
    assert target == ["tiny"]  # what the files of the head name
    for part in ("EAGLE-3", "what enters layers 2, 4, 5", "rotated, base 500000", "20 of 32", "as its files say"):
        assert part in found
    assert "positions of base 10000" in found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", "EAGLE-1"), ("dflash", "DFlash: drafts 3 tokens"), ("dspark", "DSpark: drafts 4"), ("medusa", "Medusa"), ("redrafter", "ReDrafter")],
)  # fmt: skip
def test_every_kind_is_described(name, kind, target):
    found = json.loads(shown(str(GOLDEN / name), "-m", "other", "--json"))
    assert target == ["other"]
    assert kind in found["kind"]
    assert 0 <= found["as stated"][0] <= 1
    assert "as stated" not in json.loads(shown(str(GOLDEN / name), "-m", "other", "--json", "--no-probe"))


def test_what_is_no_head_is_refused(target, tmp_path):
    with pytest.raises(BadSetting, match="is no draft head that specbeam knows"):
        shown(str(tmp_path))
    with pytest.raises(BadSetting, match="do not name the target"):
        shown(str(GOLDEN / "redrafter"))
