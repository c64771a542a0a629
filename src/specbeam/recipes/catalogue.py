"""The catalogue of recipes. The docstring of a recipe states the law of its output and its paper."""

from collections.abc import Callable
from typing import Any

from specbeam.core.errors import BadSetting
from specbeam.core.names import hint
from specbeam.recipes.auto import auto
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.heads import (
    bita,
    chimera,
    eagle,
    eesd,
    fspad,
    hidden_transfer,
    medusa,
    mtp,
    specdiff,
)
from specbeam.recipes.joint.beams import mjsd, mmtad, mtad
from specbeam.recipes.joint.tokens import mtjd
from specbeam.recipes.joint.windows import coral
from specbeam.recipes.lookup import prompt_lookup, suffix_match, token_recycling
from specbeam.recipes.method import Method, Recipe, recipe_of
from specbeam.recipes.search import beam_search, speculative_beam_search
from specbeam.recipes.sequence import (
    block_verification,
    dyspec,
    gsd,
    multi_draft,
    opt_tree,
    propd,
    rsd_c,
    rsd_s,
    sequoia,
    spechub,
    specinfer,
    speculative_sampling,
    traversal,
)
from specbeam.recipes.skipping import swift


def _recipes() -> tuple[Callable[..., Method], ...]:
    """Return the recipes for all pairs; in a function, because mypy cannot order the modules of this package."""
    return (
        greedy, sampling, beam_search, speculative_beam_search, beam_sampling, dsbd,
        speculative_sampling, block_verification, specinfer, rsd_c, rsd_s, sequoia, spechub, traversal, multi_draft,
        opt_tree, dyspec, gsd, propd, prompt_lookup, suffix_match, token_recycling, swift, auto,
        mtjd, mtad, mjsd, mmtad,
    )  # fmt: skip


def _head_recipes() -> tuple[Callable[..., Method], ...]:
    """Return the recipes for draft heads of one kind, which reject other pairs."""
    return (eagle, fspad, medusa, mtp, chimera, specdiff, eesd, bita, hidden_transfer, coral)


RECIPES = _recipes()
HEAD_RECIPES = _head_recipes()


def methods() -> list[Recipe]:
    """Return the catalogue entries of all recipes."""
    return [recipe_of(make) for make in (*RECIPES, *HEAD_RECIPES)]


def resolve(method: Any) -> Method:
    """Return `method` itself, or the method that the recipe of this name makes with default settings.

    Raises `BadSetting` if there is no such recipe.
    """
    if isinstance(method, Method):
        return method
    recipes = {make.__name__: make for make in (*RECIPES, *HEAD_RECIPES)}
    if method in recipes.values():
        raise BadSetting(f"the method is a recipe that was not called; write sb.{method.__name__}()")
    if not isinstance(method, str):
        raise BadSetting(f"the method is {method!r}; give its name, or a method such as sb.dsbd(beams=4)")
    first, *settings = method.split() or [""]
    if settings and first in recipes:
        raise BadSetting(f"the method {method!r} has settings; write sb.{first}({', '.join(settings)})")
    if method not in recipes:
        raise BadSetting(f"there is no method {method!r}{hint(method, recipes)}; choose one of {', '.join(recipes)}")
    return recipes[method]()
