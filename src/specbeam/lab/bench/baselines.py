"""Baselines that run the same target model: transformers' own `generate`, and CTranslate2."""

import copy
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specbeam import Pair
from specbeam.doors import Prompt, config_names, warper_names
from specbeam.engines import family_of, reads_sources
from specbeam.errors import BadSetting, MissingPackage, NotSupported
from specbeam.lab.bench.outcome import Contender, Outcome

MODES = ("greedy", "sampling", "beam_search", "beam_sampling", "assisted", "assisted_greedy")
SAMPLING_OPTIONS = warper_names()  # options of modes that sample
_LENGTHS = ("max_new_tokens", "max_length")  # every mode takes the first of these
COMMON_OPTIONS = (*(name for name in config_names() if name not in _LENGTHS), "streamer")  # options of every mode
DEFAULT_NEW_TOKENS = 64
SCALED_IF_TIED = ("t5", "mt5", "umt5")  # model types whose logits CTranslate2 scales if the configuration says "tied"


def transformers(pair: Pair, mode: str, beams: int = 4, **options: Any) -> Contender:
    """Return a contender that answers with transformers' `generate`.

    Args:
        mode: one of `MODES`. "assisted" is transformers' speculative sampling with the draft model of the pair, one
            prompt at a time; "assisted_greedy" is the same without sampling.
        beams: number of beams in the modes that have beams.
        options: max_new_tokens (64 if it is not given), the `COMMON_OPTIONS`, and the `SAMPLING_OPTIONS` if the mode
            samples. They mean the same as in `specbeam.generate`; others are ignored.

    Raises:
        BadSetting: the mode is unknown, or needs a draft model that the pair does not have.
        NotSupported: the pair has no tokenizer.
    """
    if mode not in MODES:
        raise BadSetting(f"transformers/{mode} is not known; it is one of {', '.join(MODES)}")
    if pair.tokenizer is None:
        raise NotSupported("the baselines read text; give a tokenizer")
    samples = mode in ("sampling", "beam_sampling", "assisted") and options.get("temperature") != 0
    arguments: dict[str, Any] = {"do_sample": samples, "num_beams": beams if mode.startswith("beam") else 1}
    if samples:
        if pair.target_model.generation_config.top_k is None:
            arguments["top_k"] = 0  # transformers' default is 50
        arguments |= {name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None}
    arguments |= {name: options[name] for name in COMMON_OPTIONS if options.get(name) not in (None, [])}
    if "stop_strings" in arguments:
        arguments["tokenizer"] = pair.tokenizer
    if mode.startswith("assisted"):
        if pair.draft_model is None:
            raise BadSetting(f"transformers/{mode} needs a draft model")
        sizes = [model.config.get_text_config().vocab_size for model in (pair.target_model, pair.draft_model)]
        if sizes[0] != sizes[1]:
            raise NotSupported(
                f"transformers/{mode} needs a draft with the target's vocabulary size, but they have {sizes[1]} and "
                f"{sizes[0]}; leave it out"
            )
        arguments["assistant_model"] = pair.draft_model
    arguments["max_new_tokens"] = options.get("max_new_tokens") or DEFAULT_NEW_TOKENS

    def run(prompts: Sequence[Prompt], seed: int) -> Outcome:
        torch.manual_seed(seed)
        one_at_a_time = "assistant_model" in arguments
        batches = [[prompt] for prompt in prompts] if one_at_a_time else [list(prompts)]
        return Outcome([tokens for batch in batches for tokens in _answers(pair, batch, arguments)])

    name = f"transformers {mode.replace('_', ' ')}"
    if mode.startswith("beam"):
        name += f" {beams}"
    return Contender(name, run)


def _answers(pair: Pair, prompts: list[Prompt], arguments: dict[str, Any]) -> list[list[int]]:
    """Return the new tokens of each prompt, from one call of transformers' `generate`."""
    tokenizer: Any = pair.tokenizer
    reads = reads_sources(pair.target_model)
    tokenizer.padding_side = "right" if reads else "left"
    starts = [_tokens_of(pair, prompt) for prompt in prompts]
    masks = [[1] * len(start) for start in starts]
    batch = tokenizer.pad(
        {"input_ids": starts, "attention_mask": masks}, return_tensors="pt", padding=len(prompts) > 1
    ).to(pair.target_model.device)
    with torch.inference_mode():
        sequences = pair.target_model.generate(**batch, **arguments)
    ends = _end_tokens(pair)
    before = 1 if reads else batch["input_ids"].shape[1]  # the decoder's start token, or the prompt
    new_tokens = sequences[:, before:].tolist()
    return [_without_padding(row, ends, tokenizer.pad_token_id) for row in new_tokens]


def _tokens_of(pair: Pair, prompt: Prompt) -> list[int]:
    tokenizer: Any = pair.tokenizer
    return list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)


def _without_padding(tokens: list[int], ends: set[int], padding: int | None) -> list[int]:
    """Return the tokens of an answer up to and including its first end token.

    If there is no end token, the padding after the answer is removed: a row that a stop string has ended is padded too.
    """
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    length = len(tokens)
    while length > 0 and tokens[length - 1] == padding:
        length -= 1
    return tokens[:length]


