"""Pair trunks as draft models: the rows of a tree of pairs are those of separate chains, turn after turn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.heads.lm import TrunkLM
from specbeam.lm.huggingface import HuggingFaceLM
from tests.support.heads import KINDS, VOCAB, chain_logits, trunk_of
from tests.support.tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
MOST = 150  # rows that are compared
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


def pair_of(model, head, engine="auto"):
    return replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine=engine), draft=head)


class Checked(TrunkLM):
    """A head whose rows are compared with those of chains."""

    def __init__(self, trunk, target):
        super().__init__(trunk, VOCAB)
        self.target = target
        self.compared = 0
        self.largest = 0.0

    def extend(self, sessions, forests, needs=None):
        before = [getattr(session.state.get(self), "answered", 0) for session in sessions]
        found = super().extend(sessions, forests, needs)
        for session, forest, start, answer in zip(sessions, forests, before, found, strict=True):
            fresh = [node for node in range(start, forest.size) if node not in forest.known.nodes]
            if self.is_ready(session) and self.compared < MOST:
                for node, row in zip(fresh, answer.logits, strict=True):
                    self.compare(session, forest, node, row)
        return found

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
        given = [features[place] if is_scored[place] else None for place in range(len(tokens) - 1)]
        self.largest = max(self.largest, float((chain_logits(self.head, tokens, given) - row).abs().max()))
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
        return self.head.features(torch.cat([states[tap] for tap in self.head.shape.taps], -1))


METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "chain": sb.speculative_sampling(3),
    "tree": sb.specinfer((2, 2)),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "beams") for kind in KINDS), *(("eagle3, all norms", name) for name in METHODS)]
)
def test_rows_of_the_tree_are_those_of_chains(kind, name, model):
    """Also in later turns, so no row of a draft survives; with beams that end, and prompts of one token."""
    head = Checked(trunk_of(model, kind, layers=2), model)
    pair = pair_of(model, head, "plain")
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5
