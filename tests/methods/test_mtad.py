"""Multi-token assisted decoding (arXiv 2407.09722) end to end: on tables, on tiny Transformers, through cache and mask."""

import math

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.confidence import SureDraft
from specbeam.core.control.fixed import FixedShape
from specbeam.core.decode import decode
from specbeam.core.draft.children import Distinct, Independent
from specbeam.core.draft.stochastic import StochasticBeam
from specbeam.core.draft.tree import Branching, FixedTree, TreeDrafter
from specbeam.core.laws.warp import Warp
from specbeam.core.records import Scored
from specbeam.core.session import Parts
from specbeam.doors.fastest import candidates
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BadSetting, SomeFailed
from specbeam.generation import turns_of
from specbeam.lab.evaluate.perplexity import log_likelihoods
from specbeam.models.pair import BUNDLED
from specbeam.models.table import TableLM
from specbeam.recipes.joint.beam_drafter import JointBeams
from specbeam.recipes.joint.beam_rule import JointRule
from tests.support import words
from tests.support.checking import refused
from tests.support.exact import exact_law
from tests.support.joint import P, Q, drafted, first_order, first_turn, letters, odds_of, seated, text_of
from tests.support.ngrams import ngram_tables
from tests.support.programs import random_table, run
from tests.support.tiny_models import tiny

GREEDY = Warp(greedy=True)
FAMILY = {"mtad": sb.mtad, "mjsd": sb.mjsd, "mmtad": sb.mmtad}
PROMPTS = ["abc", "Hello world", "x", "The end.", "no yes no yes"]


def by_dice(beams, depth, threshold):
    """`mtad` whose bonus is drawn by the session's dice, for enumeration."""

    def build(target, draft):
        rule = JointRule(threshold, 1, coupling="dice")
        return Parts(TreeDrafter(draft, JointBeams("sample", chains=1)), rule, FixedShape(depth, beams), "")

    return sb.Method("mtad", "", 1, build, needs_draft=True)


def one_iteration(threshold, dice=None, key=0):
    """Accepted tokens, emitted tokens, and their log-likelihood."""
    session, target = seated(by_dice(2, 2, threshold), P, Q, dice, steps=9, key=key)
    verdict, _ = first_turn(session, target)
    tokens = tuple(int(step.beams.tokens[0]) for step in verdict.steps)
    assert len(tokens) == verdict.accepted + 1
    return verdict.accepted, len(tokens), math.log(odds_of(P, tokens))


@pytest.fixture(scope="module")
def drafts():
    """Every draft of that iteration with its odds."""
    forests = {}

    def program(dice):
        forest, _ = drafted(JointBeams("sample", chains=1), Q, 2, 2, dice)
        forests[tuple(forest.tokens.tolist())] = forest
        return tuple(forest.tokens.tolist())

    return [(forests[tokens], odds) for tokens, odds in exact_law(program).items()]


def verified(forest, threshold, dice):
    """Accepted tokens, emitted tokens, and their log-likelihood, for one draft."""
    session, target = seated(by_dice(2, 2, threshold), P, Q, dice, steps=9)
    verdict = session.parts.rule.verify(session, forest, target.extend([session], [forest])[0].logits)
    tokens = tuple(int(step.beams.tokens[0]) for step in verdict.steps)
    return verdict.accepted, len(tokens), math.log(odds_of(P, tokens))


WORKED = [(0.1, 2.0, 2.2939), (0.5, 1.9238, 2.1950), (0.7, 1.9238, 2.1950), (0.9, 1.8168, 2.1900)]


@pytest.mark.parametrize(("threshold", "accepted", "perplexity"), WORKED)
def test_one_worked_iteration_by_enumeration(drafts, threshold, accepted, perplexity):
    """The reference, two tokens of plain sampling, is 2.3934."""
    means = np.zeros(3)
    for forest, odds in drafts:
        for outcome, chance in exact_law(lambda dice, forest=forest: verified(forest, threshold, dice)).items():
            means += odds * chance * np.array(outcome)
    assert means[0] == pytest.approx(accepted, abs=1e-4)
    assert math.exp(-means[2] / means[1]) == pytest.approx(perplexity, abs=1e-4)


