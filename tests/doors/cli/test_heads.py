"""The command that shows what a draft head is."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import specbeam as sb
from specbeam.doors.cli import heads
from specbeam.doors.cli import train as train_commands
from specbeam.doors.cli.main import app
from specbeam.doors.cli.train import PLAN_OPTIONS
from specbeam.doors.options.head_kinds import WINDOW_KIND
from specbeam.errors import BadSetting
from specbeam.lab.train.course import Trained
from specbeam.lab.train.drawing import DrawPlan
from specbeam.lab.train.fitting import Point, Schedule
from specbeam.lab.train.head_files import write_head
from specbeam.lab.train.heads import KINDS
from specbeam.lab.train.plan import HeadPlan, planned
from specbeam.models.heads import probe
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.own import extra_rows_config, own_config
from specbeam.models.pair import BUNDLED
from tests.support import words
from tests.support.extra_rows import extra_head
from tests.support.mtp import tiny_target, with_modules

GOLDEN = Path(__file__).parents[2] / "models" / "heads" / "golden"


@pytest.fixture
def target(monkeypatch):
    """Stands for the target of the heads in `golden`, whatever its name."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=128)
    pair = sb.load(LlamaForCausalLM(config).eval())
    asked = []

    def load(name, draft, engine="auto"):
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
    for part in (
        "EAGLE-3",
        "the inputs of layers 2, 4, 5",
        "rotated, base 500000",
        "20 of 32",
        "as stated in its files",
    ):
        assert part in found
    assert "positions of base 10000" in found
    assert "mean over 128 tokens that the target draws at temperature 1" in found
    assert "hardly fits" not in found


def test_a_head_that_hardly_fits_is_named_below_the_table(target, monkeypatch):
    monkeypatch.setattr(probe, "POOR", 1.0)
    assert "specbeam: the head hardly fits the target: the overlap of their laws is 0." in shown(
        str(GOLDEN / "two_layers")
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", "EAGLE-1"), ("dflash", "DFlash: drafts 3 tokens"), ("dspark", "DSpark: drafts 4"), ("medusa", "Medusa"), ("redrafter", "ReDrafter"),
     ("peagle_window", "P-EAGLE: drafts 4 tokens"), ("domino", "Domino: drafts 4"), ("dflash2", "DFlash2: drafts 3"), ("xpress", "XPress")],
)  # fmt: skip
def test_every_kind_is_described(name, kind, target):
    found = json.loads(shown(str(GOLDEN / name), "-m", "other", "--json"))
    assert target == ["other"]
    assert kind in found["kind"]
    assert 0 <= found["as stated"][0] <= 1
    assert "as stated" not in json.loads(shown(str(GOLDEN / name), "-m", "other", "--json", "--no-probe"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "chimera",
            {"kind": "Chimera: reads the last three tokens", "read-outs": "4, one for each depth; a map for each"},
        ),
        ("specdiff", {"kind": "SpecDiff: unmasks 5 tokens, in one step or several", "layers": "2"}),
    ],
)
def test_heads_in_our_own_format_are_described(kind, told, target, tmp_path):
    """Their files name the target that they were made for, and leave nothing open that could be read in another way."""
    model = heads.quiet_load("other", None).target_model
    plan = planned(model, KINDS[kind].usual, {})
    head = KINDS[kind].new(model, plan, None)
    KINDS[kind].save(head, model, plan, tmp_path)
    with pytest.raises(BadSetting, match="--model is missing"):  # the target was made in memory, and has no name
        shown(str(tmp_path))
    model.config._name_or_path = "tiny"
    KINDS[kind].save(head, model, plan, tmp_path)
    target.clear()
    found = json.loads(shown(str(tmp_path), "--json"))
    assert target == [found["made for"]] == ["tiny"]
    for name, part in told.items():
        assert part in found[name]
    assert found["tried"] == {}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("bita", ["BiTA: mask tokens", "5 soft prompts", "0.50, 0.25, by depth"]),
        ("hidden_transfer", ["the input of layer 7"]),
    ],
)
def test_heads_in_the_targets_own_pass_are_described(kind, parts, target, tmp_path):
    head = extra_head(heads.quiet_load("", None).target_model, kind)
    head.ranks = ((0.5, 0.25), (0.25,)) if kind == "bita" else ()
    write_head(head, extra_rows_config(head), tmp_path, head.target)
    found = json.loads(shown(str(tmp_path), "-m", "other", "--json"))
    assert all(part in " ".join(str(value) for value in found.values()) for part in parts)
    assert len(found["as stated"]) == 2


