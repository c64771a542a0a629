"""What searches are measured on: problems, the exact value of a beginning of a solution, and what counts as solved."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TaskName = Literal["countdown", "sums"]


@dataclass(frozen=True)
class Task:
    """Problems that are solved in steps, a line for each."""

    prompt: Callable[[random.Random, Any], str]  # a problem for a model with this tokenizer
    value: Callable[[str], float]  # of a prompt with its steps so far: 1 if these are right, 0 if not
    is_solved: Callable[[str], bool]  # of a prompt with all of its steps
    step_tokens: int  # the most tokens of a step
    max_new_tokens: int
    temperature: float

    def prompts(self, rng: random.Random, count: int, tokenizer: Any) -> list[str]:
        """Return up to `count` different problems."""
        return list({self.prompt(rng, tokenizer): None for _ in range(count)})


def task_of(name: TaskName) -> Task:
    """Return the task of this name."""
    import countdown
    import sums

    return {"countdown": countdown.TASK, "sums": sums.TASK}[name]


def models_in(model: Path) -> tuple[Path, Path | None]:
    """Return the target and the draft that train.py has written to a folder; or the folder itself, without a draft."""
    return (model / "target", model / "draft") if (model / "target").is_dir() else (model, None)
