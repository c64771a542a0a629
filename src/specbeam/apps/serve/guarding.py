"""ASGI middleware: checks of host, origin and size before a body is read, response headers, and a log line per request."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import Response

from specbeam.apps.serve.asking import new_number
from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.metrics import ServerMetrics
from specbeam.apps.serve.refusals import Refusal, invalid
from specbeam.apps.serve.speech_orders import TASKS

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
LOG = logging.getLogger("specbeam.serve")
OPERATORS = ("/live", "/health", "/ready", "/metrics")  # paths without a limit, and not in the log
LONGEST_PATH = 200  # characters of a path in the log
MOST_REQUESTS = 1024  # requests in progress
_NUMBER = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Guarding:
    """The middleware around the routes.

    Args:
        app: the routes.
        config: the operator's settings.
        metrics: counts answers by path and status.
        paths: the paths that are counted separately; all others are counted as "other".
    """

    def __init__(self, app: Any, config: ServerConfig, metrics: ServerMetrics, paths: frozenset[str]) -> None:
        self.app = app
        self.config = config
        self.metrics = metrics
        self.paths = paths
        self._under_way = 0  # requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        number = given if _NUMBER.fullmatch(given) else new_number()
        scope["state"] = {**scope.get("state", {}), "number": number, "note": {}}
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # the routes may be mounted below another path
        began = time.monotonic()
        status = 500

        async def reply(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *self._headers(number, headers)]}
            await send(message)

        self._under_way += 1
        try:
            refusal = self._refusal(path, headers) or self._refusal_of_page(scope["method"], headers)
            if refusal is not None:
                scope["state"]["note"]["error"] = refusal.code
                await refusal.response()(scope, receive, reply)
            elif scope["method"] == "OPTIONS" and headers.get("origin") in self.config.cors_origins:
                await _preflight(headers)(scope, receive, reply)
            else:
                await self.app(scope, receive, reply)
        finally:
            self._under_way -= 1
            self.metrics.http[path if path in self.paths else "other", status] += 1
            if path not in OPERATORS or status == 403:
                address = (scope.get("client") or ("",))[0]
                line = {"id": number, "path": path[:LONGEST_PATH], "client": address, "status": status}
                line["seconds"] = round(time.monotonic() - began, 4)
                LOG.info("request", extra={"fields": line | scope["state"]["note"]})

    def _headers(self, number: str, given: dict[str, str]) -> list[tuple[bytes, bytes]]:
        found = {"x-request-id": number, "x-content-type-options": "nosniff", "cache-control": "no-store"}
        origin = given.get("origin")
        if origin is not None and origin in self.config.cors_origins:
            exposed = "retry-after, x-request-id, x-should-retry"
            found |= {"access-control-allow-origin": origin, "access-control-expose-headers": exposed, "vary": "origin"}
        return [(name.encode(), value.encode("latin-1")) for name, value in found.items()]

    def _refusal(self, path: str, headers: dict[str, str]) -> Refusal | None:
        """Return the refusal of a request for its host or size, or if there are too many; None if it is fine."""
        if self.config.is_local:
            host = re.sub(r":[0-9]+$", "", headers.get("host", "")).strip("[]").lower()
            own = ("localhost", "127.0.0.1", "::1", "testserver", *(name.lower() for name in self.config.allowed_hosts))
            if host not in own:
                return Refusal(
                    403, "permission_error", "forbidden",
                    f"host {host[:100]!r} is not allowed; start the server with --allowed-host {host[:100]}",
                )  # fmt: skip
        if self._under_way > MOST_REQUESTS and path not in OPERATORS:
            message = f"{MOST_REQUESTS} requests are in progress, the limit of this server; try again later"
            return Refusal(503, "overloaded_error", "too_many_requests", message, None, 1)
        length = headers.get("content-length", "0")
        most = self.config.max_audio_body if path in TASKS else self.config.max_body
        if length.isdigit() and int(length) > most:
            return invalid(
                f"the body has {length} bytes; this server accepts at most {most}", None, "body_too_large", 413
            )
        return None

    def _refusal_of_page(self, method: str, headers: dict[str, str]) -> Refusal | None:
        """Return the refusal of a request that a web page of another site sends without permission; None for all others.

        A browser sends some requests of any page without asking, such as forms, and only hides the answers from the page.
        Their bodies would be decoded, so they are refused by the headers that a page cannot change. Programs send neither
        of the two headers.
        """
        if method in ("GET", "HEAD", "OPTIONS"):  # these change and decode nothing
            return None
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site")
        if origin in self.config.cors_origins or (origin is None and site is None):
            return None
        is_own = origin is not None and origin.partition("://")[2] == headers.get("host")
        if site in ("same-origin", "none") or (site is None and is_own):
            return None
        shown = "a page of another site" if origin is None else f"a page of {origin[:100]!r}"
        return Refusal(
            403,
            "permission_error",
            "forbidden",
            f"{shown} must not send requests; start the server with --cors-origin {(origin or 'ORIGIN')[:100]}",
        )


def _preflight(given: dict[str, str]) -> Response:
    """Return the answer to a browser that asks whether a page of an allowed origin may send a request.

    All headers that it asks for are allowed: clients send their version, system and retry count in custom headers. All
    methods are allowed, too: an unknown one is refused later, with an error that the page can read.
    """
    asked = given.get("access-control-request-headers", "authorization, content-type, x-request-id")
    found = {
        "access-control-allow-methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "access-control-allow-headers": asked,
        "access-control-max-age": "600",
    }
    if given.get("access-control-request-private-network") == "true":
        found["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=found)
