"""Joules from the machine's own counters; None where there is no counter, never a guess."""

from functools import cache
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """`with EnergyMeter() as meter: ...` then `meter.joules`: whole packages and GPUs, all processes included."""

    joules: float | None = None

    def __enter__(self) -> "EnergyMeter":
        self._start = _read()
        return self

    def __exit__(self, *error: object) -> None:
        used = {name: value - self._start[name] for name, value in _read().items() if name in self._start}
        used = {name: value for name, value in used.items() if value >= 0}  # a counter that wrapped says nothing
        self.joules = sum(used.values()) if used else None


def _read() -> dict[str, float]:
    return _rapl() | _nvml()


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