@pytest.mark.parametrize(("threshold", "accepted", "perplexity"), WORKED[1:2])
def test_one_worked_iteration_by_simulation(threshold, accepted, perplexity):
    table = np.array([one_iteration(threshold, key=key * 7919 + 1) for key in range(400)])
    spread = table[:, 0].std() / math.sqrt(len(table))
    assert abs(table[:, 0].mean() - accepted) < 4 * spread
    logp = table[:, 2] + table[:, 1] * math.log(perplexity)  # of mean zero
    assert abs(logp.mean()) < 4 * logp.std() / math.sqrt(len(table))


# The greedy variant.


def text(method, target, draft, steps=6, eos=(), key=0, warp=GREEDY):
    session, lm = seated(method, target, draft, None, steps, eos, key, warp)
    run(session, lm)
    return text_of(session)


def greedy(target, steps=6):
    return text(sb.greedy(), target, None, steps)


@pytest.mark.parametrize("name", FAMILY)
def test_worked_greedy_variant(name):
    """Equal models: blocks of two by joint search, and with a bonus the greedy token after each. At the start greedy says a,
    the block says ba: the rule does not collapse to exact matching.
    """
    make = FAMILY[name]
    assert letters(text(make(beams=3, depth=2, bonus="none"), P, P)) == "bababa"
    assert letters(text(make(beams=3, depth=2), P, P)) == "baabaa"
    assert letters(greedy(P)) == "aaaaaa"


def test_an_exhaustive_draft_without_bonus_is_joint_decoding():
    for seed in range(6):
        table = random_table(seed, 3)
        for depth in (2, 3):
            exhaustive = sb.mtad(3 ** (depth - 1), depth, bonus="none")
            assert text(exhaustive, table, table, 6) == text(sb.mtjd("argmax", depth), table, None, 6)


def test_one_beam_of_an_equal_model_is_greedy():
    for seed in range(6):
        table = random_table(seed, 4)
        for bonus in ("sample", "argmax", "none"):
            assert text(sb.mtad(1, 3, bonus=bonus), table, table, 8) == greedy(table, 8)


@pytest.mark.parametrize("name", FAMILY)
def test_threshold_one_is_the_target_alone(name):
    """At temperature 0 greedy decoding; else the text of plain sampling with the same seed."""
    for seed in range(4):
        target, draft = random_table(seed, 4), random_table(seed + 50, 4)
        method = FAMILY[name](beams=3, depth=3, threshold=1.0)
        assert text(method, target, draft, 8) == greedy(target, 8)
        sampled = text(method, target, draft, 8, (3,), seed, Warp())
        assert sampled == text(sb.sampling(), target, None, 8, (3,), seed, Warp())


@pytest.mark.parametrize("name", FAMILY)
def test_equal_models_accept_everything(name):
    for seed in range(4):
        table = random_table(seed, 4)
        for beams in (2, 3):
            extra = {"chains": 2} if name == "mjsd" else {}
            session, lm = seated(FAMILY[name](beams=beams, depth=3, threshold=0.99, **extra), table, table, steps=12)
            assert [turn.verdict.accepted for turn in run(session, lm)] == [3, 3, 3]


def test_the_bonus_can_be_the_best_token():
    session, lm = seated(sb.mtad(3, 2, 1.0, bonus="argmax"), P, Q, steps=4)
    run(session, lm)
    assert letters(text_of(session)) == "aaaa"


# What is emitted, and when it ends.


