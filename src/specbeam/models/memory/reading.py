"""Reading of whole texts in segments with gradients, for training and evaluation."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import Recall

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SegmentRows(NamedTuple):
    """The model's outputs for a segment of a batch of texts."""

    start: int  # position in the text of the first token
    hidden: Float[Tensor, "batch length size"]  # input of the model's head
    mixture: Float[Tensor, "batch memories"] | None  # the share of each memory in the recall; None: no choice
    memory: Float[Tensor, "batch size"] | None  # the segment's memory; None for the last segment


class SegmentReader:
    """A model that reads in segments. Gradients flow through memories, over `depth` segments.

    Each segment is a separate pass from position 0: its recall, the last tokens of the previous segment, its tokens, and its
    recall again. The hidden state of the last row is its memory.

    Args:
        model: a causal language model of transformers whose `base_model` returns the input of its head.
        depth: memories are detached before each segment whose index is a multiple of this; None: never.
    """

    def __init__(self, model: "PreTrainedModel", recall: Recall, plan: MemoryPlan, depth: int | None = None) -> None:
        self.model = model
        self.recall = recall
        self.plan = plan
        self.depth = depth

    def read(self, tokens: Int64[Tensor, "batch length"]) -> Iterator[SegmentRows]:
        """Yield the segments of texts of equal length in order. Shorter texts may be padded on the right."""
        plan = self.plan
        length = tokens.shape[1]
        memories: list[Tensor] = []
        for number, start in enumerate(range(0, length, plan.segment)):
            if self.depth is not None and number % self.depth == 0:
                memories = [memory.detach() for memory in memories]
            is_last = start + plan.segment >= length
            before = tokens[:, max(start - plan.segment, 0) : start]
            segment = tokens[:, start : start + plan.segment]
            rows = self._segment(self._embedded(before), self._embedded(segment), memories, is_last)
            yield SegmentRows(start, *rows)
            if rows[2] is not None:
                memories = [*memories, rows[2]][-plan.memories :]

    def _embedded(self, tokens: Int64[Tensor, "batch length"]) -> Float[Tensor, "batch length size"]:
        return self.model.get_input_embeddings()(tokens)

    def _segment(
        self, before: Tensor, segment: Tensor, memories: list[Tensor], is_last: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return hidden states, mixture and memory of a segment, given the embeddings of the previous and this segment."""
        plan = self.plan
        half = plan.summarised
        sensory = before[:, before.shape[1] - min(plan.sensory, before.shape[1]) :]
        tail = before[:, max(before.shape[1] - half, 0) :]
        asked_by_itself = plan.query == "first_half" or (plan.query == "refresh" and segment.shape[1] >= half)
        recalled, mixture = self._recalled(segment[:, :half] if asked_by_itself else tail, memories)
        hidden, memory = self._pass(recalled, sensory, segment, is_last)
        if plan.refreshes and asked_by_itself and half > 1 and plan.needs_summary(len(memories)):
            by_tail, _ = self._recalled(tail, memories)
            early, _ = self._pass(by_tail, sensory, segment[:, : half - 1], True)
            hidden = torch.cat([early, hidden[:, half - 1 :]], dim=1)
        return hidden, mixture, memory

    def _recalled(self, query: Tensor, memories: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the recall of a segment, float[batch, size], and the share of each memory in it."""
        batch = query.shape[0]
        if not memories or self.plan.recall == "initial":
            return self.recall.first.to(query).expand(batch, -1), None
        if not self.plan.needs_summary(len(memories)):
            return memories[-1], None
        prompt = self.recall.summary.to(query).expand(batch, 1, -1)
        summary = self._hidden(torch.cat([prompt, query, prompt], dim=1))[:, -1]
        offered = torch.stack(memories, dim=1)
        mixture = self.recall.mixture(summary, offered)
        return torch.einsum("bm,bms->bs", mixture, offered), mixture

    def _pass(self, recalled: Tensor, sensory: Tensor, segment: Tensor, is_last: bool) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of a segment's tokens, and its memory unless it is the last one."""
        around = recalled[:, None]
        rows = [around, sensory, segment] + ([] if is_last else [around])
        hidden = self._hidden(torch.cat(rows, dim=1))
        start = 1 + sensory.shape[1]
        memory = None if is_last else hidden[:, -1]
        return hidden[:, start : start + segment.shape[1]], memory

    def _hidden(self, embeds: Float[Tensor, "batch rows size"]) -> Float[Tensor, "batch rows size"]:
        return self.model.base_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
