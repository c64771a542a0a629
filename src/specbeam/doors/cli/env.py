"""The command `specbeam env`: the facts that a bug report needs."""

import importlib.metadata
import os
import platform
from pathlib import Path

from specbeam.core.machine import free_memory
from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.options import Json

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llvmlite", "triton", "typer", "fastapi",
    "llguidance", "xgrammar", "ctranslate2",
)  # fmt: skip
OURS = ("SPECBEAM_", "NUMBA_", "OMP_", "MKL_", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME")
SECRETS = ("KEY", "TOKEN", "SECRET")  # in names of variables whose values are not printed


class EnvArguments(Record):
    """Arguments of the command."""

    json: Json = False


def env(given: EnvArguments) -> int:
    """Print versions, processor, memory and caches, to paste into a bug report."""
    facts = {**_versions(), **_machine(), **_caches(), **_variables()}
    if given.json:
        print_json(facts)
        return 0
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")
    return 0


def _versions() -> dict[str, str]:
    """Return the versions of specbeam, Python and the packages."""
    import specbeam

    found = {"specbeam": f"{specbeam.__version__}, {Path(specbeam.__file__).parent}"}
    found["python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> dict[str, str]:
    """Return the system, the processor, and the instructions that steps are compiled for."""
    import torch

    from specbeam.core import compiling
    from specbeam.lab.bench.provenance import provenance

    found = {"system": platform.platform(), "machine": provenance()["machine"]}
    found["memory"] = _memory()
    found["gpu"] = "none"
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    found["compiled steps"] = "off: numba is missing, too old or disabled"
    if compiling.AVAILABLE:
        from specbeam.core.compiling.compiler import most_threads
        from specbeam.core.compiling.processor import features, lanes

        names = sorted(
            name for name in features() if name.startswith(("avx", "amx", "neon", "dotprod", "i8mm", "bf16"))
        )
        found["compiled steps"] = f"on, {most_threads()} threads, {lanes(features())} numbers in a register"
        found["features"] = " ".join(names)
    return found


def _memory() -> str:
    """Return the memory of the machine, and what this process may still take of it."""
    free = f"{free_memory() / 1e9:.1f} GB free for this process"
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(getattr(os, "sysconf_names", ())):
        return free
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB, {free}"


def _caches() -> dict[str, str]:
    """Return the folders of cache files, and the code in them and in the wheel."""
    from specbeam.core import compiling
    from specbeam.core.caches.folders import cache_folder

    found = {"measurements": str(cache_folder("figures") or "no usable folder: each process measures again")}
    if not compiling.AVAILABLE:
        return found
    from specbeam.core.compiling.code_cache import code_folder
    from specbeam.core.compiling.shipped import CLASSES, class_here

    folder = code_folder()
    found["compiled code"] = "no usable folder: each process compiles again"
    if folder is not None:
        sizes = [path.stat().st_size for path in folder.glob("*.nbc")]
        found["compiled code"] = f"{folder}: {len(sizes)} forms, {sum(sizes) / 1e6:.0f} MB"
    processors = class_here()
    found["code of the wheel"] = "none for this processor" if processors is None else f"for {processors.name}"
    if not any(one.archive.exists() for one in CLASSES):
        found["code of the wheel"] = "none: this is not a wheel with compiled code, so steps are compiled once"
    return found


def _variables() -> dict[str, str]:
    """Return the environment variables that change what specbeam does."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(OURS):
            is_secret = any(word in name for word in SECRETS)
            found[name] = "(set)" if is_secret else os.environ[name]
    return found
