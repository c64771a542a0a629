"""A server without a port, and what sends it requests."""

import asyncio
import contextlib
import json

import httpx2

from specbeam.apps.serve.app import BeamServer, make_app
from specbeam.apps.serve.config import ServerConfig


@contextlib.contextmanager
def asking(pair, **given):
    """A server of a pair; yields what sends it a request and returns the answer."""
    server = BeamServer(ServerConfig(**{"model": "tiny", "name": "tiny", "warm_up": False} | given), lambda: pair)
    server.start()
    app = make_app(server)

    async def sent(method, path, body, headers, content):
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://testserver") as client:
            return await client.request(method, path, json=body, headers=headers, content=content)

    def ask(path, body=None, method="POST", headers=None, content=None):
        return asyncio.run(sent(method, path, body, headers, content))

    try:
        yield ask
    finally:
        server.drain()
        server.close_pools()


def events_of(answer):
    """The JSON of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def choices_of(answer):
    """The choices of all events of a stream."""
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    return [choice for event in events_of(answer) for choice in event["choices"]]
