"""The public parts of this room, each once: `specbeam.lazy` reads this list when the package runs."""

from specbeam.control.confidence import SureDraft as SureDraft
from specbeam.control.confidence import TrackedThreshold as TrackedThreshold
from specbeam.control.cost import CostCurve as CostCurve
from specbeam.control.fixed import FixedShape as FixedShape
from specbeam.control.needs import NodesByNeed as NodesByNeed
from specbeam.control.size import SizeByLatency as SizeByLatency
from specbeam.control.survival import Survival as Survival
from specbeam.control.thompson import Thompson as Thompson
from specbeam.control.width import FixedWidth as FixedWidth
from specbeam.control.width import NucleusWidth as NucleusWidth
from specbeam.control.width import SureWidth as SureWidth
from specbeam.control.worth import DepthByCost as DepthByCost
