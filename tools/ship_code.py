"""Compile the machine code of a wheel: `make wheel`, or `python tools/ship_code.py` for the archives alone.

Decodes with usual models and methods, once for each class of processors whose code this processor runs, and writes a file
for each (src/specbeam/core/compiling/shipped_code). That takes some minutes for a class.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from typing import Any

from specbeam.core.compiling.processor import features
from specbeam.core.compiling.shipped import CLASSES, Processors

DECODERS = ("llama", "qwen2", "qwen3", "mistral")  # whose configurations have the same names
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# Threads help with models of this size,
HELPED = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 2048}
# and models of this size stay in their files.
MAPPED = {"num_hidden_layers": 5, "hidden_size": 2048, "intermediate_size": 8192}
SHAPES = {
    **dict.fromkeys(DECODERS, SMALL | {"num_hidden_layers": 2}),
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "marian": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "decoder_start_token_id": 0,
    },
    "t5": {"d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
READERS = ("marian", "t5")
ROUNDINGS: tuple[dict[str, Any], ...] = ({}, {"quantize": "int8"}, {"quantize": "int4"})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
SENTENCES = ["Die Katze schläft.", "Wo ist mein Hut?", "Guten Morgen!"]


def main() -> int:
    """Compile the code of all classes of processors that this one runs, or of a single one in this process."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", help="compile for this class, for which numba is set up")
    only = arguments.parse_args().only
    classes = {one.label: one for one in CLASSES}
    if only is not None:
        compile_for(classes[only])
        return 0
    for one in CLASSES:
        if one.needs <= features() and one.machines[0] == os.uname().machine:
            with tempfile.TemporaryDirectory(prefix="specbeam-code-") as caches:
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, __file__, "--only", one.label], check=True, env=environment(one, caches)
                )
                size = one.archive.stat().st_size / 1e6
                print(f"{one.archive}: {size:.1f} MB, {time.perf_counter() - began:.0f} s", flush=True)
        else:
            print(f"{one.label}: this processor does not run its code, which is left out", flush=True)
    return 0


def environment(processors: Processors, caches: str) -> dict[str, str]:
    """Return the environment of a process that compiles for a class of processors."""
    return {
        **os.environ,
        "NUMBA_CPU_NAME": processors.name,
        "NUMBA_CPU_FEATURES": processors.more,
        "NUMBA_CACHE_DIR": caches,
        "SPECBEAM_CACHE": caches,
        "SPECBEAM_COMPILERS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def compile_for(processors: Processors) -> None:
    """Decode usual texts, and write all code that this compiles to the archive of a class of processors."""
    from specbeam.core.caches.files import digest_of
    from specbeam.core.compiling.code_cache import CodeCache, content_of

    found: dict[str, bytes] = {}
    save = CodeCache.save_overload

    def save_and_keep(cache: CodeCache, sig: Any, data: Any) -> None:
        (name, key) = cache.shipped_place(sig, data.codegen, processors)
        content = content_of(data)
        found[name] = digest_of(key, content) + b"\n" + content
        save(cache, sig, data)

    CodeCache.save_overload = save_and_keep  # type: ignore[method-assign]
    for text in texts():
        print(f"  {text}: {len(found)} forms", flush=True)
    processors.archive.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(processors.archive, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(found):
            archive.writestr(zipfile.ZipInfo(name), found[name], zipfile.ZIP_DEFLATED)


def texts() -> Iterator[str]:
    """Decode usual texts; yield what was decoded."""
    import specbeam as sb

    bundled = sb.load("bundled")
    for method in methods():
        draws = method.name not in ("greedy", "beam_search", "speculative_beam_search")
        for options in ({}, {"top_k": 10, "top_p": 0.9}) if draws else ({},):
            for sentences in (SENTENCES[:1], SENTENCES):
                sb.generate(bundled, sentences, method, max_new_tokens=12, batch_size=3, seed=1, **options)
        yield f"bundled pair, {method.name}"
    for kind in [kind for kind in SHAPES if kind not in READERS]:
        model = model_of(kind, SHAPES[kind])
        for rounding in ROUNDINGS:
            decode_all(model, rounding)
            yield f"{kind}, {rounding}"
        decode_all(model_of(kind, SHAPES[kind]).bfloat16(), {})
        yield f"{kind}, bfloat16"
    for name, sizes in (("helped", HELPED), ("mapped", MAPPED)):
        with tempfile.TemporaryDirectory(prefix="specbeam-model-") as folder:
            model_of("llama", SMALL | sizes).bfloat16().save_pretrained(folder)
            for rounding in ROUNDINGS:
                decode_all(folder, rounding)
                yield f"{name} llama, {rounding}"
    for kind in READERS:
        decode_all(model_of(kind, SHAPES[kind]), {})
        yield kind


def methods() -> list[Any]:
    """Return the usual methods."""
    import specbeam as sb

    return [
        sb.dsbd(),
        sb.dsbd(width="dynamic"),
        sb.beam_sampling(4),
        sb.beam_search(4),
        sb.speculative_beam_search(4),
        sb.greedy(),
        sb.sampling(),
        sb.speculative_sampling(),
        sb.prompt_lookup(),
    ]


def model_of(kind: str, sizes: dict[str, Any]) -> Any:
    """Return a random model of these sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(kind, **COMMON, **sizes)
    return (AutoModelForSeq2SeqLM if kind in READERS else AutoModelForCausalLM).from_config(config).eval()


def decode_all(model: Any, rounding: dict[str, Any]) -> None:
    """Decode one prompt and several with a model; unless it is rounded, it drafts for itself in 8 bits."""
    import specbeam as sb

    pair = sb.load(model, None if rounding else "int8", tokenizer=False, **rounding)
    drafting = [] if pair.draft is None else [sb.dsbd(), sb.speculative_sampling()]
    for method in (sb.greedy(), sb.beam_search(4), *drafting):
        for prompts in (PROMPTS[:1], PROMPTS):
            sb.generate(pair, prompts, method, max_new_tokens=8, batch_size=3, seed=1)


if __name__ == "__main__":
    sys.exit(main())