def _end_tokens(pair: Pair) -> set[int]:
    """Return the end tokens of the target's generation config; if it names none, the tokenizer's."""
    ends = pair.target_model.generation_config.eos_token_id
    if ends is None:
        ends = getattr(pair.tokenizer, "eos_token_id", None)
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def ctranslate2(
    pair: Pair, mode: str, beams: int = 4, compute_type: str = "float32", threads: int | None = None, **options: Any
) -> Contender:
    """Return a contender that answers with CTranslate2. The target is converted for it here, once.

    Sources of any length are read whole, and texts begin with the model's forced first token, if it has one.

    Args:
        mode: "greedy", "sampling" or "beam_search".
        beams: number of beams of "beam_search".
        compute_type: type of the weights and products in CTranslate2: "float32", "int8", ...
        threads: number of CPU threads; None: torch's number.
        options: max_new_tokens (64 if it is not given); for "sampling" also top_k, top_p and temperature.

    Raises:
        BadSetting: the mode is unknown.
        MissingPackage: ctranslate2 is not installed.
    """
    if mode not in ("greedy", "sampling", "beam_search"):
        raise BadSetting(f"ctranslate2/{mode} is not known; it is greedy, sampling or beam_search")
    try:
        from ctranslate2 import Generator, Translator
    except ImportError as error:
        raise MissingPackage("the baseline needs ctranslate2: pip install ctranslate2") from error
    tokenizer: Any = pair.tokenizer
    folder = tempfile.TemporaryDirectory(prefix="specbeam-")  # kept alive by `run`
    converted = _converted(pair, Path(folder.name), compute_type)
    reads = reads_sources(pair.target_model)
    kind = Translator if reads else Generator
    engine = kind(converted, compute_type=compute_type, intra_threads=threads or torch.get_num_threads())
    max_new_tokens = options.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    arguments: dict[str, Any] = {"end_token": list(_end_tokens(pair)), "return_end_token": True, "beam_size": 1}
    if mode == "sampling":
        arguments["sampling_topk"] = options.get("top_k") or 0
        arguments["sampling_topp"] = options.get("top_p") or 1.0
        arguments["sampling_temperature"] = options.get("temperature") or 1.0
    elif mode == "beam_search":
        arguments["beam_size"] = beams
    forced = pair.target_model.generation_config.forced_bos_token_id
    first = [] if forced is None else tokenizer.convert_ids_to_tokens([forced])

    def run(prompts: Sequence[Prompt], seed: int, _folder: Any = folder) -> Outcome:
        starts = [tokenizer.convert_ids_to_tokens(_tokens_of(pair, prompt)) for prompt in prompts]
        if reads:
            # 0 means any input length: by default, longer sources are cut.
            lengths = {"max_input_length": 0, "min_decoding_length": 0, "max_decoding_length": max_new_tokens}
            results = engine.translate_batch(starts, target_prefix=[first] * len(starts), **lengths, **arguments)
            return Outcome([tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results])
        results = engine.generate_batch(starts, max_length=max_new_tokens, include_prompt_in_result=False, **arguments)
        return Outcome([list(result.sequences_ids[0]) for result in results])

    name = f"ctranslate2 {compute_type} {mode.replace('_', ' ')}"
    if mode == "beam_search":
        name += f" {beams}"
    return Contender(name, run)


def _converted(pair: Pair, folder: Path, compute_type: str) -> str:
    """Convert the target of a pair for CTranslate2 in this folder, and return the folder of the converted model."""
    from ctranslate2.converters import TransformersConverter

    model: Any = pair.target_model
    reads = reads_sources(model)
    source = folder / "source"
    model.save_pretrained(source, state_dict=_weights_to_convert(model))
    written: Any = copy.deepcopy(pair.tokenizer)
    if reads and written.unk_token is None:
        written.unk_token = written.eos_token  # CTranslate2 cannot read the converted model without one
    written.save_pretrained(source)
    converted = folder / "converted"
    TransformersConverter(str(source)).convert(str(converted), quantization=compute_type)
    start = model.generation_config.decoder_start_token_id
    if reads and start is not None:
        path = converted / "config.json"
        numbers = json.loads(path.read_text(encoding="utf-8"))
        if numbers.get("decoder_start_token") is None:  # the converter does not set it for mBART
            numbers["decoder_start_token"] = written.convert_ids_to_tokens(start)
            path.write_text(json.dumps(numbers), encoding="utf-8")
    return str(converted)


def _weights_to_convert(model: Any) -> dict[str, torch.Tensor] | None:
    """Return weights with which the logits of a model are the same in CTranslate2; None: the model's weights.

    CTranslate2 divides the logits of any T5, mT5 or umT5 with a "tied" configuration by the root of the width. transformers
    marks all of them as tied, and divides the logits of some. For the others, the weight of the last norm compensates.
    """
    family = family_of(model)
    if family is None or family.kind not in SCALED_IF_TIED or not model.config.tie_word_embeddings:
        return None
    divisor = family.numbers(model.config).logits_divisor
    weights: dict[str, torch.Tensor] = model.state_dict()
    name = "decoder.final_layer_norm.weight"
    weights[name] = weights[name] * (math.sqrt(model.config.d_model) / divisor)
    return weights


MAKERS: dict[str, Callable[..., Contender]] = {"transformers": transformers, "ctranslate2": ctranslate2}
