"""The plan of a model that reads in segments: their length, the state they inherit, and the query of their memory."""

from dataclasses import dataclass
from typing import Literal, get_args

from specbeam.core.errors import BadSetting, one_of
from specbeam.doors.options.checks import is_integer, require

RecallBy = Literal["attention", "previous", "initial"]
Query = Literal["previous_tail", "refresh", "first_half"]


@dataclass(frozen=True)
class MemoryPlan:
    """How a text is read in segments (HMT, arXiv 2405.06067).

    Raises `BadSetting` if a value is wrong.

    Args:
        segment: number of new tokens of a segment (L).
        sensory: number of tokens that a segment sees of the one before it (k), at most `segment`.
        memories: number of segments whose memories can be recalled (N).
        share: the part of a segment that its query is made of (f), in (0, 1].
        recall: the memory that a segment sees, apart from the sensory tokens. "attention": the mixture recalled by its query
            (HMT). "previous": the memory of the segment before it (RMT). "initial": nothing, a learnt vector
            stands there.
        query: the tokens of the query of "attention". "previous_tail": the last tokens of the segment before. "refresh":
            the same until the segment has as many tokens itself; it is then read again, with a query of these. "first_half":
            the first tokens of the segment, from its beginning on, as in the paper: no law, because the odds of these
            tokens then depend on themselves; for reading and for figures.
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
        require(is_part, "sensory", self.sensory, f"a number of tokens from 0 to those of a segment, {self.segment}")
        is_count = is_integer(self.memories) and self.memories >= 1
        require(is_count, "memories", self.memories, "a number of at least 1")
        require(0 < self.share <= 1, "share", self.share, "in (0, 1]")
        one_of("recall", self.recall, get_args(RecallBy))
        one_of("query", self.query, get_args(Query))

    @property
    def summarised(self) -> int:
        """The number of tokens that a query is made of (j)."""
        return max(1, round(self.share * self.segment))

    @property
    def window(self) -> int:
        """The most rows of the model that a segment takes: memory, sensory tokens, segment, memory (W)."""
        return 1 + self.sensory + self.segment + 1

    @property
    def refreshes(self) -> bool:
        """Whether segments are read again once they have tokens enough for a query of their own."""
        return self.recall == "attention" and self.query == "refresh"

    def needs_summary(self, memories: int) -> bool:
        """Return whether the recall of a segment depends on its query, if there are `memories` memories."""
        return self.recall == "attention" and min(memories, self.memories) > 1

    def check_law(self) -> None:
        """Raise `BadSetting` if the plan gives no law that a text could be drawn from."""
        if self.recall == "attention" and self.query == "first_half":
            raise BadSetting(
                "query is 'first_half': the odds of the first half of a segment then depend on these very tokens, so no "
                "text can be drawn from them; decode with 'previous_tail' or 'refresh'"
            )


def segment_of_window(window: int, sensory: int) -> int:
    """Return the length of segments for which a model needs `window` positions: the authors' `segment_length`.

    Raises `BadSetting` if no token is left.
    """
    segment = window - 2 - sensory
    if segment < 1:
        raise BadSetting(
            f"window is {window} and sensory {sensory}, which leaves {segment} tokens for a segment: a window holds memory, "
            "the sensory tokens, the segment, and the memory again; take a larger window or fewer sensory tokens"
        )
    return segment
