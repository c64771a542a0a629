"""Training data: trees that the target drew below prompts, with some prompts held out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbeam import Pair
from specbeam.core import weights_key
from specbeam.errors import BadPrompt, BadSetting, warn
from specbeam.lab.train.drawing import DrawPlan, Prompt, draw_files, drawn_trees
from specbeam.lab.train.folders import digest, keep_options, prefixed, work_folder
from specbeam.lab.train.trees import Trees
from specbeam.models import OWN_ROUNDINGS

MOST_HELD_OUT = 512  # prompts

Report = Callable[[str, int, int], None]  # called with the current stage, the amount done and the total


@dataclass(frozen=True)
class Lessons:
    """Trees of a target.

    Attributes:
        files: files of trees to learn from.
        held_out: trees of other prompts, for checks.
    """

    files: list[Path]
    held_out: Trees


def drawn_lessons(
    pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan, seed: int, folder: Path, report: Report
) -> Lessons:
    """Have the target draw trees below prompts into a folder; existing trees are not drawn again.

    At most 512 prompts, or a tenth, are held out.

    Args:
        seed: seed of the choice of held-out prompts.
        report: called with "drawing", the number of prompts done, and of all.

    Raises:
        BadSetting: there are fewer than two distinct prompts, or the folder holds trees made with other settings.
        BadPrompt: the target can continue none of the prompts.
    """
    learnt, held_out = split(prompts, seed)
    options = lesson_options(pair, prompts, draws, seed)
    with work_folder(folder, options, "trees-*.npz"):
        path = folder / "held_out.npz"
        if not (folder / "options.json").exists():  # a folder without options may hold other data
            path.unlink(missing_ok=True)
        if not path.exists():
            trees = drawn_trees(pair, held_out, draws)
            if trees.size == 0:
                raise BadPrompt(f"the target can continue none of the {len(held_out)} held-out prompts")
            trees.save(path)
        keep_options(folder, options)
        files = []
        drawn = 0
        for file, count in draw_files(pair, learnt, draws, folder):
            files.append(file)
            drawn += count
            report("drawing", drawn, len(learnt))
        return Lessons(files, Trees.read(path))


def lesson_options(pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan, seed: int) -> dict[str, Any]:
    """Return the settings that the trees of prompts depend on."""
    engine = pair.forgetful_target.engine
    plain = [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in prompts]
    return {
        "target": f"{type(pair.target_model).__name__} {weights_key(pair.target_model)}, {engine}",
        "prompts": f"{len(prompts)}, {digest(plain)}",
        "seed": int(seed),
        **prefixed("draws", draws),
    }


def warn_of_rounding(pair: Pair) -> None:
    """Warn if the target runs with rounded weights, which training does not read."""
    engine = pair.forgetful_target.engine
    if engine in OWN_ROUNDINGS:
        warn(
            f"the target runs with weights rounded to {engine}, but training uses the unrounded weights, so drafts may fit "
            "worse; load the target without quantize to train for the unrounded model",
        )


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise `BadSetting` unless there are two distinct prompts."""
    distinct = len(_distinct(prompts))
    if distinct < 2:
        raise BadSetting(
            f"there are {distinct} distinct prompts; training needs at least 2, one to train on and one to hold out"
        )


def split(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out prompts, at most a tenth of all; both are shuffled.

    Repeated prompts count once, so that no prompt is in both lists.
    """
    distinct = _distinct(prompts)
    order = np.random.default_rng(seed).permutation(len(distinct))
    held = min(MOST_HELD_OUT, max(len(distinct) // 10, 1))
    return [distinct[place] for place in order[held:]], [distinct[place] for place in order[:held]]


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return each prompt once, in order of first occurrence."""
    first: dict[Any, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt if isinstance(prompt, str) else tuple(prompt), prompt)
    return list(first.values())
