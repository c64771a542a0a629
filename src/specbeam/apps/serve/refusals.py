"""Refusals: error answers of the server, in OpenAI's form."""

from dataclasses import dataclass
from typing import Any

from specbeam.apps.serve.engine import Draining, EngineFailed, NoRoom, QueueFull, QueueTimeout
from specbeam.doors import OPTIONS
from specbeam.errors import (
    BadAudio,
    BadPrompt,
    BadSetting,
    BrokenLaw,
    BrokenPart,
    Cancelled,
    DeadEnd,
    LostLaw,
    MissingPackage,
    NotSupported,
    SpecbeamError,
    TimedOut,
    TooFewAnswers,
)

LONGEST = 200  # characters of a value that a message repeats
MOST_PROBLEMS = 10


@dataclass(eq=False)
class Refusal(Exception):
    """An error answer: the found value, the expected one, and advice.

    Args:
        status: of HTTP.
        kind: OpenAI's type of the error.
        code: what went wrong, in one word.
        message: for people.
        param: the field that it is about; None: no single one.
        retry_after: seconds after which to try again; None: trying again helps nothing.
    """

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The answer as JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(min(max(self.retry_after, 1), 60))
        if self.status == 408:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str = "bad_setting", status: int = 400) -> Refusal:
    """Return the refusal of a request that cannot be answered as it is."""
    return Refusal(status, "invalid_request_error", code, message, param)


def shown(value: object) -> str:
    """Return a value for a message, cut if it is long."""
    if isinstance(value, (str, list)):
        value = value[: LONGEST + 1]  # each part has a character at least: the rest would be cut off anyway
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


# By kind of error, the first that fits: status, type and code.
_KINDS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (QueueFull, 429, "rate_limit_error", "queue_full"),
    (QueueTimeout, 429, "rate_limit_error", "queue_timeout"),
    (Draining, 503, "overloaded_error", "draining"),
    (EngineFailed, 500, "server_error", "engine_error"),
    (NoRoom, 400, "invalid_request_error", "context_length_exceeded"),
    (TimedOut, 408, "timeout_error", "request_timeout"),
    (Cancelled, 499, "server_error", "cancelled"),
    (TooFewAnswers, 422, "decoding_error", "no_answer"),
    (DeadEnd, 422, "decoding_error", "dead_end"),
    (BrokenLaw, 422, "decoding_error", "broken_law"),
    (BrokenPart, 500, "server_error", "broken_part"),
    (BadAudio, 400, "invalid_request_error", "bad_audio"),
    (BadPrompt, 400, "invalid_request_error", "bad_prompt"),
    (LostLaw, 400, "invalid_request_error", "bad_setting"),
    (NotSupported, 400, "invalid_request_error", "not_supported"),
    (MissingPackage, 400, "invalid_request_error", "not_supported"),
    (BadSetting, 400, "invalid_request_error", "bad_setting"),
)

_SAME = ("seed", "language")  # what requests call as the library does, besides options


def refusal_of(error: Exception, retry_after: int = 1) -> Refusal:
    """Return the answer to a request that raised this error."""
    if isinstance(error, Refusal):
        return error
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            message = str(error)
            param = param_of(message) if status == 400 else None
            if code == "bad_prompt" and "positions" in message:
                code = "context_length_exceeded"
            if code == "bad_setting" and param in ("response_format", "structured_outputs"):
                code = "bad_grammar"
            return Refusal(status, name, code, message, param, retry_after if status in (429, 503) else None)
    kind_name = "a mistake of the server" if not isinstance(error, SpecbeamError) else type(error).__name__
    return Refusal(500, "server_error", "engine_error", f"{kind_name}; the log has more under the id of this request")


def param_of(message: str) -> str | None:
    """Return the field of a request that an error of the library is about: the option that it begins with."""
    first = message.split(" ", 1)[0].split("=", 1)[0].rstrip(":,")
    if first.startswith("prompt"):
        return "prompt"
    option = OPTIONS.get(first)
    if first in _SAME or (option is not None and option.field is not None):
        return first
    return option.names[0] if option is not None and option.names else None
