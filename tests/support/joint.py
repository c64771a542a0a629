"""Reference models and one-turn programs for joint decoding, on the letters a, b, c."""

import math

import numpy as np

from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.records import Shape
from specbeam.core.session import Session
from specbeam.models.table import TableLM
from specbeam.recipes.joint.paths import Paths
from tests.support.examples import table


def first_order(start, a, b, c):
    return table({None: start, 0: a, 1: b, 2: c})


P = first_order((0.50, 0.40, 0.10), (0.34, 0.33, 0.33), (0.90, 0.05, 0.05), (0.20, 0.60, 0.20))
Q = first_order((0.35, 0.45, 0.20), (0.40, 0.30, 0.30), (0.70, 0.20, 0.10), (0.30, 0.40, 0.30))
ANY = (1 / 3, 1 / 3, 1 / 3)
SLOT_P = first_order((0.15, 0.25, 0.60), (0.20, 0.40, 0.40), (0.10, 0.45, 0.45), ANY)
SLOT_Q = first_order((0.60, 0.40, 0.00), (0.34, 0.33, 0.33), (0.90, 0.05, 0.05), ANY)
WORSE = first_order((0.42, 0.17, 0.41), (0.30, 0.41, 0.29), (0.12, 0.60, 0.28), (0.30, 0.26, 0.44))


def letters(tokens):
    return "".join("abc"[token] for token in tokens)


def odds_of(law, tokens):
    return math.prod(float(law(tuple(tokens[:place]))[token]) for place, token in enumerate(tokens))


def mean_perplexity(law, texts):
    """exp of minus the expected log-likelihood per token of a law over texts of one length."""
    length = len(next(iter(texts)))
    return math.exp(-sum(odds * math.log(odds_of(law, text)) for text, odds in texts.items()) / length)


def seated(method, target=None, draft=None, dice=None, steps=6, eos=(), key=0, warp=None, **limits):
    """A session of a method on two tables."""
    draft = None if draft is None else TableLM(draft)
    target = None if target is None else TableLM(target)
    parts = method.parts(target, draft)
    session = Session([0], parts, warp or Warp(), Limits(steps, tuple(eos), **limits), key)
    if dice is not None:
        session.dice = dice
    return session, target


def text_of(session):
    """All tokens of the only hypothesis."""
    (one,) = session.hypotheses()
    return one.tokens


def drafted(growth, draft, depth, width, dice=None, eos=(), key=0, warp=None):
    """The forest that a growth makes, and its session."""
    import specbeam as sb

    session, _ = seated(sb.mmtad(draft=growth), None, draft, dice, 99, eos, key, warp)
    return session.parts.drafter.draft([session], [Shape(depth, width)])[0], session


def first_turn(session, target):
    """Verdict, forest of the first turn."""
    shape = session.parts.controller.plan(session)
    forest = session.parts.drafter.draft([session], [shape])[0]
    scored = target.extend([session], [forest])[0].logits
    return session.parts.rule.verify(session, forest, scored), forest


def chain(p, q):
    """Paths of one draft chain, from the conditionals of its tokens."""
    with np.errstate(divide="ignore"):
        logp, logq = (np.append(0.0, np.cumsum(np.log(np.array(row, dtype=float)))) for row in (p, q))
    return Paths(np.arange(-1, len(p)), logp, logq, np.array([len(p)]))


def random_paths(rng, depth=3, width=3, zeros=False, ends=0.0):
    """Paths of a random tree drafted by beam search on random rows. A new beam ends with odds `ends`, and stays."""
    vocab = width + 1
    parents, logp, logq, live, ended = [-1], [0.0], [0.0], [0], []
    for _ in range(depth):
        pairs = [(logq[node], None, node) for node in ended]
        for node in live:
            p, q = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))
            if zeros and rng.random() < 0.3:
                p[rng.integers(vocab)] = 0.0
            with np.errstate(divide="ignore"):
                pairs += [(logq[node] + math.log(q[t]), logp[node] + np.log(p[t]), node) for t in range(vocab)]
        live, ended = [], []
        for score, target, node in sorted(pairs, key=lambda pair: -pair[0])[:width]:
            if target is None:
                ended.append(node)
                continue
            (ended if rng.random() < ends else live).append(len(parents))
            parents.append(node)
            logq.append(score)
            logp.append(float(target))
    chains = np.array(sorted([*live, *ended], key=lambda node: -logq[node]))
    return Paths(np.array(parents), np.array(logp), np.array(logq), chains)
