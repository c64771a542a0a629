"""The plan of a model with memory: the length of segments, the state they inherit, and the query of their memory."""

from dataclasses import dataclass
from typing import Literal, get_args

from specbeam.core.errors import BadSetting, one_of
from specbeam.doors.options.checks import is_integer, require

RecallBy = Literal["attention", "previous", "initial"]
Query = Literal["previous_tail", "refresh", "first_half"]


@dataclass(frozen=True)
class MemoryPlan:
    """The settings of reading in segments (HMT, arXiv 2405.06067).

    Raises `BadSetting` if a value is wrong.

    Args:
        segment: number of new tokens of a segment (L).
        sensory: number of tokens of the previous segment that a segment sees (k), at most `segment`.
        memories: number of segments whose memories can be recalled (N).
        share: share of a segment's tokens that its query consists of (f), in (0, 1].
        recall: the memory that a segment sees. "attention": a mixture chosen by its query (HMT). "previous": the memory of
            the previous segment (RMT). "initial": no memory, but a learned vector.
        query: the tokens of the query of "attention". "previous_tail": the last tokens of the previous segment. "refresh":
            the same until the segment has enough tokens itself; it is then read again, with a query of these tokens.
            "first_half": always the first tokens of the segment, as in the paper. This has no law, because the
            probabilities of these tokens depend on the tokens themselves; use it to read texts and to reproduce
            figures.
    """

    segment: int
    sensory: int = 32
    memories: int = 300
    share: float = 0.5
    recall: RecallBy = "attention"
    query: Query = "previous_tail"

    def __post_init__(self) -> None:
        is_length = is_integer(self.segment) and self.segment >= 1
        require(is_length, "segment", self.segment, "a number of tokens of at least 1")
        is_part = is_integer(self.sensory) and 0 <= self.sensory <= self.segment
        require(is_part, "sensory", self.sensory, f"a number of tokens from 0 to segment, {self.segment}")
        is_count = is_integer(self.memories) and self.memories >= 1
        require(is_count, "memories", self.memories, "a number of at least 1")
        require(0 < self.share <= 1, "share", self.share, "in (0, 1]")
        one_of("recall", self.recall, get_args(RecallBy))
        one_of("query", self.query, get_args(Query))

    @property
    def summarised(self) -> int:
        """The number of tokens of a query (j)."""
        return max(1, round(self.share * self.segment))

    @property
    def window(self) -> int:
        """The maximum number of rows of a segment: memory, sensory tokens, segment, memory (W)."""
        return 1 + self.sensory + self.segment + 1

    @property
    def refreshes(self) -> bool:
        """Whether segments are read again once they have enough tokens for their own query."""
        return self.recall == "attention" and self.query == "refresh"

    def needs_summary(self, memories: int) -> bool:
        """Return whether the recall of a segment with `memories` memories depends on its query."""
        return self.recall == "attention" and min(memories, self.memories) > 1

    def check_law(self) -> None:
        """Raise `BadSetting` if the plan has no law from which texts can be drawn."""
        if self.recall == "attention" and self.query == "first_half":
            raise BadSetting(
                "query is 'first_half', so the law of a segment's first tokens depends on the tokens themselves, and "
                "no text can be drawn; decode with 'previous_tail' or 'refresh'"
            )


def segment_of_window(window: int, sensory: int) -> int:
    """Return the length of segments for windows of `window` positions, the `segment_length` of the paper's code.

    Raises `BadSetting` if no token is left.
    """
    segment = window - 2 - sensory
    if segment < 1:
        raise BadSetting(
            f"window is {window} and sensory {sensory}, which leaves {segment} tokens for a segment: a window holds the "
            "memory twice, the sensory tokens and the segment; take a larger window or fewer sensory tokens"
        )
    return segment
