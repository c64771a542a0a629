"""Prompts in every container that users have: the same ids are the same prompt, and nothing else is taken for one."""

import array
import json
import re
from collections import UserDict, UserList, deque
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch.utils.data import Dataset
from transformers import BatchEncoding, BatchFeature
from transformers.pipelines.pt_utils import KeyDataset

import specbeam as sb
from specbeam.apps.jobs.answering import answer_rows, work_of
from specbeam.apps.jobs.rows import USUAL_COLUMNS, row_of
from specbeam.doors.fastest import FastestMethod
from specbeam.doors.inputs import PromptReader, as_plain, prompts_in
from specbeam.errors import BadPrompt, BadSetting, SomeFailed
from tests.support import words
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import MELS, sources, tiny_reader

PAD = 2  # of the tiny models, whose end token is 1
IDS = st.lists(st.integers(3, 60), min_size=1, max_size=9)
BEGINS = "<s>"
TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]

# Containers of one prompt.
ONE = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "iterator": iter,
    "generator": lambda ids: (token for token in ids),
    "map": lambda ids: map(int, ids),
    "values of a dict": lambda ids: dict(enumerate(ids)).values(),
    "array.array": lambda ids: array.array("i", ids),
    "numpy integers in a list": lambda ids: [np.int32(token) for token in ids],
    "tensors in a list": lambda ids: list(torch.tensor(ids)),
    "int64 array": np.array,
    "uint16 array": lambda ids: np.array(ids, dtype=np.uint16),
    "array of objects": lambda ids: np.array(ids, dtype=object),
    "tensor": torch.tensor,
    "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "uint8 tensor": lambda ids: torch.tensor(ids, dtype=torch.uint8),
    "pyarrow": pyarrow.array,
    "pyarrow chunks": lambda ids: pyarrow.chunked_array([ids]),
    "dict": lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
    "dict without a mask": lambda ids: {"input_ids": ids},
    "BatchEncoding": lambda ids: BatchEncoding({"input_ids": ids, "token_type_ids": [0] * len(ids)}),
    "UserDict of a tensor": lambda ids: UserDict(input_ids=torch.tensor(ids), attention_mask=torch.ones(len(ids))),
    "proxy": lambda ids: MappingProxyType({"input_ids": tuple(ids), "position_ids": range(len(ids))}),
    "row of a data set": lambda ids: {"prompt": ids, "label": 3},
    "row of vLLM": lambda ids: {"prompt_token_ids": ids},
}
# Containers of several prompts. Some of them fill rows with the pad token.
LISTS = {
    "lists": list,
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "iterator of iterators": lambda rows: map(iter, rows),
    "generator of arrays": lambda rows: (np.array(row) for row in rows),
    "tensors": lambda rows: [torch.tensor(row) for row in rows],
    "tensors with a row each": lambda rows: [torch.tensor([row]) for row in rows],
    "values of a dict": lambda rows: dict(enumerate(rows)).values(),
    "array of lists": lambda rows: np.array([*map(np.array, rows), None], dtype=object)[:-1],
    "pyarrow": pyarrow.array,
    "table of pyarrow": lambda rows: pyarrow.table({"prompt": rows, "id": list(range(len(rows)))}),
    "dict": lambda rows: {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]},
    "rows of a data set": lambda rows: [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows],
    "data set without an iterator": lambda rows: KeyDataset(Rows(rows), "ids"),
    "encodings": lambda rows: [BatchEncoding({"input_ids": torch.tensor([row])}) for row in rows],
    "left padding": lambda rows: encoded(rows, "left", torch.tensor),
    "right padding": lambda rows: encoded(rows, "right", np.array),
    "left padding in lists": lambda rows: encoded(rows, "left", list),
    "padding that is no token": lambda rows: encoded(rows, "right", torch.tensor, -100),
    "padding on both sides": lambda rows: encoded(padded(rows, "left")[0], "right", torch.tensor, more=2),
    "tensor without a mask": lambda rows: torch.tensor(padded(rows, "left")[0]),
    "array without a mask": lambda rows: np.array(padded(rows, "right")[0]),
    "encoding without a mask": lambda rows: BatchEncoding({"input_ids": torch.tensor(padded(rows, "left")[0])}),
}


