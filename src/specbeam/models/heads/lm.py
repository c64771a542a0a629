"""Heads as draft models: they score the forests of drafters from the target's hidden states."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from specbeam.core.answers import LOGITS
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.records import FINAL, Needs, Scored, Turn
from specbeam.core.session import CacheOwner, is_broken
from specbeam.engines.cpu.decoder import TILED_FROM
from specbeam.models.heads.arrays import AnyNodes, Logits, Nodes, PerRow, Rows, States
from specbeam.models.heads.block import BlockHead
from specbeam.models.heads.cache import (
    ContextCache,
    MaskCache,
    MaskRows,
    ModulesCache,
    PairCache,
    PairRows,
    StateCache,
)
from specbeam.models.heads.chimera import Chimera
from specbeam.models.heads.compiled import WORDS, CompiledCache, CompiledHead, lacks_compiled_form
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.feature import FeatureHead
from specbeam.models.heads.head import Head
from specbeam.models.heads.layers import Attend
from specbeam.models.heads.masked import MaskTrunk
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.trunk import PairTrunk
from specbeam.models.huggingface import CacheForSteps, EachNeeds, Forests, Sessions, cache_for_run, check_wants_logits
from specbeam.models.made_up import made_up_prompt, made_up_rows


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt in the cache of a head, to time its passes."""

    lm: "HeadLM"
    session: Any

    def pass_s(self, rows: int) -> float:
        """Return the seconds of a pass over `rows` rows, which are taken back afterwards."""
        root = Forest.rooted(self.session.prompt[-1:])
        forest = made_up_rows(root, rows, self.lm.vocab)
        began = time.perf_counter()
        (scored,) = self.lm.extend([self.session], [forest])
        scored.logits[:1, :1].cpu()  # waits for a device
        seconds = time.perf_counter() - began
        self.lm.take_back(self.session, root)
        return seconds


