"""Folders that are broken, foreign or hostile: each is refused by a sentence that names what is wrong, and none in silence."""

import pytest
import torch

import specbeam as sb
from specbeam.errors import SpecbeamError
from tests.models.checkpoints.damage import (
    UP,
    WEIGHTS,
    all_of,
    also,
    as_type,
    config,
    copied,
    cut,
    entry,
    gone,
    header,
    header_size,
    in_both_shards,
    number,
    pickled,
    runs_code,
    shard_at,
    sharded,
    text,
    twice,
    without,
)
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

NAN = float("nan")
ONES = torch.ones(32)
NO_WEIGHTS = gone(WEIGHTS)
NOTHING = gone(WEIGHTS, "config.json")
LORA = '{"peft_type": "LORA", "base_model_name_or_path": "some/base"}'
MLX = {"group_size": 64, "bits": 4}

WEIGHTS_TABLE = {
    "no head": (without("lm_head.weight"), ["lacks lm_head.weight"]),
    "no layer's matrix": (without(UP), [f"lacks {UP}"]),
    "a bias too many": (
        also(model__layers__0__self_attn__q_proj__bias=ONES),
        ["holds model.layers.0.self_attn.q_proj.bias"],
    ),
    "a classifier's head": (also(score__weight=ONES[None]), ["holds score.weight"]),
    "a tower without a configuration": (also(vision_tower__x__weight=ONES), ["holds vision_tower.x.weight"]),
    "more layers than it says": (config(num_hidden_layers=1), ["holds model.layers.1"]),
    "fewer layers than it says": (config(num_hidden_layers=3), ["lacks model.layers.2"]),
    "another vocabulary": (config(vocab_size=72), ["embed_tokens.weight is [61, 32]", "[72, 32]"]),
    "another width": (config(hidden_size=64), ["[61, 32]", "[61, 64]"]),
    "another inner width": (config(intermediate_size=96), ["mlp.up_proj.weight is [48, 32]", "[96, 32]"]),
    "a head tied that is nowhere": (
        all_of(config(tie_word_embeddings=True), without("lm_head.weight", "model.embed_tokens.weight")),
        ["lacks", "embed_tokens.weight"],
    ),
    "NaN": (number(NAN), [f"{UP} holds NaN"]),
    "infinity": (number(-torch.inf), [f"{UP} holds infinite numbers"]),
    "NaN in bfloat16": (all_of(as_type(torch.bfloat16), number(NAN)), [f"{UP} holds NaN"]),
    "NaN in a pickle": (pickled(lambda held: held | {UP: held[UP] * NAN}), [f"{UP} holds NaN"]),
    "int8": (as_type(torch.int8), [f"{UP} is stored as I8"]),
    "int64": (as_type(torch.int64), [f"{UP} is stored as I64"]),
    "booleans": (as_type(torch.bool), [f"{UP} is stored as BOOL"]),
    "complex numbers": (as_type(torch.complex64), [f"{UP} is stored as C64"]),
    "float8": (as_type(torch.float8_e4m3fn), [f"{UP} is stored as F8_E4M3"]),
    "integers in a pickle": (pickled(lambda held: held | {UP: held[UP].int()}), [f"{UP} is stored as int32"]),
    "cut in its numbers": (cut(WEIGHTS, -100), [f"{WEIGHTS} cannot be read"]),
    "cut in its header": (cut(WEIGHTS, 200), [f"{WEIGHTS} cannot be read"]),
    "cut in its length": (cut(WEIGHTS, 5), [f"{WEIGHTS} cannot be read"]),
    "empty": (cut(WEIGHTS, 0), [f"{WEIGHTS} cannot be read", "it is empty"]),
    "junk": (text(WEIGHTS, b"\x93\x01" * 999), [f"{WEIGHTS} cannot be read"]),
    "a pointer of Git LFS": (
        text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid x"),
        ["Git LFS", "git lfs pull"],
    ),
    "a web page": (text(WEIGHTS, "<!DOCTYPE html><html>"), ["web page"]),
    "a header of 2**63 bytes": (header_size(2**63), [f"{WEIGHTS} cannot be read"]),
    "a header of a gigabyte": (header_size(2**30), [f"{WEIGHTS} cannot be read"]),
    "a header that is no JSON": (header(lambda held: b"[1, 2" + b" " * 99), [f"{WEIGHTS} cannot be read"]),
    "a header that is a list": (header(lambda held: b"[]"), [f"{WEIGHTS} cannot be read"]),
    "numbers beyond the file": (entry(data_offsets=[0, 2**40]), [f"{WEIGHTS} cannot be read"]),
    "numbers before themselves": (entry(data_offsets=[64, 0]), [f"{WEIGHTS} cannot be read"]),
    "numbers that overlap": (entry(data_offsets=[0, 48 * 32 * 4]), [f"{WEIGHTS} cannot be read"]),
    "a shape beyond its numbers": (entry(shape=[2**31, 2**31]), [f"{WEIGHTS} cannot be read"]),
    "a negative shape": (entry(shape=[-48, -32]), [f"{WEIGHTS} cannot be read"]),
    "a type of no name": (entry(dtype="F1"), [f"{WEIGHTS} cannot be read"]),
    "a name two times": (header(twice), [f"{WEIGHTS} cannot be read", f"holds {UP} twice"]),
    "a name in two files": (in_both_shards, ["both hold"]),
    "a file that is missing": (shard_at("model-00009.safetensors"), ["holds no model-00009.safetensors"]),
    "a file above the folder": (shard_at("../model.safetensors"), ["'../model.safetensors'", "inside the folder"]),
    "a file anywhere": (shard_at("/etc/passwd"), ["'/etc/passwd'", "inside the folder"]),
    "a file of Windows": (shard_at("C:\\x\\model.safetensors"), ["inside the folder"]),
    "a file that is a number": (shard_at(7), ["the file of", "is 7"]),
    "an index without a map": (sharded(lambda index: {"metadata": {}}), ["index.json cannot be read", "weight_map"]),
    "an index that is a list": (sharded(lambda index: [index]), ["holds list", "JSON object"]),
    "a map that is a list": (sharded(lambda index: {"weight_map": ["a"]}), ["weight_map is list"]),
    "an index that is no JSON": (sharded(lambda index: "{"), ["index.json cannot be read"]),
    "a pickle that runs code": (runs_code, ["pytorch_model.bin cannot be read", "runs no code"]),
    "a pickle cut short": (all_of(pickled(), cut("pytorch_model.bin", 900)), ["pytorch_model.bin cannot be read"]),
    "a pickle of a list": (pickled(lambda held: [*held.values()]), ["does not hold tensors by name"]),
    "the state of a training": (pickled(lambda held: {"model": held, "step": 3}), ["'model' is dict", "training"]),
    "weights that the configuration names elsewhere": (
        config(transformers_weights="../x.safetensors"),
        ["inside the folder"],
    ),
}

