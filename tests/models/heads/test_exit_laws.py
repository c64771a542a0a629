"""The laws of what an exit layer drafts: with the controllers of its paper, enumerated, and on whole texts of tiny models.

Its law at a node is a function of the path alone, like that of a draft model, so the enumerations of tables hold for it. What
is its own is the length of a draft, which may look at what was drawn: what may be looked at, and what may not.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control import thompson
from specbeam.core.control.thompson import Thompson
from specbeam.core.decode import decode
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.models.heads.exit import ExitHead, ExitLM, exit_model
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.table import TableLM
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.compose import DraftKind, controller_maker
from tests.core.control.test_controllers import told
from tests.support.exact import distance, exact_law
from tests.support.examples import PAIRS, completed
from tests.support.programs import random_table, run, session_of, texts
from tests.support.steps import source_of_steps
from tests.support.tiny_models import tiny
from tests.test_laws_on_models import END, LENGTH, PROMPT, p_value, plain_law, softened


class Stated(TableLM):
    """A table in the place of an exit layer, which the recipe takes for one."""

    def __init__(self, rows):
        super().__init__(rows)
        self.head = some_head()


@cache
def some_head():
    return ExitHead(tiny("llama"), 1)


NAMED = ("beta_ts", "calibration_ts")
GROWTHS = {"chain": (2, (1,)), "tree": (2, (2, 1))}


def whole_text_law(method, target, draft, length):
    def program(dice):
        session = session_of(method, Stated(draft), dice, length)
        run(session, TableLM(target))
        return texts(session, False)

    law = {}
    for (ended, live), odds in exact_law(program).items():
        (text,) = ended or live
        law[text] = law.get(text, 0.0) + odds
    return law


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_a_whole_text_has_the_law_of_sampling(name, growth, rule):
    target, draft = random_table(3, 2), random_table(8, 2)
    method = sb.eesd(*GROWTHS[growth], rule, name)
    assert distance(whole_text_law(method, target, draft, 3), completed(target, (), 3)) < 1e-12


def test_the_names_of_the_paper_are_its_rules():
    def part(name):
        make = controller_maker(name, DraftKind("eesd", 6))
        return make(None, None)

    assert part("beta_ts") == Thompson(mode="step", most=6)
    assert part("calibration_ts") == Thompson(mode="step", calibrated=True, persistent=False, most=6)
    assert part("thompson") == Thompson(mode="best", most=6)
    assert part("calibrated") == Thompson(calibrated=True, mode="round", most=6)
    assert resolve("eesd").law == "exact: plain sampling"


def belief_session(controller):
    return session_of(sb.speculative_sampling(4, controller=controller), TableLM([0.5, 0.5]), steps=99)


def test_the_posterior_is_the_prior_and_the_sums_of_what_was_seen():
    """With and without what comes after the first refusal (EE-6)."""
    rng = np.random.default_rng(0)
    for censored in (True, False):
        controller = replace(Thompson(mode="step"), censored=censored, prior=(2.0, 3.0))
        session = belief_session(controller)
        accepted = refused = 0
        for _ in range(40):
            drafted = int(rng.integers(1, 6))
            passed = int(rng.integers(0, drafted + 1))
            controller.settle(session, told(passed, drafted))
            accepted += passed
            refused += (passed < drafted) if censored else drafted - passed
        assert controller._known(session).numbers.learnt[:2].tolist() == [2.0 + accepted, 3.0 + refused]


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_the_posterior_mean_finds_a_constant_rate(rate):
    """Within four standard deviations, also where drafts end by the controller's own coin (EE-7)."""
    controller = Thompson(mode="step", most=6)
    session = belief_session(controller)
    rng = np.random.default_rng(5)
    for _ in range(600):
        controller.plan(session)
        drafted = 1
        while drafted < 6 and controller.more(session, drafted, 0.5):
            drafted += 1
        passed = 0
        while passed < drafted and rng.random() < rate:
            passed += 1
        controller.settle(session, told(passed, drafted))
    accepted, refused, _ = controller._known(session).numbers.learnt
    seen = accepted + refused
    assert accepted / seen == pytest.approx(rate, abs=4 * (rate * (1 - rate) / seen) ** 0.5)


