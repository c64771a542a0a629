"""Translates multipart forms to checked audio requests."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from specbeam import Method
from specbeam.apps.serve.mapping import Served, check_beams, check_model, named_method, refuse_loose
from specbeam.apps.serve.multipart import MultipartForm
from specbeam.apps.serve.protocol import SpecbeamOptions, Strict, object_of, refusal_of_fields
from specbeam.apps.serve.refusals import invalid, shown
from specbeam.apps.speech.transcribe import TEMPERATURES

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
TAKEN = {"method", "beams", "no_repeat_ngram_size", "report"}  # fields of specbeam that apply to audio


class AudioBody(Strict):
    """The fields of an audio request other than the file."""

    model: str | None = None
    language: Annotated[str, Field(max_length=64)] | None = None
    prompt: Annotated[str, Field(max_length=16384)] | None = None
    response_format: AudioFormat = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    timestamp_granularities: Annotated[list[Literal["segment"]], Field(min_length=1, max_length=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: Literal[False] | None = None
    specbeam: SpecbeamOptions | None = None


@dataclass(frozen=True)
class SpeechOrder:
    """A checked audio request.

    Attributes:
        task: "transcribe", or "translate" for English text.
        method: method at temperature 0.
        method_key: key of the method with its settings; "" for the server's default method.
        temperatures: temperatures of a window: the next one is used if a text fails a threshold.
        options: options for decoding windows.
    """

    body: AudioBody
    task: str
    method: Method
    method_key: str
    temperatures: tuple[float, ...]
    options: dict[str, Any]


def speech_order_of(form: MultipartForm, task: str, served: Served) -> tuple[SpeechOrder, bytes]:
    """Return the order in a form, and the bytes of its audio. Raises `Refusal` if it cannot be fulfilled."""
    audio = _file(form)
    body = _body(form)
    check_model(body.model, served)
    if task == "translate" and body.language is not None:
        raise invalid("translations are always into English; leave out language", "language")
    if body.timestamp_granularities is not None and body.response_format != "verbose_json":
        raise invalid(
            f"timestamp_granularities needs response_format 'verbose_json'; it is {body.response_format!r}",
            "timestamp_granularities",
        )
    options = body.specbeam or SpecbeamOptions()
    method, key = _method(options, served)
    temperature = body.temperature or 0.0
    if 0 < temperature < 1e-4:
        raise invalid(f"temperature is {temperature}; it must be 0 or at least 0.0001", "temperature")
    if key and temperature > 0:
        raise invalid(
            f"temperature is {temperature}, and specbeam.method and specbeam.beams are for temperature 0: above it "
            "texts are sampled; leave one of them out",
            "specbeam",
        )
    further = {} if options.no_repeat_ngram_size is None else {"no_repeat_ngram_size": options.no_repeat_ngram_size}
    temperatures = TEMPERATURES if temperature == 0 else (temperature,)
    return SpeechOrder(body, task, method, key, temperatures, further), audio


def _file(form: MultipartForm) -> bytes:
    """Return the bytes of the audio."""
    if "file" in form.fields:
        raise invalid("the field file has no filename, so it is not a file; upload one", "file")
    if wrong := sorted(set(form.files) - {"file"}):
        raise invalid(
            f"the form has a file in the field {shown(wrong[0])}; send audio in the field file",
            wrong[0],
            "unknown_field",
        )
    files = form.files.get("file", [])
    if len(files) != 1:
        raise invalid(f"the field file has {len(files)} files; send exactly one", "file")
    return files[0]


def _body(form: MultipartForm) -> AudioBody:
    """Return the fields of a form. An empty field counts as not given, like null in JSON."""
    given: dict[str, Any] = {}
    for name, values in form.fields.items():
        one = name.removesuffix("[]")
        filled = [value for value in values if value != ""]
        if not filled:
            continue
        if one == "timestamp_granularities":
            given[one] = [*given.get(one, []), *filled]
        elif one == name and len(filled) == 1:
            given[one] = _value(one, filled[0])
        elif one == name:
            raise invalid(f"{shown(name)} is given {len(filled)} times; give it once", name)
        else:
            given[name] = filled  # an unknown name, which the validation refuses
    if "word" in given.get("timestamp_granularities", []):
        raise invalid(
            "timestamps of words are not supported; set timestamp_granularities to 'segment'", "timestamp_granularities",
            "not_supported",
        )  # fmt: skip
    if given.get("stream") is True:
        raise invalid("transcripts cannot be streamed; leave out stream", "stream", "not_supported")
    try:
        return AudioBody.model_validate(given)
    except ValidationError as error:
        raise refusal_of_fields(error, AudioBody) from error


def _value(name: str, text: str) -> Any:
    """Return the parsed value of a field; the text itself if it cannot be parsed."""
    if name == "stream":
        return {"true": True, "false": False, "True": True, "False": False}.get(text, text)
    if name == "specbeam":
        return object_of(text.encode("utf-8"), "the field specbeam", "specbeam")
    if name not in ("temperature", "seed"):
        return text
    try:
        return float(text) if name == "temperature" else int(text)
    except ValueError:
        return text


def _method(options: SpecbeamOptions, served: Served) -> tuple[Method, str]:
    """Return the method at temperature 0, and its key."""
    if wrong := sorted(options.model_fields_set - TAKEN - set(options.model_extra or {})):
        raise invalid(f"specbeam.{wrong[0]} does not apply to audio; leave it out", "specbeam", "not_supported")
    further = dict(options.model_extra or {})
    if options.method is None and options.beams is None:
        refuse_loose(further)
        return served.method, ""
    method, key = named_method(options, further, options.beams, served)
    check_beams(method, served.config)
    return method, key