CONFIG_TABLE = {
    "no JSON": (text("config.json", "{'a': 1"), ["config.json cannot be read"]),
    "empty": (text("config.json", ""), ["config.json cannot be read", "empty"]),
    "bytes": (text("config.json", b"\xff\xfe\x00"), ["config.json cannot be read"]),
    "a list": (text("config.json", "[1]"), ["config.json holds list"]),
    "a thousand brackets": (text("config.json", "[" * 100_000), ["config.json cannot be read"]),
    "no model_type": (config(model_type=...), ["no model_type"]),
    "a model_type of a number": (config(model_type=7), ["no model_type"]),
    "an unknown model_type": (config(model_type="nonesuch"), ["'nonesuch'", "does not know"]),
    "code of its own": (
        config(model_type="nonesuch", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}),
        ["custom code", "trust_remote_code"],
    ),
    "a negative width": (config(hidden_size=-32), ["hidden_size -32"]),
    "a width of text": (config(hidden_size="wide"), ["config.json", "hidden_size"]),
    "no words": (config(vocab_size=0), ["vocab_size 0"]),
    "heads that do not divide": (config(num_attention_heads=6), ["config.json", "32", "6"]),
    "heads that are not shared evenly": (
        config(num_key_value_heads=3),
        ["num_attention_heads 4 and num_key_value_heads 3"],
    ),
    "a head of no numbers": (config(head_dim=0), ["head_dim 0"]),
    "positions beyond all memory": (config(model_type="opt", max_position_embeddings=10**12), ["config.json"]),
    "a width of a billion": (config(hidden_size=10**9), ["config.json"]),
    "a vocabulary of a billion": (config(vocab_size=10**9), ["[61, 32]", "[1000000000, 32]"]),
    "a billion layers": (config(num_hidden_layers=10**9), ["num_hidden_layers 1000000000"]),
    "an inner width of a billion": (config(intermediate_size=10**9), ["[48, 32]", "[1000000000, 32]"]),
    "weights beyond all memory": (config(hidden_size=2**40, vocab_size=2**40), ["config.json"]),
    "no such activation": (config(hidden_act="nonesuch"), ["nonesuch"]),
    "rounding that is a list": (config(quantization_config=[4]), ["quantization_config", "JSON object"]),
    "rounding by a method of no name": (config(quantization_config={"quant_method": "nonesuch"}), ["'nonesuch'"]),
    "MLX": (config(quantization=MLX), ["MLX", "4 bits"]),
    "MLX in another field": (config(quantization_config=MLX), ["MLX", "4 bits"]),
    "a generation_config.json that is no JSON": (
        text("generation_config.json", "{"),
        ["generation_config.json cannot"],
    ),
    "a generation_config.json that is a list": (
        text("generation_config.json", "[]"),
        ["generation_config.json holds list"],
    ),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), ["classifies texts"]),
    "an encoder": (
        config(model_type="bert", architectures=["BertModel"], num_key_value_heads=...),
        ["bidirectional encoder", "'bert'"],
    ),
    "a model of pictures": (
        config(model_type="vit", architectures=["ViTModel"]),
        ["'vit'", "no class that generates text"],
    ),
}

