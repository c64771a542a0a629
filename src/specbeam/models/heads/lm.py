"""A head as a draft model: it scores the forests of drafters from the hidden states that the target has had."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from specbeam.core.answers import LOGITS
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.lm import checked_needs
from specbeam.core.records import FINAL, Needs, Scored, Turn
from specbeam.core.session import CacheOwner, is_broken
from specbeam.engines.cpu.decoder import TILED_FROM
from specbeam.models.heads.block import BlockHead
from specbeam.models.heads.cache import (
    ContextCache,
    ContextRows,
    MaskCache,
    MaskRows,
    ModulesCache,
    NodeCache,
    PairCache,
    PairRows,
    StateCache,
)
from specbeam.models.heads.chimera import Chimera
from specbeam.models.heads.compiled import WORDS, CompiledCache, CompiledHead, lacks_compiled_form
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.feature import FeatureHead
from specbeam.models.heads.head import Head
from specbeam.models.heads.masked import MaskTrunk
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.trunk import PairTrunk
from specbeam.models.huggingface import CacheForSteps, cache_for_run
from specbeam.models.made_up import made_up_prompt, made_up_rows


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt in the cache of a head, on which its passes are timed."""

    lm: "HeadLM"
    session: Any

    def pass_s(self, rows: int) -> float:
        """Return the seconds of a pass over `rows` rows, which are taken back after it."""
        root = Forest.rooted(self.session.prompt[-1:])
        forest = made_up_rows(root, rows, self.lm.vocab)
        began = time.perf_counter()
        (scored,) = self.lm.extend([self.session], [forest])
        scored.logits[:1, :1].cpu()  # waits for a device
        seconds = time.perf_counter() - began
        self.lm.take_back(self.session, root)
        return seconds


