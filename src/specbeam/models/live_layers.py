"""SCORE: the target's first layers as a draft model on the target's own KV cache, so that no layer runs twice."""

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM, checked_needs
from specbeam.core.records import Scored
from specbeam.engines.kv.cross import ReadsSources
from specbeam.models.early_layers import early_layers
from specbeam.models.huggingface import WITH_RANGES, EachNeeds, Forests, HuggingFaceLM, OnTargetsCache, Sessions


class LiveLayers(OnTargetsCache):
    """The first layers of the target, with its final norm and head, as a draft model.

    These layers store their keys and values in the target's KV cache; the target's pass runs only the remaining layers on
    the same nodes. Slots of drafts outside the forest that the target scores are freed. In contrast, a model of
    `early_layers` has its own cache and works with every engine.

    Raises `BadSetting` unless 1 <= layers < the model's number of layers, and `NotSupported` unless the model's engine runs
    ranges of layers.
    """

    keeps_nodes = True

    def __init__(self, lm: HuggingFaceLM, layers: int) -> None:
        name = type(lm.model).__name__
        if isinstance(lm.runner, ReadsSources):
            raise NotSupported(f"the first layers draft in decoder-only models, and {name} has an encoder")
        total = lm.model.config.num_hidden_layers
        if not 1 <= layers < total:
            raise BadSetting(f"layers is {layers}; {name} has {total} layers: choose 1 to {total - 1}")
        if not lm.runner.runs_ranges:
            raise NotSupported(
                f"drafts on the target's cache need {WITH_RANGES}; {name} is run by engine {lm.engine!r}. "
                "early_layers(model, layers) takes every engine, but runs the first layers twice"
            )
        self.target = lm
        self.layers = layers
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.passes = 0

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        if any(need.states or need.ranked for need in checked_needs(self, len(sessions), needs)):
            raise NotSupported(
                "LiveLayers returns only logits, and a part needs hidden states or ranked tokens: "
                "use early_layers(model, layers)"
            )
        self.passes += 1
        return self.target.extend_early(sessions, forests, self.layers)


def first_layers(lm: HuggingFaceLM, layers: int) -> LM:
    """Return the first `layers` layers of a model as a draft model.

    They work on the model's KV cache (`LiveLayers`) if its engine supports that and layers remain; otherwise they have
    their own cache and run twice (`early_layers`).

    Raises `NotSupported` if the model has an encoder, or if its layers are not in one list.
    """
    if isinstance(lm.runner, ReadsSources):
        raise NotSupported(
            f"the first layers draft in decoder-only models, and {type(lm.model).__name__} has an encoder"
        )
    is_live = lm.runner.runs_ranges and layers < lm.model.config.num_hidden_layers
    return LiveLayers(lm, layers) if is_live else early_layers(lm.model, layers)
