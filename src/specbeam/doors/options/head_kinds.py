"""The kinds of draft heads that can be trained: what is usual for each, and what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

EVERY = 2**40  # tokens: more than any target has
SIZES = ("taps", "draft_vocab", "inner", "layers", "depth", "decay")  # options of most kinds

# The usual rates and batch of a training, by what is trained; see `Schedule`.
DRAFT_SCHEDULE: Mapping[str, Any] = MappingProxyType({"rate": 0.02, "embedding_rate": 0.005, "batch_tokens": 8_000})
HEAD_SCHEDULE: Mapping[str, Any] = MappingProxyType({"rate": 0.02, "embedding_rate": 0.002, "batch_tokens": 4_000})


@dataclass(frozen=True)
class HeadKind:
    """What is usual for a kind of head, and what it takes.

    Attributes:
        about: what is trained, as the help of the command says it.
        usual: options of `HeadPlan` that are usual for the kind.
        takes: options of `HeadPlan` that it has a use for; all kinds take `variation`.
        schedule: options of `Schedule` that are usual for the kind.
    """

    about: str
    usual: Mapping[str, Any]
    takes: tuple[str, ...]
    schedule: Mapping[str, Any] = field(default_factory=lambda: HEAD_SCHEDULE)


HEAD_KINDS = {
    "eagle3": HeadKind(
        "an EAGLE-3 head, on what the target's beams draw",
        {"layers": 1, "depth": 4},
        SIZES,
    ),
    "peagle": HeadKind(
        "a P-EAGLE head, EAGLE-3 with mask rows that draft a block in one pass",
        {"layers": 2, "depth": 5},
        SIZES,
    ),
    "dspark": HeadKind(
        "a DSpark head, which drafts a block in one pass",
        {"layers": 2, "depth": 5},
        (*SIZES, "rank"),
    ),
    "fspad": HeadKind(
        "an FSPAD head, EAGLE with feature sampling and partial alignment",
        {"layers": 1, "depth": 4},
        ("draft_vocab", "inner", "layers", "depth", "decay", "regression"),
    ),
    "medusa": HeadKind(
        "Medusa heads, one for each depth of a draft",
        {"layers": 1, "depth": 4, "draft_vocab": EVERY},
        ("layers", "depth", "decay"),
    ),
    "chimera": HeadKind(
        "a Chimera head, which reads the last three tokens beside all features",
        {"layers": 1, "depth": 4},
        ("draft_vocab", "inner", "depth", "decay", "regression", "read_out"),
    ),
    "specdiff": HeadKind(
        "a SpecDiff head, which unmasks a block in one step or several",
        {"layers": 2, "depth": 5},
        (*SIZES, "shown"),
    ),
    "eesd": HeadKind(
        "an exit layer (EESD), which drafts behind the target's first layers",
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

# A window is taught to a copy of the target itself (`train_coral`): its options are those of a head, and it is none.
WINDOW_KIND = HeadKind(
    "a copy of the target a window of tokens ahead (COrAL)",
    {"depth": 3},
    ("depth", "enters", "decay"),
    {"rate": 0.02, "embedding_rate": 0.005, "batch_tokens": 8_000},
)
