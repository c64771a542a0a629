"""Connections: limits for silent ones, a time for the head of a request, and clients that have sent all they want to send.

uvicorn counts connections, not requests: as many silent ones as it allows keep everybody out. Here a connection without a
request gives its place to a newer one, so silent connections cost their owner and nobody else.
"""

import asyncio
import socket
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

OTHER_FILES = 256  # descriptors for files, models and the listening socket, besides connections
GRACE_S = 0.3  # seconds in which a new connection keeps its place although nothing has arrived
LEAVING_S = 0.05  # seconds between two looks at a client that has closed its side
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """The open connections, with the number of places for them.

    Args:
        most: maximum number of connections.
        most_per_address: maximum number of connections of one address.
        head_s: seconds from the opening of a connection, or from the first byte of a later request, to the end of the
            request's head.
    """

    def __init__(self, most: int, most_per_address: int, head_s: float) -> None:
        self.most = most
        self.most_per_address = most_per_address
        self.head_s = head_s
        self._count = 0
        self._count_of: dict[str, int] = {}  # by address
        self._silent: dict[
            str, dict[GuardedConnection, float]
        ] = {}  # by address, without a request, since when; oldest first

    def add(self, one: "GuardedConnection") -> None:
        """Add a new connection. The oldest silent ones of its address, or of the fullest one, are closed if needed.

        The new one is taken even if all others have requests or have just come.
        """
        address = one.address
        while self._count_of.get(address, 0) >= self.most_per_address and self._closes_oldest(address):
            pass
        while self._count >= self.most and self._closes_oldest(self._fullest()):
            pass
        self._count += 1
        self._count_of[address] = self._count_of.get(address, 0) + 1
        self.is_silent(one)

    def remove(self, one: "GuardedConnection") -> None:
        """Remove a connection that is closed or about to be; only once."""
        if one.has_place:
            one.has_place = False
            self.is_busy(one)
            self._count -= 1
            self._count_of[one.address] -= 1
            if not self._count_of[one.address]:
                del self._count_of[one.address]

    def is_silent(self, one: "GuardedConnection") -> None:
        """Note that a connection has no request."""
        self._silent.setdefault(one.address, {})[one] = time.monotonic()

    def is_busy(self, one: "GuardedConnection") -> None:
        """Note that a connection has a request, or is closed."""
        silent = self._silent.get(one.address, {})
        silent.pop(one, None)
        if not silent:
            self._silent.pop(one.address, None)

    def _fullest(self) -> str:
        """Return the address with most silent connections."""
        return max(self._silent, key=lambda address: len(self._silent[address]), default="")

    def _closes_oldest(self, address: str) -> bool:
        """Close the oldest silent connection of an address; return False if there is none that has had its time."""
        oldest, since = next(iter(self._silent.get(address, {}).items()), (None, 0.0))
        if oldest is None or time.monotonic() - since < GRACE_S:
            return False
        self.remove(oldest)
        oldest.transport.abort()
        return True


class GuardedConnection(H11Protocol):
    """A connection of uvicorn that knows its place among others.

    Args:
        connections: all connections of the server.
        uvicorns: the arguments of uvicorn's own connections.
    """

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.has_place = True  # whether it is counted
        self._all = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._leaving_timer: asyncio.TimerHandle | None = None
        self._has_sent = False  # whether a byte of the present request has arrived

    @property
    def address(self) -> str:
        """The address of the client; that of the proxy if there is one."""
        return self.client[0] if self.client else ""

    @property
    def is_asking(self) -> bool:
        """Whether a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._all.add(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._leaving_timer):
            if timer is not None:
                timer.cancel()
        self._all.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_sent = True
        if not self.is_asking:
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_asking:
            self._has_sent = False
            self._all.is_busy(self)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    def on_response_complete(self) -> None:
        self._all.is_silent(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self._all.is_busy(self)

    def _expect_head(self) -> None:
        """Expect the head of a request within some seconds."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._all.head_s, self._end_slow)

    def _end_slow(self) -> None:
        """Close a connection whose request did not arrive in time."""
        self._head_timer = None
        if self.transport.is_closing() or self.is_asking:
            return
        if self._has_sent:
            self.transport.write(TOO_SLOW)
        self.transport.close()

    def eof_received(self) -> bool:
        """Keep the connection of a client that has sent its request, closed its own side, and still reads.

        A client that has gone altogether looks the same at first. It answers the next bytes with a reset, so it is sent
        an interim answer, which HTTP/1.1 clients must accept at any time. Proxies that speak HTTP/1.0 close a connection
        only when their client has gone.
        """
        is_whole = self.is_asking and not self.cycle.more_body and self.scope["http_version"] != "1.0"
        if not is_whole or self.scheme == "https":  # TLS has no half-closed connections
            return False
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self._look_if_gone()
        return True

    def _look_if_gone(self) -> None:
        """Close the connection if its client has reset it; look again later if not."""
        if self.transport.is_closing():
            return
        own = self.transport.get_extra_info("socket")
        if own is not None and own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._leaving_timer = self.loop.call_later(LEAVING_S, self._look_if_gone)


def most_connections(wanted: int) -> int:
    """Return the number of connections that the process can have, at most `wanted`, and raise its limit of open files."""
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(min(wanted, 3 * (soft - OTHER_FILES) // 4), 1)  # a quarter for those that have just come
