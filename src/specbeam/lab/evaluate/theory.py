"""The theory of rejections, measured on one's own runs (arXiv 2411.00841, NeurIPS 2024).

A draft from q that is tried against the target's law p is rejected with a probability equal to the total variation of
the two laws, TV = 1 - sum(min(p, q)). This predicts for every run the number of rejections, the accepted tokens, the
gain of several drafts, and the possible gain of a better rule. Each `TheoryRow` compares a prediction with
counts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from specbeam import (
    Method,
    Pair,
    block_verification,
    decode,
    multi_draft,
    opt_tree,
    rsd_c,
    spechub,
    specinfer,
    speculative_sampling,
    traversal,
)
from specbeam.core import CHOSEN, DISTINCT, INDEPENDENT, LOST, SHARED, Siblings, Turn
from specbeam.core.laws import Warp, dense_logp, on_host
from specbeam.doors import Prompt, Request, Settings, save_figure
from specbeam.errors import BadPrompt, NotSupported
from specbeam.lab.evaluate.intervals import edge_interval, interval
from specbeam.recipes import require_at_least_one

Law = Float64[np.ndarray, " vocab"]
EDGES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # edges of the buckets of rejection probability
ALL = "all"
RELAXED = (0.1, 0.25, 0.5)  # what relaxed acceptance adds to p / q
BATCHES = (2, 3)  # numbers of drafts under the first node of a turn
MIN_CONTEXTS = 30  # buckets with fewer contexts are left out


@dataclass(frozen=True)
class TheoryRow:
    """A prediction of the theory and the measured value; 95 % intervals by bootstrap over prompts.

    Attributes:
        check: "acceptance", "rejections", "rejections of other texts", "accepted tokens", "optimum", "optimum of a chain",
            "relaxed" or "batch".
        method: the recipe whose runs were counted.
        bucket: "all", or the range of the rejection probability in the contexts counted, such as "0.2 to 0.4": their
            total variation; for "optimum" the probability that even the best rule rejects all drafts.
        count: number of contexts, turns or tokens that the figure is a mean over.
        measured: the count per context, turn or token.
        predicted: the theory's value for the same contexts; for "optimum" the acceptance of the best rule.
        gap: measured - predicted.
    """

    check: str
    method: str
    bucket: str
    count: int
    measured: float
    low: float
    high: float
    predicted: float
    gap: float
    gap_low: float
    gap_high: float


def theory(
    pair: Pair,
    prompts: Sequence[Prompt],
    seed: int = 0,
    depth: int = 4,
    on_progress: Callable[[TheoryRow], None] | None = None,
    **options: Any,
) -> list[TheoryRow]:
    """Run methods on the prompts, and compare each prediction of the theory with counts.

    Args:
        pair: the models; the draft model must state the law of its drafts.
        depth: depth of drafts. For rejections per text, drafts reach the end of the text.
        on_progress: called with each row as soon as it is known.
        options: options of `specbeam.generate`: max_new_tokens, temperature, and truncations such as top_p.

    Raises:
        NotSupported: temperature 0, where nothing is random, or options that change laws token by token.
    """
    if not prompts:
        raise BadPrompt("there is no prompt; give at least one")
    require_at_least_one(depth=depth)
    runs = partial(_runs, pair, prompts, options=options)
    length = Settings(**options).max_new_tokens or 256
    found: list[TheoryRow] = []

    def add(rows: list[TheoryRow]) -> None:
        found.extend(rows)
        for row in rows:
            if on_progress is not None:
                on_progress(row)

    chain = speculative_sampling(length, controller="fixed")
    whole = runs(chain, seed)
    add(_acceptance_rows(whole))
    add(_rejection_rows(whole, runs(chain, seed + 1)))
    add(_relaxed_rows(whole, seed))
    for method in (speculative_sampling(depth, controller="fixed"), block_verification(depth, "fixed")):
        add(_chain_rows(runs(method, seed)))
    for name, method in verifiers().items():
        add(_optimum_rows(runs(method, seed), name))
    for count in BATCHES:
        chains = specinfer((count, *[1] * (depth - 1)), controller="fixed")
        add(_batch_rows(runs(chains, seed), f"specinfer, {count} chains"))
    return found


def verifiers() -> dict[str, Method]:
    """Return the methods whose acceptance is compared with the optimum for their drafts: two drafts under each node."""
    return {
        "specinfer": specinfer((2, 2), controller="fixed"),
        "multi_draft": multi_draft([], (1, 1), controller="fixed"),
        "rsd_c": rsd_c((2, 2), controller="fixed"),
        "traversal": traversal((2, 2), controller="fixed"),
        "spechub": spechub(2, controller="fixed"),
        "traversal, best and one": traversal((2, 2), "best_and_one", "fixed"),
        "opt_tree": opt_tree(6, 2, controller="fixed"),
    }


# ---- the formulas -------------------------------------------------------------------------------------------------


def total_variation(p: Law, q: Law) -> float:
    """Return the total variation of two laws: the probability that a draft from q is rejected against p."""
    return 1.0 - float(np.minimum(p, q).sum())


def rejection_of_batch(p: Law, q: Law, count: int) -> float:
    """Return the probability that `count` independent drafts from q, tried one after the other, are all rejected."""
    odds = 1.0
    rest = p
    for _ in range(count):
        missing = np.maximum(rest - q, 0.0)
        mass = float(missing.sum())
        odds *= mass
        if mass <= 0:
            return 0.0
        rest = missing / mass
    return odds


def relaxed(p: Law, q: Law, more: float) -> tuple[Law, float]:
    """Return each draft's acceptance probability, min(1, p / q + more), and the law's least distance from p.

    The distance is the total variation between p and the best law that the emitted token can then have: the
    mass accepted in excess of p.
    """
    ratio = np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)
    odds = np.minimum(1.0, ratio + more)
    excess = float(np.maximum(q * odds - p, 0.0).sum())
    return odds, excess


def chain_odds(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the expected number of accepted tokens of a drafted chain, token by token and by blocks.

    Args:
        ratios: p / q of each token of the chain.

    Token by token a prefix survives with the product of min(1, ratio). By blocks its probability is P = min(1, P *
    ratio), which no rule for chains exceeds (arXiv 2403.10444).
    """
    token = 1.0
    block = 1.0
    by_token = 0.0
    by_block = 0.0
    for ratio in ratios:
        token *= min(1.0, ratio)
        block = min(1.0, block * ratio)
        by_token += token
        by_block += block
    return by_token, by_block


