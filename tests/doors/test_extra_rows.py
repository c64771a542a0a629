"""Rows in a pass that no real row sees: mask tokens that a drafter reads its next drafts from."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.fixed import FixedShape
from specbeam.core.decode import decode
from specbeam.core.draft.lookup import RETRIEVED, retrieved_chains
from specbeam.core.forest import Forest
from specbeam.core.records import ExtraRows, Needs
from specbeam.core.session import Parts
from specbeam.core.verify.walk import MatchRule
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support.tiny_models import tiny

MASK = 2


@dataclass(frozen=True)
class ParallelMasks:
    """Hang mask tokens under every node: what the target predicts there are guesses for the tokens after next.

    The next draft is read below the node that the text ended at, so all of it comes from one pass (as in PPD, BiTA, PARD).
    """

    mask: int = MASK
    masks: int = 2
    needs: ClassVar[Needs] = Needs(logits=True)
    no_law_reason: ClassVar[str] = RETRIEVED

    def draft(self, sessions, shapes):
        return [self._chain(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chain(self, session, shape):
        guesses = session.state.get(self, [])
        return retrieved_chains(session, [guesses[: shape.depth]])

    def extra_rows(self, session, forest):
        parents = []
        for node in range(forest.size):
            start = forest.size + len(parents)
            parents += [node, *range(start, start + self.masks - 1)]
        return ExtraRows(np.full(len(parents), self.mask), np.array(parents))

    def settle(self, session, turn):
        steps = turn.verdict.steps
        node = int(steps[-1].parents[0])
        below = slice(node * self.masks, (node + 1) * self.masks)
        rows = turn.scored.extra.logits[below]
        assert len(turn.scored.logits) == turn.forest.size
        session.state[self] = rows.argmax(-1).tolist()

    def close(self, session):
        session.state.pop(self, None)


def method(drafter):
    law = "exact: greedy"
    return sb.Method("own", law, 1, lambda *_: Parts(drafter, MatchRule(), FixedShape(3, 1), law), greedy=True)


def session_of(pair, prompt, chosen, tokens=20):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": []}, None)
    return Request.of(pair, [prompt], chosen, settings, 3).sessions[0]


def pair_of(engine):
    model = tiny("llama", seed=1, vocab_size=64)
    return Pair(model, None, None, HuggingFaceLM(model, engine=engine), None)


class Seen:
    """Keeps the turns of sessions."""

    def __init__(self, pair, *sessions):
        self.turns = [(session, turn) for done in decode(pair.target, sessions) for session, turn in done]


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_drafts_are_read_from_mask_tokens_and_the_text_is_that_of_greedy_decoding(engine):
    pair = pair_of(engine)
    prompts = [[3, 4, 5], [9], [MASK, MASK, 7]]
    found = [session_of(pair, prompt, method(ParallelMasks())) for prompt in prompts]
    expected = [session_of(pair, prompt, sb.greedy()) for prompt in prompts]
    list(decode(pair.target, found))
    for session, plain in zip(found, expected, strict=True):
        assert session.failure is None
        list(decode(pair.target, [plain]))
        assert session.settled == plain.settled


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_extra_rows_see_their_path_and_nobody_sees_them(engine):
    pair = pair_of(engine)
    session = session_of(pair, [3, 4, 5], method(ParallelMasks()))
    text = [3, 4, 5]
    for done in decode(pair.target, [session]):
        for _, turn in done:
            for node in range(turn.forest.size):
                path = text + turn.forest.path(node)
                for number in range(2):
                    ids = torch.tensor([[*path, *[MASK] * (number + 1)]])
                    row = turn.scored.extra.logits[2 * node + number]
                    with torch.inference_mode():
                        torch.testing.assert_close(row, pair.target_model(ids).logits[0, -1], atol=2e-4, rtol=2e-4)
                with torch.inference_mode():
                    plain = pair.target_model(torch.tensor([path])).logits[0, -1]
                torch.testing.assert_close(turn.scored.logits[node], plain, atol=2e-4, rtol=2e-4)
        text = [3, 4, 5, *session.settled]


@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_extra_rows_may_be_given_by_embedding(engine):
    """A learnt mask: the row of the mask token itself, so that the drafts are the same."""
    pair = pair_of(engine)
    by_token, by_vector = (session_of(pair, [3, 4, 5], method(ParallelMasks(mask))) for mask in (MASK, -1))
    by_vector.vectors = {pair.target: pair.target_model.get_input_embeddings().weight[MASK : MASK + 1].detach()}
    forests = []
    for session in (by_token, by_vector):
        forests.append([turn.forest.tokens.tolist() for _, turn in Seen(pair, session).turns])
        assert session.failure is None
    assert forests[0] == forests[1]
    assert any(len(one) > 1 for one in forests[0])


def test_a_drafter_whose_extra_rows_hang_nowhere_ends_its_own_session_alone():
    class Broken(ParallelMasks):
        def extra_rows(self, session, forest):
            raise ValueError("no mask has been learnt")

    pair = pair_of("compiled")
    bad, good = session_of(pair, [3, 4, 5], method(Broken())), session_of(pair, [3, 4, 5], sb.greedy())
    list(decode(pair.target, [bad, good]))
    assert "draft: ValueError: no mask has been learnt" in str(bad.failure)
    assert good.failure is None
    assert Forest.rooted([5]).size == 1
