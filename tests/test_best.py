"""`sb.best`: the most probable texts in order, each with a certificate; against all texts of small models."""

import itertools

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.agenda import Agenda
from specbeam.core.decode import decode
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Session
from specbeam.errors import NotSupported, TooFewAnswers
from specbeam.models.table import TableLM
from specbeam.recipes.best import best_first
from tests.support.constraints import warp_of
from tests.support.programs import random_table
from tests.test_constraint import random_automaton

VOCAB = 4
LONGEST = 4
END = (3,)


class Forgetful(TableLM):
    """A model that keeps no nodes from turn to turn."""

    keeps_nodes = False


def log_law(table, automaton, eos):
    """Log-probabilities after a path; banned tokens lose theirs, and nothing is renormalised."""

    def law(path):
        with np.errstate(divide="ignore"):
            logp = np.log(np.asarray(table(path)))
        if automaton is None:
            return logp
        tokens, complete = automaton.after(path)
        allowed = [token for token in tokens if token not in eos] + list(eos if complete else ())
        return np.where(np.isin(np.arange(VOCAB), allowed), logp, -np.inf)

    return law


def all_texts(law, eos, penalty):
    """(score, tokens) of every text that ends, best first; without end tokens all of the greatest length."""
    found = []

    def visit(path, loglik):
        if (path and path[-1] in eos) or (len(path) == LONGEST and not eos):
            found.append((loglik / len(path) ** penalty, path))
            return
        if len(path) == LONGEST:
            return
        for token, logp in enumerate(law(path)):
            if logp > -np.inf:
                visit((*path, token), loglik + float(logp))

    visit((), 0.0)
    return sorted(found, reverse=True)


def searched(method, target, draft=None, warp=None, eos=END, penalty=0.0, count=1):
    """Sessions after a search of the same prompt."""
    parts = method.parts(target, draft)
    limits = Limits(LONGEST, eos, keep=method.beams, length_penalty=penalty)
    sessions = [Session([0], parts, warp() if warp else Warp(search=True), limits, 0) for _ in range(count)]
    for _ in decode(target, sessions):
        pass
    for session in sessions:
        if session.failure:
            raise session.failure
    return sessions


SETTINGS = list(itertools.product((END, ()), (0.0, 1.0, -0.5), (False, True)))


