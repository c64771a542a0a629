"""Which arithmetic a device runs fastest."""

import torch

from specbeam.engines.cpu import tiles


def prefers_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of bfloat16 faster than of float32: GPUs, and CPUs with tiles."""
    return device.type == "cuda" or (device.type == "cpu" and tiles.available())
