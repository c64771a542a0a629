"""The memory that a process may use, from files as Linux writes them."""

import pytest

from specbeam.core import machine
from tests.support.machines import put_machine

FREE = {"meminfo": "MemTotal: 90000000 kB\nMemAvailable: 50000000 kB\nBuffers: 1 kB\n"}
NESTED = FREE | {"own": "0::/system.slice/specbeam.service\n"}
SERVICE = "groups/system.slice/specbeam.service/"
OLD = FREE | {"own": "7:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, float("inf")),
        (FREE, 51_200_000_000),
        (FREE | {"groups/memory.max": "max", "groups/memory.current": "7"}, 51_200_000_000),
        (FREE | {"groups/memory.max": "2000000000", "groups/memory.current": "500000000"}, 1_500_000_000),
        (
            FREE
            | {"groups/memory.max": "2000", "groups/memory.current": "500"}
            | {"groups/memory.stat": "anon 100\nfile 400\ninactive_file 300\n"},
            1800,
        ),
        (FREE | {"groups/memory.max": "2000", "groups/memory.current": "2500"}, 0),
        ({"groups/memory.max": "2000", "groups/memory.current": "500"}, 1500),
        (NESTED | {SERVICE + "memory.max": "4000", SERVICE + "memory.current": "1000"}, 3000),
        (
            NESTED
            | {SERVICE + "memory.max": "max", SERVICE + "memory.current": "1000"}
            | {"groups/system.slice/memory.max": "6000", "groups/system.slice/memory.current": "5000"},
            1000,
        ),
        (
            OLD
            | {"groups/memory/memory.limit_in_bytes": "9000", "groups/memory/memory.usage_in_bytes": "2000"}
            | {"groups/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n"},
            7500,
        ),
        (
            OLD
            | {"groups/memory/docker/ab/memory.limit_in_bytes": "9000"}
            | {"groups/memory/docker/ab/memory.usage_in_bytes": "1000"},
            8000,
        ),
        (FREE | {"groups/memory.max": "broken", "groups/memory.current": ""}, 51_200_000_000),
    ],
)
def test_free_memory_is_what_the_machine_and_all_groups_above_the_process_leave(tmp_path, monkeypatch, files, expected):
    put_machine(tmp_path, monkeypatch, files)
    assert machine.free_memory() == expected


def test_the_smallest_processor_quota_of_all_groups_holds(tmp_path, monkeypatch):
    quotas = {"groups/system.slice/cpu.max": "150000 100000", SERVICE + "cpu.max": "400000 100000"}
    put_machine(tmp_path, monkeypatch, NESTED | quotas)
    assert machine.processor_quota() == 1.5