def best_acceptance(p: Law, groups: Sequence[Siblings]) -> float | None:
    """Return the largest acceptance probability of any exact rule on these drafts; None if no formula is known.

    The optimum over all rules is the minimum of p(H) + 1 - P(all drafts are in H) over sets H of tokens (arXiv
    2310.15141). If the drafts share a law, the minimum is at a set of tokens of smallest p / q (arXiv 2502.18779).
    Formulas are known for independent drafts from one law, two drafts without replacement, one draft and chosen tokens,
    and chosen tokens only.
    """
    chosen = [int(token) for group in groups if group.kinds[0] == CHOSEN for token in group.tokens]
    drawn = [group for group in groups if group.kinds[0] != CHOSEN]
    if any(group.kinds[0] in (SHARED, LOST) for group in drawn):
        return None
    if not drawn:
        return float(p[list(set(chosen))].sum())
    q = law_of(drawn[0], len(p))
    count = sum(len(group.tokens) for group in drawn)
    if chosen:
        rest = p.copy()
        rest[chosen] = 0.0
        if count > 1:
            return None
        return float(p[list(set(chosen))].sum() + np.minimum(rest, q).sum())
    if any(not np.array_equal(law_of(group, len(p)), q) for group in drawn[1:]):
        return None
    is_independent = all(group.kinds[0] == INDEPENDENT or len(group.tokens) == 1 for group in drawn)
    if is_independent:
        return _best_of_independent(p, q, count)
    if len(drawn) == 1 and drawn[0].kinds[0] == DISTINCT and count == 2:
        return _best_of_distinct_two(p, q)
    return None


