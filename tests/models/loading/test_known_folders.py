"""Folders that were loaded before are loaded without transformers, and their texts stay the same."""

import copy
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    WhisperForCausalLM,
)

from specbeam.core.caches.folders import cache_folder
from specbeam.core.measure.saved_figures import weights_key
from specbeam.errors import BadCheckpoint, BadPrompt
from specbeam.models.loading import known_folders
from specbeam.models.loading.language_models import language_model
from specbeam.models.pair import BUNDLED
from specbeam.models.stand_ins import StandInModel, StandInTokenizer
from tests.support import tiny_sources
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tokenizer_kinds import KINDS, tokenizer_of

PROMPT = [5, 6, 7]
# Neither these nor what they import is needed for a text from a folder that was loaded before.
UNNEEDED = ("transformers", "accelerate", "httpcore2", "huggingface_hub", "PIL", "sympy", "triton")
LETTERS = (
    "abc XYZ.,;'\"-_0123456789 \t\n",
    "äöüßéèñçøÅ ﬁﬂ½²",
    "жзийклмнопрстуф АБВ",
    "αβγδε ΩΣ",
    "שלום עולם مرحبا بالعالم",
    "你好世界狗在跑。日本語かな한국어",
    "हिन्दी தமிழ் ไทย",
    "e\u0301a\u0308\u200b\u200d\ufeff\xa0\u3000",
    "🙂😀👩‍👩‍👧🇩🇪\U0001f3f3",
)

# Kinds of tokenizers that transformers cannot write to files, or not read from them.
WITHOUT_FILES = {"written in Python", "slow", "slow, cleaned up", "slow, joined otherwise"}


@pytest.fixture
def folder(tmp_path):
    """The folder of a tiny Llama."""
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def held_by(pair, name="target_model"):
    return vars(pair)[name]


def text_of(pair, **options):
    return sb.generate(pair, PROMPT, seed=3, max_new_tokens=12, **options)[0].tokens


def loaded_twice(folder, **options):
    """Return the pairs of a first and a second load."""
    return [sb.load(folder, tokenizer=False, **options) for _ in range(2)]


