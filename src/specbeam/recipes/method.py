"""What a recipe gives: a method, and its line in the catalogue."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.base import LM
from specbeam.options.settings import Settings
from specbeam.session import Controller, Drafter, Parts, Rule, is_part, law_of


@dataclass(frozen=True)
class RequestInfo:
    """What is known of a request before its first pass."""

    vocab: int
    eos: tuple[int, ...]
    settings: Settings
    audited: bool


Build = Callable[[LM | None, LM | None], Parts]  # from the target and the draft model
Check = Callable[[RequestInfo], None]  # raises what the method would stumble over on its way


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
    plain: bool = (
        True  # the law that is named belongs to a plain method: sampling, beam sampling, greedy or beam search
    )
    check: Check = lambda asked: None

    @property
    def exact(self) -> bool:
        """Whether the output has the law that is named, and not one near it."""
        return self.law.startswith("exact")

    @property
    def lossless(self) -> bool:
        """Whether the output has the law of a plain method, so that nothing but speed is changed."""
        return self.exact and self.plain

    def parts(self, target: LM | None = None, draft: LM | None = None) -> Parts:
        """Return the parts that decode with these models. Raises `NotSupported` if there is no draft model for them."""
        if self.needs_draft and draft is None:
            raise NotSupported(
                f"{self.name} drafts with a model: load the target with draft=..., or take a method that needs none "
                "(`specbeam methods`)"
            )
        return self.build(target, draft)

    def with_parts(
        self,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        controller: Controller | None = None,
        law: str | None = None,
    ) -> "Method":
        """Return the method with parts of one's own in place of its own.

        Args:
            drafter, rule, controller: what takes the place; None keeps the method's.
            law: what law the output has; None keeps the method's law, unless the rule is another: then it is what the rule
                says (`law_of`).
        """
        given = {"drafter": (drafter, Drafter), "rule": (rule, Rule), "controller": (controller, Controller)}
        for name, (part, kind) in given.items():
            if part is not None and not is_part(part, kind):
                raise BadSetting(f"{name} is {part!r}; it must be a part (docs/write_a_method.md)")
        if law is None:
            law = self.law if rule is None else law_of(rule)

        def build(target: LM | None, draft: LM | None) -> Parts:
            own = self.build(target, target if draft is None else draft)  # a draft model may be built in, and not used
            return Parts(
                drafter=own.drafter if drafter is None else drafter,
                rule=own.rule if rule is None else rule,
                controller=own.controller if controller is None else controller,
                law=law,
            )

        return replace(self, law=law, build=build, needs_draft=self.needs_draft and drafter is None)


@dataclass(frozen=True)
class Recipe:
    """A line of the catalogue."""

    name: str
    law: str
    paper: str
    needs: str
    defaults: dict[str, Any]
    make: Callable[..., Method]
    exact: bool  # this and the next with the defaults
    lossless: bool


def described(make: Callable[..., Method]) -> Recipe:
    """A recipe's line, from its docstring and signature."""
    lines = inspect.cleandoc(make.__doc__ or "").splitlines()
    said = {
        line.split(":", 1)[0]: line.split(":", 1)[1].strip() for line in lines if line.startswith(("Law:", "Paper:"))
    }
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    made = make()
    needs = "a draft model" if made.needs_draft else "the target alone"
    return Recipe(make.__name__, said["Law"], said["Paper"], needs, defaults, make, made.exact, made.lossless)


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadSetting(f"{name} is {value!r}; it must be a number of at least 1")


def refuse_ignored(looked_at: bool, who: str, **values: object) -> None:
    """Refuse settings that would be ignored; those that are None were not given."""
    given = [f"{name}={value!r}" for name, value in values.items() if value is not None]
    if given and not looked_at:
        raise BadSetting(f"{who} does not look at {', '.join(given)}; leave it out")
