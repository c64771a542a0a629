"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.core.verify.beams import BeamRule as BeamRule
from specbeam.core.verify.search import SearchRule as SearchRule
from specbeam.core.verify.traversal import TraversalRule as TraversalRule
from specbeam.core.verify.walk import MatchRule as MatchRule
from specbeam.core.verify.walk import PathRule as PathRule
