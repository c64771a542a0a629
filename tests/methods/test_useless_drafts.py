"""Drafts that are never accepted end after a few turns, with every method whose controller is "auto"."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Session
from specbeam.models.table import TableLM
from tests.support.programs import run

TARGET = [1.0] * 60 + [0.0] * 4
NEVER = [0.0] * 60 + [1.0] * 4
TURNS = 80
FEW = 10  # turns with drafts
METHODS = {
    "chain": sb.speculative_sampling(),
    "chain that is matched": sb.speculative_sampling(rule="match"),
    "block_verification": sb.block_verification(),
    "specinfer": sb.specinfer(),
    "rsd_c": sb.rsd_c(),
    "rsd_s": sb.rsd_s(),
    "sequoia": sb.sequoia(),
    "spechub": sb.spechub(),
    "traversal": sb.traversal(),
    "multi_draft": sb.multi_draft([TableLM(NEVER)]),
    "opt_tree": sb.opt_tree(),
    "dyspec": sb.dyspec(),
    "gsd": sb.gsd(),
    "dsbd with a dynamic width": sb.dsbd(3, width="dynamic"),
    "dsbd by rejection": sb.dsbd(3, coupling="rejection"),
    "dsbd with replacement": sb.dsbd(3, coupling="rejection", replacement=True),
    "dsbd with a dynamic width and replacement": sb.dsbd(3, width="dynamic", coupling="rejection", replacement=True),
}


LOOKUPS = {
    "prompt_lookup": sb.prompt_lookup(),
    "suffix_match": sb.suffix_match(),
}


def never_as_before(path):
    """After each token 0 follows another one than before."""
    law = np.full(64, 1e-9)
    law[0 if len(path) % 2 else 1 + len(path) // 2] = 1.0
    return law


def drafted_layers(method, target, warp):
    """The number of drafted layers of each turn."""
    session = Session([0], method.parts(target, TableLM(NEVER)), warp, Limits(TURNS, (), keep=99), 0)
    return [turn.forest.layers for turn in run(session, target)]


@pytest.mark.parametrize("name", LOOKUPS)
def test_texts_in_which_nothing_comes_again_are_soon_hardly_looked_up(name):
    target = TableLM(never_as_before)
    layers = drafted_layers(LOOKUPS[name], target, Warp(greedy=True))
    drafted = [turn for turn, depth in enumerate(layers) if depth]  # they find nothing in some turns
    assert max(layers[turn] for turn in drafted[:3]) > 1
    assert all(layers[turn] == 1 for turn in drafted[FEW:])
    assert len([turn for turn in drafted if turn >= TURNS // 2]) < FEW


@pytest.mark.parametrize("name", METHODS)
def test_drafts_that_never_pass_end_soon_and_are_tried_ever_more_rarely(name):
    layers = drafted_layers(METHODS[name], TableLM(TARGET), Warp())
    drafted = [turn for turn, depth in enumerate(layers) if depth]
    assert drafted[0] == 0
    assert all(layers[turn] == 1 for turn in drafted[FEW:])
    assert len([turn for turn in drafted if turn >= TURNS // 2]) < FEW