@pytest.mark.parametrize("seed", range(100))
def test_texts_come_in_the_order_of_all_texts(seed):
    eos, penalty, is_constrained = SETTINGS[seed % len(SETTINGS)]
    target = random_table(seed, VOCAB, zeros=seed % 3 == 0)
    draft = random_table(seed + 500, VOCAB) if seed % 2 else target
    automaton = random_automaton(seed, VOCAB, eos) if is_constrained else None
    law = log_law(target, automaton, eos)
    expected = all_texts(law, eos, penalty)
    n = (None, 1, 3)[seed % 3]
    width = (1, 4, 32)[seed % 3]
    method = best_first(n, 10_000, width, 3, ("auto", "none", "prompt_lookup")[seed // 3 % 3])
    warp = (lambda: warp_of(automaton, eos, search=True)) if is_constrained else None
    kind = Forgetful if seed % 5 == 0 else TableLM
    (session,) = searched(method, kind(target), TableLM(draft), warp, eos, penalty)
    found = session.ended
    assert len(found) == min(len(expected), n or len(expected))
    scores = [session.limits.normalised(one.loglik, len(one.tokens)) for one in found]
    assert scores == pytest.approx([score for score, _ in expected[: len(found)]], abs=1e-9)
    assert {tuple(one.tokens) for one in found} <= {text for _, text in expected}
    assert len({tuple(one.tokens) for one in found}) == len(found)
    for place, (one, score) in enumerate(zip(found, scores, strict=True)):
        later = expected[place + 1][0] if place + 1 < len(expected) else -np.inf
        assert one.bound >= later - 1e-9
        assert score >= one.bound


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_makes_certificates_honest_and_bounds_the_agenda(seed):
    target = random_table(seed, VOCAB)
    limit = 1 + seed
    expected = all_texts(log_law(target, None, END), END, 0.0)
    (session,) = searched(best_first(None, limit, 4), TableLM(target), TableLM(random_table(seed + 9, VOCAB)))
    agenda = session.state[Agenda]
    assert agenda.scored <= limit
    given = set()
    scores = [one.loglik for one in session.ended]
    assert scores == sorted(scores, reverse=True)
    for one in session.ended:
        given.add(tuple(one.tokens))
        best_left = max((score for score, text in expected if text not in given), default=-np.inf)
        assert one.bound >= best_left - 1e-9
        if one.loglik >= one.bound:
            assert one.loglik >= best_left - 1e-9
    if agenda.scored == limit and len(session.ended) < len(expected):
        assert any(one.loglik < one.bound for one in session.ended) or not session.ended or agenda.dropped > -np.inf


def test_the_agenda_never_holds_more_open_entries_than_the_limit_has_room():
    rng = np.random.default_rng(1)
    agenda = Agenda(Limits(50, (0,), keep=5, length_penalty=0.0), 30)
    agenda.begin(np.log(rng.dirichlet(np.ones(500))))
    agenda.trim()
    while agenda.room:
        best = agenda.front(1)
        agenda.expand(int(best.parents[0]), int(best.tokens[0]), np.log(rng.dirichlet(np.ones(500))))
        agenda.trim()
        assert np.count_nonzero(~agenda.entries.ended) <= agenda.room
        assert np.count_nonzero(agenda.entries.ended) <= agenda.wanted
    assert agenda.scored == 30
    assert agenda.dropped > -np.inf


def test_forgotten_bans_are_looked_up_again(monkeypatch):
    automaton = random_automaton(4, VOCAB, END)
    target = random_table(4, VOCAB)
    expected = all_texts(log_law(target, automaton, END), END, 0.0)
    monkeypatch.setattr("specbeam.core.verify.best.MOST_PATHS", 0)
    (session,) = searched(
        best_first(None, 10_000, 2), TableLM(target), TableLM(target), lambda: warp_of(automaton, END, search=True)
    )
    assert [tuple(one.tokens) for one in session.ended] == [text for _, text in expected]


def test_sessions_in_one_batch_find_what_they_find_alone():
    target = TableLM(random_table(3, VOCAB))
    draft = TableLM(random_table(4, VOCAB))
    method = best_first(5, 100, 8)
    alone = searched(method, target, draft)[0]
    for one in searched(method, target, draft, count=3):
        assert [text.tokens for text in one.ended] == [text.tokens for text in alone.ended]


def test_a_draft_that_is_the_target_saves_passes():
    target = random_table(5, VOCAB)
    plain = searched(best_first(3, 1000, 4, drafter="none"), TableLM(target))[0]
    drafted = searched(best_first(3, 1000, 4, drafter="model"), TableLM(target), TableLM(target))[0]
    assert drafted.count.target_passes < plain.count.target_passes
    assert [one.tokens for one in drafted.ended] == [one.tokens for one in plain.ended]
    assert drafted.count.draft_passes > 0


@pytest.fixture(scope="module")
def pair():
    return sb.load("bundled")


def test_the_first_text_is_at_least_as_probable_as_beam_search_finds(pair):
    for prompt in ("Der Hund schläft.", "a r e n d t", "Ich habe keine Zeit."):
        best = next(sb.best(pair, prompt, 1, max_new_tokens=40))
        assert best.certain
        assert best.tokens[-1] in pair.eos
        for beams in (4, 16):
            options = {"length_penalty": 0.0, "max_new_tokens": 40, "early_stopping": "never"}
            (found,) = sb.generate(pair, prompt, sb.beam_search(beams), **options)
            assert best.score >= found.beams[0].score - 1e-4


def test_texts_with_a_score_of_beam_search_have_the_same_score(pair):
    texts = list(sb.best(pair, "Der Hund schläft.", 5, length_penalty=1.0, max_new_tokens=24))
    (found,) = sb.generate(pair, "Der Hund schläft.", sb.beam_search(8), length_penalty=1.0, max_new_tokens=24)
    scores = {tuple(one.tokens): one.score for one in found.beams}
    shared = [one for one in texts if tuple(one.tokens) in scores]
    assert len(shared) >= 2
    for one in shared:
        assert one.score == pytest.approx(scores[tuple(one.tokens)], abs=1e-4)
    assert [one.score for one in texts] == sorted([one.score for one in texts], reverse=True)


def test_drafts_change_the_cost_and_no_text(pair):
    found = {}
    passes = {}
    for drafter in ("model", "prompt_lookup", "none"):
        texts = sb.best(pair, "Ein Mann liest eine Zeitung.", 5, max_new_tokens=40, drafter=drafter)
        found[drafter] = [one.tokens for one in texts]
        passes[drafter] = texts.report.target_passes
        assert texts.report.rows.scored <= 2000
    assert found["model"] == found["prompt_lookup"] == found["none"]
    assert passes["model"] < passes["none"]


@pytest.mark.parametrize("stop", ["sleep", "is", "dog"])
def test_a_stop_string_ends_a_text_whatever_drafts_go_beyond_it(pair, stop):
    found = {}
    for drafter in ("none", "model", "prompt_lookup"):
        texts = list(sb.best(pair, "Der Hund schläft.", 3, drafter=drafter, stop_strings=stop, max_new_tokens=12))
        assert all(one.certain for one in texts)
        found[drafter] = [one.tokens for one in texts]
    assert found["none"] == found["model"] == found["prompt_lookup"]
    assert any(stop in one.text for one in texts)


def test_the_limit_leaves_texts_uncertain(pair):
    texts = list(sb.best(pair, "Der Hund schläft.", limit=40, max_new_tokens=40))
    assert texts[0].certain
    assert not texts[-1].certain
    assert texts[-1].bound > texts[-1].score


def test_texts_follow_a_regular_expression(pair):
    pytest.importorskip("llguidance")
    texts = list(
        sb.best(pair, "Der Hund schläft.", 4, regex="(The|A) (dog|cat) (is )?sleep(ing|s)\\.", max_new_tokens=20)
    )
    assert {one.text for one in texts} <= {f"{a} {b} {c}." for a in ("The", "A") for b in ("dog", "cat")
                                           for c in ("is sleeping", "sleeps", "sleeping", "is sleeps")}  # fmt: skip
    assert len(texts) == 4
    assert all(one.certain for one in texts)


def test_a_function_of_allowed_tokens_confines_texts_as_a_catalogue_does(pair):
    """And what a ban and the function forbid together stays forbidden: the text goes no further."""
    texts = ["The dog sleeps.", "The dog is sleeping.", "A dog sleeps.", "A cat sleeps."]
    tokens = [pair.tokenizer(text, add_special_tokens=False)["input_ids"] + [pair.eos[0]] for text in texts]
    prompt = "Der Hund schläft."
    start = len(sb.generate(pair, prompt, "greedy", max_new_tokens=1)[0].prompt)

    def allowed(number, ids):
        path = ids.tolist()[start:]
        return sorted({text[len(path)] for text in tokens if text[: len(path)] == path and len(text) > len(path)})

    confined = list(sb.best(pair, prompt, 4, prefix_allowed_tokens_fn=allowed, max_new_tokens=20))
    expected = list(sb.best(pair, prompt, 4, catalogue=texts, max_new_tokens=20))
    assert [one.tokens for one in confined] == [one.tokens for one in expected]
    assert [one.score for one in confined] == pytest.approx([one.score for one in expected])
    assert all(one.certain for one in confined)
    banned = tokens[0][0]
    with pytest.raises(TooFewAnswers, match="no text ended"):
        next(
            sb.best(
                pair, prompt, prefix_allowed_tokens_fn=lambda *_: [banned], suppress_tokens=[banned], max_new_tokens=4
            )
        )


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_texts_with_a_stop_string_are_given_at_the_limit(limit):
    """All that are known when there is no room for further prefixes, best first, however likely the open prefixes are."""
    target = TableLM(random_table(limit, VOCAB))
    decode_text = "".join
    limits = Limits(
        LONGEST, (), ("b",), lambda tokens: decode_text("abcd"[token] for token in tokens), keep=99, length_penalty=0.0,
        closing=np.array([False, True, False, False]),
    )  # fmt: skip
    session = Session([0], best_first(None, limit, 4).parts(target, None), Warp(search=True), limits, 0)
    for _ in decode(target, [session]):
        pass
    assert session.failure is None
    agenda = session.state[Agenda]
    scored = [tuple(agenda.text(prefix)) for prefix in range(agenda.count)]
    seen = {(*text, 1) for text in scored}
    assert {tuple(one.tokens) for one in session.ended} == seen
    scores = [one.loglik for one in session.ended]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("kind", [TableLM, Forgetful], ids=["keeps nodes", "keeps none"])
def test_each_scored_prefix_counts_as_drafted_once(kind):
    draft = TableLM(random_table(4, VOCAB))
    (session,) = searched(best_first(None, 60, 4), kind(random_table(3, VOCAB)), draft)
    agenda = session.state[Agenda]
    assert agenda.count - 1 <= session.count.drafted <= session.count.rows.scored
    if kind is TableLM:
        assert session.count.drafted == session.count.rows.scored - 1  # all but the prompt


def test_what_has_no_bound_is_refused(pair):
    with pytest.raises(NotSupported, match="best\\(\\) does not support top_p"):
        sb.best(pair, "Der Hund schläft.", top_p=0.9)
    with pytest.raises(NotSupported, match="depends on the other texts"):
        sb.best(pair, "Der Hund schläft.", diversity_penalty=0.5)
    with pytest.raises(NotSupported, match="give n in place"):
        sb.best(pair, "Der Hund schläft.", num_return_sequences=3)
    with pytest.raises(NotSupported, match="above 1"):
        next(sb.best(pair, "Der Hund schläft.", sequence_bias=[[[5], 2.0]]))
    with pytest.raises(TooFewAnswers, match="no text ended"):
        next(sb.best(pair, "Der Hund schläft.", min_new_tokens=3, max_new_tokens=3))


def test_two_searches_and_a_generation_take_turns(pair):
    first = sb.best(pair, "Der Hund schläft.", max_new_tokens=24)
    second = sb.best(pair, "Die Katze schläft.", max_new_tokens=24)
    one = next(first)
    other = next(second)
    (answer,) = sb.generate(pair, "Der Hund schläft.", "greedy", max_new_tokens=24)
    assert next(first).score <= one.score
    assert next(second).score <= other.score
    assert answer.text == one.text
    first.close()
    second.close()
