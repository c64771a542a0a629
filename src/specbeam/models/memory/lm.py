"""SCORE: a language model with memory (HMT), around any model that takes embedding rows."""

from collections.abc import Generator, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.core.answers import scored_rows
from specbeam.core.beams import Beams, Layers
from specbeam.core.errors import BadHead, BadSetting, NotSupported
from specbeam.core.forest import Forest
from specbeam.core.guard import ThreadGuard
from specbeam.core.lm import checked_needs
from specbeam.core.records import Needs, Scored, Shape, Turn, Verdict
from specbeam.core.session import Session
from specbeam.models.huggingface import EachNeeds, Forests, HuggingFaceLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import Recall
from specbeam.models.memory.windows import (
    Anchor,
    Answer,
    Ask,
    Opening,
    Past,
    TextNode,
    TextPlace,
    TextTree,
    Vector,
    Window,
    WindowOwner,
)

Result = TypeVar("Result")
Task = Generator[list[Ask], list[Answer], Result]  # yields requests of model rows, and finally returns a result


class _Late(NamedTuple):
    """A segment to be read again with its own query, which this token has completed."""

    node: TextNode
    past: Past
    tokens: tuple[int, ...]


class MemoryLM:
    """A language model that reads text in segments and recalls memories of earlier segments: HMT (arXiv 2405.06067).

    The logits of a node are a function of the text on its path: the model computes them in the window of the node's
    segment, which holds the segment's recall, the last tokens of the previous segment, and its own tokens. Branches of a
    text tree share windows until they diverge, and all memories of their common past. Rejected drafts leave no state.

    A pass that crosses the end of a segment takes two passes of the model: the first computes the memories of full
    segments, and the second begins the next segments.

    Prefix caching (`HuggingFaceLM.remember_prompts`) is not available: a window begins with a memory of its own text, so
    equal beginnings of prompts have different keys and values.

    Args:
        plan: the lengths of segments and the recall of memories.
        recall: the weights of the memory; None: a segment sees only the sensory tokens.

    Raises:
        BadSetting: the plan has no law, or a window exceeds the model's positions.
        BadHead: the memory is made for embeddings of another size.
        NotSupported: the engine that runs the model does not take embedding rows.
    """

    max_positions: int | None = None
    keeps_nodes = False

    def __init__(self, lm: HuggingFaceLM, plan: MemoryPlan, recall: Recall | None) -> None:
        self.lm = lm
        self.plan = plan
        self.recall = None if recall is None else recall.to(lm.device).eval()
        self.vocab = lm.vocab
        self.engine = lm.engine
        self.device = lm.device
        self._check()
        self._needs = Needs(logits=True, hidden=recall is not None)

    def _check(self) -> None:
        """Raise an error if the model cannot be read by this plan; see the class."""
        plan = self.plan
        name = self.lm.model_name
        if self.recall is None:
            if plan.sensory < 1:
                raise BadSetting("sensory is 0, and without memory a segment would not see its past; raise it")
        else:
            plan.check_law()
            check_size(self.recall, self.lm)
            if not self.lm.runner.takes_vectors:
                raise NotSupported(
                    f"memories are embedding rows, and engine {self.engine!r}, which runs {name}, takes only tokens; load "
                    "the model with engine='plain'"
                )
        most = self.lm.max_positions
        needed = max(plan.window, 2 + plan.summarised)
        if most is not None and needed > most:
            raise BadSetting(
                f"a window of segment {plan.segment} and sensory {plan.sensory} needs {needed} positions, and {name} has "
                f"{most}; take shorter segments"
            )

    @property
    def guard(self) -> ThreadGuard:
        """The guard of the model, whose cache holds the windows."""
        return self.lm.guard

    @property
    def caches(self) -> list[list[Any]]:
        """The caches of all windows; see `HuggingFaceLM.caches`."""
        return self.lm.caches

    @property
    def further_draft(self) -> Any:
        """The loader of further drafts for the model; see `HuggingFaceLM.further_draft`."""
        return self.lm.further_draft

    @property
    def slot_bytes(self) -> int:
        """The bytes of the keys and values of one row of a window."""
        return self.lm.slot_bytes

    @property
    def window_slots(self) -> int:
        """The maximum number of rows of a window, without drafts."""
        return max(self.plan.window, 2 + self.plan.summarised)

    def windows_of(self, beams: int) -> int:
        """Return the maximum number of open windows of a session of `beams` beams.

        Each beam may have its own window and, at the end of its segment, the next window and the query of that.
        """
        return 3 * beams

    @property
    def passes(self) -> int:
        """The number of passes of the model so far."""
        return self.lm.passes

    @property
    def is_compiled(self) -> bool:
        """See `HuggingFaceLM.is_compiled`."""
        return self.lm.is_compiled

    def __repr__(self) -> str:
        return f"<MemoryLM of {self.lm.model_name}, {self.note}>"

    @property
    def note(self) -> str:
        """A description of how its law differs from the model's."""
        plan = self.plan
        memory = "without memory"
        if self.recall is not None and plan.recall == "attention":
            memory = f"memory by attention, query '{plan.query}'"
        if self.recall is not None and plan.recall == "previous":
            memory = "memory of the previous segment"
        return f"read in segments of {plan.segment} tokens with {plan.sensory} of the previous one, {memory}"

    def lacks(self, needs: Needs) -> str:
        """Return the reason why this model cannot provide these needs; "" if it can."""
        if needs.states or needs.exit_layer is not None:
            return (
                "a model with memory returns no hidden states, as heads are trained without memory: use a draft model"
            )
        return ""

    def extend(self, sessions: Sequence[Session], forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        checked = checked_needs(self, len(sessions), needs)
        tasks = [self._extended(session, forest) for session, forest in zip(sessions, forests, strict=True)]
        rows = self._together(tasks)
        return [scored_rows(need, found) for need, found in zip(checked, rows, strict=True)]

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep the windows of the surviving beams, and drop all others."""
        tree = session.state.get(self)
        if tree is None:  # a draft model that has not drafted yet reads texts when it first drafts
            return
        before = tree.windows
        survivors = turn.verdict.beams
        anchors = []
        for node, parent, token in zip(survivors.nodes, turn.verdict.parents, survivors.tokens, strict=True):
            if node >= 0:
                anchors.append(tree.anchor_of(turn.forest, int(node)))
            else:
                anchors.append(tree.anchor_of(turn.forest, int(parent)).followed_by(int(token)))
        tree.beams = anchors
        tree.nodes = []
        tree.passed = []
        for window in before:
            self._settle_window(window, [anchor for anchor in anchors if anchor.place.window is window])

    def _settle_window(self, window: Window, anchors: list[Anchor]) -> None:
        """Keep the paths to these beams in a window, or close the window if no beam needs it."""
        places = list(dict.fromkeys(anchor.place for anchor in anchors))
        if all(self._is_done(place) for place in places):
            self._close_window(window)
        if window.is_open:
            nodes = np.array([place.node for place in places], dtype=np.int64)
            self.lm.settle(window.owner, _turn_to(window.forest, nodes))
        for place in places:
            place.row = None if place.row is None else place.row.clone()  # rows of a pass are valid for one turn
            place.next = None
        window.restart(places)

    def peak(self, session: Session) -> int:
        """See `LM.peak`: for all windows of the session together."""
        return int(session.state[self].peak)

    def held(self, session: Session) -> int:
        """Return the number of rows that are stored for the session."""
        return self._held(session.state[self])

    def _held(self, tree: TextTree) -> int:
        return sum(self.lm.held(owner) for owner in tree.stored)

    def close(self, session: Session) -> None:
        tree = session.state.pop(self, None)
        if tree is not None:
            for window in tree.windows:
                window.owner.failure = session.failure
                self._close_window(window)

    def _close_window(self, window: Window) -> None:
        if window.is_open:
            window.is_open = False
            self.lm.close(window.owner)

    def _is_done(self, place: TextPlace) -> bool:
        """Return whether a place no longer needs its window, neither for later tokens nor for its memory."""
        if place.row is None:
            return False
        is_full = len(place.tokens) == self.plan.segment
        return place.opening is not None if is_full else self._begins_late(place.window.past, place.tokens)

    def _together(self, tasks: "Sequence[Task[Any]]") -> list[Any]:
        """Run tasks to completion in shared passes of the model, and return their results.

        If a pass or a task fails, all tasks end and close their own windows.
        """
        try:
            return self._run_together(tasks)
        finally:
            for task in tasks:
                task.close()

    def _run_together(self, tasks: "Sequence[Task[Any]]") -> list[Any]:
        results: list[Any] = [None] * len(tasks)
        waiting: dict[int, list[Ask]] = {}

        def advance(number: int, answers: list[Answer] | None) -> None:
            try:
                waiting[number] = tasks[number].send(answers)  # type: ignore[arg-type]
            except StopIteration as done:
                waiting.pop(number, None)
                results[number] = done.value

        for number in range(len(tasks)):
            advance(number, None)
        while waiting:
            asks = [ask for each in waiting.values() for ask in each]
            owners, forests = zip(*asks, strict=True)
            scored = iter(self.lm.extend(owners, forests, [self._needs] * len(asks)))
            for number, each in list(waiting.items()):
                found = islice(scored, len(each))
                advance(number, [Answer(one.logits, one.hidden) for one in found])
        return results

    def _extended(self, session: Session, forest: Forest) -> "Task[Float[Tensor, 'nodes vocab']]":
        """Score the new nodes of a session's forest, and return their logits."""
        tree = session.state.get(self)
        if tree is None:
            tree = yield from self._begun(_texts_of(session, forest))
            session.state[self] = tree
        first = len(tree.nodes)
        yield from self._placed(tree, tree.enter(forest))
        rows = []
        for node in tree.nodes[first:]:
            assert node.place is not None
            assert node.place.row is not None
            rows.append(node.place.row)
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab)

    def _begun(self, texts: list[list[int]]) -> "Task[TextTree]":
        """Read the texts of all beams. On failure, close their windows."""
        tree = TextTree([])
        try:
            for text in texts:
                place = yield from self._read(text, tree)
                tree.beams.append(Anchor(place, ()))
        except BaseException:
            for window in tree.windows:
                self._close_window(window)
            raise
        return tree

    def _read(self, text: list[int], tree: TextTree) -> "Task[TextPlace]":
        """Read a text, and return the place of its last token.

        Each full segment takes one pass, which includes the query of the next segment.
        """
        size = self.plan.segment
        count = (len(text) - 1) // size
        segments = [tuple(text[number * size : (number + 1) * size]) for number in range(count + 1)]
        past = Past()
        recalled = self._recalled(past, None)
        for segment, following in pairwise(segments):
            after = self._after(past, segment)
            memory, summary = yield from self._closed(past, segment, recalled, self._query(after.tail, following))
            past = self._with_memory(past, after, memory)
            recalled = self._recalled(past, summary)
            tree.peak = max(tree.peak, self._rows_before(past) + size + 1)
        return (yield from self._opened(past, segments[-1], recalled, tree))

    def _closed(
        self, past: Past, segment: tuple[int, ...], recalled: Tensor | None, query: tuple[int, ...]
    ) -> "Task[tuple[Tensor | None, Tensor | None]]":
        """Return the memory of a full segment, and the summary of the next segment's query if its recall needs it."""
        asks = []
        if self.recall is not None:
            owner = self._owner([-1, *self._sensory(past), *segment, -1], recalled)
            asks.append(Ask(owner, Forest.rooted([-1])))
        wanted = self._summary(len(past.memories) + 1, query)
        answers = yield from self._answered([*asks, *wanted])
        memory = answers[0].hidden[0] if asks else None
        return memory, answers[-1].hidden[0] if wanted else None

    def _answered(self, asks: list[Ask]) -> "Task[list[Answer]]":
        """Request rows of windows, then close the windows."""
        if not asks:
            return []
        try:
            return (yield asks)
        finally:
            for ask in asks:
                self.lm.close(ask.owner)

    def _opened(
        self, past: Past, tokens: tuple[int, ...], recalled: Tensor | None, tree: TextTree
    ) -> "Task[TextPlace]":
        """Open a window with the tokens of its segment, and return the place of the last one."""
        prefix = [] if self.recall is None else [-1]
        owner = self._owner([*prefix, *self._sensory(past), *tokens], recalled)
        window = Window(owner, past, tokens[-1])
        place = TextPlace(window, 0, tokens)
        window.nodes = [place]
        try:
            (answer,) = yield [Ask(owner, Forest.rooted([tokens[-1]]))]
        except BaseException:
            self._close_window(window)  # no tree holds it yet
            raise
        window.asked = 1
        place.row = answer.logits[0]
        tree.peak = max(tree.peak, self.lm.held(owner))
        return place

    def _placed(self, tree: TextTree, waiting: list[TextNode]) -> "Task[None]":
        """Place and score these nodes, parents first; each crossed end of a segment takes another pass."""
        while True:
            closing: list[TextPlace] = []
            late: list[_Late] = []
            rest = [node for node in waiting if not self._place(node, closing, late)]
            closing = list(dict.fromkeys(closing))
            if not rest and not any(window.is_behind for window in tree.windows):
                return
            yield from self._wave(tree, closing, late)
            waiting = [node for node in rest if node.place is None]
            self._close_done(tree)

    def _place(self, node: TextNode, closing: list[TextPlace], late: list[_Late]) -> bool:
        """Put a node into an open window; otherwise record the work to do first, and return False."""
        assert node.above is not None
        above = node.above.place
        if above is None:
            return False
        past = above.window.past
        before = above.tokens
        window = above.window
        parent = above.node
        if len(before) == self.plan.segment:
            if above.opening is None:
                closing.append(above)
                return False
            past = above.opening.past
            before = ()
            parent = 0
            if above.next is None and not self._begins_late(past, before):
                above.next = self._window(past, above.opening.recalled)
            window = above.next or window
        if self._begins_late(past, before):
            late.append(_Late(node, past, (*before, node.token)))
            return False
        place = TextPlace(window, 0, (*before, node.token))
        place.node = window.add(node.token, parent, place)
        node.place = place
        return True

    def _begins_late(self, past: Past, before: tuple[int, ...]) -> bool:
        """Return whether the token after `before` completes the segment's own query, so that it is read again."""
        is_complete = len(before) == self.plan.summarised - 1
        return self.plan.refreshes and is_complete and self.plan.needs_summary(len(past.memories))

    def _window(self, past: Past, recalled: Tensor | None) -> Window:
        prefix = [] if self.recall is None else [-1]
        owner = self._owner([*prefix, *self._sensory(past)], recalled)
        return Window(owner, past, owner.prompt[-1])

    def _wave(self, tree: TextTree, closing: list[TextPlace], late: list[_Late]) -> "Task[None]":
        """Take one pass over new nodes, memories of full segments and queries; then open the next windows."""
        memory_rows: dict[TextPlace, int] = {}
        queries: dict[Any, list[Ask]] = {}
        for place in closing:
            past = place.window.past
            if self.recall is not None:
                memory_rows[place] = place.window.add(-1, place.node, None)
            tail = self._after(past, place.tokens).tail
            queries[place] = self._summary(len(past.memories) + 1, tail[-self.plan.summarised :])
        for one in late:
            queries[one.node] = self._summary(len(one.past.memories), one.tokens)
        windows = [window for window in tree.windows if window.is_behind]
        asks = [Ask(window.owner, window.forest) for window in windows]
        asked = [ask for each in queries.values() for ask in each]
        try:
            answers = (yield [*asks, *asked]) if asks or asked else []
        finally:
            for ask in asked:
                self.lm.close(ask.owner)
        memories = _learn(windows, answers)
        tree.peak = max(tree.peak, self._held(tree))
        rest = iter(answers[len(asks) :])
        summaries = {key: next(rest).hidden[0] for key, each in queries.items() if each}
        for place in closing:
            after = self._after(place.window.past, place.tokens)
            memory = memories[place.window, memory_rows[place]] if place in memory_rows else None
            past = self._with_memory(place.window.past, after, memory)
            place.opening = Opening(past, self._recalled(past, summaries.get(place)))
        for one in late:
            recalled = self._recalled(one.past, summaries.get(one.node))
            one.node.place = yield from self._opened(one.past, one.tokens, recalled, tree)

    def _close_done(self, tree: TextTree) -> None:
        """Close the windows that no further token can enter."""
        roots: dict[Window, list[TextPlace]] = {}
        for beam in tree.beams:
            roots.setdefault(beam.place.window, []).append(beam.place)
        for window, places in roots.items():
            if all(self._is_done(place) for place in places):
                self._close_window(window)

    def _owner(self, prompt: list[int], vector: Tensor | None) -> WindowOwner:
        return WindowOwner(prompt, {} if vector is None else {self.lm: vector[None]})

    def _sensory(self, past: Past) -> tuple[int, ...]:
        return past.tail[len(past.tail) - min(self.plan.sensory, len(past.tail)) :]

    def _rows_before(self, past: Past) -> int:
        """Return the number of rows in a window before the tokens of its segment."""
        return (self.recall is not None) + len(self._sensory(past))

    def _after(self, past: Past, segment: tuple[int, ...]) -> Past:
        """Return the state that the next segment inherits from a full one, without its memory."""
        needed = max(self.plan.sensory, self.plan.summarised)
        return Past(past.memories, segment[-needed:])

    def _with_memory(self, past: Past, after: Past, memory: Tensor | None) -> Past:
        """Return the state that the next segment inherits, with the full segment's memory."""
        if memory is None:
            return after
        return Past((*past.memories, memory.clone())[-self.plan.memories :], after.tail)

    def _query(self, tail: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of a segment's query.

        Args:
            tail: the end of the previous segment.
            tokens: the known tokens of the segment.
        """
        size = self.plan.summarised
        return tokens[:size] if self.plan.refreshes and len(tokens) >= size else tail[-size:]

    def _summary(self, memories: int, query: tuple[int, ...]) -> list[Ask]:
        """Return the request for the summary of a query; an empty list if the recall does not depend on it."""
        if self.recall is None or not self.plan.needs_summary(memories):
            return []
        owner = self._owner([-1, *query, -1], self.recall.summary.detach())
        return [Ask(owner, Forest.rooted([-1]))]

    @torch.inference_mode()
    def _recalled(self, past: Past, summary: Vector | None) -> Vector | None:
        """Return the recall of a segment; None without memory."""
        if self.recall is None:
            return None
        if not past.memories or self.plan.recall == "initial":
            return self.recall.first.detach()
        if summary is None:
            return past.memories[-1]
        dtype = self.recall.first.dtype
        memories = torch.stack(past.memories)[None].to(dtype)
        return self.recall(summary[None].to(dtype), memories)[0]


def check_size(recall: Recall, lm: HuggingFaceLM) -> None:
    """Raise `BadHead` unless memories, embeddings and last hidden states of a model have the same size."""
    embeddings = getattr(lm.model.get_input_embeddings(), "weight", None)
    head = lm.model.get_output_embeddings().weight
    if embeddings is None:
        raise NotSupported(
            f"{lm.model_name} has no embedding matrix, and memories are read as embeddings; take another model"
        )
    sizes = {embeddings.shape[1], head.shape[1], recall.size}
    if len(sizes) > 1:
        raise BadHead(
            f"memories are hidden states that are read as embeddings: the memory has {recall.size} numbers, embeddings of "
            f"{lm.model_name} have {embeddings.shape[1]}, and its head reads {head.shape[1]}; these must be equal"
        )


def _texts_of(session: Session, forest: Forest) -> list[list[int]]:
    """Return the prompt and generated tokens of each root of a forest."""
    roots = forest.roots
    if roots == 1 and getattr(session, "length", 0) == 0:
        return [list(session.prompt)]
    live = Forest.rooted(forest.tokens[:roots])
    return [[*session.prompt, *text] for text in session.new_tokens(live, np.arange(roots)).tolist()]


def _learn(windows: list[Window], answers: list[Answer]) -> dict[tuple[Window, int], Tensor]:
    """Store the logits of windows' new nodes; return the hidden states of rows that are not text, by window and node."""
    found: dict[tuple[Window, int], Tensor] = {}
    for window, answer in zip(windows, answers, strict=False):
        first = max(window.asked, len(window.forest.known.nodes))
        for row, number in enumerate(range(first, window.forest.size)):
            place = window.nodes[number]
            if place is None:
                found[window, number] = answer.hidden[row]
            else:
                place.row = answer.logits[row]
        window.asked = window.forest.size
    return found


def _turn_to(forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Turn:
    """Return a turn whose survivors are these nodes of a forest."""
    count = len(nodes)
    beams = Beams(
        nodes=nodes,
        tokens=forest.tokens[nodes],
        scores=np.zeros(count),
        counts=np.ones(count, dtype=np.int64),
        keys=np.zeros(count, dtype=np.uint64),
    )
    layers = Layers(
        parents=forest.parents[nodes],
        beams=beams,
        ended=np.zeros(count, dtype=bool),
        draw_ends=np.array([count]),
        widths=np.array([count]),
        passed=np.array([True]),
        sources=np.zeros((1, 3), dtype=np.int64),
        edges=np.array([np.nan]),
    )
    return Turn(Shape(0, 0), forest, Scored(), Verdict(layers))
