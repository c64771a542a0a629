"""Audio that is sent to a server whose model hears: what comes back is what the library writes down."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import specbeam as sb
from specbeam.apps.serve import hearing, speech_desk
from specbeam.apps.serve.auth import Client, Keys, digest
from specbeam.apps.serve.bodies import read_bytes
from specbeam.apps.serve.guarding import Guarding
from specbeam.apps.serve.metrics import ServerMetrics
from specbeam.apps.serve.multipart import parse_form
from specbeam.apps.serve.refusals import Refusal
from specbeam.apps.speech import audio
from specbeam.apps.speech.audio import RATE, read_audio_bytes, resampled
from specbeam.apps.speech.formats import formatted

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("av")
pytest.importorskip("soxr")
pytest.importorskip("pysubs2")

from tests.apps.serve.test_server import CONFIG, running  # noqa: E402
from tests.support import media, words  # noqa: E402
from tests.support.media import encoded  # noqa: E402
from tests.test_speech import noise, tiny_ears  # noqa: E402

BEAMS = 3
SEED = 7
LIMITS = {
    "max_tokens": 12, "warm_up": True, "method": "speculative_beam_search", "settings": (f"beams={BEAMS}", "depth=2"),
    "max_audio_seconds": 20.0, "max_audio_body": 2**20, "max_audio_at_once": 2,
}  # fmt: skip
AUDIO_CONFIG = dataclasses.replace(CONFIG, model="ears", **LIMITS)
GIVEN = {"model": "tiny", "extra_body": {"seed": SEED}}


@pytest.fixture(scope="module")
def ears():
    return sb.load(tiny_ears(), tiny_ears(1, 1), tokenizer=words.tokenizer())


SOUNDS = {
    "long": noise(7.0, seed=3),
    "short": noise(2.0, seed=2),
    "two channels": np.stack([noise(2.0, seed=2)] * 2, 1),
}


def by_the_library(pair, sound, method=None, **options):
    if method is None and "temperature" not in options:
        method = sb.speculative_beam_search(BEAMS, depth=2)
    (found,) = sb.transcribe(pair, sound, method, seed=SEED, max_new_tokens=12, **options)
    return found


ASKED = {name: (sound, {}) for name, sound in SOUNDS.items()} | {
    "translated": (SOUNDS["long"], {"task": "translate"}),
    "other": (SOUNDS["long"], {"method": sb.beam_search(2), "language": "german", "prompt": "abc"}),
    "drawn": (SOUNDS["short"], {"language": "en", "temperature": 0.5}),
}


class Expected(dict):
    """What the library itself writes down, with a pair of the same weights as the server's, when it is asked for."""

    def __init__(self):
        self.pair = sb.load(tiny_ears(), tiny_ears(1, 1), tokenizer=words.tokenizer())

    def __missing__(self, name):
        sound, options = ASKED[name]
        self[name] = by_the_library(self.pair, sound, **options)
        return self[name]


@pytest.fixture(scope="module")
def expected():
    return Expected()


@pytest.fixture(scope="module")
def served(ears):
    with running(AUDIO_CONFIG, ears) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served[0] + "/v1", api_key="none", max_retries=0) as made:
        yield made


