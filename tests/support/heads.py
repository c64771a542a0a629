"""Small heads with random weights, and a second, slow way to compute their rows: path by path, one row after the other."""

import numpy as np
import torch
from torch.nn import functional

from specbeam.core.records import FINAL
from specbeam.models.heads.block import BlockHead, BlockShape
from specbeam.models.heads.chimera import Chimera, ChimeraShape
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.layers import LayerSizes, Rotary, View, view_of
from specbeam.models.heads.lm import TrunkLM
from specbeam.models.heads.masked import MaskTrunk
from specbeam.models.heads.trunk import PairTrunk, TrunkShape

VOCAB = 64
MOST = 150  # rows that are compared
KINDS = {
    "eagle": {"pairs": "projection", "taps": (FINAL,), "norms_output": False, "joins_bias": True},
    "eagle3": {"pairs": "attention", "taps": (0, 1, 2)},
    "eagle3, all norms": {
        "pairs": "attention", "taps": (0, 2), "norms_features": "each", "norms_residual": True, "feeds_normed": True,
    },
    "eagle3, one norm": {"pairs": "attention", "taps": (1, 2), "norms_features": "all"},
    "eagle3, windows": {"pairs": "attention", "taps": (0, 1, 2), "views": (View(3), View())},
    "mtp": {"pairs": "normed projection", "taps": (FINAL,), "feeds_normed": True},
    "fspad": {"pairs": "projection", "taps": (FINAL,), "norms_output": False, "sampling": 16, "alignment": 8},
}  # fmt: skip


def trunk_of(model, kind, layers=1, draft_vocab=None, seed=0, **more):
    """A trunk of this kind for a tiny model, with random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    settings = KINDS[kind]
    reads_width = LayerSizes(width, width, 4, 2, 8, 64, 1e-6, norms_heads=kind == "eagle3, one norm")
    shape = TrunkShape(
        sizes=reads_width, layers=layers, target_width=width, draft_vocab=draft_vocab or VOCAB, **settings, **more
    )
    head = torch.nn.Linear(width, draft_vocab or VOCAB, bias=False)
    rotary = Rotary(reads_width, model.config.rope_parameters)
    trunk = PairTrunk(shape, rotary, model.get_input_embeddings(), head)
    return randomised(trunk)


def randomised(head):
    """The same head with norms that are not ones, and nothing that is zero."""
    for name, weight in head.named_parameters():
        if "embed_tokens" in name:
            continue
        if weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5)
        elif not weight.any():
            weight.data.normal_(0, 0.5)
    return head.eval()


def head_of(model, kind="eagle3", **settings):
    """The same as a draft model."""
    return TrunkLM(trunk_of(model, kind, **settings), VOCAB)


class OneByOne:
    """Computes the rows of a pair trunk one after the other."""

    def __init__(self, trunk):
        self.trunk = trunk
        self.keys = [[] for _ in range(trunk.shape.layers)]
        self.values = [[] for _ in range(trunk.shape.layers)]

    def next_state(self, token, given, start):
        """The state of the next row.

        Args:
            given: the feature that it reads.
            start: place of the first row of the draft that it is in.
        """
        place = len(self.keys[0]) + 1

        def attend(layer, queries, key, value):
            keys, values = self.keys[layer], self.values[layer]
            keys.append(key[0])
            values.append(value[0])
            view = view_of(self.trunk.shape.views, layer)
            origin = place if view.from_row else start
            reach = origin - view.within if view.within else 0
            seen = [row for row in range(place) if row + 1 > reach or row + 1 >= start]  # those of the draft anyway
            group = queries.shape[1] // key.shape[1]
            every_key = torch.stack([keys[row] for row in seen]).repeat_interleave(group, 1)
            every_value = torch.stack([values[row] for row in seen]).repeat_interleave(group, 1)
            scores = torch.einsum("hs,nhs->hn", queries[0], every_key) / queries.shape[-1] ** 0.5
            return torch.einsum("hn,nhs->hs", functional.softmax(scores, -1), every_value)[None]

        return self.trunk(torch.tensor([token]), given[None], torch.tensor([place + 7]), attend)


@torch.inference_mode()
def chain_logits(trunk, tokens, features):
    """The logits behind a text: float[draft_vocab].

    Args:
        tokens: the whole text, the first token included.
        features: of each token but the last, None for those that the target has not scored.
    """
    rows = OneByOne(trunk)
    state = None
    start = 1
    for place in range(1, len(tokens)):
        given = features[place - 1]
        if given is None:
            given = trunk.fed_back(state)[0]
        else:
            start = place
        state = rows.next_state(tokens[place], given, start)
    return trunk.logits(state)[0]


MASKED = {
    "plain": {},
    "windows": {"views": (View(3, from_row=True), View()), "norms_residual": True, "norms_features": "each"},
}


def masked_of(model, kind="plain", rows=3, draft_vocab=None, seed=0):
    """A pair trunk with mask rows for a tiny model, with two layers and random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    vocab = draft_vocab or VOCAB
    sizes = LayerSizes(width, width, 4, 2, 8, 64, 1e-6)
    shape = TrunkShape(
        sizes=sizes, layers=2, taps=(0, 1, 2), target_width=width, pairs="attention", draft_vocab=vocab, **MASKED[kind]
    )
    logits = torch.nn.Linear(width, vocab, bias=False)
    rotary = Rotary(sizes, model.config.rope_parameters)
    return randomised(MaskTrunk(shape, rotary, model.get_input_embeddings(), logits, 5, rows))


