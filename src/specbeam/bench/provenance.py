"""Where figures come from: command, versions, commit, machine."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from specbeam import __version__


def provenance() -> dict[str, str]:
    """What somebody else needs to measure the same again."""
    return {
        "command": " ".join(["specbeam", *sys.argv[1:]]),
        "specbeam": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": _machine(),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _commit() -> str:
    """Of the checkout this runs from, if it is one."""
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


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
