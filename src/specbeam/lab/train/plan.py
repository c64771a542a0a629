"""The plan of a head to be trained: its sizes, and the depth of its drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from specbeam.doors import HeadKind, is_integer, require
from specbeam.engines import check_takes_heads, lacks_taps, layers_of, output_shape
from specbeam.errors import BadSetting
from specbeam.models.heads import READ_OUTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATE = 0.5  # by default, rows enter after this share of the target's layers
BOTH = "both"
SAMPLING = "sampling"
ALIGNMENT = "alignment"
MODULES = (BOTH, SAMPLING, ALIGNMENT)  # of FSPAD heads
FULL_VOCAB = 32_000  # heads take a vocabulary of up to this size whole by default


@dataclass(frozen=True)
class HeadPlan:
    """The shape of a head to be trained.

    Args:
        taps: the hidden states of the target that it reads, as numbers of the layers that they enter; the number of layers
            is the output of the last one; see `Needs.taps`.
        draft_vocab: size of its vocabulary, the target's likeliest tokens.
        inner: size of the gated inner layer.
        layers: number of layers.
        depth: depth of the drafts that the head learns to make.
        rank: rank of the matrices that make a draft of a block depend on the token above.
        decay: weight of each depth in the loss, relative to the depth before.
        variation: share of total variation in the loss, in [0, 1]; cross-entropy has the rest.
        prefix: number of soft prompts in each layer.
        enters: the layer at which rows made of hidden states enter.
        behind: of COrAL's windows: number of tokens behind that a row also learns to predict, its own token included.
        regression: weight of the error of estimated hidden states, relative to the error of laws.
        modules: of FSPAD heads: "both", or only feature "sampling", or only partial "alignment"; an EAGLE head has neither.
        read_out: of Chimera heads: "own", a matrix of all tokens for each depth, or "shared", a map for each depth and one
            matrix of tokens; see `ChimeraShape`.
        shown: of SpecDiff heads: the share of blocks, in [0, 1), that are trained with some of their drafts shown, for
            drafts in several steps; the others are trained with none.
        exit_layer: number of the target's layers before an exit layer; None: the most promising number.
    """

    taps: tuple[int, ...]
    draft_vocab: int
    inner: int
    layers: int = 1
    depth: int = 4
    rank: int = 64
    decay: float = 0.8
    variation: float = 0.5
    regression: float = 10.0
    modules: str = BOTH
    read_out: str = "shared"
    shown: float = 0.5
    exit_layer: int | None = None
    prefix: int = 16
    enters: int = 1
    behind: int = 0

    def __post_init__(self) -> None:
        """Raise `BadSetting` if a value is wrong."""
        for name in ("draft_vocab", "inner", "layers", "depth", "rank"):
            value = getattr(self, name)
            require(is_integer(value) and value >= 1, name, value, "an integer of at least 1")
        for name in ("prefix", "behind"):
            value = getattr(self, name)
            require(is_integer(value) and value >= 0, name, value, "an integer of at least 0")
        require(is_integer(self.enters) and self.enters >= 1, "enters", self.enters, "an integer of at least 1")
        are_taps = isinstance(self.taps, tuple) and len(self.taps) > 0
        are_taps = are_taps and all(is_integer(tap) and tap >= 0 for tap in self.taps)
        require(are_taps, "taps", self.taps, "a tuple of integers of at least 0")
        after = self.exit_layer
        require(after is None or (is_integer(after) and after >= 1), "exit_layer", after, "an integer of at least 1")
        require(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")
        require(self.regression >= 0, "regression", self.regression, "at least 0")
        require(0 <= self.variation <= 1, "variation", self.variation, "in [0, 1]")
        require(self.modules in MODULES, "modules", self.modules, f"one of {', '.join(MODULES)}")
        require(self.read_out in READ_OUTS, "read_out", self.read_out, f"one of {', '.join(READ_OUTS)}")
        require(0 <= self.shown < 1, "shown", self.shown, "in [0, 1)")


def planned(target: "PreTrainedModel", usual: Mapping[str, Any], asked: Mapping[str, Any]) -> HeadPlan:
    """Return a plan for a target.

    Args:
        usual: defaults of the kind of head.
        asked: values that override the defaults; None: the default.

    Raises `BadSetting` if an option is unknown or invalid, or if the target does not have the taps; `NotSupported` for
    targets that take no heads.
    """
    check_takes_heads(target)
    known = {field.name for field in fields(HeadPlan)}
    if strange := [name for name in asked if name not in known]:
        raise BadSetting(f"{strange[0]} is not an option of a head; the options are {', '.join(sorted(known))}")
    vocab = output_shape(target)[0]
    width = int(target.config.get_text_config().hidden_size)
    layers = len(layers_of(target))
    enters = max(round(LATE * layers), 1)
    everywhere = HeadPlan(usual_taps(layers), min(vocab, FULL_VOCAB), 2 * width, enters=enters)
    chosen = {name: value for name, value in asked.items() if value is not None}
    if "taps" in chosen:
        chosen["taps"] = tuple(chosen["taps"])
    plan = replace(everywhere, **{**usual, **chosen})
    if why := lacks_taps(target, plan.taps):
        raise BadSetting(f"taps is {plan.taps}; {why}")
    if plan.exit_layer is not None and plan.exit_layer >= layers:
        raise BadSetting(f"exit_layer is {plan.exit_layer}; it must be below {layers}, the target's number of layers")
    if "enters" in chosen and plan.enters >= layers:
        raise BadSetting(f"enters is {plan.enters}; {type(target).__name__} has {layers} layers, counted from 0")
    return replace(plan, draft_vocab=min(plan.draft_vocab, vocab))


def plan_of_kind(target: "PreTrainedModel", kind: HeadKind, asked: Mapping[str, Any] | None, name: str) -> HeadPlan:
    """Return a plan for a head of a kind.

    Args:
        asked: see `planned`.
        name: name of heads of this kind in messages.

    Raises `BadSetting` as `planned` does, and for an option that the kind does not take.
    """
    given = {option: value for option, value in (asked or {}).items() if value is not None}
    plan = planned(target, kind.usual, given)
    if ignored := [option for option in given if option not in (*kind.takes, "variation")]:
        raise BadSetting(f"{ignored[0]} is {given[ignored[0]]!r}, but {name} do not use it; leave it out")
    return plan


def usual_taps(layers: int) -> tuple[int, ...]:
    """Return the hidden states that heads read by default: after the first layers, in the middle, and before the last ones.

    A target with few layers has fewer taps, each once.
    """
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))