FOLDER_TABLE = {
    "an empty folder": (gone(WEIGHTS, "config.json", "generation_config.json"), ["config.json", "it is empty"]),
    "no weights": (NO_WEIGHTS, ["no weights", WEIGHTS]),
    "an adapter": (
        all_of(NOTHING, text("adapter_config.json", LORA)),
        ["no weights of the adapter", "adapter_model.safetensors"],
    ),
    "an adapter in its model's folder": (text("adapter_config.json", LORA), ["no weights of the adapter"]),
    "an adapter that is no JSON": (text("adapter_config.json", "{"), ["adapter_config.json cannot be read"]),
    "GGUF": (all_of(NOTHING, text("m-Q4_K_M.gguf", "GGUF")), ["GGUF", "m-Q4_K_M.gguf"]),
    "GGUF with a configuration": (all_of(NO_WEIGHTS, text("m.gguf", "GGUF")), ["GGUF", "m.gguf"]),
    "ONNX": (all_of(NO_WEIGHTS, text("onnx/model.onnx", "x")), ["ONNX", "model.onnx"]),
    "TensorFlow": (all_of(NO_WEIGHTS, text("tf_model.h5", "x")), ["TensorFlow", "tf_model.h5"]),
    "Flax": (all_of(NO_WEIGHTS, text("flax_model.msgpack", "x")), ["Flax", "flax_model.msgpack"]),
    "Meta": (all_of(NOTHING, text("consolidated.00.pth", "x"), text("params.json", "{}")), ["Meta's own format"]),
    "diffusers": (all_of(NOTHING, text("model_index.json", "{}")), ["diffusers"]),
    "sentence-transformers": (text("modules.json", "[]"), ["sentence-transformers"]),
    "a training's folder": (all_of(NOTHING, text("checkpoint-20/config.json", "{}")), ["checkpoint-20"]),
}
TABLE = {
    f"{kind}: {name}": row
    for kind, table in (("weights", WEIGHTS_TABLE), ("config", CONFIG_TABLE), ("folder", FOLDER_TABLE))
    for name, row in table.items()
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return copied(saved, tmp_path / "model")


def refusal_of(load):
    """The sentence by which something is refused."""
    with pytest.raises(SpecbeamError) as raised:
        load()
    return str(raised.value)


def check_says(said, words):
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name", TABLE)
def test_a_target_is_refused_by_name(name, folder):
    damage, words = TABLE[name]
    damage(folder)
    check_says(refusal_of(lambda: sb.load(folder, tokenizer=False)), words)
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize("name", TABLE)
def test_a_draft_is_refused_by_name(name, folder):
    damage, words = TABLE[name]
    damage(folder)
    target = tiny("llama")
    check_says(refusal_of(lambda: sb.load(target, folder, tokenizer=False, check=False)), words)
    assert not (folder / "was_run").exists()


def test_a_model_in_good_order_is_loaded(folder):
    damaged = {
        "shards": sharded(),
        "a pickle": pickled(),
        "links": as_links,
        "a list of codes": text("codes.json", "["),
    }
    wanted = tiny("llama").state_dict()
    for name, damage in damaged.items():
        here = copied(folder, folder.parent / name)
        damage(here)
        found = sb.load(here, tokenizer=False, check=False).target_model.state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


def as_links(folder):
    """Files that are links into another folder, as those of the hub's cache are."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for place, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(place))
        file.symlink_to(blobs / str(place))


PATHS = {
    "m.gguf": ["GGUF file"],
    "model.safetensors": ["a file, not a folder"],
    "nothing/here": ["there is no folder"],
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_no_folder_says_what_it_is(name, tmp_path):
    for file in ("m.gguf", "model.safetensors"):
        (tmp_path / file).write_bytes(b"GGUF")
    for given in (tmp_path / name, str(tmp_path / name)):
        check_says(refusal_of(lambda given=given: sb.load(given)), PATHS[name])
        check_says(refusal_of(lambda given=given: sb.load(tiny("llama"), given, tokenizer=False)), PATHS[name])


@pytest.mark.parametrize("name", ["no-such/model", "no such model", "a/b/c/d", "", "nul\0"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_says_so(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal_of(lambda: sb.load(name))
    check_says(said, ["give a folder that save_pretrained wrote"])


def test_nobody_is_asked_whether_code_may_run(folder, monkeypatch):
    """Transformers asks on the terminal, where there is one."""
    config(auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M", "AutoTokenizer": ["t.T", None]})(folder)
    text("tokenizer_config.json", '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["t.T", null]}}')(folder)
    text("m.py", "raise SystemExit")(folder)
    monkeypatch.setattr("builtins.input", lambda *said: pytest.fail("asked"))
    sb.load(folder, tokenizer=False, check=False)  # transformers has code of its own for this kind
    check_says(refusal_of(lambda: sb.load(folder)), ["could not load a tokenizer", "custom code"])
    config(model_type="own")(folder)
    for load in (
        lambda: sb.load(folder),
        lambda: sb.load(tiny("llama"), folder),
        lambda: sb.load(folder, device_map="cpu"),
    ):
        refusal_of(load)


TOKENIZERS = {
    "no JSON": (text("tokenizer.json", "{"), ["could not load a tokenizer"]),
    "a list": (text("tokenizer.json", "[]"), ["could not load a tokenizer"]),
    "an empty object": (text("tokenizer.json", "{}"), ["could not load a tokenizer"]),
    "no file": (text("config.json.bak", ""), ["could not load a tokenizer"]),
    "a list of settings": (text("tokenizer_config.json", "[]"), ["tokenizer_config.json holds list"]),
    "settings that are no JSON": (text("tokenizer_config.json", "{"), ["tokenizer_config.json cannot be read"]),
    "a template of bytes": (
        all_of(text("tokenizer_config.json", "{}"), text("chat_template.jinja", b"\xff\xfe")),
        ["could not load a tokenizer"],
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_broken_tokenizer_is_refused(name, folder):
    damage, words = TOKENIZERS[name]
    damage(folder)
    check_says(refusal_of(lambda: sb.load(folder, check=False)), words)
    check_says(refusal_of(lambda: sb.load(tiny("llama"), tokenizer=folder)), words)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_without_words_is_left_out_with_a_warning(kind, folder):
    text("tokenizer_config.json", f'{{"tokenizer_class": "{kind}"}}')(folder)
    with pytest.warns(UserWarning, match=r"has no words.*tokenizer\.json"):
        pair = sb.load(folder, check=False)
    assert pair.tokenizer is None


def _sources(family):
    return {
        "no matrix": (without("model.encoder.layers.0.fc1.weight"), ["lacks model.encoder.layers.0.fc1.weight"]),
        "no words": (without("model.shared.weight", "model.decoder.embed_tokens.weight"), ["lacks", "embed_tokens"]),
        "more layers": (config(encoder_layers=1), ["holds model.encoder.layers.1"]),
        "another width": (config(d_model=64), ["32]", "64]"]),
        "NaN": (number(NAN, "model.decoder.layers.0.fc1.weight"), ["model.decoder.layers.0.fc1.weight holds NaN"]),
        "int8": (as_type(torch.int8, "model.decoder.layers.0.fc1.weight"), ["is stored as I8"]),
        "cut": (cut(WEIGHTS, -50), [f"{WEIGHTS} cannot be read"]),
        "no configuration": (gone("config.json"), ["no config.json"]),
        "a billion layers": (config(decoder_layers=10**9), ["decoder_layers 1000000000"]),
    }


@pytest.mark.parametrize("name", _sources(""))
@pytest.mark.parametrize("family", ["marian", "whisper"])
def test_an_encoder_decoder_is_refused_by_name(family, name, tmp_path):
    damage, words = _sources(family)[name]
    tiny_reader(family).save_pretrained(tmp_path)
    damage(tmp_path)
    check_says(refusal_of(lambda: sb.load(tmp_path, tokenizer=False)), words)
    check_says(refusal_of(lambda: sb.load(tiny_reader(family), tmp_path, tokenizer=False, check=False)), words)


@pytest.mark.parametrize("name", ["weights: NaN", "weights: infinity", "weights: NaN in bfloat16", "weights: no head"])
def test_large_models_that_stay_in_their_files_are_read_as_closely(name, folder, monkeypatch):
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)
    damage, words = TABLE[name]
    damage(folder)
    check_says(refusal_of(lambda: sb.load(folder, tokenizer=False)), words)