class HeadLM:
    """A head as a draft model (see `LM`); each kind of head has a subclass.

    In the first turn of a session the target has scored nothing yet, so there is nothing to draft from: drafters skip this
    turn (`is_ready`).

    Args:
        vocab: number of tokens of the target.
        engine: "torch" calls the head's modules, "compiled" runs compiled layers (heads/compiled.py), "auto" runs compiled
            layers if they support the head, and "widened" also converts bfloat16 and float16 weights to float32 for them.

    Attributes:
        needs_of_target: hidden states of the target that the head reads.
        passes: number of passes of the head so far.

    Raises `NotSupported` if the engine cannot run the head.
    """

    keeps_nodes = True
    max_positions: int | None = None
    # whether the head reads the target's hidden states at all tokens of the prompt, and not only at the last one
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
        """The head in compiled layers; its weights are copied at the first use."""
        return CompiledHead(self.head, self.vocab)

    @property
    def weights(self) -> int:
        """The number of the head's parameters, including the ones shared with the target."""
        return sum(weight.numel() for weight in self.head.parameters())

    @property
    def bytes_read(self) -> int:
        """The assumed number of bytes of weights that a pass reads; see `HuggingFaceLM.bytes_read`."""
        return 2 * self.weights

    @property
    def is_small(self) -> bool:
        """Whether the head is small enough for the caches of a processor."""
        return self.weights < TILED_FROM

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code does all heavy work, so that torch needs only one thread."""
        return self.engine == "compiled"

    @property
    def supports_runs(self) -> bool:
        """Whether compiled runs can run whole turns with this head: not if a subclass overrides `extend`."""
        return self.engine == "compiled" and type(self).extend is HeadLM.extend

    @contextmanager
    def cache_for_steps(
        self, session: CacheOwner, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> Iterator[CacheForSteps | None]:
        """Yield a session's cache as arrays for compiled steps that run the head; None if they cannot.

        Args:
            fresh, more: see `HuggingFaceLM.cache_for_steps`.
            needs: the needs of each row; a head provides only logits.
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
        is_possible = self.supports_runs and self.is_ready(session)
        return cache_for_run(self, session, fresh + beams, more, needs) if is_possible else None

    def finish_run(self, session: CacheOwner, passes: int, roots: int) -> None:
        """Update the counters and the session's cache after a run; see `HuggingFaceLM.finish_run`."""
        self.passes += passes
        session.state[self].finish_run(roots)

    def new_cache(self, prompt: list[int], features: Rows) -> Any:
        """Return the cache of a new session for a head in torch.

        Args:
            features: the features of the prompt's tokens except the last; no rows if the head does not read the prompt.
        """
        raise NotImplementedError

    def logits(self, caches: list[Any], wanted: list[AnyNodes]) -> list[Logits]:
        """Return the logits of the head's own tokens at the wanted local nodes of each session."""
        raise NotImplementedError

    def is_ready(self, session: CacheOwner) -> bool:
        """Return whether the head can draft for a session: the prompt was scored, and has no embedding rows."""
        return self in session.state and min(session.prompt) >= 0

    def on_device(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """Return arrays of the host, concatenated, on the head's device."""
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)

    def in_groups(self, numbers: AnyNodes, columns: int, logits_of: Callable[[int, Nodes], Logits]) -> Logits:
        """Return the logits of nodes in float32, computed at once for all nodes with the same number.

        Args:
            numbers: a number for each node, such as its depth.
            logits_of: returns the logits of some nodes, given their number and their places in `numbers`.
        """
        rows = torch.zeros(len(numbers), columns, device=self.device)
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            rows[self.on_device([here])] = logits_of(int(number), here).float()
        return rows

    @torch.inference_mode()
    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        """See `LM.extend`. Sessions that are not ready get uniform logits."""
        check_wants_logits(self, len(sessions), needs)
        answers = [Scored(torch.zeros(forest.size, self.vocab)) for forest in forests]
        ready = [place for place, session in enumerate(sessions) if self in session.state]
        if not ready:
            return answers
        caches = [sessions[place].state[self] for place in ready]
        given = [forests[place] for place in ready]
        for place, rows in zip(ready, self._rows(caches, given), strict=True):
            answers[place] = Scored(rows)
        return answers

    def _rows(self, caches: list[Any], forests: list[Forest]) -> list[Tensor]:
        """Return the logits of all tokens at the new nodes of forests."""
        if self.engine == "compiled":
            rows, passes = self.compiled.extend(caches, forests)
            self.passes += passes
            return [torch.from_numpy(one) for one in rows]
        wanted = [cache.enter(forest) for cache, forest in zip(caches, forests, strict=True)]
        return [self._of_all_tokens(known.float()) for known in self.logits(caches, wanted)]

    def _of_all_tokens(self, known: Logits) -> Float[Tensor, "rows vocab"]:
        """Return logits for all of the target's tokens, -inf for tokens that the head lacks."""
        tokens = self.head.tokens
        if tokens is None:
            return known
        rows = known.new_full((len(known), self.vocab), -torch.inf)
        rows[:, tokens.to(rows.device)] = known
        return rows

    @torch.inference_mode()
    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Store the target's hidden states of a turn, and keep the rows that the surviving beams need."""
        if self not in session.state:
            session.state[self] = self._begun(session.prompt, turn.scored.prompt)
        cache = session.state[self]
        if self.engine == "compiled":
            self.compiled.settle(cache, turn, self._on_host(turn.scored.hidden))
        else:
            cache.settle(turn, self._features(turn.scored.hidden))

    def _begun(self, prompt: list[int], states: Tensor) -> Any:
        """Return the cache of a new session, given the target's hidden states of the prompt."""
        if self.engine == "compiled":
            return self.compiled.new_cache(prompt, self._on_host(states))
        return self.new_cache(prompt, self._features(states))

    def _on_host(self, states: Tensor) -> Float32[np.ndarray, "rows states"]:
        """Return hidden states of the target on the host; there may be no rows."""
        rows = states.to("cpu", torch.float32).reshape(-1, self.head.states_size)
        return np.ascontiguousarray(rows.numpy())

    def _features(self, states: Tensor) -> Rows:
        """Return the features from hidden states of the target; there may be no rows."""
        return self.head.features(states.to(self.device).reshape(-1, self.head.states_size))

    def take_back(self, session: CacheOwner, forest: Forest) -> None:
        """Take back the rows of this turn that a forest lacks."""
        if self.engine == "compiled":
            self.compiled.rewind(session.state[self], forest.size)
        else:
            session.state[self].rewind(forest.size)

    @contextmanager
    def stored(self, length: int) -> Iterator[TimedPrompt]:
        """Yield a made-up prompt of `length` tokens to time passes."""
        prompt = made_up_prompt(length, self.vocab)
        states = torch.zeros(length - 1 if self.reads_prompt else 0, self.head.states_size, device=self.device)
        session: Any = SimpleNamespace(prompt=prompt, state={})
        session.state[self] = self._begun(prompt, states)
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


