"""specbeam on a cluster, by Ray: `Decode` for Ray Data's ``map_batches``, and replicas of the server for Ray Serve."""

from specbeam.ray.data import Decode as Decode
from specbeam.ray.data import decode_table as decode_table
from specbeam.ray.serving import app as app
from specbeam.ray.serving import deployment as deployment
