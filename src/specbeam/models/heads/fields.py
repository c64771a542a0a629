"""The fields of a head's configuration, checked as they are read.

Configurations come from many writers, and may be broken. An error names the file and the field before the value is used.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specbeam.core.errors import BadHead

MOST = 2**24  # default upper bound of sizes and counts


@dataclass(frozen=True)
class Fields:
    """Some fields of a configuration.

    Attributes:
        where: name of the head's files, for errors.
        values: the fields by name.
        inside: names of the enclosing objects, each followed by a dot.
    """

    where: str
    values: Mapping[str, Any]
    inside: str = ""

    def has(self, name: str) -> bool:
        """Return whether a field is present and not null."""
        return self.values.get(name) is not None

    def bad(self, name: str, expected: str) -> BadHead:
        """Return the error for a field with an unexpected value."""
        return BadHead(
            f"{self.where}: {self.inside}{name} is {self.values.get(name)!r} in config.json; it must be {expected}"
        )

    def missing(self, name: str) -> BadHead:
        """Return the error for a missing field."""
        return BadHead(f"{self.where}: config.json has no {self.inside}{name}")

    def _checked(self, name: str, default: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
        """Return a field, or the default if it is missing or null.

        Raises `BadHead` if it is not right, or if there is neither a field nor a default.
        """
        found = self.values.get(name)
        if found is None:
            found = default
        if found is None:
            raise self.missing(name)
        if not is_right(found):
            raise self.bad(name, expected)
        return found

    def number(self, name: str, default: float | None = None, most: float = math.inf, may_be_0: bool = True) -> float:
        """Return a finite number of at least 0.

        Args:
            default: the value if the field is missing or null; None: it must be present.
            most: the largest value allowed.
            may_be_0: whether 0 is allowed.
        """
        found = self._checked(name, default, _is_number, "a number")
        is_above = found >= 0 if may_be_0 else found > 0
        if not is_above or not found <= most or found >= 1e300:
            least = "at least 0" if may_be_0 else "above 0"
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise self.bad(name, f"a finite number {least}{limit}")
        return float(found)

    def whole(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return an integer.

        Args:
            default: the value if the field is missing or null; None: it must be present.
            least, most: the range allowed.
        """
        expected = f"an integer of at least {least}"
        found = self._checked(name, default, lambda one: _is_whole(one, least, 10**30), expected)
        if found > most:
            raise self.bad(name, f"{expected}, and at most {most}")
        return int(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; the default if it is missing or null."""
        return self._checked(name, default, lambda one: isinstance(one, bool), "true or false")

    def text(self, name: str, default: str = "") -> str:
        """Return a text; the default if it is missing or null."""
        return self._checked(name, default, lambda one: isinstance(one, str), "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; () if it is missing or null."""
        return tuple(self._checked(name, (), _list_of(lambda one: isinstance(one, str)), "a list of texts"))

    def wholes(self, name: str, least: int = 0) -> tuple[int, ...]:
        """Return a list of integers; () if it is missing or null."""
        are_right = _list_of(lambda one: _is_whole(one, least, MOST))
        found = self._checked(name, (), are_right, f"a list of integers from {least} to {MOST}")
        return tuple(int(one) for one in found)

    def inner(self, name: str) -> "Fields":
        """Return the fields of an object; none if it is missing or null."""
        found = self._checked(name, {}, _is_object, "an object")
        return Fields(self.where, found, f"{self.inside}{name}.")

    def first_of(self, name: str) -> "Fields":
        """Return the fields of the first object of a list; none if it is missing, null or empty."""
        found = self._checked(name, [], _list_of(_is_object), "a list of objects")
        return Fields(self.where, found[0] if found else {}, f"{self.inside}{name}.")

    def required(self, name: str) -> "Fields":
        """Return the fields of an object. Raises `BadHead` if it is missing or null."""
        if not self.has(name):
            raise self.missing(name)
        return self.inner(name)


def _is_number(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool)


def _is_whole(found: Any, least: int, most: int) -> bool:
    """Return whether a value is an integer in a range; 4.0 is one, too."""
    return _is_number(found) and least <= found <= most and found == int(found)


def _is_object(found: Any) -> bool:
    return isinstance(found, Mapping)


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for lists whose items all pass a check."""
    return lambda found: isinstance(found, (list, tuple)) and all(map(is_right, found))


def listed(found: Any) -> tuple[str, ...]:
    """Return the strings in a list; () for anything else than a list."""
    if not isinstance(found, list):
        return ()
    return tuple(one for one in found if isinstance(one, str))
