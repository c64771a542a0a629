"""Runs audit themselves: correct ones pass, a wrong draft law and a wrong output law are seen."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

import specbeam as sb
from specbeam import errors
from specbeam.core.audit import ALARM, Audit
from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.children import Draws
from specbeam.core.draft.tree import Branching, TreeDrafter
from specbeam.core.laws.evidence import TILTS
from specbeam.core.session import Parts
from specbeam.core.verify import walk
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import PathRule
from specbeam.models.table import TableLM
from tests.support import words
from tests.support.evidence import of_acceptance, of_draw, of_trial
from tests.support.exact import exact_law
from tests.support.examples import PAIRS
from tests.support.programs import run, session_of
from tests.support.quick import first_quick
from tests.support.steps import source_of_steps


def audited(method, steps, dice=None, key=0):
    """The audit of one session on the tables of EX3M."""
    target, draft = (TableLM(one) for one in PAIRS["EX3M"])
    session = session_of(method, draft, dice, steps=steps, key=key)
    session.audited = True
    run(session, target)
    return session.audit


def audit_of(method, runs=100, steps=50):
    """The audits of many sessions, added up."""
    total = Audit()
    with source_of_steps():
        for key in range(runs):
            total += audited(method, steps, key=key * 31 + 5)
    return total


@pytest.mark.parametrize(
    "method",
    [sb.speculative_sampling(3), sb.rsd_c((2, 2)), sb.traversal((2, 1)), sb.opt_tree(4, 2), sb.dsbd(2, 3, 2, width="dynamic"), sb.beam_sampling(3),
     sb.dsbd(2, 3, 2, coupling="rejection", replacement=True, width="dynamic")],
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
               sb.dsbd(1, 3, 2, coupling="rejection", width="dynamic")], ids=lambda method: method.name)  # fmt: skip
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
        return [Draws([dice.pick(q) for _ in range(count)], law / law.sum(), replacement=True)]


@pytest.mark.parametrize("rule", first_quick([PathRule(), TraversalRule()]), ids=lambda one: type(one).__name__)
def test_a_wrong_draft_law_is_seen(rule):
    method = sb.Method(
        "", "", 1, lambda _, lm: Parts(TreeDrafter(lm, Branching((1,), Lying())), rule, FixedShape(3, 1), "")
    )
    audit = audit_of(method)
    assert abs(audit.z_accept) > 4
    assert audit.suspicious


@pytest.mark.parametrize("method", [sb.block_verification(3), sb.traversal((2, 1))], ids=lambda method: method.name)
def test_rules_that_judge_from_the_leaves_are_audited_too(method):
    audit = audit_of(method, runs=10)
    assert audit.trials > 300
    assert audit.accept_variance > 10
    assert not audit.suspicious


def test_the_moments_of_an_acceptance_probability():
    """The acceptance probability of a candidate has the mean and the spread that are noted; odds of dead tokens are 0."""
    r, law = np.array([0.3, 0.4, 0.1]), np.array([0.6, 0.2, 0.0])  # 0.2 of the draft's mass is on tokens that are cut
    seen = [(law[token], of_acceptance(r, law, min(1.0, r[token] / law[token]))) for token in (0, 1)]
    seen.append((0.2, of_acceptance(r, law, 0.0)))
    assert sum(odds * one.accept_surprise for odds, one in seen) == pytest.approx(0)
    assert sum(odds * one.accept_surprise**2 for odds, one in seen) == pytest.approx(seen[0][1].accept_variance)
    sure = of_acceptance(r, np.array([0.0, 1.0, 0.0]), 0.4)
    assert (sure.accept_surprise, sure.accept_variance) == (pytest.approx(0), pytest.approx(0))


def test_where_nothing_is_drawn_there_is_nothing_to_test():
    pair = words.pair()
    for method in (
        sb.speculative_sampling(3),
        sb.traversal((2, 1)),
        sb.dsbd(2, 3, 2, coupling="rejection", width="dynamic"),
    ):
        one = sb.generate(pair, "abc", method, temperature=0, max_new_tokens=12, audit=True)[0]
        assert one.report.audit.empty
        assert not sb.generate(pair, "abc", method, seed=1, max_new_tokens=12, audit=True)[0].report.audit.empty


def test_a_wrong_output_law_is_seen(monkeypatch):
    """After a refusal the next token is drawn from p, and not from the residual."""
    right = walk.try_groups

    def forgets_refusals(rest, *given):
        wanted = rest.copy()
        draw = getattr(right, "py_func", right)(rest, *given)
        if draw < 0:
            rest[:] = wanted
        return draw

    monkeypatch.setattr(walk, "try_groups", forgets_refusals)
    audit = audit_of(sb.speculative_sampling(3))
    assert abs(audit.z_logp) > 8
    assert audit.suspicious


def test_the_report_has_the_audit_and_failures_are_loud(monkeypatch):
    pair = words.pair()
    one = sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=12, audit=True)[0]
    assert one.report.audit.trials > 0
    assert sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=3)[0].report.audit is None
    monkeypatch.setattr(Audit, "evidence", ALARM)
    with pytest.warns(errors.AuditWarning, match="AUDIT FAILED"):
        sb.generate(pair, "abc", sb.speculative_sampling(3), seed=1, max_new_tokens=12, audit=True)


def test_the_moments_of_a_draw():
    p = np.array([0.5, 0.25, 0.25, 0.0])
    with np.errstate(divide="ignore"):
        logp = np.log(p)
    drawn = [of_draw(logp, token) for token in range(3)]
    assert sum(odds * one.logp_surprise for odds, one in zip(p, drawn, strict=False)) == pytest.approx(0)
    assert sum(odds * one.logp_surprise**2 for odds, one in zip(p, drawn, strict=False)) == pytest.approx(
        drawn[0].logp_variance
    )


def test_one_token_of_no_odds_is_enough():
    logp = np.log(np.array([0.6, 0.4, 1e-300])) - np.array([0, 0, np.inf])
    assert not of_draw(logp, 0).suspicious
    whole = sum((of_draw(logp, token) for token in (0, 1, 0, 2)), Audit())
    assert (whole.impossible, whole.draws) == (1, 4)
    assert whole.suspicious
    assert abs(whole.z_logp) < 4
    assert whole.evidence == math.inf
    assert replace(whole, impossible=0).evidence < ALARM


LAWS = [(0.5, 0.25, 0.25), (0.999, 0.001), (0.9, 0.0999, 0.0001), (0.2, 0.2, 0.6)]


def test_each_bet_is_fair():
    """Its mean wealth after one outcome is 1, whatever is bet on."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 40):
        r, law = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size) * 0.3)
        r[0] = 0.0  # a token that is cut
        law *= rng.choice([1.0, 0.8])  # the rest is on tokens that the target cannot say
        of_draws = [(odds, of_draw(np.log(law / law.sum()), token)) for token, odds in enumerate(law / law.sum())]
        odds = float(np.minimum(r, law).sum())
        of_trials = [(odds, of_trial(r, law, True)), (1 - odds, of_trial(r, law, False))]
        of_acceptances = [(law[t], of_acceptance(r, law, min(1.0, r[t] / law[t]))) for t in range(size)]
        of_acceptances.append((1 - law.sum(), of_acceptance(r, law, 0.0)))
        for seen in (of_draws, of_trials, of_acceptances):
            for gains in ("trial_gains", "draw_gains"):
                wealth = sum(chance * np.exp(getattr(one, gains)) for chance, one in seen)
                assert wealth == pytest.approx(np.ones(len(TILTS)), abs=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_however_few_draws_there_are_a_run_of_the_declared_law_seldom_alarms(law):
    """All texts of up to seven draws, each watched by someone who stops at the worst moment."""
    single = [of_draw(np.log(law), token) for token in range(len(law))]
    worst = []
    for text in itertools.product(range(len(law)), repeat=7):
        sums = itertools.accumulate(single[token] for token in text)
        odds = math.prod(law[token] for token in text)
        worst.append((max(one.evidence for one in sums), odds))
    for much in (1.5, 2, 5, 20, 100, 1000, ALARM):
        assert math.fsum(odds for evidence, odds in worst if evidence >= much) <= 1 / much
    assert math.fsum(odds for _, odds in worst) == pytest.approx(1)


def test_one_unlikely_draw_is_far_from_normal_and_no_alarm():
    """Of a law of (0.999, 0.001) one draw in a thousand lies 31 standard deviations off."""
    one = of_draw(np.log([0.999, 0.001]), 1)
    assert abs(one.z_logp) > 30
    assert not one.suspicious


ENUMERATED = {
    "chain": (lambda: sb.speculative_sampling(2), 3),
    "several drafts": (lambda: sb.rsd_c((2, 1)), 3),
    "traversal": (lambda: sb.traversal((2, 1)), 3),
    "grown by draws": (lambda: sb.dyspec(3, 2, 0.2), 3),
    "grown by draws, traversal": (lambda: sb.dyspec(3, 2, 0.2, rule="traversal"), 3),
    "beams": (lambda: sb.dsbd(2, 2, 1, "fixed", coupling="rejection"), 2),
}


@pytest.mark.parametrize("name", ENUMERATED)
def test_the_mean_wealth_of_each_bet_on_a_whole_decoding_is_one(name):
    """By enumeration of the shipped steps. Trees that grow by what was drawn failed it by 0.006 under the traversal rule as
    long as the trials after the first path were bet on: where their parents hang tells of them.
    """
    method, steps = ENUMERATED[name]

    def program(dice):
        audit = audited(method(), steps, dice)
        return audit.trial_gains, audit.draw_gains

    law = exact_law(program)
    for stream in (0, 1):
        wealth = sum(odds * np.exp(gains[stream]) for gains, odds in law.items())
        assert wealth == pytest.approx(np.ones(len(TILTS)), abs=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        sb.speculative_sampling(3),
        sb.traversal((2, 1)),
        sb.beam_sampling(2),
        sb.dsbd(2, 3, 2, coupling="rejection", width="dynamic"),
    ],
    ids=lambda method: method.name,
)
def test_short_runs_of_correct_methods_do_not_alarm(method):
    evidence = []
    with source_of_steps():
        for key in range(400):
            evidence.append(audited(method, 1 + key % 7, key=key * 17 + 3).evidence)
    assert max(evidence) < ALARM
    for much in (3, 10, 100):
        assert np.mean(np.array(evidence) >= much) <= 1 / much


def test_evidence_adds_up_over_turns_and_sessions():
    """Of many short reports of a wrong law none may be enough, and all together are."""
    logp = np.log([0.5, 0.3, 0.2])
    draws = [of_draw(logp, 0) for _ in range(60)]
    halves = sum(draws[:30], Audit()), sum(draws[30:], Audit())
    whole = halves[0] + halves[1]
    assert whole.draws == 60
    assert whole.draw_gains == pytest.approx(np.array(halves[0].draw_gains) + np.array(halves[1].draw_gains))
    assert not any(one.suspicious for one in draws)
    assert whole.suspicious
    assert whole.trial_gains == Audit().trial_gains
    assert Audit().evidence == 1.0


def test_an_audit_prints_its_evidence_and_not_the_wealth_of_each_bet():
    audit = Audit(accept_surprise=1.5, accept_variance=4.0, trials=20, draws=31)
    assert repr(audit) == "Audit(evidence=1, suspicious=False, trials=20, draws=31, z_accept=0.75, z_logp=0.00)"
    assert repr(Audit(draws=1, impossible=1)).endswith("z_logp=0.00, impossible=1)")