def attending(attends: Sequence[Attend], sizes: Sequence[int]) -> Attend:
    """Return attention for rows of several sessions in one pass: each session's rows attend to its own cache.

    Args:
        attends: the attention of each session.
        sizes: the number of rows of each session.
    """

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = zip(attends, queries.split(sizes), keys.split(sizes), values.split(sizes), strict=True)
        return torch.cat([own(layer, q, k, v) for own, q, k, v in parts])

    return attend


class TrunkLM(HeadLM):
    """A pair trunk as a draft model."""

    head: PairTrunk | Chimera

    def new_cache(self, prompt: list[int], features: Rows) -> PairCache:
        head = self.head
        return PairCache(prompt, features, head.shape.layers, head.views, head.history)

    def logits(self, caches: list[PairCache], wanted: list[AnyNodes]) -> list[Logits]:
        """See `HeadLM.logits`: it computes the states of all nodes whose input is known."""
        while pending := [rows for cache in caches if (rows := cache.next_rows())]:
            run_rows(self.head, pending)
            self.passes += 1
        return [self.read_out(cache, nodes) for cache, nodes in zip(caches, wanted, strict=True)]

    def read_out(self, cache: PairCache, nodes: Nodes) -> Logits:
        """Return the logits at local nodes of a session, whose states are known."""
        assert isinstance(self.head, PairTrunk)
        return self.head.logits(cache.states[cache.on_device(nodes)])


def run_rows(trunk: PairTrunk | Chimera, rows: list[PairRows]) -> tuple[Tensor, ...]:
    """Compute a trunk's states of rows of several sessions in one pass; store and return them."""
    sizes = [len(one.feed) for one in rows]
    tokens = torch.from_numpy(np.concatenate([one.tokens for one in rows])).to(trunk.device)
    positions = torch.from_numpy(np.concatenate([one.feed.positions for one in rows])).to(trunk.device)
    features = torch.cat([one.features for one in rows])
    own = trunk.fed_back(torch.cat([one.states for one in rows]))
    is_scored = torch.cat([one.is_scored for one in rows])
    given = torch.where(is_scored[:, None], features, own)
    attend = attending([partial(one.cache.attend, one) for one in rows], sizes)
    states = trunk(tokens, given, positions, attend).split(sizes)
    for one, made in zip(rows, states, strict=True):
        one.cache.learn(one.nodes, made)
    return states


class ModulesLM(HeadLM):
    """Modules in a row as a draft model. Each module runs when there are drafts of its depth."""

    head: ModulesInARow

    def new_cache(self, prompt: list[int], features: Rows) -> ModulesCache:
        return ModulesCache(prompt, features, [module.shape.layers for module in self.head.modules_in_a_row])

    def logits(self, caches: list[ModulesCache], wanted: list[Int64[np.ndarray, "modules _"]]) -> list[Logits]:
        """See `HeadLM.logits`: `wanted` holds the local nodes in the cache of each module, int64[modules, nodes]."""
        last = len(self.head.modules_in_a_row) - 1
        numbers = [cache.drafts_above(nodes[0]).clip(max=last) for cache, nodes in zip(caches, wanted, strict=True)]
        deepest = max((int(each.max()) for each in numbers if len(each)), default=-1)
        for number in range(deepest + 1):
            self._run(number, caches)
        return [self._read_out(*each) for each in zip(caches, wanted, numbers, strict=True)]

    def _read_out(self, cache: ModulesCache, nodes: Int64[np.ndarray, "modules _"], numbers: AnyNodes) -> Logits:
        """Return the logits of a session at nodes.

        Args:
            numbers: for each node, the module that makes its logits.
        """
        modules = self.head.modules_in_a_row

        def logits_of(number: int, here: Nodes) -> Logits:
            own = cache.caches[number]
            return modules[number].logits(own.states[own.on_device(nodes[number, here])])

        return self.in_groups(numbers, modules[0].shape.draft_vocab, logits_of)

    def _run(self, number: int, caches: list[ModulesCache]) -> None:
        """Run a module on all nodes whose input it knows, and pass its states on to the next module."""
        module = self.head.modules_in_a_row[number]
        while pending := [(cache, rows) for cache in caches if (rows := cache.caches[number].next_rows())]:
            self.passes += 1
            made = run_rows(module, [rows for _, rows in pending])
            for (cache, rows), states in zip(pending, made, strict=True):
                cache.hand_on(number, rows.nodes, module.fed_back(states))