class Rows(Dataset):
    """A data set of torch: it has no iterator."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"ids": self.rows[number]}


def padded(rows, side, pad=PAD, more=0):
    """Rows of one length, and their mask. The pad token that rows hold already is padding, too."""
    longest = max(map(len, rows)) + more
    fill = [[pad] * (longest - len(row)) for row in rows]
    pairs = zip(fill, rows, strict=True)
    both = [fill + row if side == "left" else row + fill for fill, row in pairs]
    return both, [[int(token not in (pad, PAD)) for token in row] for row in both]


def encoded(rows, side, make, pad=PAD, more=0):
    ids, mask = padded(rows, side, pad, more)
    return BatchEncoding({"input_ids": make(ids), "attention_mask": make(mask)})


def read(given, **settings):
    reader = PromptReader(**({"vocab": 61, "pad": PAD} | settings))
    return [reader.ids(one, f"prompt {number}") for number, one in enumerate(prompts_in(given))]


def beginning():
    """The characters' tokenizer, which puts the first token before every text, as those of Llama do."""
    tokenizer = words.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[(BEGINS, 0)])
    return tokenizer


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", seed=0), tokenizer=beginning(), check=False)


@pytest.fixture(scope="module")
def translator():
    return sb.load(tiny_reader("bart"), check=False)


@drawn(IDS)
@settings(max_examples=25, deadline=None)
def test_the_same_ids_in_any_container_are_the_same_prompt(ids):
    for name, make in ONE.items():
        assert read(make(ids)) == [ids], name
        assert read([make(ids), "a"][:1]) == [ids], name


@drawn(st.lists(IDS, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_the_same_lists_of_ids_in_any_container_are_the_same_prompts_without_padding(rows):
    for name, make in LISTS.items():
        assert read(make(rows)) == rows, name


@drawn(st.lists(IDS, min_size=1, max_size=3), st.sampled_from([*LISTS]))
@settings(max_examples=10, deadline=None)
def test_what_was_split_once_is_split_the_same_way_again(rows, name):
    once = prompts_in(LISTS[name](rows))
    assert read(prompts_in(once)) == rows


def through_generate(pair, make, rows):
    return [out.tokens for out in sb.generate(pair, make(rows), sb.greedy(), max_new_tokens=3)]


def through_stream(pair, make, rows):
    return ["".join(sb.stream(pair, make([row]), sb.greedy(), max_new_tokens=3)) for row in rows]


def through_a_job(pair, make, rows):
    """A row holds what can be written into a table: arrays and tensors of a block, lists, encodings."""
    made = [make([row]) for row in rows]
    fields = [dict(one) if hasattr(one, "keys") else {"prompt": as_plain(one)} for one in made]
    work = work_of(pair, sb.greedy(), 0, 2, {"max_new_tokens": 3})
    jobs = [row_of(number, one, USUAL_COLUMNS) for number, one in enumerate(fields)]
    found = {row.number: record for row, record in answer_rows(work, jobs)}
    assert not [record["error"] for record in found.values() if record["error"]]
    return [found[number]["text"] for number in range(len(rows))]


ROWS = [[5, 6, 7], [9, 30, 31, 8, 41], [12]]


@pytest.mark.parametrize("name", LISTS)
def test_prompts_in_any_container_have_the_same_texts_through_generate(pair, name):
    assert through_generate(pair, LISTS[name], ROWS) == through_generate(pair, list, ROWS)


@pytest.mark.parametrize("name", ONE)
def test_a_prompt_in_any_container_has_the_same_text_through_generate_and_stream(pair, name):
    one = lambda rows: ONE[name](rows[0])  # noqa: E731
    assert through_generate(pair, one, ROWS[:1]) == through_generate(pair, list, ROWS[:1])
    assert through_stream(pair, one, ROWS) == through_stream(pair, list, ROWS)


@pytest.mark.parametrize("name", LISTS)
def test_sources_in_any_container_have_the_same_texts(translator, name):
    """The pad token of these models is 1, so rows without a mask are filled with it."""
    rows = sources("bart")
    if name in ("tensor without a mask", "array without a mask", "encoding without a mask"):
        made = torch.tensor(padded(rows, "right", 1)[0])
        given = {"tensor": made, "array": made.numpy(), "encoding": {"input_ids": made}}[name.split()[0]]
    else:
        given = LISTS[name](rows)
    found = sb.generate(translator, given, sb.beam_search(2), max_new_tokens=4)
    expected = sb.generate(translator, rows, sb.beam_search(2), max_new_tokens=4)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.parametrize("name", ["tuples", "tensors", "array of lists", "dict", "left padding", "right padding"])
def test_rows_of_jobs_in_any_container_have_the_same_texts(pair, name):
    assert through_a_job(pair, LISTS[name], ROWS) == through_a_job(pair, list, ROWS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_tokenizer_returns_is_the_text_that_it_was_given(pair, side):
    texts = ["ab", "Hello world", "x"]
    tokenizer = pair.tokenizer
    expected = sb.generate(pair, texts, sb.greedy(), max_new_tokens=3)
    for kind in (None, "pt", "np"):
        given = tokenizer(texts, padding=True, padding_side=side, return_tensors=kind)
        found = sb.generate(pair, given, sb.greedy(), max_new_tokens=3)
        assert [(one.prompt, one.tokens) for one in found] == [(one.prompt, one.tokens) for one in expected]
    of_library = tokenizer.backend_tokenizer.encode_batch(texts)
    assert [one.prompt for one in sb.generate(pair, of_library, sb.greedy(), max_new_tokens=1)] == [
        one.prompt for one in expected
    ]
    (alone,) = sb.generate(pair, of_library[1], sb.greedy(), max_new_tokens=1)
    assert alone.prompt == expected[1].prompt


def test_a_tensor_without_a_mask_is_read_as_transformers_reads_it(pair):
    rows = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, 10], [PAD, 11, 12, 13]])
    model = pair.target_model
    written = model.generate(rows, do_sample=False, max_new_tokens=4)[:, rows.shape[1] :].tolist()
    ours = sb.generate(pair, rows, sb.greedy(), max_new_tokens=4)
    for text, one in zip(written, ours, strict=True):
        assert text[: len(one.tokens)] == one.tokens
    (kept,) = sb.generate(pair, [[PAD, PAD, 5, 6]], sb.greedy(), max_new_tokens=4)
    assert kept.prompt == [PAD, PAD, 5, 6]  # a list is what it says


