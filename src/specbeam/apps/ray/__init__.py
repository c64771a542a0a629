"""specbeam on a cluster, by Ray: `Decode` for Ray Data's ``map_batches``, and replicas of the server for Ray Serve."""

from specbeam.apps.ray.data import Decode as Decode
from specbeam.apps.ray.data import decode_table as decode_table
from specbeam.apps.ray.serving import app as app
from specbeam.apps.ray.serving import deployment as deployment
