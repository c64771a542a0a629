"""Wrong values of options are said before torch is imported, which takes seconds, and before any model is loaded."""

import inspect
import json
import re
import subprocess
import sys
import wave
from typing import get_args

import pytest
import torch

from specbeam.doors.cli.best import DRAFTERS
from specbeam.doors.method_names import method_names, setting_names
from specbeam.engines.choices import check_device
from specbeam.lab.bench.baselines import MAKERS
from specbeam.lab.bench.cliffs import _ARGUMENTS as CLIFF_ARGUMENTS
from specbeam.lab.bench.efficiency import BRANCHING
from specbeam.lab.bench.host import HostPlan, methods_of
from specbeam.lab.bench.papers import Paper
from specbeam.lab.fuzz.worlds import WORLDS
from specbeam.lab.words import BASELINES, BUDGETS, CLIFF_METHODS, CLIFF_OPTIONS, FUZZ_WORLDS, HOST_METHODS, PAPERS
from specbeam.recipes.best import Guesses
from specbeam.recipes.catalogue import HEAD_RECIPES, RECIPES
from tests.doors.cli.test_wrong_inputs import FOLDERS, READING, WRITING

PROGRAM = """
import contextlib, io, json, sys
from specbeam.doors.cli.main import main
for name, arguments in json.load(sys.stdin).items():
    said = io.StringIO()
    code = 0
    sys.argv = ["specbeam", *arguments]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([name, code, said.getvalue(), sorted({"torch", "transformers", "numba"} & set(sys.modules))]))
"""
# Wrong values by kind; {whisper} is the folder of a Whisper model without weights.
WRONG = {
    "a folder without a model": [["-m", "./folder"], "has no config.json"],
    "a model that is a file": [["-m", "./good.jsonl"], "is a file, not a folder"],
    "a draft that is not there": [["-d", "./nothing"], "there is no folder nothing"],
    "an unknown engine": [["--engine", "fast"], "engine is 'fast'"],
    "an unknown rounding": [["--quantize", "int9"], "quantize is 'int9'"],
    "an unknown type of keys": [["--kv", "float8"], "kv is 'float8'"],
    "an unknown type of products": [["--compute", "float8"], "compute is 'float8'"],
    "an unknown method": [["--method", "dsdb"], "there is no method 'dsdb' (did you mean dsbd?)"],
    "an unknown setting": [["--set", "beem=3"], "has no setting 'beem' (did you mean beams?)"],
    "a setting without a value": [["--set", "beams"], "write NAME=VALUE"],
    "a setting of another type": [["--set", "beams=x"], "beams is 'x'; it must be an integer"],
    "a number out of range": [["--batch-size", "0"], "Invalid value for '--batch-size'"],
    "an option of generation out of range": [["--top-p", "2"], "top_p is 2.0; it must be in (0, 1]"],
    "a schema that is not there": [["--json-schema", "missing"], "there is no file missing"],
    "a setting as an option": [["--beams", "3"], "No such option: --beams; it is a setting of methods: --set beams=..."],
    "a setting by its name elsewhere": [["--num-beams", "3"], "it is a setting of methods: --set beams=..."],
    "a catalogue that is not there": [["--catalogue", "missing"], "there is no file missing"],
    "an unknown device": [["--device", "cudaa:0"], "device is 'cudaa:0' (did you mean cuda?)"],
    "a device by another name": [["--device", "gpu"], "device is 'gpu' (did you mean cuda?)"],
    "a device without its number": [["--device", "cuda:"], "device is 'cuda:'"],
    "a path that cannot be a hub id": [["-m", "models/llama/base"], "there is no folder models/llama/base"],
    "a name that is no path": [["-d", "my draft"], "there is no folder my draft"],
    "an engine and products": [["--engine", "plain", "--compute", "bfloat16"], "engine and compute both choose"],
    "products and a rounding": [["--compute", "bfloat16", "--quantize", "int8"], "compute and quantize both choose"],
    "a language of the bundled pair": [["--target-language", "fr"], "translates from German to English"],
    "a model of speech": [["-m", "{whisper}"], "is a whisper model, which reads audio; use specbeam transcribe"],
    "an unknown language": [["-m", "{translator}", "--target-language", "xx_Xxxx"], "does not know the language 'xx_Xxxx'"],
}  # fmt: skip
OTHERS = {
    "serve": [["--port", "99999999"], "port is 99999999"],
    "serve, method": [["--method", "dsdb"], "there is no method 'dsdb'"],
    "serve, setting": [["--set", "beem=3"], "has no setting 'beem' (did you mean beams?)"],
    "serve, engine": [["--engine", "fast"], "engine is 'fast'"],
    "serve, beams": [["--default-beams", "0"], "default_beams is 0; it must be at least 1"],
    "serve, more beams than allowed": [["--default-beams", "20"], "default_beams is 20, and max_beams is 16; leave it out"],
    "serve, settings of no method": [["--method", "auto", "--set", "beams=3"], "settings are for a method that is named"],
    "serve, a key for nothing": [["--no-auth", "--api-key", "k"], "no_auth is for a server without API keys"],
    "serve, hosts": [["--host", "0.0.0.0", "--no-auth", "--allowed-host", "x"], "allowed_hosts is for a host of this"],
    "serve, shared cache": [["--prefix-cache-shared"], "prefix_cache_shared needs API keys and a prefix cache"],
    "serve, a default that is not offered": [["--methods", "greedy"], "requests without a method get dsbd, and methods is"],
    "serve, memory": [["--kv-gb", "nan"], "kv_gb is nan; it must not be negative"],
    "serve, grammar": [["--max-grammar", "-1"], "max_grammar is -1; it must not be negative"],
    "serve, template": [["--chat-template", "missing"], "there is no file missing"],
    "serve, keys": [["--api-key-file", "missing"], "there is no file missing"],
    "serve, certificate": [["--tls-cert", "missing"], "there is no file missing"],
    "serve, catalogue": [["--catalogue", "missing"], "there is no file missing"],
    "serve, draft": [["--draft", "./missing"], "there is no folder missing"],
    "serve, rounding of the draft": [["--quantize-draft", "int3"], "quantize_draft is 'int3'"],
    "bench paper, rounding of the draft": [["dsbd", "--quantize-draft", "int3"], "quantize_draft is 'int3'"],
    "serve, products": [["--compute", "bfloat16", "--quantize", "int8"], "compute and quantize both choose"],
    "chat, template": [["-m", "{translator}"], "has no chat template; give --chat-template"],
    "chat, setting": [["--set", "beem=3"], "has no setting 'beem' (did you mean beams?)"],
    "chat, method of a server": [["--url", "http://127.0.0.1:9", "--method", "dsdb"], "there is no method 'dsdb'"],
    "chat, address": [["--url", "localhost"], "'localhost' is not the address of a server"],
    "chat, server": [["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"],
    "best": [["x", "-n", "0"], "Invalid value for '--n'"],
    "best, limit": [["x", "--limit", "0"], "Invalid value for '--limit'"],
    "best, width": [["x", "--width", "-1"], "Invalid value for '--width'"],
    "best, drafter": [["x", "--drafter", "other"], "drafter is 'other'"],
    "methods": [["dsdb"], "there is no method 'dsdb' (did you mean dsbd?)"],
    "demo": [["--beams", "0"], "Invalid value for '--beams'"],
    "demo, size": [["--grow", "huge"], "--grow is 'huge'"],
    "bench speed, nothing": [[""], "a contender is empty"],
    "bench speed, quote": [["dsbd 'beams=4"], "cannot be read: No closing quotation"],
    "bench paper": [["other"], "PAPER is 'other'; it must be one of dsbd, mtad, rsd"],
    "bench paper, task": [["dsbd"], "there is no task"],
    "bench paper, threshold": [["dsbd", "--threshold", "nan"], "--threshold is nan; it must be 0 to 1"],
    "bench paper, law": [["dsbd", "--law", "heat=2"], "--law is 'heat'"],
    "bench paper, databases": [["dsbd", "--databases", "missing"], "there is no folder missing"],
    "bench serve": [["localhost:8000"], "'localhost:8000' is not the address of a server"],
    "bench serve, rate": [["--rate", "-1"], "--rate is -1.0; it must be more than 0 requests per second"],
    "evaluate diff, type": [["x", "--dtype", "float31"], "dtype is 'float31'"],
    "evaluate fuzz, pair": [["--world", "other"], "world is 'other'"],
    "bench speed": [["dsdb"], "there is no method 'dsdb'"],
    "bench speed, baseline": [["vllm/greedy"], "must be one of transformers, ctranslate2"],
    "bench speed, size": [["--grow", "huge"], "--grow is 'huge'; it must be a number like 128K, 100M or 1.5B"],
    "bench cliffs": [["--methods", "dsdb"], "--methods is 'dsdb'"],
    "bench cliffs, kind": [["--kinds", "other"], "--kinds is 'other'; it must be one of trained, random"],
    "bench host": [["--method", "other"], "--method is 'other'"],
    "bench efficiency": [["--budget", "2"], "--budget is '2'; it must be one of 5, 10, 21, 30"],
    "bench methods": [["--metric", "other"], "Invalid value for '--metric'"],
    "bench specbench": [["good.jsonl", "dsdb"], "there is no method 'dsdb'"],
    "bench passes": [["--beams", "0"], "Invalid value for '--beams'"],
    "train draft": [["-o", "new", "-f", "good.jsonl", "--epochs", "0"], "Invalid value for '--epochs'"],
    "train chimera": [["-o", "new", "-f", "good.jsonl", "--read-out", "other"], "Invalid value for '--read-out'"],
    "train hmt": [["-o", "new", "-f", "good.jsonl", "--stages", "3"], "--stages is '3'"],
    "evaluate diff": [["x", "--beams", "1"], "Invalid value for '--beams'"],
    "evaluate fuzz": [["--calls", "0"], "Invalid value for '--calls'"],
    "tune": [["--odds", "2"], "--odds is 2.0; it must be a probability"],
    "inspect": [["x", "--turn", "0"], "Invalid value for '--turn'"],
    "heads inspect": [["mtp"], "--model is missing"],
    "transcribe": [["-m", "{whisper}", "missing.wav"], "there is no file missing.wav"],
    "transcribe, task": [["-m", "{whisper}", "a.wav", "--task", "other"], "Invalid value for '--task'"],
    "transcribe, model": [["-m", "{translator}", "a.wav"], "is a m2m_100 model, which does not transcribe speech"],
    "transcribe, language": [["-m", "{whisper}", "a.wav", "--language", "xx"], "knows 2 languages, by a code (de, en) or an English name"],
    "transcribe, setting": [["-m", "{whisper}", "a.wav", "-s", "beem=2"], "beam_search has no setting 'beem'"],
    "transcribe, subtitles": [["-m", "{whisper}", "a.wav", "a.wav", "-f", "srt"], "give --output FOLDER, or one file"],
    "generate, tokenizer": [["-m", "{dumb}", "x"], "has no tokenizer files, such as tokenizer.json"],
    "best, tokenizer": [["-m", "{dumb}", "x"], "has no tokenizer files, such as tokenizer.json"],
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder of wrong files, and of folders of models that hold no weights."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "good.jsonl").write_text('{"prompt": "abc"}\n')
    (folder / "folder").mkdir()
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(32_000))
    for name, file, content in [
        ("translator", "config.json", {"model_type": "m2m_100"}),
        ("translator", "tokenizer_config.json", {"extra_special_tokens": ["eng_Latn", "fra_Latn"]}),
        ("dumb", "config.json", {"model_type": "marian"}),
        ("whisper", "config.json", {"model_type": "whisper"}),
        ("whisper", "generation_config.json", {"lang_to_id": {"<|en|>": 1, "<|de|>": 2}}),
    ]:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file).write_text(json.dumps(content))
    return folder


