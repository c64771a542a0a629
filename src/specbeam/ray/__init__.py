"""specbeam on a cluster, by Ray: `Decode` for Ray Data's ``map_batches``."""

from specbeam.ray.data import Decode as Decode
from specbeam.ray.data import decode_table as decode_table
