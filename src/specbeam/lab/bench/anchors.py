"""Published models beside the programs that people run them with, each in its strongest setting, in interleaved rounds.

A row is a model, the bits of its weights, and a mode. Its contenders are all settings of specbeam and of its rivals with
weights of these bits; those of 16 bits may compute in float32. The row compares the fastest setting of specbeam with the
fastest setting of each rival, round by round.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specbeam import Pair, beam_search, greedy, load, speculative_beam_search, speculative_sampling
from specbeam.doors import Prompt
from specbeam.errors import MissingFile, MissingPackage, NotSupported
from specbeam.lab.bench.anchor_prompts import MESSAGES, QUESTIONS, sql_prompt
from specbeam.lab.bench.baselines import ctranslate2, transformers
from specbeam.lab.bench.outcome import Contender, specbeam
from specbeam.lab.bench.rivals import (
    LLAMA_CPP_FORMS,
    faster_whisper,
    in_type,
    llama_cpp,
    transcribing,
    whisper_in_transformers,
)
from specbeam.lab.bench.speed import Measurements, Spread, interleaved
from specbeam.lab.words import ANCHOR_BITS, ANCHOR_MODELS, ANCHOR_MODES, ANCHOR_RIVALS

CHAT = "chat"
SQL = "sql"
SPEECH = "speech"
KINDS = {"smollm2-135m": CHAT, "qwen2.5-coder-0.5b": SQL, "qwen2.5-coder-1.5b": SQL, "whisper-base": SPEECH}
DRAFTS = {"qwen2.5-coder-1.5b": "qwen2.5-coder-0.5b"}
OURS = "specbeam"
_GGUF = "gguf"  # folder of the GGUF files below that of the models
_LARGEST_IN_FLOAT32 = 1_000_000_000  # weights; copies of larger models in float32 are too large


@dataclass(frozen=True)
class AnchorPlan:
    """What is measured.

    Attributes:
        models: folder of the models' folders, and of `gguf/NAME.gguf`; None: hub ids, without llama.cpp.
        anchors: names of models, from `ANCHOR_MODELS`.
        bits: bits of the weights.
        modes: names of `ANCHOR_MODES`.
        rivals: names of `ANCHOR_RIVALS`.
        audio: recordings for models of speech.
        beams: number of beams of "beam_search".
        max_new_tokens: number of new tokens of a text.
        rows: number of prompts of a round.
        repeats: number of rounds that count; one before them warms up.
        threads: number of CPU threads of all contenders.
    """

    models: Path | None
    anchors: tuple[str, ...]
    bits: tuple[int, ...] = ANCHOR_BITS
    modes: tuple[str, ...] = ANCHOR_MODES
    rivals: tuple[str, ...] = ANCHOR_RIVALS
    audio: tuple[Path, ...] = ()
    beams: int = 4
    max_new_tokens: int = 64
    rows: int = 4
    repeats: int = 5
    threads: int = 1


@dataclass(frozen=True)
class Setting:
    """The speed of a contender.

    Attributes:
        program: `OURS`, or one of `ANCHOR_RIVALS`.
        name: the contender's name.
        rate: tokens per second, by round.
        ours: the speed of specbeam's fastest setting divided by this one, round by round.
        ours_by_processor: the same, by processor time.
    """

    program: str
    name: str
    rate: Spread
    ours: Spread
    ours_by_processor: Spread


@dataclass(frozen=True)
class AnchorRow:
    """A row of the table: a model, the bits of its weights and a mode.

    Attributes:
        best: specbeam's fastest setting, then the fastest setting of each rival.
        left_out: a sentence for each rival or setting that could not run.
        settings: all contenders.
    """

    anchor: str
    hub: str
    bits: int
    mode: str
    best: tuple[Setting, ...]
    left_out: tuple[str, ...]
    settings: tuple[Setting, ...]


def anchors(plan: AnchorPlan, on_row: Callable[[AnchorRow], None] | None = None) -> list[AnchorRow]:
    """Measure all rows of a plan, one model after the other.

    Args:
        on_row: called with each row as soon as it is measured.

    Raises `MissingFile` if a model or an audio file is missing.
    """
    torch.set_num_threads(plan.threads)
    found = []
    for anchor in plan.anchors:
        if KINDS[anchor] == SPEECH and not plan.audio:
            raise MissingFile(f"{anchor} hears speech, and there is no recording; give one with --audio")
        for bits in plan.bits:
            for mode in plan.modes:
                row = _row(plan, anchor, bits, mode)
                gc.collect()  # the models of this row, before those of the next one are loaded
                found.append(row)
                if on_row is not None:
                    on_row(row)
    return found


def _row(plan: AnchorPlan, anchor: str, bits: int, mode: str) -> AnchorRow:
    """Measure a row."""
    entries, left_out = _entries(plan, anchor, bits, mode)
    prompts = _prompts(plan, anchor, entries.pair)
    contenders = [contender for _, contender in entries.found]
    batches = [[place] for place in range(len(prompts))]
    interleaved(contenders, prompts, batches[:1], 1)
    measured = interleaved(contenders, prompts, batches, plan.repeats)
    programs = [program for program, _ in entries.found]
    names = [contender.name for contender in contenders]
    settings = _settings(programs, names, measured)
    best = [_fastest(settings, program) for program in (OURS, *plan.rivals) if program in programs]
    return AnchorRow(anchor, ANCHOR_MODELS[anchor], bits, mode, tuple(best), tuple(left_out), tuple(settings))


def _settings(programs: Sequence[str], names: Sequence[str], measured: Sequence[Measurements]) -> list[Setting]:
    """Return the speeds of all contenders, beside the fastest one of specbeam."""
    own = [one for program, one in zip(programs, measured, strict=True) if program == OURS]
    fastest = max(own, key=lambda one: median(one.rates))
    return [
        Setting(
            program,
            name,
            Spread.of(one.rates),
            Spread.of([ours / rate for ours, rate in zip(fastest.rates, one.rates, strict=True)]),
            Spread.of([ours / rate for ours, rate in zip(fastest.processor_rates, one.processor_rates, strict=True)]),
        )
        for program, name, one in zip(programs, names, measured, strict=True)
    ]


def _fastest(settings: Sequence[Setting], program: str) -> Setting:
    return max((one for one in settings if one.program == program), key=lambda one: one.rate.median)


@dataclass(frozen=True)
class RowContenders:
    """The contenders of a row with the names of their programs, and specbeam's pair."""

    pair: Pair
    found: list[tuple[str, Contender]]