def outcomes(here, calls):
    """The exit code, the text and the heavy modules after each call, all in one process that never imports torch."""
    calls = {
        name: [one.format(translator="./translator", dumb="./dumb", whisper="./whisper") for one in call]
        for name, call in calls.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(calls), capture_output=True, text=True, check=True, cwd=here
    )
    return {name: found for name, *found in map(json.loads, done.stdout.splitlines())}


def test_missing_files_and_places_of_every_command(here):
    calls = {f"reading {name}": [one.replace("FILE", "missing") for one in call] for name, call in READING.items()}
    calls |= {f"writing {name}": [one.replace("OUT", "missing/file") for one in call] for name, call in WRITING.items()
              if "--plot" not in call}  # fmt: skip
    calls |= {f"folder {name}": [one.replace("FOLDER", "good.jsonl") for one in call] for name, call in FOLDERS.items()}
    for name, (code, said, heavy) in outcomes(here, calls).items():
        assert (name, code, heavy) == (name, 2, []), said
        assert "missing" in said or "good.jsonl" in said, (name, said)


def test_each_kind_of_wrong_value_of_a_command_that_generates(here):
    calls = {name: ["generate", "x", *options] for name, (options, _) in WRONG.items()}
    for name, (code, said, heavy) in outcomes(here, calls).items():
        assert (name, code, heavy) == (name, 2, []), said
        assert WRONG[name][1] in " ".join(said.replace("│", " ").split()), said


