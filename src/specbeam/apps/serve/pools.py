"""Threads for slow work of requests; a request waits for a free one for a limited time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specbeam.apps.serve.refusals import Refusal

Result = TypeVar("Result")


class LimitedPool:
    """A pool of threads. Work that finds no free thread in time is refused.

    Args:
        threads: number of threads.
        name: name of the threads.
        patience: maximum number of seconds that work waits for a thread.
    """

    def __init__(self, threads: int, name: str, patience: float) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)
        self._patience = patience

    async def start(
        self, function: Callable[[], Result], message: str, field: str | None = None
    ) -> "asyncio.Future[Result]":
        """Start a function in a free thread, which it occupies until it returns, even if its caller has gone.

        Raises `Refusal`, with this message and field, if no thread becomes free in time.
        """
        try:
            await asyncio.wait_for(self._free.acquire(), self._patience)
        except TimeoutError as error:
            raise Refusal(429, "rate_limit_error", "queue_timeout", message, field, 1) from error
        try:
            working = asyncio.get_running_loop().run_in_executor(self._pool, function)
        except BaseException:
            self._free.release()
            raise
        working.add_done_callback(self._is_over)
        return working

    def _is_over(self, working: "asyncio.Future[Any]") -> None:
        self._free.release()
        if not working.cancelled():
            working.exception()  # marks the exception as retrieved, because the client may be gone

    def close(self) -> None:
        """Stop the threads after their current work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class KeyedPool(LimitedPool):
    """A pool of which each key has a part of the threads, so that slow work costs its sender only.

    Args:
        threads, name: see `LimitedPool`.
        per_key: number of threads of a key.
        seconds: maximum number of seconds of a function. A slower one is refused, but keeps its thread to its end.
        patience: see `LimitedPool`.
    """

    def __init__(self, threads: int, name: str, per_key: int, seconds: float, patience: float) -> None:
        super().__init__(threads, name, patience)
        self._per_key = per_key
        self._seconds = seconds
        self._own: dict[str, asyncio.Semaphore] = {}  # by key, its free threads; only of keys with work
        self._inside: dict[str, int] = {}  # by key, the number of requests that wait or work

    async def make(self, key: str, function: Callable[[], Result], busy: str, late: Refusal) -> Result:
        """Return the result of a function for a key.

        Args:
            busy: the message if no thread becomes free in time.
            late: raised if the function takes too long.

        Raises `Refusal` in these two cases.
        """
        own = self._own.setdefault(key, asyncio.Semaphore(self._per_key))
        self._inside[key] = self._inside.get(key, 0) + 1
        try:
            await asyncio.wait_for(own.acquire(), self._patience)
        except TimeoutError as error:
            self._leave(key)
            raise Refusal(429, "rate_limit_error", "queue_timeout", busy, late.param, 1) from error
        except BaseException:
            self._leave(key)
            raise
        try:
            making = await self.start(function, busy, late.param)
        except BaseException:
            own.release()
            self._leave(key)
            raise

        def is_over(_: "asyncio.Future[Result]") -> None:
            own.release()
            self._leave(key)

        making.add_done_callback(is_over)
        done, _ = await asyncio.wait([making], timeout=self._seconds)
        if not done:
            raise late
        return making.result()

    def _leave(self, key: str) -> None:
        """Forget a key without work, so that the memory does not grow with the number of keys."""
        self._inside[key] -= 1
        if not self._inside[key]:
            del self._inside[key]
            del self._own[key]


@dataclass(frozen=True)
class Pools:
    """The threads that work for requests before they are decoded.

    Attributes:
        small, large: read and tokenize small and large bodies.
        constraints: compile constraints.
    """

    small: KeyedPool
    large: KeyedPool
    constraints: KeyedPool

    def close(self) -> None:
        """Stop all threads after their current work."""
        for pool in (self.small, self.large, self.constraints):
            pool.close()
