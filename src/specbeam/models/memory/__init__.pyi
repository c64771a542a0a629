"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.models.memory.files import BACKBONE as BACKBONE
from specbeam.models.memory.files import save_memory as save_memory
from specbeam.models.memory.lm import MemoryLM as MemoryLM
from specbeam.models.memory.plan import MemoryPlan as MemoryPlan
from specbeam.models.memory.reading import SegmentReader as SegmentReader
from specbeam.models.memory.recall import Recall as Recall
from specbeam.models.memory.recall import new_recall as new_recall
