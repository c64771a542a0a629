"""Modules of multi-token prediction in a row: each drafts one depth from the states of the previous module.

Row v of module k belongs to a node with at least k + 1 nodes above it. It reads v's token, and the state of module k - 1 at
the node above v; the first module reads the target's feature there. So the row depends on the feature k + 1 nodes above and
the tokens since, and the module gives the law of the token below v if the target has scored that node and no later one. For
drafts deeper than the number of modules the last module reads its own states, like a single trunk.
"""

from collections.abc import Iterator

from torch import nn

from specbeam.models.heads.arrays import PerNode, Rows, TargetStates
from specbeam.models.heads.head import DraftRows, Head
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.heads.trunk import PairTrunk
from specbeam.models.heads.unroll import drafted_rows


class ModulesInARow(Head):
    """Several modules that draft one after the other (DeepSeek-V3, arXiv 2412.19437).

    Args:
        modules: pair trunks with the same features. All may be the same module (FastMTP, arXiv 2509.18362), with separate
            rows for each depth.
    """

    def __init__(self, modules: list[PairTrunk]) -> None:
        super().__init__()
        self.row = nn.ModuleList(modules)

    @property
    def modules_in_a_row(self) -> list[PairTrunk]:
        """The modules in order; the first makes the first draft."""
        return [one for one in self.row if isinstance(one, PairTrunk)]

    @property
    def is_one(self) -> bool:
        """Whether all modules are the same."""
        return len(set(self.modules_in_a_row)) == 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.modules_in_a_row[0].taps

    @property
    def described(self) -> dict[str, str]:
        count = len(self.row)
        what = f"one, used {count} times" if self.is_one else str(count)
        return self.modules_in_a_row[0].described | {"modules": f"{what}, for drafts 1 to {count} deep"}

    @property
    def states_size(self) -> int:
        return self.modules_in_a_row[0].states_size

    def features(self, states: TargetStates) -> Rows:
        return self.modules_in_a_row[0].features(states)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        modules = self.modules_in_a_row
        found = []
        for deep, nodes, own in drafted_rows(modules, trees, depth, wanted):
            module = modules[min(deep, len(modules)) - 1]
            found.append(DraftRows(nodes, module.logits(own)))
        return found

    def other_readings(self, layers: int) -> Iterator[tuple[str, Head]]:
        """See `Head.other_readings`: the same reading for all modules; or rows that all depths share, as in engines."""
        modules = self.modules_in_a_row
        if self.is_one:
            yield "rows that all drafts share", modules[0]
            for name, one in modules[0].other_readings(layers):
                yield name, ModulesInARow([one] * len(modules))
            return
        for every in zip(*(module.other_readings(layers) for module in modules), strict=True):
            yield every[0][0], ModulesInARow([one for _, one in every])
