"""What a model needs besides tokens: the states of an encoder, rows given by embedding."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.decode import Decoder, decode
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BadPrompt, NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.models.table import TableLM
from tests.support.seats import moved, random_forest, random_turn, seat
from tests.support.tiny_models import tiny

SIZE = 32


def captioner(seed):
    """A decoder that looks at an image, as that of a captioning model does."""
    return tiny("gpt2", seed=seed, add_cross_attention=True)


@pytest.fixture(scope="module")
def captions():
    target, draft = captioner(1), captioner(2)
    return Pair(target, draft, None, HuggingFaceLM(target, engine="plain"), HuggingFaceLM(draft, engine="plain"))


def image(seed, patches=5):
    return torch.randn(1, patches, SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def session_of(pair, prompt, method, pictures=None, tokens=12, **options):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": []} | options, None)
    (session,) = Request.of(pair, [prompt], method, settings, 3).sessions
    if pictures is not None:
        session.context = {lm: {"encoder_hidden_states": pictures} for lm in (pair.target, pair.draft)}
    return session


def beams(session):
    assert session.failure is None
    found = sorted(session.hypotheses(), key=lambda one: -one.loglik)
    return [one.tokens for one in found]


@pytest.mark.parametrize(
    "method", [sb.beam_search(3), sb.speculative_beam_search(3, depth=2)], ids=lambda one: one.name
)
def test_a_captioner_writes_what_transformers_writes_of_each_image(captions, method):
    pictures = [image(1), image(2), image(3, patches=9)]
    sessions = [session_of(captions, [3, 4], method, one) for one in pictures]
    list(decode(captions.target, sessions))
    texts = [beams(session)[0] for session in sessions]
    for picture, text in zip(pictures, texts, strict=True):
        theirs = captions.target_model.generate(
            torch.tensor([[3, 4]]), encoder_hidden_states=picture, num_beams=3, max_new_tokens=12, do_sample=False,
            eos_token_id=None, attention_mask=torch.ones(1, 2, dtype=torch.int64),
        )  # fmt: skip
        assert text == theirs[0, 2:].tolist()
    assert len({tuple(text) for text in texts}) > 1


def test_drafts_of_a_model_that_sees_no_image_change_nothing(captions):
    texts = []
    for method, given in ((sb.beam_sampling(3), (captions.target,)), (sb.dsbd(3, 4, 2, "fixed"), (captions.target,))):
        session = session_of(captions, [3, 4], method)
        session.context = {lm: {"encoder_hidden_states": image(1)} for lm in given}
        list(decode(captions.target, [session]))
        texts.append(beams(session))
    assert texts[0] == texts[1]


def test_samples_of_one_image_share_their_prompt_and_those_of_another_do_not(captions, monkeypatch):
    pictures, prompt = [image(1), image(2)], [(7 * place) % 60 for place in range(80)]
    sessions = [session_of(captions, prompt, sb.sampling(), pictures[number // 2]) for number in range(4)]
    alone = [session_of(captions, prompt, sb.sampling(), pictures[number // 2]) for number in range(4)]
    copy = Mock(side_effect=captions.target._copy_beginning)
    monkeypatch.setattr(captions.target, "_copy_beginning", copy)
    list(decode(captions.target, sessions))
    assert copy.call_count == 2
    for (leader, cache), _ in copy.call_args_list:
        assert all(leader.context[name] is value for name, value in cache.context.items())
    for session, one in zip(sessions, alone, strict=True):
        list(decode(captions.target, [one]))
        assert session.settled == one.settled


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"pixels": image(1)}, "holds pixels, which GPT2LMHeadModel does not take"),
        ({"input_ids": image(1)}, "holds input_ids, which GPT2LMHeadModel does not take"),
        ({"encoder_hidden_states": image(1)[0]}, "their first dimension must be 1"),
        (image(1), "context is Tensor; GPT2LMHeadModel takes keyword arguments"),
    ],
)
def test_a_context_that_the_model_does_not_take_is_refused(captions, context, message):
    session = session_of(captions, [3, 4], sb.greedy())
    session.context = {captions.target: context}
    with pytest.raises(NotSupported, match=message):
        Decoder(captions.target).add(session)


def test_the_compiled_forward_refuses_a_context_besides_tokens():
    model = tiny("llama")
    pair = Pair(model, None, None, HuggingFaceLM(model, engine="compiled"), None)
    session = session_of(pair, [3, 4], sb.greedy())
    session.context = {pair.target: {"encoder_hidden_states": image(1)}}
    with pytest.raises(NotSupported, match=r"takes no context besides tokens.*engine='plain'"):
        Decoder(pair.target).add(session)
    table = TableLM([0.5, 0.5])
    session.context = {table: {}}
    with pytest.raises(NotSupported, match="TableLM takes tokens only"):
        Decoder(table).add(session)


# Rows by embedding.


def soft_prompt(rows=3, seed=5):
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 0.5


def embedded_logits(model, paths, vectors):
    rows = []
    with torch.inference_mode():
        for path in paths:
            embeds = [
                vectors[-1 - token] if token < 0 else model.get_input_embeddings()(torch.tensor(token))
                for token in path
            ]
            rows.append(model(inputs_embeds=torch.stack(embeds)[None]).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in company"])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize(
    ("engine", "family"),
    [("plain", "llama"), ("plain", "gpt2"), ("plain", "gemma"), ("compiled", "llama")],
)
def test_rows_behind_a_soft_prompt_are_those_of_its_embeddings(engine, family, chunk, alone):
    model = tiny(family)
    lm, rng, vectors = HuggingFaceLM(model, chunk, engine), np.random.default_rng(3), soft_prompt()
    seats = [seat([-1, -2, -3, 5, 6, 7])]
    seats[0].vectors = {lm: vectors}
    if not alone:
        seats.append(seat([3, 4, 5]))
    for _ in range(4):
        forests = [random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 4) for one in seats]
        for one, forest, found in zip(seats, forests, lm.extend(seats, forests), strict=True):
            roots = forest.root_of(np.arange(forest.size))
            paths = [one.texts[root] + forest.path(node) for node, root in enumerate(roots)]
            expected = embedded_logits(model, paths, vectors)
            torch.testing.assert_close(found.logits, expected, atol=2e-4, rtol=2e-4)
            turn = random_turn(rng, forest, lm.vocab)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)


@pytest.mark.parametrize("engine", ["plain", "compiled"])
@pytest.mark.parametrize(
    "method", [sb.greedy(), sb.dsbd(1, 2, 3, "fixed"), sb.prompt_lookup()], ids=lambda one: one.name
)
def test_a_soft_prompt_writes_what_transformers_writes_behind_it(engine, method):
    models = [tiny("llama", seed=seed, vocab_size=64) for seed in (1, 2)]
    pair = Pair(*models, None, *(HuggingFaceLM(model, engine=engine) for model in models))
    vectors = soft_prompt()
    options = {} if method.greedy else {"temperature": 0}
    session = session_of(pair, [5, 6, 5], method, **options)
    session.prompt = [-1, -2, -3, *session.prompt]
    session.pad([])
    session.vectors = {pair.target: vectors, pair.draft: vectors}
    list(decode(pair.target, [session], ahead=8))
    embeds = torch.cat([vectors, models[0].get_input_embeddings()(torch.tensor([5, 6, 5]))])[None]
    theirs = models[0].generate(inputs_embeds=embeds.detach(), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert beams(session)[0] == theirs[0].tolist()


def test_vectors_of_another_size_and_prompts_that_end_with_one_are_refused():
    model = tiny("llama")
    pair = Pair(model, None, None, HuggingFaceLM(model, engine="plain"), None)
    session = session_of(pair, [3, 4], sb.greedy())
    session.vectors = {pair.target: torch.zeros(2, 7)}
    with pytest.raises(NotSupported, match=r"vectors has shape \[2, 7\]; LlamaForCausalLM reads rows of 32"):
        Decoder(pair.target).add(session)
    session.vectors, session.prompt = {pair.target: torch.zeros(2, SIZE)}, [3, -1]
    with pytest.raises(BadPrompt, match="last token of a prompt is given as an embedding"):
        Decoder(pair.target).add(session)


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_rows_by_embedding_that_there_are_not_are_refused(engine):
    model = tiny("llama")
    lm, none, few = HuggingFaceLM(model, engine=engine), seat([-1, 4]), seat([-4, 4])
    few.vectors = {lm: soft_prompt(rows=3)}
    for one, message in (
        (none, "session.vectors has none for LlamaForCausalLM"),
        (few, "has token -4, and vectors has only 3 rows"),
    ):
        with pytest.raises(NotSupported, match=message):
            lm.extend([one], [Forest.rooted([4])])
    assert lm.caches == []
