"""What others do with the same model: transformers' own generate, and CTranslate2."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specbeam.bench.outcome import Contender, Outcome
from specbeam.errors import BadSetting, MissingPackage, NotSupported
from specbeam.generation import Prompt
from specbeam.pair import Pair

MODES = ("greedy", "sampling", "beam_search", "beam_sampling", "assisted", "assisted_greedy")
OF_DRAWS = ("temperature", "top_k", "top_p", "min_p")
OF_ALL = ("repetition_penalty", "min_new_tokens", "stop_strings", "streamer")


def transformers(pair: Pair, mode: str, beams: int = 4, **options: Any) -> Contender:
    """`generate` of transformers.

    Args:
        mode: one of `MODES`; "assisted" is its speculative sampling with the pair's draft, one prompt at a time.
        options: max_new_tokens, `OF_ALL`, and `OF_DRAWS` where it draws; all as for `specbeam.generate`.
    """
    if mode not in MODES:
        raise BadSetting(f"transformers/{mode} is not known; it is one of {', '.join(MODES)}")
    if pair.tokenizer is None:
        raise NotSupported("the baselines read text; give a tokenizer")
    draws = mode in ("sampling", "beam_sampling", "assisted")
    asked: dict[str, Any] = {"do_sample": draws, "num_beams": beams if mode.startswith("beam") else 1}
    if draws:
        asked |= {"top_k": 0} | {name: options[name] for name in OF_DRAWS if options.get(name)}
    asked |= {name: options[name] for name in OF_ALL if options.get(name)}
    if "stop_strings" in asked:
        asked["tokenizer"] = pair.tokenizer
    if mode.startswith("assisted"):
        if pair.draft_model is None:
            raise BadSetting(f"transformers/{mode} needs a draft model")
        asked["assistant_model"] = pair.draft_model
    most = options.get("max_new_tokens") or 64

    def run(prompts: Sequence[Prompt], seed: int) -> Outcome:
        torch.manual_seed(seed)
        groups = [[one] for one in prompts] if "assistant_model" in asked else [list(prompts)]
        return Outcome([tokens for group in groups for tokens in _generated(pair, group, most, asked)])

    return Contender(f"transformers {mode.replace('_', ' ')}" + (f" {beams}" if mode.startswith("beam") else ""), run)


def _generated(pair: Pair, prompts: list[Prompt], most: int, asked: dict[str, Any]) -> list[list[int]]:
    words: Any = pair.tokenizer
    words.padding_side = "left"
    starts = [_tokens_of(pair, one) for one in prompts]
    masks = [[1] * len(one) for one in starts]
    batch = words.pad({"input_ids": starts, "attention_mask": masks}, return_tensors="pt", padding=len(prompts) > 1).to(
        pair.target_model.device
    )
    with torch.inference_mode():
        found = pair.target_model.generate(**batch, max_new_tokens=most, **asked)
    ends = _ends(pair)
    fill = words.pad_token_id
    return [_until(row, ends, fill) for row in found[:, batch["input_ids"].shape[1] :].tolist()]


def _tokens_of(pair: Pair, prompt: Prompt) -> list[int]:
    words: Any = pair.tokenizer
    return list(words(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)


def _until(tokens: list[int], ends: set[int], fill: int | None) -> list[int]:
    """Up to and with the first end token; without what fills a row that a stop string has ended."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    length = len(tokens)
    while length > 0 and tokens[length - 1] == fill:
        length -= 1
    return tokens[:length]


def _ends(pair: Pair) -> set[int]:
    ends = pair.target_model.generation_config.eos_token_id
    if ends is None:
        ends = getattr(pair.tokenizer, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def ctranslate2(
    pair: Pair, mode: str, beams: int = 4, compute_type: str = "float32", threads: int | None = None, **options: Any
) -> Contender:
    """CTranslate2's generator on the target, converted once.

    Args:
        mode: "greedy", "sampling" or "beam_search".
        compute_type: of its weights and products: "float32", "int8", ...
        threads: None: as many as torch uses.
    """
    if mode not in ("greedy", "sampling", "beam_search"):
        raise BadSetting(f"ctranslate2/{mode} is not known; it is greedy, sampling or beam_search")
    try:
        from ctranslate2 import Generator
        from ctranslate2.converters import TransformersConverter
    except ImportError as error:
        raise MissingPackage("the baseline needs ctranslate2: pip install ctranslate2") from error
    words: Any = pair.tokenizer
    folder = tempfile.TemporaryDirectory(prefix="specbeam-")  # kept alive by `run`
    pair.target_model.save_pretrained(Path(folder.name) / "source")
    words.save_pretrained(Path(folder.name) / "source")
    goal = str(Path(folder.name) / "converted")
    TransformersConverter(str(Path(folder.name) / "source")).convert(goal, quantization=compute_type)
    engine = Generator(goal, compute_type=compute_type, intra_threads=threads or torch.get_num_threads())
    most = options.get("max_new_tokens") or 64
    asked: dict[str, Any] = {}
    if mode == "sampling":
        asked["sampling_topk"] = options.get("top_k") or 0
        asked["sampling_topp"] = options.get("top_p") or 1.0
        asked["sampling_temperature"] = options.get("temperature") or 1.0
    elif mode == "beam_search":
        asked["beam_size"] = beams
    ends = list(_ends(pair))

    def run(prompts: Sequence[Prompt], seed: int, _folder: Any = folder) -> Outcome:
        starts = [words.convert_ids_to_tokens(_tokens_of(pair, one)) for one in prompts]
        found = engine.generate_batch(
            starts, max_length=most, include_prompt_in_result=False, end_token=ends, return_end_token=True, **asked
        )
        return Outcome([list(one.sequences_ids[0]) for one in found])

    return Contender(
        f"ctranslate2 {compute_type} {mode.replace('_', ' ')}" + (f" {beams}" if mode == "beam_search" else ""), run
    )


MAKERS: dict[str, Callable[..., Contender]] = {"transformers": transformers, "ctranslate2": ctranslate2}