def settle(server):
    """Wait until nothing is under way any more, and check that nothing is left."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not (server.engine.inside or server.engine.waiting or server.asking or server.speech.under_way):
            break
        time.sleep(0.01)
    assert (server.engine.inside, server.engine.waiting, server.asking, server.speech.under_way) == ([], 0, {}, 0)
    server.engine.call(lambda: None).result()
    pair = server.served.pair
    assert pair.target.caches + pair.draft.caches == []
    assert pair.target.runner.cross.lengths == []


@pytest.mark.parametrize(
    "name", ["short", *(pytest.param(name, marks=pytest.mark.slow) for name in SOUNDS if name != "short")]
)
def test_a_transcript_is_that_of_the_library_in_every_format(client, expected, served, name):
    """Fallback to higher temperatures included: chance has the seed of the request."""
    ours = expected[name]
    file = ("talk.wav", encoded(SOUNDS[name]))
    made = client.audio.transcriptions.create
    short = made(file=file, **GIVEN)
    assert short.text == ours.text
    assert short.usage.seconds == np.ceil(ours.duration)
    assert short.specbeam["law"] == ours.law
    assert short.specbeam["report"]["target_passes"] == ours.target_passes
    long = made(file=file, response_format="verbose_json", timestamp_granularities=["segment"], **GIVEN)
    assert (long.text, long.duration) == (ours.text, ours.duration)
    assert long.language in ("english", "german")
    assert [(one.start, one.end, one.text, one.tokens) for one in long.segments] == [
        (one.start, one.end, one.text, one.tokens) for one in ours.segments
    ]
    assert [one.avg_logprob for one in long.segments] == pytest.approx([one.avg_logprob for one in ours.segments])
    assert [one.seek for one in long.segments] == [one.seek for one in ours.segments]
    assert made(file=file, response_format="text", **GIVEN) == ours.text + "\n"
    for format in ("srt", "vtt"):
        assert made(file=file, response_format=format, **GIVEN) == formatted(ours, format)
    settle(served[1])


@pytest.mark.slow
def test_language_prompt_temperature_and_method_are_honoured_and_translations_are_english(client, expected, served):
    long, short = (("a", encoded(SOUNDS[name])) for name in ("long", "short"))
    body = {"seed": SEED, "specbeam": json.dumps({"method": "beam_search", "beams": 2})}
    found = client.audio.transcriptions.create(
        model="tiny", file=long, language="german", prompt="abc", extra_body=body, response_format="verbose_json"
    )
    assert found.language == "german"
    assert found.text == expected["other"].text
    found = client.audio.transcriptions.create(file=short, language="en", temperature=0.5, **GIVEN)
    assert found.text == expected["drawn"].text
    found = client.audio.translations.create(file=long, **GIVEN)
    assert found.text == expected["translated"].text
    settle(served[1])


@pytest.mark.slow
def test_files_of_all_kinds_are_heard_beside_each_other(client, served):
    """Each by itself gives the same text."""
    sound = noise(2.5, seed=4)
    files = {kind: media.kind(resampled(sound, RATE, rate), kind) for kind, (_, _, rate) in media.KINDS.items()}

    def text(kind):
        return client.audio.transcriptions.create(file=("x", files[kind]), **GIVEN).text

    alone = {kind: text(kind) for kind in files}
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(text, files)) == [alone[kind] for kind in files]
    settle(served[1])
    figures = httpx.get(served[0] + "/metrics").text
    counted = next(line for line in figures.splitlines() if line.startswith("specbeam:audio_seconds_total"))
    assert float(counted.rsplit(" ", 1)[1]) >= 2 * len(files) * 2.4


def test_silence_has_an_empty_text(client):
    found = client.audio.transcriptions.create(
        file=("x", encoded(np.zeros(RATE, dtype=np.float32))), response_format="verbose_json", **GIVEN
    )
    assert (found.text, found.segments, found.duration, found.language) == ("", [], 1.0, "")


GOOD = encoded(SOUNDS["short"])
REFUSED = {
    "no bytes": ({"file": ("a", b"")}, {}, 400, "bad_audio", "file", "audio is empty"),
    "a text": ({"file": ("a", b"no audio at all")}, {}, 400, "bad_audio", "file", "cannot be read as audio"),
    "half a header": ({"file": ("a", GOOD[:30])}, {}, 400, "bad_audio", "file", "the audio"),
    "half a file": ({"file": ("a", GOOD[: len(GOOD) // 2])}, {}, 400, "bad_audio", "file", "is cut off"),
    "a film": ({"file": ("a", media.video())}, {}, 400, "bad_audio", "file", "no sound"),
    "too short": ({"file": ("a", encoded(noise(0.05)))}, {}, 400, "bad_audio", "file", "at least 0.1 are needed"),
    "too long": (
        {"file": ("a", encoded(np.zeros(21 * RATE), codec="pcm_u8"))}, {}, 400, "bad_audio", "file",
        "longer than 20 seconds",
    ),
    "not finite": (
        {"file": ("a", encoded(np.full(RATE, np.nan, dtype=np.float32)))}, {}, 400, "bad_audio", "file", "not finite",
    ),
    "too fine": ({"file": ("a", encoded(noise(1), 192_000))}, {}, 400, "bad_audio", "file", "192000 samples"),
    "too many channels": (
        {"file": ("a", encoded(np.zeros((RATE, 9))))}, {}, 400, "bad_audio", "file", "9 channels",
    ),
    "no file": ({"x": ("a", GOOD)}, {}, 400, "unknown_field", "x", "the field file"),
    "a text as file": ({"file": (None, GOOD[:4].decode())}, {}, 400, "bad_setting", "file", "no filename"),
    "other model": ({}, {"model": "whisper-1"}, 404, "model_not_found", "model", "whisper-1"),
    "language": ({}, {"language": "french"}, 400, "bad_setting", "language", "this model knows 2 languages, by a code (de, en)"),
    "prompt": ({}, {"prompt": "a" * 50}, 400, "bad_setting", "prompt", "51 tokens"),
    "temperature": ({}, {"temperature": "1.5"}, 400, "bad_setting", "temperature", "1.5"),
    "method above 0": (
        {}, {"temperature": "0.5", "specbeam": '{"method": "greedy"}'}, 400, "bad_setting", "specbeam", "for temperature 0",
    ),
    "no number": ({}, {"temperature": "warm"}, 400, "bad_setting", "temperature", "warm"),
    "format": ({}, {"response_format": "doc"}, 400, "bad_setting", "response_format", "doc"),
    "words": (
        {}, {"timestamp_granularities[]": "word", "response_format": "verbose_json"}, 400, "not_supported",
        "timestamp_granularities", "of words are not supported",
    ),
    "times without a place": (
        {}, {"timestamp_granularities[]": "segment"}, 400, "bad_setting", "timestamp_granularities", "verbose_json",
    ),
    "stream": ({}, {"stream": "true"}, 400, "not_supported", "stream", "cannot be streamed"),
    "unknown": ({}, {"langauge": "en"}, 400, "unknown_field", "langauge", "did you mean language"),
    "twice": ({}, {"language": ["en", "de"]}, 400, "bad_setting", "language", "2 times"),
    "no JSON": ({}, {"specbeam": "{"}, 400, "bad_json", "specbeam", "not valid JSON"),
    "beams": ({}, {"specbeam": '{"beams": 99}'}, 400, "too_large_beams", "specbeam", "99 beams"),
    "trace": ({}, {"specbeam": '{"trace": true}'}, 400, "not_supported", "specbeam", "trace"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_heard_or_honoured_is_refused_by_name(served, name):
    files, fields, status, code, param, words_of = REFUSED[name]
    found = httpx.post(served[0] + "/v1/audio/transcriptions", files=files or {"file": ("a", GOOD)}, data=fields)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (status, code, param), error
    assert words_of in error["message"]


def test_bodies_of_another_kind_or_size_are_refused(served):
    url = served[0] + "/v1/audio/transcriptions"
    found = httpx.post(url, json={"file": "x"})
    assert (found.status_code, found.json()["error"]["code"]) == (415, "not_multipart")
    found = httpx.post(url, files={"file": ("a", bytes(2**20 + 1))})
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
    found = httpx.post(url, content=b"--x", headers={"content-type": "multipart/form-data; boundary=x"})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "bad_form")
    found = httpx.post(served[0] + "/v1/audio/translations", files={"file": ("a", GOOD)}, data={"language": "de"})
    assert found.json()["error"]["param"] == "language"


def test_texts_are_refused_where_the_model_hears(client, served):
    with pytest.raises(openai.BadRequestError, match="transcribes speech; send audio to /v1/audio/transcriptions"):
        client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="transcribes speech"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    props = httpx.get(served[0] + "/props").json()
    assert (props["has_speech"], props["has_chat"]) == (True, False)
    assert props["limits"]["max_audio_seconds"] == 20


def test_audio_is_refused_where_the_model_reads_texts():
    with running(dataclasses.replace(CONFIG, model="words"), words.pair()) as (url, _):
        found = httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", GOOD)})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "not_supported")
    assert "does not read audio" in found.json()["error"]["message"]


def slow_down(monkeypatch, server, seconds=0.02):
    """Let each step of the engine take longer, so that it can be met in the middle."""
    step = server.engine._step

    def slow():
        time.sleep(seconds)
        step()

    monkeypatch.setattr(server.engine, "_step", slow)


def test_a_client_that_leaves_ends_its_transcription_and_nobody_else_s(client, served, expected, monkeypatch):
    url, server = served
    slow_down(monkeypatch, server, 0.05)
    neighbour = []
    file = ("a", encoded(SOUNDS["short"]))

    def ask():
        neighbour.append(client.audio.transcriptions.create(file=file, **GIVEN).text)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", encoded(SOUNDS["long"]))}, timeout=0.5)
    thread.join()
    assert neighbour == [expected["short"].text]
    settle(server)
    assert server.metrics.finished["abort"] >= 1


def test_an_own_transcription_is_listed_and_can_be_ended(served, monkeypatch):
    url, server = served
    slow_down(monkeypatch, server, 0.1)
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=url, timeout=60) as http:
        answer = threads.submit(http.post, "/v1/audio/transcriptions", files={"file": ("a", encoded(SOUNDS["long"]))})
        end = time.monotonic() + 30
        while not (found := http.get("/v1/specbeam/requests").json()["data"]) and time.monotonic() < end:
            time.sleep(0.01)
        assert found[0]["method"] == "speculative_beam_search"
        assert 0 <= found[0]["seconds"] < 30
        assert http.delete(f"/v1/specbeam/requests/{found[0]['id']}").json()["cancelled"]
        assert answer.result().json()["error"]["code"] == "cancelled"
    settle(server)


@pytest.mark.slow
def test_a_fault_of_the_engine_costs_a_window_one_more_try(served, client, expected, monkeypatch):
    """What breaks in company is decoded once more, alone; a broken window alone fails with its request."""
    server = served[1]
    step = server.engine._decoder.step
    broken = []

    def breaks():
        if len(server.engine.inside) > 1 and not broken:
            broken.append(1)
            raise RuntimeError("broken on purpose")
        return step()

    monkeypatch.setattr(server.engine._decoder, "step", breaks)
    slow_down(monkeypatch, server, 0.05)
    names = ["short", "long"] * 2
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(
            lambda name: client.audio.transcriptions.create(file=("a", encoded(SOUNDS[name])), **GIVEN).text, names
        )
        assert list(texts) == [expected[name].text for name in names]
    assert broken
    settle(server)


def test_texts_of_a_fallback_are_decoded_one_after_the_other_where_there_is_one_place(
    served, client, expected, monkeypatch
):
    """Five texts above temperature 0 on a server with one place, and none to wait."""
    engine = served[1].engine
    monkeypatch.setattr(engine, "limits", dataclasses.replace(engine.limits, max_running=1, max_waiting=0))
    file = ("a", encoded(SOUNDS["short"]))
    found = client.audio.transcriptions.create(file=file, language="en", temperature=0.5, **GIVEN)
    assert found.text == expected["drawn"].text
    settle(served[1])


def test_a_transcription_that_is_cancelled_before_its_window_is_submitted_ends(served, monkeypatch):
    url, server = served
    submit = server.engine.submit

    def late(jobs):
        for one in [*server.asking.values()]:
            one.cancel()
        server.engine.call(lambda: None).result()
        assert all(job.is_over for job in jobs)
        submit(jobs)

    monkeypatch.setattr(server.engine, "submit", late)
    found = httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", GOOD)}, timeout=20)
    assert found.json()["error"]["code"] == "cancelled"
    settle(server)


def test_a_request_counts_until_its_thread_is_over(served, monkeypatch):
    """Though its client has left: the thread still holds the audio."""
    url, server = served
    goes_on = threading.Event()

    def waits(raw, most):
        assert goes_on.wait(20)
        return read_audio_bytes(raw, most)

    monkeypatch.setattr(hearing, "read_audio_bytes", waits)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", GOOD)}, timeout=0.5)
    end = time.monotonic() + 20
    while server.asking and time.monotonic() < end:
        time.sleep(0.01)
    assert (server.asking, server.speech.under_way) == ({}, 1)
    goes_on.set()
    settle(server)


def test_a_key_has_at_most_half_of_the_places_for_audio_while_there_are_others(served, monkeypatch):
    url, server = served
    monkeypatch.setattr(server, "keys", Keys({digest("first"): Client("a"), digest("second"): Client("b")}))
    monkeypatch.setattr(server.speech, "_here", Counter({"a": 4}))
    monkeypatch.setattr(server.speech, "under_way", 4)
    files = {"file": ("a", b"")}
    for key, status, code in (("first", 429, "key_limit"), ("second", 400, "bad_audio")):
        found = httpx.post(url + "/v1/audio/transcriptions", files=files, headers={"authorization": f"Bearer {key}"})
        assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    end = time.monotonic() + 20
    while server.speech.under_way > 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert (server.speech.under_way, server.speech._here) == (4, {"a": 4})


def test_audio_that_arrives_while_the_server_begins_to_end_is_refused(served, monkeypatch):
    url, server = served

    async def late(http, most, seconds):
        raw = await read_bytes(http, most, seconds)
        monkeypatch.setattr(server, "state", "draining")
        return raw

    monkeypatch.setattr(speech_desk, "read_bytes", late)
    found = httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", GOOD)})
    monkeypatch.setattr(server, "state", "ready")
    assert (found.status_code, found.json()["error"]["code"]) == (503, "draining")
    settle(server)


def test_audio_has_its_own_bound_also_under_a_prefix(served):
    """A body that is larger than other bodies may be goes through the first layer where a proxy has added a prefix."""
    config = dataclasses.replace(AUDIO_CONFIG, max_body=10, max_audio_body=1000)
    seen = []

    async def routes(scope, receive, send):
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        seen.append(message.get("status"))

    path = "/v1/audio/transcriptions"
    metrics = ServerMetrics("tiny")
    guarding = Guarding(routes, config, metrics, frozenset({path}))
    headers = [(b"host", b"localhost"), (b"content-length", b"500")]
    for prefix in ("", "/speech"):
        scope = {"type": "http", "method": "POST", "path": prefix + path, "root_path": prefix, "headers": headers}
        asyncio.run(guarding(scope, None, send))
    assert seen == [path, 200, "/speech" + path, 200]
    assert metrics.http[path, 200] == 2


@pytest.mark.parametrize("package", ["av", "soxr", "pysubs2"])
def test_a_server_that_could_not_read_audio_or_write_subtitles_does_not_start(served, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sb.errors.MissingPackage, match="speech"):
        served[1].speech.open(served[1].served.pair)


def test_too_many_requests_about_audio_are_told_to_come_again(served, monkeypatch):
    url, server = served
    monkeypatch.setattr(server.speech, "_most", 0)
    found = httpx.post(url + "/v1/audio/transcriptions", files={"file": ("a", GOOD)})
    assert (found.status_code, found.json()["error"]["code"]) == (429, "queue_full")
    assert int(found.headers["retry-after"]) >= 1


# Parts.


def test_bytes_are_read_as_the_samples_that_they_hold(monkeypatch):
    sound = noise(3.0, seed=1)
    monkeypatch.setattr(audio, "BLOCK", 1000)
    assert np.array_equal(read_audio_bytes(encoded(sound), 10), sound)


def test_two_channels_may_end_in_a_block_of_one_frame(monkeypatch):
    monkeypatch.setattr(audio, "BLOCK", 4000)
    sound = np.stack([noise(0.5, seed=1)[:4001]] * 2, 1)
    assert np.array_equal(read_audio_bytes(encoded(sound), 10), sound[:, 0])


def test_memory_does_not_grow_with_the_rate_of_audio():
    """A small file of a minute with 96 kHz: 23 MB of samples, 4 MB at 16 kHz."""
    raw = encoded(np.zeros(60 * 96_000), 96_000, "flac", "flac")
    assert len(raw) < 20_000
    tracemalloc.start()
    try:
        assert len(read_audio_bytes(raw, 60)) == 60 * RATE
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_audio_has_a_finite_bound(seconds):
    with pytest.raises(sb.errors.BadSetting, match="max_audio_seconds"):
        dataclasses.replace(AUDIO_CONFIG, max_audio_seconds=seconds)


def test_forms_are_read_whatever_bytes_their_files_hold():
    head = "multipart/form-data; boundary=XX"
    content = b"\x00\r\n--X\r\n\r\n\xff"
    raw = (
        b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\xc3\xa4\r\n'
        b'--XX\r\ncontent-type: audio/wav\r\nCONTENT-DISPOSITION: form-data; filename="../b"; name=file\r\n\r\n'
        + content + b"\r\n--XX--\r\n"
    )  # fmt: skip
    form = parse_form(head, raw)
    assert (form.fields, form.files) == ({"a": ["xä"]}, {"file": [content]})
    assert parse_form('multipart/form-data; charset=utf-8; boundary="XX"', b"before\r\n" + raw) == form
    rng = np.random.default_rng(0)
    for _ in range(2000):
        spoilt = bytearray(raw)
        for _ in range(int(rng.integers(1, 4))):
            spoilt[int(rng.integers(len(spoilt)))] = int(rng.integers(256))
        spoilt = spoilt[: int(rng.integers(1, len(spoilt) + 1))]
        with contextlib.suppress(Refusal):
            parse_form(head, bytes(spoilt))
