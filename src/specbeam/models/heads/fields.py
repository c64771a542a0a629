"""The fields of a head's configuration, each read with a check of what it holds.

Configurations come from many writers, and by many hands. What is read from them, is read here: a field that holds something
else than it must is refused with the name of the file and of the field, before anything is made from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbeam.core.errors import BadHead

MOST = 2**24  # that a size or a number of things may be, where nothing smaller is stated


@dataclass(frozen=True)
class Fields:
    """Some fields of a configuration.

    Attributes:
        where: what errors call the files of the head.
        values: the fields by name.
        inside: names of the objects that they are in, each with a point after it.
    """

    where: str
    values: Mapping[str, Any]
    inside: str = ""

    def has(self, name: str) -> bool:
        """Return whether a field is there, and not null."""
        return self.values.get(name) is not None

    def bad(self, name: str, expected: str) -> BadHead:
        """Return the error that a field does not hold what is expected."""
        return BadHead(
            f"{self.where}: {self.inside}{name} is {self.values.get(name)!r} in config.json; it must be {expected}"
        )

    def missing(self, name: str) -> BadHead:
        """Return the error that a field is not there."""
        return BadHead(f"{self.where}: config.json has no {self.inside}{name}")

    def number(
        self,
        name: str,
        default: float | None = None,
        least: float = 0.0,
        most: float = math.inf,
        may_be_least: bool = True,
    ) -> float:
        """Return a finite number.

        Args:
            default: taken if it is missing or null; None: it must be there.
            least: the least that it may be.
            most: the most that it may be.
            may_be_least: whether it may be the least.
        """
        found = self.values.get(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise self.missing(name)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.bad(name, "a number")
        is_in = least <= found <= most and (may_be_least or found != least)
        if not is_in or not -1e300 < found < 1e300:
            bounds = f"{'at least' if may_be_least else 'above'} {least:g}"
            bounds += "" if most == math.inf else f" and at most {most:g}"
            raise self.bad(name, f"a finite number {bounds}")
        return float(found)

    def whole(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return an integer.

        Args:
            default: taken if it is missing or null; None: it must be there.
            least: the least that it may be.
            most: the most that it may be.
        """
        found = self.values.get(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise self.missing(name)
        if not _is_whole(found, least, most):
            expected = f"an integer of at least {least}"
            too_large = _is_whole(found, least, 10**30)
            raise self.bad(name, f"{expected}, and at most {most}" if too_large else expected)
        return int(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; the default if it is missing or null."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.bad(name, "true or false")
        return found

    def text(self, name: str, default: str = "") -> str:
        """Return a text; the default if it is missing or null."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self.bad(name, "a text")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; () if it is missing or null."""
        found = self.values.get(name)
        if found is None:
            return ()
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
            raise self.bad(name, "a list of texts")
        return tuple(found)

    def wholes(self, name: str, least: int = 0, most: int = MOST) -> tuple[int, ...]:
        """Return a list of integers; () if it is missing or null."""
        found = self.values.get(name)
        if found is None:
            return ()
        if not isinstance(found, (list, tuple)) or not all(_is_whole(one, least, most) for one in found):
            raise self.bad(name, f"a list of integers from {least} to {most}")
        return tuple(int(one) for one in found)

    def inner(self, name: str) -> "Fields":
        """Return the fields of an object; none if it is missing or null."""
        found = self.values.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise self.bad(name, "an object")
        return Fields(self.where, found or {}, f"{self.inside}{name}.")

    def first_of(self, name: str) -> "Fields":
        """Return the fields of the first object of a list; none if it is missing, null or empty."""
        found = self.values.get(name)
        if found is None:
            found = []
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            raise self.bad(name, "a list of objects")
        return Fields(self.where, found[0] if found else {}, f"{self.inside}{name}.")


def _is_whole(found: Any, least: int, most: int) -> bool:
    """Return whether something is an integer in a range, also if it is written as 4.0."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and least <= found <= most and found == int(found)


def listed(found: Any) -> tuple[str, ...]:
    """Return the texts of a list, for looking at what files may hold; () if it is anything else."""
    return tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else ()