def _entries(plan: AnchorPlan, anchor: str, bits: int, mode: str) -> tuple[RowContenders, list[str]]:
    """Return the contenders of a row, and a sentence for each one that cannot run."""
    pair = load(_source(plan, anchor), **_rounding(bits))
    entries = RowContenders(pair, [])
    left_out = []
    for program, name, maker in _makers(plan, anchor, bits, mode, pair):
        try:
            entries.found.append((program, maker()))
        except (MissingPackage, MissingFile, NotSupported) as error:
            left_out.append(f"{name}: {error}")
    return entries, left_out


def _rounding(bits: int) -> dict[str, Any]:
    return {} if bits == 16 else {"quantize": f"int{bits}"}


def _source(plan: AnchorPlan, anchor: str) -> str:
    """Return the folder or hub id of a model."""
    if plan.models is None:
        return ANCHOR_MODELS[anchor]
    folder = plan.models / anchor
    if not folder.is_dir():
        raise MissingFile(
            f"there is no folder {folder}; give the models' folder with --models, or leave it out for hub ids"
        )
    return str(folder)


Makers = Iterator[tuple[str, str, Callable[[], Contender]]]


def _makers(plan: AnchorPlan, anchor: str, bits: int, mode: str, pair: Pair) -> Makers:
    """Yield program, name and maker of each contender of a row."""
    if KINDS[anchor] == SPEECH:
        yield from _makers_of_speech(plan, anchor, bits, mode, pair)
        return
    yield from _own_makers(plan, anchor, bits, mode, pair)
    source = _source(plan, anchor)
    options = {"max_new_tokens": plan.max_new_tokens}
    if "transformers" in plan.rivals and bits == 16:
        for dtype in (torch.bfloat16, torch.float32):
            name = f"transformers {str(dtype).removeprefix('torch.')}"
            if dtype == torch.float32 and _weights(pair) > _LARGEST_IN_FLOAT32:
                continue

            def of_transformers(dtype: torch.dtype = dtype, name: str = name) -> Contender:
                made = transformers(in_type(pair, source, dtype), mode, plan.beams, **options)
                return Contender(name, made.run)

            yield "transformers", name, of_transformers
    if "ctranslate2" in plan.rivals and bits in (16, 8):
        kind = "int8" if bits == 8 else "float32"

        def of_ctranslate2() -> Contender:
            whole = in_type(pair, source, torch.float32)
            made = ctranslate2(whole, mode, plan.beams, kind, plan.threads, **options)
            return Contender(f"ctranslate2 {kind}", made.run)

        yield "ctranslate2", f"ctranslate2 {kind}", of_ctranslate2
    if "llama.cpp" in plan.rivals and mode == "greedy":
        for form in LLAMA_CPP_FORMS[bits]:

            def of_llama_cpp(form: str = form) -> Contender:
                return llama_cpp(pair, _gguf_of(plan, anchor), form, plan.threads, plan.max_new_tokens)

            yield "llama.cpp", f"llama.cpp {form}", of_llama_cpp


