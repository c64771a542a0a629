"""Bodies of requests: whatever comes, it is understood or refused by name, quickly, and nothing is ignored."""

import json
import os
import random
import sys
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam as sb
from specbeam.apps.serve.app import served_of
from specbeam.apps.serve.auth import Client, Keys
from specbeam.apps.serve.config import ServerConfig, read_config
from specbeam.apps.serve.mapping import RECIPE_OF, Order, Served, order_of
from specbeam.apps.serve.processors import CountPenalty, TokenBias
from specbeam.apps.serve.protocol import ChatBody, CompletionBody, parse_body
from specbeam.apps.serve.refusals import Refusal, refusal_of
from specbeam.errors import BadSetting
from tests.support.checking import refused

FIELDS = sorted(set(CompletionBody.model_fields) | set(ChatBody.model_fields))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [1, 2, 4, 0.5, True, "a", ["a"], [5, 6], {"type": "text"}, {"type": "json_object"}, {"regex": "a+"}, {"5": -100},
     {"method": "dsbd", "beams": 3}, {"method": "beam_search", "beams": 2}, {"method": "rsd_s", "width": 2}, {"beams": 3},
     [{"role": "user", "content": "Hallo"}]]
)  # fmt: skip


@pytest.fixture(scope="module")
def kitchen(worded):
    return Served(worded, "tiny", sb.speculative_sampling(), ServerConfig(), "{{ messages[-1]['content'] }}")


def attempted(raw, kind, served):
    """The order of a body, or its refusal."""
    try:
        return order_of(parse_body(kind, raw), served)
    except Refusal as refusal:
        return refusal


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES | LIKELY, max_size=5), st.booleans())
def test_any_body_is_an_order_or_a_refusal(kitchen, body, is_chat):
    start = {"messages": [{"role": "user", "content": "Hallo"}]} if is_chat else {"prompt": "Ein Hund"}
    found = attempted(json.dumps(start | body).encode(), ChatBody if is_chat else CompletionBody, kitchen)
    if isinstance(found, Refusal):
        assert 400 <= found.status < 500
        assert found.message
        assert set(found.body["error"]) == {"message", "type", "param", "code"}
        assert len(found.message) < 2500
    else:
        order = found
        assert order.method.beams <= kitchen.config.max_beams
        assert len(order.prompts) * max(order.count, order.drawn, order.method.beams) <= kitchen.config.max_texts


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_refusal(raw):
    with pytest.raises(Refusal):
        parse_body(CompletionBody, raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 2**20,
        b'{"a":' * 2**17,
        b'{"prompt": ' + b"[[1]," * 2**17,
        b'{"prompt": "' + b'\\"' * 2**19,
        b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(2**15)) + b"}}",
        b'{"prompt": "a", "stop": [' + b",".join([b'"a"'] * 2**17) + b"]}",
        b'{"prompt": "a", ' + b",".join(b'"x%d": 1' % n for n in range(2**15)) + b"}",
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_large_is_refused_in_little_time(raw):
    began = time.thread_time()  # servers of other tests may be at work in other threads
    with pytest.raises(Refusal) as caught:
        parse_body(CompletionBody, raw)
    assert time.thread_time() - began < 1.0
    assert len(caught.value.message) < 2500


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_half_of_a_character_is_refused_wherever_it_stands_and_a_whole_one_is_not(worded, path, is_streamed):
    """An answer that repeats a field could not be encoded."""
    pytest.importorskip("httpx2")
    from tests.support.asgi import asking

    start = {
        "/v1/completions": {"prompt": "a", "max_tokens": 2, "seed": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "seed": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 2, "seed": 1},
        "/tokenize": {"prompt": "a"},
    }[path]
    start |= {"stream": True} if is_streamed and path != "/tokenize" else {}
    with asking(worded, model="bundled") as ask:
        for name, value in (
            ("user", "\ud800"),
            ("metadata", {"a": ["\udc00"]}),
            ("instructions", "\ud83d"),
            ("\ud800", 1),
        ):
            answer = ask(
                path, content=json.dumps(start | {name: value}).encode(), headers={"content-type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")
        if path != "/tokenize":
            whole = json.dumps(start | {"user": "\U0001f600"}).encode()  # as a pair of escapes
            assert b"\\ud83d" in whole
            assert ask(path, content=whole, headers={"content-type": "application/json"}).status_code == 200


def nested(depth, kind="object"):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}} if kind == "object" else {"anyOf": [schema]}
    return schema


