"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.engines.cache_names import cache_argument as cache_argument
from specbeam.engines.cache_names import cache_of as cache_of
from specbeam.engines.dual_binary import BINARY_GROUP as BINARY_GROUP
from specbeam.engines.dual_binary import DBLLM as DBLLM
from specbeam.engines.dual_binary import dual_binary_of as dual_binary_of
from specbeam.engines.dual_binary import rounded_binaries as rounded_binaries
from specbeam.engines.eligibility import check_takes_heads as check_takes_heads
from specbeam.engines.eligibility import is_llama_like as is_llama_like
from specbeam.engines.eligibility import lacks_taps as lacks_taps
from specbeam.engines.eligibility import layers_of as layers_of
from specbeam.engines.eligibility import output_shape as output_shape
from specbeam.engines.eligibility import reads_sources as reads_sources
from specbeam.engines.families import family_of as family_of
from specbeam.engines.families import head_size as head_size
from specbeam.engines.kv.masks import Masks as Masks
from specbeam.engines.packed import matrices_of as matrices_of
from specbeam.engines.source import Source as Source
from specbeam.engines.speeds import prefers_bfloat16 as prefers_bfloat16
from specbeam.engines.torch.in_float32 import as_loaded as as_loaded
