"""The joint law over (beam, token) pairs: its odds, and its best pairs under noise, without a pass per use.

A pair is beam * vocabulary + token. What is decided is computed in float64; float32 only narrows down
which pairs can matter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt32, UInt64

from specbeam import kernels
from specbeam.dice import gumbel_at
from specbeam.forest import masses_left
from specbeam.truncation import NO_TRUNCATION, Truncation

Pairs = Int64[np.ndarray, " _"]
Coarse = Callable[[], UInt32[np.ndarray, "beams vocab"]]
SLACK = 16  # candidates looked at beyond those that are wanted
HEAD = 14.0  # pairs whose odds are below exp(-14) of the best one's do not move a width


@dataclass(frozen=True, eq=False)
class JointLaw:
    """The law of one draw of a (beam, token) pair.

    Attributes:
        logits: after the logits processors, on the host; -inf bans a token.
        scores: log-likelihood of each beam so far.
        log_norm: logsumexp of each row of logits; -inf if all of it is banned.
        counts: how often each beam occurs.
        normalised: whether the odds of each beam's tokens sum to 1; a score of transformers is not normalised again after
            the processors.
        compiled: search by the loops of `kernels`; otherwise by array code, their oracle.
    """

    logits: Float[torch.Tensor, "beams vocab"]
    scores: Float64[np.ndarray, " beams"]
    log_norm: Float64[np.ndarray, " beams"]
    counts: Int64[np.ndarray, " beams"]
    truncation: Truncation
    normalised: bool = True
    compiled: bool = kernels.AVAILABLE

    @property
    def beams(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def uncut(self) -> "JointLaw":
        """The same law before top-k, top-p and min-p."""
        law = replace(self, truncation=replace(NO_TRUNCATION, temperature=self.truncation.temperature))
        law.__dict__.update({name: self.__dict__[name] for name in _UNTOUCHED if name in self.__dict__})
        return law

    def logj_at(self, pairs: Pairs) -> Float64[np.ndarray, " pairs"]:
        """Log-likelihood of the prolonged beams: what they carry on."""
        return self._rows.reshape(-1)[pairs] + self._shift[pairs // self.vocab]

    def logp_at(self, pairs: Pairs) -> Float64[np.ndarray, " pairs"]:
        """Log of the warped law; meant for pairs inside the support."""
        return self._warped(self.logj_at(pairs), pairs) - self._log_total

    def odds(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """The odds of pairs; 0 outside the support, and in rows below 0."""
        pairs = np.maximum(rows, 0) * self.vocab + tokens
        odds = np.where(rows >= 0, np.exp(self.logp_at(pairs)), 0.0)
        if self.support is not None:
            place = np.minimum(np.searchsorted(self.support, pairs), len(self.support) - 1)
            odds = np.where(self.support[place] == pairs, odds, 0.0)
        return odds

    def masses(self, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """What was left of the law before each of these draws, of which each was struck out once drawn."""
        pairs = rows * self.vocab + tokens
        if self.support is None:
            return masses_left(self.p.ravel(), pairs)
        return masses_left(np.exp(self.logp_at(self.support)), self.support.searchsorted(pairs))

    @cached_property
    def support(self) -> Pairs | None:
        """The pairs that a truncation left, ascending; None if nothing was cut. It ranks beams, not their repeats."""
        if not self.truncation.cuts:
            return None
        if self.compiled and (found := self._first_ones()) is not None:
            return np.sort(found)
        flat = self._x.reshape(-1)
        total = float(flat.double().logsumexp(0))
        return np.sort(self.truncation.support(flat, total).numpy())

    @cached_property
    def size(self) -> int:
        """How many pairs have any odds."""
        return len(self.support) if self.support is not None else int((self.logits > -torch.inf).sum())

    @cached_property
    def logj(self) -> Float64[np.ndarray, "beams vocab"]:
        """Dense: for one beam and for tests."""
        return self.logits.double().numpy() + self._shift[:, None]

    @cached_property
    def logp(self) -> Float64[np.ndarray, "beams vocab"]:
        """Dense, -inf outside the support."""
        if self.support is not None:
            dense = np.full(self.beams * self.vocab, -np.inf)
            dense[self.support] = self.logp_at(self.support)
            return dense.reshape(self.beams, self.vocab)
        warped = self.logj / self.truncation.temperature + self._log_counts[:, None]
        return warped - self._log_total

    @cached_property
    def p(self) -> Float64[np.ndarray, "beams vocab"]:
        p = torch.exp(torch.from_numpy(self.logp))
        return (p / p.sum()).numpy()

    def row(self, row: int) -> Float64[np.ndarray, " vocab"]:
        return self.p[row]

    def head(self) -> Pairs:
        """The pairs that carry the law."""
        if self.support is not None:
            return self.support
        flat = self._x.reshape(-1)
        return np.flatnonzero((flat >= flat.max() - HEAD).numpy())

    def best(
        self,
        count: int,
        keys: UInt64[np.ndarray, " beams"] | None = None,
        coarse: Coarse | None = None,
        among: Bool[np.ndarray, " beams"] | None = None,
    ) -> Pairs:
        """The `count` pairs of largest log-odds, best first; equal ones keep their order.

        With `keys` their Gumbel noise is added, so these are draws without replacement. The noise of a pair is evaluated
        only where its upper bound (see `dice.coarse`) reaches the last one wanted. `among` restricts the beams.
        """
        pairs = self.support
        if pairs is not None and among is not None:
            pairs = pairs[among[pairs // self.vocab]]
        if self.compiled:
            return self._best_compiled(count, keys, among, pairs)
        if pairs is not None:
            return _ranked(pairs, self._value(pairs, keys), count)
        bound = self._bound(coarse if keys is not None else None, among)
        most, pairs = (found.numpy() for found in torch.topk(bound, min(count + SLACK, len(bound))))
        fine = most > -np.inf  # the others are banned, or of beams that do not count
        value = self._value(pairs[fine], keys)
        if fine.all() and len(pairs) < len(bound):
            margin = 1e-3 if bound.dtype == torch.float32 else 1e-9
            edge = np.partition(value, -count)[-count] - self._offset - margin
            if most[-1] >= edge:
                pairs = np.flatnonzero((bound >= edge).numpy())
                return _ranked(pairs, self._value(pairs, keys), count)
        return _ranked(pairs[fine], value, count)

    def core_and_halo(
        self,
        count: int,
        width: int,
        keys: UInt64[np.ndarray, " beams"] | None,
        coarse: Coarse | None,
        among: Bool[np.ndarray, " beams"],
    ) -> tuple[Pairs, int]:
        """The `count` best pairs of the beams `among` (core), and up to `width` pairs in all, the likeliest others (halo).

        A truncation cuts the core alone. The halo of a law that cuts is chosen without noise: it is there to be found, and
        what its maker cuts away another law may keep.
        """
        if self.compiled and (looked := self.truncation.looked) >= 0:
            pairs, core, _ = kernels.core_and_halo(
                self._rows, self.scores, self.log_norm, self._log_counts, _NO_NOISE if keys is None else keys, among,
                *self._cut(looked), looked, count, width,
            )  # fmt: skip
            if core >= 0:
                return pairs, core
        if self.truncation.cuts:
            core = self.best(count, keys, coarse, among)
            return self.chosen(core, self.uncut.best(width) if width > len(core) else core, width)
        every = self.best(max(width, count), keys, coarse)
        core = every[among[every // self.vocab]][:count]
        if len(core) < count and not among.all():  # the others are further down
            core = self.best(count, keys, coarse, among)
        return self.chosen(core, every, width)

    def chosen(self, core: Pairs, every: Pairs, width: int) -> tuple[Pairs, int]:
        """The core and the first of the others, `width` in all; and how many are core."""
        mine = set(core.tolist())
        halo = [pair for pair in every.tolist() if pair not in mine][: max(width - len(core), 0)]
        return np.array([*core.tolist(), *halo], dtype=np.int64), len(core)

    def _best_compiled(
        self,
        count: int,
        keys: UInt64[np.ndarray, " beams"] | None,
        among: Bool[np.ndarray, " beams"] | None,
        pairs: Pairs | None,
    ) -> Pairs:
        law = (self._rows, self._shift, self.truncation.temperature, self._log_counts)
        keys = _NO_NOISE if keys is None else keys
        if pairs is not None:
            return kernels.ranked(pairs, *law, keys, count)
        every = np.ones(self.beams, dtype=bool) if among is None else among
        return kernels.best(*law, keys, every, min(count, self.beams * self.vocab))

    def _cut(self, looked: int) -> tuple[float, int, float, float, int, float]:
        """The truncation, and what top-p alone has to know: the logsumexp of all."""
        cut = self.truncation
        total = np.nan
        if looked and not cut.top_k:
            total = self._total(np.zeros(self.beams)) - float(self.scores.max()) / cut.temperature
        return float(cut.temperature), cut.top_k, float(cut.top_p), float(cut.min_p), cut.least, total

    def for_loops(self) -> kernels.Joint | None:
        """The law as loops see it, if a short ranking tells what its truncation leaves."""
        if not self.compiled or (looked := self.truncation.looked) <= 0:
            return None
        total, cut = self._cut(looked)[-1], self.truncation.for_loops
        return kernels.Joint(self._rows, self.scores, self.log_norm, self._log_counts, total, cut)

    def _first_ones(self) -> Pairs | None:
        """The support as a head of the ranking, where a short ranking will do."""
        if (looked := self.truncation.looked) <= 0:
            return None
        pairs, known = kernels.first_ones(self._rows, self._shift, float(self.scores.max()), *self._cut(looked), looked)
        return pairs if known else None

    def _value(self, pairs: Pairs, keys: UInt64[np.ndarray, " beams"] | None) -> Float64[np.ndarray, " pairs"]:
        """Unnormalised log-odds plus noise."""
        beams, tokens = np.divmod(pairs, self.vocab)
        value = self._warped(self.logj_at(pairs), pairs)
        return value if keys is None else value + gumbel_at(keys[beams], tokens)

    def _bound(self, coarse: Coarse | None, among: Bool[np.ndarray, " beams"] | None) -> Float[torch.Tensor, " pairs"]:
        """Not below `_value` less `_offset`."""
        bound = self._x if self._single else self._x + torch.from_numpy(self._log_counts).to(self._x.dtype)[:, None]
        if coarse is not None:
            # -log(-log1p(-u)) <= -log(u), and the coarse bits of u round down.
            low = torch.from_numpy(coarse().astype(np.float32)).mul_(2.0**-32).add_(1e-30).log_()
            bound = bound - low
        if among is not None and not among.all():
            bound = bound.clone() if bound is self._x else bound
            bound[torch.from_numpy(~among)] = -torch.inf
        return bound.reshape(-1)

    def _warped(self, logj: Float64[np.ndarray, " pairs"], pairs: Pairs) -> Float64[np.ndarray, " pairs"]:
        warped = logj / self.truncation.temperature
        return warped if self._single else warped + self._log_counts[pairs // self.vocab]

    @cached_property
    def _single(self) -> bool:
        return bool((self.counts == 1).all())

    @cached_property
    def _log_counts(self) -> Float64[np.ndarray, " beams"]:
        return np.log(self.counts)

    @cached_property
    def _shift(self) -> Float64[np.ndarray, " beams"]:
        return kernels.shifts(self.scores, self.log_norm)

    @cached_property
    def _offset(self) -> float:
        """What `_x` leaves out, so that its largest values are small numbers."""
        return float(np.max(self.scores) / self.truncation.temperature)

    @cached_property
    def _x(self) -> Float[torch.Tensor, "beams vocab"]:
        """Warped log-odds of one of each beam, less `_offset`, in the type of the logits."""
        shift = self._shift / self.truncation.temperature - self._offset
        x = self.logits if self.truncation.temperature == 1 else self.logits / self.truncation.temperature
        return x + torch.from_numpy(shift).to(x.dtype)[:, None]

    @cached_property
    def _log_total(self) -> float:
        """logsumexp of the warped log-odds over the support."""
        if self.support is not None:
            return _logsumexp(self._warped(self.logj_at(self.support), self.support))
        return self._total(self._log_counts)

    def _total(self, log_counts: Float64[np.ndarray, " beams"]) -> float:
        """logsumexp of the warped log-odds over all pairs."""
        if self.truncation.temperature == 1 and self.normalised:  # each row has the odds of its beam
            return _logsumexp(np.where(np.isfinite(self.log_norm), self.scores + log_counts, -np.inf))
        return _logsumexp(log_norm(self._x.double()) + log_counts) + self._offset

    @cached_property
    def _rows(self) -> Float[np.ndarray, "beams vocab"]:
        return np.ascontiguousarray(self.logits.numpy())


def candidates(beams: int, ends: int) -> int:
    """Pairs that a step looks at, so that `beams` of them go on even if each beam could end in every way."""
    return max(2, 1 + ends) * beams


def running(law: JointLaw, pairs: Pairs, ended: Bool[np.ndarray, " _"], beams: int) -> Int64[np.ndarray, " _"]:
    """Which of the candidates go on: those of largest score that did not end, best first."""
    alive = np.flatnonzero(~ended)
    order = np.argsort(-law.logj_at(pairs[alive]), kind="stable")
    return alive[order[:beams]]


def log_norm(logits: Float[torch.Tensor, "rows vocab"]) -> Float64[np.ndarray, " rows"]:
    """logsumexp of each row, summed in float64; -inf where all of it is -inf."""
    if kernels.AVAILABLE and logits.dtype == torch.float32:
        return kernels.log_norm(np.ascontiguousarray(logits.numpy()))
    top = logits.amax(1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    total = (logits - top).exp_().sum(1, dtype=torch.float64)
    return (total.log() + top[:, 0]).numpy()


def _ranked(pairs: Pairs, value: Float64[np.ndarray, " pairs"], count: int) -> Pairs:
    order = np.lexsort((pairs, -value))[:count]
    return pairs[order]


_UNTOUCHED = ("_rows", "_shift", "_single", "_log_counts")  # what no truncation changes
_NO_NOISE = np.zeros(0, dtype=np.uint64)


def _logsumexp(values: Float64[np.ndarray, " n"]) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))
