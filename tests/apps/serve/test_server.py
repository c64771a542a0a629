"""OpenAI's API with beams, asked by OpenAI's own client over a real port."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import specbeam as sb

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

from specbeam.apps.serve.app import BeamServer, make_app  # noqa: E402
from specbeam.apps.serve.config import ServerConfig  # noqa: E402
from specbeam.apps.serve.engine import QueueFull  # noqa: E402
from specbeam.doors.cli import bench_serve  # noqa: E402
from specbeam.lab.bench.serving import Load, measure_load  # noqa: E402

PROMPT = "Ein Hund läuft durch den Wald und sucht seinen Freund, der sich versteckt hat."
OTHERS = ["Wo ist mein Hut?", "Ich habe Hunger."]
CONFIG = ServerConfig(model="bundled", name="tiny", chunk=16, max_running=4, max_waiting=40, warm_up=False)
KINDS = {
    "sampling": (sb.sampling(), {"specbeam": {"method": "sampling"}}),
    "beams": (sb.speculative_beam_search(4), {"use_beam_search": True, "n": 4}),
    "dsbd": (sb.dsbd(3, 5, 3), {"specbeam": {"method": "dsbd", "beams": 3, "draft_beams": 5, "depth": 3}}),
    "default": (sb.dsbd(), {}),
}
TOKENS = 20


@contextlib.contextmanager
def running(config, pair):
    """A server on a port of its own; yields its address and its state."""
    server = BeamServer(config, lambda: pair)
    runner = uvicorn.Server(uvicorn.Config(make_app(server), port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not runner.started or server.state == "loading":
        time.sleep(0.01)
    assert server.state == "ready", server.failure
    port = runner.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        runner.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def expected(worded):
    """What the library itself answers, by kind, before the server owns the pair."""
    found = {}
    for name, (method, _) in KINDS.items():
        options = {"num_return_sequences": 4} if name == "beams" else {}
        found[name] = [
            sb.generate(worded, prompt, method, seed=7, max_new_tokens=TOKENS, **options)
            for prompt in [PROMPT, *OTHERS]
        ]
    return found


@pytest.fixture(scope="module")
def best_texts(worded):
    return list(sb.best(worded, OTHERS[0], 3, max_new_tokens=TOKENS))


@pytest.fixture(scope="module")
def served(worded, expected, best_texts):
    with running(CONFIG, worded) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client, body, prompt=PROMPT, **more):
    given = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "seed": 7} | more
    return client.completions.create(**given, extra_body=body)


def settle(server):
    """Wait until nothing is decoded any more, and check that nothing is left."""
    end = time.monotonic() + 20
    while (server.engine.inside or server.engine.waiting or server.asking) and time.monotonic() < end:
        time.sleep(0.01)
    assert (server.engine.inside, server.engine.waiting, server.asking) == ([], 0, {})
    server.engine.call(lambda: None).result()
    assert server.served.pair.target.caches == []
    assert server.served.pair.draft.caches == []


def test_a_catalogue_confines_answers(client, served):
    _, server = served
    server.served.catalogues["shop"] = sb.catalogue({"dog": "The dog runs.", "cat": "The cat runs.", "man": "A man."})
    found = ask(client, {"catalogue": "shop", "num_beams": 3}, max_tokens=None, n=3)
    assert {choice.item for choice in found.choices} == {"dog", "cat", "man"}
    found = ask(client, {"catalogue": {"name": "shop", "items": ["man"]}}, max_tokens=None)
    assert [choice.item for choice in found.choices] == ["man"]
    found = ask(client, {"catalogue": {"name": "shop", "bitmap": "Ag=="}}, max_tokens=None)
    assert [choice.item for choice in found.choices] == ["cat"]
    for wrong in (
        "cellar",
        {"name": "shop", "items": ["cow"]},
        {"name": "shop", "bitmap": "Ag=="} | {"items": ["man"]},
    ):
        with pytest.raises(openai.BadRequestError, match="catalogue"):
            ask(client, {"catalogue": wrong}, max_tokens=None)


def test_end_tokens_of_a_request_make_no_trie_and_end_no_item(client, served):
    _, server = served
    items = sb.catalogue({"dog": "The dog runs.", "cat": "The cat runs."})
    server.served.catalogues["pets"] = items
    pair = server.served.pair
    inside = items.tokens_among(pair.tokenizer, range(pair.target.vocab))
    others = [token for token in range(pair.target.vocab) if token not in (*inside, *pair.eos)]
    for token in others[:12]:
        found = ask(client, {"catalogue": "pets", "stop_token_ids": [token]}, max_tokens=None)
        assert found.choices[0].item in ("dog", "cat")
    assert len(items._tries) == 1
    with pytest.raises(openai.BadRequestError, match="a token of items of the catalogue"):
        ask(client, {"catalogue": "pets", "stop_token_ids": [others[0], inside[-1]]}, max_tokens=None)


def test_the_best_texts_come_with_their_certificates(client, served, best_texts):
    found = ask(client, {"best": 3}, OTHERS[0])
    assert [choice.text for choice in found.choices] == [one.text for one in best_texts]
    assert [choice.certain for choice in found.choices] == [one.certain for one in best_texts]
    assert [choice.score for choice in found.choices] == pytest.approx([one.score for one in best_texts], abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="leave out num_beams"):
        ask(client, {"best": 3, "num_beams": 2})


@pytest.mark.parametrize("name", KINDS)
def test_the_same_seed_gives_the_text_of_the_library_at_once_and_as_a_stream(client, expected, served, name):
    """Whatever prompts are known from before; the pieces of a stream are never taken back."""
    _, body = KINDS[name]
    for prompt, answers in zip([PROMPT, *OTHERS], expected[name], strict=True):
        found = ask(client, body, prompt)
        assert [choice.text for choice in found.choices] == [one.text for one in answers]
        assert [choice.finish_reason for choice in found.choices] == [
            "stop" if one.beams[number].finished else "length" for number, one in enumerate(answers)
        ]
        scores = [choice.score for choice in found.choices]
        assert scores == pytest.approx([one.beams[number].score for number, one in enumerate(answers)], abs=1e-6)
        assert found.usage.completion_tokens == sum(len(one.tokens) for one in answers)
        assert found.usage.prompt_tokens == len(answers[0].prompt)
        assert found.specbeam["law"] == answers[0].report.law
        assert found.specbeam["report"]["target_passes"] >= 1
        texts: dict[int, str] = {}
        ends = {}
        for chunk in ask(client, body, prompt, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                ends[choice.index] = choice.finish_reason
            last = chunk
        assert [texts[number] for number in sorted(texts)] == [one.text for one in answers]
        assert all(reason in ("stop", "length") for reason in ends.values())
        assert last.usage.total_tokens == found.usage.total_tokens
    settle(served[1])


@pytest.mark.parametrize(
    "body",
    [
        {"use_beam_search": True, "best_of": 4},
        {"num_beams": 4},
        {"beam_width": 4},
        {"specbeam": {"method": "beam_search", "beams": 4}},
        {"specbeam": {"beams": 4}},
        {"use_beam_search": True, "num_beams": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
    ],
)
def test_beams_by_every_spelling_are_the_same_beams(client, expected, body):
    found = ask(client, body | {"n": 2})
    assert [choice.text for choice in found.choices] == [one.text for one in expected["beams"][0][:2]]


def test_all_beams_come_with_their_scores(client, expected):
    found = ask(client, {"num_beams": 4, "specbeam": {"beams_returned": "all"}, "return_token_ids": True})
    best = expected["beams"][0][0]
    beams = found.specbeam["beams"]
    assert [beam["token_ids"] for beam in beams] == [beam.tokens for beam in best.beams]
    assert [beam["score"] for beam in beams] == pytest.approx([beam.score for beam in best.beams], abs=1e-6)
    assert beams[0]["choice"] == 0
    assert beams[1]["choice"] is None
    assert found.choices[0].token_ids == best.tokens


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_unlikely_answers_are_dropped_by_their_mean_whatever_the_length_penalty_is(client, penalty):
    """A stream sends those that stay, each with its end, and nothing of the others."""
    searched = {"use_beam_search": True, "n": 4, "length_penalty": penalty}
    every = ask(client, searched).choices
    scores = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=TOKENS, seed=7, logprobs=0, extra_body=searched
    )
    means = [np.mean(choice.logprobs.token_logprobs) for choice in scores.choices]
    least = float(np.mean(sorted(means[1:])[:2]))  # one of the others is less likely, or more
    wanted = [every[0].text]
    wanted += [choice.text for choice, mean in zip(every[1:], means[1:], strict=True) if mean >= least]
    assert 1 < len(wanted) < 4
    searched |= {"specbeam": {"min_logp": least}}
    assert [choice.text for choice in ask(client, searched).choices] == wanted
    texts = {}
    ends = {}
    for chunk in ask(client, searched, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ends[choice.index] = choice.finish_reason
    assert [texts[index] for index in sorted(texts)] == wanted
    assert None not in ends.values()


def test_independent_answers_and_the_best_of_them(client):
    """The best are those with the highest mean log-probability under the model itself."""
    drawn = ask(client, {"temperature": 0.8}, n=5, logprobs=0)
    assert len({choice.text for choice in drawn.choices}) > 1
    means = [np.mean(choice.logprobs.token_logprobs) for choice in drawn.choices]
    best = ask(client, {"temperature": 0.8, "best_of": 5}, n=2)
    order = np.argsort(means)[::-1][:2]
    assert [choice.text for choice in best.choices] == [drawn.choices[number].text for number in order]
    again = ask(client, {"temperature": 0.8}, n=5)
    assert [choice.text for choice in again.choices] == [choice.text for choice in drawn.choices]


def test_log_probabilities_belong_to_the_text_and_to_the_prompt_if_it_is_echoed(client, worded):
    found = ask(client, {"num_beams": 3, "return_token_ids": True}, n=3, logprobs=2).choices
    for choice in found:
        said = choice.logprobs
        assert "".join(said.tokens).startswith(choice.text)
        assert len(said.token_logprobs) == len(choice.token_ids)
        assert all(value <= 0 for value in said.token_logprobs)
        assert sum(said.token_logprobs) == pytest.approx(choice.cumulative_logprob)
        assert all(len(top) <= 2 for top in said.top_logprobs)
    first, second = found[0], found[1]
    common = next(n for n, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if a != b)
    assert first.logprobs.token_logprobs[:common] == second.logprobs.token_logprobs[:common]
    (echoed,) = ask(client, {"echo": True}, max_tokens=0, logprobs=1).choices
    ids = worded.tokenizer(PROMPT)["input_ids"]
    assert echoed.text == PROMPT
    assert len(echoed.logprobs.tokens) == len(ids)
    assert echoed.logprobs.token_logprobs[0] is None
    (both,) = ask(client, {"echo": True}, max_tokens=3, logprobs=1).choices
    assert both.text.startswith(PROMPT)
    assert both.logprobs.token_logprobs[1 : len(ids)] == echoed.logprobs.token_logprobs[1:]


def test_text_offsets_are_places_in_the_text_without_special_tokens(client, worded):
    special = worded.tokenizer.all_special_tokens
    bodies = [{"echo": True}, {"echo": True, "skip_special_tokens": False}, {}, {"skip_special_tokens": False}]
    for body in bodies:
        for prompt in [PROMPT, f"{PROMPT}</s> Der Hund", worded.tokenizer(PROMPT)["input_ids"]]:
            (choice,) = ask(client, body, prompt, logprobs=1, max_tokens=5).choices
            chunks = ask(client, body, prompt, logprobs=1, max_tokens=5, stream=True)
            offsets = choice.logprobs.text_offset
            sent = [
                one for chunk in chunks for each in chunk.choices if each.logprobs for one in each.logprobs.text_offset
            ]
            assert sent == offsets
            for token, offset in zip(choice.logprobs.tokens, offsets, strict=True):
                assert token in special or choice.text.startswith(token, offset), (token, offset, choice.text)


@pytest.mark.parametrize("name", ["sampling", "speculative_sampling", "mtad"])
def test_the_cost_of_a_text_that_one_pass_ends_counts_its_tokens(client, served, name):
    _, server = served
    before = server.metrics.per_token._sum.get()
    sure = 500
    given = {"specbeam": {"method": name}, "logit_bias": {str(sure): 100}, "stop_token_ids": [sure]}
    found = ask(client, given)
    report = found.specbeam["report"]
    assert found.usage.completion_tokens == report["target_passes"] == 1
    assert report["passes_per_token"] == 1
    assert report["first_token_seconds"] > 0
    assert found.metrics["time_to_first_token_ms"] > 0
    assert server.metrics.per_token._sum.get() == before


def test_a_priority_that_the_key_does_not_permit_is_refused(client):
    with pytest.raises(openai.PermissionDeniedError, match="priority is -3, and with this key it must be at least 0"):
        ask(client, {"priority": -3})
    with pytest.raises(openai.PermissionDeniedError, match="priority is -3"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": PROMPT}], extra_body={"priority": -3}
        )
    with pytest.raises(openai.PermissionDeniedError, match="priority is -3"):
        client.responses.create(model="tiny", input=PROMPT, extra_body={"priority": -3})
    assert ask(client, {"priority": 3}).choices


def test_stop_strings_are_cut_off_and_never_sent(client, expected):
    text = expected["sampling"][0][0].text
    own = KINDS["sampling"][1]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    before = text.split(stop)[0]
    (choice,) = ask(client, own, stop=[stop]).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    (kept,) = ask(client, own | {"include_stop_str_in_output": True}, stop=stop).choices
    assert kept.text == before + stop
    streamed = "".join(chunk.choices[0].text for chunk in ask(client, own, stop=[stop], stream=True) if chunk.choices)
    assert streamed == before


def test_forms_are_kept_to_by_any_number_of_beams(client):
    body = {"num_beams": 3, "structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
    found = ask(client, body, n=2)
    assert {choice.text for choice in found.choices} <= {"yes", "no", "perhaps"}
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "ok", "schema": schema}}
    (choice,) = ask(client, {"response_format": wanted}, max_tokens=40).choices
    assert isinstance(json.loads(choice.text)["ok"], bool)
    tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
    called = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hallo"}], tools=[tool], max_tokens=40,
        tool_choice={"type": "function", "function": {"name": "say"}},
    )  # fmt: skip
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, [*json.loads(call.function.arguments)]) == ("say", ["ok"])


def test_a_chat_is_a_completion_of_its_template(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    given = {"model": "tiny", "messages": messages, "seed": 7, "max_tokens": TOKENS}
    found = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    text = ask(client, {}).choices[0].text
    assert found.choices[0].message.content == text
    content = found.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace").startswith(text[:10])
    assert all(len(one.top_logprobs) == 2 for one in content)
    chunks = [*client.chat.completions.create(**given, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_without_a_method_answers_are_beams_as_many_as_are_asked_for(client, worded):
    """The default of the library: so there may be more than its four."""
    found = ask(client, {"seed": 7}, n=6)
    assert len({choice.text for choice in found.choices}) == 6
    assert found.model_extra is not None
    best = ask(client, {"seed": 7, "best_of": 6}, n=2)
    assert [choice.text for choice in best.choices] == [choice.text for choice in found.choices[:2]]


WRONG = [
    ({"prompt": ""}, "prompt", "bad_prompt", 400),
    ({"prompt": [7, 999999]}, "prompt", "bad_prompt", 400),
    ({"model": "gpt-4"}, "model", "model_not_found", 404),
    ({"tempreature": 1}, "tempreature", "unknown_field", 400),
    ({"suffix": "x"}, "suffix", "unknown_field", 400),
    ({"n": "3"}, "n", "bad_setting", 400),
    ({"n": 10**9}, "n", "bad_setting", 400),
    ({"num_beams": 10**6}, "num_beams", "too_large_beams", 400),
    ({"num_beams": 3, "beam_width": 4}, "beam_width", "bad_setting", 400),
    ({"num_beams": 2, "n": 3}, "n", "bad_setting", 400),
    ({"num_beams": 3, "temperature": 0.5}, "temperature", "bad_setting", 400),
    ({"max_tokens": 10**6}, "max_tokens", "bad_setting", 400),
    ({"max_tokens": 0}, "max_tokens", "bad_setting", 400),
    ({"max_tokens": 4000}, "max_tokens", "context_length_exceeded", 400),
    ({"best_of": 1, "n": 2}, "best_of", "bad_setting", 400),
    ({"logit_bias": {"x": 1}}, "logit_bias", "bad_setting", 400),
    ({"stream_options": {"include_usage": True}}, "stream_options", "bad_setting", 400),
    ({"specbeam": {"method": "magic"}}, "specbeam", "bad_setting", 400),
    ({"specbeam": {"method": "dsbd", "depht": 3}}, "specbeam", "unknown_field", 400),
    ({"specbeam": {"method": "dsbd", "depth": 10**9}}, "specbeam", "bad_setting", 400),
    ({"specbeam": {"method": "dsbd", "coupling": {}}}, "specbeam", "bad_setting", 400),
    ({"specbeam": {"method": "dsbd", "beams": 4, "draft_beams": 1}}, "specbeam", "bad_setting", 400),
    ({"specbeam": {"depth": 3}}, "specbeam", "unknown_field", 400),
    ({"specbeam": {"trace": True}}, "specbeam", "bad_setting", 400),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "bad_grammar", 400),
    ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs", "bad_grammar", 400),
    ({"response_format": {"type": "json_schema"}}, "response_format", "bad_grammar", 400),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://a/b"}}}},
        "response_format",
        "bad_grammar",
        400,
    ),
    ({"echo": True, "prompt": ["a"] * 65}, "prompt", "bad_setting", 400),
    ({"prompt": ["a"] * 60, "n": 16}, "n", "too_large_beams", 400),
    ({"guided_regex": "a"}, "guided_regex", "unknown_field", 400),
    ({"user": 3}, "user", "bad_setting", 400),
]


def test_what_cannot_be_honoured_is_refused_with_the_name_of_the_field(served):
    url, server = served
    with httpx.Client(base_url=url, timeout=60) as http:
        for given, param, code, status in WRONG:
            began = time.perf_counter()
            answer = http.post("/v1/completions", json={"prompt": "a"} | given)
            assert time.perf_counter() - began < 5
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (status, param, code), (given, error)
            assert set(error) == {"message", "type", "param", "code"}
            assert len(error["message"]) < 2500
        raw = [
            (b"{", 400, "bad_json"),
            (b"[]", 400, "bad_json"),
            (b"[" * 100_000, 400, "bad_json"),
            (b'{"prompt": "a", "prompt": "b"}', 400, "bad_json"),
            (b'{"prompt": NaN}', 400, "bad_json"),
            (b"\xff\xfe", 400, "bad_json"),
            (b'{"prompt": "\\ud800"}', 400, "bad_json"),
            (b'"' + b"a" * 2**20 + b'"', 413, "body_too_large"),
        ]
        for body, status, code in raw:
            answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body[:20]
        assert http.post("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"}).status_code == 415
        assert http.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
        assert http.get("/v1/completions").json()["error"]["code"] == "method_not_allowed"
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
        bad = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        )
        assert bad.json()["error"]["code"] == "unsupported_content"
        auto = {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
        assert http.post("/v1/chat/completions", json=auto).json()["error"]["param"] == "tools"
    settle(server)


def test_looking_at_a_server(served, client, worded):
    url, _ = served
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.get("/health").json()["status"] == "ok"
        for path in ("/live", "/health", "/ready"):
            assert http.get(path).status_code == http.head(path).status_code == 200
        found = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert found["tokens"] == worded.tokenizer(PROMPT)["input_ids"]
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
        names = {one["name"] for one in http.get("/v1/specbeam/methods").json()["data"]}
        assert {"dsbd", "beam_search", "sampling"} <= names
        assert http.get("/props").json()["default_method"] == "dsbd"
        figures = http.get("/metrics").text
        for name in ("num_requests_running", "generation_tokens_total", "prefix_cache_hits_total", "beam_width_bucket"):
            assert f"specbeam:{name}" in figures
        schema = http.get("/openapi.json").json()
        assert "CompletionBody" in schema["components"]["schemas"]
        page = http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert f'nonce="{nonce}"' in page.text
        assert page.headers["x-content-type-options"] == "nosniff"


def test_a_trace_shows_each_turn_of_any_method(served):
    url, server = served
    for own in ({"method": "dsbd", "depth": 3}, {"method": "speculative_sampling"}, {"method": "beam_search"}):
        body = {
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "seed": 7,
            "stream": True,
            "specbeam": own | {"trace": True},
        }
        with httpx.Client(base_url=url, timeout=60) as http:
            lines = http.post("/v1/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        turns = [chunk["specbeam"]["turn"] for chunk in chunks if "turn" in chunk.get("specbeam", {})]
        assert [turn["n"] for turn in turns] == [*range(1, len(turns) + 1)]
        fates = {node[2] for turn in turns for node in turn["nodes"]}
        assert "root" in fates
        assert fates <= {"root", "accepted", "rejected", "resampled", "unused"}
        for turn in turns:
            assert all(parent < place for place, (parent, *_) in enumerate(turn["nodes"]))
        (report,) = [chunk["specbeam"]["report"] for chunk in chunks if "report" in chunk.get("specbeam", {})]
        assert report["target_passes"] == len(turns)
    settle(server)


def test_a_client_that_goes_away_frees_its_place_and_costs_nobody_anything(served, client, expected):
    url, server = served
    body = {"prompt": PROMPT, "max_tokens": 150, "stream": True, "specbeam": {"method": "beam_search"}}
    for _ in range(3):
        with (
            httpx.Client(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as stream,
        ):
            next(stream.iter_raw())
    with pytest.raises(httpx.TimeoutException):  # nothing can be answered so soon
        httpx.post(url + "/v1/completions", json=body | {"stream": False}, timeout=0.005)
    (choice,) = ask(client, {}).choices
    assert choice.text == expected["default"][0][0].text
    settle(server)
    number = "my-request"
    with httpx.Client(base_url=url, headers={"x-request-id": number}, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            ended = httpx.delete(f"{url}/v1/specbeam/requests/cmpl-{number}")
            assert ended.status_code in (200, 404)
            rest = b"".join(pieces)
        assert b"[DONE]" in rest
        assert stream.headers["x-request-id"] == number
    settle(server)


def test_a_client_that_reads_nothing_is_cut_off_and_one_that_trickles_its_body_is_refused(served, monkeypatch):
    """The server's own patience is cut short; its transport is stood in for, as a kernel buffers more than a text has."""
    _, server = served
    monkeypatch.setattr(server, "config", dataclasses.replace(server.config, reader_timeout=0.3))
    monkeypatch.setattr("specbeam.apps.serve.bodies.BODY_S", 0.3)
    app = make_app(server)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
    }  # fmt: skip
    body = json.dumps({"prompt": PROMPT, "max_tokens": 150, "stream": True, "specbeam": {"trace": True}}).encode()
    sent = []

    async def talk(first, blocks_from):
        waits = [first]

        async def receive():
            if waits:
                return waits.pop()
            return await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)
            if len(sent) > blocks_from:
                await asyncio.sleep(3600)

        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(app(dict(scope), receive, send), 30)

    asyncio.run(talk({"type": "http.request", "body": body, "more_body": False}, 3))
    assert 3 < len(sent) < 20
    settle(server)
    sent.clear()
    asyncio.run(talk({"type": "http.request", "body": b"{", "more_body": True}, 9))
    assert sent[0]["status"] == 408
    settle(server)