def law_of(group: Siblings, vocab: int) -> Law:
    """Return the law that a group of drafts was drawn from, on the whole vocabulary."""
    if len(group.law_pairs) == 0:
        odds: Law = group.law_odds
        return odds
    law = np.zeros(vocab)
    law[group.law_pairs] = group.law_odds
    return law


def _by_ratio(p: Law, q: Law) -> Int64[np.ndarray, " vocab"]:
    """Return the tokens in the order of rising p / q; tokens with q = 0 come last."""
    return np.argsort(np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0), kind="stable")


def _best_of_independent(p: Law, q: Law, count: int) -> float:
    order = _by_ratio(p, q)
    inside = np.minimum(np.cumsum(q[order]), 1.0) ** count
    return float(1.0 + min(0.0, (np.cumsum(p[order]) - inside).min()))


def _best_of_distinct_two(p: Law, q: Law) -> float:
    """Return the optimum for two drafts without replacement.

    Both are in a set H with the sum over its tokens x of q(x) q(H without x) / (1 - q(x)).
    """
    order = _by_ratio(p, q)
    odds = q[order]
    left = 1.0 - odds
    # a token with all the mass leaves none for a second draft, so there is only one
    share = np.divide(odds, left, out=np.zeros_like(odds), where=left > 0)
    if (left <= 0).any():
        return 1.0 - total_variation(p, q)
    inside = np.cumsum(odds) * np.cumsum(share) - np.cumsum(odds * share)
    return float(1.0 + min(0.0, (np.cumsum(p[order]) - inside).min()))


# ---- the runs -----------------------------------------------------------------------------------------------------


class Context(NamedTuple):
    """A node at which drafts were tried."""

    is_root: bool
    variation: float  # TV between the target's law and the first draft's; NaN if the drafts state no law
    accepted: bool
    best: float | None  # the best acceptance of any rule, see `best_acceptance`
    relaxed: tuple[tuple[float, float], ...]  # for each of RELAXED: this draft's acceptance probability, and the excess
    batch: float  # probability that all drafts here are rejected if drawn independently from one law; else NaN


class TurnFacts(NamedTuple):
    """The observations of one turn."""

    contexts: list[Context]
    accepted: int  # drafted tokens
    emitted: int
    by_token: float  # expected accepted tokens of its chain, token by token; NaN unless the tree is a chain
    by_block: float


class Runs(NamedTuple):
    """The turns of one method, by prompt."""

    name: str
    turns: list[list[TurnFacts]]


def _runs(pair: Pair, prompts: Sequence[Prompt], method: Method, seed: int, options: dict[str, Any]) -> Runs:
    """Decode each prompt by a method, and return the observations of its turns."""
    return Runs(method.name, [list(_facts(pair, prompt, method, seed, options)) for prompt in prompts])


def _facts(pair: Pair, prompt: Prompt, method: Method, seed: int, options: dict[str, Any]) -> Iterator[TurnFacts]:
    request = Request.of(pair, [prompt], method, Settings(**options), seed)
    for error in request.refused.values():
        raise error
    session = request.sessions[0]
    if session.warp.greedy:
        raise NotSupported("at temperature 0 nothing is drawn, so no rejection is random; give a temperature")
    if not session.warp.takes_raw_rows:
        raise NotSupported(
            "laws are compared without processors and constraints; leave out penalties, bans and grammars"
        )
    for turns in decode(pair.target, [session]):
        for _, turn in turns:
            yield turn_facts(turn, session.warp)
    if session.failure is not None:
        raise session.failure


def turn_facts(turn: Turn, warp: Warp) -> TurnFacts:
    """Return the observations of a turn; its logits must still be valid."""
    steps = turn.verdict.steps
    contexts = []
    for step in steps:
        node = int(step.parents[0])
        groups = turn.forest.groups_under(node) if node >= 0 else []
        if groups:
            contexts.append(_context(_target_law(turn, node, warp), groups, node == 0, bool(step.passed)))
    ratios = _chain_ratios(turn, warp)
    by_token, by_block = chain_odds(ratios) if ratios is not None else (np.nan, np.nan)
    return TurnFacts(contexts, turn.verdict.accepted, len(steps), by_token, by_block)


