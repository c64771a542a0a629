"""The joint law on whole vocabularies, in float64, line by line from its definition.

A beam that occurs `count` times and has log-likelihood `score` gives the pair (beam, token) the odds
count * exp((score + log p(token)) / temperature). Transformers' own warpers cut the flattened pairs, repeats left aside.
"""

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warpers_of(truncation):
    """Transformers' own warpers for a truncation; None if it does nothing."""
    chosen = LogitsProcessorList()
    least = truncation.least
    if truncation.temperature != 1:
        chosen.append(TemperatureLogitsWarper(float(truncation.temperature)))
    if truncation.top_k:
        chosen.append(TopKLogitsWarper(truncation.top_k, min_tokens_to_keep=least))
    if truncation.top_p < 1:
        chosen.append(TopPLogitsWarper(truncation.top_p, min_tokens_to_keep=least))
    if truncation.min_p > 0:
        chosen.append(MinPLogitsWarper(truncation.min_p, min_tokens_to_keep=least))
    return chosen or None


def log_softmax(logits):
    """Log-laws of rows of logits; a row of -inf stays one."""
    logits = np.asarray(logits, dtype=np.float64)
    norms = np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logits - np.where(norms > -np.inf, norms, 0.0)


def warped(values, truncation):
    """What transformers' warpers leave of log-odds, float64[n]: divided by the temperature, -inf where cut."""
    warpers = warpers_of(truncation)
    if warpers is None:
        return values
    nothing = torch.zeros(1, 0, dtype=torch.long)
    return warpers(nothing, torch.from_numpy(values[None].copy()))[0].numpy()


def likelihoods(logits, scores):
    """Log-likelihood of each prolonged beam, float64[beams, vocab]."""
    return log_softmax(logits) + scores[:, None]


def joint_logp(logits, scores, counts, truncation):
    """Log-law of pairs, float64[beams, vocab]; -inf outside of the support."""
    values = likelihoods(logits, scores)
    left = warped(values.ravel(), truncation).reshape(values.shape) + np.log(counts)[:, None]
    return left - np.logaddexp.reduce(left.ravel())


def best(values, count):
    """Places of the largest values above -inf, best first; equal ones keep their order."""
    order = np.argsort(-values.ravel(), kind="stable")
    return order[values.ravel()[order] > -np.inf][:count]


def core_and_extra(logp, uncut, noise, among, core, width, cuts):
    """The core: the best pairs of some beams. The others: the likeliest up to `width`, without noise where the law cuts.

    Args:
        logp, uncut: the log-law, and the log-law before top-k, top-p and min-p.
        noise: of each pair.
        among: beams whose pairs can be core.
    """
    mine = best(np.where(among[:, None], logp + noise, -np.inf), core)
    looked = width if cuts else max(width, core)
    others = best(uncut if cuts else uncut + noise, looked)
    extra = [pair for pair in others.tolist() if pair not in mine][: max(width - len(mine), 0)]
    return mine.tolist(), extra
