"""The catalogue: one recipe per paper, made of parts. A recipe's docstring states the law of what it returns."""

from collections.abc import Callable

from specbeam.errors import BadSetting
from specbeam.recipes.auto import auto
from specbeam.recipes.beams import beam_sampling, dsbd, greedy, sampling
from specbeam.recipes.joint_beams import mjsd, mmtad, mtad
from specbeam.recipes.joint_tokens import mtjd
from specbeam.recipes.lookup import prompt_lookup, suffix_match, token_recycling
from specbeam.recipes.method import Method, Recipe, described
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

RECIPES: tuple[Callable[..., Method], ...] = (
    greedy, sampling, beam_search, speculative_beam_search, beam_sampling, dsbd,
    speculative_sampling, block_verification, specinfer, rsd_c, rsd_s, sequoia, spechub, traversal, multi_draft,
    opt_tree, dyspec, gsd, propd, prompt_lookup, suffix_match, token_recycling, auto,
    mtjd, mtad, mjsd, mmtad,
)  # fmt: skip


def methods() -> list[Recipe]:
    """All recipes, with law, paper and defaults."""
    return [described(make) for make in RECIPES]


def resolve(method: "str | Method") -> Method:
    """A method from its name or as it is."""
    if isinstance(method, Method):
        return method
    known = {make.__name__: make for make in RECIPES}
    if method not in known:
        raise BadSetting(f"there is no method {method!r}; choose one of {', '.join(known)}")
    return known[method]()