class MaskLM(HeadLM):
    """A pair trunk with mask rows as a draft model.

    One pass makes the rows of newly scored nodes and the blocks of all roots. Drafts deeper than a block use the law of its
    last row.
    """

    head: MaskTrunk
    drafts_blocks = True

    def new_cache(self, prompt: list[int], features: Rows) -> MaskCache:
        shape = self.head.shape
        return MaskCache(prompt, features, shape.layers, shape.views)

    def logits(self, caches: list[MaskCache], wanted: list[AnyNodes]) -> list[Logits]:
        """See `HeadLM.logits`: nodes at the same depth below a root share a law."""
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

    def _at(self, cache: MaskCache, places: list[tuple[int, int]]) -> Logits:
        """Return the logits at nodes, given the root of each and the distance to it."""
        if not places:
            return torch.zeros(0, self.head.shape.draft_vocab, device=self.device)
        last = self.head.rows - 1
        return self.head.logits(torch.stack([cache.blocks[root][min(far, last)] for root, far in places]))

    def _run(self, rows: list[MaskRows]) -> None:
        """Compute the head's states of rows of several sessions in one pass, and store the blocks."""
        rows = [one for one in rows if len(one.feed) + len(one.roots)]
        if not rows:
            return
        self.passes += 1
        tokens = []
        given = []
        positions = []
        sizes = []
        for one in rows:
            cache = one.cache
            trie = cache.trie
            above = cache.features[cache.on_device(trie.parents[one.roots])]
            roots = cache.on_device(trie.tokens[one.roots])
            read = self.head.read_by(roots, above, cache.on_device(trie.positions[one.roots]))
            block_tokens, block_features, block_positions = read
            tokens += [cache.on_device(one.feed.tokens), block_tokens.flatten()]
            given += [one.read, block_features.flatten(0, 1)]
            positions += [cache.on_device(one.feed.positions), block_positions.flatten()]
            sizes.append(len(one.feed) + block_tokens.numel())
        attend = attending([partial(one.cache.attend, one) for one in rows], sizes)
        states = self.head(torch.cat(tokens), torch.cat(given), torch.cat(positions), attend)
        for one, made in zip(rows, states.split(sizes), strict=True):
            blocks = made[len(one.feed) :].unflatten(0, (len(one.roots), self.head.rows))
            one.cache.blocks.update(zip(one.roots.tolist(), blocks, strict=True))


class ChimeraLM(TrunkLM):
    """A Chimera head as a draft model. Drafts deeper than its read-outs use the last one."""

    head: Chimera

    def read_out(self, cache: PairCache, nodes: Nodes) -> Logits:
        """See `TrunkLM.read_out`: it also reads the nearest scored node above each node, and the distance to it."""
        scored = np.array([cache.scored_above(node) for node in nodes.tolist()], dtype=np.int64).reshape(-1, 2)
        above, distances = scored.T

        def logits_of(far: int, here: Nodes) -> Logits:
            features = cache.features[cache.on_device(above[here])]
            return self.head.logits(far, features, cache.states[cache.on_device(nodes[here])])

        return self.in_groups(distances, self.head.shape.draft_vocab, logits_of)


class BlockNode(NamedTuple):
    """A local node of a session, in the block of its root."""

    number: int  # the number of the session
    cache: ContextCache
    node: int
    root: int
    far: int  # depth below its root
    token: int
    parent: int  # the local node above it


