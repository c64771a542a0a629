"""Streams: the pieces of a text are exactly the text, whatever the tokenizer, and nothing is taken back."""

import random
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TextIteratorStreamer

import specbeam as sb
from specbeam.doors.grammar.spelling import text_of_tokens
from specbeam.doors.growing_text import GrowingText, OpenEnd, cleaned_length, open_end_of, unsent
from specbeam.errors import BrokenPart
from tests.support.tiny_models import tiny
from tests.support.tokenizer_kinds import KINDS, tokenizer_of


def texts(tokenizer, growing, tokens, steps=1):
    """What is settled after every few tokens."""
    return [growing.settled(tokens[:end]) for end in range(0, len(tokens) + 1, steps)]


def check_settled(found, whole):
    for shorter, longer in pairwise(found):
        assert longer.startswith(shorter)
    assert whole.startswith(found[-1]), (found[-1], whole)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, derandomize=True, max_examples=150, database=None)
@given(data=st.data())
def test_no_further_token_changes_what_is_settled(kind, data):
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    steps = data.draw(st.integers(1, 4))
    shows_special = data.draw(st.booleans())
    whole = tokenizer.decode(tokens, skip_special_tokens=not shows_special)
    check_settled(texts(tokenizer, GrowingText(tokenizer, shows_special), tokens, steps), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_settle_also_under_a_constraint(kind):
    """As many sequences again by a seed, of pieces that stand close to each other in the vocabulary, such as bytes."""
    tokenizer = tokenizer_of(kind)
    dice = random.Random(kind)
    for _ in range(60):
        low = dice.randrange(len(tokenizer))
        high = min(low + dice.choice([4, 12, len(tokenizer)]), len(tokenizer))
        tokens = [dice.randrange(low, high) for _ in range(dice.randrange(50))]
        check_settled(
            texts(tokenizer, GrowingText(tokenizer), tokens), tokenizer.decode(tokens, skip_special_tokens=True)
        )
        exact = text_of_tokens(tokenizer, tokens)
        check_settled(texts(tokenizer, GrowingText(tokenizer, is_exact=True), tokens), exact)


# What people see first: usual texts arrive token by token, and what is held back is as little as can be.


def spelled(kind, *names):
    return [tokenizer_of(kind).convert_tokens_to_ids(name) for name in names]


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("byte fallback as in Llama", ["▁yes", "end", "▁a", "."], ["yes", "end", " a", "."]),
        ("byte fallback as in Gemma", ["▁yes", "<0xC3>", "<0xA9>", "end", "▁a"], [" yes", "", "", "éend", " a"]),
        ("byte fallback as in Gemma", ["a", "<0xF0>", "<0x9F>", "<0xFF>", "end"], ["a", "", "", "", "\ufffd\ufffd\ufffdend"]),
        ("byte fallback as in Gemma", ["a", "<0xC3>", "<0xA9>", "<|x|>", "<0xFF>"], ["a", "", "", "", ""]),
        ("byte level", ["a", "Ã", "©", "Ġa", "Ã", "b"], ["a", "", "é", " a", "", "\ufffdb"]),
        ("byte level", ["a", "ÿ", "ÿ", "b"], ["a", "", "", "\ufffd\ufffdb"]),
        ("marks", ["▁yes", "▁a", "<0xC3>", "."], ["yes", " a", "<0xC3>", "."]),
        ("marks, cleaned up", ["▁yes", "do", "▁.", "end", "▁", "'s"], [" yes", "do", "", ".end", "", ""]),
        ("marks, said to be cleaned up", ["▁yes", "▁.", "▁s"], ["yes", " .", " s"]),
        ("word pieces", ["yes", "do", "##n't", "."], ["yes", " do", "n't", "."]),
        ("words, cleaned up", ["do", "yes", ",", "a"], ["do", " yes", "", ", a"]),
        ("ends of words", ["a</w>", "yes</w>", "a", "a</w>b"], ["a", " yes", " a", "a"]),
        ("slow bytes", "aé", ["a", "", "é"]),
        ("slow, joined otherwise", ["yes", "a"], ["", ""]),
    ],
)  # fmt: skip
def test_as_little_is_held_back_as_can_be(kind, names, expected):
    tokenizer = tokenizer_of(kind)
    tokens = (
        tokenizer(names, add_special_tokens=False)["input_ids"] if isinstance(names, str) else spelled(kind, *names)
    )
    assert None not in tokens
    assert tokenizer.unk_token_id not in tokens
    found = texts(tokenizer, GrowingText(tokenizer), tokens)
    assert [longer[len(shorter) :] for shorter, longer in pairwise(found)] == expected


