"""The provenance of figures: command, versions, commit and machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from specbeam import __version__


def provenance() -> dict[str, str]:
    """Return the facts needed to repeat a measurement, as texts by name."""
    return {
        "command": shlex.join(["specbeam", *sys.argv[1:]]),
        "specbeam": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": _machine(),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",  # Windows has none
    }


def _commit(source: Path = Path(__file__)) -> str:
    """Return the commit of the checkout that contains `source`; "none" if it is not a checkout of specbeam.

    An installed specbeam may lie in an environment inside the repository of another project.
    """
    folder = source.resolve().parent
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        ours = top / "src" / "specbeam" in folder.parents and (top / "pyproject.toml").is_file()
        return _git(folder, "describe", "--always", "--dirty") if ours else "none"
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
