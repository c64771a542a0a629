"""The passes over the vocabulary as compiled loops, where numba is installed: the fast twins of what stands in `laws`,
`probs` and `dice`, which stay as their oracles. Each takes one pass where array code takes ten.

Pairs are beam * vocabulary + token, as in `laws`.
"""

from specbeam.kernels.compiling import AVAILABLE, start_threads, use_threads
from specbeam.kernels.noise import child_keys, path_keys
from specbeam.kernels.paths import prolonged
from specbeam.kernels.planning import BY_ODDS, BY_VALUE, Plan, layers_by_depth, learnt, planned
from specbeam.kernels.races import odds_by_drafts
from specbeam.kernels.ranking import best, largest, ranked
from specbeam.kernels.sums import LONG, log_norm, pick
from specbeam.kernels.truncation import Cut, Way, core_and_halo, first_ones, layer, shifts, truncated
from specbeam.kernels.values import Values
from specbeam.kernels.widths import Fronts, Joint, Widths, accepted_by_drafts

__all__ = [
    "AVAILABLE",
    "BY_ODDS",
    "BY_VALUE",
    "LONG",
    "Cut",
    "Fronts",
    "Joint",
    "Plan",
    "Values",
    "Way",
    "Widths",
    "accepted_by_drafts",
    "best",
    "child_keys",
    "core_and_halo",
    "first_ones",
    "largest",
    "layer",
    "layers_by_depth",
    "learnt",
    "log_norm",
    "odds_by_drafts",
    "path_keys",
    "pick",
    "planned",
    "prolonged",
    "ranked",
    "shifts",
    "start_threads",
    "truncated",
    "use_threads",
]
