"""Trees drawn by the target: beam sampling of each prompt, with the target's law at each live beam."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specbeam.decode import decode
from specbeam.errors import BadPrompt
from specbeam.options.checks import is_integer, require
from specbeam.options.settings import Settings
from specbeam.pair import Pair
from specbeam.recipes.beams import beam_sampling
from specbeam.records import Turn
from specbeam.request import Request
from specbeam.train.trees import TreeBeingDrawn, Trees, trees_of

FILE_TREES = 2_048  # prompts whose trees share a file: a killed run draws at most these again
LAW_TOKENS = 64  # of each law; the rest of its probability is kept as one number
AT_ONCE = 64  # prompts side by side

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class DrawPlan:
    """How the target draws the texts that are learnt from.

    Args:
        beams: number of beams of each prompt. Drafts for beams are best learnt from what beams draw; 1: plain samples.
        temperature: the temperature of the draws, above 0. The laws that are learnt are those of temperature 1.
        top_k: draw among the k likeliest tokens only; None: among all.
        top_p: draw among the fewest likeliest tokens with total probability p; None: among all.
        max_new_tokens: maximum number of tokens that are drawn below a prompt.
        seed: the same seed draws the same trees.
    """

    beams: int = 4
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int = 80
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `BadSetting` if a value is wrong. `Settings` checks those that it has, too."""
        require(is_integer(self.beams) and self.beams >= 1, "beams", self.beams, "an integer of at least 1")
        require(self.temperature > 0, "temperature", self.temperature, "above 0, for the target draws")
        require(is_integer(self.seed), "seed", self.seed, "an integer")

    @property
    def settings(self) -> Settings:
        """The options of the call that draws."""
        return Settings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
        )


def draw_files(pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan, folder: Path) -> Iterator[tuple[Path, int]]:
    """Draw the trees of all prompts into files; yield each file with the number of its prompts as soon as it is there.

    Files that are there already are not drawn again.

    Raises:
        BadPrompt: nothing can be drawn below any prompt of a file, because all are empty or too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(prompts), FILE_TREES)):
        path = folder / f"trees-{number:05d}.npz"
        here = prompts[first : first + FILE_TREES]
        if not path.exists():
            trees = drawn_trees(pair, here, draws)
            if trees.size == 0:
                raise BadPrompt(
                    f"none of the prompts {first + 1} to {first + len(here)} can be continued by the target"
                )
            trees.save(path)
        yield path, len(here)


def drawn_trees(pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan) -> Trees:
    """Return the trees that the target draws below the prompts; prompts that it cannot continue have none.

    Raises `BadPrompt` if it can continue none of them, because all are empty or too long.
    """
    request = Request(pair, list(prompts), beam_sampling(draws.beams), draws.settings, draws.seed)
    growing = {session: TreeBeingDrawn(list(session.prompt)) for session in request.sessions}
    for turns in decode(pair.target, request.sessions, AT_ONCE):
        add_turns([(growing[session], turn) for session, turn in turns])
    trees = [tree for session, tree in growing.items() if session.failure is None]
    if not trees:
        failures = [*request.refused.values(), *(session.failure for session in request.sessions)]
        raise BadPrompt(f"none of {len(prompts)} prompts can be continued by the target; the first: {failures[0]}")
    return trees_of(trees)


def add_turns(turns: Sequence[tuple[TreeBeingDrawn, Turn]]) -> None:
    """Add the layer of each turn, which has no drafts, to the tree of its session."""
    if not turns:
        return
    logits = torch.cat([turn.scored.logits for _, turn in turns]).float()
    kept = min(LAW_TOKENS, logits.shape[1])
    best, ids = logits.topk(kept)
    logp = (best - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    tokens = ids.int().cpu().numpy()
    row = 0
    for tree, turn in turns:
        (layer,) = turn.verdict.steps
        for beam in range(turn.forest.size):
            tree.add_law(beam, tokens[row], logp[row])
            row += 1
        tree.add_layer(layer.parents, layer.parents[~layer.ended], layer.live.tokens)