def test_many_clients_with_bad_input_beside_good(served, client, expected):
    """One request's bad input, or its going away, costs no other request its work; good texts are those of the library."""
    _, server = served
    rng = np.random.default_rng(1)
    plans = [
        (str(kind), int(action)) for kind, action in zip(rng.choice([*KINDS], 60), rng.integers(0, 6, 60), strict=True)
    ]

    def one(plan):
        name, action = plan
        _, body = KINDS[name]
        if action == 0:
            with pytest.raises(openai.BadRequestError):
                ask(client, body | {"top_q": 1})
        elif action == 1:
            stream = ask(client, body, stream=True, max_tokens=100)
            next(iter(stream))
            stream.close()
        else:
            found = ask(client, body)
            assert [choice.text for choice in found.choices] == [one.text for one in expected[name][0]]
        return True

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, plans))
    settle(server)
    assert server.engine.counts.restarts == 0


def test_a_prompt_that_comes_again_is_known_to_its_own_key_alone_and_gives_the_same_text(served, client):
    _, server = served
    prompt = " ".join(["Das hat noch niemand gefragt:", PROMPT, *OTHERS] * 2)  # no other test begins so
    first, again, salted = (ask(client, body, prompt) for body in ({}, {}, {"cache_salt": "mine"}))
    details = [found.usage.prompt_tokens_details.cached_tokens for found in (first, again, salted)]
    assert details == [0, (first.usage.prompt_tokens - 1) // 16 * 16, 0]
    assert first.choices[0].text == again.choices[0].text == salted.choices[0].text
    many = ask(client, {"temperature": 0.9}, prompt + " Hallo.", n=3)
    assert many.usage.prompt_tokens_details.cached_tokens > 0
    settle(server)


def test_a_client_of_openai_that_finds_no_place_comes_again_by_itself(served, expected, monkeypatch):
    """After 429, as `retry-after` says; what cannot be honoured, 400, is not tried again."""
    url, server = served
    submit = server.engine.submit
    refused = []

    def full_at_first(jobs):
        if len(refused) < 2:
            refused.append(1)
            raise QueueFull("full on purpose")
        submit(jobs)

    monkeypatch.setattr(server.engine, "submit", full_at_first)
    monkeypatch.setattr(server, "_retry_after", lambda: 1)
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=2) as patient:
        found = ask(patient, KINDS["sampling"][1])
        assert [choice.text for choice in found.choices] == [one.text for one in expected["sampling"][0]]
        assert len(refused) == 2
        counts = server.metrics.http
        wrong = ("/v1/completions", 400)
        before = counts[wrong]
        with pytest.raises(openai.BadRequestError):
            ask(patient, {"top_q": 1})
        end = time.monotonic() + 20
        while counts[wrong] == before and time.monotonic() < end:  # an answer is counted after it is sent
            time.sleep(0.01)
        assert counts[wrong] == before + 1
    settle(server)


