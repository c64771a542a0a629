"""Models with memory, written naively: each row by forwards of whole windows, and a model without a cache to put memory on."""

import torch

from specbeam.core.forest import unknown_nodes
from specbeam.core.records import Scored
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import Recall, new_recall
from tests.support.tiny_models import tiny


def tiny_memory(model, width=8, seed=0, sharp=6.0) -> Recall:
    """Random weights whose mixtures are far from uniform."""
    recall = new_recall(model.get_input_embeddings().weight, width, seed).to(model.dtype)
    with torch.no_grad():
        recall.queries.weight.mul_(sharp)
        recall.first.mul_(3)
    return recall.requires_grad_(False)


def tiny_remembering(vocab=11, family="llama", double=True, seed=0):
    model = tiny(family, seed=seed, vocab_size=vocab, bos_token_id=0, eos_token_id=vocab - 1, pad_token_id=0)
    model = model.double() if double else model
    return model, tiny_memory(model)


class Naive:
    """The definition of HMT for one text, one window after the other, without any cache; see `hmt.md` in words:

    a window is [P, last k tokens of the segment before, segment, P]; the state of its last row is the segment's memory; P is
    the mixture of the last N memories by a query, the state of the last row of [T, tokens, T]; P_init where there are none.
    """

    def __init__(self, model, recall: Recall, plan: MemoryPlan):
        self.model, self.recall, self.plan = model, recall, plan
        self.states = {}

    @torch.no_grad()
    def hidden(self, rows):
        """The states of rows that are tokens or embeddings."""
        table = self.model.get_input_embeddings()
        embeds = [table(torch.tensor(row)) if isinstance(row, int) else row for row in rows]
        return self.model.base_model(inputs_embeds=torch.stack(embeds)[None], use_cache=False).last_hidden_state[0]

    def recalled(self, memories, query):
        memories = memories[-self.plan.memories :]
        if not memories or self.plan.recall == "initial":
            return self.recall.first
        if self.plan.recall == "previous":
            return memories[-1]
        summary = self.hidden([self.recall.summary, *query, self.recall.summary])[-1]
        scores = [
            float((self.recall.queries.weight @ summary) @ (self.recall.keys.weight @ memory)) / self.recall.width**0.5
            for memory in memories
        ]
        odds = torch.tensor(scores, dtype=torch.float64).softmax(0)
        return sum(share * memory for share, memory in zip(odds.to(summary.dtype), memories, strict=True))

    def memories_before(self, text, number):
        """The memories of the segments before segment `number`."""
        key = tuple(text[: number * self.plan.segment])
        if key not in self.states:
            found = []
            if number:
                found = self.memories_before(text, number - 1)
                rows, recalled = self.window(text[: number * self.plan.segment], number - 1, found)
                found = [*found, self.hidden([*rows, recalled])[-1]]
            self.states[key] = found
        return self.states[key]

    def window(self, text, number, memories):
        size, half = self.plan.segment, self.plan.summarised
        before = text[max((number - 1) * size, 0) : number * size]
        segment = text[number * size : (number + 1) * size]
        sensory = before[len(before) - self.plan.sensory :] if self.plan.sensory and before else []
        own = self.plan.query == "first_half" or (self.plan.query == "refresh" and len(segment) >= half)
        recalled = self.recalled(memories, segment[:half] if own else before[-half:])
        return [recalled, *sensory, *segment], recalled

    @torch.no_grad()
    def logits(self, text):
        """The logits after a text, float[vocab]."""
        text = list(text)
        number = (len(text) - 1) // self.plan.segment
        rows, _ = self.window(text, number, self.memories_before(text, number))
        return self.model.get_output_embeddings()(self.hidden(rows)[-1])

    def law(self, text):
        return self.logits(text).double().softmax(-1).numpy()

    def greedy(self, prompt, count):
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text).argmax()))
        return text[len(prompt) :]


class _TakesVectors:
    takes_vectors = True


class ForwardLM(HuggingFaceLM):
    """A model of transformers that computes each row by a forward of its whole path, and remembers what it has computed.

    It is for programs that are replayed thousands of times.
    """

    engine = "forward"
    is_compiled = False
    max_positions = None
    runner = _TakesVectors()

    def __init__(self, model):
        self.model = model
        self.device = torch.device("cpu")
        self.vocab = model.get_output_embeddings().weight.shape[0]
        self.passes = 0
        self.most_rows = 0  # of a path
        self._rows = {}
        self.open = set()  # owners

    def extend(self, owners, forests, needs):
        self.passes += 1
        assert len(set(map(id, owners))) == len(owners), "a window is in a pass twice"
        return [self._scored(owner, forest) for owner, forest in zip(owners, forests, strict=True)]

    def _scored(self, owner, forest):
        state = owner.state.setdefault(self, {"roots": [tuple(owner.prompt)], "seen": 0})
        self.open.add(owner)
        assert len(state["roots"]) == forest.roots
        fresh = unknown_nodes(state["seen"], forest.size, forest.known.nodes)
        state["seen"] = forest.size
        found = [self._row(owner, self._path(state, forest, int(node))) for node in fresh]
        return Scored(torch.stack([logits for logits, _ in found]), hidden=torch.stack([hidden for _, hidden in found]))

    def _path(self, state, forest, node):
        below = []
        while forest.parents[node] >= 0:
            below.append(int(forest.tokens[node]))
            node = int(forest.parents[node])
        return (*state["roots"][node], *below[::-1])

    @torch.no_grad()
    def _row(self, owner, path):
        vector = owner.vectors.get(self)
        key = (path, None if vector is None else vector.numpy().tobytes())
        if key not in self._rows:
            self.most_rows = max(self.most_rows, len(path))
            table = self.model.get_input_embeddings()
            rows = [vector[-1 - token] if token < 0 else table(torch.tensor(token)) for token in path]
            hidden = self.model.base_model(inputs_embeds=torch.stack(rows)[None], use_cache=False).last_hidden_state[
                0, -1
            ]
            self._rows[key] = self.model.get_output_embeddings()(hidden), hidden
        return self._rows[key]

    def settle(self, owner, turn):
        state = owner.state[self]
        state["roots"] = [self._path(state, turn.forest, int(node)) for node in turn.verdict.beams.nodes]
        state["seen"] = 0

    def held(self, owner):
        paths = owner.state[self]["roots"] if self in owner.state else []
        return len({path[:stop] for path in paths for stop in range(1, len(path) + 1)})

    def close(self, owner):
        owner.state.pop(self, None)
        self.open.discard(owner)