@pytest.mark.parametrize("name", FAMILY)
def test_a_turn_emits_what_it_accepts_and_one_more(name):
    for seed in range(8):
        target, draft = random_table(seed, 4), random_table(seed + 50, 4)
        session, lm = seated(FAMILY[name](depth=3, threshold=0.3), target, draft, steps=20, key=seed)
        turns = run(session, lm)
        for turn in turns:
            assert len(turn.verdict.steps) == turn.verdict.accepted + 1
        accepted = sum(turn.verdict.accepted for turn in turns)
        assert session.length == 20 == len(turns) + accepted
        assert session.count.accepted == accepted


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("bonus", ["sample", "none"])
def test_nothing_stands_behind_an_end_or_the_limit(name, bonus):
    """Also where the end is the first new token, the last draft, or the bonus, and everything was accepted."""
    ends = set()
    for seed in range(60):
        target, draft = random_table(seed, 4), random_table(seed // 2, 4)
        session, lm = seated(FAMILY[name](depth=3, threshold=0.1, bonus=bonus), target, draft, None, 7, (3,), seed)
        turns = run(session, lm)
        tokens = text_of(session)
        assert len(tokens) <= 7
        assert 3 not in tokens[:-1]
        assert (tokens[-1] == 3) or len(tokens) == 7
        if tokens[-1] == 3:
            last = turns[-1].verdict
            ends.add("bonus" if not last.steps[-1].passed else "draft")
            assert last.steps[-1].ended.all()
    assert ends == {"bonus", "draft"} or (bonus == "none" and ends == {"draft"})


def test_stop_strings_end_inside_a_block():
    pair = words.pair()
    (free,) = sb.generate(pair, "Hello", sb.mmtad(threshold=0.0), seed=3, max_new_tokens=30, eos_token_id=[])
    stop = free.text[1:3]
    (cut,) = sb.generate(
        pair, "Hello", sb.mmtad(threshold=0.0), seed=3, max_new_tokens=30, eos_token_id=[], stop_strings=stop
    )
    assert free.text.startswith(cut.text)
    assert cut.text.endswith(stop)
    assert len(cut.text) < len(free.text)


@pytest.mark.parametrize("name", FAMILY)
def test_smallest_settings(name):
    """One beam, one token, more beams than tokens, threshold 0."""
    for beams, depth in ((1, 1), (9, 1), (1, 4), (9, 4)):
        extra = {"chains": 1} if name == "mjsd" else {}
        for threshold in (0.0, 0.5):
            method = FAMILY[name](beams=beams, depth=depth, threshold=threshold, **extra)
            assert len(text(method, P, Q, 7, warp=Warp())) == 7
            assert len(text(method, random_table(1, 3, zeros=True), Q, 7, warp=Warp())) == 7


def test_the_same_seed_gives_the_same_text():
    texts = {tuple(text(sb.mtad(), P, Q, 12, key=key, warp=Warp())) for key in (1, 1, 2, 3)}
    assert len(texts) == 3


def test_controllers_choose_the_depth():
    sure = first_order((0.96, 0.02, 0.02), (0.96, 0.02, 0.02), (0.96, 0.02, 0.02), (0.96, 0.02, 0.02))
    for draft, deepest in ((sure, 6), (lambda path: np.full(3, 1 / 3), 1)):
        session, lm = seated(sb.mtad(controller=SureDraft(0.5, most=6, width=2)), P, draft, steps=20)
        assert max(turn.forest.depths().max() for turn in run(session, lm)) == deepest


# Through caches, masks and positions.


class Recomputing:
    """The target without cache and tree mask: every node by a plain forward over its own path."""

    def __init__(self, model):
        self.model, self.vocab, self.max_positions = model, model.get_output_embeddings().weight.shape[0], None

    def extend(self, sessions, forests):
        rows = []
        for session, forest in zip(sessions, forests, strict=True):
            start = session.state.get(self, 0)
            session.state[self] = forest.size
            paths = [session.paths(forest, np.array([node]))[0] for node in range(start, forest.size)]
            with torch.inference_mode():
                logits = [self.model(torch.from_numpy(path)[None]).logits[0, -1] for path in paths]
            rows.append(Scored(torch.stack(logits)))
        return rows

    def settle(self, session, turn):
        session.state.pop(self, None)

    close = lambda self, session: session.state.pop(self, None)  # noqa: E731

    def peak(self, session):
        return 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("name", ["mtad", "mmtad"])
def test_tree_attention_gives_what_recomputation_gives(family, name):
    """Same forests, same decisions, log-probabilities to 1e-5, turn after turn: so the caches after every selection (none,
    some or all of the drafts accepted) are those of the committed tokens.
    """
    pair = sb.load(tiny(family, seed=0), tiny(family, seed=1, num_hidden_layers=1))
    plain = Recomputing(pair.target_model), Recomputing(pair.draft_model)
    lengths = set()
    for threshold in (0.0, 0.05, 1.0):
        method = FAMILY[name](3, 3, threshold)
        settings = Settings(max_new_tokens=14, temperature=0, eos_token_id=[])
        sessions = [Request.of(pair, [[5, 6, 7]], method, settings, 1).sessions[0] for _ in range(2)]
        sessions[1].parts = method.parts(plain[0], plain[1])
        runs = [list(decode(lm, [one])) for lm, one in zip((pair.target, plain[0]), sessions, strict=True)]
        assert text_of(sessions[0]) == text_of(sessions[1])
        for (fast,), (slow,) in zip(*runs, strict=True):
            assert fast[1].forest.tokens.tolist() == slow[1].forest.tokens.tolist()
            np.testing.assert_allclose(fast[1].forest.logq, slow[1].forest.logq, atol=1e-5)
            torch.testing.assert_close(
                fast[1].scored.logits.log_softmax(-1), slow[1].scored.logits.log_softmax(-1), atol=1e-5, rtol=1e-5
            )
            lengths.add(fast[1].verdict.accepted)
    assert {0, 3} <= lengths


@pytest.mark.parametrize("name", FAMILY)
def test_a_batch_gives_what_its_prompts_give_alone(name):
    pair = words.pair()
    method = FAMILY[name](depth=3, threshold=0.05)
    for options in ({"temperature": 0}, {}, {"temperature": 0.7, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.2}):
        together = sb.generate(pair, PROMPTS, method, seed=4, max_new_tokens=14, **options)
        alone = [sb.generate(pair, one, method, seed=4, max_new_tokens=14, **options)[0] for one in PROMPTS]
        assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("sound", [0, 2, 6])
@pytest.mark.parametrize("name", FAMILY)
def test_a_prompt_that_fails_takes_nothing_from_the_others(name, sound):
    """A processor that breaks for one prompt of three, after some new tokens: in the draft or in the verification."""

    def allowed(number, tokens):
        if number == 1 and len(tokens) > len(PROMPTS[1]) + sound:
            raise ValueError("no more of this")
        return list(range(3, 61))

    pair, method = words.pair(), FAMILY[name](depth=3, threshold=0.05)
    options = {"seed": 4, "max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed}
    with pytest.raises(SomeFailed, match="no more of this") as caught:
        sb.generate(pair, PROMPTS[:3], method, **options)
    done = caught.value.generations
    assert done[1] is None
    for place in (0, 2):
        assert done[place].tokens == sb.generate(pair, PROMPTS[place], method, **options)[0].tokens


def test_scores_and_certificates_are_those_of_the_model():
    pair = words.pair()
    done = sb.generate(pair, PROMPTS, sb.mmtad(threshold=0.2), seed=1, max_new_tokens=20)
    logp = log_likelihoods(pair, [one.prompt for one in done], [one.tokens for one in done])
    assert [one.beams[0].score * len(one.tokens) for one in done] == pytest.approx(logp, abs=1e-3)
    for one in done:
        assert one.report.law.startswith("approximate: changes the output law")
        seen = one.report.certificate
        if seen is not None:
            assert seen.tokens == one.report.accepted
            assert seen.floor < seen.logp <= 0 <= seen.gap


def test_mjsd_scores_no_more_than_its_chains():
    pair = words.pair()
    for turn in turns_of(pair, "abc", sb.mjsd(chains=2, beams=6, depth=3), seed=1, max_new_tokens=12):
        assert turn.forest.size - 1 <= 2 * 3
        leaves = set(range(turn.forest.size)) - set(turn.forest.parents.tolist())
        assert len(leaves) <= 2


# The law is said to be changed, everywhere; and never chosen unasked.


def test_auto_never_chooses_a_method_that_changes_the_law():
    for has_draft in (True, False):
        for name, make in candidates(has_draft).items():
            assert make().lossless, name
            assert make().name not in (*FAMILY, "mtjd")


def test_the_catalogue_says_that_the_law_is_changed():
    listed = {one.name: one for one in sb.methods()}
    assert {name for name, one in listed.items() if not one.lossless} == {*FAMILY, "mtjd", "coral"}
    for name in FAMILY:
        assert not listed[name].exact
        assert listed[name].law.startswith("approximate: changes the output law")
        assert FAMILY[name]().law.startswith("approximate: changes the output law")
    assert listed["dsbd"].exact
    assert listed["speculative_sampling"].exact
    assert not sb.dsbd(collapse=True).lossless


def test_the_law_says_what_is_promised_and_no_more():
    promise = "approximate: changes the output law on purpose; accepted blocks have log p > "
    assert sb.mtad().law == sb.mjsd().law == promise + "log q + log 0.5"
    assert sb.mmtad(theta="own", threshold=0.3).law == promise + "log q + log 0.3"
    assert sb.mmtad().law == promise + "log q of the best draft beam at their length + log 0.5"
    assert sb.mmtad(theta="max").law == promise + "the largest log q of that length in the draft + log 0.5"
    for make in FAMILY.values():
        assert "no guarantee" in make(threshold=0.0).law
        assert (
            make(threshold=1.0).law == "approximate: at threshold 1 no draft is accepted, and the target decodes alone"
        )


# Settings: none is ignored, none is without effect.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sb.mtad(controller=SureDraft(), beams=2), "controller of one's own ignores beams=2"),
        (lambda: sb.mmtad(controller=SureDraft(), depth=2), "controller of one's own ignores depth=2"),
        (lambda: sb.mmtad(draft=Branching((2, 2), Distinct()), beams=3), "growth Branching ignores beams=3"),
        (
            lambda: sb.mmtad(draft=StochasticBeam(), replacement=True),
            "StochasticBeam ignores replacement=True",
        ),
        (lambda: sb.mtad(draft="search", replacement=True), "replacement=True needs draft='sample'"),
        (lambda: sb.mtad(draft=Branching((2, 1), Distinct())), "mtad judges one chain, and the growth Branching may"),
        (lambda: sb.mtad(draft=FixedTree(((), ()), Distinct())), "mtad judges one chain"),
        (lambda: sb.mtad(draft=JointBeams("search")), "mtad judges one chain"),
        (lambda: sb.mjsd(chains=9), "chains is 9, beams is 8"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(make, message):
    with pytest.raises(BadSetting, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value"),
    [("controller", "fats"), ("draft", "best"), ("prefix", "any"), ("bonus", "two"), ("theta", "min")],
)
def test_unknown_words_are_refused(name, value):
    with refused(f"{name} is '{value}'; it must be one of "):
        sb.mmtad(**{name: value})
    with refused("coupling is 'coin'; it must be one of noise, dice"):
        JointRule(0.5, coupling="coin")


def test_growths_of_one_chain_serve_mtad():
    for growth in (Branching((1,), Independent()), FixedTree((((),),), Distinct()), JointBeams("search", chains=1)):
        session, lm = seated(sb.mtad(draft=growth, threshold=0.1), P, Q, steps=9)
        assert all((np.diff(turn.forest.parents) == 1).all() for turn in run(session, lm))


def test_controllers_have_names():
    for name in ("fixed", "confidence", "tracked", "thompson", "calibrated", "survival"):
        session, lm = seated(sb.mtad(2, 3, 0.1, controller=name), P, Q, steps=20)
        assert max(turn.forest.depths().max() for turn in run(session, lm)) <= 3
        assert session.length == 20


def test_no_setting_is_without_effect():
    """The published program takes a list of widths and looks at its length alone."""
    plain, first = text(sb.mtad(4, 4), P, Q, 24, warp=Warp()), text(sb.sampling(), P, None, 24, warp=Warp())
    others = ({"beams": 1}, {"depth": 2}, {"threshold": 1.0}, {"draft": "search"}, {"replacement": True}, {"bonus": "argmax"},
              {"bonus": "none"})  # fmt: skip
    for change in others:
        assert text(sb.mtad(**{"beams": 4, "depth": 4, **change}), P, Q, 24, warp=Warp()) != plain, change
    assert first == text(sb.mtad(threshold=1.0), P, Q, 24, warp=Warp())
    for depth in (1, 2, 3, 5):
        session, lm = seated(sb.mtad(3, depth), P, Q, steps=20)
        assert max(turn.forest.depths().max() for turn in run(session, lm)) == depth
    for beams in (1, 2, 5):
        session, lm = seated(sb.mmtad(beams, 2, draft="search"), P, Q, steps=20)
        assert max(np.bincount(turn.forest.depths())[-1] for turn in run(session, lm)) == beams


# What it is for.


def _figures(method, pairs, seeds=20, steps=40):
    """Macro perplexity under the target, tokens per pass."""
    target, draft = pairs
    logp, tokens, passes = 0.0, 0, 0
    for key in range(seeds):
        session, lm = seated(method, target, draft, steps=steps, key=key)
        turns = run(session, lm)
        logp += math.log(odds_of(target, text_of(session))) / steps
        tokens, passes = tokens + session.length, passes + len(turns)
    return math.exp(-logp / seeds), tokens / passes


def test_likelier_text_in_fewer_passes_on_ngrams():
    """A 6-gram and a 4-gram of letters: lower perplexity than sampling and more tokens per pass than speculative sampling."""
    pairs = ngram_tables()
    sampled, _ = _figures(sb.sampling(), pairs)
    _, drafted = _figures(sb.speculative_sampling(4), pairs)
    perplexity, per_pass = _figures(sb.mtad(4, 4, 0.5), pairs)
    assert perplexity < 0.9 * sampled
    assert per_pass > 1.1 * drafted
    _, more = _figures(sb.mmtad(4, 4, 0.5), pairs)
    assert more > per_pass


@pytest.mark.slow
@pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")
def test_likelier_text_in_fewer_passes_on_the_bundled_pair():
    pair = sb.load("bundled")
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    prompts = [line.split("\t")[0] for line in lines] * 3
    figures = {}
    for name, method in (("plain", sb.sampling()), ("exact", sb.speculative_sampling(4)), ("joint", sb.mtad(4, 4))):
        done = sb.generate(pair, prompts, method, seed=1, max_new_tokens=48)
        logp = log_likelihoods(pair, [one.prompt for one in done], [one.tokens for one in done])
        macro = sum(total / len(one.tokens) for total, one in zip(logp, done, strict=True)) / len(done)
        passes = sum(one.report.target_passes for one in done)
        figures[name] = math.exp(-macro), sum(len(one.tokens) for one in done) / passes
    assert figures["joint"][0] < 0.85 * figures["plain"][0]
    assert figures["joint"][1] >= figures["exact"][1]


def test_table_models_stand_in_for_both():
    """The recipes take any language model, not only those of transformers."""
    assert len(text(sb.mmtad(), P, Q, 5, warp=Warp())) == 5
    assert TableLM(P).vocab == 3