def _target_law(turn: Turn, node: int, warp: Warp) -> Law:
    """Return the target's law after a forest node."""
    place = int(np.flatnonzero(turn.scored_nodes == node)[0])
    row = on_host(turn.scored.logits[place : place + 1])
    law: Law = np.exp(dense_logp(row, warp)[0])
    return law


def _context(p: Law, groups: list[Siblings], is_root: bool, accepted: bool) -> Context:
    first = groups[0]
    best = best_acceptance(p, groups)
    if first.kinds[0] not in (INDEPENDENT, DISTINCT):
        return Context(is_root, np.nan, accepted, best, (), np.nan)
    q = law_of(first, len(p))
    token = int(first.tokens[0])
    passes = []
    for more in RELAXED:
        odds, excess = relaxed(p, q, more)
        passes.append((float(odds[token]), excess))
    is_batch = len(groups) == 1 and (first.kinds[0] == INDEPENDENT or len(first.tokens) == 1)
    batch = rejection_of_batch(p, q, len(first.tokens)) if is_batch else np.nan
    return Context(is_root, total_variation(p, q), accepted, best, tuple(passes), batch)


def _chain_ratios(turn: Turn, warp: Warp) -> list[float] | None:
    """Return p / q of each token of the drafted chain; None unless the tree is a chain of draws."""
    ratios: list[float] = []
    node = 0
    while node >= 0:
        groups = turn.forest.groups_under(node)
        if not groups:
            return ratios
        group = groups[0]
        if len(groups) > 1 or len(group.tokens) != 1 or group.kinds[0] not in (INDEPENDENT, DISTINCT):
            return None
        token = int(group.tokens[0])
        p = _target_law(turn, node, warp)
        q = law_of(group, len(p))
        ratios.append(float(p[token] / q[token]))
        node = int(group.nodes[0])
    return ratios


# ---- the rows -----------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Sums of one prompt: counted, predicted, and the number of items that both are means over."""

    measured: float
    predicted: float
    number: float


def figure(check: str, method: str, bucket: str, sums: Sequence[Sums]) -> TheoryRow | None:
    """Return the row of ratios of sums over prompts; None if nothing was counted."""
    measured, predicted, count = (np.array(column, dtype=float) for column in zip(*sums, strict=True))
    total = count.sum()
    if total == 0:
        return None
    share = measured.sum() / total
    expected = predicted.sum() / total
    low, high = interval((measured, count), lambda a, n: a / np.maximum(n, 1))
    gap_low, gap_high = interval((measured, predicted, count), lambda a, b, n: (a - b) / np.maximum(n, 1))
    row = TheoryRow(check, method, bucket, int(total), share, low, high, expected, share - expected, gap_low, gap_high)
    return row if bool((measured > count).any()) else _of_all_or_none(row, int(np.count_nonzero(count)))


def _of_all_or_none(row: TheoryRow, units: int) -> TheoryRow:
    """Return the row of a share; if it is 0 or 1, all resamples are equal, and its interval is `edge_interval`."""
    if row.measured not in (0, 1):
        return row
    low, high = edge_interval(row.measured == 1, units)
    gap_low = min(row.gap_low, low - row.predicted)
    gap_high = max(row.gap_high, high - row.predicted)
    return replace(row, low=low, high=high, gap_low=gap_low, gap_high=gap_high)


def _contexts(run: Runs) -> list[list[Context]]:
    return [list(itertools.chain.from_iterable(turn.contexts for turn in turns)) for turns in run.turns]


