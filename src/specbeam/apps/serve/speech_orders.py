"""Orders for audio, read from the fields of a form."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from specbeam import Method
from specbeam.apps.serve.mapping import Served, check_model, named_method
from specbeam.apps.serve.multipart import MultipartForm
from specbeam.apps.serve.protocol import SpecbeamOptions, Strict, object_of, refusal_of_fields
from specbeam.apps.serve.refusals import invalid, shown
from specbeam.apps.speech.transcribe import TEMPERATURES

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
TAKEN = {"method", "beams", "no_repeat_ngram_size", "report"}  # specbeam's fields that apply to audio


class AudioBody(Strict):
    """The fields of a request about audio, without the audio."""

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
    """A request about audio.

    Attributes:
        task: "transcribe", or "translate" for English text.
        method: at temperature 0.
        method_key: its name with the settings that were given; "": the server's own.
        temperatures: of each window; the next one is taken if a text fails a threshold.
        options: for the decoding of windows.
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
        raise invalid("translations are into English; leave language out", "language")
    if body.timestamp_granularities is not None and body.response_format != "verbose_json":
        raise invalid(
            f"timestamp_granularities is for response_format 'verbose_json', and it is {body.response_format!r}",
            "timestamp_granularities",
        )
    options = body.specbeam or SpecbeamOptions()
    method, key = _method(options, served)
    temperature = body.temperature or 0.0
    if 0 < temperature < 1e-4:
        raise invalid(f"temperature is {temperature}; it must be 0 or at least 0.0001", "temperature")
    further = {} if options.no_repeat_ngram_size is None else {"no_repeat_ngram_size": options.no_repeat_ngram_size}
    temperatures = TEMPERATURES if temperature == 0 else (temperature,)
    return SpeechOrder(body, task, method, key, temperatures, further), audio


def _file(form: MultipartForm) -> bytes:
    """Return the bytes of the audio."""
    if "file" in form.fields:
        raise invalid("the field file has no filename, so it is a text; send the bytes of a file", "file")
    if wrong := sorted(set(form.files) - {"file"}):
        raise invalid(
            f"the form has a file {shown(wrong[0])}; audio goes into the field file", wrong[0], "unknown_field"
        )
    files = form.files.get("file", [])
    if len(files) != 1:
        raise invalid(f"the form has {len(files)} files in its field file; it must have one", "file")
    return files[0]


def _body(form: MultipartForm) -> AudioBody:
    """Return the fields of a form. One that is empty is not given, as null in JSON."""
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
            given[name] = filled  # of a name that is not known
    if "word" in given.get("timestamp_granularities", []):
        raise invalid(
            "times of single words are not made; timestamp_granularities may be 'segment'", "timestamp_granularities",
            "not_supported",
        )  # fmt: skip
    if given.get("stream") is True:
        raise invalid("transcripts are not streamed; leave stream out", "stream", "not_supported")
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
    """Return the method of windows at temperature 0, and its name with its settings."""
    if wrong := sorted(options.model_fields_set - TAKEN - set(options.model_extra or {})):
        raise invalid(f"specbeam.{wrong[0]} does not apply to audio; leave it out", "specbeam", "not_supported")
    further = dict(options.model_extra or {})
    if options.method is None and options.beams is None:
        if further:
            raise invalid(
                f"specbeam has {', '.join(sorted(further))}, which are settings of a method; name it in specbeam.method",
                "specbeam",
                "unknown_field",
            )
        return served.method, ""
    method, key = named_method(options, further, options.beams, served)
    if method.beams > served.config.max_beams:
        raise invalid(
            f"{method.name} has {method.beams} beams; this server takes {served.config.max_beams}",
            "specbeam",
            "too_large_beams",
        )
    return method, key
