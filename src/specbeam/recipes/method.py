"""Methods, which recipes make; the entries of the catalogue; and checks of settings."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

from specbeam.core.arguments import refusing_unknown
from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.core.names import SETTINGS_ELSEWHERE
from specbeam.core.session import Controller, Drafter, Parts, Rule, is_part, lacking, law_of


@dataclass(frozen=True)
class RequestInfo:
    """The properties of a request that a method can check before the first pass of a model."""

    vocab: int  # vocabulary size of the target
    eos: tuple[int, ...]  # end tokens
    longest: int  # maximum number of new tokens
    answers: int  # number of return sequences
    is_sure: bool  # whether the temperature is 0
    audited: bool


MOST = 65_536  # largest accepted number of beams, nodes or layers; larger numbers are taken for typing errors

Given = ParamSpec("Given")
Build = Callable[[LM | None, LM | None], Parts]  # takes the target and the draft model
Check = Callable[[RequestInfo], None]  # raises an error if the method cannot serve the request


@dataclass(frozen=True)
class Method:
    """A recipe with its settings: builds the parts that decode, and states the law of their output."""

    name: str
    law: str
    beams: int  # maximum number of live beams
    build: Build
    needs_draft: bool = False
    head: str = ""  # the draft head that it needs, with its article, such as "an EAGLE head"; "": none
    greedy: bool = False  # whether nothing is drawn
    # Whether each layer has `beams` beams, if that number of pairs has probability. If not, a text may end with fewer
    # finished beams.
    fills_beams: bool = True
    search: bool = False  # whether scores and processors are those of transformers' beam modes
    plain: bool = (
        True  # whether the law is that of a method without drafts: sampling, beam sampling, greedy, beam search
    )
    check: Check = lambda request: None
    # If layers may have fewer than `beams` beams: returns the same method with a minimum number of beams per layer.
    keeping: Callable[[int], "Method"] | None = None

    def __repr__(self) -> str:
        return f"<{self.name}: {self.law}>"

    @property
    def exact(self) -> bool:
        """Whether the output has the law that `law` names exactly."""
        return self.law.startswith("exact")

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the law of a method without drafts: drafts change only the speed."""
        return self.exact and self.plain

    def parts(self, target: LM | None = None, draft: LM | None = None) -> Parts:
        """Return the parts that decode with these models.

        Raises `NotSupported` if the method needs a draft model and there is none.
        """
        if self.needs_draft and draft is None:
            needed = "a model: load the target with draft=..."
            if self.head:
                needed = f"{self.head}, and this pair has no draft: load the target with draft=<folder of such a head>"
            raise NotSupported(f"{self.name} drafts with {needed} (--draft), or use {self._without_drafts()}")
        parts = self.build(target, draft)
        self._check_beams(parts.rule)
        return parts

    def _without_drafts(self) -> str:
        """Return a method that needs no draft, in words; one of the same law, if there is one."""
        if not self.lossless:
            return "a method without a draft (`specbeam methods`)"
        with_beams = "beam_search" if self.greedy else "beam_sampling"
        return (
            f"sb.{with_beams if self.beams > 1 or self.greedy else 'sampling'}, which has the same law without drafts"
        )

    def _check_beams(self, rule: Rule) -> None:
        """Raise `BadSetting` if a rule judges fewer beams (`most_beams`) than the method keeps."""
        most = getattr(rule, "most_beams", None)
        if most is not None and self.beams > most:
            judged = "one sequence" if most == 1 else f"{most} beams"
            raise BadSetting(
                f"{type(rule).__name__} judges {judged}, and {self.name} keeps {self.beams} beams; make the method with "
                f"beams={most}, or pass a rule for beams, such as sb.verify.BeamRule"
            )

    @refusing_unknown("part")
    def with_parts(
        self,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        controller: Controller | None = None,
        law: str | None = None,
    ) -> "Method":
        """Return a copy of the method in which the given parts replace its own.

        Raises `BadSetting` if an argument is not a part of its kind.

        Args:
            drafter, rule, controller: the new parts; None keeps the method's part.
            law: the law of the output. None keeps the method's law; with a new rule it is the law that the rule states
                (`law_of`).
        """
        if all(one is None for one in (drafter, rule, controller, law)):
            return self
        new_parts = {"drafter": (drafter, Drafter), "rule": (rule, Rule), "controller": (controller, Controller)}
        for name, (part, kind) in new_parts.items():
            if part is not None and not is_part(part, kind):
                of_search = "; names are for sb.dsbd and sb.speculative_beam_search" if isinstance(part, str) else ""
                raise BadSetting(f"{name} is {lacking(part, kind)}; it must be a part{of_search}")
        if rule is not None:
            self._check_beams(rule)
        if law is None:
            law = self.law if rule is None else law_of(rule)

        def build(target: LM | None, draft: LM | None) -> Parts:
            # `self.build` may need a draft model even if `drafter` replaces the method's own drafter: pass the target then.
            own = self.build(target, target if draft is None else draft)
            return Parts(
                drafter=own.drafter if drafter is None else drafter,
                rule=own.rule if rule is None else rule,
                controller=own.controller if controller is None else controller,
                law=law,
            )

        own_keeping = self.keeping if rule is None else None  # another rule has its own widths

        def keeping(least: int) -> Method:
            assert own_keeping is not None
            return own_keeping(least).with_parts(drafter, rule, controller)

        needs_draft = self.needs_draft and drafter is None
        kept = keeping if own_keeping is not None else None
        return replace(self, law=law, build=build, needs_draft=needs_draft, keeping=kept)