def form_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


MALICIOUS = {
    "n": {"n": 10**9},
    "n and prompts": {"prompt": ["a"] * 64, "n": 16},
    "beams": {"num_beams": 10**6},
    "beams of a method": {"specbeam": {"method": "dsbd", "beams": 10**6}},
    "drafts": {"specbeam": {"method": "dsbd", "draft_beams": 10**7}},
    "depth": {"specbeam": {"method": "dsbd", "depth": 10**6}},
    "tokens": {"max_tokens": 10**9},
    "prompts": {"prompt": ["a"] * 100_000},
    "prompts of ids": {"prompt": [[1]] * 5000},
    "ids": {"prompt": [2**40]},
    "ids and a text": {"prompt": [1] * 20_000 + ["a"]},
    "schema depth": form_of(nested(300)),
    "schema depth by choices": form_of(nested(100, "any")),
    "schema size": form_of({"type": "object", "properties": {f"a{n}": {} for n in range(2000)}}),
    "schema elsewhere": form_of({"$ref": "http://169.254.169.254/latest"}),
    "regex": {"structured_outputs": {"regex": "(a{0,100}){0,100}" * 1000}},
    "grammar": {"structured_outputs": {"grammar": "start: " + "a " * 60_000}},
    "stop strings": {"stop": ["a"] * 1000},
    "unicode": {"prompt": "\ud800"},
    "unicode in a name": {"\u202e\u0000" * 1000: 1},
    "unicode in a key": {"specbeam": {"method": "\U0001f4a3" * 5000}},
    "biases": {"logit_bias": {str(number): 1 for number in range(5000)}},
    "numbers": {"temperature": 1e308},
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_what_means_harm_is_refused_at_once(kitchen, name):
    """Within a twentieth of a second more than the time to read its JSON ten times, by the processor time of the thread,
    the least of five tries: what others do on the machine hardly counts."""
    raw = json.dumps({"prompt": "Ein Hund"} | MALICIOUS[name]).encode()
    spare = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(10):
            json.loads(raw)
        read = time.thread_time()
        found = attempted(raw, CompletionBody, kitchen)
        spare.append((read - began) - (time.thread_time() - read))
        assert isinstance(found, Refusal), found
    assert 400 <= found.status < 500
    assert len(found.message) < 2500
    assert max(spare) > (-0.05 if sys.gettrace() is None else -0.5)  # what counts covered lines takes most of the time


@pytest.mark.slow
def test_a_hundred_thousand_spoilt_bodies_neither_crash_nor_hang(kitchen):
    """Good bodies with some of their bytes, fields and values changed at random."""
    chance = random.Random(0)
    good = [
        {"prompt": "Ein Hund", "n": 2, "temperature": 0.5, "stop": ["a"], "logprobs": 2},
        {"prompt": [5, 6], "num_beams": 4, "specbeam": {"beams_returned": "all"}, "stream": True},
        {"prompt": "a", "specbeam": {"method": "dsbd", "beams": 3, "depth": 2}, "seed": 7},
        {"prompt": "a", "structured_outputs": {"regex": "a+"}, "logit_bias": {"5": -100}},
        form_of(nested(3)) | {"prompt": "b", "max_tokens": 5},
    ]
    values = [None, True, -1, 0, 2**63, 1e300, "", "\u0000", "ä" * 300, [], [[]], {}, {"a": {}}, [None]]
    statuses = Counter()
    slowest = 0.0
    for _ in range(int(os.environ.get("FUZZED", "100000"))):
        body = dict(chance.choice(good))
        for _ in range(chance.randrange(3)):
            body[chance.choice(FIELDS)] = chance.choice(values)
        raw = bytearray(json.dumps(body).encode())
        for _ in range(chance.randrange(3)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        began = time.thread_time()
        found = attempted(bytes(raw), chance.choice([CompletionBody, ChatBody]), kitchen)
        seconds = time.thread_time() - began
        assert seconds < 1.0, bytes(raw)
        slowest = max(slowest, seconds)
        statuses["taken" if isinstance(found, Order) else f"{found.status} {found.code}"] += 1
        assert isinstance(found, Order) or 400 <= found.status < 500
    sys.stdout.write(f"{dict(statuses.most_common())}, the slowest {1000 * slowest:.1f} ms\n")
    assert 0.01 * statuses.total() < statuses["taken"] < 0.99 * statuses.total()


def test_every_recipe_can_be_asked_for_by_name_or_says_why_not(kitchen):
    for name in RECIPE_OF:
        found = attempted(json.dumps({"prompt": "a", "specbeam": {"method": name}}).encode(), CompletionBody, kitchen)
        assert isinstance(found, Order) or found.param == "specbeam", name


NOT_HONOURED = [
    ({"skip_special_tokens": False, "structured_outputs": {"regex": "a+"}}, "skip_special_tokens"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"min_tokens": 20, "max_completion_tokens": 10}, "min_tokens"),
    ({"stream": True, "specbeam": {"trace": True, "stream": "live"}}, "specbeam"),
    ({"specbeam": {"method": "swift"}}, "specbeam"),
    ({"specbeam": {"method": "swift", "skip": "random", "rule": "traversal"}}, "specbeam"),
    ({"specbeam": {"method": "swift", "skip": "exit", "layers": 1, "task": "mine"}}, "specbeam"),
    ({"specbeam": {"method": "swift", "rule": "match", "search": None, "task": "x"}}, "specbeam"),
    ({"specbeam": {"method": "multi_draft", "others": ["org/model"]}}, "specbeam"),
]


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 10**30},
        {"max_tokens": 2**31},
        {"stop_token_ids": [2**31]},
        {"n": 2**31},
        {"specbeam": {"no_repeat_ngram_size": 2**31}},
    ],
)
def test_integers_that_the_loops_cannot_hold_are_refused(field):
    with pytest.raises(Refusal, match=next(iter(field))):
        parse_body(CompletionBody, json.dumps({"prompt": "a"} | field).encode())


