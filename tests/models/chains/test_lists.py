"""Laws that are decided by lists of likeliest tokens: by enumeration, and where many tokens are equally likely."""

import gc
import re

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.draft.children import Distinct, Independent
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.errors import NotSupported, SomeFailed
from specbeam.models.chains.chains import Likeliest
from specbeam.models.chains.in_llama_cpp import best_of
from specbeam.models.chains.lm import BY_KEPT_TOKENS, ChainLM
from specbeam.models.chains.targets import ServedModel
from specbeam.models.pair import Pair
from specbeam.models.table import TableLM
from tests.core.verify.test_trees import method_of
from tests.support.exact import distance
from tests.support.examples import completed, law_and_mean
from tests.support.programs import random_table, session_of

KEPT = 2
VOCAB = 10  # of the enumerated tables


class TableScorer:
    """Scores chains by a table of laws, and lists at most `most_listed` tokens, equal ones by id."""

    engine = "table"
    name = "the table"
    more_listed = "list more"
    max_positions = None

    def __init__(self, law, vocab, most_listed):
        self.law = law
        self.vocab = vocab
        self.most_listed = most_listed
        self.listed = []
        self.closed = False

    def score(self, chains):
        found = []
        for chain in chains:
            self.listed.append(chain.listed)
            assert chain.listed <= self.most_listed
            texts = [chain.tokens[: stop + 1] for stop in range(chain.first, len(chain.tokens))]
            with np.errstate(divide="ignore"):
                logits = [np.log(np.asarray(self.law(tuple(text[1:])), dtype=np.float32)) for text in texts]
            rows = [best_of(row, chain.listed) for row in logits]
            found.append(Likeliest(*(np.stack(column) for column in zip(*rows, strict=True))))
        return found

    def close(self):
        self.closed = True


def kept_law(table):
    """The law after top-k."""

    def law(path):
        odds = np.array(table(path))
        odds[np.argsort(-odds)[KEPT:]] = 0
        return odds / odds.sum()

    return law


@pytest.mark.parametrize("rule", [MatchRule("dice"), PathRule(), TraversalRule()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("counts", "children"), [((1, 1), Independent()), ((2, 1), Distinct())])
def test_lists_of_a_few_tokens_give_the_law_of_the_whole_rows(rule, counts, children):
    """Of one turn of a tree, by enumeration; the scorer never lists the whole vocabulary."""
    assert type(rule) in BY_KEPT_TOKENS
    target, draft = random_table(3, VOCAB), random_table(4, VOCAB)
    scorer = TableScorer(target, VOCAB, VOCAB - 1)

    def program(dice):
        lm = TableLM(draft)
        warp = Warp(truncation=Truncation(top_k=KEPT))
        session = session_of(method_of(counts, children, rule)(lm), lm, dice, 20, warp=warp)
        forest = session.parts.drafter.draft([session], [session.parts.controller.plan(session)])[0]
        scored = ChainLM(scorer).extend([session], [forest])[0].logits
        verdict = rule.verify(session, forest, scored)
        return tuple(int(step.beams.tokens[0]) for step in verdict.steps), verdict.accepted

    law, _ = law_and_mean(program, kept_law(target), len(counts) + 1)
    assert distance(law, completed(kept_law(target), (), len(counts) + 1)) < 1e-6  # log-probabilities are float32
    assert max(scorer.listed) < VOCAB


def level(tied, vocab=64):
    """A table in which `tied` tokens are equally likely after token 9, and no two after other tokens."""
    usual = random_table(5, vocab)

    def law(path):
        if not path or path[-1] != 9:
            odds = usual(path[-1:]).copy()
            odds[9] = odds.max() + 0.1
            return odds
        odds = np.full(vocab, 0.001)
        odds[1 : 1 + tied] = 1.0
        odds[9] = 0.0
        return odds

    return law


def served(law, most_listed, vocab=64):
    scorer = TableScorer(law, vocab, most_listed)
    return Pair(ServedModel("table", vocab), None, None, ChainLM(scorer), None), scorer


METHODS = [
    (sb.sampling(), {"top_k": 4, "seed": 3}),
    (sb.prompt_lookup(), {"top_k": 4, "seed": 3}),
    (sb.beam_sampling(2), {"top_k": 4, "seed": 3, "temperature": 0.8}),
    (sb.greedy(), {}),
    (sb.beam_search(2), {}),
]
SETTINGS = {"max_new_tokens": 6, "eos_token_id": []}


@pytest.fixture(params=[True, False], ids=["in runs", "turn by turn"])
def runs(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(ChainLM, "supports_runs", False)


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[method.name for method, _ in METHODS])
def test_longer_lists_are_asked_for_where_many_tokens_are_equally_likely(runs, method, options):
    law = level(tied=25)
    pair, scorer = served(law, 40)
    whole, _ = served(law, 64)
    prompts = [[1, 2], [1, 3], [2, 5]]
    found = [one.tokens for one in sb.generate(pair, prompts, method, **SETTINGS, **options)]
    assert found == [one.tokens for one in sb.generate(whole, prompts, method, **SETTINGS, **options)]
    assert any(9 in text for text in found)
    assert min(scorer.listed) < 15
    assert method.greedy or 15 < max(scorer.listed) <= 40  # the likeliest of equal ones come first by id


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[method.name for method, _ in METHODS])
def test_equally_likely_tokens_beyond_the_longest_list_cost_their_own_prompt(runs, method, options):
    usual = level(tied=30)

    def law(path):
        odds = np.array(usual(path))
        if 7 not in path[:1]:
            odds[9] = 1e-30
        return odds

    pair, _ = served(law, 20)
    whole, _ = served(law, 64)
    prompts = [[1, 2], [1, 7], [2, 5]]
    expected = [one.tokens for one in sb.generate(whole, prompts, method, **SETTINGS, **options)]
    with pytest.raises(SomeFailed) as raised:
        sb.generate(pair, prompts, method, **SETTINGS, **options)
    (failure,) = raised.value.failures
    assert isinstance(failure, NotSupported)
    assert re.match(r"prompt 1, step \d: after this text more tokens are equally likely than the 20 that", str(failure))
    answered = [one and one.tokens for one in raised.value.generations]
    assert answered == [expected[0], None, expected[2]]


def test_an_engine_is_freed_when_its_pair_is_dropped_or_its_with_ends():
    """At once, and not by a garbage collection, which is rare."""
    pair, scorer = served(level(tied=3), 20)
    sb.generate(pair, [1, 2], sb.greedy(), **SETTINGS)
    gc.disable()
    try:
        del pair
        assert scorer.closed
    finally:
        gc.enable()
    pair, scorer = served(level(tied=3), 20)
    with pair as opened:
        assert sb.generate(opened, [1, 2], sb.greedy(), **SETTINGS)
        assert not scorer.closed
    assert scorer.closed
