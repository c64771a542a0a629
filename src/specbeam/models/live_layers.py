"""SCORE: a draft model made of the target's first layers, which work on the target's KV cache, so nothing runs twice."""

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM, checked_needs
from specbeam.core.records import Scored
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.kv.cross import ReadsSources
from specbeam.models.early_layers import early_layers
from specbeam.models.huggingface import EachNeeds, Forests, HuggingFaceLM, OnTargetsCache, Sessions


class LiveLayers(OnTargetsCache):
    """A draft model that is the first layers of the target, with the target's final norm and head.

    These layers store their keys and values in the target's KV cache; the target's pass then runs only the other layers on
    the same nodes. Of drafts that are not in the forest that the target scores, the slots are free again. In contrast,
    `early_layers` has a cache of its own, and works with every engine.

    Raises `BadSetting` unless 1 <= layers < the model's number of layers, and `NotSupported` unless the model is run by
    the compiled forward, rounded or not, or by engine "layers".
    """

    keeps_nodes = True

    def __init__(self, lm: HuggingFaceLM, layers: int) -> None:
        name = type(lm.model).__name__
        if isinstance(lm.runner, ReadsSources):
            raise NotSupported(f"a range of layers is of decoder-only models, and {name} has an encoder")
        total = lm.model.config.num_hidden_layers
        if not 1 <= layers < total:
            raise BadSetting(f"layers is {layers}; {name} has {total}, of which some have to be left")
        if not isinstance(lm.runner, PackedPasses):
            raise NotSupported(
                f"a range of layers is run by the compiled forward, rounded or not, or 'layers', and {name} is run by "
                f"engine {lm.engine!r}; early_layers(model, layers) takes every model, and computes their part twice"
            )
        self.target = lm
        self.layers = layers
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.passes = 0

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        if any(need.states or need.ranked for need in checked_needs(self, len(sessions), needs)):
            raise NotSupported(
                "LiveLayers gives logits only, and a part needs hidden states or ranked tokens: "
                "use early_layers(model, layers)"
            )
        self.passes += 1
        return self.target.extend_early(sessions, forests, self.layers)


def first_layers(lm: HuggingFaceLM, layers: int) -> LM:
    """Return the first `layers` layers of a model as a model: on its own cache where its engine can run them there.

    Elsewhere, and where no layer would be left, they have a cache of their own, and are computed twice (`early_layers`).

    Raises `NotSupported` if the model has an encoder, or if its layers are not in one list.
    """
    if isinstance(lm.runner, ReadsSources):
        raise NotSupported(
            f"the first layers draft in decoder-only models, and {type(lm.model).__name__} has an encoder"
        )
    is_live = isinstance(lm.runner, PackedPasses) and layers < lm.model.config.num_hidden_layers
    return LiveLayers(lm, layers) if is_live else early_layers(lm.model, layers)
