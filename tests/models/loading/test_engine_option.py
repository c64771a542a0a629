"""The engine of a pair's models, as users choose it: in Python and in all commands that load models."""

import pytest
import typer.main

import specbeam as sb
from specbeam.doors.cli.main import app
from specbeam.engines.choices import check_engine
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.encoder_decoder import EncoderDecoderLM
from tests.models.test_source_families import model_of as reader_of
from tests.support.tiny_models import tiny


def test_the_engine_runs_target_and_draft():
    target, draft = tiny("llama"), tiny("llama", seed=1, num_hidden_layers=1)
    engines = []
    for engine in ("plain", "layers", "plain"):
        pair = sb.load(target, draft, tokenizer=False, engine=engine)
        engines.append((pair.target.engine, pair.draft.engine))
    assert engines == [("plain", "plain"), ("layers", "layers"), ("plain", "plain")]
    again = sb.load(target, draft, tokenizer=False, engine="plain")
    assert again.target is pair.target, "it is kept with the model"


def test_further_drafts_have_the_engine_too():
    pair = sb.load(tiny("llama"), tiny("llama", seed=1), tokenizer=False, engine="plain")
    assert pair.target.further_draft(tiny("llama", seed=2), {}).engine == "plain"


def test_models_with_sources_have_engines_too():
    pair = sb.load(reader_of("marian"), tokenizer=False, engine="plain")
    assert isinstance(pair.target, EncoderDecoderLM)
    assert pair.target.engine == "plain"
    with pytest.raises(NotSupported, match="engine 'layers' runs decoder-only models"):
        sb.load(reader_of("marian"), tokenizer=False, engine="layers")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("compield", r"engine is 'compield'; it must be one of .*\(did you mean compiled\?\)"),
        ("int8", "engine is 'int8'; give quantize='int8' instead"),
        ("torch", "give compile=True instead"),
        (None, "engine is None; it must be one of 'auto', 'gpu', 'compiled', 'layers', 'plain'$"),
    ],
)
def test_wrong_engines_are_named_with_the_right_ones(engine, message):
    with pytest.raises(BadSetting, match=message):
        check_engine(engine, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "plain", "quantize": "int8"}, "engine and quantize both choose what runs the models"),
        ({"engine": "plain", "compile": True}, "engine and compile both choose"),
        ({"engine": "gpu", "device_map": "auto"}, "engine and device_map both choose"),
    ],
)
def test_two_options_that_choose_an_engine_are_refused(options, message):
    with pytest.raises(BadSetting, match=message):
        sb.load(tiny("llama"), tokenizer=False, **options)


def test_an_engine_that_cannot_run_a_model_is_refused_with_the_reason():
    with pytest.raises(
        NotSupported, match=r"layers one by one cannot run this GPT2LMHeadModel: it is for unchanged Llama"
    ):
        sb.load(tiny("gpt2"), tokenizer=False, engine="layers")


def commands_of(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), {one.name for one in command.params}


def test_every_command_that_loads_models_takes_an_engine():
    commands = dict(commands_of(typer.main.get_command(app)))
    loading = {name for name, options in commands.items() if "model" in options}
    assert {
        "generate",
        "batch",
        "serve",
        "chat",
        "bench speed",
        "train draft",
        "heads inspect",
        "transcribe",
    } <= loading
    others = {name for name in loading if "engine" not in commands[name]}
    assert others == set()