def test_padding_that_may_be_text_is_not_guessed():
    unsure = {"pad": None, "unsure": (2,)}
    with pytest.raises(BadPrompt, match=r"prompt 0 begins or ends with token 2, which may be padding or text"):
        read(torch.tensor([[2, 2, 5], [6, 7, 8]]), **unsure)
    assert read(torch.tensor([[2, 5, 2]]), **unsure) == [[2, 5, 2]]  # a single row is not filled
    assert read(torch.tensor([[5, 2, 6], [6, 7, 8]]), **unsure) == [[5, 2, 6], [6, 7, 8]]
    assert read([[2, 2, 5], [6, 7, 8]], **unsure) == [[2, 2, 5], [6, 7, 8]]
    assert read({"input_ids": [[2, 2, 5], [6, 7, 8]], "attention_mask": [[0, 1, 1], [1, 1, 1]]}, **unsure)[0] == [2, 5]
    assert read(torch.tensor([[PAD, 5]]), pad=None) == [[PAD, 5]]


@pytest.mark.parametrize(
    ("of_config", "of_tokenizer", "refused"),
    [(1, "<pad>", True), (1, "</s>", True), (None, "</s>", True), (None, "<pad>", False), (2, "<unk>", False)],
)
def test_a_tensor_of_several_rows_never_keeps_its_padding(of_config, of_tokenizer, refused):
    """Neither where the pad token is the end token, nor where tokenizer and generation config name different ones."""
    model = tiny("llama")
    model.generation_config.pad_token_id = of_config
    tokenizer = words.tokenizer()
    tokenizer.pad_token = of_tokenizer
    pair = sb.load(model, tokenizer=tokenizer, check=False)
    pad = tokenizer.pad_token_id if of_config in (None, 1) else of_config
    rows = torch.tensor([[pad, pad, 5, 6], [7, 8, 9, 10]])
    if refused:
        with pytest.raises(SomeFailed, match="prompt 0 begins or ends with token"):
            sb.generate(pair, rows, sb.greedy(), max_new_tokens=1)
    else:
        assert [one.prompt for one in sb.generate(pair, rows, sb.greedy(), max_new_tokens=1)] == [[5, 6], [7, 8, 9, 10]]
    with_mask = {"input_ids": rows, "attention_mask": (rows != pad).long()}
    found = sb.generate(pair, with_mask, sb.greedy(), max_new_tokens=1)
    assert [one.prompt for one in found] == [[5, 6], [7, 8, 9, 10]]


