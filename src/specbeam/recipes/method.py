"""What a recipe gives: a method, and its line in the catalogue."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.base import LM
from specbeam.session import Parts

Build = Callable[[LM | None, LM | None], Parts]  # from the target and the draft model


@dataclass(frozen=True)
class Method:
    """A recipe with its settings: which parts decode, and what law their output has."""

    name: str
    law: str
    beams: int
    build: Build
    needs_draft: bool = False
    greedy: bool = False
    search: bool = False  # scores and processors as in transformers' beam modes

    @property
    def exact(self) -> bool:
        """Whether the output has the law that is named, and not one near it."""
        return self.law.startswith("exact")

    def parts(self, draft: LM | None, target: LM | None = None) -> Parts:
        if self.needs_draft and draft is None:
            raise NotSupported(
                f"{self.name} drafts with a model: load the target with draft=..., or take a method that needs none "
                "(`specbeam methods`)"
            )
        return self.build(target, draft)


@dataclass(frozen=True)
class Recipe:
    """A line of the catalogue."""

    name: str
    law: str
    paper: str
    needs: str
    defaults: dict[str, Any]
    make: Callable[..., Method]
    exact: bool  # with the defaults


def described(make: Callable[..., Method]) -> Recipe:
    """A recipe's line, from its docstring and signature."""
    lines = inspect.cleandoc(make.__doc__ or "").splitlines()
    said = {
        line.split(":", 1)[0]: line.split(":", 1)[1].strip() for line in lines if line.startswith(("Law:", "Paper:"))
    }
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    made = make()
    needs = "a draft model" if made.needs_draft else "the target alone"
    return Recipe(make.__name__, said["Law"], said["Paper"], needs, defaults, make, made.exact)


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise BadSetting(f"{name} is {value!r}; it must be one of {', '.join(known)}")