@pytest.mark.parametrize("kind", [*KINDS, "coral"])
def test_the_help_of_a_training_lists_what_the_kind_takes(kind):
    """And no option of another kind; what is usual is what it is in Python."""
    known = WINDOW_KIND if kind == "coral" else KINDS[kind]
    text = CliRunner().invoke(app, ["train", kind, "--help"], env={"COLUMNS": "200"}).output
    for name in PLAN_OPTIONS:
        option = "--tap " if name == "taps" else f"--{name.replace('_', '-')} "
        assert (option in text) == (name in known.takes), option
    for name in ("rate", "embedding_rate", "batch_tokens"):
        (entry,) = [one for one in text.split("\n  --") if one.startswith(f"{name.replace('_', '-')} ")]
        assert f"[default: {known.schedule[name]};" in " ".join(entry.split())


def test_the_options_of_a_window_reach_its_training(tmp_path, monkeypatch):
    """And what is printed loads the taught copy of the target with its window."""
    given = {}

    def train_coral(target, prompts, out, **more):
        given.update(more, target=target, prompts=prompts)
        return Trained(out, 7, (Point(0, 0.0, float("nan"), 1.0, (0.1,)),))

    monkeypatch.setattr("specbeam.lab.train.coral.train_coral", train_coral)
    pair = words.pair()
    monkeypatch.setattr(train_commands, "quiet_load", lambda model, draft, engine: {"target": pair}[model])
    (tmp_path / "prompts.txt").write_text("abc\ncab\n")
    options = [
        "--depth",
        "2",
        "--behind",
        "5",
        "--enters",
        "4",
        "--variation",
        "0.25",
        "--epochs",
        "3",
        "--beams",
        "2",
        "--seed",
        "5",
    ]
    places = ["-m", "target", "-f", str(tmp_path / "prompts.txt"), "-o", "taught", "--trees", "trees"]
    done = CliRunner().invoke(app, ["train", "coral", *places, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert given["target"] is pair
    assert given["prompts"] == ["abc", "cab"]
    assert given["trees"] == Path("trees")
    assert given["plan"] == {"depth": 2, "behind": 5, "enters": 4, "decay": None, "variation": 0.25}
    assert given["draws"] == DrawPlan(beams=2, seed=5)
    assert given["schedule"] == Schedule(3, **WINDOW_KIND.schedule, seed=5)
    assert 'sb.load("taught", draft="taught/window")' in done.output


def test_each_option_of_a_plan_is_on_the_command_line():
    taken = {name for kind in (*KINDS.values(), WINDOW_KIND) for name in kind.takes}
    assert taken == {*PLAN_OPTIONS}
    assert taken | {"variation"} == {field.name for field in fields(HeadPlan)}


def test_what_is_no_head_is_refused(target, tmp_path):
    with pytest.raises(BadSetting, match="is not a draft head of a known format"):
        shown(str(tmp_path))
    with pytest.raises(BadSetting, match="do not name"):
        shown(str(GOLDEN / "redrafter"))


@pytest.fixture
def with_own_modules(tmp_path):
    """The folder of a target whose files hold two modules of multi-token prediction, with the bundled pair's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, tmp_path)
    vocab = json.loads((BUNDLED / "target" / "config.json").read_text())["vocab_size"]
    with_modules(tmp_path, tiny_target("qwen3", vocab_size=vocab), count=2)
    return str(tmp_path)


def test_the_targets_own_modules_are_shown(with_own_modules):
    found = json.loads(shown("mtp", "-m", with_own_modules, "--json"))
    assert found["kind"].startswith("MTP")
    assert found["modules"] == "2, for drafts 1 to 2 deep"
    assert "hidden states before the target's last norm" in found["tried"]
    with pytest.raises(BadSetting, match="--model is missing; give the target whose files have the modules mtp"):
        shown("mtp")


def test_the_command_line_drafts_with_the_targets_own_modules(with_own_modules):
    arguments = [
        "generate",
        "Der Hund",
        "-m",
        with_own_modules,
        "--draft",
        "mtp",
        "--method",
        "mtp",
        "--max-new-tokens",
        "6",
        "--json",
    ]
    with pytest.warns(UserWarning, match="the head"):  # random modules fit nothing
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["report"]["draft_passes"] > 0


def test_an_exit_head_says_whether_layers_run_twice(target, tmp_path):
    model = heads.quiet_load("", None).target_model
    head = ExitHead(model, 3)
    write_head(head, own_config("eesd", head, model), tmp_path, model)
    about = json.loads(shown(str(tmp_path), "-m", "other", "--json"))
    assert about["kind"] == "EESD: an exit layer after the target's first 3 of 8 layers"
    on_its_cache = heads.quiet_load("", None).target.engine == "compiled"
    assert ("its first layers run once" if on_its_cache else "are computed twice") in about["drafts"]
    assert len(about["as stated"]) == 1
