"""The fastest arithmetic of a device."""

import torch

from specbeam.engines.cpu import tiles


def prefers_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices faster in bfloat16 than in float32: GPUs, and CPUs with tiles (AMX)."""
    return device.type == "cuda" or (device.type == "cpu" and tiles.available())
