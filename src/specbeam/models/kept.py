"""Which models of a CPU keep the words of their files: large ones that the compiled forward runs.

Smaller ones become float32 as they are loaded, and the compiled forward's copy of their weights is a second one. A large one
stays as its files are, which are mapped to memory, and the compiled forward's copy is the only one that stays there.
"""

import torch

from specbeam.core import compiling
from specbeam.engines import mapped
from specbeam.engines.cpu.decoder import misfit_of_shape
from specbeam.models.checkpoints.boundary import reading
from specbeam.models.checkpoints.headers import TYPES
from specbeam.models.checkpoints.pretrained import Checkpoint


def kept_type(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the type that the weights of a model keep; None if they become float32.

    They keep the type of their files, if that is one for all of them, if they are more than
    `mapped.LARGEST_WIDENED`, and if the compiled forward runs the model. Those of a model that reads sources keep float32
    alone, in which transformers runs an encoder that is left to it.

    Args:
        checkpoint: the model in its files.
    """
    is_mapped = all(path.suffix == ".safetensors" for path in checkpoint.files)
    if not compiling.AVAILABLE or not is_mapped:
        return None
    types = {one.type for one in checkpoint.stored.values()}
    numbers = sum(one.numbers for one in checkpoint.stored.values())
    if len(types) != 1 or numbers <= mapped.LARGEST_WIDENED or not types <= TYPES.keys():
        return None
    kept = TYPES[types.pop()]
    if getattr(checkpoint.config, "is_encoder_decoder", False) and kept != torch.float32:
        return None
    with reading(f"{checkpoint.name} describes no model"), torch.device("meta"):
        model = checkpoint.kind.from_config(checkpoint.config, dtype=kept, trust_remote_code=False)
    return None if misfit_of_shape(model, None) else kept
