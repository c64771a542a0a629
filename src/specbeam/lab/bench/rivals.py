"""Contenders of `bench anchors` that the other benchmarks lack: llama.cpp, and programs that transcribe speech."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specbeam import Method, Pair, transcribe
from specbeam.apps.speech import read_audio
from specbeam.doors import Prompt
from specbeam.errors import BadCheckpoint, MissingPackage
from specbeam.lab.bench.outcome import Contender, Outcome

# By bits of the weights. Of four bits, the first form is faster on most processors, and the second is what most files have.
LLAMA_CPP_FORMS = {16: ("BF16",), 8: ("Q8_0",), 4: ("Q4_0", "Q4_K_S")}
_CONTEXT = 2048  # tokens of llama.cpp's cache
# Tests after which a text is decoded again. The contenders' defaults differ.
_WITHOUT_TESTS: Any = {"compression_ratio_threshold": None, "log_prob_threshold": None, "no_speech_threshold": None}


def in_type(pair: Pair, folder: str, dtype: torch.dtype) -> Pair:
    """Return a pair whose target is transformers' model in this type, for `baselines.transformers`."""
    kind: Any = type(pair.target_model)
    model = kind.from_pretrained(folder, dtype=dtype).eval()
    return dataclasses.replace(pair, target_model=model)


def llama_cpp(pair: Pair, file: Path, form: str, threads: int, max_new_tokens: int) -> Contender:
    """Return a contender that decodes greedily with llama.cpp, by llama-cpp-python.

    Args:
        file: the model as a GGUF file. llama.cpp converts it to `form`, in a temporary file.
        form: llama.cpp's name of a form of weights, from `LLAMA_CPP_FORMS`.
        threads: number of CPU threads.

    Raises:
        MissingPackage: llama-cpp-python is not installed.
        BadCheckpoint: llama.cpp cannot convert or read the file.
    """
    try:
        import llama_cpp as api
    except ImportError as error:
        raise MissingPackage("the rival needs llama-cpp-python: pip install 'specbeam[llamacpp]'") from error
    api.llama_log_set(_no_log(api), None)
    folder = tempfile.TemporaryDirectory(prefix="specbeam-")  # kept alive by `run`
    converted = Path(folder.name) / f"{form}.gguf"
    settings = api.llama_model_quantize_default_params()
    settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{form}")
    settings.allow_requantize = True
    settings.nthread = threads
    if api.llama_model_quantize(str(file).encode(), str(converted).encode(), settings) != 0:
        raise BadCheckpoint(f"llama.cpp could not convert {file} to {form}")
    model = api.Llama(
        str(converted), n_ctx=_CONTEXT, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    ends = ends_of(pair)

    def run(prompts: Sequence[Prompt], seed: int, _folder: Any = folder) -> Outcome:
        return Outcome([_written(model, ids_of(pair, prompt), ends, max_new_tokens) for prompt in prompts])

    return Contender(f"llama.cpp {form}", run)


@functools.cache
def _no_log(api: Any) -> Any:
    """Return a C function that writes no line of llama.cpp's log; it lives as long as the process."""
    return api.llama_log_callback(lambda level, text, data: None)


def _written(model: Any, prompt: list[int], ends: set[int], most: int) -> list[int]:
    """Return the new tokens of a text, end token included. The cache is empty before, as for the other contenders."""
    model.reset()
    found: list[int] = []
    for token in model.generate(prompt, top_k=1, temp=0.0):
        found.append(token)
        if token in ends or len(found) == most:
            break
    return found


def ids_of(pair: Pair, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt."""
    tokenizer: Any = pair.tokenizer
    return list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)


def ends_of(pair: Pair) -> set[int]:
    """Return the end tokens of a pair's target."""
    return set(pair.eos)


def transcribing(pair: Pair, method: Method, max_new_tokens: int) -> Contender:
    """Return a contender that transcribes files with specbeam, at temperature 0 and without tests of the text."""

    def run(recordings: Sequence[Any], seed: int) -> Outcome:
        found = transcribe(
            pair, [*recordings], method, temperature=0.0, seed=seed, max_new_tokens=max_new_tokens, **_WITHOUT_TESTS
        )
        return Outcome([ids_of(pair, one.text) for one in found])

    return Contender("specbeam", run)


def whisper_in_transformers(pair: Pair, folder: str, beams: int, max_new_tokens: int) -> Contender:
    """Return a contender that transcribes files of at most 30 seconds with transformers' `generate`."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    model: Any = pair.target_model
    dtype = str(model.dtype).removeprefix("torch.")

    def run(recordings: Sequence[Any], seed: int) -> Outcome:
        samples = [read_audio(recording) for recording in recordings]
        features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features.to(model.dtype)
        with torch.inference_mode():
            found = model.generate(
                features, num_beams=beams, do_sample=False, max_new_tokens=max_new_tokens, return_timestamps=True
            )
        texts = pair.tokenizer.batch_decode(found, skip_special_tokens=True)  # type: ignore[union-attr]
        return Outcome([ids_of(pair, text) for text in texts])

    return Contender(f"transformers {dtype}", run)


def faster_whisper(pair: Pair, folder: str, compute_type: str, threads: int, beams: int) -> Contender:
    """Return a contender that transcribes with faster-whisper, for which CTranslate2 converts the model.

    Raises `MissingPackage` if faster-whisper is not installed.
    """
    try:
        from ctranslate2.converters import TransformersConverter
        from faster_whisper import WhisperModel
    except ImportError as error:
        raise MissingPackage("the rival needs faster-whisper: pip install faster-whisper") from error
    place = tempfile.TemporaryDirectory(prefix="specbeam-")  # kept alive by `run`
    converted = str(Path(place.name) / "converted")
    TransformersConverter(folder, copy_files=["tokenizer.json", "preprocessor_config.json"]).convert(
        converted, quantization=compute_type
    )
    model = WhisperModel(converted, device="cpu", compute_type=compute_type, cpu_threads=threads)

    def run(recordings: Sequence[Any], seed: int, _place: Any = place) -> Outcome:
        return Outcome([ids_of(pair, _heard(model, recording, beams)) for recording in recordings])

    return Contender(f"faster-whisper {compute_type}", run)


def _heard(model: Any, recording: Any, beams: int) -> str:
    segments, _ = model.transcribe(
        str(recording), beam_size=beams, temperature=0.0, condition_on_previous_text=False, **_WITHOUT_TESTS
    )
    return "".join(segment.text for segment in segments)
