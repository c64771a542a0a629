"""A timed turn leaves no trace, so that the next one is timed on the same cache."""

import torch

from specbeam.recipes.tuning.stored_prompt import StoredPrompt
from tests.support import words


def test_every_timed_turn_meets_the_same_cache():
    lm = words.pair(draft_seed=None).target
    context = StoredPrompt(lm, 20)
    costs = [context.turn(rows) for rows in (70, 1, 9)]  # 70: more than the vocabulary and the first slots
    assert [cost.kv_tokens for cost in costs] == [90, 21, 29]
    assert all(cost.pass_s > 0 and cost.settle_s > 0 for cost in costs)
    assert lm.held(context.session) == 20
    forest = context.root.grown([5, 6], [0, 1])
    found = lm.extend([context.session], [forest])[0].logits  # the root's row is the prompt's own
    ids = torch.tensor([[*context.session.prompt, 5, 6]])
    with torch.inference_mode():
        plain = lm.model(input_ids=ids).logits[0, -3:]
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    context.close()
    assert lm.caches == []
