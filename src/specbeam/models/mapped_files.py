"""Choice of the models on a CPU whose weights stay in memory-mapped files: large ones that the compiled forward runs.

Smaller models are loaded as float32, and the compiled forward makes a second copy of their weights. For a large model, only
the compiled forward's copy stays in memory.
"""

from collections.abc import Iterable

import torch

from specbeam.core import compiling
from specbeam.engines import mapped
from specbeam.engines.cpu.decoder import misfit_of_shape
from specbeam.models.checkpoints.boundary import reading
from specbeam.models.checkpoints.headers import TYPES, StoredTensor
from specbeam.models.checkpoints.pretrained import Checkpoint


def stored_type(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the type of a model's files if its weights stay memory-mapped; None if they are converted to float32.

    They stay mapped if they all have one type, if they are more than `mapped.LARGEST_WIDENED`, and if the compiled forward
    runs the model. For an encoder-decoder model that type must be float32, as transformers may have to run its encoder.
    """
    are_safetensors = all(path.suffix == ".safetensors" for path in checkpoint.files)
    if not compiling.AVAILABLE or not are_safetensors:
        return None
    tensors = checkpoint.stored.values()
    found = common_type(tensors, sum(one.numbers for one in tensors))
    if found is None or (checkpoint.reads_sources and found != torch.float32):
        return None
    with reading(f"could not build the model of {checkpoint.name}"), torch.device("meta"):
        model = checkpoint.kind.from_config(checkpoint.config, dtype=found, trust_remote_code=False)
    return None if misfit_of_shape(model, None) else found


def common_type(tensors: Iterable[StoredTensor], numbers: int) -> torch.dtype | None:
    """Return the one type of stored tensors; None if there are several, or if a model of `numbers` weights is too small."""
    types = {one.type for one in tensors}
    if len(types) != 1 or numbers <= mapped.LARGEST_WIDENED or not types <= TYPES.keys():
        return None
    return TYPES[types.pop()]
