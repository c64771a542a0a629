"""The likelihood of outputs of any decoder under the raw probabilities of the target, from one pass over each text.

Raw means temperature 1, no truncation and no logits processor, so that the outputs of all methods are scored alike. Low
perplexity alone proves little, because repetitive texts also have it. So length and repetition are reported as well,
and with references a task metric.
"""

import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from specbeam import Pair
from specbeam.doors import Settings, decoder_prompt, hears, source_of
from specbeam.engines import as_loaded, cache_argument
from specbeam.errors import BadPrompt, NotSupported
from specbeam.lab.evaluate.intervals import ratio_interval
from specbeam.models import EncoderDecoderLM

LOGITS_PER_PASS = 2**26  # keeps the memory of a pass below a few hundred megabytes
REPEAT = 4  # number of tokens that make a repetition
MOST_NATS = math.log(sys.float_info.max)  # the largest argument of exp

Tokens = list[int]
Known = dict[tuple[tuple[int, ...], tuple[int, ...]], float]  # log p of outputs, by prompt and output


@dataclass(frozen=True)
class Perplexity:
    """The scores of many outputs.

    Attributes:
        outputs: number of outputs.
        tokens: number of their tokens.
        perplexity: exp of minus the mean over outputs of the mean log p per token; every output has the same weight.
        low, high: the 95 % interval of `perplexity`, by bootstrap over prompts.
        by_token: exp of minus the mean log p over all tokens; every token has the same weight.
        mean_of_outputs: mean over outputs of their own perplexities.
        tokens_per_output: mean length.
        distinct_1: number of distinct tokens divided by the number of all tokens.
        distinct_2: number of distinct pairs of neighbouring tokens divided by the number of all such pairs.
        repeated: share of 4-grams that occurred before in the same output.
    """

    outputs: int
    tokens: int
    perplexity: float
    low: float
    high: float
    by_token: float
    mean_of_outputs: float
    tokens_per_output: float
    distinct_1: float
    distinct_2: float
    repeated: float


def perplexity(
    pair: Pair, prompts: Sequence[Tokens], outputs: Sequence[Tokens], places: Sequence[str] = ()
) -> Perplexity:
    """Score outputs under the target of a pair.

    Args:
        prompts: token ids, at least one each; of an encoder-decoder model its sources, and the decoder begins with the
            model's start token. Outputs of equal prompts are resampled together.
        outputs: new token ids after each prompt, with the end token if it was generated.
        places: file and line of each output, for errors.

    Raises:
        BadPrompt: there are no outputs, or a prompt or an output is empty, too long, or of another tokenizer.
        NotSupported: the model reads audio.

    Source: arXiv 2407.09722 (the authors' measure is `perplexity`).
    """
    return summary(log_likelihoods(pair, prompts, outputs, places), outputs, prompts)


def summary(logp: Sequence[float], outputs: Sequence[Tokens], prompts: Sequence[Tokens] | None = None) -> Perplexity:
    """Compute all scores from the log-likelihood of each output, in nats.

    Args:
        prompts: token ids of each output's prompt; None: every output has a different prompt.
    """
    if not outputs:
        raise BadPrompt("there are no outputs; there must be at least one to score")
    lengths = [len(output) for output in outputs]
    means = [total / length for total, length in zip(logp, lengths, strict=True)]
    count = len(outputs)
    tokens = sum(lengths)
    low, high = ratio_interval(*_by_prompt(means, prompts))
    singles = [token for output in outputs for token in output]
    pairs = [gram for output in outputs for gram in _grams(output, 2)]
    repeats = [is_repeat for output in outputs for is_repeat in _repeats(output)]
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
    """Return e to the power of `nats`, inf if that is larger than any float."""
    return math.exp(nats) if nats < MOST_NATS else math.inf


def _by_prompt(means: list[float], prompts: Sequence[Tokens] | None) -> tuple[list[float], list[float]]:
    """Return the sum of `means` and the number of outputs of each prompt."""
    keys = range(len(means)) if prompts is None else map(tuple, prompts)
    means_of: dict[Hashable, list[float]] = {}
    for key, mean in zip(keys, means, strict=True):
        means_of.setdefault(key, []).append(mean)
    sums = [sum(group) for group in means_of.values()]
    counts = [float(len(group)) for group in means_of.values()]
    return sums, counts


