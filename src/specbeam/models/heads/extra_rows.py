"""Heads without layers of their own: extra rows in the target's pass, which give the laws of the next drafts.

An extra row hangs below a node of the forest that the target scores. It sees the path to the node, the node, the extra rows
between, and possibly a learned prefix; no row of the text sees an extra row or the prefix. Extra row j below a node takes
the place of a token j positions later, so its logits are a law of the token after that position: the node itself gives
the law of the next token, and extra row 1 the law of the second one, independent of the first. So the law of a draft is
a product law.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from specbeam.core.records import ExtraInputs
from specbeam.engines.cache_names import cache_argument
from specbeam.engines.eligibility import check_has_trees, layers_of
from specbeam.engines.kv.masks import Masks
from specbeam.engines.kv.trie import AHEAD
from specbeam.models.heads.arrays import AnchorRows, Anchors, Columns, PerNode, Rows
from specbeam.models.heads.head import DraftRows, Head, capped, wanted_below
from specbeam.models.heads.trees import ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExtraHead(Head):
    """A head that adds extra rows to the target's passes.

    Args:
        target: the model that runs the rows.
        depth: number of extra rows below a node, and so of drafts with laws of their own; deeper drafts use the last law.

    Attributes:
        ranks: for each depth, the mean probability under the target of the head's likeliest token, of the second, and so on,
            on texts outside the training data; empty if not measured.
    """

    def __init__(self, target: "PreTrainedModel", depth: int) -> None:
        super().__init__()
        self.target_of = (target,)  # in a tuple, so that its weights do not become the head's
        self.depth = depth
        self.ranks: tuple[tuple[float, ...], ...] = ()

    @property
    def target(self) -> "PreTrainedModel":
        """The model that runs the rows."""
        return self.target_of[0]

    @property
    def inputs(self) -> ExtraInputs:
        """The inputs of the extra rows, for the engines."""
        raise NotImplementedError

    @property
    def described_ranks(self) -> dict[str, str]:
        """A description of the probabilities of its likeliest token by depth; nothing if not measured."""
        odds = ", ".join(f"{row[0]:.2f}" for row in self.ranks if row)
        return {"mean target probability of its likeliest token": f"{odds}, by depth"} if odds else {}

    def features(self, states: Rows) -> Rows:
        """See `Head.features`: the states themselves."""
        return states

    def rows(self, trees: ScoredTrees, anchors: Anchors, depth: int) -> AnchorRows:
        """Return the target's last hidden states of `depth` extra rows below each of some nodes of trees.

        Gradients reach only the head's own weights.

        Args:
            anchors: columns of the nodes.
        """
        raise NotImplementedError

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        """See `Head.drafts`. The target runs over the trees, and then over the extra rows."""
        depth = min(depth, self.depth)
        ancestors = _ancestors(trees, depth)
        is_anchor = torch.zeros_like(wanted)
        for far, above in enumerate(ancestors, 1):
            places = (wanted & (trees.depths >= far)).nonzero()
            is_anchor[places[:, 0], above[places[:, 0], places[:, 1]]] = True
        if not is_anchor.any():
            return []
        number = is_anchor.cumsum(1) - 1
        anchors = is_anchor.long().argsort(dim=1, descending=True, stable=True)[:, : int(is_anchor.sum(1).max())]
        states = self.rows(trees, anchors, depth)
        found = []
        length = wanted.shape[1]
        for far, above in enumerate(ancestors, 1):
            nodes = wanted_below(trees, wanted, far)
            row = nodes // length
            anchor = number[row, above[row, nodes % length]]
            found.append(DraftRows(nodes, logits_of(self.target, states[row, anchor, far - 1])))
        return found


def _ancestors(trees: ScoredTrees, depth: int) -> list[Columns]:
    """Return the columns of the parents of all nodes, of their parents, and so on; 0 for nodes without one."""
    above = trees.columns
    found = []
    for _ in range(depth):
        above = trees.above(above)
        found.append(above)
    return found


def logits_of(target: "PreTrainedModel", states: Rows) -> Float[Tensor, "rows vocab"]:
    """Return a target's logits from its last hidden states; gradients reach only these."""
    matrix = target.get_output_embeddings()
    with _frozen(matrix):
        logits: Tensor = matrix(states)
    return capped(logits, getattr(target.config.get_text_config(), "final_logit_softcapping", None))