@torch.inference_mode()
def masked_logits(trunk, tokens, features, root):
    """The logits behind a text, by the mask rows below token number `root`, the features of the tokens before it alone."""
    rows = OneByOne(trunk)
    for place in range(1, root + 1):
        state = rows.next_state(tokens[place], features[place - 1], place)
    masked = trunk.features(trunk.mask_hidden)[0, 0]
    for _ in range(min(len(tokens) - 1 - root, trunk.rows - 1)):
        state = rows.next_state(trunk.mask, masked, root)
    return trunk.logits(state)[0]


def chimera_of(model, read_out="shared", depth=3, draft_vocab=None, seed=0):
    """A Chimera head for a tiny model, with random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    sizes = LayerSizes(width, width, 4, 2, 8, 64, 1e-6)
    shape = ChimeraShape(sizes, depth, draft_vocab or VOCAB, read_out)
    logits = torch.nn.Linear(width, draft_vocab or VOCAB, bias=False)
    rotary = Rotary(sizes, model.config.rope_parameters)
    head = Chimera(shape, rotary, model.get_input_embeddings(), None if read_out == "own" else logits)
    for name, weight in head.named_parameters():
        if "embed_tokens" not in name and weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5)
    return head.eval()


@torch.inference_mode()
def chimera_logits(head, tokens, features):
    """The logits behind a text, by the paper's own layout: features and codes as two halves of one sequence.

    Args:
        tokens: the whole text, the first token included.
        features: of each token but the last, None for those that the target has not scored.
    """
    layer = head.layer
    attention = layer.self_attn
    scored = [place for place, one in enumerate(features) if one is not None]
    known = [features[place] for place in scored]
    codes = []
    for place in range(1, len(tokens)):
        three = torch.tensor([tokens[max(place - back, 0)] for back in (2, 1, 0)])
        joined = head.embed_tokens(three).flatten()
        linear = head.trigrams.block.linear
        codes.append(head.trigrams.proj.weight @ (joined + functional.silu(linear.weight @ joined + linear.bias)))
    while len(known) < len(tokens):  # each round appends a state of the head as the feature that is missing
        count = len(known)
        normed = layer.input_layernorm(torch.stack([*known, *codes[:count]]))
        places = torch.cat([torch.arange(count), torch.arange(1, count + 1)]) + 7
        keys, values = attention.keys_and_values(normed, head.rotary(places))
        last = head.rotary(torch.tensor([count + 7]))
        query = attention.queries(normed[-1:], last)[0]
        group = query.shape[0] // keys.shape[1]
        scores = torch.einsum("hs,nhs->hn", query, keys.repeat_interleave(group, 1)) / query.shape[-1] ** 0.5
        mixed = torch.einsum("hn,nhs->hs", functional.softmax(scores, -1), values.repeat_interleave(group, 1))
        x = codes[count - 1] + attention.o_proj(mixed.flatten())
        known.append(x + layer.mlp(layer.post_attention_layernorm(x)))
    far = len(tokens) - 1 - scored[-1]
    return head.logits(far, features[scored[-1]][None], known[-1][None])[0]


class Comparing:
    """A head as a draft model whose rows are compared with those of chains, which `expected` computes."""

    def of(self, target):
        """The same, for a target that computes the features of chains."""
        self.target = target
        self.compared = 0
        self.largest = 0.0
        return self

    def extend(self, sessions, forests, needs=None):
        before = [getattr(session.state.get(self), "answered", 0) for session in sessions]
        found = super().extend(sessions, forests, needs)
        for session, forest, start, answer in zip(sessions, forests, before, found, strict=True):
            fresh = [node for node in range(start, forest.size) if node not in forest.known.nodes]
            if self.is_ready(session) and self.compared < MOST:
                for node, row in zip(fresh, answer.logits, strict=True):
                    self.compare(session, forest, node, row)
        return found

    @torch.inference_mode()
    def compare(self, session, forest, node, row):
        """Compare a row with that of a chain: which nodes are scored follows from what the forest says is known."""
        root = int(forest.root_of(np.array([node]))[0])
        above = session.texts.tokens[root, : session.length - 1].tolist()
        text = [*session.prompt, *above] if session.length else session.prompt[:-1]
        nodes = [node]
        while forest.parents[nodes[0]] >= 0:
            nodes.insert(0, int(forest.parents[nodes[0]]))
        tokens = [*text, *forest.tokens[nodes].tolist()]
        if len(tokens) == 1:
            return
        is_scored = [True] * len(text) + [one in forest.known.nodes for one in nodes]
        features = self.features_of(tokens)
        expected = self.expected(tokens, features, is_scored)
        self.largest = max(self.largest, float((expected - row).abs().max()))
        self.compared += 1

    @torch.inference_mode()
    def features_of(self, tokens):
        """The features of all tokens of a text, by a plain forward of the target."""
        states = {}
        layers = self.target.model.layers

        def keep(name):
            def hook(module, given, named=None):
                states[name] = (given[0] if given else named["hidden_states"])[0]

            return hook

        handles = [layer.register_forward_pre_hook(keep(place), with_kwargs=True) for place, layer in enumerate(layers)]
        handles.append(self.target.model.norm.register_forward_pre_hook(keep(len(layers))))
        handles.append(self.target.lm_head.register_forward_pre_hook(keep(-1)))
        self.target(input_ids=torch.tensor([tokens]))
        for handle in handles:
            handle.remove()
        return self.head.features(torch.cat([states[tap] for tap in self.head.taps], -1))


BLOCKS = {
    "anchored": {
        "first_row": 0,
        "correction": "vanilla",
        "rank": 5,
        "has_confidence": True,
        "confidence_reads_token": True,
    },
    "mask rows": {"first_row": 1, "taps": (FINAL, 1)},
    "gated": {"first_row": 0, "correction": "gated", "rank": 5},
    "recurrent": {"first_row": 0, "correction": "rnn", "rank": 5},
    "recurrent mask rows": {"first_row": 1, "correction": "rnn", "rank": 5},
    "prefix": {"first_row": 0, "correction": "prefix", "rank": 6, "inner": 5, "pure_drafts": 1, "logit_cap": 2.0},
    "prefix mask rows": {"first_row": 1, "correction": "prefix", "rank": 6, "inner": 5},
    "selector": {"first_row": 1, "correction": "selector", "rank": 5, "inner": 9, "local_rows": 2, "local_group": 8},
    "refiner": {"first_row": 1, "correction": "refiner", "rank": 5, "inner": 7},
    "anchored refiner": {"first_row": 0, "correction": "refiner", "rank": 5, "inner": 7},
    "windows from the root": {"first_row": 1, "views": (View(3, is_causal=True), View())},
    "windows from each row": {"first_row": 0, "views": (View(), View(4, from_row=True))},
}


def block_of(model, kind, layers=2, rows=3, draft_vocab=None, seed=0):
    """A block head of this kind for a tiny model, with random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    sizes = LayerSizes(width, width, 4, 2, 8, 64, 1e-6, norms_heads=True)
    settings = {"taps": (0, 1, 2), **BLOCKS[kind]}
    shape = BlockShape(
        sizes=sizes, layers=layers, target_width=width, rows=rows, draft_vocab=draft_vocab or VOCAB, **settings
    )
    logits = torch.nn.Linear(width, draft_vocab or VOCAB, bias=False)
    rotary = Rotary(sizes, model.config.rope_parameters)
    return randomised(BlockHead(shape, rotary, model.get_input_embeddings(), logits, 1))


