"""Search for the sublayers that drafts skip, while a text is decoded (SWIFT, arXiv 2410.06916).

The score of a set is its *matchness*: the share of recent tokens that are the most likely ones for the model without these
sublayers. The search tries one set at a time: random ones, and from time to time one from Bayesian optimisation.
"""

from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float64

from specbeam.core.errors import BadSetting, one_of
from specbeam.core.measure import saved_figures
from specbeam.models.sublayers import Choice

POOL = 512  # random candidates of Bayesian optimisation
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)  # candidate length scales, in numbers of differing sublayers
NOISE = 1e-2  # noise variance of a matchness, as a share of the variance of all
KAPPA = 2.5  # standard deviations that the confidence bound adds to the expected matchness
MOST_TRIALS = 400  # tried sets that are stored; older ones are dropped
WEIGHT = 0.5  # weight of a new matchness of the set in use in its average
Window = Literal["recent", "first"]


@dataclass(frozen=True)
class SkipSearch:
    """The settings of a search. The defaults are the paper's, except for `window` (docs/methods/swift.md).

    Args:
        context: number of tokens on which a matchness is measured.
        window: "recent" for the last tokens of the text, "first" for the first generated ones.
        interval: number of turns from one trial to the next.
        bayes_every: one in this many trials comes from Bayesian optimisation; 0: none.
        enough: matchness above which the search ends.
        patience: number of consecutive trials without a better set after which the search ends.
        most: number of trials after which the search ends.
    """

    context: int = 32
    window: Window = "recent"
    interval: int = 1
    bayes_every: int = 25
    enough: float = 0.95
    patience: int = 300
    most: int = 1000

    def __post_init__(self) -> None:
        one_of("window", self.window, ("recent", "first"))
        for name, least in {"context": 1, "interval": 1, "patience": 1, "most": 1, "bayes_every": 0}.items():
            value = getattr(self, name)
            if value < least:
                raise BadSetting(f"{name} is {value}; it must be at least {least}")
        if not 0 <= self.enough <= 1:
            raise BadSetting(f"enough is {self.enough}; it must be a share of tokens in [0, 1]")


@dataclass
class Found:
    """The state of a search.

    Attributes:
        best: the set in use.
        matchness: the average matchness of the set in use over its windows; 0 before the first.
        choices: bool[trials, choices], the tried sets.
        scores: float64[trials], their matchness.
        tries: number of trials so far.
        failures: number of trials since the last improvement.
    """

    best: Choice
    matchness: float = 0.0
    choices: Bool[np.ndarray, "trials choices"] = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    scores: Float64[np.ndarray, " trials"] = field(default_factory=lambda: np.zeros(0))
    tries: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        if len(self.scores) == 0:
            self.choices = np.zeros((0, len(self.best)), dtype=bool)

    def copy(self) -> "Found":
        """Return an independent copy."""
        return replace(self)

    def is_over(self, search: SkipSearch) -> bool:
        """Return whether the search has ended, or has nothing to choose."""
        has_choice = 0 < self.best.sum() < len(self.best)
        is_good = self.matchness > search.enough
        return not has_choice or is_good or self.failures >= search.patience or self.tries >= search.most

    def next(self, search: SkipSearch, stream: np.random.Generator) -> Choice:
        """Return the set to try next: first the set in use, then others of its size."""
        if self.tries == 0:
            return self.best
        if search.bayes_every and self.tries % search.bayes_every == 0 and len(self.scores) > 1:
            return suggested(self, stream)
        return random_choice(len(self.best), int(self.best.sum()), stream)

    def learn(self, choice: Choice, matchness: float) -> None:
        """Record the matchness of a tried set, and use the set if it is strictly better than the present one."""
        self.choices = np.concatenate([self.choices, choice[None]])[-MOST_TRIALS:]
        self.scores = np.append(self.scores, matchness)[-MOST_TRIALS:]
        self.tries += 1
        self.failures += 1
        if matchness > self.matchness:
            self.best = choice
            self.matchness = matchness
            self.failures = 0

    def measure_again(self, matchness: float) -> None:
        """Update the average matchness of the set in use with that on another window."""
        self.matchness = (1 - WEIGHT) * self.matchness + WEIGHT * matchness

    def after(self, begun: "Found", ended: "Found") -> "Found":
        """Return this state merged with a session's, from `begun` to `ended`: the session's set, and both trials."""
        fresh = ended.tries - begun.tries
        first = max(len(ended.scores) - fresh, 0)
        choices = np.concatenate([self.choices, ended.choices[first:]])[-MOST_TRIALS:]
        scores = np.append(self.scores, ended.scores[first:])[-MOST_TRIALS:]
        return replace(ended, choices=choices, scores=scores, tries=self.tries + fresh)


def random_choice(choices: int, count: int, stream: np.random.Generator) -> Choice:
    """Return a uniformly random set of `count` of the choices."""
    choice = np.zeros(choices, dtype=bool)
    choice[stream.permutation(choices)[:count]] = True
    return choice


