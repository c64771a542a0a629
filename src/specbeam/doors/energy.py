"""Energy in joules from the machine's counters; None without a counter, never an estimate."""

import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """A meter of the energy of whole CPU packages and GPUs, with all their processes, during a `with` block.

    Use it as ``with EnergyMeter() as meter: ...``, and read `meter.joules` afterwards.

    Attributes:
        joules: energy of the block. None before the end of the block, without a counter, or if the machine has GPUs and
            the block was shorter than `least_s`.
    """

    joules: float | None = None

    def __init__(self, least_s: float = 0.0) -> None:
        """Make a meter.

        Args:
            least_s: seconds below which GPUs are not read at the end. Unless it is 0, a thread reads them at the start,
                during the work: a reading takes milliseconds, and the counters advance every tenth of a second.
        """
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
        start = self._start
        if time.perf_counter() - self._began >= self.least_s:
            if self._reader is not None:
                self._reader.join()
            now = now | _nvml()
            start = start | self._gpu_start
        elif _gpus():
            return  # the energy of the CPU packages alone would be misleading
        used = {name: value - start[name] for name, value in now.items() if name in start}
        used = {name: value for name, value in used.items() if value >= 0}  # ignore counters that wrapped around
        self.joules = sum(used.values()) if used else None


def _rapl() -> dict[str, float]:
    """Return the joules of each readable counter of a CPU package, by its path."""
    counters = {}
    for path in _rapl_paths(RAPL):
        try:
            counters[str(path)] = int(path.read_text()) * 1e-6
        except (OSError, ValueError):  # on most systems only root can read it
            continue
    return counters


@cache
def _rapl_paths(folder: Path) -> list[Path]:
    """Return the paths of the counters of all CPU packages. Cached: the search takes longer than reading them."""
    return [*folder.glob("*-rapl:?/energy_uj")]


def _nvml() -> dict[str, float]:
    """Return the joules of each GPU's counter, by the names gpu0, gpu1, ..."""
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
    """Return the handles of all GPUs; [] without a counter. Cached, because requests ask for them."""
    try:
        _library().nvmlInit()
        return [_library().nvmlDeviceGetHandleByIndex(index) for index in range(_library().nvmlDeviceGetCount())]
    except Exception:  # no library, driver or GPU
        return []


def joules_now() -> float | None:
    """Return the joules on the counters of the CPU packages, which wrap around; None if none can be read."""
    found = _rapl()
    return sum(found.values()) if found else None