BROKEN = {
    "a hole": ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, "attention_mask is 0 at token 1"),
    "a hole without a mask": (torch.tensor([[5, PAD, 7]]), "token 1 is the pad token 2"),
    "a shorter mask": (
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1]]},
        "3 token ids and 2 numbers in attention_mask",
    ),
    "a mask of fewer rows": ({"input_ids": [[5], [6]], "attention_mask": [[1]]}, "2 rows of input_ids and 1 of"),
    "a mask of another shape": ({"input_ids": [5, 6], "attention_mask": [[1, 1]]}, "shapes must be the same"),
    "a mask of other numbers": ({"input_ids": [5, 6], "attention_mask": [0, -3.5]}, "must have only 0 and 1"),
    "nothing but padding": ({"input_ids": [[5, 6]], "attention_mask": [[0, 0]]}, "prompt 0 is empty"),
    "no ids": ({"input_ids": []}, "prompt 0 is empty"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 2, 3)}, "inputs_embeds"),
    "embeddings and ids": (BatchEncoding({"input_ids": [5], "inputs_embeds": [[0.1]]}), "inputs_embeds"),
    "a picture": ({"text": "a", "pixel_values": torch.zeros(1, 3, 2, 2)}, "pixel_values"),
    "labels": ({"input_ids": [5], "labels": [6]}, "labels, which would be ignored"),
    "token types": ({"input_ids": [5, 6], "token_type_ids": [0, 1]}, "token_type_ids that are not 0"),
    "positions": ({"input_ids": [5, 6], "position_ids": [3, 4]}, "position_ids other than"),
    "two prompts in one row": ({"text": "a", "prompt": "b"}, "a dict with prompt and text; give one of them"),
    "no prompt in a row": ({"question": "a", "id": 3}, "a dict with question, id; it must have one of input_ids"),
    "one message": (CHAT[1], "a chat is a list of messages"),
    "a negative id": ([5, -100], "has token id -100"),
    "an unknown id": ([5, 61], "has token id 61; the model's vocabulary is 0 to 60"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_encoding_that_is_not_honoured_is_refused(pair, name):
    given, message = BROKEN[name]
    for door in (sb.generate, lambda *given, **options: list(sb.stream(*given, **options))):
        with pytest.raises(BadPrompt, match=message):
            door(pair, given, sb.greedy(), max_new_tokens=2)


STRANGE = {
    "NoneType": None,
    "int": 5,
    "float": 0.5,
    "bool": True,
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "PosixPath": Path("prompts.txt"),
    "set": {5, 6},
    "frozenset": frozenset({"a"}),
    "object": object(),
    "SimpleNamespace": SimpleNamespace(input_ids=[5]),
    "type": list,
    "function": read,
    "int64": np.int64(5),
    "float32": torch.tensor([5.0, 6.0]),
    "float64": np.array([[5.0, 6.0]]),
    "torch.bool": torch.tensor([True, False]),
    "complex128": np.array([5 + 1j]),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_prompt_is_refused_by_the_name_of_its_type(pair, translator, name):
    given = STRANGE[name]
    for door in (
        lambda: sb.generate(pair, given, sb.greedy()),
        lambda: sb.generate(pair, given, "auto"),
        lambda: list(sb.stream(pair, given, sb.greedy())),
        lambda: list(sb.turns_of(pair, given, sb.greedy())),
        lambda: sb.generate(translator, given, sb.beam_search(2)),
        lambda: sb.lite_search(pair, given, lambda texts: [0.5] * len(texts)),
    ):
        with pytest.raises(BadPrompt, match=name):
            door()


WRONG_IDS = {"float": 5.0, "bool": True, "float32": np.float32(5), "torch.float32": torch.tensor(5.0), "complex": 1j}
WRONG_IDS |= {"list of 2 prompts": None, "list of 2": "a", "list": b"a", "a list": [6]}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_a_list_of_ids_holds_integers_alone(pair, name):
    for given in ([[5, WRONG_IDS[name]]], {"input_ids": [5, WRONG_IDS[name]]}):
        with pytest.raises(BadPrompt, match=name if isinstance(given, list) else "prompt"):
            sb.generate(pair, given, sb.greedy(), max_new_tokens=1)


def test_a_broken_prompt_costs_no_other_one_and_is_named_by_its_number(pair):
    encoding = {"input_ids": [[5, 6, 7], [5, 6, 7], [8, 9, 10]], "attention_mask": [[1, 1, 1], [1, 0, 1], [0, 1, 1]]}
    many = ["ab", None, {5, 6}, torch.tensor([1.5]), [5, 6], b"ab", {"text": 7}, ["a", "b"], CHAT, " ", ""]
    for given, right in ((encoding, [0, 2]), (many, [0, 4, 9]), ((one for one in many), [0, 4, 9])):
        with pytest.raises(SomeFailed) as caught:
            sb.generate(pair, given, sb.greedy(), max_new_tokens=2)
        found = caught.value.generations
        assert [number for number, one in enumerate(found) if one is not None] == right
        failures = {int(re.search(r"prompt (\d+)", str(failure))[1]) for failure in caught.value.failures}
        assert sorted([*failures, *right]) == list(range(len(found)))


def test_white_space_is_a_prompt_and_nothing_is_none(pair):
    for text in (" ", "  ", "\n\n"):
        (found,) = sb.generate(pair, text, sb.greedy(), max_new_tokens=2)
        assert found.prompt == pair.tokenizer(text)["input_ids"]
    for nothing in ("", [""], [[]], torch.zeros(1, 0, dtype=torch.long), np.array([], dtype=int), {"text": ""}):
        with pytest.raises(BadPrompt, match="is empty"):
            sb.generate(pair, nothing, sb.greedy(), max_new_tokens=2)
    assert sb.generate(pair, [], sb.greedy(), max_new_tokens=2) == []
    with pytest.raises(BadPrompt, match="half a character"):
        sb.generate(pair, "\ud800", sb.greedy(), max_new_tokens=2)


@pytest.fixture
def talking(pair):
    pair.tokenizer.chat_template = TEMPLATE
    yield pair
    pair.tokenizer.chat_template = None


def as_transformers(tokenizer, chat, **options):
    return list(
        tokenizer.apply_chat_template(chat, return_dict=True, **({"add_generation_prompt": True} | options))[
            "input_ids"
        ]
    )


@pytest.mark.parametrize(
    "given",
    [
        CHAT,
        tuple(CHAT),
        (one for one in CHAT),
        [CHAT],
        {"messages": CHAT},
        [{"messages": CHAT, "id": 3}],
        {"prompt": CHAT},
    ],
    ids=["list", "tuple", "generator", "list of chats", "row", "rows", "row with a conversational prompt"],
)
def test_a_chat_is_read_by_the_template_as_transformers_reads_it_without_a_second_first_token(talking, given):
    (found,) = sb.generate(talking, given, sb.greedy(), max_new_tokens=2)
    assert found.prompt == as_transformers(talking.tokenizer, CHAT)
    assert found.prompt.count(0) == 1


def test_a_template_without_the_first_token_gets_none_as_in_transformers(talking):
    talking.tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    (found,) = sb.generate(talking, CHAT, sb.greedy(), max_new_tokens=2)
    assert found.prompt == as_transformers(talking.tokenizer, CHAT)
    assert 0 not in found.prompt


def test_several_chats_are_several_prompts_and_an_answer_that_was_begun_goes_on(talking):
    begun = [*CHAT, {"role": "assistant", "content": "hi"}]
    for several in ([CHAT, begun], {"messages": [CHAT, begun]}, KeyDataset(Chats([CHAT, begun]), "chat")):
        found = sb.generate(talking, several, sb.greedy(), max_new_tokens=2)
        continued = as_transformers(talking.tokenizer, begun, add_generation_prompt=False, continue_final_message=True)
        assert [one.prompt for one in found] == [as_transformers(talking.tokenizer, CHAT), continued]


class Chats(Rows):
    def __getitem__(self, number):
        return {"chat": self.rows[number]}


def test_the_tools_of_a_row_reach_its_template(talking):
    talking.tokenizer.chat_template = "{% if tools %}{{ tools|length }} {% endif %}{{ messages[0].content }}"
    (found,) = sb.generate(talking, {"messages": CHAT, "tools": [{"name": "a"}]}, sb.greedy(), max_new_tokens=1)
    assert found.prompt == [3, *talking.tokenizer(" be short", add_special_tokens=False)["input_ids"]]  # "1" is unknown


def test_tools_that_a_template_does_not_show_are_refused(talking):
    """As the model would answer without them."""
    talking.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(BadPrompt, match="prompt 0 has tools, and the chat template does not show them"):
        sb.generate(talking, {"messages": CHAT, "tools": [{"name": "a"}]}, sb.greedy(), max_new_tokens=1)


@pytest.mark.parametrize(("role", "meant"), [("usr", "user"), ("User", "user"), ("sytem", "system"), ("tools", "tool")])
def test_a_mistyped_role_is_refused(talking, role, meant):
    """A template passes it on as written, or leaves the message out."""
    with pytest.raises(BadPrompt, match=rf"messages\[0\] has the role '{role}'; did you mean '{meant}'\?"):
        sb.generate(talking, [{"role": role, "content": "abc"}], sb.greedy(), max_new_tokens=1)


@pytest.mark.parametrize("role", ["critic", "function_call", "tool_call", "system_prompt", "user_1"])
def test_a_role_of_a_model_of_its_own_is_passed_on(talking, role):
    out = sb.generate(talking, [{"role": role, "content": "abc"}], sb.greedy(), max_new_tokens=1)
    assert len(out) == 1


@pytest.mark.parametrize("template", ["{% if m.role == 'tools' %}{% endif %}", "{{ m.role | lower }}"])
def test_a_role_that_the_template_knows_is_passed_on(talking, template):
    talking.tokenizer.chat_template = "{% for m in messages %}" + template + "{{ m.content }}{% endfor %}"
    role = "tools" if "tools" in template else "User"
    out = sb.generate(talking, [{"role": role, "content": "abc"}], sb.greedy(), max_new_tokens=1)
    assert len(out) == 1


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user", "text": "hi"}], ids=str)
def test_a_message_without_content_is_named(talking, message):
    talking.tokenizer.chat_template = TEMPLATE
    with pytest.raises(BadPrompt, match=r"prompt 0: messages\[1\] has no content, only role"):
        sb.generate(talking, [{"role": "user", "content": "abc"}, message], sb.greedy(), max_new_tokens=1)


def test_messages_need_a_template_and_a_template_may_refuse_them(pair, translator):
    with pytest.raises(
        BadPrompt, match=r"prompt 0 has messages, and the tokenizer of this pair has no chat template; give a text"
    ):
        sb.generate(pair, CHAT, sb.greedy())
    with pytest.raises(BadPrompt, match="has messages, and there is no tokenizer; give"):
        sb.generate(translator, CHAT, sb.beam_search(2))
    pair.tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    try:
        for given, message in ((CHAT, "prompt 0: .* only users speak"), ({"messages": []}, "empty conversation")):
            with pytest.raises(BadPrompt, match=message):
                sb.generate(pair, given, sb.greedy())
    finally:
        pair.tokenizer.chat_template = None


class Frame:
    """As pandas has it: iteration yields the names of columns."""

    def __init__(self, rows):
        self.rows = rows
        self.columns = list(rows[0])
        self.iloc = None

    def __iter__(self):
        return iter(self.columns)

    def to_dict(self, orient):
        assert orient == "records"
        return self.rows


def test_tables_and_columns_are_rows_and_never_the_names_of_columns(pair):
    texts = ["ab", " ", "Hello world"]
    rows = [{"text": text, "label": number} for number, text in enumerate(texts)]
    expected = [pair.tokenizer(text)["input_ids"] for text in texts]
    for given in (
        rows,
        iter(rows),
        {"text": texts, "label": [0, 1, 2]},  # a slice of a data set, column by column
        pyarrow.Table.from_pylist(rows),
        pyarrow.array(texts),
        list(pyarrow.array(texts)),
        np.array(texts),
        np.array(texts, dtype=object),
        Frame(rows),
        KeyDataset(rows, "text"),
    ):
        found = sb.generate(pair, given, sb.greedy(), max_new_tokens=1)
        assert [one.prompt for one in found] == expected
    for given in ({"prompt": "ab", "answer": "c"}, rows[0], "ab"):
        (found,) = sb.generate(pair, given, sb.greedy(), max_new_tokens=1)
        assert found.prompt == expected[0]


def test_an_iterator_is_read_once_also_where_the_method_is_measured_first(pair, monkeypatch):
    seen = []

    def fastest(pair, settings, measure):
        seen.append(measure(sb.sampling()))
        return sb.greedy(), FastestMethod("greedy", {}, measured_now=True)

    monkeypatch.setattr("specbeam.generation.fastest", fastest)
    found = sb.generate(pair, iter(ROWS), "auto", max_new_tokens=2)
    assert [one.prompt for one in found] == ROWS
    assert len(seen) == 1


def test_features_come_as_an_extractor_returns_them():
    listener = sb.load(tiny_reader("whisper"), check=False)
    windows = sources("whisper", 2)
    expected = [one.tokens for one in sb.generate(listener, windows, sb.beam_search(2), max_new_tokens=4)]
    stacked = torch.stack(windows)
    for given in (
        stacked,
        stacked.numpy(),
        BatchFeature({"input_features": stacked}),
        BatchFeature({"input_features": [one.numpy() for one in windows], "attention_mask": np.ones((2, 40))}),
        {"input_features": [one.tolist() for one in windows]},
        [BatchFeature({"input_features": one[None]}) for one in windows],
        (one[None] for one in windows),
    ):
        found = sb.generate(listener, given, sb.beam_search(2), max_new_tokens=4)
        assert [one.tokens for one in found] == expected
    for wrong, message in (("text", "is str"), ([5, 6], "is list"), ({"input_features": [["a"]]}, "not an array of numbers"),
                           ({"input_features": torch.zeros(MELS, 3)}, "shape")):  # fmt: skip
        with pytest.raises(BadPrompt, match=message):
            sb.generate(listener, wrong, sb.beam_search(2), max_new_tokens=4)


@pytest.mark.parametrize(
    "make", [list, tuple, iter, np.array, torch.tensor, lambda ids: [np.int64(one) for one in ids]],
    ids=["list", "tuple", "iterator", "array", "tensor", "numpy integers"],
)  # fmt: skip
def test_decoders_begin_with_ids_in_any_container(translator, make):
    rows = sources("bart")
    options = {"max_new_tokens": 3}
    search = sb.beam_search(2)
    expected = [one.tokens for one in sb.generate(translator, rows, search, decoder_input_ids=[2, 7], **options)]
    found = sb.generate(translator, rows, search, decoder_input_ids=make([2, 7]), **options)
    assert [one.tokens for one in found] == expected
    starts = make([[2, 7], [2, 8], [2, 9]]) if make in (np.array, torch.tensor) else [make([2, n]) for n in (7, 8, 9)]
    each = sb.generate(translator, rows, search, decoder_input_ids=starts, **options)
    alone = [
        sb.generate(translator, [row], search, decoder_input_ids=[2, n], **options)[0]
        for row, n in zip(rows, (7, 8, 9), strict=True)
    ]
    assert [one.tokens for one in each] == [one.tokens for one in alone]


@pytest.mark.parametrize("wrong", [[2.0], [True], "ab", 5, None, torch.tensor([[2.0]]), [[]], {2, 3}, b"ab"], ids=repr)
def test_decoders_begin_with_nothing_else(translator, wrong):
    if wrong is None:
        return
    with pytest.raises(BadSetting, match="a list of token ids, or one such list for each source"):
        sb.generate(translator, [[5, 6]], sb.beam_search(2), decoder_input_ids=wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "ab"},
        {"prompt": np.array([0, 4, 5])},
        {"prompt_token_ids": torch.tensor([0, 4, 5])},
        {"input_ids": [0, 4, 5, 2], "attention_mask": [1, 1, 1, 0], "label": 1},
        {"input_ids": "[2, 0, 4, 5]", "attention_mask": "[0, 1, 1, 1]"},
        {"text": "ab"},
        {"prompt": None, "text": "ab"},
        {"prompt": ["ab"]},
        {"prompt": ["ab", "and then"], "prompt_id": 81},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_row_of_a_job_holds_its_prompt_in_any_form(pair, fields):
    work = work_of(pair, sb.greedy(), 0, 2, {"max_new_tokens": 3})
    row = row_of(1, fields, USUAL_COLUMNS)
    ((_, record),) = answer_rows(work, [row])
    (expected,) = sb.generate(pair, "ab", sb.greedy(), max_new_tokens=3)
    assert (record["error"], record["text"], record["prompt_tokens"]) == (None, expected.text, 3)


def test_a_file_of_the_command_line_holds_texts_ids_and_chats(talking, tmp_path):
    from specbeam.doors.cli.common import as_json
    from specbeam.doors.cli.generate import _prompt_of, placed_prompts

    forms = ({"input_ids": [0, 4, 5]}, {"prompt_token_ids": [0, 4, 5]}, {"prompt": [0, 4, 5]})
    lines = [" ", {"prompt": "ab"}, *forms, {"messages": CHAT}, {"prompt": CHAT}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, unreadable, _ = placed_prompts([], [file], _prompt_of)
    assert unreadable == 0
    answers = sb.generate(talking, [one.text for one in found], sb.greedy(), max_new_tokens=1)
    ids = [one.prompt for one in answers]
    chat = as_transformers(talking.tokenizer, CHAT)
    assert ids == [talking.tokenizer(" ")["input_ids"], *[[0, 4, 5]] * 4, chat, chat]
    written = [
        json.loads(as_json(n, one.text, answer)) for n, (one, answer) in enumerate(zip(found, answers, strict=True))
    ]
    assert [record["prompt"] for record in written] == [" ", "ab", *[[0, 4, 5]] * 3, chat, chat]


@pytest.fixture
def asked(talking):
    """What the server makes of a body: the token ids of each prompt, or the refusal."""
    pytest.importorskip("pydantic")
    from specbeam.apps.serve.config import ServerConfig
    from specbeam.apps.serve.mapping import Served, order_of
    from specbeam.apps.serve.protocol import ChatBody, CompletionBody, parse_body
    from specbeam.apps.serve.refusals import Refusal

    served = Served(talking, "tiny", sb.sampling(), ServerConfig())

    def ask(**fields):
        kind = ChatBody if "messages" in fields else CompletionBody
        try:
            return order_of(parse_body(kind, json.dumps(fields).encode()), served).prompts
        except Refusal as refusal:
            return refusal.message

    return ask


def test_a_server_reads_the_same_ids_in_every_form_that_json_has(asked, pair):
    ids = pair.tokenizer("ab")["input_ids"]
    assert asked(prompt="ab") == asked(prompt=["ab"]) == asked(prompt=ids) == asked(prompt=[ids]) == [ids]
    assert asked(prompt=["ab", " ", "\n\n"]) == [pair.tokenizer(text)["input_ids"] for text in ("ab", " ", "\n\n")]
    assert asked(prompt=[ROWS[0], ROWS[1]]) == ROWS[:2]
    assert asked(prompt=[PAD, 5, PAD]) == [[PAD, 5, PAD]]
    assert asked(prompt="ab", add_special_tokens=False) == [ids[1:]]
    for wrong, message in (
        ("", "prompt 0 is empty"),
        (["ab", ""], "prompt 1 is empty"),
        ([[5], [61]], "prompt 1 has token id 61"),
    ):
        assert message in asked(prompt=wrong)


def test_a_server_reads_a_chat_by_the_template_without_a_second_first_token(asked, talking):
    expected = as_transformers(talking.tokenizer, CHAT)
    assert asked(messages=CHAT) == [expected]
    talking.tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "")
    assert asked(messages=CHAT) == [expected[1:]]
    assert asked(messages=CHAT, add_special_tokens=True) == [expected]


def test_masks_of_transformers_with_holes_are_read_as_transformers_reads_them(pair):
    """There the mask is made already, and a token that it leaves out is as if it were not there."""
    rows = torch.tensor([[PAD, 5, PAD, 7], [8, 9, 10, 11]])
    model = pair.target_model
    options = {"do_sample": False, "num_beams": 2, "max_new_tokens": 4, "attention_mask": (rows != PAD).long()}
    assert torch.equal(
        model.generate(rows, **options), model.generate(rows, **options, custom_generate=sb.hf.beam_search)
    )