def suggested(found: Found, stream: np.random.Generator) -> Choice:
    """Return the set with the largest upper confidence bound among random sets and the neighbours of the best set.

    A neighbour differs by the exchange of one sublayer.
    """
    best = found.choices[int(np.argmax(found.scores))]
    pool = [random_choice(len(best), int(best.sum()), stream) for _ in range(POOL)]
    for gone in np.flatnonzero(best):
        for new in np.flatnonzero(~best):
            swapped = best.copy()
            swapped[[gone, new]] = [False, True]
            pool.append(swapped)
    candidates = np.array(pool)
    mean, deviation = expected(found.choices, found.scores, candidates)
    return np.array(candidates[int(np.argmax(mean + KAPPA * deviation))])


def expected(
    tried: Bool[np.ndarray, "trials choices"],
    scores: Float64[np.ndarray, " trials"],
    asked: Bool[np.ndarray, "asked choices"],
) -> tuple[Float64[np.ndarray, " asked"], Float64[np.ndarray, " asked"]]:
    """Return mean and standard deviation of the scores of the `asked` sets by a Gaussian process on the tried sets.

    The covariance of two sets is exp(-d / scale), where d is the number of sublayers in which they differ. The scale is the
    member of `SCALES` with the largest marginal likelihood.
    """
    middle = scores.mean()
    spread = max(float(scores.std()), 1e-6)
    values = (scores - middle) / spread
    between = _distances(tried, tried)
    best = -np.inf
    mean = np.zeros(len(asked))
    variance = np.ones(len(asked))
    for scale in SCALES:
        factor = np.linalg.cholesky(np.exp(-between / scale) + NOISE * np.eye(len(values)))
        white = np.linalg.solve(factor, values)
        likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())
        if likelihood > best:
            best = likelihood
            cross = np.linalg.solve(factor, np.exp(-_distances(tried, asked) / scale))
            mean = cross.T @ white
            variance = np.maximum(1 - (cross**2).sum(0), 0.0)
    return middle + spread * mean, spread * np.sqrt(variance)


def _distances(
    first: Bool[np.ndarray, "n choices"], second: Bool[np.ndarray, "m choices"]
) -> Float64[np.ndarray, "n m"]:
    one = first.astype(np.float64)
    other = second.astype(np.float64)
    return np.asarray(one.sum(1)[:, None] + other.sum(1)[None] - 2 * one @ other.T)


class SkipMemory:
    """The results of searches for one target and kind of texts, which sessions continue.

    Args:
        start: the initial set of a search.
        key: JSON values that name the target and the kind of texts, under which results are stored on disk for later
            processes; None: not stored.
    """

    def __init__(self, start: Choice, key: Any = None) -> None:
        self.start = start
        self.key = key
        self._found: Found | None = None
        self._lock = Lock()

    def begin(self) -> Found:
        """Return a copy of the current state."""
        with self._lock:
            return self._known().copy()

    def end(self, begun: Found, ended: Found) -> None:
        """Merge the results of a session."""
        if ended.tries == begun.tries:
            return
        with self._lock:
            self._found = self._known().after(begun, ended)
            self._keep()

    def _keep(self) -> None:
        if self.key is not None and self._found is not None:
            _figures_of(self.start).keep(self.key, _record_of(self._found))

    def _known(self) -> Found:
        if self._found is None:
            record = None if self.key is None else _figures_of(self.start).load(self.key)
            self._found = Found(self.start) if record is None else _found_in(record, self.start)
        return self._found


def _record_of(found: Found) -> dict[str, Any]:
    arrays = {"best": found.best.astype(int), "choices": found.choices.astype(int), "scores": found.scores}
    return vars(found) | {name: array.tolist() for name, array in arrays.items()}


def _figures_of(start: Choice) -> saved_figures.Figures:
    """Return the on-disk record type of searches with this initial set."""

    def fits(record: dict[str, Any]) -> bool:
        return len(record["choices"]) == len(record["scores"]) and sum(record["best"]) == int(start.sum())

    count = saved_figures.NumberField(is_whole=True)
    fields = {
        "best": saved_figures.NumberField((len(start),), most=1, is_whole=True),
        "matchness": saved_figures.NumberField(most=1.0),
        "choices": saved_figures.NumberField((None, len(start)), most=1, is_whole=True),
        "scores": saved_figures.NumberField((None,), most=1.0),
        "tries": count,
        "failures": count,
    }
    return saved_figures.Figures("sublayers", saved_figures.RecordFields(fields, fits))


def _found_in(record: dict[str, Any], start: Choice) -> Found:
    """Return the state of a search in a record."""
    best = np.array(record["best"], dtype=bool)
    choices = np.array(record["choices"], dtype=bool).reshape(-1, len(start))
    scores = np.array(record["scores"], dtype=np.float64)
    return Found(**record | {"best": best, "choices": choices, "scores": scores})
