"""Joules from the machine's own counters; None where there is no counter, never a guess."""

import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """`with EnergyMeter() as meter: ...` then `meter.joules`: whole packages and GPUs, all processes included.

    Args:
        least_s: GPUs are left out of shorter runs, and read beside the work when it begins: they take milliseconds to tell,
            and count in tenths of a second.
    """

    joules: float | None = None

    def __init__(self, least_s: float = 0.0) -> None:
        self.least_s = least_s

    def __enter__(self) -> "EnergyMeter":
        self._began = time.perf_counter()
        self._start = _rapl()
        self._gpu_start: dict[str, float] = {}
        self._reader: threading.Thread | None = None
        if self.least_s == 0:
            self._read_gpus()
        elif _gpus():
            self._reader = threading.Thread(target=self._read_gpus, daemon=True)
            self._reader.start()
        return self

    def _read_gpus(self) -> None:
        self._gpu_start = _nvml()

    def __exit__(self, *error: object) -> None:
        now = _rapl()
        known = self._start
        if time.perf_counter() - self._began >= self.least_s:
            if self._reader is not None:
                self._reader.join()
            now = now | _nvml()
            known = known | self._gpu_start
        elif _gpus():
            return  # a part of what it took would mislead
        used = {name: value - known[name] for name, value in now.items() if name in known}
        used = {name: value for name, value in used.items() if value >= 0}  # a counter that wrapped says nothing
        self.joules = sum(used.values()) if used else None


def _rapl() -> dict[str, float]:
    counters = {}
    for path in RAPL.glob("*-rapl:?/energy_uj"):
        try:
            counters[str(path)] = int(path.read_text()) * 1e-6
        except (OSError, ValueError):  # most systems let only root read it
            continue
    return counters


def _nvml() -> dict[str, float]:
    counters = {}
    for index, handle in enumerate(_gpus()):
        try:
            counters[f"gpu{index}"] = _library().nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
        except _library().NVMLError:  # cards before Volta have no counter
            continue
    return counters


def _library() -> Any:
    import pynvml

    return pynvml


@cache
def _gpus() -> list[Any]:
    """Looked up once: a machine without GPUs would be asked anew at every request."""
    try:
        _library().nvmlInit()
        return [_library().nvmlDeviceGetHandleByIndex(index) for index in range(_library().nvmlDeviceGetCount())]
    except Exception:  # no library, no driver, no GPU: no counter
        return []