def _by_bucket(
    check: str,
    method: str,
    contexts: list[list[Context]],
    odds_of: Callable[[Context], float],
    sums_of: Callable[[list[Context]], Sums],
) -> list[TheoryRow]:
    """Return the row of all contexts, and a row for each bucket of rejection probability with enough of them."""
    rows = [figure(check, method, ALL, [sums_of(some) for some in contexts])]
    for low, high in itertools.pairwise(EDGES):
        inside = [[one for one in some if _bucket_of(odds_of(one)) == low] for some in contexts]
        if sum(map(len, inside)) >= MIN_CONTEXTS:
            rows.append(figure(check, method, f"{low:g} to {high:g}", [sums_of(some) for some in inside]))
    return [row for row in rows if row is not None]


def _bucket_of(odds: float) -> float:
    """Return the lower edge of the bucket of a probability, which rounding may have left just outside of [0, 1]."""
    return max((edge for edge in EDGES[:-1] if edge <= odds), default=EDGES[0])


def _acceptance_rows(run: Runs) -> list[TheoryRow]:
    """Compare how often a single draft was accepted with 1 - TV."""

    def sums_of(contexts: list[Context]) -> Sums:
        accepted = sum(one.accepted for one in contexts)
        predicted = sum(1 - one.variation for one in contexts)
        return Sums(accepted, predicted, len(contexts))

    return _by_bucket("acceptance", run.name, _contexts(run), lambda one: one.variation, sums_of)


def _rejection_rows(run: Runs, other: Runs) -> list[TheoryRow]:
    """Compare rejections per emitted token with the mean TV at the nodes visited, of these texts and of others."""
    own = []
    between = []
    for turns, others in zip(run.turns, other.turns, strict=True):
        tokens = sum(turn.emitted for turn in turns)
        rejected = _rejected(turns)
        own.append(Sums(rejected, _variation(turns), tokens))
        between.append((rejected, tokens, _variation(others), sum(turn.emitted for turn in others)))
    rows = [figure("rejections", run.name, ALL, own)]
    columns = [np.array(column, dtype=float) for column in zip(*between, strict=True)]
    rejected, tokens, variation, other_tokens = (column.sum() for column in columns)
    measured = rejected / tokens
    predicted = variation / other_tokens
    low, high = interval(columns[:2], lambda a, n: a / n)
    gap_low, gap_high = interval(columns, lambda a, n, b, m: a / n - b / m)
    gap = measured - predicted
    row = TheoryRow(
        "rejections of other texts",
        run.name,
        ALL,
        int(tokens),
        measured,
        low,
        high,
        predicted,
        gap,
        gap_low,
        gap_high,
    )
    rows.append(_of_all_or_none(row, len(between)))
    return [row for row in rows if row is not None]


def _rejected(turns: list[TurnFacts]) -> int:
    return sum(not context.accepted for turn in turns for context in turn.contexts)


def _variation(turns: list[TurnFacts]) -> float:
    return sum(context.variation for turn in turns for context in turn.contexts)


def _relaxed_rows(run: Runs, seed: int) -> list[TheoryRow]:
    """Compare relaxed acceptance's rejections, plus the remaining distance of the best law, with the mean TV."""
    rng = np.random.default_rng(seed)
    rows = []
    for place, more in enumerate(RELAXED):
        sums = []
        for contexts in _contexts(run):
            odds = np.array([one.relaxed[place][0] for one in contexts])
            excess = sum(one.relaxed[place][1] for one in contexts)
            rejected = int((rng.random(len(odds)) >= odds).sum())
            sums.append(Sums(rejected + excess, sum(one.variation for one in contexts), len(contexts)))
        rows.append(figure("relaxed", f"{run.name}, p / q + {more:g}", ALL, sums))
    return [row for row in rows if row is not None]


def _chain_rows(run: Runs) -> list[TheoryRow]:
    """Compare accepted tokens per turn with the sum of acceptance probabilities, and with the best rule for chains."""
    is_block = run.name == "block_verification"
    own = []
    best = []
    for turns in run.turns:
        accepted = sum(turn.accepted for turn in turns)
        by_token = sum(turn.by_token for turn in turns)
        by_block = sum(turn.by_block for turn in turns)
        own.append(Sums(accepted, by_block if is_block else by_token, len(turns)))
        best.append(Sums(accepted, by_block, len(turns)))
    rows = [figure("accepted tokens", run.name, ALL, own), figure("optimum of a chain", run.name, ALL, best)]
    return [row for row in rows if row is not None]


