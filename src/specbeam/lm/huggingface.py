"""Any causal language model of transformers, scoring forests of many sessions in one pass."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Int64

from specbeam.core.forest import Forest
from specbeam.engines.answers import LOGITS
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import CacheArrays
from specbeam.engines.cpu.decoder import TILED_FROM, compiled_decoder
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.eligibility import is_llama_like
from specbeam.engines.kv.trie import BLOCK
from specbeam.engines.pass_steps import CYCLES, PASSES, now
from specbeam.engines.torch.lean import LARGEST, lean
from specbeam.engines.torch.passes import PaddedPasses
from specbeam.errors import NotSupported, UnsupportedModel
from specbeam.lm.base import checked_needs
from specbeam.measure.profiler import record_share
from specbeam.records import Needs, Scored, Turn
from specbeam.session import CacheOwner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbeam.engines.gpu.cache import GpuCache, GpuCacheArrays
    from specbeam.engines.gpu.passes import GpuPasses

CHUNK = 512  # prompt tokens per pass
SHARE_FROM = 64  # tokens of a prefix that sessions share
MOST_TOGETHER = 16  # sessions that share one: attention goes over what all of them have


@dataclass
class Alone:
    """A session for loops that run the model themselves."""

    lm: "HuggingFaceLM"
    cache: "CpuCache | GpuCache"
    arrays: "CacheArrays | GpuCacheArrays"

    def __post_init__(self) -> None:
        self.waiting = self.cache.trie.waiting > 0  # otherwise the first logits are known, and their pass runs no layer

    @contextmanager
    def booked(self, spent: Int64[np.ndarray, " 2"]) -> Iterator[None]:
        """Count the passes that steps run inside, and record their share of the time as the model's.

        Args:
            spent: passes, and cycles inside of them.
        """
        since = time.perf_counter()
        began = now()
        yield
        whole = max(now() - began, 1)
        record_share("model", since, float(spent[CYCLES]) / whole)
        self.cache.answered = self.cache.trie.known
        self.lm.passes += int(spent[PASSES]) - (not self.waiting and spent[PASSES] > 0)


class HuggingFaceLM:
    """Scores forests with a transformers model; one KV trie per session, all in one preallocated store.

    `check_scores_forests` (see `load`) has made sure that the model honours masks and positions.

    Args:
        chunk: prompt tokens per pass.
        engine: "plain" calls the model, "torch" calls what torch.compile makes of it; "lean", "compiled" and "gpu" run its
            layers themselves (see the files of these names in lm/); "auto" takes the fastest of these that fits, but never
            "torch"; "int8" runs it with rounded weights: another model. Raises `NotSupported` where it cannot.
        share_from: sessions whose prompts begin with so many of the same tokens compute and store these once, unless their
            texts grow so long that attention to all of them would cost more; None: never. "auto": 64, but never in compiled
            engines, in which a row has the same bits whatever is beside it, as long as nothing is shared.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        chunk: int = CHUNK,
        engine: str = "auto",
        share_from: int | Literal["auto"] | None = "auto",
    ) -> None:
        self.model = model
        self.chunk = chunk
        self.caches: list[list[Any]] = []  # the sessions of each row of the store
        self.engine, self.runner = _engine(model, engine, self.caches)
        self.share_from = share_from if share_from != "auto" else _share_from(self.engine)
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions: int | None = _max_positions(model.config.get_text_config())
        self.device = model.get_input_embeddings().weight.device
        self.passes = 0
        self.curves: dict[int, Any] = {}  # what a pass costs, by context; see `tune`

    def lacks(self, needs: Needs) -> str:
        """Say why this model cannot give what is asked for; "" if it can."""
        return self.runner.lacks(needs)

    def refuses(self, session: CacheOwner) -> str:
        """Say why this model cannot take what a session gives it besides tokens; "" if it can."""
        context, vectors = self._given(session)
        if context is not None and (why := self.runner.refuses(context)):
            return why
        rows = -min(min(session.prompt), 0)
        if vectors is None:
            return (
                f"the prompt has rows by embedding, and session.vectors has none for {self.model_name}" if rows else ""
            )
        if rows > len(vectors):
            return f"the prompt has the token {-rows}, and vectors has {len(vectors)} rows"
        size = self.model.get_input_embeddings().weight.shape[1]
        if vectors.ndim != 2 or vectors.shape[1] != size:
            return f"vectors is {[*vectors.shape]}; {self.model_name} reads rows of {size}"
        return "" if self.runner.takes_vectors else _NO_VECTORS

    @property
    def model_name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def _given(self, session: CacheOwner) -> tuple[Any, torch.Tensor | None]:
        """Return what a session gives this model besides tokens; None: nothing."""
        return getattr(session, "context", {}).get(self), getattr(session, "vectors", {}).get(self)

    def extend(
        self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`."""
        asked = checked_needs(self, len(sessions), needs)
        caches = [self._cache(session, need) for session, need in zip(sessions, asked, strict=True)]
        self._follow(caches)
        self._prefill(caches)
        self.passes += any(_needs_a_pass(cache, forest) for cache, forest in zip(caches, forests, strict=True))
        return self.runner.extend(caches, forests)

    def extend_early(self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], layers: int) -> list[Scored]:
        """Score new nodes by the first layers alone, on the live cache; `extend` runs the others on them.

        Only compiled passes do; see `LiveLayers`.
        """
        assert isinstance(self.runner, PackedPasses)
        caches = [
            self._cache(session, session.parts.needs if hasattr(session, "parts") else LOGITS) for session in sessions
        ]
        for cache in caches:
            if cache.early_layers not in (None, layers):
                raise NotSupported(
                    f"a session runs {cache.early_layers} layers ahead of the others already, not {layers}"
                )
            cache.early_layers = layers
        self._follow(caches)
        self._prefill(caches)
        return self.runner.extend_early(caches, forests)

    def fill(
        self, sessions: Sequence[CacheOwner], needs: Sequence[Needs] | None = None, most: int | None = None
    ) -> list[bool]:
        """See `fill_prompts`. The chunks are those that `extend` would store by itself."""
        asked = checked_needs(self, len(sessions), needs)
        caches = [self._cache(session, need) for session, need in zip(sessions, asked, strict=True)]
        self._join(caches)
        long = [cache for cache in caches if cache.leader is None and self._is_long(cache, self.chunk)]
        self._store_chunk(long[:most])
        self._join(caches)
        return [not self._is_long(cache.leader or cache, self.chunk) for cache in caches]

    @contextmanager
    def alone(self, session: CacheOwner, fresh: int, more: int = 0) -> Iterator[Alone | None]:
        """A session for loops that run the model themselves and bring at most so many new nodes, with room for `more` that
        come later; None where its layers are not compiled, or too much is pending.
        """
        cache = self._cache(session)
        if isinstance(self.runner, PaddedPasses):
            yield None
            return
        self._follow([cache])
        if cache.has_vectors or cache.early_layers is not None:  # loops look tokens up, and run all layers
            yield None
            return
        most = min(self.chunk, self.runner.most)
        trie = cache.trie
        if trie.waiting + fresh > most >= trie.waiting - trie.ahead + fresh and cache.answered == 0:
            self._prefill([cache], most - fresh)
        if cache.trie.waiting + fresh > most:
            yield None
            return
        with self.runner.alone(cache, fresh + more) as one:
            yield None if one is None else Alone(self, cache, one)

    @property
    def is_small(self) -> bool:
        """Whether a processor's caches hold the model."""
        return self.model.num_parameters() < TILED_FROM

    @property
    def loops(self) -> bool:
        """Whether loops can run whole turns on it."""
        return type(self) is HuggingFaceLM and isinstance(self.runner, PackedPasses)

    def ran(self, session: CacheOwner, passes: int) -> None:
        """Keep the books for a loop that ran so many passes in whole turns."""
        self.passes += passes
        cache = session.state[self]
        cache.ran()
        self._tidy(session, cache)

    def settle(self, session: CacheOwner, turn: Turn) -> None:
        cache = self._cache(session)  # new, if nothing was drafted so far: what is pending waits for the first draft
        cache.settle(turn)
        self._tidy(session, cache)

    def _tidy(self, session: CacheOwner, cache: Any) -> None:
        if len(cache.company) == 1 and cache.trie.extent > 2 * cache.trie.held + BLOCK:
            self.compact(session)

    def peak(self, session: CacheOwner) -> int:
        return session.state[self].trie.peak

    def close(self, session: CacheOwner) -> None:
        """Give the cache back: the sessions of the last row move into an empty one, so that rows in use stay together."""
        cache = session.state.pop(self, None)
        if cache is None:
            return
        self._join(cache.company)
        cache.company.remove(cache)
        cache.trie.company.remove(cache.trie)
        self._bereave([other for other in cache.company if other.leader is cache])
        if cache.company:
            return
        last = self.caches.pop()
        if last is cache.company:
            return
        if last[0].row < self.runner.store.caches:  # otherwise it has stored nothing so far
            self.runner.store.move_cache(last[0].row, cache.row)
        self.caches[cache.row] = last
        for other in last:
            other.row = cache.row

    def compact(self, session: CacheOwner) -> None:
        """Close the holes in the session's cache. New nodes fill holes anyway, so this is for forests that shrank."""
        cache = session.state[self]
        if self.shares(session):
            return
        source, goal = cache.trie.compact()
        if len(source):
            self.runner.store.move_slots(cache.row, *(torch.from_numpy(x).to(self.device) for x in (source, goal)))

    def shares(self, session: CacheOwner) -> bool:
        """Whether other sessions store what they have in the same row, so that a compiled run of turns cannot."""
        cache = session.state.get(self)
        return cache is not None and len(cache.company) > 1

    def held(self, session: CacheOwner) -> int:
        """Tokens stored for the session now."""
        return session.state[self].trie.held

    def _cache(self, session: CacheOwner, needs: Needs = LOGITS) -> Any:
        cache = session.state.get(self)
        if cache is None:
            if why := self.refuses(session):
                raise NotSupported(why)
            leader, common = self._leader(session, needs)
            cache = self.runner.cache(len(self.caches) if leader is None else leader.row, session.prompt)
            cache.needs = needs
            cache.context, cache.vectors = self._given(session)
            if leader is None:
                self.caches.append(cache.company)
            else:
                cache.leader = leader
                cache.common = common
                cache.company = leader.company
                cache.company.append(cache)
                cache.trie.company = leader.trie.company
                cache.trie.company.append(cache.trie)
            session.state[self] = cache
        return cache

    def _leader(self, session: CacheOwner, needs: Needs) -> tuple[Any, int]:
        """Return a cache that stores the beginning of the same prompt, or will, and how many tokens of it.

        The last token of a prompt is a session's own, as somebody has to score it.
        """
        if self.share_from is None or needs.prompt:
            return None, 0
        context, vectors = self._given(session)
        best = None
        longest = self.share_from - 1
        for company in self.caches:
            if len(company) >= MOST_TOGETHER:
                continue
            if company[0].vectors is not vectors or not _are_same(company[0].context, context):
                continue
            for cache in company:
                common = min(_agreement(session.prompt, cache.prompt), len(session.prompt) - 1, len(cache.prompt) - 1)
                if common > longest and cache.leader is None and self._pays(common, len(company), session):
                    best = cache
                    longest = common
        return best, longest if best is not None else 0

    def _pays(self, common: int, others: int, session: CacheOwner) -> bool:
        """Return whether to compute so many tokens again costs more than to look over what others have in the same row.

        A row of a pass costs about as much as attention to six times as many slots as a state has numbers, and of two
        sessions side by side each looks over what the other has so far.
        """
        limits = getattr(session, "limits", None)
        fresh = 0 if limits is None else limits.max_new_tokens
        return others * fresh**2 <= 6 * self.model.get_input_embeddings().weight.shape[1] * common

    def _join(self, caches: list[Any]) -> None:
        """Let caches take over what their leaders have stored for them, as far as these have."""
        for cache in caches:
            if cache.leader is not None and cache.leader.trie.prompt_stored >= cache.common:
                cache.trie.share(cache.leader.trie, cache.prompt, cache.common)
                cache.leader = None

    def _bereave(self, caches: list[Any]) -> None:
        """Let the first of these caches, whose leader is gone, lead those that it may."""
        for place, cache in enumerate(caches):
            first = caches[0]
            common = min(_agreement(cache.prompt, first.prompt), cache.common, len(first.prompt) - 1)
            cache.leader = first if place and common >= (self.share_from or 0) else None
            cache.common = common

    def _follow(self, caches: list[Any]) -> None:
        """Store what others of these caches wait for, and let them take it over."""
        while late := [cache for cache in caches if cache.leader is not None]:
            wanted: dict[Any, int] = {}
            for cache in late:
                missing = cache.common - cache.leader.trie.prompt_stored
                wanted[cache.leader] = max(wanted.get(cache.leader, 0), missing)
            counts = {leader: min(count, self.chunk) for leader, count in wanted.items() if count > 0}
            if counts:
                self._store(counts)
            self._join(late)

    def _prefill(self, caches: list[Any], most: int | None = None) -> None:
        """Long prompts go ahead in chunks, so that a pass stays small whatever the prompt: until at most so many tokens are
        pending, or none before the first root.
        """
        most = self.chunk if most is None else most
        while long := [cache for cache in caches if self._is_long(cache, most)]:
            self._store_chunk(long)

    def _is_long(self, cache: Any, most: int) -> bool:
        """Return whether more than so many tokens are pending, some of them before the first root."""
        return bool(cache.answered == 0 and cache.trie.waiting > most and cache.trie.ahead > 0)

    def _store_chunk(self, caches: list[Any]) -> None:
        """Store the next chunk of each prompt, in one pass."""
        if not caches:
            return
        self._store({cache: min(self.chunk, cache.trie.ahead) for cache in caches})

    def _store(self, counts: dict[Any, int]) -> None:
        """Store so many tokens of each prompt, in one pass."""
        self.passes += 1
        self.runner.prefill([*counts], [*counts.values()])
        for cache in counts:
            cache.trie.forget_inner()


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two contexts hold the same things; equal ones that are not the same count as different."""
    if first is second or first is None or second is None:
        return first is second
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


def _agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    if first == second:
        return len(first)
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _share_from(engine: str) -> int | None:
    """Return from how many common tokens on prompts are shared where nobody says so."""
    return None if engine in ("compiled", "int8") else SHARE_FROM


def _needs_a_pass(cache: Any, forest: Forest) -> bool:
    trie = cache.trie
    return trie.waiting > 0 or forest.size > trie.known or bool(getattr(cache, "half", ()))


def _engine(
    model: "PreTrainedModel", wanted: str, caches: list[Any]
) -> "tuple[str, PaddedPasses | PackedPasses | GpuPasses]":
    """What runs the model's layers, and its name."""
    on_gpu = model.device.type == "cuda"
    if wanted == "gpu" or (wanted == "auto" and on_gpu):
        passes = _gpu_passes(model, caches, capture=on_gpu)
        if passes is not None:
            return "gpu", passes
    small = model.num_parameters() <= LARGEST
    if wanted in ("compiled", "int8") or (wanted == "auto" and small):
        compiled = compiled_decoder(model, int8=wanted == "int8")
        if compiled is not None:
            return "compiled" if wanted == "auto" else wanted, PackedPasses(model, compiled, caches)
    if wanted == "lean" or (wanted == "auto" and small):
        decoder = lean(model)
        if decoder is not None:
            return "lean", PaddedPasses(model, decoder, caches)
    if wanted == "torch":
        if on_gpu:
            raise NotSupported(
                "compile=True is for a CPU; on a GPU passes are captured as graphs already: leave it out"
            )
        return "torch", PaddedPasses(model, None, caches, compile=True)
    if wanted not in ("auto", "plain"):
        where = "" if wanted == "gpu" else " in float32 on a CPU"
        raise NotSupported(
            f"{_NAMES[wanted]} is for Llama, Mistral and Qwen2 models{where}; this is "
            f"{type(model).__name__} in {model.dtype} on {model.device}"
        )
    return "plain", PaddedPasses(model, None, caches)


def _gpu_passes(model: "PreTrainedModel", caches: list[Any], capture: bool) -> "GpuPasses | None":
    """None where Triton is missing or does not work, or it would not be the same model."""
    if not is_llama_like(model) or find_spec("triton") is None:
        return None
    from specbeam.engines.gpu.decoder import GpuDecoder
    from specbeam.engines.gpu.passes import GpuPasses

    with torch.inference_mode(False), torch.no_grad():  # weights that are laid out anew can still be trained
        passes = GpuPasses(model, GpuDecoder(model), caches, capture)
    try:
        passes.try_out()
    except Exception as error:  # no compiler for it, a GPU that it does not know, ...
        warnings.warn(f"Triton does not work here, so transformers runs the model: {error!r}", stacklevel=2)
        return None
    return passes


_NUMBA = ", which needs numba (pip install 'numba>=0.62'),"
_NO_VECTORS = (
    "the forward for GPUs looks every token up, and takes no rows by embedding: "
    "HuggingFaceLM(model, engine='plain') does"
)
_NAMES = {
    "gpu": "the forward for GPUs, which needs triton,",
    "int8": f"quantize='int8'{_NUMBA}",
    "lean": "the lean forward",
    "compiled": f"the compiled forward{_NUMBA}",
}


def _max_positions(config: object) -> int | None:
    for name in ("max_position_embeddings", "n_positions"):
        if (most := getattr(config, name, None)) is not None:
            return int(most)
    return None


def check_decoder_only(model: "PreTrainedModel") -> None:
    """Refuse models that no mask and no position can make score a forest."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; specbeam decodes causal language models")
    text = config.get_text_config()
    if getattr(text, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModel(
            f"{name} uses ALiBi: it derives positions from cache slots and cannot score a token tree; "
            "choose a model with rotary or learned positions"
        )
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    recurrent = getattr(model, "_is_stateful", False) or kinds
    if recurrent:
        raise UnsupportedModel(
            f"{name} keeps a recurrent or compressed state ({', '.join(sorted(kinds)) or 'stateful'}) that cannot be "
            "rolled back to a branch of a token tree; choose a model whose layers are all attention"
        )