def test_wrong_values_of_the_other_commands(here):
    calls = {name: [*name.partition(",")[0].split(), *options] for name, (options, _) in OTHERS.items()}
    for name, (code, said, heavy) in outcomes(here, calls).items():
        assert (name, code) == (name, 2), said
        assert set(heavy) <= {"transformers"}, name  # which has the table of spoken languages, for the last call
        assert OTHERS[name][1] in " ".join(said.replace("│", " ").split()), said


def test_names_known_without_imports_are_those_of_the_library():
    recipes = {recipe.__name__: recipe for recipe in (*RECIPES, *HEAD_RECIPES)}
    assert set(method_names()) == recipes.keys()
    for name, recipe in recipes.items():
        assert setting_names(name) == tuple(inspect.signature(recipe).parameters)
    assert tuple(MAKERS) == BASELINES
    assert tuple(BRANCHING) == BUDGETS
    assert tuple(CLIFF_ARGUMENTS) == CLIFF_OPTIONS
    assert {name.split()[0] for name in CLIFF_METHODS} <= recipes.keys()
    assert tuple(methods_of(HostPlan())) == HOST_METHODS
    assert tuple(WORLDS) == FUZZ_WORLDS
    assert get_args(Paper) == PAPERS
    assert get_args(Guesses) == DRAFTERS


def test_every_device_of_torch_is_known_without_it():
    with pytest.raises(RuntimeError) as said:
        torch.device("other")
    listed = re.search(r"one of (.*) device type", str(said.value))
    for kind in listed[1].split(", "):
        check_device(kind)
        check_device(f"{kind}:0")
