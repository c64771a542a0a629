"""SCORE: causal language models of transformers; one pass scores the forests of many sessions."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Int64

from specbeam.core import compiling
from specbeam.core.answers import LOGITS
from specbeam.core.errors import NotSupported, UnsupportedModel, warn
from specbeam.core.forest import Forest
from specbeam.core.guard import ThreadGuard
from specbeam.core.lm import LM, checked_needs
from specbeam.core.measure.profiler import record_share
from specbeam.core.passes import CYCLES, PASSES, now
from specbeam.core.records import ExtraInputs, Needs, Scored, Turn
from specbeam.core.session import CacheOwner, is_broken
from specbeam.engines.arrays import Integers
from specbeam.engines.cpu.cache import CpuCache, Drafting
from specbeam.engines.cpu.cache_words import WORDS, KVType
from specbeam.engines.cpu.decoder import TILED_FROM
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.eligibility import lacks_trees
from specbeam.engines.families import family_of, head_of, kv_heads_of, positions_of
from specbeam.engines.kv.cross import ReadsSources
from specbeam.engines.kv.prefix import Beginning, KnownPrompts
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.packed import matrices_of, weights_in
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.engines.torch.passes import PaddedPasses
from specbeam.models.engines import COMPILED, OWN, choose_engine
from specbeam.models.gguf_files import weights_note_of
from specbeam.models.stand_ins import at_hand, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sessions = Sequence[CacheOwner]
Forests = Sequence[Forest]
EachNeeds = Sequence[Needs] | None  # the needs of each session; None: logits
CHUNK = 512  # prompt tokens of one session per pass
MOST_ROWS_IN_STEPS = 512  # pending tokens and new nodes of one session in a pass of compiled steps
COPIED_TOGETHER = 8  # cached chunks of a prompt that are copied at once
SHARE_FROM = 64  # minimum number of common tokens for which sessions share a prefix
BITS_OF_ROUNDED = {"int4": 4, "int8": 8, "fp8": 8}  # bits of a weight, by engine


@dataclass
class CacheForSteps:
    """A session's cache in one model or draft head, as arrays for compiled steps that run the model.

    Attributes:
        arrays: the cache as an argument of `core.passes.run_ranked_pass`.
        had_pending: whether any node was still to be stored at the start.
    """

    lm: Any
    cache: Any
    arrays: Any

    def __post_init__(self) -> None:
        # Without pending nodes the logits of the roots are known, and the first pass runs no layer.
        self.had_pending = self.cache.trie.pending > 0

    @contextmanager
    def count_passes(self, spent: Int64[np.ndarray, " 2"]) -> Iterator[None]:
        """Count the passes that steps run in this context, and record their share of its time as time in the model.

        Args:
            spent: int64[2], filled by the steps: the number of passes, and the CPU cycles spent in them.
        """
        since = time.perf_counter()
        began = now()
        yield
        whole = max(now() - began, 1)
        record_share("model", since, float(spent[CYCLES]) / whole)
        self._mark_answered()
        self.lm.passes += int(spent[PASSES]) - (not self.had_pending and spent[PASSES] > 0)

    def _mark_answered(self) -> None:
        self.cache.answered = self.cache.trie.known


@dataclass
class EarlyCacheForSteps(CacheForSteps):
    """The same for drafts by the first layers of a model; `cache` is a `Drafting`."""

    def _mark_answered(self) -> None:
        self.cache.cache.answered_early = self.cache.trie.known


def check_wants_logits(lm: Any, sessions: int, needs: EachNeeds) -> None:
    """Raise `NotSupported` if a method needs more than logits from a draft model that returns only logits."""
    if any(need.states or need.ranked for need in checked_needs(lm, sessions, needs)):
        raise NotSupported(
            f"{type(lm).__name__} returns only logits, and a part needs hidden states or ranked tokens of its draft model"
        )


@contextmanager
def cache_for_run(lm: Any, session: CacheOwner, fresh: int, more: int, needs: Needs) -> Iterator[Any]:
    """Yield the arrays of a session's cache in a model or draft head for steps; None if a run cannot begin with them.

    Args:
        fresh, more, needs: see `HuggingFaceLM.cache_for_steps`.
    """
    with lm.cache_for_steps(session, fresh, more, needs) as found:
        yield None if found is None else found.arrays


class HuggingFaceLM:
    """A transformers model that scores forests, with one KV trie per session and one store for all keys and values.

    `load` checks with `check_scores_forests` that the model honours masks and positions.

    Args:
        chunk: prompt tokens of one session per pass.
        engine: runs the model. "plain" calls it, and "torch" calls it through torch.compile. "compiled" (engines/cpu/) and
            "gpu" (engines/gpu/) are forwards of specbeam. "int8" and "int4" are "compiled", and "fp8" is "gpu", with weights
            rounded to 8 or 4 bits, which changes the model. "layers" (engines/by_layer.py) calls the model's layers one by
            one, so that an exit layer can draft on its cache. "parallel" (engines/torch/repeated.py) is "plain" for weights
            that are sharded over processes. "auto" takes the fastest engine that fits, but never "parallel", "torch",
            "int8", "int4", "fp8" or "layers". Raises `NotSupported` if the engine cannot run the model.
        share_from: sessions whose prompts begin with at least this number of equal tokens compute those tokens once, and
            copy their keys and values. None: never. "auto": 64.
        kv: "bfloat16" stores keys and values rounded, in half the memory, which changes the model; for the compiled forward,
            rounded or not.
        shared: the tokens that a draft model shares with a target of another vocabulary: the draft model reads the target's
            token ids and returns a logit for each of them. None: the model's own tokens.

    Attributes:
        passes: the number of passes so far.
        engine: the name of the engine that runs the model, from the table in models/engines.py.
        engine_note: a sentence with the reason if "auto" chose transformers' forward; "" otherwise.
        guard: allows one thread at a time.
        known_prompts: the cached beginnings of earlier prompts; None without prefix caching.
        further_draft: loads a draft model that a recipe takes as a setting; set by `load` on a target.
    """

    keeps_nodes = True

    def __init__(
        self,
        model: "PreTrainedModel",
        chunk: int = CHUNK,
        engine: str = "auto",
        share_from: int | Literal["auto"] | None = "auto",
        kv: KVType = "float32",
        shared: SharedTokens | None = None,
    ) -> None:
        self.given_model = model  # or its stand-in
        self.kv = kv
        self.shared = shared
        self.chunk = chunk
        self.guard = ThreadGuard()
        self.known_prompts: KnownPrompts | None = None
        self._before_prompts: tuple[int, int | None] | None = None  # `chunk` and `share_from` before `remember_prompts`
        self.caches: list[Any] = []  # the caches of the sessions, by row of the store
        self.engine, self.runner, self.engine_note = choose_engine(model, engine, self.caches, kv, shared)
        self.share_from = SHARE_FROM if share_from == "auto" else share_from
        self.heads: dict[Any, Any] = {}  # draft heads that `load` has read for this model
        self.head: Any = None  # the exit head whose layer is this model's last layer; see `heads.exit`
        self.vocab = vocab_of(model) if shared is None else shared.vocab
        self.max_positions: int | None = positions_of(model.config.get_text_config())
        self.device = model.get_input_embeddings().weight.device
        self.passes = 0
        self.further_draft: Callable[[Any, dict[Any, Any]], LM] | None = None
        self._twins: list[HuggingFaceLM] = []
        self.curves: dict[int, Any] = {}  # cost of a pass by the length of the context; see `tune`
        self.curves_in_turns: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by draft: costs when alternating
        self.skipping: dict[Any, Any] = {}  # draft models made of this model without some sublayers; `skipping_model`
        self.learnt: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # statistics of controllers, by draft model

    @property
    def model(self) -> "PreTrainedModel":
        """The model object of transformers, which is loaded now if only its stand-in has been used so far."""
        found: PreTrainedModel = whole(self.given_model)
        return found

    @model.setter
    def model(self, model: "PreTrainedModel") -> None:
        self.given_model = model

    @property
    def known(self) -> Any:
        """The model object if it has been loaded, otherwise its stand-in, which has the same settings and weights."""
        return at_hand(self.given_model)

    def twin(self, number: int = 0) -> "HuggingFaceLM":
        """Return another language model of the same model object and engine with its own caches.

        Args:
            number: equal numbers return the same object.
        """
        while len(self._twins) <= number:
            self._twins.append(self._new_twin())
        return self._twins[number]

    def _new_twin(self) -> "HuggingFaceLM":
        if self.engine == "parallel":
            raise NotSupported("a model whose weights are sharded over several processes has only one set of caches")
        return HuggingFaceLM(self.given_model, CHUNK, self.engine, self.share_from, self.kv, self.shared)

    def remember_prompts(self, chunk: int, most_bytes: int) -> None:
        """Turn on prefix caching: store prompts in chunks, and reuse the chunks for later prompts with equal beginnings.

        New sessions no longer copy from each other; a prompt copies chunks of earlier prompts. Prompts with different
        `Session.namespace` share nothing. This applies to all users of this object, until `forget_prompts`.

        Args:
            chunk: tokens of a chunk; equal beginnings are found at multiples of it.
            most_bytes: maximum bytes of cached keys and values; 0: no caching.
        """
        if self._before_prompts is None:
            self._before_prompts = self.chunk, self.share_from
        self.chunk = chunk
        self.share_from = None
        self.known_prompts = KnownPrompts(chunk, most_bytes) if most_bytes > 0 else None

    def forget_prompts(self) -> None:
        """Undo `remember_prompts` and drop the cached chunks. Running sessions keep the rows that they have stored."""
        if self._before_prompts is None:
            return
        self.chunk, self.share_from = self._before_prompts
        self._before_prompts = None
        self.known_prompts = None

    def reserve(self, sessions: int, slots: int) -> None:
        """Allocate keys and values of `sessions` sessions with `slots` tokens each, so that the store need not grow later.

        All pages are written once, so that running out of memory shows at the start and not while decoding.
        """
        self.runner.store.reserve(sessions, -(-slots // BLOCK) * BLOCK)
        self.runner.store.touch()

    @cached_property
    def slot_bytes(self) -> int:
        """The bytes of the keys and values of one token."""
        config = self.known.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        family = family_of(self.known)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if family is not None and self.engine in OWN:
            kv_heads = kv_heads_of(config, family)
        number = np.dtype(WORDS[self.kv]).itemsize if self.engine in COMPILED else self.known.dtype.itemsize
        return int(2 * config.num_hidden_layers * kv_heads * size * number)

    def lacks(self, needs: Needs) -> str:
        """Return the reason why this model cannot provide these needs; "" if it can."""
        if needs.exit_layer is not None and not self.runner.runs_ranges:
            return (
                f"an exit layer on the model's cache needs {WITH_RANGES}; this model is run by engine {self.engine!r}"
            )
        return self.runner.lacks(needs)

    def refuses(self, session: CacheOwner) -> str:
        """Return the reason why this model cannot take a session's context, embeddings or extra rows; "" if it can.

        If the forward for GPUs cannot, and transformers' forward can, that forward runs the model from now on.
        """
        why = self._refused_by(self.runner, session)
        if not why or self.engine != "gpu" or isinstance(self.runner, ReadsSources) or lacks_trees(self.model):
            return why
        plain = PaddedPasses(self.model, self.caches, shared=self.shared)
        if why_plain := self._refused_by(plain, session):
            return why_plain
        if self.caches:
            return f"{why}, and the engine cannot change while texts are decoded"
        warn(f"transformers' forward runs this {self.model_name} from now on: {why}")
        self.engine = "plain"
        self.runner = plain
        return ""

    def _refused_by(self, runner: Any, session: CacheOwner) -> str:
        """Return the reason why passes cannot take the inputs of a session; see `refuses`."""
        context, vectors = self._extras_of(session)
        if context is not None and (why := runner.refuses(context)):
            return str(why)
        inputs = self._extra_inputs_of(session)
        if inputs is not None and (why := runner.refuses_extra_rows(inputs)):
            return str(why)
        rows = -min(min(session.prompt), 0)
        if vectors is None:
            return f"the prompt has embedding rows, and session.vectors has none for {self.model_name}" if rows else ""
        if rows > len(vectors):
            return f"the prompt has token {-rows}, and vectors has only {len(vectors)} rows"
        size = self.known.get_input_embeddings().weight.shape[1]
        if vectors.ndim != 2 or vectors.shape[1] != size:
            return f"vectors has shape {[*vectors.shape]}; {self.model_name} reads rows of {size}"
        return (
            ""
            if runner.takes_vectors
            else f"{self.model_name} is run by engine {self.engine!r}, which takes tokens only"
        )

    @property
    def packed(self) -> PackedPasses:
        """The passes of this model; its engine must be the compiled forward or "layers"."""
        assert isinstance(self.runner, PackedPasses)
        return self.runner

    @property
    def ranged(self) -> Any:
        """The passes of this model, with the methods of `PackedPasses` for ranges of layers; its engine must run them."""
        assert self.runner.runs_ranges
        return self.runner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.model_name}, engine {self.engine!r}>"

    @property
    def model_name(self) -> str:
        return type(self.known).__name__

    def _extras_of(self, session: CacheOwner) -> tuple[Any, torch.Tensor | None]:
        """Return a session's context and embeddings for this model; None for each that is missing."""
        return getattr(session, "context", {}).get(self), getattr(session, "vectors", {}).get(self)

    def _extra_inputs_of(self, session: CacheOwner) -> ExtraInputs | None:
        """Return the inputs of a session's extra rows in this model; None if they are tokens or for another model."""
        inputs: ExtraInputs | None = getattr(session, "extra_inputs", None)
        return inputs if inputs is not None and inputs.model is self.model else None

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        checked = checked_needs(self, len(sessions), needs)
        caches = [self._cache(session, need) for session, need in zip(sessions, checked, strict=True)]
        self._store_for_followers(caches)
        self._prefill(caches)
        self.passes += any(_needs_a_pass(cache, forest) for cache, forest in zip(caches, forests, strict=True))
        return self.runner.extend(caches, forests)

    def extend_early(self, sessions: Sessions, forests: Forests, layers: int, needs: Needs = LOGITS) -> list[Scored]:
        """Score new nodes with the first `layers` layers on the model's cache; a later `extend` runs the other layers.

        The forest of `extend` may lack nodes that these layers have scored; their slots are then freed. Engines
        that run ranges of layers support this; see `LiveLayers` and `ExitLM`.

        Args:
            needs: needs of each row of sessions without parts; its exit layer runs after these layers.

        Raises `NotSupported` if the session has used another number of layers.
        """
        caches = [self._early_cache(session, layers, needs) for session in sessions]
        self._store_for_followers(caches)
        self._prefill(caches)
        return self.ranged.extend_early(caches, forests)

    def _early_cache(self, session: CacheOwner, layers: int, needs: Needs) -> CpuCache:
        """Return the cache of a session that drafts with the first `layers` layers; see `extend_early`."""
        asked = _needs_of_parts(session, needs)
        if asked.taps:
            raise NotSupported(
                "the target's first layers draft, and a part needs hidden states between the target's layers (taps)"
            )
        cache = self._ranged_cache(session, self._cache(session, asked))
        if cache.early_layers not in (None, layers):
            raise NotSupported(f"the session already drafts with {cache.early_layers} layers, and not with {layers}")
        if cache.needs.exit_layer is not needs.exit_layer:
            raise NotSupported("the session has stored tokens without the exit layer that drafts for it")
        cache.early_layers = layers
        return cache

    def _ranged_cache(self, session: CacheOwner, cache: Any) -> CpuCache:
        """Return a session's cache in the form that ranges of layers use, which replaces the given one."""
        found: CpuCache = self.ranged.ranged(cache)
        if found is not cache:
            for other in self._followers(cache):
                other.leader = found
            self.caches[found.row] = found
            session.state[self] = found
        return found

    def caches_before_roots(self, sessions: Sessions) -> list[Any]:
        """Store all tokens before the roots of these sessions, and return their caches, for passes on scratch slots.

        Call this at the start of a turn, only for engines that run ranges of layers; see `SkippingLM`.
        """
        caches = [self._cache(session, _needs_of_parts(session, LOGITS)) for session in sessions]
        self._store_for_followers(caches)
        self._prefill(caches, 0)
        return caches

    def fill(self, sessions: Sessions, needs: EachNeeds = None, most: int | None = None) -> list[bool]:
        """Store the next chunk of up to `most` long prompts (None: of all); see `fill_prompts`.

        `extend` would store the same chunks.
        """
        checked = checked_needs(self, len(sessions), needs)
        caches = [self._cache(session, need) for session, need in zip(sessions, checked, strict=True)]
        self._take_over_prefixes(caches)
        self._recall(caches)
        storing = dict.fromkeys(cache.leader or cache for cache in caches)
        self._store_chunk([cache for cache in storing if self._is_long(cache, self.chunk)][:most])
        self._take_over_prefixes(caches)
        return [not self._is_long(cache.leader or cache, self.chunk) for cache in caches]

    @contextmanager
    def cache_for_steps(
        self, session: CacheOwner, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> Iterator[CacheForSteps | None]:
        """Yield a session's cache as arrays for compiled steps that run the model.

        Yields None if steps cannot run this model for this session, or if too many tokens are pending for one pass.

        Args:
            fresh: maximum number of new nodes in a pass of the steps.
            more: number of further nodes to make room for.
            needs: the needs of each row.
        """
        cache = self._cache(session, needs)
        with self._arrays_for_steps(cache, fresh, more) as arrays:
            yield None if arrays is None else CacheForSteps(self, cache, arrays)

    @contextmanager
    def _arrays_for_steps(self, cache: Any, fresh: int, more: int, **options: bool) -> Iterator[Any]:
        """Yield a cache as arrays for compiled steps; None if steps cannot run its passes now.

        Args:
            options: options of the runner's `arrays_for_steps`.
        """
        if not self._takes_steps or not self._is_stored_for_steps(cache, fresh):
            yield None
            return
        assert not isinstance(self.runner, PaddedPasses)
        with self.runner.arrays_for_steps(cache, fresh + more, **options) as arrays:
            yield arrays

    def for_run(
        self, session: CacheOwner, fresh: int, beams: int, more: int, needs: Needs = LOGITS
    ) -> AbstractContextManager[Any] | None:
        """See `RunLM.for_run`."""
        if not self.supports_runs:
            return None
        if isinstance(self.runner, PackedPasses):
            return cache_for_run(self, session, fresh + beams, more, needs)
        return self._cache_by_calls(session, fresh + beams, more, needs)

    @contextmanager
    def _cache_by_calls(self, session: CacheOwner, fresh: int, more: int, needs: Needs) -> Iterator[Any]:
        """Yield a session's cache for runs whose steps call Python for a pass; None if a run cannot begin with it."""
        cache = self._cache(session, needs)
        is_plain = getattr(cache, "is_for_steps", False) and not getattr(cache, "takes_embeddings", False)
        runs_all = hasattr(cache, "has_stale_rows")  # sessions that run layers in ranges have caches of another kind
        if needs != LOGITS or not (is_plain and runs_all):
            yield None
            return
        if not self._is_stored_for_steps(cache, fresh):
            yield None
            return
        with self.runner.runs.arrays(cache, fresh, more) as arrays:  # type: ignore[union-attr]
            yield arrays

    @property
    def returns_lists(self) -> bool:
        """Whether passes of compiled runs return lists of tokens.

        On a CPU the rows are in memory already, so a list would only be more work.
        """
        is_on_cpu = self.device.type == "cpu" and self.engine != "gpu"
        return self.supports_runs and not is_on_cpu

    @property
    def shares_passes(self) -> bool:
        """Whether one pass can serve the compiled runs of many sessions."""
        return self.supports_runs

    @contextmanager
    def early_cache_for_steps(
        self, session: CacheOwner, fresh: int, layers: int, needs: Needs, lm: Any, more: int = 0
    ) -> Iterator[CacheForSteps | None]:
        """Yield a session's cache like `cache_for_steps`, for drafts with the first `layers` layers; see `extend_early`.

        Args:
            needs: see `extend_early`.
            lm: the draft model, which counts the passes.
        """
        cache = self._early_cache(session, layers, needs)
        with self._arrays_for_steps(cache, fresh, more, drafts=True) as arrays:
            yield None if arrays is None else EarlyCacheForSteps(lm, Drafting(cache), arrays)

    def _is_stored_for_steps(self, cache: Any, fresh: int) -> bool:
        """Store pending tokens that steps cannot store; return False if steps cannot run a pass over the others.

        Args:
            fresh: maximum number of new nodes in a pass of the steps.
        """
        self._store_for_followers([cache])
        hands_out_prompt = cache.early_layers is not None and cache.needs.prompt
        if cache.has_vectors or cache.extra_inputs is not None or hands_out_prompt:  # see `CpuCache.is_for_steps`
            return False
        most = min(MOST_ROWS_IN_STEPS, self.runner.most_rows_in_steps)
        self._prefill([cache])
        trie = cache.trie
        if trie.pending + fresh > most >= trie.pending - trie.pending_before_roots + fresh and cache.answered == 0:
            self._prefill([cache], most - fresh)
        return bool(cache.trie.pending + fresh <= most)

    @property
    def is_small(self) -> bool:
        """Whether the model is small enough for the caches of a CPU."""
        return self.weights < TILED_FROM

    @cached_property
    def weights(self) -> int:
        """The number of the model's parameters."""
        return weights_in(self.known)

    @property
    def weights_note(self) -> str:
        """Which matrices of a GGUF file keep their bits, and which are widened; "" for other models."""
        return weights_note_of(self.known)

    @cached_property
    def bytes_read(self) -> int:
        """The assumed number of bytes of weights that a pass reads: two for each weight, fewer if weights are rounded.

        It is the same in every engine, also in one that widens weights.
        """
        bits = 4 if matrices_of(self.known) else BITS_OF_ROUNDED.get(self.engine, 16)
        return self.weights * bits // 8

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code does all heavy work, so that torch needs one thread."""
        return self.supports_runs and isinstance(self.runner, PackedPasses)

    @property
    def supports_runs(self) -> bool:
        """Whether compiled runs can take whole turns with this model."""
        if type(self) is not HuggingFaceLM:
            return False
        calls_python = getattr(self.runner, "runs", None) is not None and compiling.AVAILABLE
        return calls_python or (isinstance(self.runner, PackedPasses) and self.runner.takes_steps)

    @property
    def _takes_steps(self) -> bool:
        """Whether compiled steps can run passes of a single session."""
        return bool(self.runner.takes_steps)

    def take_failure(self) -> BaseException | None:
        """Return the error of the last pass that a run called, once; None if there was none."""
        runs = getattr(self.runner, "runs", None)
        if runs is None:
            return None
        failure: BaseException | None = runs.callback.failure
        runs.callback.failure = None
        return failure

    def finish_run(self, session: CacheOwner, passes: int, roots: int) -> None:
        """Update the counters and the session's cache after a run of `passes` passes.

        Args:
            roots: number of live beams at the end of the run.
        """
        self.passes += passes
        cache = session.state[self]
        cache.finish_run(roots)
        self._compact_if_sparse(session, cache)

    def settle(self, session: CacheOwner, turn: Turn) -> None:
        cache = self._cache(session)  # a draft model may have no cache yet; its tokens stay pending until it drafts
        cache.settle(turn)
        self._compact_if_sparse(session, cache)

    def _compact_if_sparse(self, session: CacheOwner, cache: Any) -> None:
        """Compact the cache if its extent exceeds one block plus twice the slots it needs."""
        trie = cache.trie
        if trie.extent - trie.reserved > 2 * trie.held + BLOCK:
            self.compact(session)

    def peak(self, session: CacheOwner) -> int:
        return session.state[self].trie.peak

    def close(self, session: CacheOwner) -> None:
        """Free the session's cache.

        The session of the last row of the store moves to its row, so that rows in use stay contiguous.
        If the session failed because logits were not finite, its row is cleared before it is used again.
        """
        cache = session.state.pop(self, None)
        if cache is None:
            return
        try:
            self._take_over_prefixes(self._followers(cache))
        finally:
            self._replace_leader(self._followers(cache))
            self._free_row(session, cache)

    def _free_row(self, session: CacheOwner, cache: Any) -> None:
        """Give the row of a closed session to the session of the last row of the store."""
        if is_broken(session) and cache.row < self.runner.store.caches:
            self.runner.store.clear_cache(cache.row)
        last = self.caches.pop()
        if last is cache:
            return
        if last.row < self.runner.store.caches:  # otherwise nothing is stored in that row
            self.runner.store.move_cache(last.row, cache.row, last.trie.extent)
        self.caches[cache.row] = last
        last.row = cache.row

    def compact(self, session: CacheOwner) -> None:
        """Move the session's tokens to the first slots.

        New nodes fill free slots first, so this helps only after forests have shrunk.
        """
        cache = session.state[self]
        source, goal = cache.trie.compact()
        cache.follow_slots(source, goal)
        if len(source):
            self.runner.store.copy_slots(cache.row, source, cache.row, goal)

    def held(self, session: CacheOwner) -> int:
        """Return the number of tokens that are stored for the session."""
        return session.state[self].trie.held

    def _cache(self, session: CacheOwner, needs: Needs = LOGITS) -> Any:
        """Return the session's cache; on the first call, create it, and find a session that stores its prefix.

        Raises `NotSupported` if the model cannot take the session's context, embeddings or extra rows.
        """
        cache = session.state.get(self)
        if cache is None:
            self.guard.check()
            if why := self.refuses(session):
                raise NotSupported(why)
            leader, common = self._find_leader(session, needs)
            cache = self.runner.cache(len(self.caches), session.prompt)
            cache.needs = needs
            cache.namespace = getattr(session, "namespace", "")
            cache.recalled = getattr(session, "recalled", {})
            if needs.exit_layer is not None:
                cache = self.ranged.ranged(cache)
                cache.early_layers = needs.exit_layer.after
            cache.context, cache.vectors = self._extras_of(session)
            cache.take_extra_inputs(self._extra_inputs_of(session))
            cache.leader = leader
            cache.common = common
            self.caches.append(cache)
            session.state[self] = cache
        return cache

    def _find_leader(self, session: CacheOwner, needs: Needs) -> tuple[Any, int]:
        """Return the cache with the longest common prefix of the prompt, stored or pending, and its number of tokens.

        Returns (None, 0) if nothing can be shared. The last token of a prompt is never shared: each session must score it.
        """
        if self.share_from is None or needs.prompt or self._extra_inputs_of(session) is not None:
            return None, 0
        context, vectors = self._extras_of(session)
        best = None
        longest = self.share_from - 1
        prompt = session.prompt
        last = len(prompt) - 1
        namespace = getattr(session, "namespace", "")
        for cache in self.caches:
            if cache.leader is not None or cache.extra_inputs is not None or cache.namespace != namespace:
                continue
            if cache.prompt[: longest + 1] != prompt[: longest + 1]:
                continue
            if cache.vectors is not vectors or not _are_same(cache.context, context):
                continue
            if cache.needs.exit_layer is not needs.exit_layer:
                continue
            common = min(_common_prefix(prompt, cache.prompt), last, len(cache.prompt) - 1)
            if common > longest:
                best = cache
                longest = common
            if longest == last:
                break
        return best, longest if best is not None else 0

    def _take_over_prefixes(self, caches: list[Any]) -> None:
        """Give each cache its prefix from its leader if the leader has stored all of it."""
        for cache in caches:
            leader = cache.leader
            if leader is None or leader.trie.prompt_stored < cache.common:
                continue
            if leader.prompt_whole >= cache.common:
                self._copy_beginning(leader, cache)
            cache.leader = None  # without a copy it computes its prompt itself

    def _copy_beginning(self, leader: Any, cache: Any) -> None:
        """Copy the keys and values of the common tokens of two prompts, in pieces that need little memory."""
        slots = leader.trie.slots_of_beginning(cache.common)
        for start in range(cache.trie.prompt_stored, cache.common, self.chunk):
            piece = slots[start : start + self.chunk]
            self.runner.store.copy_slots(leader.row, piece, cache.row, self._slots_for(cache, len(piece)))
            cache.trie.forget_inner()

    def _slots_for(self, cache: Any, count: int) -> Integers:
        """Return slots, with room in the store, for the keys and values of the next `count` tokens of a prompt."""
        trie = cache.trie
        extent = trie.extent + count + BLOCK
        self.runner.store.reserve_row(cache.row, extent // BLOCK * BLOCK)  # if this fails, nothing has changed
        slots: Integers = trie.feed(count).slots
        return slots

    def _followers(self, leader: Any) -> list[Any]:
        """Return the caches that wait for a leader to store the beginnings of their prompts."""
        return [cache for cache in self.caches if cache.leader is leader]

    def _replace_leader(self, caches: list[Any]) -> None:
        """Make the first of these caches, whose leader was closed, the leader of the others that share enough with it."""
        for place, cache in enumerate(caches):
            first = caches[0]
            common = min(_common_prefix(cache.prompt, first.prompt), cache.common, len(first.prompt) - 1)
            cache.leader = first if place and common >= (self.share_from or 0) else None
            cache.common = common

    def _store_for_followers(self, caches: list[Any]) -> None:
        """Store the prefixes of these caches in their leaders, chunk by chunk, and let the caches take them over."""
        while followers := [cache for cache in caches if cache.leader is not None]:
            missing: dict[Any, int] = {}
            for cache in followers:
                count = cache.common - cache.leader.trie.prompt_stored
                missing[cache.leader] = max(missing.get(cache.leader, 0), count)
            counts = {leader: min(count, self.chunk) for leader, count in missing.items() if count > 0}
            if counts:
                self._store(counts)
            self._take_over_prefixes(followers)

    def _prefill(self, caches: list[Any], most: int | None = None) -> None:
        """Store long prompts in chunks until at most `most` tokens of each are pending, or none before its first root.

        This bounds the size of a pass. None: one chunk.
        """
        most = self.chunk if most is None else most
        self._recall(caches)
        while long := [cache for cache in caches if self._is_long(cache, most)]:
            self._store_chunk(long)

    def _is_long(self, cache: Any, most: int) -> bool:
        """Return whether more than `most` tokens are pending at the start of a turn, some of them before the first root."""
        return bool(cache.answered == 0 and cache.trie.pending > most and cache.trie.pending_before_roots > 0)

    def _store_chunk(self, caches: list[Any]) -> None:
        """Store the next chunk of the prompt of each cache in one pass."""
        if not caches:
            return
        self._store({cache: min(self.chunk, cache.trie.pending_before_roots) for cache in caches})

    def _store(self, counts: dict[Any, int]) -> None:
        self.passes += 1
        starts = [cache.trie.prompt_stored for cache in counts]
        self.runner.prefill([*counts], [*counts.values()])
        for (cache, count), start in zip(counts.items(), starts, strict=True):
            if count == self.chunk:
                self._remember(cache, start)
            cache.trie.forget_inner()

    def _recall(self, caches: list[Any]) -> None:
        """Copy cached chunks to the beginnings of prompts that are being stored."""
        known = self.known_prompts
        if known is None:
            return
        for cache in caches:
            if not _may_recall(cache) or not self._is_long(cache, self.chunk):
                continue
            start = cache.trie.prompt_stored
            if start % known.chunk:
                continue
            if self not in cache.recalled:
                known.asked += len(cache.prompt) - 1
                cache.recalled[self] = 0
            found = known.find(self._beginning(cache), start)
            for first in range(0, len(found), COPIED_TOGETHER):
                self._put(cache, found[first : first + COPIED_TOGETHER], known.chunk)
            cache.recalled[self] += known.chunk * len(found)

    def _put(self, cache: Any, chunks: list[Any], size: int) -> None:
        """Store the next tokens of a prompt, given their keys and values in chunks of `size` tokens."""
        slots = self._slots_for(cache, size * len(chunks))
        for number, chunk in enumerate(chunks):
            self.runner.store.put(cache.row, slots[number * size : (number + 1) * size], chunk)
        cache.trie.forget_inner()

    def _remember(self, cache: Any, start: int) -> None:
        """Cache the last stored chunk of a prompt, which begins at token `start`."""
        known = self.known_prompts
        if known is None or start % known.chunk or not _may_recall(cache):
            return
        slots = cache.trie.slots_of_beginning(start + known.chunk)[start:]
        known.keep(self._beginning(cache), start, self.runner.store.take(cache.row, slots))

    def _beginning(self, cache: Any) -> Beginning:
        """Return the position of a cache's prompt in the tree of known prompts."""
        if cache.beginning is None:
            cache.beginning = Beginning(cache.namespace, cache.prompt)
        return cache.beginning


class OnTargetsCache:
    """A base class of draft models that are parts of the target and use its KV cache.

    The target stores prompts; the decoding loop settles and closes the target's cache.

    Attributes:
        passes: number of passes so far.
    """

    target: HuggingFaceLM
    passes: int

    @property
    def is_compiled(self) -> bool:
        """See `HuggingFaceLM.is_compiled`."""
        return self.target.is_compiled

    def finish_run(self, session: CacheOwner, passes: int, roots: int) -> None:
        """Update the counter of passes after a run."""
        self.passes += passes

    def fill(self, sessions: Sessions, needs: Any = None, most: int | None = None) -> list[bool]:
        """Return True for each session: the target stores the prompts."""
        return [True] * len(sessions)

    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Do nothing: the decoding loop settles the target's cache."""

    def peak(self, session: CacheOwner) -> int:
        """See `LM.peak`: the peak of the target's cache, including drafts."""
        return self.target.peak(session)

    def close(self, session: CacheOwner) -> None:
        """Do nothing: the decoding loop closes the target's cache."""


def _needs_of_parts(session: CacheOwner, needs: Needs) -> Needs:
    """Return the needs of the parts of a session; `needs` if it has no parts."""
    parts = getattr(session, "parts", None)
    return needs if parts is None else parts.needs


def _may_recall(cache: Any) -> bool:
    """Return whether the keys and values of a prompt depend only on its tokens, and attention alone reads them."""
    has_extras = cache.context is not None or cache.vectors is not None or cache.extra_inputs is not None
    return not (has_extras or cache.needs.prompt or cache.early_layers is not None or cache.leader is not None)


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two contexts hold the same objects; equal copies count as different."""
    if first is second or first is None or second is None:
        return first is second
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    low = 0  # they are equal below it; slices are compared, because long prompts are compared often
    high = min(len(first), len(second)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _needs_a_pass(cache: Any, forest: Forest) -> bool:
    """Return whether any node of the forest must still pass through layers of the model."""
    trie = cache.trie
    return trie.pending > 0 or forest.size > trie.known or bool(getattr(cache, "unfinished", 0))


WITH_RANGES = (
    "the compiled forward, rounded or not, the forward for GPUs, or engine='layers'"  # engines that run ranges
)


def vocab_of(model: "PreTrainedModel") -> int:
    """Return the number of a model's logits, also of a `ServedModel`."""
    served: Any = model
    if not hasattr(served, "get_output_embeddings"):
        return int(served.vocab)
    return len(head_of(model))


def prepare_to_score(model: "PreTrainedModel") -> None:
    """Put a model into evaluation mode, with an attention that takes a mask per node: SDPA or eager, not flash or flex.

    Raises `UnsupportedModel` for models that cannot score a forest with any masks and positions.
    """
    _check_keeps_tokens(model)
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
    model.eval()


def _check_keeps_tokens(model: "PreTrainedModel") -> None:
    config = model.config
    name = type(model).__name__
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    recurrent = getattr(model, "_is_stateful", False) or kinds
    if recurrent:
        raise UnsupportedModel(
            f"{name} keeps a recurrent or compressed state ({', '.join(sorted(kinds)) or 'stateful'}) that cannot be "
            "rolled back to a branch of a token tree; choose a model whose layers are all attention"
        )
