"""Small heads with random weights, and a second, slow way to compute their rows: path by path, one row after the other."""

import torch
from torch.nn import functional

from specbeam.heads.layers import LayerSizes, Rotary
from specbeam.heads.lm import TrunkLM
from specbeam.heads.trunk import PairTrunk, TrunkShape
from specbeam.records import FINAL

VOCAB = 64
KINDS = {
    "eagle": {"pairs": "projection", "taps": (FINAL,), "norms_output": False, "joins_bias": True},
    "eagle3": {"pairs": "attention", "taps": (0, 1, 2)},
    "eagle3, all norms": {
        "pairs": "attention", "taps": (0, 2), "norms_features": "each", "norms_residual": True, "feeds_normed": True,
    },
    "eagle3, one norm": {"pairs": "attention", "taps": (1, 2), "norms_features": "all"},
    "mtp": {"pairs": "normed projection", "taps": (FINAL,), "feeds_normed": True},
}  # fmt: skip


def trunk_of(model, kind, layers=1, draft_vocab=None, seed=0):
    """A trunk of this kind for a tiny model, with random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    settings = KINDS[kind]
    reads_width = LayerSizes(width, width, 4, 2, 8, 64, 1e-6, norms_heads=kind == "eagle3, one norm")
    shape = TrunkShape(
        sizes=reads_width, layers=layers, target_width=width, draft_vocab=draft_vocab or VOCAB, **settings
    )
    head = torch.nn.Linear(width, draft_vocab or VOCAB, bias=False)
    rotary = Rotary(reads_width, model.config.rope_parameters)
    trunk = PairTrunk(shape, rotary, model.get_input_embeddings(), head)
    for name, weight in trunk.named_parameters():
        if "embed_tokens" not in name and weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5)
    return trunk.eval()


def head_of(model, kind="eagle3", **settings):
    """The same as a draft model."""
    return TrunkLM(trunk_of(model, kind, **settings), VOCAB)


@torch.inference_mode()
def chain_logits(trunk, tokens, features):
    """The logits behind a text: float[draft_vocab].

    Args:
        tokens: the whole text, the first token included.
        features: of each token but the last, None for those that the target has not scored.
    """
    layers = range(trunk.shape.layers)
    keys, values = [[] for _ in layers], [[] for _ in layers]
    state = None
    for place in range(1, len(tokens)):
        given = features[place - 1]
        if given is None:
            given = trunk.fed_back(state)[0]

        def attend(layer, queries, key, value):
            keys[layer].append(key[0])
            values[layer].append(value[0])
            group = queries.shape[1] // key.shape[1]
            every_key = torch.stack(keys[layer]).repeat_interleave(group, 1)
            every_value = torch.stack(values[layer]).repeat_interleave(group, 1)
            scores = torch.einsum("hs,nhs->hn", queries[0], every_key) / queries.shape[-1] ** 0.5
            return torch.einsum("hn,nhs->hs", functional.softmax(scores, -1), every_value)[None]

        state = trunk(torch.tensor([tokens[place]]), given[None], torch.tensor([place + 7]), attend)
    return trunk.logits(state)[0]