class BlockLM(HeadLM):
    """A block head as a draft model.

    One pass makes the blocks of all roots of a turn; each further node costs a row of the output matrix and a step of the
    correction. Drafts deeper than a block use its last row.
    """

    head: BlockHead
    drafts_blocks = True

    def new_cache(self, prompt: list[int], features: Rows) -> ContextCache:
        shape = self.head.shape
        return ContextCache(prompt, features, shape.layers, shape.views)

    def logits(self, caches: list[ContextCache], wanted: list[AnyNodes]) -> list[Logits]:
        self.store_context(caches)
        carries = self.head.correction.state_size > 0
        asked = []
        for number, (cache, nodes) in enumerate(zip(caches, wanted, strict=True)):
            trie = cache.trie
            for node, (root, far) in cache.to_correct(nodes, carries).items():
                token = int(trie.tokens[node])
                asked.append(BlockNode(number, cache, node, root, far, token, int(trie.parents[node])))
        self._make_missing_blocks(caches, asked)
        nothing = torch.zeros(0, self.head.shape.draft_vocab, device=self.device)
        if not carries:
            logits = self._correct(asked) if asked else nothing
            counts = [sum(one.number == number for one in asked) for number in range(len(caches))]
            return list(logits.split(counts))
        made: list[dict[int, Tensor]] = [{} for _ in caches]
        for far in sorted({one.far for one in asked}):
            level = [one for one in asked if one.far == far]
            for one, row in zip(level, self._correct(level), strict=True):
                made[one.number][one.node] = row
        found = []
        for known, nodes in zip(made, wanted, strict=True):
            rows = [known[node] for node in nodes.tolist()]
            found.append(torch.stack(rows) if rows else nothing)
        return found

    def _correct(self, nodes: list[BlockNode]) -> Logits:
        """Return the logits at nodes, and store the states for their children; with a state, all nodes have one depth."""
        shape = self.head.shape
        last = shape.rows - 1
        rows = torch.stack([one.cache.blocks[one.root][min(shape.first_row + one.far, last)] for one in nodes])
        tokens = torch.tensor([one.token for one in nodes], device=self.device)
        logits, after = self.head.corrected(nodes[0].far, rows, tokens, self._handed_down(nodes, tokens))
        if self.head.correction.state_size:
            for one, handed in zip(nodes, after, strict=True):
                one.cache.carried[one.node] = handed
        return logits

    def _handed_down(self, nodes: list[BlockNode], tokens: PerRow) -> States:
        """Return the states that a correction passes to nodes of the same depth below their roots."""
        if self.head.correction.state_size == 0:
            return torch.zeros(len(nodes), 0, device=self.device)
        if nodes[0].far > 0:
            return torch.stack([one.cache.carried[one.parent] for one in nodes])
        first = torch.stack([one.cache.blocks[one.root][0] for one in nodes])
        # The first token of a text has none before it.
        above = [max(int(one.cache.trie.tokens[one.parent]), 0) for one in nodes]
        return self.head.first_states(first, tokens, torch.tensor(above, device=self.device))

    def store_context(self, caches: list[ContextCache]) -> None:
        """Store the keys and values of all newly scored nodes, in passes over all sessions."""
        while pending := [rows for cache in caches if (rows := cache.next_context())]:
            positions = self.on_device([one.feed.positions for one in pending])
            by_layer = self.head.context(torch.cat([one.features for one in pending]), positions)
            sizes = [len(one.feed) for one in pending]
            for layer, (keys, values) in enumerate(by_layer):
                for one, own_keys, own_values in zip(pending, keys.split(sizes), values.split(sizes), strict=True):
                    one.cache.stored.store(layer, one.feed.slots, own_keys, own_values)

    def _make_missing_blocks(self, caches: list[ContextCache], asked: list[BlockNode]) -> None:
        """Make the missing blocks of the roots of nodes, in one pass."""
        missing = []
        for number, cache in enumerate(caches):
            roots = {one.root for one in asked if one.number == number} - cache.blocks.keys()
            if roots:
                missing.append((cache, np.array(sorted(roots), dtype=np.int64)))
        if missing:
            for (cache, nodes), made in zip(missing, self.blocks_below(missing), strict=True):
                cache.blocks.update(zip(nodes.tolist(), made, strict=True))

    def blocks_below(
        self, roots: list[tuple[ContextCache, AnyNodes]], *known: Tensor
    ) -> tuple[Float[Tensor, "_ rows width"], ...]:
        """Return the blocks below local nodes of each session, made in one pass.

        Args:
            known: further arguments of `head.blocks`.
        """
        self.passes += 1
        tokens = self.on_device([cache.trie.tokens[nodes] for cache, nodes in roots])
        positions = self.on_device([cache.trie.positions[nodes] for cache, nodes in roots])
        sizes = [len(nodes) for _, nodes in roots]
        attend = attending([partial(cache.attend_blocks, nodes) for cache, nodes in roots], sizes)
        return self.head.blocks(tokens, positions, attend, *known).split(sizes)


