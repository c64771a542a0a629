"""Which tokens a draft shares with its target, wherever both come from."""

import copy
import pickle
import warnings

import pytest
from tokenizers import Tokenizer
from transformers import AddedToken

import specbeam as sb
from specbeam import errors
from tests.support import words
from tests.support.tiny_models import tiny

WORDS = len(words.tokenizer())  # 61
SPECIAL = AddedToken("<|im_end|>", special=True, normalized=False)


def saved(folder, rows, tokenizer, seed=0, layers=2):
    """The path of a model with a tokenizer beside it, if there is one."""
    tiny("llama", seed=seed, vocab_size=rows, num_hidden_layers=layers).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def with_added(*tokens):
    tokenizer = words.tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def respelled(*pairs):
    """The tokenizer with other spellings: 'a":4' becomes 'a":5' and so on."""
    tokenizer = words.tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    tokenizer._tokenizer = Tokenizer.from_str(text)
    return tokenizer


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def known_of(pair):
    return None if pair.draft.shared is None else pair.draft.shared.known.tolist()


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(80, 64), (64, 80), (64, 61), (61, 64), (99, 62)])
def test_padded_vocabularies_draft_what_both_have_words_for(quiet, tmp_path, target_rows, draft_rows):
    target = saved(tmp_path / "target", target_rows, words.tokenizer())
    draft = saved(tmp_path / "draft", draft_rows, words.tokenizer(), seed=1, layers=1)
    pair = sb.load(target, draft)
    assert known_of(pair) == [token < WORDS for token in range(target_rows)]
    assert pair.draft.vocab == pair.target.vocab == target_rows
    assert pair.draft.engine == "compiled"
    assert pair.draft.shared.stand_in == 3  # <unk>


def test_equal_vocabularies_are_left_alone(quiet, tmp_path):
    target = saved(tmp_path / "target", 64, words.tokenizer())
    pair = sb.load(target, saved(tmp_path / "draft", 64, words.tokenizer(), seed=1))
    assert pair.draft.shared is None
    assert len(pair.draft.runner.decoder.model.read_as) == 0
    assert len(pair.draft.runner.decoder.model.logits_bias) == 0


@pytest.mark.parametrize("larger", ["target", "draft", "both"])
def test_added_tokens_of_one_model_are_never_drafted(quiet, tmp_path, larger):
    """Those of both, in rows that both have, differ in no ordinary token: they are other names of special ones."""
    more = {
        "target": (with_added("<a>", "<b>"), words.tokenizer()),
        "draft": (words.tokenizer(), with_added("<a>", "<b>")),
    }
    own, other = more.get(larger, (with_added("<a>", "<b>"), with_added("<a>")))
    target = saved(tmp_path / "target", 64, own)
    pair = sb.load(target, saved(tmp_path / "draft", 64, other, seed=1))
    common = WORDS + (larger == "both")
    assert known_of(pair) == [token < common for token in range(64)]


def test_the_order_of_a_vocabulary_says_nothing(quiet, tmp_path):
    turned = words.tokenizer()
    vocab = dict(reversed(list(turned.get_vocab().items())))
    turned.get_vocab = lambda: vocab
    draft = saved(tmp_path / "draft", 64, words.tokenizer(), seed=1)
    assert sb.load(tiny("llama", vocab_size=64), draft, tokenizer=turned).draft.shared is None


@pytest.mark.parametrize("form", ["folders", "objects", "paths"])
@pytest.mark.parametrize("draft_rows", [64, 72])
def test_ordinary_tokens_that_differ_are_refused(tmp_path, form, draft_rows):
    target = saved(tmp_path / "target", 64, words.tokenizer())
    draft = saved(tmp_path / "draft", draft_rows, respelled(('"a":4,', '"a":5,'), ('"b":5,', '"b":4,')))
    given = {
        "folders": lambda: (target, draft),
        "paths": lambda: (tmp_path / "target", tmp_path / "draft"),
        "objects": lambda: (sb.load(target).target_model, sb.load(draft).target_model),
    }
    with pytest.raises(
        errors.VocabularyMismatch, match=r"the tokens differ .*token 4 is 'a' for the target and 'b' for"
    ):
        sb.load(*given[form]())


def test_other_added_words_at_one_id_are_refused(tmp_path):
    target = saved(tmp_path / "target", 64, with_added("hello"))
    draft = saved(tmp_path / "draft", 64, with_added("world"))
    with pytest.raises(errors.VocabularyMismatch, match="token 61 is 'hello' for the target and 'world' for the draft"):
        sb.load(target, draft)


@pytest.mark.parametrize("other", [AddedToken("<|eot|>", special=True), AddedToken("<|eot|>", special=False)])
@pytest.mark.parametrize("form", ["folders", "objects"])
def test_special_tokens_with_other_names_warn(tmp_path, form, other):
    target = saved(tmp_path / "target", 64, with_added(SPECIAL))
    draft = saved(tmp_path / "draft", 64, with_added(other), seed=1)
    if form == "objects":
        target, draft = (sb.load(folder).target_model for folder in (target, draft))
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"1 of the target's special tokens .*token 61 is '<\|im_end\|>' .*'<\|eot\|>'"
        ):
            pair = sb.load(target, draft)
        assert pair.draft.shared is None


