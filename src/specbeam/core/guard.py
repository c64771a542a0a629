"""Guards that keep a model to one thread at a time, because all its texts share one cache of keys and values."""

import threading
from weakref import WeakKeyDictionary

from specbeam.core.errors import NotSupported


class ThreadGuard:
    """The users of a model, such as decoders with unfinished texts, with their threads.

    Two threads that decode with one model would move each other's keys and values, so the second one is refused. The only
    user of a model may change its thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: WeakKeyDictionary[object, threading.Thread] = WeakKeyDictionary()

    def hold(self, user: object) -> threading.Thread | None:
        """Register `user` in the current thread, until `drop`.

        Returns its former thread, to pass to `give_back`; None if it was not registered.

        Raises `NotSupported` if another user works in another thread that is alive.
        """
        with self._lock:
            self._check(user)
            before = self._threads.get(user)
            self._threads[user] = threading.current_thread()
            return before

    def give_back(self, user: object, before: threading.Thread | None) -> None:
        """Undo a `hold` that returned `before`."""
        with self._lock:
            if before is None:
                self._threads.pop(user, None)
            else:
                self._threads[user] = before

    def drop(self, user: object) -> None:
        """Remove `user`."""
        with self._lock:
            self._threads.pop(user, None)

    def check(self) -> None:
        """Raise `NotSupported` if any user works in another thread that is alive."""
        with self._lock:
            self._check(None)

    def _check(self, user: object) -> None:
        here = threading.current_thread()
        for other, thread in self._threads.items():
            if other is not user and thread is not here and thread.is_alive():
                raise NotSupported(
                    f"thread {thread.name!r} is decoding with this model, so thread {here.name!r} cannot: all texts of a "
                    "model share one cache. Load a pair per thread, give all prompts to one generate(), or let one "
                    "specbeam.apps.serve.engine.Engine decode for all threads"
                )