def test_what_contradicts_itself_or_would_depend_on_others_is_refused_and_null_is_absent_everywhere(kitchen):
    for body, param in NOT_HONOURED:
        found = attempted(json.dumps({"prompt": "a"} | body).encode(), CompletionBody, kitchen)
        assert isinstance(found, Refusal), body
        assert (found.status, found.param) == (400, param), (body, found)
    for own in ({"rule": "match"}, {"skip": "exit", "layers": 1}, {"skip": "clasp"}, {"skip": "a1 m1"}):
        body = {"prompt": "a", "specbeam": {"method": "swift"} | own}
        assert isinstance(attempted(json.dumps(body).encode(), CompletionBody, kitchen), Order), own
    nulls = {
        "stream": True, "stream_options": {"include_usage": None}, "response_format": {"type": "text", "json_schema": None},
        "specbeam": {"method": None, "beams": None, "trace": None, "stream": None, "report": None, "depth": None},
        "max_tokens": None, "stop": None,
    }  # fmt: skip
    order = attempted(json.dumps({"prompt": "a"} | nulls).encode(), CompletionBody, kitchen)
    assert isinstance(order, Order), order
    assert order.method is kitchen.method
    schema = {"const": None, "properties": {"a": {"default": None}}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "name": None}}}
    order = attempted(json.dumps({"prompt": "a"} | form).encode(), CompletionBody, kitchen)
    assert order.settings.json_schema == schema
    assert order.constraint_field == "response_format"