def test_what_was_sent_and_is_no_beginning_of_the_text_is_an_error():
    assert unsent("abc", "ab") == "c"
    with pytest.raises(BrokenPart, match="and the final text differs"):
        unsent("abc", "ac")


def test_cleaning_up_stops_where_it_cannot_reach():
    assert [cleaned_length(text) for text in ("yes", "yes ", "yes a", "yes 'v", "yes 've", "yes se", "", " ")] == [
        3, 3, 5, 3, 7, 3, 0, 0
    ]  # fmt: skip


def test_a_tokenizer_with_a_decode_of_its_own_gives_its_text_at_the_end():
    class Own(type(tokenizer_of("letters"))):
        def decode(self, *arguments, **more):
            return super().decode(*arguments, **more)[::-1]

    tokenizer = Own(tokenizer_object=tokenizer_of("letters").backend_tokenizer)
    assert GrowingText(tokenizer).settled([5, 6, 7]) == ""
    patched = Own.__base__(tokenizer_object=tokenizer_of("letters").backend_tokenizer)
    assert GrowingText(patched).settled([5, 6, 7]) != ""
    patched.decode = lambda tokens, **more: str(sum(tokens))
    assert GrowingText(patched).settled([5, 6, 7]) == ""


def test_the_tokenizers_of_usual_models_are_known():
    """As transformers makes them without files; Whisper's and CLIP's do more to a text than their decoders."""
    expected = {
        "Llama": OpenEnd(has_byte_runs=True),
        "Gemma": OpenEnd(has_byte_runs=True),
        "GPT2": OpenEnd(has_half_characters=True),
        "Qwen2": OpenEnd(has_half_characters=True),
        "T5": OpenEnd(),
        "Nllb": OpenEnd(),
        "Bert": OpenEnd(),
        "OpenAIGPT": OpenEnd(marks_last=True),
        "Whisper": OpenEnd(is_known=False),
        "CLIP": OpenEnd(is_known=False),
    }
    assert {name: open_end_of(getattr(transformers, f"{name}Tokenizer")()) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "names"),
    [("byte level", ["a", "Ġa", "Ã", "©", "b"]), ("byte level", ["ÿ", "a"]), ("byte level", ["ÿ"]), ("words", ["a"])],
)
def test_a_long_text_is_not_decoded_anew_with_each_token(kind, names, monkeypatch):
    """Neither one of words, nor one of bytes that are no characters."""
    tokenizer = tokenizer_of(kind)
    growing = GrowingText(tokenizer)
    decode = growing._decode
    sizes = []
    monkeypatch.setattr(growing, "_decode", lambda tokens: sizes.append(len(tokens)) or decode(tokens))
    tokens = spelled(kind, *names) * 100
    assert tokenizer.decode(tokens).startswith(texts(tokenizer, growing, tokens)[-1])
    assert sum(sizes) < 40 * len(tokens)


# Through a model that writes what it is told.


def pair_of(kind):
    tokenizer = tokenizer_of(kind)
    return sb.load(tiny("llama", vocab_size=len(tokenizer)), tokenizer=tokenizer)


def allows(choices):
    """A rule by which the token after `n` new ones is one of these."""
    return lambda _, path: choices[min(len(path) - 1, len(choices) - 1)]


