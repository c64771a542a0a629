"""The further drafts of `multi_draft`: each is loaded and checked as the draft of a pair is, or refused by a sentence."""

import warnings

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam import errors
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.table import TableLM
from tests.support import words
from tests.support.remembered import tiny_memory
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import sources, tiny_reader

PROMPTS = [[5, 9, 60, 12], [7, 8, 9, 7, 8]]
RUN = {"max_new_tokens": 10, "eos_token_id": []}


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama"), tiny("llama", seed=1), tokenizer=words.tokenizer())


def saved(folder, tokenizer=None, seed=3, **changes):
    tiny("llama", seed=seed, **changes).save_pretrained(folder)
    (tokenizer or words.tokenizer()).save_pretrained(folder)
    return folder


def greedy_of(pair, method, prompts=PROMPTS):
    return [one.tokens for one in sb.generate(pair, prompts, method, temperature=0, seed=0, **RUN)]


def check_greedy(pair, method, prompts=PROMPTS):
    assert greedy_of(pair, method, prompts) == [
        one.tokens for one in sb.generate(pair, prompts, sb.greedy(), max_new_tokens=10, eos_token_id=[])
    ]


def models_of(pair, method):
    return method.parts(pair.target, pair.draft).drafter.models


@pytest.mark.parametrize(
    "form", ["object", "folder", "path", "language model", "nothing", "the target", "the draft twice"]
)
def test_further_drafts_come_from_wherever_drafts_come_from(pair, tmp_path, form):
    folder = saved(tmp_path)
    others = {
        "object": [tiny("llama", seed=3)],
        "folder": [str(folder)],
        "path": [folder],
        "language model": [HuggingFaceLM(tiny("llama", seed=3))],
        "nothing": [],
        "the target": [pair.target_model, pair.target],
        "the draft twice": [pair.draft_model, pair.draft],
    }[form]
    method = sb.multi_draft(others, (2, 1))
    models = models_of(pair, method)
    assert len({id(lm) for lm in (*models, pair.target)}) == len(models) + 1
    assert all(a is b for a, b in zip(models, models_of(pair, method), strict=True))  # loaded once
    check_greedy(pair, method)
    check_greedy(pair, method, [*PROMPTS, *PROMPTS])


def test_a_further_draft_whose_weights_have_changed_is_read_anew(pair):
    other = tiny("llama", seed=3)
    method = sb.multi_draft([other], (2, 1))
    before = models_of(pair, method)[1]
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
    assert models_of(pair, method)[1] is not before


@pytest.mark.parametrize("rows", [80, 64])
def test_further_drafts_may_have_padded_vocabularies(pair, tmp_path, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        method = sb.multi_draft([saved(tmp_path, vocab_size=rows)], (2, 1))
        _, other = models_of(pair, method)
    assert other.vocab == pair.target.vocab
    assert other.engine == "compiled"
    assert other.shared is not None
    check_greedy(pair, method)


def test_further_drafts_with_other_tokens_are_refused(pair, tmp_path):
    turned = words.tokenizer()
    from tokenizers import Tokenizer

    text = turned.backend_tokenizer.to_str().replace('"a":4,', '"a":5,').replace('"b":5,', '"b":4,')
    turned._tokenizer = Tokenizer.from_str(text)
    with pytest.raises(errors.VocabularyMismatch, match="token 4 is 'a' for the target and 'b' for the draft"):
        greedy_of(pair, sb.multi_draft([saved(tmp_path / "turned", turned)]))
    with pytest.raises(errors.VocabularyMismatch, match="draft has 50 tokens, target has 61"):
        greedy_of(pair, sb.multi_draft([tiny("llama", vocab_size=50)]))
    with pytest.raises(errors.VocabularyMismatch, match="draft has 50 tokens, target has 61; pass the model object"):
        greedy_of(pair, sb.multi_draft([HuggingFaceLM(tiny("llama", vocab_size=50))]))


def test_further_drafts_that_do_not_honour_masks_are_refused(pair):
    broken = tiny("llama", seed=3)
    own = broken.forward

    def forward(*args, attention_mask=None, **named):
        return own(*args, **named)

    broken.forward = forward
    with pytest.raises(errors.UnsupportedModel):
        greedy_of(pair, sb.multi_draft([broken]))


@pytest.mark.parametrize(
    ("others", "error", "said"),
    [
        ("folder", errors.BadSetting, "others is 'folder'; it must be a list"),
        ([7], errors.BadSetting, "a further draft is 7"),
        ([None], errors.BadSetting, "a further draft is None"),
        (["int8"], errors.BadSetting, r"give it to load\(draft='int8'\)"),
        (["swift"], errors.BadSetting, r"give it to load\(draft='swift'\)"),
        (["mtp"], errors.NotSupported, "mtp is a draft head"),
        ([torch.nn.Linear(2, 2)], errors.NotSupported, "Linear is a draft head"),
        (["./nowhere/at/all"], errors.MissingFile, "no folder"),
    ],
)
def test_what_is_no_further_draft_is_refused_by_a_sentence(pair, others, error, said):
    with pytest.raises(error, match=said):
        greedy_of(pair, sb.multi_draft(others))


def test_a_list_of_models_without_a_target_of_load_takes_language_models(pair):
    law = TableLM(lambda path: np.array([0.5, 0.25, 0.25]))
    twin = TableLM(law._law)
    assert sb.multi_draft([twin]).parts(law, TableLM(law._law)).drafter.models[1] is twin
    with pytest.raises(errors.NotSupported, match="only for a target made by `load`"):
        sb.multi_draft([tiny("llama")]).parts(law, twin)
    with pytest.raises(errors.NotSupported, match="the same TableLM twice"):
        sb.multi_draft([twin]).parts(law, twin)


def test_the_positions_of_further_drafts_bound_a_text(pair):
    method = sb.multi_draft([tiny("llama", seed=3, max_position_embeddings=12)], (2, 1))
    (one,) = sb.generate(pair, [[5, 9, 60, 12]], method, eos_token_id=[], max_new_tokens=8, seed=0)
    assert len(one.tokens) == 8
    with pytest.raises(errors.BadPrompt, match="12 positions"):
        sb.generate(pair, [[5, 9, 60, 12]], method, eos_token_id=[], max_new_tokens=9, seed=0)


def test_readers_of_sources_draft_for_readers_of_sources(pair):
    target = tiny_reader("t5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loaded = sb.load(target, tiny_reader("t5", seed=1))
    for other in (tiny_reader("t5", seed=2), tiny_reader("bart", seed=2), tiny("llama"), target):
        method = sb.multi_draft([other], (2, 1))
        check_greedy(loaded, method, sources("t5"))
    check_greedy(loaded, sb.multi_draft((), (2, 1)), sources("t5"))
    with pytest.raises(errors.NotSupported, match="reads sources, and the target LlamaForCausalLM continues prompts"):
        greedy_of(pair, sb.multi_draft([tiny_reader("t5")]))
    with pytest.raises(errors.NotSupported, match="has an encoder, and the target is decoder-only"):
        greedy_of(pair, sb.multi_draft([loaded.target]))


def test_a_pair_with_memory_takes_further_drafts(pair):
    remembering = sb.hmt(pair, draft_memory=(MemoryPlan(4, 1), tiny_memory(pair.draft_model)))
    check_greedy(remembering, sb.multi_draft([tiny("llama", seed=3)], (2, 1)))
