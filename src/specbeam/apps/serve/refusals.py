"""Error answers of the server, in OpenAI's format."""

from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

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
    """An error answer. Its message gives the value found, the value expected, and advice.

    Args:
        status: HTTP status.
        kind: OpenAI's error type.
        code: machine-readable name of the error.
        param: the field at fault; None if there is no single one.
        retry_after: seconds after which to try again; None if trying again does not help.
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
        """The headers of the answer in addition to the usual ones."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(min(max(self.retry_after, 1), 60))
        if self.status == 408:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self) -> JSONResponse:
        """Return the answer with its status and headers."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str = "bad_setting", status: int = 400) -> Refusal:
    """Return the refusal of an invalid request."""
    return Refusal(status, "invalid_request_error", code, message, param)


def shown(value: object) -> str:
    """Return a value for a message, cut if it is long."""
    if isinstance(value, (str, list)):
        value = value[: LONGEST + 1]  # keeps `repr` short: each element takes at least one character
    text = repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


# Status, type and code by class of error; the first match counts.
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

_SAME = ("seed", "language")  # arguments of the library, other than options, that are fields of the same name


def refusal_of(error: Exception, retry_after: int = 1) -> Refusal:
    """Return the error answer for an exception."""
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
    what = type(error).__name__ if isinstance(error, SpecbeamError) else "internal error"
    return Refusal(500, "server_error", "engine_error", f"{what}; see the server's log under the id of this request")


def param_of(message: str) -> str | None:
    """Return the field of a request that the library's error message starts with; None if it starts with none."""
    first = message.split(" ", 1)[0].split("=", 1)[0].rstrip(":,")
    if first.startswith("prompt"):
        return "prompt"
    option = OPTIONS.get(first)
    if first in _SAME or (option is not None and option.field is not None):
        return first
    return option.names[0] if option is not None and option.names else None
