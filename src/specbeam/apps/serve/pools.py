"""Threads for slow work of requests; a request waits for a free one for a limited time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from specbeam.apps.serve.refusals import Refusal, invalid

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


class ConstraintPool(LimitedPool):
    """Threads that compile constraints, apart from all other work, because that may take long.

    Args:
        threads: number of constraints compiled at the same time.
        seconds: maximum number of seconds per constraint. A slower one is refused, but keeps its thread to its end.
        patience: see `LimitedPool`.
    """

    def __init__(self, threads: int, seconds: float, patience: float) -> None:
        super().__init__(threads, "specbeam constraint", patience)
        self._seconds = seconds

    async def make(self, function: Callable[[], Result], field: str) -> Result:
        """Return the result of a function that compiles the constraint in a field of a request.

        Raises `Refusal` if that takes too long, or no thread becomes free in time.
        """
        making = await self.start(function, "too many constraints are being compiled; try again later", field)
        done, _ = await asyncio.wait([making], timeout=self._seconds)
        if not done:
            raise invalid(
                f"the constraint took more than {self._seconds:g} seconds to compile; simplify it", field, "bad_grammar"
            )
        return making.result()
