"""Runs audit themselves: correct ones pass, a wrong draft law and a wrong output law are seen."""

from dataclasses import dataclass

import numpy as np
import pytest
from specbeam.verify.draws import draws

import specbeam as sb
from specbeam import errors
from specbeam.control.fixed import FixedShape
from specbeam.draft.children import Draws, Independent
from specbeam.draft.tree import Branching, TreeDrafter
from specbeam.lm.table import TableLM
from specbeam.records import Audit
from specbeam.session import Parts
from specbeam.verify import single
from specbeam.verify.traversal import TraversalRule
from specbeam.verify.walk import PathRule
from tests.support import words
from tests.support.examples import PAIRS
from tests.support.programs import run, session_of


def audit_of(method, runs=100, steps=50):
    target, draft = (TableLM(one) for one in PAIRS["EX3M"])
    total = Audit()
    for key in range(runs):
        session = session_of(method, draft, steps=steps, key=key * 31 + 5)
        session.audited = True
        run(session, target)
        total += session.audit
    return total


@pytest.mark.parametrize(
    "method",
    [sb.speculative_sampling(3), sb.rsd_c((2, 2)), sb.traversal((2, 1)), sb.opt_tree(4, 2), sb.dsbd(2, 3, 2), sb.beam_sampling(3),
     sb.dsbd(2, 3, 2, coupling="rejection", replacement=True)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_correct_methods_pass(method):
    audit = audit_of(method, runs=40)
    assert not audit.suspicious
    assert audit.draws > 500


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.05, 0.1])
@pytest.mark.parametrize(
    "method", [sb.rsd_c((2, 2)), sb.rsd_s(3, 2), sb.traversal((2, 1)), sb.sequoia(5, 2), sb.dyspec(5, 2),
               sb.dsbd(1, 3, 2, coupling="rejection")], ids=lambda method: method.name)  # fmt: skip
def test_cold_drafts_that_are_sure_of_a_token_pass(method, temperature):
    """On the bundled pair, where small odds are as small as they get."""
    texts = ["Ein Hund läuft.", "Wo ist mein Hut?", "Ich habe meine Schlüssel im Auto vergessen."] * 40
    found = sb.generate("bundled", texts, method, seed=1, temperature=temperature, max_new_tokens=30, audit=True)
    audit = sum((one.report.audit for one in found), Audit())
    assert audit.draws > 500
    assert not audit.suspicious


@dataclass(frozen=True)
class Lying:
    """Draws from q, and says it drew from a sharper law."""

    def draw(self, q, count, dice):
        law = q**2
        return [Draws(Independent().draw(q, count, dice)[0].tokens, law / law.sum(), replacement=True)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [PathRule(), TraversalRule()], ids=lambda one: type(one).__name__)
def test_a_wrong_draft_law_is_seen(rule):
    method = sb.Method(
        "", "", 1, lambda _, lm: Parts(TreeDrafter(lm, Branching((1,), Lying())), rule, FixedShape(3, 1), "")
    )
    assert abs(audit_of(method, runs=200).z_accept) > 4


@pytest.mark.parametrize("method", [sb.block_verification(3), sb.traversal((2, 1))], ids=lambda method: method.name)
def test_rules_that_judge_from_the_leaves_are_audited_too(method):
    audit = audit_of(method, runs=10)
    assert audit.trials > 300
    assert audit.accept_variance > 10
    assert not audit.suspicious


def test_the_moments_of_a_worth():
    """What a candidate is worth has the mean and the spread that are noted for it; odds of dead tokens are 0."""
    r, law = np.array([0.3, 0.4, 0.1]), np.array([0.6, 0.2, 0.0])  # 0.2 of the draft's mass is on tokens that are cut
    seen = [(law[token], Audit.of_odds(r, law, min(1.0, r[token] / law[token]))) for token in (0, 1)]
    seen.append((0.2, Audit.of_odds(r, law, 0.0)))
    assert sum(odds * one.accept_surprise for odds, one in seen) == pytest.approx(0)
    assert sum(odds * one.accept_surprise**2 for odds, one in seen) == pytest.approx(seen[0][1].accept_variance)
    sure = Audit.of_odds(r, np.array([0.0, 1.0, 0.0]), 0.4)
    assert (sure.accept_surprise, sure.accept_variance) == (pytest.approx(0), pytest.approx(0))


def test_where_nothing_is_drawn_there_is_nothing_to_test():
    pair = words.pair()
    for method in (sb.speculative_sampling(3), sb.traversal((2, 1)), sb.dsbd(2, 3, 2, coupling="rejection")):
        one = sb.generate(pair, "abc", method, temperature=0, max_new_tokens=12, audit=True)[0]
        assert one.report.audit.empty
        assert not sb.generate(pair, "abc", method, seed=1, max_new_tokens=12, audit=True)[0].report.audit.empty


class Careless(PathRule):
    """After a refusal it draws from p and not from the residual."""

    def verify(self, session, forest, scored):
        walk, going = single.Walk(session, forest, scored), True
        while going and walk.node >= 0:
            drafts, p = walk.candidates(walk.node), walk.row(walk.node).p
            (taken,) = draws(walk.trials_under(walk.node), p, 1, session.dice)
            token = taken.token if taken.draft >= 0 else session.dice.pick(p)
            going = walk.emit(token, drafts[taken.draft][1] if taken.draft >= 0 else -1)
        return walk.verdict()


def test_a_wrong_output_law_is_seen():
    method = sb.Method(
        "",
        "",
        1,
        lambda _, lm: Parts(TreeDrafter(lm, Branching((1,), Independent())), Careless(), FixedShape(3, 1), ""),
    )
    assert abs(audit_of(method).z_logp) > 8


def test_the_report_has_the_audit_and_failures_are_loud(monkeypatch):
    pair = words.pair()
    one = sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=12, audit=True)[0]
    assert one.report.audit.trials > 0
    assert sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=3)[0].report.audit is None
    monkeypatch.setattr(Audit, "z_accept", 7.0)
    with pytest.warns(errors.AuditWarning, match="AUDIT FAILED"):
        sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=12, audit=True)


def test_the_moments_of_a_draw():
    p = np.array([0.5, 0.25, 0.25, 0.0])
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    drawn = [Audit.of_draw(logp, token) for token in range(3)]
    assert sum(odds * one.logp_surprise for odds, one in zip(p, drawn, strict=False)) == pytest.approx(0)
    assert sum(odds * one.logp_surprise**2 for odds, one in zip(p, drawn, strict=False)) == pytest.approx(
        drawn[0].logp_variance
    )


def test_one_token_of_no_odds_is_enough():
    logp = np.log(np.array([0.6, 0.4, 1e-300])) - np.array([0, 0, np.inf])
    assert not Audit.of_draw(logp, 0).suspicious
    whole = sum((Audit.of_draw(logp, token) for token in (0, 1, 0, 2)), Audit())
    assert (whole.impossible, whole.draws) == (1, 4)
    assert whole.suspicious
    assert abs(whole.z_logp) < 4
