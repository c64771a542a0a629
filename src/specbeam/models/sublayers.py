"""Sets of sublayers that a pass skips: the attention or the MLP of some layers."""

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from specbeam.core.errors import BadSetting


@dataclass(frozen=True)
class Sublayers:
    """A set of sublayers, by the indices of their layers, ascending. A skipped sublayer leaves hidden states unchanged.

    >>> Sublayers.read("a3 m3 m5"), str(Sublayers((3,), (3, 5))), Sublayers.after(2, 4)
    (Sublayers(attention=(3,), inner=(3, 5)), 'a3 m3 m5', Sublayers(attention=(2, 3), inner=(2, 3)))
    """

    attention: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "inner"):
            object.__setattr__(self, name, tuple(sorted({int(layer) for layer in getattr(self, name)})))

    def __len__(self) -> int:
        return len(self.attention) + len(self.inner)

    def __str__(self) -> str:
        return " ".join([*(f"a{layer}" for layer in self.attention), *(f"m{layer}" for layer in self.inner)])

    @classmethod
    def read(cls, text: str) -> "Sublayers":
        """Return the set named by a text: "a3" is the attention of layer 3, "m3" its MLP.

        Raises `BadSetting` if a word names no sublayer.
        """
        words = re.split(r"[\s,]+", text.strip())
        if strange := [word for word in words if word and not re.fullmatch(r"[am]\d+", word)]:
            raise BadSetting(
                f"{strange[0]!r} names no sublayer; a3 is the attention of layer 3, m3 its MLP: 'a3 m3 m5'"
            )
        return cls(
            tuple(int(word[1:]) for word in words if word.startswith("a")),
            tuple(int(word[1:]) for word in words if word.startswith("m")),
        )

    @classmethod
    def of_layers(cls, layers: "tuple[int, ...] | range") -> "Sublayers":
        """Return both sublayers of each of these layers."""
        return cls(tuple(layers), tuple(layers))

    @classmethod
    def after(cls, first: int, layers: int) -> "Sublayers":
        """Return all sublayers after the first `first` layers of a model of `layers` layers: early exit."""
        return cls.of_layers(range(first, layers))

    def check(self, layers: int) -> None:
        """Raise `BadSetting` unless a model of `layers` layers has these sublayers and others."""
        numbers = (*self.attention, *self.inner)
        if numbers and not (min(numbers) >= 0 and max(numbers) < layers):
            raise BadSetting(f"skip names the sublayers {self}; the target has layers 0 to {layers - 1}")
        if len(self) == 2 * layers:
            raise BadSetting(f"skip names all {len(self)} sublayers of the target; at least one must run")


Choice = Bool[np.ndarray, " choices"]  # whether each skippable sublayer is skipped, in the order of `chosen`


def choices_of(layers: int) -> int:
    """Return the number of sublayers that a search may skip: both in each layer except the first and the last."""
    return 2 * max(layers - 2, 0)


def count_of(layers: int, ratio: float) -> int:
    """Return the number of sublayers that a search skips in a model of `layers` layers."""
    return int(np.floor(choices_of(layers) * ratio + 1e-9))


def chosen(choice: Choice) -> Sublayers:
    """Return the sublayers of a choice: first the attention of layers 1, 2, ..., then their inner layers."""
    attention, inner = choice.reshape(2, -1)
    return Sublayers(
        tuple((1 + np.flatnonzero(attention)).tolist()),
        tuple((1 + np.flatnonzero(inner)).tolist()),
    )


def alternate(layers: int, count: int) -> Choice:
    """Return the initial choice of a search: `count` sublayers, both of layers 1, 3, ... first, then of the others."""
    inner_layers = choices_of(layers) // 2
    order = [*range(0, inner_layers, 2), *range(1, inner_layers, 2)]
    both = [place for layer in order for place in (layer, layer + inner_layers)]
    choice = np.zeros(choices_of(layers), dtype=bool)
    choice[both[:count]] = True
    return choice
