"""A target's hidden states on trees of tokens, from which heads draft."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.core import FINAL
from specbeam.engines import Masks, layers_of
from specbeam.lab.train.batches import TreeBatch
from specbeam.models.heads import ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def scored(model: "PreTrainedModel", batch: TreeBatch, taps: tuple[int, ...]) -> ScoredTrees:
    """Return a batch of trees with the target's hidden states at these taps (see `Needs.columns`), float32."""
    sees = batch.mask[:, 0] == 0
    states = hidden_states(model, batch.tokens, batch.positions, sees, taps)
    return ScoredTrees(batch.tokens, batch.parents, batch.positions, sees, states)


def scored_again(model: "PreTrainedModel", trees: ScoredTrees, tokens: Int64[Tensor, "rows length"]) -> ScoredTrees:
    """Return trees of the same shape with other tokens, and the target's hidden states on them."""
    states = hidden_states(model, tokens, trees.depths, trees.sees, tuple(trees.states))
    return trees._replace(tokens=tokens, states=states)


@torch.no_grad()
def hidden_states(
    model: "PreTrainedModel",
    tokens: Int64[Tensor, "rows length"],
    positions: Int64[Tensor, "rows length"],
    sees: Bool[Tensor, "rows length length"],
    taps: tuple[int, ...],
) -> dict[int, Float[Tensor, "rows length size"]]:
    """Return the hidden states of a model on a batch of trees, by tap; without taps the model does not run."""
    if not taps:
        return {}
    layers = layers_of(model)
    config = model.config.get_text_config()
    masks = Masks(config, config._attn_implementation or "eager", model.dtype)
    found: dict[int, Tensor] = {}
    handles = []
    for tap in taps:
        if tap != FINAL and tap < len(layers):

            def keep_input(module: object, given: tuple[Any, ...], named: dict[str, Any], tap: int = tap) -> None:
                found[tap] = given[0] if given else named["hidden_states"]

            handles.append(layers[tap].register_forward_pre_hook(keep_input, with_kwargs=True))
        elif tap == len(layers):

            def keep_output(module: object, given: object, output: "Tensor | tuple[Any, ...]", tap: int = tap) -> None:
                found[tap] = output if isinstance(output, Tensor) else output[0]

            handles.append(layers[-1].register_forward_hook(keep_output))
    try:
        # As in drafting, heads read unrounded states.
        with torch.autocast(tokens.device.type, enabled=False):
            last = model.base_model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks.of_trees(sees, positions),
                use_cache=False,
            ).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if FINAL in taps:
        found[FINAL] = last
    return {tap: found[tap].float() for tap in taps}