def test_errors_of_the_library_name_the_field_of_the_request(worded):
    from specbeam.errors import BadPrompt, BadSetting, BrokenLaw, TimedOut

    refusal = refusal_of(BadSetting("max_new_tokens is 0; it must be >= 1"))
    assert (refusal.status, refusal.param) == (400, "max_tokens")
    assert (
        refusal_of(BadPrompt("prompt 0 has 3 tokens, but the model has 2 positions")).code == "context_length_exceeded"
    )
    assert refusal_of(BrokenLaw("NaN")).status == 422
    timed_out = refusal_of(TimedOut("late"))
    assert (timed_out.status, timed_out.headers["x-should-retry"]) == (408, "false")
    unknown = refusal_of(RuntimeError("secret path /home/x"))
    assert unknown.status == 500
    assert "secret" not in unknown.message


def test_a_configuration_says_what_is_wrong(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("port: 9000\nmax-beams: 3\nmethods: [dsbd]\n")
    config = read_config(file, {"port": 9001, "host": None})
    assert (config.port, config.max_beams, config.methods, config.host) == (9001, 3, ("dsbd",), "127.0.0.1")
    for text, match in [
        ("prot: 1", "unknown settings: prot"), ("port: x", "port is 'x'"), ("max_running: 0", "at least 1"), ("max_beams: true", "max_beams is True"),
        ("- 1", "holds a list"), ("a: [", "could not read"), ("queue_timeout: 0", "more than 0"),
        ("max_beams: 3\nmax-beams: 4", "gives max_beams twice"),
    ]:  # fmt: skip
        file.write_text(text)
        with refused(match):
            read_config(file, {})
    with pytest.raises(sb.SpecbeamError, match="--no-auth"):
        ServerConfig(host="0.0.0.0").check_open()
    ServerConfig(host="0.0.0.0", no_auth=True).check_open()


def test_keys_have_names_weights_and_limits_and_are_never_kept_themselves(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("# who\nann secret-a 2.5 3 -1\nbob secret-b\n")
    keys = Keys.of(ServerConfig(api_key_file=str(file), api_keys=("secret-c",)))
    assert keys.client("Bearer secret-a") == Client("ann", 2.5, 3, -1)
    assert keys.client("bearer secret-b").weight == 1
    assert keys.client("Bearer secret-c").name == "key1"
    assert keys.weights == {"key1": 1.0, "ann": 2.5, "bob": 1.0}
    assert keys.most_running == {"ann": 3}
    assert "secret" not in repr(vars(keys))
    for wrong in (None, "", "secret-a", "Basic secret-a", "Bearer", "Bearer secret"):
        with pytest.raises(Refusal) as caught:
            keys.client(wrong)
        assert (caught.value.status, caught.value.headers["www-authenticate"]) == (401, "Bearer")
    file.write_text("ann\n")
    with pytest.raises(sb.SpecbeamError, match="line 1 must be: name key"):
        Keys.of(ServerConfig(api_key_file=str(file)))
    for line, match in (("key1 secret-a", "rename it"), ("ann secret-a 1 -1", "max_running is -1")):
        file.write_text(line)
        with refused(match):
            Keys.of(ServerConfig(api_key_file=str(file), api_keys=("secret-c",)))
    assert Keys({}).client(None).name == "anonymous"


def test_clients_and_catalogues_that_would_replace_each_other_are_refused_at_start(worded, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("ann secret-a\nbob secret-a\n")
    with refused("line 2: bob has the key of ann"):
        Keys.of(ServerConfig(api_key_file=str(file)))
    file.write_text("ann secret-a\nann secret-b\n")  # the same client, with the next key
    assert Keys.of(ServerConfig(api_key_file=str(file))).client("Bearer secret-b").name == "ann"
    with refused("has the key of ann, which api_keys has, too"):
        Keys.of(ServerConfig(api_key_file=str(file), api_keys=("secret-a",)))
    with refused("api_keys: key2 has the key of key1"):
        Keys.of(ServerConfig(api_keys=("one", "one")))
    files = [tmp_path / "shop.txt", tmp_path / "old" / "shop.json"]
    files[1].parent.mkdir()
    files[0].write_text("A dog.\n")
    files[1].write_text('["A cat."]')
    with refused("shop.txt and .*shop.json both have the name 'shop'"):
        served_of(ServerConfig(catalogues=tuple(map(str, files))), worded)
    assert list(served_of(ServerConfig(catalogues=(str(files[1]),)), worded).catalogues) == ["shop"]


def test_penalties_count_what_was_generated_and_biases_ban():
    ids = torch.tensor([[5, 6, 6, 7], [5, 7, 7, 7]])  # two tokens of the prompt, two new ones
    scores = torch.zeros(2, 9)
    lowered = CountPenalty(2, 1.0, 0.5)(ids, scores)
    assert lowered[0, 6:8].tolist() == [-1.5, -1.5]
    assert lowered[1, 5:8].tolist() == [0.0, 0.0, -2.0]
    biased = TokenBias({3: 2.0, 4: -100.0})(ids, scores)
    assert biased[0, 2:5].tolist() == [0.0, 2.0, float("-inf")]
    assert scores.abs().max() == 0


@pytest.mark.parametrize("text", ["", "# none yet\n", "\n  \n"])
def test_a_key_file_without_keys_does_not_open_the_server(text, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text(text)
    with pytest.raises(BadSetting, match="has no keys, so everybody could use the server"):
        Keys.of(ServerConfig(host="0.0.0.0", api_key_file=str(file)))


@pytest.mark.parametrize("rest", ["inf", "nan", "1 inf", "1 nan", "1 1 inf", "1 1 nan"])
def test_limits_of_a_key_are_finite(rest, tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text(f"ann secret {rest}\n")
    with pytest.raises(BadSetting, match="line 1"):
        Keys.of(ServerConfig(api_key_file=str(file)))


def test_keys_of_one_client_have_the_same_numbers(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("ann one 2\nann two 2\nann three 3\n")
    with pytest.raises(BadSetting, match="line 3: ann has other numbers in a line above"):
        Keys.of(ServerConfig(api_key_file=str(file)))
    file.write_text("ann one 2 1 0.5\n")
    with pytest.raises(BadSetting, match=r"line 1: priority is 0\.5; it must be an integer"):
        Keys.of(ServerConfig(api_key_file=str(file)))
    file.write_text("ann one 2\nann two 2\n")
    assert Keys.of(ServerConfig(api_key_file=str(file))).weights == {"ann": 2.0}


def test_a_key_may_contain_the_sign_of_a_comment(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_bytes("\ufeffann secret#b 2  # a colleague\n".encode())
    keys = Keys.of(ServerConfig(api_key_file=str(file)))
    assert (keys.client("Bearer secret#b").name, keys.weights) == ("ann", {"ann": 2.0})
    with pytest.raises(Refusal, match="the API key is unknown"):
        keys.client("Bearer secret")


@pytest.mark.parametrize("keys", [("",), ("secret", " ")])
def test_an_empty_key_is_refused(keys):
    with pytest.raises(BadSetting, match="api_keys has an empty key"):
        ServerConfig(api_keys=keys)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_keys": (1, 2)}, r"api_keys is \[1, 2\]; all of its values must be texts"),
        ({"methods": "sampling"}, "methods is 'sampling'; it must be a list"),
        ({"draft": 5}, "draft is 5; it must be of type str"),
        ({"draft_vocab": "32k"}, "draft_vocab is '32k'; it must be of type int"),
    ],
)
def test_settings_of_another_type_are_refused(values, message):
    with refused(message):
        ServerConfig(**values)
