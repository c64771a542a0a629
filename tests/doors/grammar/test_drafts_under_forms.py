"""Drafts that cost a place in the target's pass are drafts that the form allows."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.constraint import Constrained, Form
from specbeam.doors.grammar.compiled import compiled
from specbeam.generation import turns_of
from tests.doors.grammar.forms import characters

FORM = "(true, false, ){3,9}"
METHODS = {
    "lookup": sb.prompt_lookup,
    "suffix": sb.suffix_match,
    "recycling": sb.token_recycling,
    "sequoia": sb.sequoia,
    "dyspec": sb.dyspec,
    "opt_tree": sb.opt_tree,
    "gsd": sb.gsd,
    "propd": sb.propd,
    "rsd_s": sb.rsd_s,
}


def drafted(pair, method, prompt="true, true, "):
    """(nodes drafted below the root, those among them that the form bans, accepted ones)."""
    vocab = len(pair.tokenizer)
    bans = Constrained(compiled(Form("regex", FORM), "llguidance", pair.tokenizer, vocab, (1,)), (1,), 0)
    text, nodes, banned, accepted = [], 0, 0, 0
    for turn in turns_of(pair, prompt, method, seed=0, max_new_tokens=60, regex=FORM):
        for node in range(1, turn.forest.size):
            *above, token = turn.forest.path(node)
            nodes += 1
            banned += not bans.allowed(np.array([[*text, *above]], dtype=np.int64), vocab)[0, token]
        text += [int(step.beams.tokens[0]) for step in turn.verdict.steps]
        accepted += turn.verdict.accepted
    return nodes, banned, accepted


@pytest.mark.parametrize("name", METHODS)
def test_no_banned_token_is_drafted(name):
    nodes, banned, accepted = drafted(characters(), METHODS[name]())
    assert banned == 0
    if name != "recycling":
        assert nodes >= accepted > 0


def test_recycling_drafts_the_successors_that_are_allowed():
    method = sb.token_recycling(k=60, controller="fixed")  # its table holds nearly all tokens
    pair = characters()
    _, banned, accepted = drafted(pair, method)
    assert banned == 0
    assert accepted > 15
