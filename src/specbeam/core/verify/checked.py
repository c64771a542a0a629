"""The checks of plans and verdicts from parts that run in Python, before steps follow their numbers without looking."""

from typing import Any

import numpy as np

from specbeam.core.errors import BrokenPart
from specbeam.core.forest import Forest, depths_of, start_of
from specbeam.core.records import Shape, Verdict


def checked_shape(shape: Any, controller: object) -> Shape:
    """Return the plan of a controller. Raises `BrokenPart`, which names the controller, if no draft can have its shape."""
    who = f"the controller {type(controller).__name__} planned"
    if not isinstance(shape, Shape):
        raise BrokenPart(f"{who} {shape!r}; expected a Shape")
    for name, value, most in (("depth", shape.depth, 2**20), ("width", shape.width, 2**16)):
        if not isinstance(value, int | np.integer) or not 0 <= value <= most:
            raise BrokenPart(f"{who} {name} {value!r}; expected an int from 0 to {most}")
    return shape


def checked_verdict(verdict: Any, forest: Forest, vocab: int, rule: object) -> Verdict:
    """Return the verdict of a rule. Raises `BrokenPart`, which names the rule, if it does not fit the forest.

    Args:
        vocab: the size of the target's vocabulary.
    """
    who = f"the rule {type(rule).__name__} returned"
    if not isinstance(verdict, Verdict):
        raise BrokenPart(f"{who} {type(verdict).__name__}; expected a Verdict")
    if verdict.searched is not None:  # of the rule for searches, whose layers have no draws
        return verdict
    layers = verdict.layers
    parents = layers.parents
    nodes, tokens, *_ = layers.beams
    ends = layers.draw_ends
    draws = len(parents)
    of_draws = {len(values) for values in (*layers.beams, layers.ended)}
    of_layers = {len(values) for values in (layers.widths, layers.passed, layers.sources, layers.edges)}
    if of_draws != {draws} or of_layers != {len(ends)}:
        raise BrokenPart(f"{who} layers whose arrays have different lengths")
    if len(ends) == 0 or ends[-1] != draws or np.diff(ends, prepend=0).min() < 0:
        raise BrokenPart(f"{who} draw_ends {ends.tolist()}; expected one or more that ascend to {draws}")
    live = int((~layers.ended[start_of(ends, len(ends) - 1) :]).sum())
    if verdict.collapsed is not None and not 0 <= verdict.collapsed < live:
        raise BrokenPart(f"{who} collapsed={verdict.collapsed}; expected None, or a number below {live}")
    counts = ("count", layers.beams.counts, 1, 2**20)
    inside = (("parent", parents, 0, forest.size), ("node", nodes, -1, forest.size), ("token", tokens, 0, vocab))
    for name, values, least, size in (*inside, counts):
        wrong = values[(values < least) | (values >= size)]
        if len(wrong):
            raise BrokenPart(f"{who} {name} {wrong[0]}; expected {least} to {size - 1}")
    depths = depths_of(forest.parents)[parents]
    wanted = np.searchsorted(ends, np.arange(draws), side="right")
    for at in np.flatnonzero(depths != wanted):
        raise BrokenPart(f"{who} a draw of layer {wanted[at]} below node {parents[at]}, whose depth is {depths[at]}")
    is_other = (forest.tokens[nodes] != tokens) | (forest.parents[nodes] != parents)
    for at in np.flatnonzero((nodes >= 0) & is_other):
        raise BrokenPart(f"{who} node {nodes[at]} for token {tokens[at]} below node {parents[at]}, but it is another")
    return verdict