@dataclass(frozen=True)
class Recipe:
    """An entry of the catalogue."""

    name: str
    law: str
    paper: str
    needs: str  # "a draft model" or "the target alone"
    defaults: dict[str, Any]  # settings by name
    make: Callable[..., Method]  # the recipe
    exact: bool  # of the method with default settings
    lossless: bool  # of the method with default settings
    about: str = ""  # what the method does
    settings: dict[str, str] = field(default_factory=dict)  # the meaning of each setting


def recipe_of(make: Callable[..., Method]) -> Recipe:
    """Return the catalogue entry of a recipe, from its signature and docstring.

    In the docstring, "Law:" may span several lines and is followed by the line "Paper:".
    """
    text = inspect.cleandoc(make.__doc__ or "")
    law = " ".join(text.partition("Law:")[2].partition("\nPaper:")[0].split())
    paper = text.partition("\nPaper:")[2].partition("\n")[0].strip()
    defaults = {name: parameter.default for name, parameter in inspect.signature(make).parameters.items()}
    method = make()
    needs = "a draft model" if method.needs_draft else "the target alone"
    about = " ".join(text.partition("\n\n")[0].split())
    meanings = _meanings_in(text)
    return Recipe(make.__name__, law, paper, needs, defaults, make, method.exact, method.lossless, about, meanings)


def _meanings_in(text: str) -> dict[str, str]:
    """Return the meanings of the arguments that a docstring lists under "Args:", by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.partition("\nArgs:\n")[2].splitlines():
        if not line.startswith("    "):
            break
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry.group(1).split(", ")
        meaning = entry.group(2) if entry else line.strip()
        found |= {name: f"{found.get(name, '')} {meaning}".strip() for name in names}
    return found


def recipe(make: Callable[Given, Method]) -> Callable[Given, Method]:
    """Return a recipe whose unknown settings raise `BadSetting` with the known ones."""
    return refusing_unknown("setting", SETTINGS_ELSEWHERE)(make)


def require_at_least_one(**values: int) -> None:
    """Raise `BadSetting` for the first of the named values that is not an integer from 1 to `MOST`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadSetting(f"{name} is {value!r}; it must be an integer of at least 1")
        if value > MOST:
            raise BadSetting(f"{name} is {value}; it must be at most {MOST:,}")


def refuse_ignored(is_used: bool, user: str, **values: object) -> None:
    """Raise `BadSetting` for settings that are given (not None) but would be ignored.

    Args:
        is_used: whether the settings have an effect.
        user: the name, for the message, of the setting that would ignore them.
        values: the settings by name.
    """
    given = [f"{name}={value!r}" for name, value in values.items() if value is not None]
    if given and not is_used:
        raise BadSetting(f"{user} ignores {', '.join(given)}; leave it out")


def require_counts(counts: Sequence[int]) -> None:
    """Raise `BadSetting` unless `counts`, children per node by layer, names at least one layer and is at least 1 in each."""
    if not counts or min(counts) < 1:
        raise BadSetting(f"counts is {list(counts)}; it must name at least one layer, each with at least one child")


def require_probability(**values: float | None) -> None:
    """Raise `BadSetting` for the first of the named values that is neither None nor a number in [0, 1]."""
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value <= 1):
            raise BadSetting(f"{name} is {value!r}; it is a probability, in [0, 1]")
