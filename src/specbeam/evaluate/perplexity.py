"""How likely the target finds outputs, whoever made them: one pass over prompt and output, raw probabilities.

Raw means: temperature 1, no truncation, no logits processor, so that outputs of all methods are scored alike. Low perplexity
alone proves little: a text that repeats itself has it too. So length, repetition and, where there are references, a task
metric stand beside it.
"""

import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from specbeam.errors import BadPrompt
from specbeam.evaluate.intervals import ratio_interval
from specbeam.pair import Pair

LOGITS_PER_PASS = 2**26  # keeps a pass below some hundred megabytes
REPEAT = 4  # tokens that make a repetition
MOST_NATS = math.log(sys.float_info.max)

Tokens = list[int]


@dataclass(frozen=True)
class Perplexity:
    """Scores of many outputs. Intervals are 95 %, by bootstrap over prompts."""

    outputs: int
    tokens: int
    perplexity: float  # exp of minus the mean over outputs of the mean log p of a token: every output counts the same
    low: float
    high: float
    by_token: float  # the same with every token counting the same
    mean_of_outputs: float  # mean over outputs of their own perplexities
    tokens_per_output: float
    distinct_1: float  # distinct tokens among all tokens
    distinct_2: float  # distinct pairs of neighbours among all
    repeated: float  # share of 4-grams that stood before in the same output


def perplexity(
    pair: Pair, prompts: Sequence[Tokens], outputs: Sequence[Tokens], places: Sequence[str] = ()
) -> Perplexity:
    """Score outputs under the target of a pair.

    Args:
        prompts: token ids; at least one each. Outputs of equal prompts are resampled together.
        outputs: new token ids of each prompt, end token included if it was generated. Empty ones are refused.
        places: where each output stands, for errors.

    Source: arXiv 2407.09722 (the authors' measure is `perplexity`).
    """
    return summary(log_likelihoods(pair, prompts, outputs, places), outputs, prompts)


def summary(logp: Sequence[float], outputs: Sequence[Tokens], prompts: Sequence[Tokens] | None = None) -> Perplexity:
    """From the log-likelihood of each output, in nats. Without `prompts` every output has a prompt of its own."""
    if not outputs:
        raise BadPrompt("there are no outputs; there must be at least one to score")
    lengths = [len(one) for one in outputs]
    means = [total / length for total, length in zip(logp, lengths, strict=True)]
    count = len(outputs)
    tokens = sum(lengths)
    low, high = ratio_interval(*_by_prompt(means, prompts))
    singles = [token for one in outputs for token in one]
    pairs = [gram for one in outputs for gram in _grams(one, 2)]
    repeats = [again for one in outputs for again in _repeats(one)]
    return Perplexity(
        outputs=count,
        tokens=tokens,
        perplexity=exp(-sum(means) / count),
        low=exp(-high),
        high=exp(-low),
        by_token=exp(-sum(logp) / tokens),
        mean_of_outputs=sum(exp(-mean) for mean in means) / count,
        tokens_per_output=tokens / count,
        distinct_1=len(set(singles)) / len(singles),
        distinct_2=len(set(pairs)) / max(len(pairs), 1),
        repeated=sum(repeats) / max(len(repeats), 1),
    )


def exp(nats: float) -> float:
    """inf where a float does not reach."""
    return math.exp(nats) if nats < MOST_NATS else math.inf


def _by_prompt(means: list[float], prompts: Sequence[Tokens] | None) -> tuple[list[float], list[float]]:
    """Sum of `means` and number of outputs of each prompt."""
    named = range(len(means)) if prompts is None else map(tuple, prompts)
    sums: dict[Hashable, list[float]] = {}
    for name, mean in zip(named, means, strict=True):
        sums.setdefault(name, []).append(mean)
    return [sum(some) for some in sums.values()], [float(len(some)) for some in sums.values()]


def _grams(tokens: Tokens, size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


def _repeats(tokens: Tokens) -> list[bool]:
    """For each 4-gram whether it stood before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for gram in _grams(tokens, REPEAT):
        found.append(gram in seen)
        seen.add(gram)
    return found


def log_likelihoods(
    pair: Pair, prompts: Sequence[Tokens], outputs: Sequence[Tokens], places: Sequence[str] = ()
) -> list[float]:
    """log p of each output after its prompt, in nats, summed in float64. Outputs of similar length share a pass."""
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        _check(pair, prompt, output, number, f"{places[number]}: " if places else "")
    found = [0.0] * len(outputs)
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    for batch in _batches([len(text) for text in texts], LOGITS_PER_PASS // pair.target.vocab):
        logp = _logp_of([texts[one] for one in batch], pair)
        for one, row in zip(batch, logp, strict=True):
            start = len(prompts[one]) - 1
            length = len(outputs[one])
            found[one] = float(row[start : start + length].sum())
    return found


def _check(pair: Pair, prompt: Tokens, output: Tokens, number: int, place: str) -> None:
    if not prompt or not output:
        what = "prompt" if not prompt else "output"
        raise BadPrompt(
            f"{place}{what} {number} is empty; there must be at least one token to score, and one before it"
        )
    most = pair.target.max_positions
    if most is not None and len(prompt) + len(output) > most:
        raise BadPrompt(
            f"{place}output {number} ends at token {len(prompt) + len(output)}, but the model has {most} positions"
        )
    strange = [token for token in (*prompt, *output) if not 0 <= token < pair.target.vocab]
    if strange:
        raise BadPrompt(
            f"{place}output {number} holds token id {strange[0]}; the model knows 0 to {pair.target.vocab - 1}: was it "
            "made with another tokenizer?"
        )


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of texts that go together: at most `most` tokens, padding included, but at least one text."""
    batch: list[int] = []
    for one in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and lengths[one] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


@torch.inference_mode()
def _logp_of(texts: list[Tokens], pair: Pair) -> list[torch.Tensor]:
    """log p of each token but the first. Padding stands behind, where nothing that is scored looks."""
    longest = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    tokens = tokens.to(pair.target.device)
    mask = mask.to(pair.target.device)
    logits = pair.target_model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logp = logits.gather(2, tokens[:, 1:, None])[..., 0].double() - logits.logsumexp(2).double()
    return list(logp.cpu())
