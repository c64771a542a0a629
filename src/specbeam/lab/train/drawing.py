"""Trees drawn by the target: beam sampling of each prompt, with the target's law at each live beam."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specbeam import Pair, beam_sampling, decode
from specbeam.core import Turn
from specbeam.doors import Request, Settings, is_integer, require
from specbeam.errors import BadPrompt
from specbeam.lab.train.trees import TreeBeingDrawn, Trees, trees_of

FILE_TREES = 2_048  # prompts per file of trees; a killed run loses at most one file
LAW_TOKENS = 64  # likeliest tokens stored of each law
AT_ONCE = 64  # prompts decoded at the same time

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class DrawPlan:
    """How the target draws the training texts.

    Args:
        beams: number of beams of each prompt; 1: plain sampling. Drafts for beams learn best from texts that beams draw.
        temperature: the temperature of the draws, above 0. The learned laws have temperature 1.
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
        """Raise `BadSetting` if a value is wrong."""
        require(is_integer(self.beams) and self.beams >= 1, "beams", self.beams, "an integer of at least 1")
        require(self.temperature > 0, "temperature", self.temperature, "above 0, because the target samples")
        require(is_integer(self.seed), "seed", self.seed, "an integer")
        _ = self.settings  # checks the rest

    @property
    def settings(self) -> Settings:
        """The options of the call that draws."""
        return Settings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=0 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
        )


def draw_files(pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan, folder: Path) -> Iterator[tuple[Path, int]]:
    """Draw the trees of all prompts into files; yield each file with the number of its prompts as soon as it exists.

    Existing files are not drawn again. Raises `BadPrompt` at the end if no prompt can be continued.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trees = 0
    for number, first in enumerate(range(0, len(prompts), FILE_TREES)):
        path = folder / f"trees-{number:05d}.npz"
        here = prompts[first : first + FILE_TREES]
        if not path.exists():
            drawn_trees(pair, here, draws).save(path)
        trees += Trees.count(path)
        yield path, len(here)
    if trees == 0:
        raise BadPrompt(f"the target can continue none of {len(prompts)} prompts: they are empty or too long")


def drawn_trees(pair: Pair, prompts: Sequence[Prompt], draws: DrawPlan) -> Trees:
    """Return the trees that the target draws below the prompts, without prompts that it cannot continue."""
    request = Request.of(pair, list(prompts), beam_sampling(draws.beams), draws.settings, draws.seed)
    growing = {session: TreeBeingDrawn(list(session.prompt)) for session in request.sessions}
    for turns in decode(pair.target, request.sessions, AT_ONCE):
        add_turns([(growing[session], turn) for session, turn in turns])
    return trees_of([tree for session, tree in growing.items() if session.failure is None])


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
