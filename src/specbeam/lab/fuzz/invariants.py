"""The invariants of an answer, for any models, method and options."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import specbeam
from specbeam import Generation, Method
from specbeam.doors import as_list, as_texts, warper_names
from specbeam.lab.fuzz.calls import RandomCall
from specbeam.lab.fuzz.worlds import World

CLOSE = 2e-3  # nats: sums of float32 logits in another order
_CHANGE_SCORES = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_eos_token_id", "forced_bos_token_id", "prefix_allowed_tokens_fn", "logits_processor", "min_new_tokens", "regex",
    "json_schema", "grammar",
)  # fmt: skip
_TRUNCATE = tuple(name for name in warper_names() if name != "temperature")


def broken_invariants(world: World, call: RandomCall, method: Method, answers: Sequence[Generation]) -> Iterator[str]:
    """Yield a sentence for each invariant that the answers of a call violate."""
    wanted = len(call.prompts) * call.options.get("num_return_sequences", 1)
    if len(answers) != wanted:
        yield f"{len(answers)} answers for {wanted}"
    for number, answer in enumerate(answers):
        for why in (
            *_of_tokens(world, call, answer),
            *_of_beams(call, method, answer),
            *_of_report(answer),
            *of_options(world, call, answer),
            *_of_scores(world, call, method, answer),
        ):
            yield f"answer {number}: {why}; tokens {answer.tokens}"
    caches = getattr(world.pair.target, "caches", None)
    if caches:
        yield f"the target still holds {len(caches)} caches"


def _of_tokens(world: World, call: RandomCall, answer: Generation) -> Iterator[str]:
    vocab = world.pair.target.vocab
    most = call.options["max_new_tokens"]
    strange = [token for token in answer.tokens if not isinstance(token, int) or not 0 <= token < vocab]
    if strange:
        yield f"token {strange[0]!r} is not in the vocabulary of {vocab}"
    if not 1 <= len(answer.tokens) <= most:
        yield f"{len(answer.tokens)} tokens, and max_new_tokens is {most}"
    ends = _ends(world, call)
    early = [token for token in answer.tokens[:-1] if token in ends]
    if early:
        yield f"end token {early[0]} is not the last one"
    least = min(call.options.get("min_new_tokens", 0), most)
    if call.options.get("forced_bos_token_id") in ends:  # which transformers obeys first
        least = 1
    may_end_early = "stop_strings" in call.options or "prefix_allowed_tokens_fn" in call.options
    if len(answer.tokens) < least and not may_end_early:
        yield f"ended after {len(answer.tokens)} tokens, and min_new_tokens is {least}"


def _ends(world: World, call: RandomCall) -> set[int]:
    given = call.options.get("eos_token_id")
    return set(world.pair.eos if given is None else as_list(given))


def _of_beams(call: RandomCall, method: Method, answer: Generation) -> Iterator[str]:
    beams = answer.beams
    if not any(beam.tokens == answer.tokens for beam in beams):
        yield "the answer is not among its beams"
    if len(beams) > method.beams:
        yield f"{len(beams)} beams, and the method has {method.beams}"
    if not all(math.isfinite(beam.score) for beam in beams):
        yield f"scores are not finite: {[beam.score for beam in beams]}"
    # Texts that the length limit cut off compete with finished ones, as in transformers; abandoned ones do not.
    at_limit = any(len(beam.tokens) == call.options["max_new_tokens"] for beam in beams if not beam.finished)
    places = [(not beam.finished and not at_limit, -beam.score) for beam in beams]
    has_form = any(name in call.options for name in ("regex", "json_schema", "grammar"))
    if places != sorted(places) and not has_form:
        yield f"beams are not in order: {[(beam.finished, beam.score) for beam in beams]}"
    distinct = {tuple(beam.tokens) for beam in beams}
    replaces = call.settings.get("replacement", False) or call.method in ("mtad", "mjsd", "mmtad")
    if len(distinct) < len(beams) and not replaces:
        yield "two beams are alike"


def _of_report(answer: Generation) -> Iterator[str]:
    report = answer.report
    if report.tokens != len(answer.tokens):
        yield f"the report counts {report.tokens} tokens"
    if report.target_passes < 1 or report.accepted < 0 or report.peak_kv_tokens < 0:
        yield f"the report counts {report.target_passes} passes, {report.accepted} accepted"
    if report.seconds < 0 or not report.law:
        yield f"the report says {report.seconds} s and law {report.law!r}"


def of_options(world: World, call: RandomCall, answer: Generation) -> Iterator[str]:
    """Yield what is wrong with an answer by the options of its call."""
    options = call.options
    forced = {options.get("forced_eos_token_id"), options.get("forced_bos_token_id")}
    banned = set(options.get("suppress_tokens", ())) - forced
    found = banned & set(answer.tokens)
    overruled = "prefix_allowed_tokens_fn" in options  # which transformers obeys first, if all it allows is banned
    if found and not overruled:
        yield f"suppressed token {min(found)} was written"
    stops = as_texts(options.get("stop_strings"))
    is_whole = answer.beams[0].finished and not any(stop in answer.text for stop in stops)
    if "regex" in options and is_whole and not re.fullmatch(options["regex"], answer.text):
        yield f"{answer.text!r} does not match {options['regex']!r}"
    if "json_schema" in options and is_whole:
        try:
            json.loads(answer.text)
        except ValueError:
            yield f"{answer.text!r} is not JSON"
    if stops and world.pair.tokenizer is not None:
        before = world.pair.tokenizer.decode(answer.tokens[:-1])
        early = [stop for stop in stops if stop in before]
        if early and "\ufffd" not in before:
            yield f"stop string {early[0]!r} is not at the end"


def _of_scores(world: World, call: RandomCall, method: Method, answer: Generation) -> Iterator[str]:
    """Compare scores with log-likelihoods from plain forwards of the model object, where nothing changes the law."""
    if not world.is_plain or any(name in call.options for name in _CHANGE_SCORES):
        return
    if method.search and any(name in call.options for name in (*_TRUNCATE, "temperature")):
        return
    penalty = call.options.get("length_penalty", 1.0)
    for beam in answer.beams[:2]:
        expected = log_likelihood(world, answer.prompt, beam.tokens) / len(beam.tokens) ** penalty
        if not abs(beam.score - expected) <= CLOSE * max(1.0, abs(expected)):
            yield f"score {beam.score} of {beam.tokens}, and plain forwards give {expected}"
            return


@torch.inference_mode()
def log_likelihood(world: World, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the log-likelihood of tokens after a prompt under the target's model object, in nats."""
    model: Any = world.pair.target_model
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    rows = logits.double().log_softmax(-1)
    return float(rows[torch.arange(len(tokens)), torch.tensor(tokens)].sum())


def differs_by_more_than_rounding(first: Sequence[Generation], second: Sequence[Generation], exact: bool) -> str:
    """Return why two answers to one call are not the same; "" if they are, or if a tie explains the difference.

    Args:
        exact: whether passes are bit-identical in both, so that no tie can explain a difference.
    """
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.tokens == other.tokens:
            continue
        if not exact and abs(one.beams[0].score - other.beams[0].score) <= CLOSE:
            continue
        return f"answer {number} is {other.tokens} and was {one.tokens}"
    return ""


def plain_method(method: Method) -> "specbeam.Method | None":
    """Return the method without drafts that a lossless method must equal at temperature 0, or None."""
    if method.search:
        return specbeam.beam_search(method.beams)
    return specbeam.greedy() if method.beams == 1 else None