def choices_of(kind, seed, count):
    """Some tokens for each place, bytes among them more often than others."""
    dice = random.Random(f"{kind} {seed}")
    size = len(tokenizer_of(kind))
    low = dice.randrange(size)
    near = [*range(low, min(low + 9, size))]
    return [dice.sample([*near, *range(size)], count) for _ in range(24)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_stream_are_the_text_of_generate(kind, monkeypatch):
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    pair = pair_of(kind)
    for seed, (method, count) in enumerate(
        [(sb.greedy(), 1), (sb.sampling(), 2), (sb.beam_search(3), 2), (sb.beam_sampling(2), 3)]
    ):
        options = {
            "max_new_tokens": 24,
            "eos_token_id": [],
            "prefix_allowed_tokens_fn": allows(choices_of(kind, seed, count)),
            "seed": seed,
        }
        (whole,) = sb.generate(pair, [3], method, **options)
        pieces = [*sb.stream(pair, [3], method, **options)]
        assert "".join(pieces) == whole.text
        assert "" not in pieces


def test_a_usual_text_arrives_token_by_token(monkeypatch):
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    usual = {
        "byte level": ["a", "Ġa", "b", "c"],
        "byte fallback as in Llama": ["▁yes", "end", "▁a", "."],
        "marks": ["▁yes", "end", "▁a", "."],
        "word pieces": ["yes", "end", "do", "##n't"],
        "words": ["yes", "end", "do", "."],
        "slow": ["yes", "end", "do", "."],
    }
    for kind, names in usual.items():
        tokens = spelled(kind, *names) * 5
        rule = allows([[token] for token in tokens])
        pieces = [*sb.stream(pair_of(kind), [3], "greedy", max_new_tokens=20, prefix_allowed_tokens_fn=rule)]
        assert len(pieces) == 20, kind


@pytest.mark.parametrize("kind", ["byte level", "byte fallback as in Llama", "words, cleaned up", "slow"])
def test_a_streamer_of_transformers_writes_what_it_writes_behind_transformers(kind):
    """Piece by piece, with the prompt and without."""
    pair = pair_of(kind)
    for seed, skip in enumerate([True, False]):
        rule = allows(choices_of(kind, seed, 1))
        theirs, ours = [
            TextIteratorStreamer(pair.tokenizer, skip_prompt=skip, skip_special_tokens=True, timeout=60)
            for _ in range(2)
        ]
        common = {"max_new_tokens": 24, "prefix_allowed_tokens_fn": rule}
        prompt = torch.tensor([[3]])
        pair.target_model.generate(
            prompt, streamer=theirs, do_sample=False, pad_token_id=0, eos_token_id=None, **common
        )
        sb.generate(pair, [3], "greedy", streamer=ours, eos_token_id=[], **common)
        assert [*theirs] == [*ours]


def test_a_form_streams_exactly(monkeypatch):
    """Of bytes that make characters together, in a text that a regular expression asks for."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    pair = pair_of("byte level")
    for method in (sb.sampling(), sb.beam_sampling(3)):
        options = {"max_new_tokens": 30, "regex": "(é|你|b){4,7}!", "eos_token_id": 2, "seed": 4}
        (whole,) = sb.generate(pair, [3], method, **options)
        pieces = [*sb.stream(pair, [3], method, **options)]
        assert "".join(pieces) == whole.text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_form_that_ends_with_a_token_of_text_streams_without_it(monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    pair = pair_of("byte level")
    (end,) = spelled("byte level", "!")
    for seed in range(4):
        options = {"max_new_tokens": 12, "regex": "[abc]{2,6}", "eos_token_id": end, "seed": seed}
        (whole,) = sb.generate(pair, [3], "sampling", **options)
        assert whole.tokens[-1] == end
        assert "!" not in whole.text
        assert "".join(sb.stream(pair, [3], "sampling", **options)) == whole.text


def test_stop_strings_and_special_tokens_stream_exactly(monkeypatch):
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    for kind in ("byte fallback as in Llama", "letters, cleaned up", "slow"):
        names = ["yes", "<|x|>", "a", "<tool>", "do", ".", "<|x|>", "end", "!"]
        rule = allows([[token] for token in spelled(kind, *names)])
        options = {"max_new_tokens": 9, "eos_token_id": [], "prefix_allowed_tokens_fn": rule, "stop_strings": ["end"]}
        (whole,) = sb.generate(pair_of(kind), [3], "greedy", **options)
        assert "".join(sb.stream(pair_of(kind), [3], "greedy", **options)) == whole.text
        assert whole.text.endswith("end")
