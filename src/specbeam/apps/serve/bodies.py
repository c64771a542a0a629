"""Reading of request bodies, and clients that disconnect before they have their answer."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from specbeam.apps.serve.refusals import Refusal, invalid

BODY_S = 30.0  # seconds in which a body must arrive
Result = TypeVar("Result")


async def read_body(http: Request, most: int) -> bytes:
    """Return the body of a request. Raises `Refusal` if it is too large, too slow, or not JSON by its header.

    A missing header is refused, too: web pages may send bodies without it to any server.
    """
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        found = repr(kind[:100]) if kind else "missing"
        raise invalid(f"the content type is {found}; send application/json", None, "not_json", 415)
    return await read_bytes(http, most, BODY_S)


async def read_bytes(http: Request, most: int, seconds: float) -> bytes:
    """Return the body of a request of any type. Raises `Refusal` if it is too large or too slow."""
    parts: list[bytes] = []
    size = 0

    async def read() -> None:
        nonlocal size
        try:
            async for part in http.stream():
                size += len(part)
                if size > most:
                    raise invalid(
                        f"the body has more than {most} bytes, the limit of this server", None, "body_too_large", 413
                    )
                parts.append(part)
        except ClientDisconnect as error:
            message = "the client has disconnected before the end of its body"
            raise Refusal(499, "server_error", "cancelled", message) from error

    try:
        await asyncio.wait_for(read(), seconds)
    except TimeoutError as error:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise Refusal(408, "timeout_error", "request_timeout", message) from error
    return b"".join(parts)


async def unless_gone(http: Request, answer: Awaitable[Result]) -> Result:
    """Return the answer, or raise `Refusal` as soon as the client disconnects."""
    working = asyncio.ensure_future(answer)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refusal(499, "server_error", "cancelled", "the client has disconnected")
    finally:
        for task in (working, leaving):
            task.cancel()
