"""Steps: pure functions of arrays, written once. Python runs their source in proofs, numba compiles it for users."""

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np

from specbeam.core.compiling.compiler import AVAILABLE, BLOCK, Array, Compiled, borrowed, compiled
from specbeam.core.compiling.registered import note_step
from specbeam.core.errors import UnknownKind

if AVAILABLE:
    from numba import types

    from specbeam.core.compiling.compiler import chosen_for
    from specbeam.core.compiling.linking import calling

__all__ = ["AVAILABLE", "BLOCK", "Array", "Verb", "borrowed", "compiled_as", "open_step", "step", "verb"]

step = compiled
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Verb(Generic[Given, Answer]):
    """A verb with a step for each kind of record. Python and compiled steps call it alike.

    A kind registers its step in the module of its record, which may be a module outside of specbeam:

        @verify_turn.of(WalkSpec)
        @step
        def verify_walk(rule, turn, dice, evidence, observer): ...

    Its step takes the arguments of the verb, in the same order.

    Args:
        body: runs for kinds without a step of their own; a step, or a function that only Python can run.
        place: index of the argument whose type selects the step.
        has_body: False if the verb raises `UnknownKind` for kinds without a step.
        by_address: whether loops call its steps by address (`core.by_address`): each is a compiled function of its own.
    """

    def __init__(self, body: Callable[Given, Answer], place: int, has_body: bool, by_address: bool) -> None:
        functools.update_wrapper(self, body)
        self._by_address = by_address
        self._body = self._addressed(body) if has_body else None
        self._place = place
        self._steps: dict[type, Callable[..., Any]] = {}

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Answer:
        found: Callable[..., Answer] = self.step_of(type(given[self._place]))
        return found(*given, **named)

    def of(self, *kinds: type) -> Callable[[Compiled], Compiled]:
        """Return a decorator that registers a step of these kinds. `numpy.ndarray` stands for arrays."""

        def register(one: Compiled) -> Compiled:
            for kind in kinds:
                self._steps[kind] = self._addressed(one)
                note_step(kind, inspect.unwrap(getattr(one, "py_func", one)))
            return one

        return register

    def of_address(self, kind: type, call: Callable[..., Any]) -> None:
        """Register a function that calls the step of a record by its address; compiled into its callers."""
        self._steps[kind] = call

    def _addressed(self, one: Any) -> Any:
        """Return a step that has an address if the verb's steps need one."""
        if not self._by_address or not AVAILABLE:
            return one
        found = one if hasattr(one, "py_func") else compiled(one)
        found.is_called_by_address = True
        return found

    def has_step(self, kind: type) -> bool:
        """Return whether records of this type have a step of their own."""
        return kind in self._steps

    def step_of(self, kind: type) -> Callable[..., Any]:
        """Return the step of records of this type. Raises `UnknownKind` if there is none."""
        found = self._steps.get(kind, self._body)
        if found is None:
            known = ", ".join(sorted(one.__name__ for one in self._steps))
            raise UnknownKind(
                f"{self.__name__} has no step for {kind.__module__}.{kind.__qualname__}, only for {known}; register one in "
                f"the module of the record: @{self.__name__}.of({kind.__name__})"
            )
        return found

    __name__: str


def verb(
    place: int, has_body: bool = True, by_address: bool = False
) -> Callable[[Callable[Given, Answer]], Verb[Given, Answer]]:
    """Return a decorator that makes a verb of a function; see `Verb`.

    Args:
        place: index of the argument whose type selects the step.
        has_body: whether the function runs for kinds without a step of their own; False: it only describes the verb.
        by_address: see `Verb`.
    """

    def decorate(body: Callable[Given, Answer]) -> Verb[Given, Answer]:
        made = Verb(body, place, has_body, by_address)
        if AVAILABLE:

            def chosen(*kinds: Any) -> Any:
                found = made.step_of(_class_of(kinds[place]))
                return calling(found) if hasattr(found, "py_func") else inspect.unwrap(found)

            chosen.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
            chosen.__name__ = body.__name__
            chosen_for(made)(chosen)
        return made

    return decorate


def _class_of(kind: Any) -> type:
    """Return the class of the values of a numba type."""
    if isinstance(kind, types.Array):
        return np.ndarray
    if isinstance(kind, types.NoneType):
        return NoneType
    found: type = getattr(kind, "instance_class", type(kind))
    return found


def compiled_as(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a function that chooses the code that compiled steps run in place of `function`.

    The decorated function takes the numba types of the arguments and returns a function or step, which numba compiles. So a
    step can call code that depends on the types of its arguments, or that differs between Python and compiled code, such as
    access to an object. Only the choices that occur are compiled.
    """

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        if not AVAILABLE:
            return choose

        @functools.wraps(inspect.unwrap(choose))
        def chosen(*kinds: Any) -> Any:
            body = choose(*kinds)
            if hasattr(body, "py_func"):
                return calling(body)
            return inspect.unwrap(body)  # tests wrap functions into type checks

        chosen_for(function)(chosen)
        return choose

    return decorate


def open_step(function: Compiled) -> Compiled:
    """Return a step that compiled steps run compiled, while Python runs its source.

    For steps whose arguments may be Python objects, such as rows that logits processors change.
    """
    source = cast(Compiled, inspect.unwrap(function))
    compiled_as(source)(lambda *kinds: source)
    return source
