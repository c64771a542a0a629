"""Modules of multi-token prediction in a row: each makes the drafts of one depth from the states of the one before it.

Row v of module k belongs to a node with at least k + 1 nodes above it. It reads v's token, and the state of module k - 1 at
the node above v; the first module reads the feature of the target there. So it is a function of the feature k + 1 nodes
above and of the tokens since, and the module gives the law of the token below v where the target has scored that node and
none after it. Below more drafts than there are modules the last module reads its own states, as a single
trunk does.
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
        modules: pair trunks that read alike. One may stand in all places (FastMTP, arXiv 2509.18362): then each depth has
            rows of its own all the same.
    """

    def __init__(self, modules: list[PairTrunk]) -> None:
        super().__init__()
        self.row = nn.ModuleList(modules)

    @property
    def modules_in_a_row(self) -> list[PairTrunk]:
        """The modules, beginning with the first draft's."""
        return [one for one in self.row if isinstance(one, PairTrunk)]

    @property
    def is_one(self) -> bool:
        """Whether one module stands in all places."""
        return len(set(self.modules_in_a_row)) == 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.modules_in_a_row[0].taps

    @property
    def described(self) -> dict[str, str]:
        count = len(self.row)
        what = f"one in {count} places" if self.is_one else str(count)
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
        """See `Head.other_readings`: those of the modules, all alike; and one module as engines run it."""
        modules = self.modules_in_a_row
        if self.is_one:
            yield "rows that all drafts share", modules[0]
            for name, one in modules[0].other_readings(layers):
                yield name, ModulesInARow([one] * len(modules))
            return
        for every in zip(*(module.other_readings(layers) for module in modules), strict=True):
            yield every[0][0], ModulesInARow([one for _, one in every])