class EveryOutcome:
    """Coins that fall as they are told, and the odds of their falling so."""

    def __init__(self, falls):
        self.falls = list(falls)
        self.odds = 1.0

    def flip(self, odds):
        fall = self.falls.pop(0)
        self.odds *= odds if fall else 1 - odds
        return fall


def odds_of_lengths(controller, numbers, scores):
    """The odds to draft 1, 2, ... tokens of these draft probabilities, by every way in which coins may fall."""
    found = np.zeros(len(scores))
    for falls in itertools.product((True, False), repeat=len(scores)):
        session = belief_session(controller)
        controller.plan(session)
        coins = EveryOutcome(falls)
        stops = controller.stops(session, 0)._replace(coins=coins)
        stops.learnt[:] = numbers
        length = 1
        with source_of_steps():
            while length < len(scores) and thompson.toss(stops, scores[length - 1]):
                length += 1
        used = len(falls) - len(coins.falls)
        found[length - 1] += coins.odds / 2 ** (len(falls) - used)  # once for each way of those that are not tossed
    return found


def integral(function, low, high, pieces=60):
    """By Gauss's rule of 20 points in each piece."""
    points, weights = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(low, high, pieces + 1)
    half = np.diff(edges)[:, None] / 2
    middle = (edges[1:] + edges[:-1])[:, None] / 2
    return float((function(middle + half * points) * weights * half).sum())


@pytest.mark.parametrize("kind", ["beta_ts", "one rate a turn", "calibration_ts", "calibrated"])
def test_coins_fall_as_if_rates_were_drawn(kind):
    """The odds of each length are those of the rule that draws rates from the posterior, by integrals over them (1e-12)."""
    controller = {
        "beta_ts": Thompson(mode="step", most=4),
        "one rate a turn": Thompson(mode="round", most=4),
        "calibration_ts": Thompson(mode="step", calibrated=True, persistent=False, most=4),
        "calibrated": Thompson(mode="round", calibrated=True, most=4),
    }[kind]
    scores = (0.9, 0.35, 0.6, 0.5)
    for accepted, refused, error in ((1.0, 1.0, 0.05), (7.0, 3.0, 0.02), (4.0, 11.0, 0.2)):
        total = accepted + refused
        constant = math.gamma(total) / math.gamma(accepted) / math.gamma(refused)

        def moment(power, a=accepted, b=refused, constant=constant):
            return integral(lambda rate: constant * rate ** (a - 1 + power) * (1 - rate) ** (b - 1), 0.0, 1.0)

        mean = moment(1)
        if kind == "beta_ts":
            survive = [mean**tokens for tokens in range(4)]
        elif kind == "one rate a turn":
            survive = [moment(tokens) for tokens in range(4)]
        else:
            spread = 0.05 if kind == "calibrated" else moment(2) - mean**2
            survive = [1.0]
            for score in scores[:3]:
                weight = error / (error + spread)
                middle = weight * mean + (1 - weight) * score
                width = (error * spread / (error + spread)) ** 0.5

                def density(rate, middle=middle, width=width):
                    return np.exp(-(((rate - middle) / width) ** 2) / 2) / width / math.sqrt(2 * math.pi)

                inside = integral(lambda rate, density=density: rate * density(rate), 0.0, 1.0)
                above = integral(density, 1.0, 1.0 + 12 * width)
                survive.append(survive[-1] * (inside + above))
        expected = -np.diff([*survive, 0.0])
        found = odds_of_lengths(controller, (accepted, refused, error), scores)
        assert found == pytest.approx(expected, abs=1e-12)
        assert sum(found) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMED)