def test_a_text_from_a_folder_that_was_loaded_before_needs_no_transformers():
    sb.load("bundled")
    code = (
        "import sys, specbeam as sb\n"
        "pair = sb.load('bundled')\n"
        "text = sb.generate(pair, 'Ein Hund', seed=1, max_new_tokens=4)[0].text\n"
        f"print(text == ''.join(sb.stream(pair, 'Ein Hund', seed=1, max_new_tokens=4)), "
        f"*[name for name in {UNNEEDED} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_the_command_line_writes_a_text_without_transformers():
    sb.load("bundled")
    code = (
        "import sys\n"
        "from specbeam.doors.cli.main import main\n"
        "sys.argv = ['specbeam', 'generate', 'Ein Hund', '--max-new-tokens', '2']\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    print(*[name for name in {UNNEEDED} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


# transformers loads these each time: they have several tables of angles, experts that it joins, or no compiled forward.
OTHERS = ("gemma3", "mixtral", "qwen3_moe", "olmoe", "phi")


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_second_load_are_those_of_the_first(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    first, second = loaded_twice(tmp_path)
    assert isinstance(held_by(first), PreTrainedModel)
    assert isinstance(held_by(second), StandInModel) == (family not in OTHERS)
    assert weights_key(held_by(second)) == weights_key(held_by(first))
    assert text_of(second) == text_of(first)
    assert repr(second) == repr(first)


def texts_of_sources(pair, family):
    options = {"seed": 3, "max_new_tokens": 10}
    found = sb.generate(pair, tiny_sources.sources(family), sb.speculative_beam_search(3, depth=2), **options)
    return [one.tokens for one in found]


@pytest.mark.parametrize("family", sorted(tiny_sources.FAMILIES.keys() - {"blenderbot"}))
def test_texts_of_sources_after_a_second_load_are_those_of_the_first(family, tmp_path):
    """Of a target and its draft, which both read the source."""
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_sources.tiny_reader(family, seed=seed, layers=2 - seed).save_pretrained(tmp_path / name)
    first, second = loaded_twice(tmp_path / "target", draft=tmp_path / "draft")
    assert isinstance(held_by(first), PreTrainedModel)
    assert isinstance(held_by(second), StandInModel)
    assert isinstance(held_by(second, "draft_model"), StandInModel)
    assert weights_key(held_by(second)) == weights_key(held_by(first))
    assert texts_of_sources(second, family) == texts_of_sources(first, family)
    assert repr(second) == repr(first)
    assert not held_by(second).is_replaced
    assert isinstance(second.target_model, PreTrainedModel)
    assert texts_of_sources(second, family) == texts_of_sources(first, family)


def test_a_source_beyond_the_table_of_positions_is_refused_as_before(tmp_path):
    tiny_sources.tiny_reader("marian", max_position_embeddings=12).save_pretrained(tmp_path)
    refusals = []
    for pair in loaded_twice(tmp_path):
        with pytest.raises(BadPrompt, match="12") as refused:
            sb.generate(pair, [[*range(3, 17)]], sb.beam_search(2), max_new_tokens=4)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_the_encoder_of_a_stand_in_is_that_of_transformers_when_it_is_called(tmp_path):
    tiny_sources.tiny_reader("t5").save_pretrained(tmp_path)
    first, second = loaded_twice(tmp_path)
    tokens = torch.tensor([[5, 6, 7, 8]])
    expected = first.target.encoder.module(input_ids=tokens)[0]
    torch.testing.assert_close(second.target.encoder.module(input_ids=tokens)[0], expected)
    assert held_by(second).is_replaced


@pytest.mark.parametrize("kind", ["whisper", "decoder alone"])
def test_a_known_listener_takes_a_new_draft_with_its_encoder(kind, tmp_path):
    target = tiny_sources.tiny_reader("whisper")
    target.save_pretrained(tmp_path / "target")
    draft = tiny_sources.tiny_reader("whisper", seed=2, layers=1)
    draft.get_encoder().load_state_dict(target.get_encoder().state_dict())
    if kind == "decoder alone":
        alone = WhisperForCausalLM(draft.config)
        alone.model.decoder.load_state_dict(draft.get_decoder().state_dict())
        alone.proj_out.load_state_dict(draft.proj_out.state_dict())
        draft = alone
    draft.save_pretrained(tmp_path / "draft")
    both = sb.load(tmp_path / "target", draft=tmp_path / "draft", tokenizer=False)
    expected = texts_of_sources(both, "whisper")
    for folder in (cache_folder("folders") or tmp_path).iterdir():
        folder.unlink()
    sb.load(tmp_path / "target", tokenizer=False)
    for _ in range(2):
        pair = sb.load(tmp_path / "target", draft=tmp_path / "draft", tokenizer=False)
        assert isinstance(held_by(pair), StandInModel)
        assert texts_of_sources(pair, "whisper") == expected


@pytest.mark.parametrize("make", [lambda: tiny("llama"), lambda: tiny_sources.tiny_reader("whisper")])
def test_a_folder_that_was_loaded_for_another_engine_is_loaded_by_transformers(make, tmp_path):
    make().save_pretrained(tmp_path)
    plain = sb.load(tmp_path, tokenizer=False, engine="plain")
    sb.load(tmp_path, tokenizer=False, engine="compiled")
    stand_in = known_folders.model_at_hand(tmp_path, "auto", torch.device("cpu"), may_map=True)
    assert isinstance(stand_in, StandInModel)
    lm = language_model(stand_in, engine="plain")
    assert lm.engine == "plain"
    assert isinstance(lm.given_model, PreTrainedModel)
    assert lm.given_model is stand_in.whole()
    assert type(lm) is type(plain.target)


@pytest.mark.parametrize("how", ["replaced", "moved", "gone"])
def test_the_object_of_files_that_changed_since_is_not_read(how, tmp_path, monkeypatch):
    """The pair decodes on with the weights that it has; a path stays that of the first load if the process moves."""
    folder = tmp_path / "model"
    tiny("llama").save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    first, second = loaded_twice("model")
    expected = text_of(first)
    if how == "moved":
        monkeypatch.chdir("/")
        assert isinstance(second.target_model, PreTrainedModel)
    else:
        other = tmp_path / "other"
        tiny("llama", seed=9).save_pretrained(other)
        shutil.rmtree(folder)
        if how == "replaced":
            other.rename(folder)
        with pytest.raises(BadCheckpoint, match=r"have changed since they were loaded.*load the pair again"):
            repr(second.target_model)
    assert text_of(second) == text_of(first) == expected


def test_what_is_set_in_the_generation_config_of_a_stand_in_counts_on(folder):
    _, pair = loaded_twice(folder)
    config = copy.deepcopy(pair.generation_config)
    assert config.to_dict() == pair.generation_config.to_dict()
    pair.generation_config.eos_token_id = 17
    assert pair.eos == (17,)
    assert pair.target_model.generation_config.eos_token_id == 17
    assert pair.eos == (17,)


def test_a_chat_template_in_a_folder_of_its_own_is_seen(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    tokenizer.save_pretrained(tmp_path)
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    sb.load(tmp_path)
    assert isinstance(vars(sb.load(tmp_path))["tokenizer"], StandInTokenizer)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("{{ messages[0]['content'] }}!")
    assert not isinstance(vars(sb.load(tmp_path))["tokenizer"], StandInTokenizer)


def test_weights_in_mapped_files_have_a_stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    first, second = loaded_twice(tmp_path)
    assert held_by(second).dtype == torch.bfloat16
    assert text_of(second) == text_of(first)


def test_a_draft_has_a_stand_in(folder, tmp_path):
    tiny("llama", seed=1).save_pretrained(tmp_path / "draft")
    first, second = loaded_twice(folder, draft=tmp_path / "draft")
    assert isinstance(held_by(second, "draft_model"), StandInModel)
    assert weights_key(held_by(second)) == weights_key(held_by(first))
    assert text_of(second, method="dsbd") == text_of(first, method="dsbd")


def test_the_tokens_of_a_draft_are_compared_by_stand_ins(tmp_path, monkeypatch):
    shutil.copytree(BUNDLED / "target", tmp_path / "draft")
    for _ in range(2):
        first = sb.load(BUNDLED / "target", draft=tmp_path / "draft")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    second = sb.load(BUNDLED / "target", draft=tmp_path / "draft")
    assert second.draft.shared is first.draft.shared is None
    assert text_of(second) == text_of(first)


def test_the_objects_of_a_pair_are_those_of_transformers():
    sb.load("bundled")
    pair = sb.load("bundled")
    assert isinstance(held_by(pair), StandInModel)
    assert isinstance(pair.target_model, PreTrainedModel)
    assert pair.target_model is pair.target_model is pair.target.model
    assert isinstance(pair.draft_model, PreTrainedModel)
    assert isinstance(pair.tokenizer, PreTrainedTokenizerBase)
    assert pair.tokenizer is pair.tokenizer


def test_changes_of_the_objects_count_from_then_on(folder):
    _, pair = loaded_twice(folder)
    before = text_of(pair)
    pair.target_model.generation_config.eos_token_id = before[3]
    assert text_of(pair) == before[: before.index(before[3]) + 1]


def test_a_changed_file_is_read_again(folder):
    loaded_twice(folder)
    GenerationConfig(eos_token_id=9).save_pretrained(folder)
    assert sb.load(folder, tokenizer=False).eos == (9,)
    tiny("llama", seed=4).save_pretrained(folder)
    changed = sb.load(folder, tokenizer=False)
    assert isinstance(held_by(changed), PreTrainedModel)
    assert torch.equal(changed.target_model.lm_head.weight, tiny("llama", seed=4).lm_head.weight)


def test_a_broken_file_is_reported_after_a_good_load(folder):
    loaded_twice(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        sb.load(folder, tokenizer=False)


def test_an_unchecked_load_is_not_remembered(folder):
    sb.load(folder, tokenizer=False, check=False)
    assert isinstance(held_by(sb.load(folder, tokenizer=False)), PreTrainedModel)


def test_other_options_load_the_model_with_transformers(folder):
    loaded_twice(folder)
    for options in ({"quantize": "int8"}, {"engine": "plain"}, {"dtype": "float32"}, {"kv": "bfloat16"}):
        assert isinstance(held_by(sb.load(folder, tokenizer=False, **options)), PreTrainedModel), options


def test_a_stand_in_whose_numbers_differ_is_noticed(folder):
    first, second = loaded_twice(folder)
    stand_in = held_by(second)
    assert known_folders.difference(stand_in, first.target_model) == ""
    norm = stand_in.get_submodule("model.layers.1.input_layernorm").weight
    norm.data[30] += 1e-6
    assert known_folders.difference(stand_in, first.target_model)


def random_texts(count, seed=0):
    """Return texts of mixed scripts, some with special tokens in them."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = ["".join(rng.choices(rng.choice(LETTERS), k=rng.randrange(1, 12))) for _ in range(rng.randrange(1, 6))]
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(["", "", "<s>", "</s>", "<pad>", " <tool>", "<|x|> "]))
        yield rng.choice(["", " "]).join(parts)


def check_is_like(stand_in, tokenizer, count):
    rng = np.random.default_rng(0)
    for text in random_texts(count):
        for adds in (True, False):
            tokens = tokenizer(text, add_special_tokens=adds)["input_ids"]
            assert stand_in(text, add_special_tokens=adds)["input_ids"] == tokens
        noise = rng.integers(0, len(tokenizer), 9).tolist()
        for ids in (tokens, noise):
            for skips in (True, False):
                assert stand_in.decode(ids, skip_special_tokens=skips) == tokenizer.decode(
                    ids, skip_special_tokens=skips
                )
    assert stand_in.get_vocab() == tokenizer.get_vocab()
    assert len(stand_in) == len(tokenizer)
    for name in ("all_special_ids", "eos_token_id", "unk_token_id", "added_tokens_decoder", "chat_template"):
        assert getattr(stand_in, name) == getattr(tokenizer, name), name


def test_the_stand_in_of_the_bundled_tokenizer_encodes_and_decodes_the_same():
    sb.load("bundled")
    stand_in = held_by(sb.load("bundled"), "tokenizer")
    assert isinstance(stand_in, StandInTokenizer)
    check_is_like(stand_in, AutoTokenizer.from_pretrained(BUNDLED / "target"), 2000)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITHOUT_FILES])
def test_a_tokenizer_has_a_stand_in_if_and_only_if_they_agree(kind, tmp_path):
    shutil.copy(BUNDLED / "target" / "config.json", tmp_path)
    tokenizer_of(kind).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    known_folders.tokenizer_at_hand(tmp_path)
    found = known_folders.tokenizer_at_hand(tmp_path)
    has_stand_in = tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces
    assert isinstance(found, StandInTokenizer) == has_stand_in
    if has_stand_in:
        check_is_like(found, tokenizer, 100)


def test_chats_are_written_by_the_tokenizer_of_transformers(tmp_path):
    shutil.copytree(BUNDLED / "target", tmp_path / "model")
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    pairs = [sb.load(tmp_path / "model") for _ in range(2)]
    assert isinstance(held_by(pairs[1], "tokenizer"), StandInTokenizer)
    chat = [{"role": "user", "content": "Ein Hund"}]
    texts = [sb.generate(pair, chat, seed=1, max_new_tokens=6)[0].text for pair in pairs]
    assert texts[0] == texts[1]
