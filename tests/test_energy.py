"""Counters are read, and nothing waits for slow ones."""

import threading
import time

import pytest

from specbeam.doors import energy
from specbeam.doors.energy import EnergyMeter


@pytest.fixture
def slow_gpu(monkeypatch):
    """A GPU that has used 5 J more each time it is asked, and says so once it may."""
    asked, may = [], threading.Event()

    def nvml():
        may.wait()
        asked.append(0)
        return {"gpu0": 5.0 * len(asked)}

    monkeypatch.setattr(energy, "_gpus", lambda: [object()])
    monkeypatch.setattr(energy, "_nvml", nvml)
    yield may
    may.set()  # a reader may still be waiting


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package counter that says 1 J."""
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    (folder / "energy_uj").write_text("1000000")
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    return folder / "energy_uj"


def test_a_machine_without_gpus_reads_its_packages(package, monkeypatch):
    monkeypatch.setattr(energy, "_gpus", list)
    for least_s in (0.0, 60.0):
        package.write_text("1000000")
        with EnergyMeter(least_s) as meter:
            package.write_text("3500000")
        assert meter.joules == pytest.approx(2.5)


def test_packages_and_gpus_are_added(package, slow_gpu):
    slow_gpu.set()
    with EnergyMeter() as meter:
        package.write_text("3000000")
    assert meter.joules == pytest.approx(2 + 5)


def test_a_short_run_does_not_wait_for_a_gpu(slow_gpu):
    with EnergyMeter(least_s=60.0) as meter:
        pass
    assert not slow_gpu.is_set()
    assert meter.joules is None


def test_a_long_run_is_told_from_its_beginning(slow_gpu):
    slow_gpu.set()
    with EnergyMeter(least_s=0.01) as meter:
        time.sleep(0.02)
    assert meter.joules == pytest.approx(5)


def test_a_counter_that_wrapped_says_nothing(package, monkeypatch):
    monkeypatch.setattr(energy, "_gpus", list)
    with EnergyMeter() as meter:
        package.write_text("5")
    assert meter.joules is None
