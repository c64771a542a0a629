"""The state of a training on disk, from which a killed run resumes, and its curve."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from specbeam.core import whole, write_whole
from specbeam.doors import as_json
from specbeam.lab.train.trees import read_or_refuse

STATE_S = 60.0  # seconds between two states on disk
STATE = "state.pt"


def keep_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state of a training, atomically."""
    with whole(folder / STATE) as part, part.open("wb") as file:
        torch.save(state, file)


def resume_from(folder: Path, device: torch.device, restore: Callable[[dict[str, Any]], None]) -> bool:
    """Pass the state on disk to `restore`. Returns False without a state; raises `BadSetting` if it is broken."""
    path = folder / STATE
    if not path.exists():
        return False

    def restore_whole() -> None:
        with ZipFile(path) as records:  # torch does not check its checksums
            broken = records.testzip()
        if broken is not None:
            raise ValueError(f"the record {broken} is damaged")
        restore(torch.load(path, map_location=device, weights_only=True))

    read_or_refuse(path, restore_whole)
    return True


def write_curve(folder: Path, points: Sequence[Any]) -> None:
    """Write the curve of a training, a line of JSON per point (a dataclass)."""
    lines = [as_json(asdict(point)) for point in points]
    write_whole(folder / "curve.jsonl", ("\n".join(lines) + "\n").encode())
