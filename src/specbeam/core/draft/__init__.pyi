"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.core.draft.batch import most_nodes as most_nodes
from specbeam.core.draft.beams import BeamDrafter as BeamDrafter
from specbeam.core.draft.beams import NoDraft as NoDraft
from specbeam.core.draft.best_first import BestFirst as BestFirst
from specbeam.core.draft.best_first import BestFirstDraws as BestFirstDraws
from specbeam.core.draft.caterpillar import Caterpillar as Caterpillar
from specbeam.core.draft.children import Best as Best
from specbeam.core.draft.children import BestAndOne as BestAndOne
from specbeam.core.draft.children import Children as Children
from specbeam.core.draft.children import Distinct as Distinct
from specbeam.core.draft.children import Draws as Draws
from specbeam.core.draft.children import Independent as Independent
from specbeam.core.draft.lookup import PromptLookup as PromptLookup
from specbeam.core.draft.lookup import SuffixMatch as SuffixMatch
from specbeam.core.draft.merged import Graph as Graph
from specbeam.core.draft.merged import ManyDrafters as ManyDrafters
from specbeam.core.draft.merged import Pruned as Pruned
from specbeam.core.draft.recycle import TokenRecycling as TokenRecycling
from specbeam.core.draft.stochastic import StochasticBeam as StochasticBeam
from specbeam.core.draft.tree import Branching as Branching
from specbeam.core.draft.tree import Complete as Complete
from specbeam.core.draft.tree import FixedTree as FixedTree
from specbeam.core.draft.tree import Growth as Growth
from specbeam.core.draft.tree import GrowthInPython as GrowthInPython
from specbeam.core.draft.tree import TreeDrafter as TreeDrafter
from specbeam.core.draft.unmask import Unmasking as Unmasking