def denoiser_of(model, layers=2, rows=4, draft_vocab=None, seed=0):
    """A SpecDiff head for a tiny model, with random weights."""
    torch.manual_seed(seed)
    width = model.config.hidden_size
    sizes = LayerSizes(width, width, 4, 2, 8, 64, 1e-6, norms_heads=True)
    vocab = draft_vocab or VOCAB
    shape = BlockShape(sizes, layers, taps=(0, 1, 2), target_width=width, rows=rows, first_row=1, draft_vocab=vocab)
    logits = torch.nn.Linear(width, vocab, bias=False)
    head = Denoiser(shape, Rotary(sizes, model.config.rope_parameters), model.get_input_embeddings(), logits)
    for name, weight in head.named_parameters():
        if "embed_tokens" not in name and weight.ndim == 1:
            weight.data.uniform_(0.5, 1.5)
    return head.eval()


@torch.inference_mode()
def block_rows(block, tokens, features, root, *known):
    """The rows of the block below token number `root` of a text, by the features of the tokens before it alone."""
    past = block.context(features[:root], torch.arange(root) + 7)

    def attend(layer, queries, keys, values):
        every_key = torch.cat([past[layer][0], keys])
        every_value = torch.cat([past[layer][1], values])
        group = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("qhs,nhs->qhn", queries, every_key.repeat_interleave(group, 1)) / queries.shape[-1] ** 0.5
        hidden = torch.tensor(
            [[is_hidden(layer, row, key) for key in range(len(every_key))] for row in range(len(keys))]
        )
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        return torch.einsum("qhn,nhs->qhs", functional.softmax(scores, -1), every_value.repeat_interleave(group, 1))

    def is_hidden(layer, row, key):
        view = view_of(block.shape.views, layer)
        if key < root:
            origin = root + row if view.from_row else root
            return bool(view.within) and origin - key >= view.within
        return view.is_causal and key > root + row

    return block.blocks(torch.tensor(tokens[root]), torch.tensor(root + 7), attend, *known)


@torch.inference_mode()
def block_logits(block, tokens, features, root):
    """The logits behind a text, by the block below token number `root`."""
    shape = block.shape
    rows = block_rows(block, tokens, features, root)
    states = block.first_states(rows[:1], torch.tensor(tokens[root : root + 1]), torch.tensor(tokens[root - 1 : root]))
    for far, token in enumerate(tokens[root:]):
        row = min(shape.first_row + far, shape.rows - 1)
        logits, states = block.corrected(far, rows[row][None], torch.tensor([token]), states)
    return logits[0]
