"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.core.control.confidence import SureDraft as SureDraft
from specbeam.core.control.confidence import TrackedThreshold as TrackedThreshold
from specbeam.core.control.cost import CostCurve as CostCurve
from specbeam.core.control.depth import DepthByCost as DepthByCost
from specbeam.core.control.fixed import FixedShape as FixedShape
from specbeam.core.control.needs import NodesByNeed as NodesByNeed
from specbeam.core.control.size import SizeByLatency as SizeByLatency
from specbeam.core.control.survival import Survival as Survival
from specbeam.core.control.thompson import Thompson as Thompson
from specbeam.core.control.width import FixedWidth as FixedWidth
from specbeam.core.control.width import NucleusWidth as NucleusWidth
from specbeam.core.control.width import SureWidth as SureWidth