def test_a_decision_to_stop_knows_nothing_of_later_drafts(name):
    """Whether a draft goes on after its second token is the same whatever comes third (EE-8)."""
    make = controller_maker(name, DraftKind("eesd", 8))
    decisions = []
    for later in (0.1, 0.9):
        controller = make(None, None)
        session = belief_session(controller)
        seen = []
        for turn in range(30):
            controller.plan(session)
            seen += [controller.more(session, 1, 0.6), controller.more(session, 2, 0.4)]
            controller.more(session, 3, later)
            controller.settle(session, told(turn % 2, 3))  # the third token is never reached
        decisions.append(seen)
    assert decisions[0] == decisions[1]
    assert len(set(decisions[0])) == 2


# What must fail.

TARGET, DRAFT = PAIRS["EX3M"]


def judged(dice, p, q, token):
    """Accept a token that was drawn from q, or draw from what is left of p."""
    if dice.flip(min(1.0, p[token] / q[token])):
        return token, True
    rest = np.maximum(p - q, 0)
    return dice.pick(rest / rest.sum()), False


def two_tokens(step):
    """The law of texts of two tokens: `step` decodes some after a text, and says which."""

    def program(dice):
        text = ()
        while len(text) < 2:
            text += step(dice, text)
        return text[:2]

    return exact_law(program)


def stop_after(dice, text):
    """The draft ends after a token of low odds, which is judged like any other (T5)."""
    drafts = []
    while len(drafts) < 2:
        q = np.array(DRAFT((*text, *drafts)))
        drafts.append(dice.pick(q))
        if q[drafts[-1]] < 0.45:
            break
    return verified(dice, text, drafts)


def stop_before(dice, text):
    """The draft ends before a token of low odds, which is thrown away (T4)."""
    drafts = []
    while len(drafts) < 2:
        q = np.array(DRAFT((*text, *drafts)))
        token = dice.pick(q)
        if q[token] < 0.45:
            break
        drafts.append(token)
    return verified(dice, text, drafts)


def verified(dice, text, drafts):
    out = ()
    for token in drafts:
        p, q = (np.array(law((*text, *out))) for law in (TARGET, DRAFT))
        found, passed = judged(dice, p, q, token)
        out += (found,)
        if not passed:
            return out
    return (*out, dice.pick(np.array(TARGET((*text, *out)))))


def one_draw_for_each_row(dice, text):
    """Two candidates that share their first token are matched with a draw of their own each (T3)."""
    first = int(np.argmax(DRAFT(text)))
    rows = [(first, 0), (first, 1)]
    best = ()
    for row in rows:
        drawn = ()
        for token in row:
            found = dice.pick(np.array(TARGET((*text, *drawn))))
            if found != token:
                break
            drawn += (found,)
        best = max(best, drawn, key=len)
    return best or (dice.pick(np.array(TARGET(text))),)


def other_law_at_the_end(dice, text):
    """The token after drafts that all passed is drawn from the law before the warp, here at temperature 1 in place of 1/2
    (T6)."""
    p = sharper(TARGET(text))
    q = np.array(DRAFT(text))
    found, passed = judged(dice, p, q, dice.pick(q))
    return (found, dice.pick(np.array(TARGET((*text, found))))) if passed else (found,)


def sharper(law):
    odds = np.array(law) ** 2
    return odds / odds.sum()


def likeliest_as_if_drawn(dice, text):
    """The likeliest token of the exit layer, tried against its soft law (T1)."""
    q = np.array(DRAFT(text))
    return (judged(dice, np.array(TARGET(text)), q, int(np.argmax(q)))[0],)


def refused_for_the_whole_law(dice, text):
    """After a refusal the token is drawn from p, not from what is left of it (T2)."""
    p, q = np.array(TARGET(text)), np.array(DRAFT(text))
    token = dice.pick(q)
    return (token if dice.flip(min(1.0, p[token] / q[token])) else dice.pick(p),)


