"""The public parts of this room, each once: `specbeam.lazy` reads this list when the package runs."""

from specbeam.verify.beams import BeamRule as BeamRule
from specbeam.verify.joint_beams import JointRule as JointRule
from specbeam.verify.joint_tokens import BlockRule as BlockRule
from specbeam.verify.search import SearchRule as SearchRule
from specbeam.verify.traversal import TraversalRule as TraversalRule
from specbeam.verify.walk import MatchRule as MatchRule
from specbeam.verify.walk import PathRule as PathRule