class StoredTrees:
    """Trees scored by a target, whose keys and values extra rows attend to.

    Args:
        tap: the layer whose inputs are kept in `states`, float[rows, length, width]; None: no inputs are kept.
        keys, values: the keys and values of a prefix that extra rows see, by layer.
    """

    def __init__(
        self,
        target: "PreTrainedModel",
        trees: ScoredTrees,
        tap: int | None = None,
        keys: tuple[Tensor, ...] = (),
        values: tuple[Tensor, ...] = (),
    ) -> None:
        from specbeam.models.heads.tree_cache import TreeCache  # imports transformers

        check_has_trees(target)
        config = target.config.get_text_config()
        self.target = target
        self.trees = trees
        self.prefix = keys[0].shape[1] if keys else 0
        self.masks = Masks(config, config._attn_implementation or "eager", target.dtype)
        self.cache = TreeCache(config.num_hidden_layers, keys, values)
        self.states: Tensor | None = None

        def note(module: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.states = given[0] if given else named["hidden_states"]

        with torch.no_grad(), unrounded(trees.tokens), hooked(target, tap, note):
            target.base_model(
                input_ids=trees.tokens,
                position_ids=trees.depths,
                attention_mask=self.masks.of_trees(trees.sees, trees.depths),
                **cache_argument(target.base_model, self.cache),
                use_cache=True,
            )
        self.cache.is_full = True

    def last_states(self, anchors: Anchors, made: AnchorRows, layer: int = 0) -> AnchorRows:
        """Return the target's last hidden states of extra rows.

        Args:
            anchors: columns of the nodes above them.
            made: the input of their first layer.
            layer: the number of this layer; 0: the inputs are embeddings.
        """
        rows, count, depth, width = made.shape
        positions = self.trees.depths.gather(1, anchors)[..., None] + torch.arange(1, depth + 1, device=anchors.device)
        seen, slot_positions = self._seen(anchors, positions)
        flat = made.reshape(rows, count * depth, width).to(self.target.dtype)

        def enter(module: object, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return ((flat, *given[1:]), named) if given else (given, {**named, "hidden_states": flat})

        with _frozen(self.target), unrounded(flat), hooked(self.target, layer or None, enter):
            last: Tensor = self.target.base_model(
                inputs_embeds=torch.zeros_like(flat) if layer else flat,
                position_ids=positions.flatten(1),
                attention_mask=self.masks.of_rows(seen, positions.flatten(1), slot_positions),
                **cache_argument(self.target.base_model, self.cache),
                use_cache=True,
            ).last_hidden_state
        return last.view(rows, count, depth, width)

    def _seen(
        self, anchors: Anchors, positions: Int64[Tensor, "rows anchors depth"]
    ) -> tuple[Bool[Tensor, "rows extra slots"], Int64[Tensor, "rows slots"]]:
        """Return which slots of prefix, tree and extra rows each extra row sees, and the positions of all slots."""
        rows, count = anchors.shape
        depth = positions.shape[-1]
        length = self.trees.tokens.shape[1]
        device = anchors.device
        above = self.trees.sees.gather(1, anchors[..., None].expand(-1, -1, length))
        groups = torch.eye(count, dtype=torch.bool, device=device)
        chain = torch.ones(depth, depth, dtype=torch.bool, device=device).tril()
        own = torch.kron(groups, chain).expand(rows, -1, -1)
        prefix = torch.ones(rows, count * depth, self.prefix, dtype=torch.bool, device=device)
        seen = torch.cat([prefix, above.repeat_interleave(depth, 1), own], -1)
        ahead = torch.full((rows, self.prefix), AHEAD, device=device)
        return seen, torch.cat([ahead, self.trees.depths, positions.flatten(1)], -1)


def unrounded(like: Tensor) -> torch.autocast:
    """Return a context in which the target runs in its own type, as in decoding, even inside autocast.

    Args:
        like: a tensor on the target's device.
    """
    return torch.autocast(like.device.type, enabled=False)


@contextmanager
def hooked(model: "PreTrainedModel", layer: int | None, hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook before each forward of a layer in this context; None: no hook."""
    if layer is None:
        yield
        return
    handle = layers_of(model)[layer].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of the model's own weights in this context."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
