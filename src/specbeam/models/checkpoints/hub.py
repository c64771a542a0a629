"""Look-ups of names on the hub of Hugging Face, which without a network end at once."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

PATIENCE_S = 3.0  # seconds to wait for a connection
KNOWN_S = {True: 300.0, False: 20.0}  # seconds for which it is known whether the hub can be reached
_FOUND: dict[str, tuple[bool, float]] = {}  # by address: whether it was reached, and when
_LOCK = threading.Lock()
_INSIDE = [0]  # number of look-ups for which the hub is left alone


@contextmanager
def hub_lookups(name: "str | Path") -> Iterator[None]:
    """Let a library look up a name on the hub if the hub can be reached, and otherwise in its cache only.

    Without a network, huggingface_hub would repeat each request for 23 seconds, and a load makes several.

    Args:
        name: the name; nothing is asked for a folder.
    """
    if Path(name).expanduser().exists() or _is_offline() or can_be_reached():
        yield
        return
    from huggingface_hub import constants

    with _LOCK:
        _INSIDE[0] += 1
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE[0] -= 1
            if not _INSIDE[0]:
                constants.HF_HUB_OFFLINE = False


def snapshot_of(name: "str | Path") -> Path | None:
    """Return the folder of the hub's cache with the present files of a repository, or of its last known ones if the hub
    cannot be reached; None if there is no such repository, or if it holds no configuration.

    It holds the files that were asked for so far.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_lookups(name):
            return Path(hf_hub_download(str(name), "config.json")).parent
    except (OSError, ValueError):
        return None


def hub_note() -> str:
    """Return the end of a message about a name that was not found: that the hub was not asked; "" if it was."""
    if _is_offline() and not _INSIDE[0]:
        return "; HF_HUB_OFFLINE is set, so only the hub's cache was looked at"
    if can_be_reached():
        return ""
    return f"; {urlsplit(_endpoint()).hostname} cannot be reached from here, so only the hub's cache was looked at"


def can_be_reached() -> bool:
    """Return whether there is a connection to the hub, or to the proxy in front of it; known for some time."""
    host, port = _address()
    key = f"{host}:{port}"
    found, when = _FOUND.get(key, (False, -float("inf")))
    if time.monotonic() - when < KNOWN_S[found]:
        return found
    is_reached = _connects(host, port)
    _FOUND[key] = (is_reached, time.monotonic())
    return is_reached


def _connects(host: str, port: int) -> bool:
    """Return whether a connection can be opened. Names may take a resolver minutes, so a thread asks."""
    opened: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE_S).close()
            opened.append(True)
        except OSError:
            opened.append(False)

    asking = threading.Thread(target=connect, name="specbeam hub", daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return opened == [True]


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _address() -> tuple[str, int]:
    """Return host and port of the hub, or of the proxy that the environment names for it."""
    hub = urlsplit(_endpoint())
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    parts = hub
    if proxy and not proxy_bypass(hub.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
