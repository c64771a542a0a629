"""A machine whose memory and limits are files of a test."""

from specbeam.core import machine


def put_machine(folder, monkeypatch, files):
    """Let `specbeam.core.machine` read these files: "meminfo", "own" (/proc/self/cgroup) and "groups/..." (/sys/fs/cgroup)."""
    for name, path in (("MEMORY", "meminfo"), ("OWN_GROUPS", "own"), ("GROUPS", "groups")):
        monkeypatch.setattr(machine, name, folder / path)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