def test_a_load_is_counted_request_by_request(served, capsys):
    url, server = served
    for stream, gone in ((True, 0.4), (False, 0.0)):
        load = Load([PROMPT, *OTHERS], {"max_tokens": 6, "num_beams": 2}, 3, 12, 500.0, gone, stream, seed=1)
        found = measure_load(url, load)
        assert found.answered + found.gone == 12
        assert (found.gone > 0) == (gone > 0)
        assert found.tokens_per_s > 0
        assert (found.first_s is not None) == (found.per_token_s is not None) == stream
        assert all(one.waited_s >= (one.first_s or 0) for one in found.once)
    shape = {"url": url, "joined": 3, "before": "Hallo. ", "max_new_tokens": 4}
    many = bench_serve.LoadTestArguments(**shape, clients=2, requests=4, seconds=60.0, body='{"n": 2}', json=True)
    assert bench_serve.serve(many) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == 4
    wrong = bench_serve.LoadTestArguments(**shape, clients=1, requests=1, body='{"model": "none"}')
    assert bench_serve.serve(wrong) == 1
    said = capsys.readouterr()
    assert "404" in said.out
    assert "the first refusal: " in said.err
    assert "none" in said.err
    settle(server)


def test_a_full_line_and_the_end_say_when_to_come_again(worded, expected, served):
    """Runs on the same pair after the server of the other tests has let it go: so it is the last test of this file."""
    served[1].drain()
    config = ServerConfig(
        model="bundled", name="tiny", chunk=16, max_running=1, max_waiting=1, api_keys=("secret",), warm_up=False
    )
    with running(config, worded) as (url, server):
        assert httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 401
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/v1/models").json()["error"]["code"] == "invalid_api_key"
        with httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}, timeout=60) as http:
            assert http.get("/v1/models").status_code == 200
            body = {"prompt": PROMPT, "max_tokens": 150, "stream": True, "num_beams": 8}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                pieces = stream.iter_raw()
                full = http.post("/v1/completions", json={"prompt": "a", "n": 3, "specbeam": {"method": "sampling"}})
                assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
                assert 1 <= int(full.headers["retry-after"]) <= 60
                ending = threading.Thread(target=server.drain)
                ending.start()
                while server.state != "draining":
                    time.sleep(0.001)
                late = http.post("/v1/completions", json={"prompt": "a"})
                assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
                assert "retry-after" in late.headers
                assert http.get("/health").status_code == 503
                assert b"[DONE]" in b"".join(pieces)
            ending.join()
    assert sb.generate(worded, "a", sb.greedy(), max_new_tokens=2)
