"""The pace of refusals, for clients that ask again at once."""

from collections.abc import Callable

REFUSALS_PER_S = 8.0  # refusals of one client per second
MOST_S = 1.0  # longest delay of a refusal, in seconds
MOST_CLIENTS = 1024  # clients that are remembered


class RefusalPace:
    """Delays the refusals of a client that is refused often.

    Each refusal takes milliseconds of the thread that serves all clients, and a client that ignores `Retry-After` could
    keep it busy. Clients that are rarely refused get their answer at once.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}  # by client, the time of its next refusal

    def delay(self, client: str) -> float:
        """Return the seconds after which a client is to be told that its request is refused."""
        now = self._clock()
        if len(self._next) >= MOST_CLIENTS:
            self._next = {other: then for other, then in self._next.items() if then > now}
        told = max(self._next.get(client, now), now)
        self._next[client] = min(told + 1 / REFUSALS_PER_S, now + MOST_S)
        return told - now