class DenoiserLM(BlockLM):
    """A denoiser as a draft model, in one step with all drafts unknown, or in several steps with some of them known."""

    head: Denoiser

    @property
    def block_depth(self) -> int:
        """The number of successive drafts of a block."""
        return self.head.shape.depth

    @torch.inference_mode()
    def denoised(
        self, sessions: Sessions, forests: Forests, known: Sequence[Int64[np.ndarray, "_ _"]]
    ) -> list[Float[Tensor, "_ _ vocab"]]:
        """Return logits of the drafts below the roots of forests, given the known drafts of each root.

        Args:
            sessions: must be ready, see `is_ready`.
            known: int64[roots, drafts] of each session, -1 for unknown drafts; at most `block_depth` drafts.
        """
        caches: list[ContextCache] = [session.state[self] for session in sessions]
        for cache, forest in zip(caches, forests, strict=True):
            cache.enter(forest)
        self.store_context(caches)
        roots = []
        tokens = []
        for cache, forest, rows in zip(caches, forests, known, strict=True):
            roots.append((cache, cache.trie.local[: forest.roots].copy()))
            masks = self.block_depth - rows.shape[1]
            tokens.append(np.pad(rows, ((0, 0), (0, masks)), constant_values=-1))
        first = self.head.shape.first_row
        found = []
        for rows, made in zip(known, self.blocks_below(roots, self.on_device(tokens)), strict=True):
            wanted = made[:, first : first + rows.shape[1]]
            logits = self._of_all_tokens(self.head.lm_head(wanted.flatten(0, 1)).float())
            found.append(logits.unflatten(0, wanted.shape[:2]))
        return found


class FeatureLM(HeadLM):
    """A head on one feature as a draft model. Drafts deeper than its heads use the law of the last one."""

    head: FeatureHead
    reads_prompt = False

    def new_cache(self, prompt: list[int], features: Rows) -> StateCache:
        return StateCache(prompt, features)

    def logits(self, caches: list[StateCache], wanted: list[AnyNodes]) -> list[Logits]:
        """See `HeadLM.logits`: states are passed down level by level, for all sessions at once."""
        levels: dict[int, list[tuple[StateCache, int]]] = {}
        for cache, nodes in zip(caches, wanted, strict=True):
            cache.store_scored()
            for node, far in cache.missing(nodes):
                levels.setdefault(far, []).append((cache, node))
        for far in sorted(levels):
            self._step(far, levels[far])
        places: dict[int, list[tuple[int, int]]] = {}
        states: dict[int, list[Tensor]] = {}
        for number, (cache, nodes) in enumerate(zip(caches, wanted, strict=True)):
            for row, node in enumerate(nodes.tolist()):
                far = min(cache.far[node], self.head.sizes.depth)
                places.setdefault(far, []).append((number, row))
                states.setdefault(far, []).append(cache.states[node])
        found = [torch.zeros(len(nodes), self.head.sizes.draft_vocab, device=self.device) for nodes in wanted]
        for far, asked in places.items():
            logits = self.head.logits(far, torch.stack(states[far]))
            for (number, row), made in zip(asked, logits, strict=True):
                found[number][row] = made
        return found

    def _step(self, far: int, nodes: list[tuple[StateCache, int]]) -> None:
        """Pass states down to local nodes that are `far` below a scored one."""
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
