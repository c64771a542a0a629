"""Loading pairs: side by side in threads, and options that are refused before anything is read."""

import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import specbeam as sb
from specbeam.errors import BadSetting, MissingFile, MissingPackage, VocabularyMismatch
from specbeam.models.pair import BUNDLED
from tests.support.checking import refused
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader


def test_pairs_load_side_by_side_in_threads():
    with ThreadPoolExecutor(4) as pool:
        pairs = list(pool.map(lambda _: sb.load("bundled"), range(4)))
    texts = {sb.generate(pair, "Tom ist hier.", "greedy", max_new_tokens=4)[0].text for pair in pairs}
    assert len(texts) == 1
    assert not any(weight.is_meta for pair in pairs for weight in pair.target_model.parameters())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize", "int3"),
        ("quantize_draft", "int3"),
        ("share_from", 0),
        ("share_from", True),
        ("share_from", "never"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(option, value):
    with refused(f"{option} is {value!r}"):
        sb.load("no/such/folder", **{option: value})


def test_a_draft_that_is_not_there_is_said_before_the_target_is_loaded(monkeypatch):
    monkeypatch.setattr("specbeam.models.pair.model_at_hand", None)
    with pytest.raises(MissingFile, match="there is no folder /nowhere"):
        sb.load(BUNDLED / "target", "/nowhere")


@pytest.mark.parametrize(
    ("draft", "what"),
    [
        (None, "there is none"),
        ("swift", "the draft is the target without some sublayers"),
        (sb.Skipping(), "the draft is the target without some sublayers"),
        ("mtp", "the draft is a head"),
    ],
)
@pytest.mark.parametrize("options", [{"quantize_draft": "int8"}, {"draft_vocab": 100}])
def test_options_of_draft_models_need_one(options, draft, what):
    """They used to be ignored without a draft."""
    (name,) = options
    with refused(f"{name} is for draft models, and {what}"):
        sb.load(BUNDLED / "target", draft, **options)


def test_one_model_object_has_one_language_model_for_all_threads():
    tokenizer = sb.load("bundled").tokenizer
    model = sb.load(BUNDLED / "draft", tokenizer=tokenizer).target_model
    del model._specbeam
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: sb.load(model, tokenizer=tokenizer).target, range(4)))
    assert len(set(map(id, found))) == 1


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A folder with the model of a translator whose tokenizer is files of SentencePiece, as they were published."""
    folder = tmp_path_factory.mktemp("marian")
    tiny_reader("marian").save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"source_lang": "de", "target_lang": "en"}')
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(b"")
    (folder / "vocab.json").write_text("{}")
    return folder


def test_a_tokenizer_of_sentencepiece_says_what_to_install(pieces, monkeypatch):
    monkeypatch.setattr("specbeam.models.loading.tokenizers.find_spec", lambda module: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    with pytest.raises(MissingPackage, match=r"source\.spm.*pip install sentencepiece protobuf"):
        sb.load(pieces)


def test_a_tokenizer_that_fails_with_sentencepiece_there_says_why(pieces, monkeypatch):
    monkeypatch.setattr("specbeam.models.loading.tokenizers.find_spec", lambda module: object())
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    with pytest.raises(MissingFile, match="Unrecognized configuration class"):
        sb.load(pieces)


def test_a_broken_tokenizer_is_not_blamed_on_sentencepiece(pieces, monkeypatch, tmp_path):
    for file in pieces.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("specbeam.models.loading.tokenizers.find_spec", lambda module: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _fail)
    with pytest.raises(MissingFile, match="Unrecognized configuration class"):
        sb.load(tmp_path)


def _fail(name, **options):
    """Fail as transformers does for a tokenizer whose package is missing."""
    raise ValueError("Unrecognized configuration class")


def test_a_translator_with_sentencepiece_files_translates(pieces, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text("ein Hund und eine Katze laufen um das Haus und in den Garten\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "made"), vocab_size=40, pad_id=1, eos_id=2, unk_id=0, bos_id=-1,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    made = (tmp_path / "made.model").read_bytes()
    reader = sentencepiece.SentencePieceProcessor(model_proto=made)
    names = {reader.id_to_piece(number): number for number in range(len(reader))}
    for file in pieces.iterdir():
        (tmp_path / file.name).write_bytes(made if file.suffix == ".spm" else file.read_bytes())
    (tmp_path / "vocab.json").write_text(json.dumps(names))
    pair = sb.load(tmp_path)
    (one,) = sb.generate(pair, "ein Hund", sb.beam_search(2), max_new_tokens=6)
    assert pair.tokenizer("ein Hund").input_ids[-1] == 2
    assert one.text == pair.tokenizer.decode(one.tokens, skip_special_tokens=True)


def test_a_model_in_place_of_a_pair_is_told_to_load():
    model = sb.load("bundled").draft_model
    calls = [
        lambda: inspect.unwrap(sb.generate)(model, "Tom ist hier."),
        lambda: next(inspect.unwrap(sb.stream)(model, "Tom ist hier.")),
        lambda: next(inspect.unwrap(sb.turns_of)(model, "Tom ist hier.")),
        lambda: inspect.unwrap(sb.best)(model, "Tom ist hier."),
        lambda: inspect.unwrap(sb.lite_search)(model, "Tom ist hier.", lambda texts: [0.5 for _ in texts]),
        lambda: inspect.unwrap(sb.transcribe)(model, np.zeros(1600, dtype=np.float32)),
    ]
    for call in calls:
        with pytest.raises(BadSetting, match=r"pair is of type LlamaForCausalLM; give the pair that sb\.load returned"):
            call()


def test_bundled_names_the_models_and_the_tokenizer_that_come_with_specbeam(recwarn):
    pair = sb.load("bundled")
    other = sb.load(pair.target_model, draft="bundled", tokenizer="bundled")
    assert other.tokenizer.get_vocab() == pair.tokenizer.get_vocab()
    assert other.draft_model.num_parameters() == pair.draft_model.num_parameters()
    assert not recwarn.list
    stranger = tiny("llama", seed=1, vocab_size=61)
    with pytest.raises(VocabularyMismatch, match="first difference: token"):
        sb.load(stranger, draft="bundled", tokenizer=another_tokenizer())


def another_tokenizer():
    """A tokenizer of 61 words, none of them in the bundled vocabulary at the same place."""
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(61)}, unk_token="word0"))
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sb.load("bundled", quantise="int8"), r"load\(\) has no option quantise \(did you mean quantize\?\)"),
        (lambda: sb.load("bundled", torch_dtype="float32"), r"no option torch_dtype \(did you mean dtype\?\)"),
        (lambda: sb.hmt("bundled", memry=3), r"hmt\(\) has no option memry \(did you mean memory\?\)"),
        (
            lambda: inspect.unwrap(sb.Method.with_parts)(sb.dsbd(4), "prompt_lookup"),
            "must be a part; names are for sb.dsbd and sb.speculative_beam_search",
        ),
        (lambda: sb.dsbd(4).with_parts(drafer=3), r"with_parts\(\) has no part drafer \(did you mean drafter\?\)"),
        (
            lambda: inspect.unwrap(sb.load)(3),
            r"target is 3 of type int; give a path, a hub id, 'bundled' or a model of",
        ),
        (lambda: inspect.unwrap(sb.load)("bundled", [1]), r"draft is \[1\] of type list; give a path"),
        (lambda: inspect.unwrap(sb.load)("bundled", tokenizer=3), "tokenizer is 3 of type int; .* or a tokenizer of"),
    ],
)
def test_wrong_arguments_have_errors_that_name_them(call, message):
    with pytest.raises(BadSetting, match=message):
        call()
