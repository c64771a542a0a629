"""SCORE: the target without some sublayers as a draft model on the target's own KV cache.

Sources: SWIFT (arXiv 2410.06916), Draft & Verify (arXiv 2309.08168), CLaSp (ACL 2025).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Int64

from specbeam.core.answers import LOGITS
from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.forest import Forest
from specbeam.core.measure import saved_figures
from specbeam.core.records import Needs, Scored, Turn
from specbeam.core.session import CacheOwner, Session
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.cpu.scratch import ROWS
from specbeam.engines.kv.cross import ReadsSources
from specbeam.models.clasp import dispensable_layers
from specbeam.models.huggingface import (
    WITH_RANGES,
    CacheForSteps,
    EachNeeds,
    Forests,
    HuggingFaceLM,
    OnTargetsCache,
    Sessions,
    check_wants_logits,
)
from specbeam.models.made_up import made_up_prompt, made_up_rows
from specbeam.models.skip_search import Found, SkipMemory, SkipSearch
from specbeam.models.sublayers import Choice, Sublayers, alternate, choices_of, chosen, count_of

if TYPE_CHECKING:
    from specbeam.engines.cpu.cache import CpuCache
    from specbeam.engines.gpu.cache import GpuCache

LayerCache: TypeAlias = "CpuCache | GpuCache"  # of an engine that runs ranges of layers
By = Literal["bayes", "random", "clasp", "exit"]
MOST_PASSES = 64  # sets of sublayers whose passes are cached
STREAM = 0x5155  # separates the random numbers of a search from the session's other ones


@dataclass(frozen=True)
class Skipping:
    """Which sublayers of the target drafts skip.

    Args:
        skip: "bayes": found while texts are decoded, by random search and Bayesian optimisation (SWIFT). "random": found by
            random search only. "clasp": whole layers, rechosen every few turns (CLaSp). "exit": all sublayers after the
            first layers. Or a fixed set, also as a text such as "a3 m3 m5" (Draft & Verify).
        ratio: share of sublayers that are skipped; for a search, of all layers except the first and the last; for "clasp",
            of all layers. None: 0.45.
        layers: number of first layers that run, for "exit".
        every: number of turns between choices of "clasp". None: 16.
        task: a name for the kind of texts. A target stores the results of a search for each kind.
        search: the settings of a search. None: as in the paper.

    Raises `BadSetting` if a setting is out of range or would be ignored.
    """

    skip: By | str | Sublayers = "bayes"
    ratio: float | None = None
    layers: int | None = None
    every: int | None = None
    task: str | None = None
    search: SkipSearch | None = None

    def __post_init__(self) -> None:
        if isinstance(self.skip, str) and self.skip not in get_args(By):
            object.__setattr__(self, "skip", Sublayers.read(self.skip))
        searches = self.skip in ("bayes", "random")
        used = {
            "ratio": searches or self.skip == "clasp",
            "layers": self.skip == "exit",
            "every": self.skip == "clasp",
            "task": searches,
            "search": searches,
        }
        for name, is_used in used.items():
            if not is_used and getattr(self, name) is not None:
                raise BadSetting(f"skip {str(self.skip)!r} ignores {name}={getattr(self, name)!r}; leave it out")
        if self.ratio is not None and not 0 <= self.ratio < 1:
            raise BadSetting(f"ratio is {self.ratio}; it must be a share in [0, 1)")
        if self.skip == "exit" and self.layers is None:
            raise BadSetting("skip 'exit' needs layers, the number of first layers that run")
        if self.every is not None and self.every < 1:
            raise BadSetting(f"every is {self.every}; it must be at least 1")

    @property
    def searches(self) -> bool:
        """Whether a search chooses the sublayers."""
        return self.skip in ("bayes", "random")


@dataclass(eq=False)
class Skips:
    """The skipped sublayers of one session.

    Attributes:
        skipped: the sublayers skipped in this turn.
        begun, found: the state of a search at the start of the session, and its current state.
        stream: the random numbers of the search.
        turns: number of turns settled so far.
        measured_at: start of the last window on which this session measured the set in use; None: not yet measured.
        scratch: the cache of this turn's drafts; None before the first pass.
    """

    skipped: Sublayers
    begun: Found | None = None
    found: Found | None = None
    stream: np.random.Generator = field(default_factory=np.random.default_rng)
    turns: int = 0
    measured_at: int | None = None
    scratch: "LayerCache | None" = None


class SkippingLM(OnTargetsCache):
    """The target without some sublayers, as a draft model on the target's own KV cache.

    A skipped sublayer leaves hidden states unchanged. The others read the target's keys and values of the text. They store
    the keys and values of drafts in free slots of the target's cache, which are released after the draft; the target's pass
    computes all layers of the drafted tokens again. This needs no training and no further memory, but runs layers twice:
    `rows` counts the rows.

    Args:
        lm: the target, run by an engine that runs ranges of layers.
        settings: the skipped sublayers.

    Attributes:
        passes: number of passes so far, including those of a search.
        rows: number of drafted rows that were computed.
        search_rows: number of rows that were computed to choose sublayers.
        memory: the results of searches; None without a search.

    Raises `NotSupported` unless the model's engine runs ranges of layers and it has enough layers for the ratio, and
    `BadSetting` if it lacks a sublayer.
    """

    keeps_nodes = True

    def __init__(self, lm: HuggingFaceLM, settings: Skipping | None = None) -> None:
        if isinstance(lm.runner, ReadsSources):
            raise NotSupported(f"swift drafts with decoder-only models, and {lm.model_name} has an encoder")
        if not lm.runner.runs_ranges:
            raise NotSupported(
                f"swift needs {WITH_RANGES}, and {lm.model_name} is run by engine {lm.engine!r}; docs/models.md lists the "
                "families of each engine. Use a draft model or prompt_lookup"
            )
        self.lm = self.target = lm
        self.settings = Skipping() if settings is None else settings
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.layers = lm.model.config.num_hidden_layers
        self._check_share()
        self.passes = 0
        self.rows = 0
        self.search_rows = 0
        self.curves: dict[int, Any] = {}  # cost of a pass by the length of the context; see `tune`
        self.search = self._search()
        self.memory = self._memory() if self.settings.searches else None
        self._first = self._first_skipped()
        self._first.check(self.layers)
        self._passes: dict[Sublayers, Any] = {}

    def _check_share(self) -> None:
        """Raise `NotSupported` if `ratio` amounts to less than one sublayer, or one layer for "clasp"."""
        if self.settings.searches:
            most = choices_of(self.layers)
            count = count_of(self.layers, self.ratio)
            parts = "sublayers between the first layer and the last"
        elif self.settings.skip == "clasp":
            most = self.layers
            count = int(self.layers * self.ratio)
            parts = "layers"
        else:
            return
        if count == 0 and self.ratio > 0:
            raise NotSupported(
                f"skip {self.settings.skip!r} skips {self.ratio:g} of the {most} {parts} of {self.lm.model_name}, "
                "which is none, so each draft would cost a whole pass; give a larger ratio, skip='exit' with layers, or "
                "use prompt_lookup"
            )

    def _search(self) -> SkipSearch:
        """Return the settings of the search."""
        search = self.settings.search or SkipSearch()
        return replace(search, bayes_every=0) if self.settings.skip == "random" else search

    @property
    def ratio(self) -> float:
        """The share of sublayers, or of layers, that is skipped."""
        return 0.45 if self.settings.ratio is None else self.settings.ratio

    def _memory(self) -> SkipMemory:
        """Return the results of searches for this target, kind of texts and number of sublayers."""
        count = count_of(self.layers, self.ratio)
        key = [saved_figures.weights_key(self.lm.model), self.lm.engine, self.settings.task or "", count]
        return SkipMemory(alternate(self.layers, count), key)

    def _first_skipped(self) -> Sublayers:
        """Return the sublayers that new sessions skip."""
        skip = self.settings.skip
        if isinstance(skip, Sublayers):
            return skip
        if self.memory is not None:
            return chosen(self.memory.start)
        if skip == "exit":
            if not 1 <= int(self.settings.layers or 0) < self.layers:
                raise BadSetting(
                    f"layers is {self.settings.layers}; {self.lm.model_name} has {self.layers} layers: choose 1 to "
                    f"{self.layers - 1}"
                )
            return Sublayers.after(int(self.settings.layers or 0), self.layers)
        return Sublayers()  # until the first choice of "clasp"

    def skipped(self, session: CacheOwner) -> Sublayers:
        """Return the sublayers that a session's drafts skip now."""
        return self._skips(session).skipped

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        check_wants_logits(self, len(sessions), needs)
        self._begin(sessions)
        by_set: dict[Sublayers, list[int]] = {}
        for place, session in enumerate(sessions):
            by_set.setdefault(self.skipped(session), []).append(place)
        answers: dict[int, Scored] = {}
        for skipped, places in by_set.items():
            scratches = [self._scratch(sessions[place]) for place in places]
            before = sum(scratch.trie.stored for scratch in scratches)
            self.passes += 1
            found = self._passes_without(skipped).extend(scratches, [forests[place] for place in places])
            self.rows += sum(scratch.trie.stored for scratch in scratches) - before
            answers.update(zip(places, found, strict=True))
        for session in sessions:
            self._count_scratch(session)
        return [answers[place] for place in range(len(sessions))]

    @contextmanager
    def cache_for_steps(
        self, session: CacheOwner, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> Iterator[CacheForSteps | None]:
        """Yield the cache of a session's drafts as arrays for compiled steps; see `HuggingFaceLM.cache_for_steps`."""
        if needs != LOGITS or not self.lm.runner.takes_steps:
            yield None
            return
        self._begin([session])
        scratch = self._scratch(session)
        passes = self._passes_without(self.skipped(session))
        before = scratch.trie.stored
        with passes.arrays_for_steps(scratch, fresh + more) as arrays:
            yield None if arrays is None else CacheForSteps(self, scratch, arrays)
        self.rows += scratch.trie.stored - before
        self._count_scratch(session)

    @property
    def supports_runs(self) -> bool:
        """Whether compiled runs can take whole turns with these drafts; see also `is_settled`."""
        return type(self) is SkippingLM and self.lm.supports_runs and isinstance(self.lm.runner, PackedPasses)

    @property
    def is_small(self) -> bool:
        """See `HuggingFaceLM.is_small`."""
        return self.lm.is_small

    @property
    def weights(self) -> int:
        """The number of the target's parameters."""
        return self.lm.weights

    @property
    def bytes_read(self) -> int:
        """See `HuggingFaceLM.bytes_read`: half of the target's, whichever sublayers are skipped."""
        return self.lm.bytes_read // 2

    def is_settled(self, session: CacheOwner) -> bool:
        """Return whether a session's sublayers are final, so that no turn must return to Python to choose them."""
        if self.settings.skip == "clasp":
            return False
        found = self._skips(session).found
        return found is None or found.is_over(self.search)

    def for_run(
        self, session: CacheOwner, fresh: int, beams: int, more: int, needs: Needs = LOGITS
    ) -> AbstractContextManager[Any] | None:
        """See `RunLM.for_run`. Drafts use free slots of the target's cache, which must have room (`prepare_run`)."""
        is_possible = self.supports_runs and self.is_settled(session)
        return self._scratch_for_run(session, fresh + 3 * beams) if is_possible else None

    def prepare_run(self, session: CacheOwner) -> None:
        """Store all tokens before the roots in the target's cache."""
        self.lm.caches_before_roots([session])

    @contextmanager
    def _scratch_for_run(self, session: CacheOwner, nodes: int) -> Iterator[Any]:
        """Yield a cache for the drafts of a run, with room for `nodes` nodes."""
        cache = session.state[self.lm]
        passes = self._passes_without(self.skipped(session))
        assert isinstance(passes, PackedPasses)  # see `supports_runs`
        with passes.scratch_for_steps(cache, nodes) as arrays:
            yield arrays
        self.rows += int(arrays.numbers[ROWS])

    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Drop the turn's drafts; the decoding loop settles the target's cache."""
        skips = self._skips(session)
        skips.scratch = None
        skips.turns += 1

    def take_back(self, session: CacheOwner) -> None:
        """Drop the drafts of this turn."""
        self._skips(session).scratch = None

    def close(self, session: CacheOwner) -> None:
        """Save the results of a search in this session; the decoding loop closes the target's cache."""
        skips = session.state.pop(self, None)
        if skips is not None and self.memory is not None:
            self.memory.end(skips.begun, skips.found)

    @contextmanager
    def stored(self, length: int) -> Iterator["TimedDrafts"]:
        """Yield a prompt of `length` tokens in the target's cache, to time passes."""
        prompt = made_up_prompt(length, self.vocab)
        session: Any = SimpleNamespace(prompt=prompt, state={})
        try:
            yield TimedDrafts(self, session)
        finally:
            self.close(session)
            self.lm.close(session)

    def _skips(self, session: CacheOwner) -> Skips:
        """Return the state of a session, which begins with the results of earlier sessions."""
        found: Skips | None = session.state.get(self)
        if found is None:
            found = Skips(self._first)
            if self.memory is not None:
                found.begun = self.memory.begin()
                found.found = found.begun.copy()
                found.skipped = chosen(found.found.best)
                seed = session.dice.key if isinstance(session, Session) else 0
                found.stream = np.random.Generator(np.random.Philox(key=seed ^ STREAM))
            session.state[self] = found
        return found

    def _scratch(self, session: CacheOwner) -> "LayerCache":
        scratch = self._skips(session).scratch
        assert scratch is not None
        return scratch

    def _passes_without(self, skipped: Sublayers) -> Any:
        if skipped not in self._passes:
            if len(self._passes) >= MOST_PASSES:
                self._passes.pop(next(iter(self._passes)))
            self._passes[skipped] = self.lm.ranged.skipping(skipped.attention, skipped.inner)
        return self._passes[skipped]

    def _count_scratch(self, session: CacheOwner) -> None:
        session.state[self.lm].trie.count_scratch(self._scratch(session).trie)

    def _begin(self, sessions: Sessions) -> None:
        """At the first pass of a turn, choose each session's sublayers and make a cache for its drafts."""
        beginning = [session for session in sessions if self._skips(session).scratch is None]
        if not beginning:
            return
        for session, cache in zip(beginning, self.lm.caches_before_roots(beginning), strict=True):
            skips = self._skips(session)
            if isinstance(session, Session):
                self._choose(session, skips, cache)
            skips.scratch = cache.scratch(cache.trie.scratch(_to_run_again(session, cache)))

    def _choose(self, session: Session, skips: Skips, cache: "LayerCache") -> None:
        """Choose the sublayers of a turn if a choice is due."""
        if self.settings.skip == "clasp":
            if skips.turns % (self.settings.every or 16) == 0:
                skips.skipped = self._by_states(session, cache) or skips.skipped
        elif skips.found is not None and not skips.found.is_over(self.search):
            self._search_on(session, skips, skips.found, cache)

    def _search_on(self, session: Session, skips: Skips, found: Found, cache: "LayerCache") -> None:
        """Measure one set on the text so far, and use it if it is better than the present set.

        If the window has moved by half its length, the present set is measured again first.
        """
        best = int(np.argmax(session.beams.scores))
        text = [*session.settled, *session.tails[best].tolist()]
        context = self.search.context
        if len(text) <= context + 1 or skips.turns % self.search.interval:
            return
        start = 0 if self.search.window == "first" else len(text) - context - 1
        window = np.array(text[start : start + context + 1])
        leaf = cache.trie.leaf(best)

        def matchness(choice: Choice) -> float:
            self._count_search(session, context)
            return self.matchness(cache, leaf, len(session.prompt) + start, window, chosen(choice))

        has_moved = skips.measured_at is None or start - skips.measured_at >= context / 2
        if self.search.window == "recent" and has_moved:
            skips.measured_at = start
            if found.tries:  # try another set too, as short texts have few turns
                found.measure_again(matchness(found.best))
        choice = found.next(self.search, skips.stream)
        found.learn(choice, matchness(choice))
        skips.skipped = chosen(found.best)

    def matchness(
        self, cache: "LayerCache", leaf: int, position: int, window: Int64[np.ndarray, " tokens"], skipped: Sublayers
    ) -> float:
        """Return the share of a window's tokens that are the most likely ones for the model without these sublayers.

        Args:
            cache: the target's cache, with the text.
            leaf: a stored local node whose path contains the window.
            position: position of the window's first token, which is not predicted.
        """
        asked = window[:-1]
        trie = cache.trie.before(leaf, position)
        scratch = cache.scratch(trie)
        scratch.answered = 1  # the root stands for the text before the window
        forest = Forest.rooted([0]).grown(asked, np.arange(len(asked)))
        (scored,) = self._passes_without(skipped).extend([scratch], [forest])
        cache.trie.count_scratch(trie)
        return float(np.mean(scored.logits.argmax(-1).numpy() == window[1:]))

    def _by_states(self, session: Session, cache: "LayerCache") -> Sublayers | None:
        """Return the layers whose removal changes the last state of the newest stored token least (`dispensable_layers`).

        None if the newest stored row is the first of the text or an embedding row, or if there is none.
        """
        best = int(np.argmax(session.beams.scores))
        trie = cache.trie
        leaf = trie.leaf(best)
        if leaf < 0 or trie.positions[leaf] < 1:
            return None
        token = int(trie.tokens[leaf])
        if token < 0:
            return None
        count = int(self.layers * self.ratio)
        others = trie.before(leaf, int(trie.positions[leaf]))
        others.enter(Forest.rooted([0]).grown([token] * (count + 1), [0] * (count + 1)))
        feed = others.feed(count + 1)
        scratch = cache.scratch(others)
        runner = self.lm.ranged
        layers = dispensable_layers(
            lambda layer, states: runner.run_layer(scratch, feed.only(np.arange(len(states))), layer, states),
            runner.input_of(token, int(trie.positions[leaf])),
            self.layers,
            count,
        )
        trie.count_scratch(others)
        self._count_search(session, count + 1)
        return Sublayers.of_layers(layers)

    def _count_search(self, session: Session, rows: int) -> None:
        """Count a pass over `rows` rows to choose sublayers."""
        self.passes += 1
        self.search_rows += rows
        session.count.draft_passes += 1


@dataclass(frozen=True)
class TimedDrafts:
    """A prompt in the target's cache, to time draft passes."""

    lm: SkippingLM
    session: Any

    def pass_s(self, rows: int) -> float:
        """Return the seconds of a draft pass over `rows` rows."""
        root = Forest.rooted(self.session.prompt[-1:])
        forest = made_up_rows(root, rows, self.lm.vocab)
        self.lm.extend([self.session], [root])
        began = time.perf_counter()
        self.lm.extend([self.session], [forest])
        seconds = time.perf_counter() - began
        self.lm.take_back(self.session)
        return seconds


def _to_run_again(session: CacheOwner, cache: "LayerCache") -> Int64[np.ndarray, " roots"]:
    """Return the roots that the target has stored and whose logits the drafter does not know."""
    trie = cache.trie
    stored = np.flatnonzero(trie.root_at < trie.stored)
    start = getattr(session, "start", None)
    return stored if start is None else np.setdiff1d(stored, start.known.nodes)


def skipping_model(lm: HuggingFaceLM, settings: Skipping | None = None) -> SkippingLM:
    """Return the target's draft model with these settings, the same object for equal settings."""
    key = settings or Skipping()
    if key not in lm.skipping:
        lm.skipping[key] = SkippingLM(lm, key)
    return lm.skipping[key]