def _grams(tokens: Tokens, size: int) -> list[tuple[int, ...]]:
    """Return all runs of `size` neighbouring tokens."""
    return [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


def _repeats(tokens: Tokens) -> list[bool]:
    """Return for each 4-gram whether it occurred before."""
    seen: set[tuple[int, ...]] = set()
    repeats = []
    for gram in _grams(tokens, REPEAT):
        repeats.append(gram in seen)
        seen.add(gram)
    return repeats


def log_likelihoods(
    pair: Pair,
    prompts: Sequence[Tokens],
    outputs: Sequence[Tokens],
    places: Sequence[str] = (),
    known: Known | None = None,
) -> list[float]:
    """Return log p of each output after its prompt, in nats, summed in float64. Outputs of similar length share a pass.

    Takes the other arguments of `perplexity`, and raises its errors.

    Args:
        known: the outputs that are scored already; these are added. Methods often write the same text.
    """
    begins = prompts
    sources: Sequence[Tokens] | None = None
    if isinstance(pair.target, EncoderDecoderLM):
        if hears(pair):
            raise NotSupported(
                f"{pair.target.model_name} reads audio, but only outputs of models that read texts can be scored"
            )
        begins = [decoder_prompt(pair, Settings(), 0)] * len(prompts)
        sources = prompts
    else:
        _ = pair.forgetful_target  # raises an error for a target with memory
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        place = f"{places[number]}: " if places else ""
        _check(pair, prompt, output, len(begins[number]), number, place)
    known = {} if known is None else known
    keys = [(tuple(prompt), tuple(output)) for prompt, output in zip(prompts, outputs, strict=True)]
    numbers = {key: number for number, key in enumerate(keys) if key not in known}
    wanted = [*numbers.values()]
    texts = [[*begins[number], *outputs[number]] for number in wanted]
    for batch in batches_of([len(text) for text in texts], LOGITS_PER_PASS // pair.target.vocab):
        read = None if sources is None else [sources[wanted[which]] for which in batch]
        scored = score_tokens([texts[which] for which in batch], pair, read)
        for which, (logp, _) in zip(batch, scored, strict=True):
            number = wanted[which]
            start = len(begins[number]) - 1
            length = len(outputs[number])
            known[keys[number]] = float(logp[start : start + length].sum())
    return [known[key] for key in keys]


class PromptScorer:
    """A scorer of single outputs under a decoder-only target.

    It reads a prompt once for all outputs that follow it without another prompt between them, and scores equal ones once.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._prompt: Tokens = []
        self._states = DynamicCache()
        self._known: Known = {}

    @torch.inference_mode()
    def log_likelihood(self, prompt: Tokens, output: Tokens) -> float:
        """Return log p of an output after its prompt, in nats. Raises the errors of `perplexity`."""
        _check(self.pair, prompt, output, len(prompt), 0, "")
        key = (tuple(prompt), tuple(output))
        if key in self._known:
            return self._known[key]
        before = prompt[:-1]
        if prompt != self._prompt:
            self._prompt = []
            self._states = DynamicCache()
            if before:
                self._logits_after(before)
            self._prompt = list(prompt)
        logits = self._logits_after([prompt[-1], *output[:-1]])
        self._states.crop(-len(output))  # the number of tokens to remove
        chosen, _ = _chosen(logits, torch.tensor(output, device=logits.device))
        self._known[key] = float(chosen.sum())
        return self._known[key]

    def _logits_after(self, tokens: Tokens) -> torch.Tensor:
        """Return the logits of the rows of tokens, float32[tokens, vocab], and keep their keys and values."""
        model = self.pair.target_model
        ids = torch.tensor([tokens], device=self.pair.target.device)
        with as_loaded(model):
            found = model(input_ids=ids, **cache_argument(model, self._states), use_cache=True)
        logits: torch.Tensor = found.logits[0].float()
        return logits


def _check(pair: Pair, prompt: Tokens, output: Tokens, before: int, number: int, place: str) -> None:
    """Raise `BadPrompt` if the target cannot score an output.

    Args:
        before: number of tokens before the output.
    """
    if not prompt or not output:
        what = "prompt" if not prompt else "output"
        raise BadPrompt(
            f"{place}{what} {number} is empty; there must be at least one token to score, and one before it"
        )
    most = pair.target.max_positions
    if most is not None and before + len(output) > most:
        raise BadPrompt(
            f"{place}output {number} ends at token {before + len(output)}, but the model has {most} positions"
        )
    known = pair.target.vocab
    if isinstance(pair.target, EncoderDecoderLM):
        source_of(pair, prompt, number, [pair.target])  # checks its tokens
        prompt = []
    strange = [token for token in (*prompt, *output) if not 0 <= token < known]
    if strange:
        raise BadPrompt(
            f"{place}output {number} holds token id {strange[0]}; the model's vocabulary is 0 to {known - 1}: was it "
            "made with another tokenizer?"
        )


def batches_of(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the numbers of the texts of each batch: at most `most` tokens with padding, but at least one text."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and lengths[number] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def score_tokens(
    texts: list[Tokens], pair: Pair, sources: list[Tokens] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log p of each token but the first, float64[length - 1], and whether it is the likeliest, bool[length - 1].

    Padding comes after the texts, where no token that is scored attends to it.

    Args:
        sources: the encoder's input for each text; None: the target has no encoder.
    """
    tokens, mask = _padded(texts, pair)
    arguments = {"input_ids": tokens, "attention_mask": mask}
    if sources is not None:
        read, read_mask = _padded(sources, pair)
        arguments = {"input_ids": read, "attention_mask": read_mask, "decoder_input_ids": tokens}
    with as_loaded(pair.target_model):
        found = pair.target_model(**arguments, use_cache=False)
    logp, is_likeliest = _chosen(found.logits[:, :-1].float(), tokens[:, 1:])
    return list(zip(logp, is_likeliest, strict=True))


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of a token of each row, in float64 on the host, and whether it is the likeliest.

    Args:
        logits: float32[..., vocab].
        tokens: int64[...].
    """
    logits_of_tokens = logits.gather(-1, tokens[..., None])[..., 0]
    logp = logits_of_tokens.double() - logits.logsumexp(-1).double()
    return logp.cpu(), (logits.argmax(-1) == tokens).cpu()


def _padded(texts: list[Tokens], pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts and a mask with 0 at padding, both int64[texts, longest], on the target's device."""
    longest = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return tokens.to(pair.target.device), mask.to(pair.target.device)
