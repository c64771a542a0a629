"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.core.laws.values import largest_values as largest_values
from specbeam.core.laws.warp import Warp as Warp
from specbeam.core.laws.warp import dense_logp as dense_logp
from specbeam.core.laws.warp import law_of_beams as law_of_beams
from specbeam.core.laws.warp import on_host as on_host
from specbeam.core.laws.warp import processed_rows as processed_rows
