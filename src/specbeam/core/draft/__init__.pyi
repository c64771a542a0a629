"""The public parts of this room, each once: `specbeam.lazy` reads this list when the package runs."""

from specbeam.draft.beams import BeamDrafter as BeamDrafter
from specbeam.draft.beams import NoDraft as NoDraft
from specbeam.draft.best_first import BestFirst as BestFirst
from specbeam.draft.best_first import BestFirstDraws as BestFirstDraws
from specbeam.draft.caterpillar import Caterpillar as Caterpillar
from specbeam.draft.children import Best as Best
from specbeam.draft.children import BestAndOne as BestAndOne
from specbeam.draft.children import Children as Children
from specbeam.draft.children import Distinct as Distinct
from specbeam.draft.children import Draws as Draws
from specbeam.draft.children import Independent as Independent
from specbeam.draft.joint_beams import JointBeams as JointBeams
from specbeam.draft.joint_tokens import EveryBlock as EveryBlock
from specbeam.draft.lookup import PromptLookup as PromptLookup
from specbeam.draft.lookup import SuffixMatch as SuffixMatch
from specbeam.draft.merged import Graph as Graph
from specbeam.draft.merged import ManyDrafters as ManyDrafters
from specbeam.draft.merged import Pruned as Pruned
from specbeam.draft.recycle import TokenRecycling as TokenRecycling
from specbeam.draft.tree import Branching as Branching
from specbeam.draft.tree import Complete as Complete
from specbeam.draft.tree import FixedTree as FixedTree
from specbeam.draft.tree import Growth as Growth
from specbeam.draft.tree import StochasticBeam as StochasticBeam
from specbeam.draft.tree import TreeDrafter as TreeDrafter
from specbeam.draft.unmask import Unmasking as Unmasking