def _weights(pair: Pair) -> int:
    return int(pair.target_model.num_parameters())


def _own_makers(plan: AnchorPlan, anchor: str, bits: int, mode: str, pair: Pair) -> Makers:
    """Yield the makers of specbeam's contenders: without drafts, and with the anchor's draft model."""
    options = {"max_new_tokens": plan.max_new_tokens}
    is_greedy = mode == "greedy"
    plain = greedy() if is_greedy else beam_search(plan.beams)
    yield OURS, "specbeam", lambda: specbeam(pair, "specbeam", plain, **options)
    if anchor in DRAFTS:
        drafted = speculative_sampling() if is_greedy else speculative_beam_search(plan.beams)
        law = {"temperature": 0} if is_greedy else {}

        def with_draft() -> Contender:
            draft = _source(plan, DRAFTS[anchor])
            both = load(_source(plan, anchor), draft, quantize_draft="int4", **_rounding(bits))
            return specbeam(both, "specbeam with drafts", drafted, **options, **law)

        yield OURS, "specbeam with drafts", with_draft


def _makers_of_speech(plan: AnchorPlan, anchor: str, bits: int, mode: str, pair: Pair) -> Makers:
    """Yield the makers of the contenders of a model of speech."""
    beams = plan.beams if mode == "beam_search" else 1
    source = _source(plan, anchor)
    method = beam_search(plan.beams) if mode == "beam_search" else greedy()
    yield OURS, "specbeam", lambda: transcribing(pair, method, plan.max_new_tokens)
    if "transformers" in plan.rivals and bits == 16:

        def of_transformers() -> Contender:
            whole = in_type(pair, source, torch.float32)
            return whisper_in_transformers(whole, source, beams, plan.max_new_tokens)

        yield "transformers", "transformers float32", of_transformers
    if "faster-whisper" in plan.rivals and bits in (16, 8):
        kind = "int8" if bits == 8 else "float32"
        yield (
            "faster-whisper",
            f"faster-whisper {kind}",
            lambda: faster_whisper(pair, source, kind, plan.threads, beams),
        )


def _gguf_of(plan: AnchorPlan, anchor: str) -> Path:
    """Return the GGUF file of a model. Raises `MissingFile` if there is none."""
    if plan.models is None:
        raise MissingFile(f"llama.cpp reads GGUF files; give --models with a file {_GGUF}/{anchor}.gguf")
    file = plan.models / _GGUF / f"{anchor}.gguf"
    if not file.is_file():
        raise MissingFile(f"there is no file {file}, which llama.cpp would read")
    return file


def _prompts(plan: AnchorPlan, anchor: str, pair: Pair) -> list[Prompt]:
    """Return the prompts of a round, or the recordings."""
    if KINDS[anchor] == SPEECH:
        return [str(path) for path in plan.audio[: plan.rows]]
    if KINDS[anchor] == SQL:
        return [sql_prompt(question) for question in QUESTIONS[: plan.rows]]
    tokenizer: Any = pair.tokenizer
    chats = [[{"role": "user", "content": message}] for message in MESSAGES[: plan.rows]]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
