"""Clients: API keys and their limits."""

import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.refusals import Refusal
from specbeam.errors import BadSetting, MissingFile

ANYBODY = "anonymous"


@dataclass(frozen=True)
class Client:
    """A client, identified by the name of its key, never by the key itself.

    Args:
        name: name for logs and fair scheduling.
        weight: relative share of the work.
        max_running: maximum number of texts decoded at the same time; 0: the server's limit.
        least_priority: the smallest priority number (the most urgent) that its requests may have.
    """

    name: str = ANYBODY
    weight: float = 1.0
    max_running: int = 0
    least_priority: int = 0


class Keys:
    """The API keys, stored as digests and compared in constant time."""

    def __init__(self, clients: Mapping[bytes, Client]) -> None:
        self._clients = dict(clients)

    @classmethod
    def of(cls, config: ServerConfig) -> "Keys":
        """Return the keys of a configuration and of its key file."""
        clients: dict[bytes, Client] = {}
        for number, key in enumerate(config.api_keys, 1):
            _add(clients, key, Client(f"key{number}"), "api_keys")
        if config.api_key_file:
            named = _read(Path(config.api_key_file).expanduser())
            if taken := {one.name for one in clients.values()} & {one.name for one in named.values()}:
                raise BadSetting(
                    f"{config.api_key_file} uses the name {', '.join(sorted(taken))}, which api_keys has, too; rename it"
                )
            if twice := clients.keys() & named.keys():
                raise BadSetting(
                    f"{config.api_key_file} has the key of {named[min(twice)].name}, which api_keys has, too; leave one out"
                )
            clients |= named
        return cls(clients)

    @property
    def needed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._clients)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each client, by name."""
        return {client.name: client.weight for client in self._clients.values()}

    @property
    def most_running(self) -> dict[str, int]:
        """By name, the `max_running` of clients that have a limit of their own."""
        return {client.name: client.max_running for client in self._clients.values() if client.max_running}

    def client(self, authorization: str | None) -> Client:
        """Return the client of an authorization header. Raises `Refusal` if a key is needed and none is valid."""
        if not self._clients:
            return Client()
        scheme, _, key = (authorization or "").partition(" ")
        asked = digest(key.strip())
        found: Client | None = None
        for known, client in self._clients.items():  # compares all keys, so that the time reveals nothing
            if hmac.compare_digest(known, asked):
                found = client
        if found is None or scheme.lower() != "bearer":
            what = "the API key is unknown" if authorization else "the API key is missing"
            raise Refusal(
                401,
                "authentication_error",
                "invalid_api_key",
                f"{what}; send the header 'Authorization: Bearer KEY' with a key of this server",
            )
        return found


def digest(key: str) -> bytes:
    """Return the stored digest of a key."""
    return sha256(key.encode()).digest()


def _add(clients: dict[bytes, Client], key: str, client: Client, where: str) -> None:
    """Add the client of a key. Raises `BadSetting` if another client has the same key."""
    before = clients.setdefault(digest(key), client)
    if before is not client:
        raise BadSetting(f"{where}: {client.name} has the key of {before.name}; give each client a key of its own")


def _read(path: Path) -> dict[bytes, Client]:
    """Return the clients of a key file. Raises `BadSetting` if it has no keys: the server would be open to everybody."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFile(f"the key file {path} cannot be read: {error}") from error
    clients: dict[bytes, Client] = {}
    for number, line in enumerate(lines, 1):
        words = re.split(r"(?:^|\s)#", line)[0].split()  # a key may contain a #
        if not words:
            continue
        try:
            name, key, *rest = words
            weight, running, priority = [*map(float, rest), *(1.0, 0.0, 0.0)[len(rest) :]]
        except ValueError as error:
            raise BadSetting(
                f"{path}, line {number} must be: name key [weight] [max_running] [priority], the last three numbers"
            ) from error
        if not all(map(math.isfinite, (weight, running, priority))):
            raise BadSetting(f"{path}, line {number}: weight, max_running and priority must be finite numbers")
        if not weight > 0:
            raise BadSetting(f"{path}, line {number}: weight is {weight:g}; it must be above 0")
        if running < 0 or running != int(running):
            raise BadSetting(
                f"{path}, line {number}: max_running is {running:g}; it must be an integer, 0 for the server's limit"
            )
        if priority != int(priority):
            raise BadSetting(f"{path}, line {number}: priority is {priority:g}; it must be an integer")
        client = Client(name, weight, int(running), int(priority))
        if any(one.name == name and one != client for one in clients.values()):
            raise BadSetting(
                f"{path}, line {number}: {name} has other numbers in a line above; give all its keys the same"
            )
        _add(clients, key, client, f"{path}, line {number}")
    if not clients:
        raise BadSetting(f"{path} has no keys, so everybody could use the server; add a line: name key")
    return clients