MISTAKES = {
    "T1": likeliest_as_if_drawn,
    "T2": refused_for_the_whole_law,
    "T3": one_draw_for_each_row,
    "T4": stop_before,
}


def test_a_draft_may_end_after_a_token_that_it_has_looked_at():
    assert distance(two_tokens(stop_after), completed(TARGET, (), 2)) < 1e-12


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_drafts_by_early_exits_are_caught(name):
    assert distance(two_tokens(MISTAKES[name]), completed(TARGET, (), 2)) > 0.02


def test_a_last_token_by_another_law_is_caught():
    expected = completed(lambda text: sharper(TARGET(text)), (), 2)
    assert distance(two_tokens(other_law_at_the_end), expected) > 0.02


# Whole texts of tiny models.

RECIPES = {
    "beta_ts": lambda: sb.eesd(3, controller="beta_ts"),
    "calibration_ts": lambda: sb.eesd(3),
    "a tree": lambda: sb.eesd(2, (2, 1), controller="beta_ts"),
    "from the end": lambda: sb.eesd(2, (2, 2), "traversal", "calibration_ts"),
    "matched": lambda: sb.eesd(3, rule="match", controller="survival"),
    "best length": lambda: sb.eesd(3, controller="thompson"),
    "best first": lambda: sb.opt_tree(4, 2, 3, rule="path"),
    "rsd_s": lambda: sb.rsd_s(3, 2),
    "one beam": lambda: sb.dsbd(1, 3, 2, "fixed"),
    "one beam by rejection": lambda: sb.dsbd(1, 3, 2, "fixed", coupling="rejection"),
    "sampling": lambda: sb.sampling(),
}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request):
    """On the target's own cache, and computed twice."""
    family = request.param
    named = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    model = softened(tiny(family, seed=3, vocab_size=6, eos_token_id=END, bos_token_id=0, pad_token_id=0, **named))
    pair = sb.load(model)
    if family == "gpt2":  # transformers' forward runs no range of layers
        pair = replace(pair, target=HuggingFaceLM(model, engine="plain"))
    torch.manual_seed(0)
    head = ExitHead(model, 1)
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    draft = exit_model(head.requires_grad_(False), pair.target)
    assert isinstance(draft, ExitLM if family == "llama" else HuggingFaceLM)
    return replace(pair, draft=draft)


def texts_of(pair, settings, draws, seed):
    requests = {
        name: Request.of(pair, [PROMPT] * draws, make(), Settings(max_new_tokens=LENGTH, **settings), seed + place)
        for place, (name, make) in enumerate(RECIPES.items())
    }
    line = [session for row in zip(*(one.sessions for one in requests.values()), strict=True) for session in row]
    for _ in decode(pair.target, line, at_once=200):
        pass
    return {
        name: Counter(tuple(next(one.hypotheses()).tokens) for one in request.sessions)
        for name, request in requests.items()
    }


SETTINGS = {"plain": {}, "cold": {"temperature": 0.7, "top_p": 0.9, "top_k": 3}}


@pytest.mark.parametrize("setting", ["cold"])
def test_mixed_batches_have_the_law_of_plain_sampling(pair, setting):
    check(pair, setting, draws=60)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_mixed_batches_have_the_law_of_plain_sampling_closely(pair, setting):
    check(pair, setting, draws=20_000)


def check(pair, setting, draws):
    law = plain_law(pair, SETTINGS[setting])
    found = texts_of(pair, SETTINGS[setting], draws, seed=11)
    values = {name: p_value(counts, law) for name, counts in found.items()}
    assert min(values.values()) > 1e-3, values


def test_audits_are_silent(pair):
    for name in ("beta_ts", "a tree", "one beam by rejection"):
        found = sb.generate(pair, [PROMPT] * 20, RECIPES[name](), seed=1, max_new_tokens=8, audit=True)
        assert all(one.report.audit is not None for one in found)
