"""SCORE by the first layers of a target on its own cache: what they compute is not computed again."""

from collections.abc import Sequence
from typing import Any

from specbeam.core.forest import Forest
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.base import checked_needs
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Needs, Scored, Turn
from specbeam.session import CacheOwner


class LiveLayers:
    """Stands where a draft model is expected: the first layers of the target, with its own last norm and head.

    Keys and values go into the target's cache as far as these layers reach; the loop's pass runs the other layers on them.
    Nothing of the forest may be left out before the loop scores it. `early_layers` has a cache of its own, and works with
    every engine.
    """

    def __init__(self, lm: HuggingFaceLM, layers: int) -> None:
        total = lm.model.config.num_hidden_layers
        name = type(lm.model).__name__
        if not 1 <= layers < total:
            raise BadSetting(f"layers is {layers}; {name} has {total}, of which some have to be left")
        if not isinstance(lm.runner, PackedPasses):
            raise NotSupported(
                f"a range of layers is run by the compiled forward alone, and {name} is run by engine {lm.engine!r}; "
                "early_layers(model, layers) takes every model, and computes their part twice"
            )
        self.lm = lm
        self.layers = layers
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.passes = 0

    def extend(
        self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`."""
        if any(one.states or one.ranked for one in checked_needs(self, len(sessions), needs)):
            raise NotSupported("the first layers of a target give logits alone")
        self.passes += 1
        return self.lm.extend_early(sessions, forests, self.layers)

    def fill(self, sessions: Sequence[CacheOwner], needs: Any = None, most: int | None = None) -> list[bool]:
        """Return that there is nothing to store: the target stores its prompts itself."""
        return [True] * len(sessions)

    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """The target's cache is settled by the loop."""

    def peak(self, session: CacheOwner) -> int:
        """Return the most tokens of the session that were stored at once."""
        return self.lm.peak(session)

    def close(self, session: CacheOwner) -> None:
        """The loop closes the target's cache."""
