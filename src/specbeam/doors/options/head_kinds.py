"""The kinds of trainable draft heads, with the defaults and options of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

EVERY = 2**40  # tokens: more than any target has
SIZES = ("taps", "draft_vocab", "inner", "layers", "depth", "decay")  # options of most kinds

# Default rates and batch sizes; see `Schedule`.
DRAFT_SCHEDULE: Mapping[str, Any] = MappingProxyType({"rate": 0.02, "embedding_rate": 0.005, "batch_tokens": 8_000})
DBLLM_SCHEDULE: Mapping[str, Any] = MappingProxyType({"rate": 0.0005, "embedding_rate": 0.002, "batch_tokens": 2_000})
HEAD_SCHEDULE: Mapping[str, Any] = MappingProxyType({"rate": 0.02, "embedding_rate": 0.002, "batch_tokens": 4_000})


@dataclass(frozen=True)
class HeadKind:
    """A kind of trainable head.

    Attributes:
        about: a description for the help of the command, after "Train".
        usual: defaults for `HeadPlan`.
        takes: the kind's options in `HeadPlan`; all kinds also take `variation`.
        schedule: defaults for `Schedule`.
    """

    about: str
    usual: Mapping[str, Any]
    takes: tuple[str, ...]
    schedule: Mapping[str, Any] = field(default_factory=lambda: HEAD_SCHEDULE)


HEAD_KINDS = {
    "eagle3": HeadKind(
        "an EAGLE-3 head",
        {"layers": 1, "depth": 4},
        SIZES,
    ),
    "peagle": HeadKind(
        "a P-EAGLE head: EAGLE-3 with mask rows, which drafts a block in one pass",
        {"layers": 2, "depth": 5},
        SIZES,
    ),
    "dspark": HeadKind(
        "a DSpark head, which drafts a block in one pass",
        {"layers": 2, "depth": 5},
        (*SIZES, "rank"),
    ),
    "eagle": HeadKind(
        "an EAGLE head, whose states estimate the target's",
        {"layers": 1, "depth": 4},
        ("draft_vocab", "inner", "layers", "depth", "decay", "regression"),
    ),
    "fspad": HeadKind(
        "an FSPAD head: EAGLE with feature sampling and partial alignment",
        {"layers": 1, "depth": 4},
        ("draft_vocab", "inner", "layers", "depth", "decay", "regression", "modules"),
    ),
    "medusa": HeadKind(
        "Medusa heads, one per draft depth",
        {"layers": 1, "depth": 4, "draft_vocab": EVERY},
        ("layers", "depth", "decay"),
    ),
    "chimera": HeadKind(
        "a Chimera head, which reads the last three tokens and all features",
        {"layers": 1, "depth": 4},
        ("draft_vocab", "inner", "depth", "decay", "regression", "read_out"),
    ),
    "specdiff": HeadKind(
        "a SpecDiff head, which unmasks a block in one or several steps",
        {"layers": 2, "depth": 5},
        (*SIZES, "shown"),
    ),
    "eesd": HeadKind(
        "an exit layer (EESD), which drafts from the target's first layers",
        {"layers": 1, "depth": 1, "draft_vocab": EVERY},
        ("exit_layer",),
        {**HEAD_SCHEDULE, "rate": 0.01},
    ),
    "bita": HeadKind(
        "BiTA's soft prompts and mask embeddings",
        {"depth": 3, "draft_vocab": EVERY},
        ("depth", "decay", "prefix"),
        {**HEAD_SCHEDULE, "embedding_rate": 0.05},
    ),
    "hidden_transfer": HeadKind(
        "the linear maps of Hidden Transfer",
        {"depth": 3, "draft_vocab": EVERY},
        ("depth", "decay", "enters"),
    ),
}

# Windows are trained into a copy of the target (`train_coral`), with the options of a head.
WINDOW_KIND = HeadKind(
    "a copy of the target to predict windows of tokens ahead and behind (COrAL)",
    {"depth": 3, "behind": 8},
    ("depth", "behind", "enters", "decay"),
    {"rate": 0.02, "embedding_rate": 0.005, "batch_tokens": 8_000},
)