def _optimum_rows(run: Runs, name: str) -> list[TheoryRow]:
    """Compare how often one of the drafts under a node was accepted with the best rule for these drafts.

    A rule that walks down is compared at each node that it visits. A rule that decides from the leaves up is compared
    at the root, because whether it visits a deeper node depends on the nodes below.
    """
    only_roots = run.name == "traversal"
    contexts = []
    for some in _contexts(run):
        known = [one for one in some if one.best is not None]
        contexts.append([one for one in known if one.is_root or not only_roots])

    def sums_of(some: list[Context]) -> Sums:
        accepted = sum(one.accepted for one in some)
        best = sum(one.best or 0.0 for one in some)
        return Sums(accepted, best, len(some))

    return _by_bucket("optimum", name, contexts, lambda one: 1.0 - (one.best or 0.0), sums_of)


def _batch_rows(run: Runs, name: str) -> list[TheoryRow]:
    """Compare the rejections per emitted token that several chains under a turn's first node save with the theory.

    With one chain, TV rejections are expected at a node. If several drafts compete, the probability that all are
    rejected is the product of the total variations along the residuals.
    """
    sums = []
    for turns in run.turns:
        contexts = [context for turn in turns for context in turn.contexts]
        expected = sum(one.batch for one in contexts)
        variation = sum(one.variation for one in contexts)
        tokens = sum(turn.emitted for turn in turns)
        sums.append(Sums(variation - _rejected(turns), variation - expected, tokens))
    row = figure("batch", name, ALL, sums)
    return [row] if row is not None else []


# ---- table and plot -----------------------------------------------------------------------------------------------


def as_markdown(rows: Sequence[TheoryRow]) -> str:
    """Return a table with a line per row."""
    lines = [
        "| figure | method | probability of rejection | counted over | measured | theory | measured - theory |",
        "| --- | --- | --- | --: | --- | --- | --- |",
    ]
    for row in rows:
        measured = f"**{row.measured:.4f}** ({row.low:.4f} to {row.high:.4f})"
        gap = f"{row.gap:+.4f} ({row.gap_low:+.4f} to {row.gap_high:+.4f})"
        lines.append(
            f"| {row.check} | `{row.method}` | {row.bucket} | {row.count} | {measured} | {row.predicted:.4f} | {gap} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[TheoryRow], path: str | Path) -> None:
    """Write a plot to `path`: acceptance against total variation, and the distance of each rule from the best one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    buckets = [row for row in rows if row.check == "acceptance" and row.bucket != ALL]
    x = np.array([row.predicted for row in buckets])
    y = np.array([row.measured for row in buckets])
    below = y - [row.low for row in buckets]
    above = [row.high for row in buckets] - y
    left.plot([0, 1], [0, 1], color="grey", lw=1, label="theory: 1 - TV")
    bars = np.maximum([below, above], 0)
    left.errorbar(x, y, yerr=bars, marker="o", capsize=3, ls="", label="counted, by bucket of TV")
    left.set_xlabel("1 - total variation of the two laws, mean of the bucket")
    left.set_ylabel("share of drafts that were accepted")
    left.legend()
    gaps = [row for row in rows if row.check == "optimum" and row.bucket == ALL]
    places = np.arange(len(gaps))
    widths = np.array([-row.gap for row in gaps])
    ends = np.array([[row.gap_high - row.gap for row in gaps], [row.gap - row.gap_low for row in gaps]])
    right.barh(places, widths, xerr=np.maximum(ends, 0), capsize=3, color="tab:blue", alpha=0.7)
    right.set_yticks(places, [row.method for row in gaps])
    right.invert_yaxis()
    right.axvline(0, color="grey", lw=1)
    right.set_xlabel("additional acceptance of the best rule for the same two drafts, per node")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, path)
