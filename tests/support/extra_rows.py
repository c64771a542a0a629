"""Small heads that are extra rows in the target's pass, with random weights, and a second, slow way to compute their rows."""

import numpy as np
import torch
from transformers import DynamicCache

from specbeam.core.records import LEARNT
from specbeam.engines.cache_names import cache_argument
from specbeam.engines.eligibility import layers_of
from specbeam.models.heads.bita import Bita
from specbeam.models.heads.hidden_transfer import HiddenTransfer

KINDS = ("bita", "hidden_transfer")
DEPTH = 3


def extra_head(model, kind, depth=DEPTH, seed=0, prefix=5):
    """A head of this kind for a tiny model, with random weights."""
    config = model.config.get_text_config()
    width = model.get_input_embeddings().weight.shape[1]
    if kind == "bita":
        keys = prompted(model, [1]).layers[0].keys
        sizes = (config.num_hidden_layers, keys.shape[1], prefix, keys.shape[3])
        head = Bita(model, depth, sizes, width)
    else:
        head = HiddenTransfer(model, depth, config.num_hidden_layers - 1, width)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * (0.5 if kind == "bita" else 0.1))
    return head.to(model.dtype).eval()


@torch.inference_mode()
def prompted(model, tokens):
    """The cache of transformers after some tokens."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([tokens]), **cache_argument(model, cache), use_cache=True)
    return cache


@torch.inference_mode()
def slow_rows(head, path):
    """The logits of the extra rows below the end of a path, float[depth, vocab]: of one path alone, by transformers' forward."""
    model = head.target
    if isinstance(head, Bita):
        return _slow_bita(head, model, path)
    layer = layers_of(model)[head.layer]
    count = head.depth

    def enter(module, given, named):
        states = (given[0] if given else named["hidden_states"]).clone()
        for place, one in enumerate(head.maps):
            states[0, len(path) + place] = one(states[0, len(path) - 1])
        return ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})

    handle = layer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        logits = model(input_ids=torch.tensor([[*path, *[0] * count]])).logits
    finally:
        handle.remove()
    return logits[0, -count:]


def _slow_bita(head, model, path):
    """With the soft prompts as the first rows of transformers' own cache, as past keys and values."""
    cache = DynamicCache()
    prefix, count, length = head.keys.shape[2], head.depth, len(path)
    for number, layer in enumerate(prompted(model, path).layers):
        keys = torch.cat([head.keys[number][None], layer.keys], 2)
        values = torch.cat([head.values[number][None], layer.values], 2)
        cache.update(keys, values, number)
    return model(
        inputs_embeds=head.masks.weight[None],
        attention_mask=_slow_masks(model, prefix, length, count),
        position_ids=torch.arange(length, length + count)[None],
        **cache_argument(model, cache),
        use_cache=True,
    ).logits[0]


def _slow_masks(model, prefix, length, count):
    """What each mask token sees: all soft prompts, and of the text and the group what is before it, or as far as a window."""
    rows = torch.arange(length, length + count)[:, None]
    keys = torch.arange(length + count)[None]

    def added(window):
        seen = (keys <= rows) & (keys > rows - window)
        every = torch.cat([torch.ones(count, prefix, dtype=torch.bool), seen], 1)
        mask = torch.zeros(every.shape, dtype=model.dtype).masked_fill(~every, torch.finfo(model.dtype).min)
        return mask[None, None]

    window = getattr(model.config, "sliding_window", None) or 10**6
    kinds = set(getattr(model.config, "layer_types", None) or [])
    if "sliding_attention" in kinds:
        return {kind: added(window if kind == "sliding_attention" else 10**6) for kind in kinds}
    return added(window if model.config.model_type in ("mistral", "mixtral") else 10**6)


def with_extra_rows(forest, nodes=None, depth=DEPTH):
    """A forest with a chain of extra rows under some nodes, or under all."""
    nodes = range(forest.size) if nodes is None else nodes
    tokens, parents = [], []
    for node in nodes:
        for kind in range(depth):
            parents.append(node if kind == 0 else forest.size + len(parents) - 1)
            tokens.append(LEARNT - kind)
    return forest.grown(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))
