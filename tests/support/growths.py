"""Growths of trees by which compiled steps are run against their source."""

from specbeam.core.draft.children import Best, BestAndOne, Distinct, Independent
from specbeam.core.draft.tree import Branching, FixedTree

GROWTHS = {
    "chain": Branching((1,), Independent()),
    "independent": Branching((3, 2), Independent()),
    "distinct": Branching((3, 2), Distinct()),
    "likeliest": Branching((2, 2), Best()),
    "likeliest and one": Branching((3, 2), BestAndOne()),
    "sequoia": FixedTree((((), ((),)), ((),), ()), Distinct(fallback=True)),
}
