"""Keeping a model to one thread at a time: its cache of keys and values is shared by all texts that are decoded with it."""

import threading
from weakref import WeakKeyDictionary

from specbeam.core.errors import NotSupported


class ThreadGuard:
    """The users of a model, such as decoders with unfinished texts, each with the thread that it works in.

    Two threads that decode with one model would move each other's keys and values, so the second one is refused. A user
    that is alone may change its thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: WeakKeyDictionary[object, threading.Thread] = WeakKeyDictionary()

    def hold(self, user: object) -> threading.Thread | None:
        """Note that `user` works with the model in the current thread, until `drop`.

        Returns the thread that it worked in before, for `give_back`; None if it did not work with the model.

        Raises `NotSupported` if another user works in another thread that is alive.
        """
        with self._lock:
            self._check(user)
            before = self._threads.get(user)
            self._threads[user] = threading.current_thread()
            return before

    def give_back(self, user: object, before: threading.Thread | None) -> None:
        """Undo a `hold`, which returned `before`."""
        with self._lock:
            if before is None:
                self._threads.pop(user, None)
            else:
                self._threads[user] = before

    def drop(self, user: object) -> None:
        """Note that `user` does not work with the model any more."""
        with self._lock:
            self._threads.pop(user, None)

    def check(self) -> None:
        """Raise `NotSupported` if anybody works with the model in another thread that is alive."""
        with self._lock:
            self._check(None)

    def _check(self, user: object) -> None:
        here = threading.current_thread()
        for other, thread in self._threads.items():
            if other is not user and thread is not here and thread.is_alive():
                raise NotSupported(
                    f"thread {thread.name!r} is decoding with this model, and thread {here.name!r} would, too: all texts of "
                    "a model share one cache. Load a pair per thread, give all prompts to one generate(), or let one "
                    "specbeam.apps.serve.engine.Engine decode for all threads"
                )