class HeadLM:
    """A head as a draft model (see `LM`), whatever its kind.

    In the first turn of a session the target has scored nothing yet, so there is nothing to draft from: the drafters leave
    it out (`is_ready`).

    Args:
        head: the head.
        vocab: number of tokens of the target.
        engine: what runs the head. "torch" calls its modules, "compiled" has compiled layers (heads/compiled.py), "auto"
            takes these if it can, and "widened" does so for weights in bfloat16 and float16, too, as float32.

    Attributes:
        needs_of_target: what the target has to hand out for the head.
        passes: number of passes of the head so far.

    Raises `NotSupported` if the engine cannot run the head.
    """

    keeps_nodes = True
    max_positions: int | None = None
    # Whether the head reads the target's hidden states of the whole prompt, or of its last token alone.
    reads_prompt = True
    drafts_blocks = False  # whether one pass drafts all layers of a turn

    def __init__(self, head: Head, vocab: int, engine: str = "auto") -> None:
        self.head = head.eval()
        self.vocab = vocab
        types = WORDS if engine == "widened" else (torch.float32,)
        why = "torch was asked for" if engine == "torch" else lacks_compiled_form(head, vocab, types)
        if engine == "compiled" and why:
            raise NotSupported(f"compiled layers cannot run this head: {why}; engine='torch' can")
        self.engine = "torch" if why else "compiled"
        taps = tuple(tap for tap in head.taps if tap != FINAL)
        self.needs_of_target = Needs(hidden=FINAL in head.taps, prompt=self.reads_prompt, taps=taps)
        self.device = head.device
        self.passes = 0
        self.curves: dict[int, Any] = {}  # cost of a pass by the length of the context; see `tune`

    @cached_property
    def compiled(self) -> CompiledHead:
        """The head as compiled layers run it. Its weights are copied when it is first used."""
        return CompiledHead(self.head, self.vocab)

    @property
    def weights(self) -> int:
        """The number of the head's parameters, those that it shares with the target included."""
        return sum(weight.numel() for weight in self.head.parameters())

    @property
    def is_small(self) -> bool:
        """Whether the head is small enough for the caches of a processor."""
        return self.weights < TILED_FROM

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code does all its heavy work, so that torch needs one thread."""
        return self.engine == "compiled"

    @property
    def supports_runs(self) -> bool:
        """Whether compiled runs can take whole turns with this head; a class that scores in a way of its own cannot."""
        return self.engine == "compiled" and type(self).extend is HeadLM.extend

    @contextmanager
    def cache_for_steps(
        self, session: CacheOwner, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> Iterator[CacheForSteps | None]:
        """Yield a session's cache as arrays for compiled steps that run the head themselves; None if they cannot.

        Args:
            fresh, more: see `HuggingFaceLM.cache_for_steps`.
            needs: what is needed of each row; a head has logits alone.
        """
        if not self.supports_runs or needs != LOGITS or not self.is_ready(session):
            yield None
            return
        cache = session.state[self]
        with self.compiled.arrays_for_steps(cache, fresh, more) as arrays:
            yield CacheForSteps(self, cache, arrays)

    def for_run(
        self, session: CacheOwner, fresh: int, beams: int, more: int, needs: Needs = LOGITS
    ) -> AbstractContextManager[Any] | None:
        """See `RunLM.for_run`."""
        is_possible = self.supports_runs and self.is_ready(session)
        return cache_for_run(self, session, fresh + beams, more, needs) if is_possible else None

    def shares(self, session: CacheOwner) -> bool:
        """Return whether other sessions store tokens in the same row of the store: never."""
        return False

    def finish_run(self, session: CacheOwner, passes: int, roots: int) -> None:
        """Update the counters and the session's cache after a run; see `HuggingFaceLM.finish_run`."""
        self.passes += passes
        session.state[self].finish_run(roots)

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> NodeCache | ModulesCache:
        """Return what is kept of a new session by a head that torch runs.

        Args:
            features: of the prompt's tokens but the last one; none if the head does not read the prompt.
        """
        raise NotImplementedError

    def logits(self, caches: list[Any], wanted: list[Int64[np.ndarray, " _"]]) -> list[Float[Tensor, "_ draft_vocab"]]:
        """Return the logits of the head's own tokens at the wanted local nodes of each session."""
        raise NotImplementedError

    def is_ready(self, session: CacheOwner) -> bool:
        """Return whether the head can draft for a session: its prompt was scored, and has no rows by embedding."""
        return self in session.state and min(session.prompt) >= 0

    @torch.inference_mode()
    def extend(
        self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`. Sessions that are not ready get rows in which all tokens are alike."""
        if any(need.states or need.ranked for need in checked_needs(self, len(sessions), needs)):
            raise NotSupported(f"{type(self).__name__} gives logits only, and a part needs more of its draft model")
        answers = [Scored(torch.zeros(forest.size, self.vocab)) for forest in forests]
        ready = [place for place, session in enumerate(sessions) if self in session.state]
        caches = [sessions[place].state[self] for place in ready]
        if self.engine == "compiled" and ready:
            rows, passes = self.compiled.extend(caches, [forests[place] for place in ready])
            self.passes += passes
            for place, found in zip(ready, rows, strict=True):
                answers[place] = Scored(torch.from_numpy(found))
            return answers
        wanted = [cache.enter(forests[place]) for place, cache in zip(ready, caches, strict=True)]
        for place, known in zip(ready, self.logits(caches, wanted), strict=True):
            answers[place] = Scored(self._of_all_tokens(known.float()))
        return answers

    def _of_all_tokens(self, known: Float[Tensor, "rows draft_vocab"]) -> Float[Tensor, "rows vocab"]:
        """Return logits of all tokens of the target; those that the head does not know have -inf."""
        tokens = self.head.tokens
        if tokens is None:
            return known
        rows = known.new_full((len(known), self.vocab), -torch.inf)
        rows[:, tokens.to(rows.device)] = known
        return rows

    @torch.inference_mode()
    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Take the target's hidden states of a turn, and keep what the surviving beams need."""
        if self.engine == "compiled":
            self._settle_compiled(session, turn)
            return
        cache: NodeCache | ModulesCache | None = session.state.get(self)
        if cache is None:
            cache = self.new_cache(session.prompt, self._features(turn.scored.prompt, turn.scored.hidden.shape[1]))
            session.state[self] = cache
        cache.settle(turn, self._features(turn.scored.hidden, turn.scored.hidden.shape[1]))

    def _settle_compiled(self, session: CacheOwner, turn: Turn) -> None:
        """Do `settle` for a head that compiled layers run."""
        cache: CompiledCache | None = session.state.get(self)
        if cache is None:
            cache = self.compiled.new_cache(session.prompt, self._rows_of(turn.scored.prompt))
            session.state[self] = cache
        self.compiled.settle(cache, turn, self._rows_of(turn.scored.hidden))

    def _rows_of(self, states: Float[Tensor, "rows states"]) -> Float32[np.ndarray, "rows states"]:
        """Return hidden states of the target on the host; there may be no rows at all."""
        rows = states.to("cpu", torch.float32).reshape(-1, self.head.states_size)
        return np.ascontiguousarray(rows.numpy())

    def _features(self, states: Float[Tensor, "rows states"], size: int) -> Float[Tensor, "rows width"]:
        """Return the features of rows of the target, from its hidden states; there may be no rows at all.

        Args:
            size: of a row.
        """
        return self.head.features(states.to(self.device).reshape(-1, size))

    def take_back(self, session: CacheOwner, forest: Forest) -> None:
        """Take back what is kept of this turn beyond a forest."""
        if self.engine == "compiled":
            self.compiled.rewind(session.state[self], forest.size)
        else:
            session.state[self].rewind(forest.size)

    @contextmanager
    def stored(self, length: int) -> "Iterator[TimedPrompt]":
        """Yield a made-up prompt of `length` tokens, on which passes are timed."""
        prompt = made_up_prompt(length, self.vocab)
        states = torch.zeros(length - 1 if self.reads_prompt else 0, self.head.states_size, device=self.device)
        session: Any = SimpleNamespace(prompt=prompt, state={})
        if self.engine == "compiled":
            session.state[self] = self.compiled.new_cache(prompt, states.numpy())
        else:
            session.state[self] = self.new_cache(prompt, self.head.features(states))
        self.extend([session], [Forest.rooted(prompt[-1:])])
        yield TimedPrompt(self, session)
        self.close(session)

    def peak(self, session: CacheOwner) -> int:
        """Return the largest number of rows of the session that were stored at the same time."""
        cache: Any = session.state.get(self)
        return 0 if cache is None else cache.peak

    def close(self, session: CacheOwner) -> None:
        """Forget a session."""
        cache = session.state.pop(self, None)
        if isinstance(cache, CompiledCache):
            self.compiled.close(cache, is_broken(session))


class TrunkLM(HeadLM):
    """A pair trunk as a draft model."""

    head: PairTrunk | Chimera

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> PairCache:
        """See `HeadLM.new_cache`."""
        head = self.head
        return PairCache(prompt, features, head.shape.layers, head.views, head.history)

    def logits(
        self, caches: list[PairCache], wanted: list[Int64[np.ndarray, " _"]]
    ) -> list[Float[Tensor, "_ draft_vocab"]]:
        """See `HeadLM.logits`: states are computed for all nodes that have something to read."""
        while pending := [found for cache in caches if (found := cache.next_rows())]:
            run_rows(self.head, pending)
            self.passes += 1
        return [self.read_out(cache, nodes) for cache, nodes in zip(caches, wanted, strict=True)]

    def read_out(self, cache: PairCache, nodes: Int64[np.ndarray, " nodes"]) -> Float[Tensor, "nodes draft_vocab"]:
        """Return the logits at local nodes of a session, whose states are known."""
        assert isinstance(self.head, PairTrunk)
        return self.head.logits(cache.states[torch.from_numpy(nodes).to(self.device)])


def run_rows(trunk: PairTrunk | Chimera, rows: list[PairRows]) -> list[Float[Tensor, "rows width"]]:
    """Compute a trunk's states of some rows of each session, in one pass; keep and return them."""
    feeds = [one.feed for one in rows]
    slices = [slice(*ends) for ends in pairwise(accumulate((len(feed) for feed in feeds), initial=0))]
    tokens = torch.from_numpy(np.concatenate([one.tokens for one in rows])).to(trunk.device)
    positions = torch.from_numpy(np.concatenate([feed.positions for feed in feeds])).to(trunk.device)
    features = torch.cat([one.features for one in rows])
    own = trunk.fed_back(torch.cat([one.states for one in rows]))
    is_scored = torch.cat([one.is_scored for one in rows])
    given = torch.where(is_scored[:, None], features, own)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = [
            one.attend(layer, queries[here], keys[here], values[here]) for one, here in zip(rows, slices, strict=True)
        ]
        return torch.cat(parts)

    states = trunk(tokens, given, positions, attend)
    for one, here in zip(rows, slices, strict=True):
        one.cache.learn(one.nodes, states[here])
    return [states[here] for here in slices]


class ModulesLM(HeadLM):
    """Modules in a row as a draft model. A module is run once there are drafts for it: of a level of drafts, one is."""

    head: ModulesInARow

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> ModulesCache:
        """See `HeadLM.new_cache`."""
        return ModulesCache(prompt, features, [module.shape.layers for module in self.head.modules_in_a_row])

    def logits(
        self, caches: list[ModulesCache], wanted: list[Int64[np.ndarray, "modules _"]]
    ) -> list[Float[Tensor, "_ draft_vocab"]]:
        """See `HeadLM.logits`: `wanted` has the local nodes in the cache of each module, int64[modules, nodes]."""
        modules = self.head.modules_in_a_row
        last = len(modules) - 1
        drafts = [cache.drafts_above(nodes[0]).clip(max=last) for cache, nodes in zip(caches, wanted, strict=True)]
        deepest = max((int(above.max()) for above in drafts if len(above)), default=-1)
        for number in range(deepest + 1):
            self._run(number, caches)
        found = []
        for cache, nodes, above in zip(caches, wanted, drafts, strict=True):
            rows = torch.zeros(nodes.shape[1], modules[0].shape.draft_vocab, device=self.device)
            for number in sorted({*above.tolist()}):
                here = np.flatnonzero(above == number)
                at = torch.from_numpy(nodes[number, here]).to(self.device)
                made = modules[number].logits(cache.caches[number].states[at])
                rows[torch.from_numpy(here).to(self.device)] = made.to(rows.dtype)
            found.append(rows)
        return found

    def _run(self, number: int, caches: list[ModulesCache]) -> None:
        """Run a module over all nodes of each session that have something to read in it, and hand its states on."""
        module = self.head.modules_in_a_row[number]
        every = [(cache, cache.caches[number]) for cache in caches]
        while pending := [(cache, rows) for cache, own in every if (rows := own.next_rows())]:
            self.passes += 1
            made = run_rows(module, [rows for _, rows in pending])
            for (cache, rows), states in zip(pending, made, strict=True):
                cache.hand_on(number, rows.nodes, module.fed_back(states))


class MaskLM(HeadLM):
    """A pair trunk with mask rows as a draft model.

    One pass makes the rows of the nodes that were scored since, and the blocks of all roots. Drafts deeper than a block get
    the law of its last row.
    """

    head: MaskTrunk
    drafts_blocks = True

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> MaskCache:
        """See `HeadLM.new_cache`."""
        shape = self.head.shape
        return MaskCache(prompt, features, shape.layers, shape.views)

    def logits(
        self, caches: list[MaskCache], wanted: list[Int64[np.ndarray, " _"]]
    ) -> list[Float[Tensor, "_ draft_vocab"]]:
        """See `HeadLM.logits`: nodes at the same depth below a root have the same law."""
        no_roots = np.zeros(0, dtype=np.int64)
        fed = [cache.next_rows() for cache in caches]
        while any(cache.is_behind for cache in caches):
            self._run([MaskRows(cache, *rows, no_roots) for cache, rows in zip(caches, fed, strict=True)])
            fed = [cache.next_rows() for cache in caches]
        places = []
        rows = []
        for cache, nodes, (feed, read) in zip(caches, wanted, fed, strict=True):
            found = [cache.root_above(node) for node in nodes.tolist()]
            missing = sorted({root for root, _ in found} - cache.blocks.keys())
            places.append(found)
            rows.append(MaskRows(cache, feed, read, np.array(missing, dtype=np.int64)))
        self._run(rows)
        return [self._at(cache, each) for cache, each in zip(caches, places, strict=True)]

    def _at(self, cache: MaskCache, places: list[tuple[int, int]]) -> Float[Tensor, "nodes draft_vocab"]:
        """Return the logits at nodes, given the root of each and how far above it is."""
        if not places:
            return torch.zeros(0, self.head.shape.draft_vocab, device=self.device)
        states = [cache.blocks[root][min(far, self.head.rows - 1)] for root, far in places]
        return self.head.logits(torch.stack(states))

    def _run(self, rows: list[MaskRows]) -> None:
        """Compute the head's states of some rows of each session, in one pass, and keep those of blocks."""
        rows = [one for one in rows if len(one.feed) + len(one.roots)]
        if not rows:
            return
        self.passes += 1
        tokens = []
        given = []
        positions = []
        sizes = []
        for one in rows:
            trie = one.cache.trie
            above = torch.from_numpy(trie.parents[one.roots]).to(self.device)
            of_roots = self.head.read_by(
                torch.from_numpy(trie.tokens[one.roots]).to(self.device),
                one.cache.features[above],
                torch.from_numpy(trie.positions[one.roots]).to(self.device),
            )
            tokens += [torch.from_numpy(one.feed.tokens).to(self.device), of_roots[0].flatten()]
            given += [one.read, of_roots[1].flatten(0, 1)]
            positions += [torch.from_numpy(one.feed.positions).to(self.device), of_roots[2].flatten()]
            sizes.append(len(one.feed) + of_roots[0].numel())

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            parts = zip(rows, queries.split(sizes), keys.split(sizes), values.split(sizes), strict=True)
            return torch.cat([one.attend(layer, q, k, v) for one, q, k, v in parts])

        states = self.head(torch.cat(tokens), torch.cat(given), torch.cat(positions), attend)
        for one, made in zip(rows, states.split(sizes), strict=True):
            blocks = made[len(one.feed) :].unflatten(0, (len(one.roots), self.head.rows))
            one.cache.blocks.update(zip(one.roots.tolist(), blocks, strict=True))


class ChimeraLM(TrunkLM):
    """A Chimera head as a draft model. Drafts deeper than its read-outs are read out by the last one."""

    head: Chimera

    def read_out(self, cache: PairCache, nodes: Int64[np.ndarray, " nodes"]) -> Float[Tensor, "nodes draft_vocab"]:
        """See `TrunkLM.read_out`: by the feature of the nearest scored node above each, and by how far above it is."""
        scored = cache.scored_above(nodes)
        made = torch.zeros(len(nodes), self.head.shape.draft_vocab, device=self.device)
        for far in sorted({far for _, far in scored}):
            rows = [row for row, (_, each) in enumerate(scored) if each == far]
            above = torch.tensor([scored[row][0] for row in rows], device=self.device)
            here = torch.from_numpy(nodes[rows]).to(self.device)
            made[rows] = self.head.logits(far, cache.features[above], cache.states[here]).float()
        return made


class BlockNode(NamedTuple):
    """A local node of a session, in the block of its root."""

    number: int  # of the session
    cache: ContextCache
    node: int
    root: int
    far: int  # how far below its root it is
    token: int
    parent: int  # the local node above it


class BlockLM(HeadLM):
    """A block head as a draft model.

    One pass makes the blocks of all roots of a turn; the laws of further nodes cost a row of the last matrix each, and the
    step of a correction. Drafts deeper than a block have the last row of it.
    """

    head: BlockHead
    drafts_blocks = True

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> ContextCache:
        """See `HeadLM.new_cache`."""
        shape = self.head.shape
        return ContextCache(prompt, features, shape.layers, shape.views)

    def logits(
        self, caches: list[ContextCache], wanted: list[Int64[np.ndarray, " _"]]
    ) -> list[Float[Tensor, "_ draft_vocab"]]:
        """See `HeadLM.logits`."""
        self.store_context(caches)
        carries = self.head.correction.state_size > 0
        places = [cache.to_correct(nodes, carries) for cache, nodes in zip(caches, wanted, strict=True)]
        self._make_missing_blocks(caches, [{root for root, _ in each.values()} for each in places])
        asked = []
        for number, (cache, each) in enumerate(zip(caches, places, strict=True)):
            tokens = cache.trie.tokens
            parents = cache.trie.parents
            for node, (root, far) in each.items():
                asked.append(BlockNode(number, cache, node, root, far, int(tokens[node]), int(parents[node])))
        if not carries:
            logits = self._correct(asked) if asked else self._no_logits()
            return list(logits.split([len(each) for each in places]))
        made: list[dict[int, Tensor]] = [{} for _ in caches]
        for far in sorted({one.far for one in asked}):
            level = [one for one in asked if one.far == far]
            for one, row in zip(level, self._correct(level), strict=True):
                made[one.number][one.node] = row
        return [
            torch.stack([known[node] for node in nodes.tolist()]) if len(nodes) else self._no_logits()
            for known, nodes in zip(made, wanted, strict=True)
        ]

    def _no_logits(self) -> Float[Tensor, "0 draft_vocab"]:
        return torch.zeros(0, self.head.shape.draft_vocab, device=self.device)

    def _correct(self, nodes: "list[BlockNode]") -> Float[Tensor, "nodes draft_vocab"]:
        """Return the logits at nodes, and keep what these hand down; then all are equally far below their roots."""
        shape = self.head.shape
        last = shape.rows - 1
        rows = torch.stack([one.cache.blocks[one.root][min(shape.first_row + one.far, last)] for one in nodes])
        tokens = torch.tensor([one.token for one in nodes], device=self.device)
        logits, after = self.head.corrected(nodes[0].far, rows, tokens, self._handed_down(nodes, tokens))
        if self.head.correction.state_size:
            for one, handed in zip(nodes, after, strict=True):
                one.cache.carried[one.node] = handed
        return logits

    def _handed_down(self, nodes: "list[BlockNode]", tokens: Int64[Tensor, " nodes"]) -> Float[Tensor, "nodes state"]:
        """Return what the correction hands down to nodes that are equally far below their roots."""
        if self.head.correction.state_size == 0:
            return torch.zeros(len(nodes), 0, device=self.device)
        if nodes[0].far > 0:
            return torch.stack([one.cache.carried[one.parent] for one in nodes])
        first = torch.stack([one.cache.blocks[one.root][0] for one in nodes])
        # The first token of a text has none before it.
        above = [max(int(one.cache.trie.tokens[one.parent]), 0) for one in nodes]
        return self.head.first_states(first, tokens, torch.tensor(above, device=self.device))

    def store_context(self, caches: list[ContextCache]) -> None:
        """Store the keys and values of all scored nodes that are not stored yet."""
        while pending := [found for cache in caches if (found := cache.next_context())]:
            self._store(pending)

    def _store(self, rows: list[ContextRows]) -> None:
        """Store the keys and values of scored nodes of each session, in one pass."""
        positions = torch.from_numpy(np.concatenate([one.feed.positions for one in rows])).to(self.device)
        by_layer = self.head.context(torch.cat([one.features for one in rows]), positions)
        sizes = [len(one.feed) for one in rows]
        for layer, (keys, values) in enumerate(by_layer):
            for one, own_keys, own_values in zip(rows, keys.split(sizes), values.split(sizes), strict=True):
                one.cache.kept.store(layer, one.feed.slots, own_keys, own_values)

    def _make_missing_blocks(self, caches: list[ContextCache], roots: list[set[int]]) -> None:
        """Make the blocks of these local nodes of each session that are not there yet, in one pass."""
        missing = [
            (cache, np.array(fresh, dtype=np.int64))
            for cache, asked in zip(caches, roots, strict=True)
            if (fresh := sorted(asked - cache.blocks.keys()))
        ]
        if missing:
            for (cache, nodes), made in zip(missing, self.blocks_below(missing), strict=True):
                cache.blocks.update(zip(nodes.tolist(), made, strict=True))

    def blocks_below(
        self, roots: list[tuple[ContextCache, Int64[np.ndarray, " _"]]], *known: Tensor
    ) -> tuple[Float[Tensor, "_ rows width"], ...]:
        """Return the blocks below local nodes of each session, made in one pass.

        Args:
            known: what `head.blocks` takes beside roots, positions and attention.
        """
        self.passes += 1
        tokens = torch.from_numpy(np.concatenate([cache.trie.tokens[nodes] for cache, nodes in roots]))
        positions = torch.from_numpy(np.concatenate([cache.trie.positions[nodes] for cache, nodes in roots]))
        sizes = [len(nodes) for _, nodes in roots]

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            parts = zip(roots, queries.split(sizes), keys.split(sizes), values.split(sizes), strict=True)
            return torch.cat([cache.attend_blocks(nodes, layer, q, k, v) for (cache, nodes), q, k, v in parts])

        made = self.head.blocks(tokens.to(self.device), positions.to(self.device), attend, *known)
        return made.split(sizes)


class DenoiserLM(BlockLM):
    """A denoiser as a draft model: its blocks with all drafts unknown, or, for drafts in several steps, with some known."""

    head: Denoiser

    @property
    def block_depth(self) -> int:
        """The number of drafts, one below the other, of a block."""
        return self.head.shape.depth

    @torch.inference_mode()
    def denoised(
        self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], known: Sequence[Int64[np.ndarray, "_ _"]]
    ) -> list[Float[Tensor, "_ _ vocab"]]:
        """Return logits of the drafts below the roots of forests, each given the drafts of its root that are known.

        Args:
            sessions: ready ones, see `is_ready`.
            known: int64[roots, drafts] of each session, -1 where a draft is not known; at most `block_depth` drafts.
        """
        caches: list[ContextCache] = [session.state[self] for session in sessions]
        for cache, forest in zip(caches, forests, strict=True):
            cache.enter(forest)
        self.store_context(caches)
        roots = [
            (cache, cache.trie.local[: forest.roots].copy()) for cache, forest in zip(caches, forests, strict=True)
        ]
        tokens = np.full((sum(len(rows) for rows in known), self.block_depth), -1, dtype=np.int64)
        row = 0
        for rows in known:
            tokens[row : row + len(rows), : rows.shape[1]] = rows
            row += len(rows)
        first = self.head.shape.first_row
        found = []
        for rows, made in zip(known, self.blocks_below(roots, torch.from_numpy(tokens).to(self.device)), strict=True):
            wanted = made[:, first : first + rows.shape[1]]
            logits = self._of_all_tokens(self.head.lm_head(wanted.flatten(0, 1)).float())
            found.append(logits.unflatten(0, wanted.shape[:2]))
        return found


class FeatureLM(HeadLM):
    """A head on one feature as a draft model. Drafts deeper than its heads get the law of the last one."""

    head: FeatureHead
    reads_prompt = False

    def new_cache(self, prompt: list[int], features: Float[Tensor, "before width"]) -> StateCache:
        """See `HeadLM.new_cache`."""
        return StateCache(prompt, features)

    def logits(
        self, caches: list[StateCache], wanted: list[Int64[np.ndarray, " _"]]
    ) -> list[Float[Tensor, "_ draft_vocab"]]:
        """See `HeadLM.logits`: states are carried down level by level, those of all sessions at once."""
        for cache in caches:
            cache.store_scored()
        paths = [cache.missing(nodes) for cache, nodes in zip(caches, wanted, strict=True)]
        deepest = max((far for path in paths for _, far in path), default=0)
        for far in range(1, deepest + 1):
            self._step(
                far,
                [(cache, node) for cache, path in zip(caches, paths, strict=True) for node, at in path if at == far],
            )
        found = [torch.zeros(len(nodes), self.head.sizes.draft_vocab, device=self.device) for nodes in wanted]
        places: dict[int, list[tuple[int, int]]] = {}
        for number, (cache, nodes) in enumerate(zip(caches, wanted, strict=True)):
            for row, node in enumerate(nodes.tolist()):
                places.setdefault(min(cache.far[node], self.head.sizes.depth), []).append((number, row))
        for far, asked in places.items():
            states = torch.stack([caches[number].states[int(wanted[number][row])] for number, row in asked])
            for (number, row), made in zip(asked, self.head.logits(far, states), strict=True):
                found[number][row] = made
        return found

    def _step(self, far: int, nodes: list[tuple[StateCache, int]]) -> None:
        """Carry states to local nodes that are `far` below a scored one."""
        if not nodes:
            return
        self.passes += 1
        tokens = torch.tensor([int(cache.trie.tokens[node]) for cache, node in nodes], device=self.device)
        parents = [(cache, int(cache.trie.parents[node])) for cache, node in nodes]
        if far == 1:
            above = self.head.start(torch.stack([cache.features[parent] for cache, parent in parents]))
        else:
            above = torch.stack([cache.states[parent] for cache, parent in parents])
        for (cache, node), state in zip(nodes, self.head.step(far, above, tokens), strict=True):
            cache.states[node] = state
            cache.far[node] = far
