"""Models on a CPU whose weights stay as their files are, mapped to memory: large ones that the compiled forward runs.

Smaller models become float32 as they are loaded, and the compiled forward makes a second copy of their weights. Of a large
model, the compiled forward's copy is the only one that stays in memory.
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
    """Return the type of a model's files if its weights stay in them, mapped to memory; None if they become float32.

    They stay if all of them have one type, if they are more than `mapped.LARGEST_WIDENED`, and if the compiled forward runs
    the model. Weights of a model that reads sources stay in float32 only, in which transformers runs an encoder that is left
    to it.
    """
    are_safetensors = all(path.suffix == ".safetensors" for path in checkpoint.files)
    if not compiling.AVAILABLE or not are_safetensors:
        return None
    tensors = checkpoint.stored.values()
    found = common_type(tensors, sum(one.numbers for one in tensors))
    if found is None or (checkpoint.reads_sources and found != torch.float32):
        return None
    with reading(f"{checkpoint.name} describes no model"), torch.device("meta"):
        model = checkpoint.kind.from_config(checkpoint.config, dtype=found, trust_remote_code=False)
    return None if misfit_of_shape(model, None) else found


def common_type(tensors: Iterable[StoredTensor], numbers: int) -> torch.dtype | None:
    """Return the type of tensors in files; None if they have several types, or if the model is too small to be mapped.

    Args:
        numbers: number of weights of the model.
    """
    types = {one.type for one in tensors}
    if len(types) != 1 or numbers <= mapped.LARGEST_WIDENED or not types <= TYPES.keys():
        return None
    return TYPES[types.pop()]