def test_named_special_tokens_of_the_vocabulary_itself_may_have_other_names(tmp_path):
    other = respelled(('"</s>":1,', '"<end>":1,'), ('"content":"</s>"', '"content":"<end>"'))
    other.eos_token = "<end>"
    target = saved(tmp_path / "target", 64, words.tokenizer())
    with pytest.warns(UserWarning, match="token 1 is '</s>' for the target and '<end>' for the draft"):
        assert sb.load(target, saved(tmp_path / "draft", 64, other)).draft.shared is None


def test_a_given_tokenizer_is_the_one_that_is_compared(quiet, tmp_path):
    draft = saved(tmp_path / "draft", 64, words.tokenizer())
    model = tiny("llama", vocab_size=64)
    assert sb.load(model, draft, tokenizer=words.tokenizer()).draft.shared is None
    with pytest.raises(errors.VocabularyMismatch, match="token 4 is"):
        sb.load(model, draft, tokenizer=respelled(('"a":4,', '"a":5,'), ('"b":5,', '"b":4,')))


def test_models_without_their_tokenizer_in_use_are_compared_all_the_same(tmp_path):
    target = saved(tmp_path / "target", 64, words.tokenizer())
    draft = saved(tmp_path / "draft", 64, respelled(('"a":4,', '"a":5,'), ('"b":5,', '"b":4,')))
    with pytest.raises(errors.VocabularyMismatch, match="and the tokens differ"):
        sb.load(target, draft, tokenizer=False)


def test_sizes_that_differ_as_padding_does_are_taken_with_a_warning_if_nothing_can_be_compared():
    target = tiny("llama", vocab_size=64)
    with pytest.warns(UserWarning, match="draft has 56 tokens, target has 64, and without both tokenizers"):
        pair = sb.load(target, tiny("llama", vocab_size=56))
    assert known_of(pair) == [token < 56 for token in range(64)]
    with pytest.warns(UserWarning, match="draft has 80 tokens, target has 72"):
        pair = sb.load(tiny("llama", vocab_size=72), tiny("llama", vocab_size=80))
    assert known_of(pair) == [True] * 72


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(61, 50), (64, 65), (64, 72), (2048, 61), (32_001, 32_000)])
def test_other_sizes_are_refused_if_nothing_can_be_compared(target_rows, draft_rows):
    with pytest.raises(errors.VocabularyMismatch, match=f"draft has {draft_rows} tokens, target has {target_rows}"):
        sb.load(tiny("llama", vocab_size=target_rows), tiny("llama", vocab_size=draft_rows))


def test_a_tokenizer_of_one_model_tells_padding_if_all_its_words_have_rows_in_both():
    with pytest.warns(UserWarning, match="the first 66 are assumed to be the same"):
        pair = sb.load(tiny("llama", vocab_size=75), tiny("llama", vocab_size=66), tokenizer=words.tokenizer())
    assert known_of(pair) == [token < 66 for token in range(75)]


def test_a_hub_id_is_compared_as_a_folder_is(tmp_path, monkeypatch):
    from specbeam.models.loading import models, tokenizers, vocabularies

    folders = {"org/target": tmp_path / "target", "org/draft": tmp_path / "draft"}
    saved(folders["org/target"], 64, words.tokenizer())
    saved(folders["org/draft"], 72, respelled(('"a":4,', '"a":5,'), ('"b":5,', '"b":4,')))
    for module in (models, tokenizers):
        own = module.name_or_path
        monkeypatch.setattr(module, "name_or_path", lambda name, own=own: own(folders.get(str(name), name)))
    asked = []

    def on_hub(name, file, fetch):
        asked.append((name, fetch))
        return (folders[name] / file).is_file()

    monkeypatch.setattr(tokenizers, "_is_on_hub", on_hub)
    with pytest.raises(errors.VocabularyMismatch, match="token 4 is 'a' for the target and 'b' for the draft"):
        sb.load("org/target", "org/draft")
    assert set(asked) == {("org/draft", True)}
    asked.clear()
    target, draft = (sb.load(str(folder)).target_model for folder in folders.values())
    target.name_or_path, draft.name_or_path = folders
    monkeypatch.setattr(vocabularies, "read_tokenizer", lambda name, fetch: tokenizers.read_tokenizer(folders[name]))
    with pytest.raises(errors.VocabularyMismatch, match="token 4 is"):
        sb.load(target, draft)
    assert set(asked) == {("org/target", False), ("org/draft", False)}  # of objects nothing is fetched


def test_a_broken_tokenizer_of_a_draft_is_named(tmp_path):
    target = saved(tmp_path / "target", 64, words.tokenizer())
    draft = saved(tmp_path / "draft", 64, words.tokenizer())
    (tmp_path / "draft" / "tokenizer.json").write_text("{")
    with pytest.raises(errors.SpecbeamError, match="could not load a tokenizer"):
        sb.load(target, draft)


def test_a_model_that_was_compared_can_be_copied_and_pickled(quiet, tmp_path):
    draft = tiny("llama", vocab_size=64)
    sb.load(tiny("llama", vocab_size=64), draft)
    for other in (copy.deepcopy(draft), pickle.loads(pickle.dumps(draft))):
        assert sb.load(tiny("llama", vocab_size=64), other).draft.shared is None
