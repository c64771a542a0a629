"""Text in, text out: on tiny random models, through the caches and masks that users run."""

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, TextStreamer

import specbeam as sb
from specbeam import errors
from specbeam.core import compiling
from specbeam.core.beams import Beams
from specbeam.core.control.confidence import SureDraft
from specbeam.core.control.fixed import FixedShape
from specbeam.core.decode import decode
from specbeam.core.draft.best_first import BestFirst
from specbeam.core.draft.lookup import PromptLookup
from specbeam.core.laws.joint import all_pairs, support_of
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp, law_of_beams
from specbeam.core.measure import saved_figures as measured
from specbeam.doors import fastest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.choices import check_engine
from specbeam.errors import SomeFailed
from specbeam.generation import settled_tokens, turns_of
from specbeam.models.heads.lm import TrunkLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import new_recall
from specbeam.models.skipping import Skipping, SkippingLM
from tests.support import words
from tests.support.checking import refused
from tests.support.heads import VOCAB, trunk_of
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny

PROMPTS = ["abc", "Hello world", "x", "The end.", "no yes no yes"]


@pytest.fixture(scope="module")
def pair():
    return words.pair()


class Score(float):
    """Equal up to what float32 logits leave open."""

    def __eq__(self, other):
        return abs(self - other) < 1e-4

    __hash__ = None


def beams_of(generations):
    return [[(beam.tokens, Score(beam.score)) for beam in one.beams] for one in generations]


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5, "top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05, "repetition_penalty": 1.3}]
)
def test_same_seed_same_beams_with_and_without_a_draft(pair, beams, options):
    plain = sb.generate(pair, PROMPTS, sb.beam_sampling(beams), seed=5, max_new_tokens=12, **options)
    for depth in (1, 3):
        method = sb.dsbd(beams, beams + 2, depth, "fixed")
        assert beams_of(sb.generate(pair, PROMPTS, method, seed=5, max_new_tokens=12, **options)) == beams_of(plain)
        alone = [sb.generate(pair, one, method, seed=5, max_new_tokens=12, **options)[0] for one in PROMPTS]
        assert beams_of(alone) == beams_of(plain)
        narrow = sb.generate(pair, PROMPTS, method, seed=5, max_new_tokens=12, batch_size=2, **options)
        assert beams_of(narrow) == beams_of(plain)


def test_different_methods_share_a_pass(pair):
    from specbeam.core.decode import decode
    from specbeam.doors.options.settings import Settings
    from specbeam.doors.request import Request

    recipes = [
        sb.greedy(),
        sb.sampling(),
        sb.beam_sampling(3),
        sb.dsbd(3, 4, 2, width="dynamic"),
        sb.dsbd(2, 3, 3, coupling="rejection", width="dynamic"),
    ]
    requests = [
        Request.of(pair, "mixed batch", method, Settings.given({"max_new_tokens": 9}, None), 3) for method in recipes
    ]
    sessions = [request.sessions[0] for request in requests]
    before = pair.target.passes
    passes = sum(1 for _ in decode(pair.target, sessions))
    assert pair.target.passes - before == passes <= 9
    for request, method in zip(requests, recipes, strict=True):
        alone = sb.generate(pair, "mixed batch", method, seed=3, max_new_tokens=9)
        assert beams_of(request.answers(request.sessions[0])) == beams_of(alone)


def test_greedy_is_that_of_transformers(pair):
    for prompt in PROMPTS:
        ids = pair.tokenizer(prompt, return_tensors="pt")["input_ids"]
        theirs = pair.target_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, do_sample=False
        )
        for method in (sb.greedy(), sb.dsbd(1, 2, 3, "fixed")):
            options = {} if method.greedy else {"temperature": 0}
            ours = sb.generate(pair, prompt, method, max_new_tokens=15, **options)[0]
            assert ours.tokens == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("family", "coupling", "replacement"),
    [
        ("llama", "noise", False),
        pytest.param("gpt2", "rejection", False, marks=pytest.mark.slow),
        pytest.param("llama", "rejection", True, marks=pytest.mark.slow),
        pytest.param("llama", "rejection", False, marks=pytest.mark.slow),
        pytest.param("gpt2", "noise", False, marks=pytest.mark.slow),
    ],
)
def test_the_law_of_dsbd_is_that_of_beam_sampling_on_a_transformer(family, coupling, replacement):
    """Whole beams of three tokens from a vocabulary of 6: frequencies of DSBD against those of the baseline."""
    small = {"vocab_size": 6, "eos_token_id": 5}
    pair = sb.load(tiny(family, seed=3, **small), tiny(family, seed=4, **small))
    prompts, options = [[1, 2, 3]] * 1500, {"max_new_tokens": 3, "top_k": 8, "batch_size": 250}
    ours = sb.generate(
        pair, prompts, sb.dsbd(2, 3, 2, "fixed", coupling=coupling, replacement=replacement), seed=1, **options
    )
    plain = sb.generate(pair, prompts, sb.beam_sampling(2, replacement), seed=2, **options)
    tables = [
        Counter(str(sorted(map(tuple, (beam.tokens for beam in one.beams)))) for one in many) for many in (ours, plain)
    ]
    cells = [cell for cell in {*tables[0], *tables[1]} if tables[0][cell] + tables[1][cell] >= 12]
    seen = np.array([[table[cell] for cell in cells] for table in tables])
    seen = np.column_stack([seen, [len(prompts) - row.sum() for row in seen]])
    seen = seen[:, seen.sum(0) > 0]
    assert len(cells) >= 8
    assert stats.chi2_contingency(seen).pvalue > 1e-3


def test_every_beam_has_the_likelihood_that_the_model_gives_it(pair):
    one = sb.generate(pair, "check", sb.dsbd(3, 4, 3, width="dynamic"), seed=2, max_new_tokens=8)[0]
    for beam in one.beams:
        ids = torch.tensor([one.prompt + beam.tokens])
        with torch.inference_mode():
            logp = pair.target_model(ids).logits.log_softmax(-1)[0, len(one.prompt) - 1 : -1]
        score = float(logp.gather(1, torch.tensor(beam.tokens)[:, None]).sum()) / len(beam.tokens)
        assert beam.score == pytest.approx(score, abs=1e-4)


def test_several_return_sequences(pair):
    many = sb.generate(pair, ["ab", "cd"], "sampling", seed=1, max_new_tokens=5, num_return_sequences=3)
    assert len(many) == 6
    assert len({tuple(one.tokens) for one in many[:3]}) > 1
    best = sb.generate(pair, "ab", sb.dsbd(4), seed=1, max_new_tokens=5, num_return_sequences=3)
    assert [one.tokens for one in best] == [beam.tokens for beam in best[0].beams[:3]]


def test_stop_strings_and_end_tokens_end_a_beam(pair):
    free = sb.generate(pair, "abc", "sampling", seed=4, max_new_tokens=12, eos_token_id=60)[0]
    stop = free.text[3:5]
    cut = sb.generate(pair, "abc", "sampling", seed=4, max_new_tokens=12, eos_token_id=60, stop_strings=[stop])[0]
    assert free.text.startswith(cut.text)
    assert cut.text.endswith(stop)
    fast = sb.generate(
        pair, "abc", sb.dsbd(1, 3, 4, "fixed"), seed=4, max_new_tokens=12, eos_token_id=60, stop_strings=stop
    )[0]
    assert fast.tokens == cut.tokens
    token = free.tokens[2]
    assert (
        sb.generate(pair, "abc", "sampling", seed=4, max_new_tokens=12, eos_token_id=[60, token])[0].tokens
        == free.tokens[: free.tokens.index(token) + 1]
    )


def test_min_new_tokens_keeps_beams_alive(pair):
    for one in sb.generate(
        pair, PROMPTS, sb.dsbd(3, 4, 3), seed=0, max_new_tokens=10, min_new_tokens=6, eos_token_id=list(range(0, 60, 3))
    ):
        assert min(len(beam.tokens) for beam in one.beams) >= 6


def test_streamed_pieces_make_the_text(pair):
    for method in (sb.sampling(), sb.dsbd(3, 4, 3), sb.greedy()):
        whole = sb.generate(pair, "stream me", method, seed=9, max_new_tokens=20)[0].text
        pieces = list(sb.stream(pair, "stream me", method, seed=9, max_new_tokens=20))
        assert "".join(pieces) == whole


def test_a_slow_model_is_followed_token_by_token(pair, monkeypatch):
    """What takes less than a reader notices comes in one piece; `DELAY_S` is for everyone who follows a text."""
    monkeypatch.setattr("specbeam.core.decode.DELAY_S", 0.0)
    assert len(list(sb.stream(pair, "stream me", "sampling", seed=9, max_new_tokens=20))) > 5


def test_a_streamer_of_transformers_gets_every_token_once(pair):
    class Collecting:
        tokens, ended = (), False

        def put(self, value):
            self.tokens += tuple(value.flatten().tolist())

        def end(self):
            self.ended = True

    for method in ("sampling", sb.dsbd(3, 4, 3)):
        streamer = Collecting()
        one = sb.generate(pair, "abc", method, seed=3, max_new_tokens=9, streamer=streamer)[0]
        assert list(streamer.tokens) == one.prompt + one.tokens
        assert streamer.ended
    failed = Collecting()
    with pytest.raises(errors.BrokenLaw):
        sb.generate(
            pair, "ba", "sampling", seed=1, max_new_tokens=9, eos_token_id=60, streamer=failed,
            logits_processor=[Bad(float("nan"))],
        )  # fmt: skip
    assert failed.ended


def test_the_report_counts(pair):
    one = sb.generate(pair, "count", sb.dsbd(2, 3, 3, "fixed"), seed=0, max_new_tokens=12, eos_token_id=60)[0]
    turns = list(turns_of(pair, "count", sb.dsbd(2, 3, 3, "fixed"), seed=0, max_new_tokens=12, eos_token_id=60))
    assert one.report.target_passes == len(turns)
    assert one.report.accepted == sum(turn.verdict.accepted for turn in turns)
    assert len(one.report.widths) == 12
    assert one.report.law.startswith("exact: beam sampling, 2 beams")
    assert one.report.seconds > 0


def test_wide_beams_store_little_more_than_one_sequence(pair):
    """Peak KV of width 8 is at most 1.15 times a single sequence plus the nodes of one turn."""
    prompt = "a rather long prompt that every one of the beams shares, so it must not be stored for each of them"
    wide = sb.generate(pair, prompt, sb.dsbd(8, 10, 3, "fixed"), seed=0, max_new_tokens=24, eos_token_id=60)[0]
    single = sb.generate(pair, prompt, sb.sampling(), seed=0, max_new_tokens=24, eos_token_id=60)[0]
    assert wide.report.peak_kv_tokens <= 1.15 * single.report.peak_kv_tokens + 8 + 3 * 10


def test_settled_tokens_are_the_beginning_of_the_answer(pair):
    from specbeam.core.decode import decode
    from specbeam.doors.options.settings import Settings
    from specbeam.doors.request import Request

    request = Request.of(pair, "abc", sb.dsbd(3, 4, 3), Settings.given({"max_new_tokens": 15}, None), 8)
    seen = []
    for _ in decode(pair.target, request.sessions):
        seen.append(settled_tokens(request.sessions[0]))
    final = request.answers(request.sessions[0])[0].tokens
    assert all(final[: len(tokens)] == tokens for tokens in seen)


def test_the_models_own_generation_config_completes_the_options():
    pair = words.pair()
    plain = sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=12)[0].tokens
    cold = sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=12, temperature=0.5, top_k=5)[0].tokens
    greedy = sb.generate(pair, "abc", "greedy", max_new_tokens=12)[0].tokens
    assert plain != cold
    config = pair.target_model.generation_config
    config.temperature, config.top_k = 0.5, 5
    assert sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=12)[0].tokens == cold
    assert sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=12, temperature=1, top_k=0)[0].tokens == plain
    assert sb.generate(pair, "abc", "greedy", max_new_tokens=12)[0].tokens == greedy  # draws nothing, warps nothing
    config.penalty_alpha = 0.6
    with pytest.raises(errors.NotSupported, match=r"penalty_alpha=0\.6 .*, which specbeam does not support"):
        sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=2)


def test_a_part_that_breaks_costs_its_own_prompt_only(pair):
    class Breaking(FixedShape):
        def plan(self, session):
            if len(session.prompt) == 3 and session.length > 0:
                raise ZeroDivisionError("mine")
            return super().plan(session)

    method = sb.speculative_sampling(controller=Breaking(2, 1))
    with pytest.raises(SomeFailed, match=r"1 prompt failed: prompt 1, step [1-3]: Breaking.plan raised Zero") as caught:
        sb.generate(pair, ["abcd", "abc", "abcde"], method, seed=1, max_new_tokens=8)
    assert isinstance(caught.value.failures[0].__cause__, ZeroDivisionError)
    assert [one is None for one in caught.value.generations] == [False, True, False]


def test_a_generation_config_is_honoured_or_refused(pair):
    config = GenerationConfig(max_new_tokens=4, temperature=0.7, top_k=5)
    direct = sb.generate(pair, "abc", "sampling", seed=1, max_new_tokens=4, temperature=0.7, top_k=5)
    assert sb.generate(pair, "abc", "sampling", seed=1, generation_config=config)[0].tokens == direct[0].tokens
    with pytest.raises(errors.NotSupported, match="dola_layers"):
        sb.generate(pair, "abc", "sampling", generation_config=GenerationConfig(dola_layers="high"))


class Bad(LogitsProcessor):
    def __init__(self, what, when=3):
        self.what, self.when = what, when

    def __call__(self, input_ids, scores):
        hit = (input_ids[:, 0] == 4 + 1) & (input_ids.shape[1] > self.when)  # prompts that begin with "b"
        scores[hit] = self.what
        return scores


@pytest.mark.parametrize(("what", "message"), [(float("nan"), "NaN"), (-float("inf"), "every token is banned")])
def test_a_broken_law_costs_its_own_prompt_only(pair, what, message):
    prompts = ["aa", "ba", "ca"]
    healthy = sb.generate(pair, prompts, sb.dsbd(2, 3, 2), seed=1, max_new_tokens=6, eos_token_id=60)
    with pytest.raises(errors.SomeFailed, match=f"prompt 1, step .*{message}") as caught:
        sb.generate(
            pair, prompts, sb.dsbd(2, 3, 2), seed=1, max_new_tokens=6, eos_token_id=60, logits_processor=[Bad(what)]
        )
    found = caught.value.generations
    assert found[1] is None
    assert [found[0].tokens, found[2].tokens] == [healthy[0].tokens, healthy[2].tokens]
    with pytest.raises(errors.BrokenLaw, match="prompt 0"):
        sb.generate(pair, "ba", "sampling", seed=1, max_new_tokens=6, eos_token_id=60, logits_processor=[Bad(what)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_of_the_model_name_prompt_and_step(value):
    pair = words.pair(check=False)
    plain = pair.target_model.forward

    def broken(*args, **kwargs):
        output = plain(*args, **kwargs)
        row = (kwargs["position_ids"] > 8).any(1)
        output.logits[row] = value
        return output

    pair.target_model.forward = broken
    pair.target.__init__(pair.target_model, engine="plain")  # what calls the patched forward
    pair.target._keeps_rows = True
    with pytest.raises(errors.SomeFailed, match=r"prompt 1, step 0: the model returned") as caught:
        sb.generate(pair, ["ab", "a long prompt", "cd"], "sampling", max_new_tokens=3)
    assert [one is not None for one in caught.value.generations] == [True, False, True]


def test_bad_prompts_fail_alone(pair):
    with pytest.raises(errors.SomeFailed) as caught:
        sb.generate(pair, ["ok", "", [3, 99], [5, 6], []], "greedy", max_new_tokens=3)
    assert [one is not None for one in caught.value.generations] == [True, False, False, True, False]
    text = str(caught.value)
    assert "prompt 1 is empty" in text
    assert "token id 99" in text
    with pytest.raises(errors.BadPrompt, match="is empty"):
        sb.generate(pair, "", "greedy")
    with pytest.raises(errors.BadPrompt, match="256 positions"):
        sb.generate(pair, "a" * 200, "greedy", max_new_tokens=100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sb.dsbd(0), "beams is 0"),
        (lambda: sb.beam_search(True), "beams is True"),
        (lambda: sb.dsbd(2, depth=0), "depth is 0"),
        (lambda: sb.dsbd(4, 3), "draft_beams is 3"),
        (lambda: sb.dsbd(2, min_beams=3, width="dynamic"), "min_beams is 3"),
        (lambda: sb.dsbd(width="thin"), "'thin'"),
        (lambda: sb.dsbd(coupling="glue"), "'glue'"),
        (lambda: sb.dsbd(replacement=True), "without replacement"),
        (lambda: sb.dsbd(threshold=2.0, width="dynamic"), "probability"),
        (lambda: sb.dsbd(width="auto", mass=-1.0), "mass is -1.0; it is a probability"),
        (lambda: sb.dsbd(width="fixed", mass=0.9), "ignores mass"),
        (lambda: sb.dsbd(width="auto", threshold=0.9), "ignores threshold"),
        (lambda: sb.beam_sampling(width="dynamic"), "'dynamic'"),
        (lambda: sb.beam_sampling(min_beams=2), "ignores min_beams"),
        (lambda: sb.beam_sampling(width="auto", min_beams=0), "min_beams is 0"),
        (lambda: sb.dsbd(beams=1_000_000), "beams is 1000000; it must be at most 65,536"),
        (lambda: sb.speculative_sampling(depth=65_537), "depth is 65537; it must be at most 65,536"),
        (lambda: sb.beam_sampling(width="auto", semantics="hf"), "needs width='fixed'"),
        (lambda: sb.beam_sampling(-1), "beams is -1"),
    ],
)
def test_bad_settings_say_what_to_do(make, message):
    import jaxtyping

    with pytest.raises((errors.BadSetting, jaxtyping.TypeCheckError), match=message):
        make()


def test_values_of_the_wrong_type_are_refused():
    with refused("depth is 1.5"):
        sb.speculative_beam_search(3, depth=1.5)
    with refused("or a part"):
        sb.speculative_beam_search(3, drafter=object())


def test_options_that_cannot_be_honoured_are_refused(pair):
    for options, message in [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_k": 10**30}, r"top_k is 10+; it must be no larger than 2,147,483,647"),
        ({"eos_token_id": [3, 2**31]}, "eos_token_id is"),
        ({"bad_words_ids": [[2**31]]}, "lists of token ids"),
        ({"repetition_penalty": 10**400}, "it must be a finite number"),
        ({"num_beams": 3}, "no option num_beams"),
        ({"num_return_sequences": 9}, "keeps 4 beams"),
        ({"length_penalty": 500.0}, "length_penalty is 500.0"),
        ({"bad_words_ids": [[7, 99]]}, "bad_words_ids holds 99"),
        ({"bad_words_ids": [[]]}, "lists of token ids"),
        ({"logits_processor": [5]}, "a list of callables"),
        ({"generation_config": GenerationConfig(num_beams=8)}, r"num_beams=8, and dsbd has 4: use sb.dsbd\(8\)"),
        ({"generation_config": GenerationConfig(do_sample=False)}, "do_sample=False, and dsbd samples"),
    ]:
        with pytest.raises(errors.BadSetting, match=message):
            sb.generate(pair, "abc", "dsbd", **options)
    for options in (
        {"eos_token_id": "</s>"},
        {"bad_words_ids": [5]},
        {"logits_processor": len},
        {"length_penalty": "1"},
        {"eos_token_id": 2.0},
        {"eos_token_id": [1, None]},
        {"stop_strings": 5},
        {"stop_strings": ["a", 5]},
        {"stop_strings": ["a", "\ud800"]},
        {"num_return_sequences": None},
        {"num_return_sequences": True},
        {"max_new_tokens": torch.tensor(5)},
        {"bad_words_ids": torch.tensor([[5]])},
        {"prefix_allowed_tokens_fn": [5]},
        {"generation_config": {"max_new_tokens": 5}},
    ):
        with refused(f"{next(iter(options))} is"):
            sb.generate(pair, "abc", "dsbd", **options)
    with pytest.raises(errors.BadSetting, match="do_sample=True, and greedy does not sample"):
        sb.generate(pair, "abc", "greedy", generation_config=GenerationConfig(do_sample=True))
    with pytest.raises(errors.NotSupported, match="temperature would be ignored"):
        sb.generate(pair, "abc", "greedy", temperature=0.5)
    instead = {"dsbd": "beam_sampling", "speculative_beam_search": "beam_search", "traversal": "sampling"}
    for method, other in instead.items():
        with pytest.raises(
            errors.NotSupported, match=f"{method} drafts with a model: .*, or use sb.{other}, which has"
        ):
            sb.generate(words.pair(draft_seed=None), "abc", method)
    with pytest.raises(errors.BadSetting, match="no method 'magic'"):
        sb.generate(pair, "abc", "magic")


@pytest.mark.parametrize(
    "ends", [np.array([7, 1]), torch.tensor([7, 1]), (7, 1), {7, 1}], ids=lambda one: type(one).__name__
)
def test_several_ends_in_any_form(pair, ends):
    found = sb.generate(pair, ["abc", "Hello"], "sampling", seed=3, max_new_tokens=30, eos_token_id=ends)
    plain = sb.generate(pair, ["abc", "Hello"], "sampling", seed=3, max_new_tokens=30, eos_token_id=[7, 1])
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("end", [np.int64(7), torch.tensor(7), np.array(7)], ids=lambda one: type(one).__name__)
def test_one_end_in_any_form(pair, end):
    found = sb.generate(pair, "abc", "sampling", seed=3, max_new_tokens=30, eos_token_id=end)
    plain = sb.generate(pair, "abc", "sampling", seed=3, max_new_tokens=30, eos_token_id=7)
    assert found[0].tokens == plain[0].tokens


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_processor_that_breaks_scores_is_told_from_a_model_that_does(pair, what):
    with pytest.raises(errors.BrokenLaw, match=r"a logits processor returned (NaN|\+inf); banned tokens must get -inf"):
        sb.generate(pair, "ba", "sampling", seed=0, max_new_tokens=6, eos_token_id=60, logits_processor=[Bad(what)])
    broken = words.pair(check=False)
    with torch.no_grad():
        broken.target_model.lm_head.weight.fill_(what)
    broken = sb.load(broken.target_model, tokenizer=broken.tokenizer, check=False)
    with pytest.raises(errors.BrokenLaw, match="the model returned"):
        sb.generate(broken, "ba", "sampling", seed=0, max_new_tokens=6, logits_processor=[Bad(-9.0)])


def test_a_drafter_that_breaks_costs_the_prompts_that_it_drafts_for(pair):
    """Sessions of another drafter, in the same passes, go on."""

    class Broken(PromptLookup):
        def draft(self, sessions, shapes):
            if any(one.length > 3 for one in sessions):
                raise RuntimeError("out of ideas")
            return super().draft(sessions, shapes)

    requests = [
        Request.of(
            pair,
            ["abcab", "aab"],
            sb.speculative_beam_search(2, depth=2, drafter=drafter),
            Settings(max_new_tokens=8),
            1,
        )
        for drafter in (Broken(), PromptLookup())
    ]
    sessions = [session for request in requests for session in request.sessions]
    for _ in decode(pair.target, sessions):
        pass
    assert [one.failure is None for one in sessions] == [False, False, True, True]
    for number, one in enumerate(sessions[:2]):
        assert isinstance(one.failure, errors.BrokenPart)
        assert f"prompt {number}, step" in str(one.failure)
        assert "Broken.draft raised RuntimeError: out of ideas" in str(one.failure)
    plain = sb.generate(pair, ["abcab", "aab"], sb.beam_search(2), max_new_tokens=8)
    assert [requests[1].result(one)[0].tokens for one in sessions[2:]] == [one.tokens for one in plain]


class Guided(LogitsProcessor, torch.nn.Module):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 61))

    def __call__(self, input_ids, scores):
        return scores + self.bias


@pytest.mark.parametrize(
    "method", [sb.beam_search(3), sb.speculative_beam_search(3), sb.speculative_sampling(3), sb.dsbd(3)]
)
def test_processors_may_have_weights(pair, method):
    kept = {"max_new_tokens": 6, "seed": 1}
    found = sb.generate(pair, "abc", method, logits_processor=[Guided()], **kept)[0]
    plain = Guided()
    plain.bias.requires_grad_(False)
    assert found.tokens == sb.generate(pair, "abc", method, logits_processor=[plain], **kept)[0].tokens


@pytest.mark.parametrize("name", ["search", "dsbd", "tree"])
@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_processor_that_breaks_on_a_path_that_was_only_drafted_breaks_nothing(pair, name, how):
    """The drafts there end; the text is that of a processor that breaks nowhere."""
    plain, method = {
        "search": (sb.beam_search(2), sb.speculative_beam_search(2, 40, 3)),
        "dsbd": (sb.beam_sampling(2), sb.dsbd(2, 40, 3, "fixed")),
        "tree": (sb.sampling(), sb.rsd_c((9, 9), "match")),
    }[name]
    known, met, options = set(), [], {"max_new_tokens": 6, "seed": 1}

    def notes(input_ids, scores):
        known.update(map(tuple, input_ids.tolist()))
        return scores

    def breaks(input_ids, scores):
        for row, path in enumerate(input_ids.tolist()):
            if tuple(path) not in known:
                met.append(path)
                if how == "raises":
                    raise RuntimeError("not made for this")
                scores[row] = torch.nan
        return scores

    kept = sb.generate(pair, "abcab", plain, logits_processor=[notes], **options)[0]
    again = sb.generate(pair, "abcab", method, logits_processor=[breaks], **options)[0]
    assert met or not compiling.AVAILABLE  # in Python, a walk reads the rows of its path alone
    assert again.tokens == kept.tokens


def test_a_drafter_without_a_hash_is_refused(pair):
    class Loose:
        __hash__ = None
        draft = settle = close = print

    with pytest.raises(errors.BadSetting, match="Loose has no hash"):
        sb.generate(pair, "abc", sb.speculative_beam_search(2, drafter=Loose()), max_new_tokens=3)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda forest: None, r"the drafter Strange returned \[None\]; expected 1 Forest"),
        (lambda forest: forest.grown([61], [0]), r"returned tokens \[61\], but the target's vocabulary is 0 to 60"),
        (lambda forest: forest.grown([-3], [0]), r"returned tokens \[-3\]"),
    ],
)
def test_forests_that_no_model_can_read_cost_their_own_prompts(pair, made, message):
    class Strange(PromptLookup):
        def draft(self, sessions, shapes):
            return [made(forest) for forest in super().draft(sessions, shapes)]

    requests = [
        Request.of(
            pair, ["abcab"], sb.speculative_beam_search(2, depth=2, drafter=drafter), Settings(max_new_tokens=5), 1
        )
        for drafter in (Strange(), PromptLookup())
    ]
    sessions = [session for request in requests for session in request.sessions]
    for _ in decode(pair.target, sessions):
        pass
    assert sessions[1].failure is None
    with pytest.raises(errors.SpecbeamError, match=message):
        raise sessions[0].failure


def test_a_drafter_that_cannot_close_costs_nothing_but_a_warning(pair):
    class Clinging(PromptLookup):
        def close(self, session):
            raise RuntimeError("stays")

    with pytest.warns(UserWarning, match=r"prompt 0: the drafter could not close: RuntimeError\('stays'\)"):
        found = sb.generate(pair, "abcab", sb.speculative_beam_search(2, drafter=Clinging()), max_new_tokens=5)
    assert found[0].tokens == sb.generate(pair, "abcab", sb.beam_search(2), max_new_tokens=5)[0].tokens


@pytest.mark.parametrize("options", [{"seed": "a"}, {"seed": 1.5}, {"batch_size": "a"}, {"batch_size": 0}])
def test_seeds_and_batch_sizes_are_integers(pair, options):
    with refused(f"{next(iter(options))} is"):
        sb.generate(pair, "abc", "sampling", max_new_tokens=3, **options)


def test_depth_by_cost_on_models_of_few_positions():
    pair = words.pair(max_position_embeddings=24)
    method = sb.speculative_beam_search(2)
    assert len(sb.generate(pair, "abc", method, max_new_tokens=9)[0].tokens) == 9


@pytest.mark.parametrize("part", [PromptLookup, BestFirst, SureDraft], ids=lambda one: one.__name__)
def test_the_class_of_a_part_is_no_part(part):
    with refused(f"class {part.__name__}|{part.__name__} is a class"):
        if part is PromptLookup:
            sb.speculative_beam_search(3, drafter=part)
        elif part is BestFirst:
            sb.mmtad(draft=part)
        else:
            sb.speculative_sampling(controller=part)


def test_a_processor_that_returns_other_rows_is_named(pair):
    with pytest.raises(errors.BrokenLaw, match=r"returned \(1, 7\) for scores of \(1, 61\)"):
        sb.generate(pair, "abc", "sampling", logits_processor=[lambda ids, scores: scores[:, :7]])


def test_max_length_counts_the_prompt(pair):
    options = {"eos_token_id": [], "seed": 1}
    found = sb.generate(pair, ["abc", "Hello"], "sampling", max_length=9, **options)
    assert [len(one.tokens) for one in found] == [6, 4]
    config = GenerationConfig(max_length=9)
    assert len(sb.generate(pair, "abc", "sampling", generation_config=config, **options)[0].tokens) == 6
    assert (
        len(sb.generate(pair, "abc", "sampling", generation_config=config, max_new_tokens=2, **options)[0].tokens) == 2
    )
    with pytest.raises(errors.BadPrompt, match="prompt 0 has 5 tokens and max_length is 5"):
        sb.generate(pair, "Hello", "sampling", max_length=5)


def test_answers_that_are_missing_leave_their_places_empty(pair):
    """A list of results says by its places which prompt they answer."""
    options = {"num_return_sequences": 3, "max_new_tokens": 6}
    few = {"prefix_allowed_tokens_fn": lambda number, tokens: [5] if number == 1 else list(range(61))}
    with pytest.raises(errors.SomeFailed, match="prompt 1 has 1 answer, num_return_sequences is 3") as caught:
        sb.generate(pair, ["abc", "no", "a" * 300, "a"], sb.beam_search(4), **options, **few)
    made = [one is not None for one in caught.value.generations]
    assert made == [True] * 3 + [True, False, False] + [False] * 3 + [True] * 3
    with pytest.raises(errors.SomeFailed) as caught:
        sb.generate(pair, ["abc", "a" * 300, "a"], "sampling", **options)
    assert [one is not None for one in caught.value.generations] == [True] * 3 + [False] * 3 + [True] * 3
    with pytest.raises(errors.TooFewAnswers) as caught:
        sb.generate(pair, "abc", sb.beam_search(4), prefix_allowed_tokens_fn=lambda *_: [5], **options)
    assert [one.tokens for one in caught.value.generations] == [[5] * 6]


def test_a_stream_has_one_answer(pair):
    for call in (
        lambda: "".join(sb.stream(pair, "abc", sb.beam_search(4), num_return_sequences=3)),
        lambda: sb.generate(
            pair, "abc", sb.beam_search(4), num_return_sequences=3, streamer=TextStreamer(pair.tokenizer)
        ),
    ):
        with pytest.raises(errors.NotSupported, match="one prompt with one return sequence; there are 3"):
            call()


def test_loading_says_what_is_wrong(tmp_path):
    with pytest.raises(errors.MissingFile, match="no folder"):
        sb.load(str(tmp_path / "nowhere"))
    with pytest.raises(errors.MissingFile, match=r"config\.json"):
        sb.load(tmp_path)
    with pytest.raises(errors.VocabularyMismatch, match="draft has 50 tokens, target has 61"):
        sb.load(tiny("llama"), tiny("llama", vocab_size=50))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(errors.BadSetting, match=f"device is '{device}'"):
        sb.load("bundled", device=device)


@pytest.mark.parametrize(("name", "meant"), [("cpu", "compiled"), ("transformers", "plain")])
def test_engines_are_known_by_the_names_of_other_libraries(name, meant):
    with pytest.raises(errors.BadSetting, match=rf"\(did you mean {meant}\?\)"):
        check_engine(name, {})


@pytest.mark.parametrize(("option", "name", "meant"), [("device", "gpu", "cuda"), ("dtype", "fp16", "float16")])
def test_loading_knows_names_of_other_libraries(option, name, meant):
    with pytest.raises(errors.BadSetting, match=rf"\(did you mean {meant}\?\)"):
        sb.load("bundled", **{option: name})


def test_a_misspelt_bundled_is_noticed():
    with pytest.raises(errors.MissingFile, match=r"\(did you mean bundled\?\)"):
        sb.load("bundeld")


def test_tokenizers_that_differ_are_noticed(tmp_path):
    target, draft = words.saved(tmp_path)
    other = words.tokenizer()
    text = other.backend_tokenizer.to_str().replace('"a":4,', '"a":5,').replace('"b":5,', '"b":4,')
    from tokenizers import Tokenizer

    other._tokenizer = Tokenizer.from_str(text)
    other.save_pretrained(draft)
    with pytest.raises(errors.VocabularyMismatch, match="and the tokens differ"):
        sb.load(target, draft)


def test_a_model_may_draft_for_itself():
    model = tiny("llama")
    pair = sb.load(model, model, tokenizer=words.tokenizer())
    one = sb.generate(pair, "abc", sb.dsbd(2, 3, 3, "fixed"), seed=0, max_new_tokens=12, eos_token_id=60)[0]
    assert one.report.target_passes == 3


def test_auto_measures_once_and_keeps_its_choice(tmp_path, monkeypatch):
    from specbeam.doors.options.settings import Settings
    from specbeam.generation import chosen_by_speed

    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    pair = words.pair()
    _, first = chosen_by_speed(pair, ["abc", "Hello"], Settings(), tokens=4)
    _, again = chosen_by_speed(pair, ["abc", "Hello"], Settings(), tokens=4)
    assert (first.measured_now, again.measured_now) == (True, False)
    assert first.name == again.name
    assert set(first.tokens_per_second) == set(again.tokens_per_second)
    _, cold = chosen_by_speed(pair, ["abc"], Settings(temperature=0.0), tokens=4)
    assert cold.measured_now
    one = sb.generate(pair, "abc", "auto", seed=2, max_new_tokens=5)[0]
    assert one.report.law == "exact: plain sampling"


def test_at_temperature_zero_a_dynamic_width_is_beam_search_too(pair):
    fixed = sb.generate(pair, PROMPTS, sb.dsbd(4, 6, 3, "fixed"), max_new_tokens=12, temperature=0)
    dynamic = sb.generate(pair, PROMPTS, sb.dsbd(4, 6, 3, "dynamic"), max_new_tokens=12, temperature=0)
    assert beams_of(dynamic) == beams_of(fixed)


def test_banned_tokens_are_never_drawn_to_fill_up(pair):
    """Truncations that keep some tokens in any case keep no banned ones."""
    row = np.full((1, 10), -np.inf, dtype=np.float32)
    row[0, 0] = 1.0
    keeps_two = Warp(truncation=Truncation(min_p=0.1, top_p=0.9, least=2))
    law = law_of_beams(row, Beams.start(0, 0), keeps_two)
    assert support_of(law).tolist() == [0]
    assert all_pairs(law).tolist() == [0]
    ids = torch.tensor([[5, 6, 7]])
    out = pair.target_model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=3, do_sample=True, min_p=0.1, max_new_tokens=4,
        prefix_allowed_tokens_fn=lambda *_: [9], custom_generate=sb.hf.beam_sampling, seed=1,
    )  # fmt: skip
    assert out[0, 3:].tolist() == [9] * 4


def test_very_cold_draws_by_rejection(pair):
    for seed in range(6):
        method = sb.dsbd(3, 5, 3, "fixed", coupling="rejection")
        found = sb.generate(pair, PROMPTS, method, seed=seed, max_new_tokens=8, temperature=0.01)
        assert all(one.tokens for one in found)


def test_stop_strings_may_be_special_tokens(pair):
    found = sb.generate(
        pair, "abc", "greedy", max_new_tokens=30, eos_token_id=(), stop_strings=["<pad>", "<s>", "</s>"]
    )[0]
    ends = [place for place, token in enumerate(found.tokens) if token in (0, 1, 2)]
    assert ends in ([], [len(found.tokens) - 1])
    with pytest.raises(errors.BadSetting, match="stop_strings"):
        sb.generate(pair, "abc", stop_strings=[""])


def test_a_model_is_freed_with_its_scorer(tmp_path):
    model = tiny("llama")
    sb.load(model)
    copied = copy.deepcopy(model)
    assert sb.load(copied).target is not sb.load(model).target
    torch.save(model, tmp_path / "model.pt")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_object_needs_no_tokenizer(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sb.load(model).tokenizer is None
    assert len(sb.generate(sb.load(model), [[5, 6]], "greedy", max_new_tokens=3)[0].tokens) <= 3


def test_arrays_and_tensors_are_prompts_and_other_things_are_named(pair):
    expected = sb.generate(pair, [5, 6, 7], "greedy", max_new_tokens=3)[0].tokens
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [torch.tensor([5, 6, 7])], [np.array([5, 6, 7])]):
        assert sb.generate(pair, prompt, "greedy", max_new_tokens=3)[0].tokens == expected
    with pytest.raises(errors.BadSetting, match="prompts is 5"):
        sb.generate(pair, 5, "greedy")
    with pytest.raises(errors.BadPrompt, match="prompt 0 is None"):
        sb.generate(pair, [None], "greedy")
    with refused("an integer"):
        sb.generate(pair, "abc", max_new_tokens=2.5)


def test_gsd_stays_within_the_positions_of_the_model():
    """Merged runs unroll deeper than they were drafted, up to the last position that there is."""
    pair = words.pair("gpt2", n_positions=32)
    prompts = [[4 + (7 * n + 3 * k) % 50 for k in range(20)] for n in range(8)]
    for context in (0, 1):
        found = sb.generate(pair, prompts, sb.gsd(context=context), seed=1, max_new_tokens=12)
        assert all(len(one.tokens) <= 12 for one in found)


def test_public_names_are_what_they_are_called():
    """A module of the same name would take the place of a recipe as soon as it is imported."""
    assert callable(sb.generate)
    recipes = [getattr(sb, one.name) for one in sb.methods()]
    assert all(map(callable, recipes))


def test_auto_tells_pairs_of_one_shape_apart():
    one, other = tiny("llama", seed=0), tiny("llama", seed=1)
    assert measured.model_key(one) == measured.model_key(other)
    assert measured.weights_key(one) != measured.weights_key(other)
    assert measured.weights_key(one) == measured.weights_key(copy.deepcopy(one))


def test_auto_tells_heads_of_one_target_apart():
    model = tiny("llama", vocab_size=VOCAB)
    pair = sb.load(model)
    heads = [trunk_of(model, kind, seed=seed) for kind, seed in (("eagle3", 0), ("eagle3", 1), ("eagle", 0))]
    drafts = [None, *(TrunkLM(head, VOCAB) for head in heads)]
    keys = [repr(fastest._key(replace(pair, draft=draft), Settings())) for draft in drafts]
    assert len(set(keys)) == 4


@needs_numba
def test_auto_tells_drafts_engines_roundings_and_memories_of_one_target_apart():
    model = tiny("llama", vocab_size=VOCAB)
    target, small = (HuggingFaceLM(model, engine=engine) for engine in ("plain", "compiled"))
    pair = replace(sb.load(model, tiny("llama", seed=1, vocab_size=VOCAB)), target=target)
    sets = [SkippingLM(small, Skipping(skip)) for skip in ("a0", "m0")]
    by_library = tiny("llama", vocab_size=VOCAB)
    object.__setattr__(by_library, "_specbeam_rounding", "torchao-int8")
    recalls = [new_recall(model.get_input_embeddings().weight, 4, seed) for seed in (0, 1)]
    with_memory = [MemoryLM(target, MemoryPlan(4, 2), recall) for recall in recalls]
    remembering = [*with_memory, *(MemoryLM(target, MemoryPlan(4, 2, most), recalls[0]) for most in (3, 4))]
    drafting = MemoryLM(pair.draft, MemoryPlan(4, 4, recall="initial"), None)
    windowed = MemoryLM(target, MemoryPlan(4, 4, recall="initial"), None)
    pairs = [
        pair,
        replace(pair, target=small),
        replace(pair, target=HuggingFaceLM(by_library, engine="plain")),
        replace(pair, draft=drafting),
        replace(pair, target=windowed),
        *(replace(pair, draft=draft) for draft in sets),
        *(replace(pair, target=lm) for lm in remembering),
    ]
    keys = [repr(fastest._key(one, Settings())) for one in pairs]
    assert len(set(keys)) == len(pairs)
    assert keys[0] == repr(fastest._key(pair, Settings()))


def test_what_a_pass_costs_is_known_by_what_the_model_is_and_not_by_where_it_was():
    one, moved, grown = tiny("llama"), tiny("llama"), tiny("llama", num_hidden_layers=1)
    for model, path in ((one, "here"), (moved, "there"), (grown, "here")):
        model.config._name_or_path = path
    assert measured.model_key(one) == measured.model_key(moved)
    assert measured.model_key(one) != measured.model_key(grown)
    wider = tiny("llama")
    wider.lm_head = torch.nn.Linear(wider.config.hidden_size, 100, bias=False)  # the configuration does not say so
    assert measured.model_key(one) != measured.model_key(wider)


def test_return_sequences_that_fail_name_their_prompt(pair):
    def allowed(number, tokens):
        raise LookupError("no table")

    options = {"num_return_sequences": 3, "max_new_tokens": 4, "prefix_allowed_tokens_fn": allowed}
    with pytest.raises(errors.BrokenLaw, match=r"prompt 0, step 0: .*no table"):
        sb.generate(pair, "abc", "sampling", **options)
    with pytest.raises(errors.SomeFailed) as caught:
        sb.generate(pair, ["abc", "no"], "sampling", **options)
    assert [str(one).split(",")[0] for one in caught.value.failures] == ["prompt 0"] * 3 + ["prompt 1"] * 3


def test_a_warning_points_at_the_caller(pair):
    with pytest.warns(UserWarning, match="min_new_tokens=5 is more than") as found:
        sb.generate(pair, "abc", "greedy", min_new_tokens=5, max_new_tokens=2)
    assert {warning.filename for warning in found} == {__file__}


def test_lines_of_an_open_file_are_prompts(pair, tmp_path):
    (tmp_path / "two.txt").write_text("abc\nno\n")
    with (tmp_path / "two.txt").open() as file:
        found = sb.generate(pair, file, "greedy", max_new_tokens=2)
    alone = sb.generate(pair, ["abc", "no"], "greedy", max_new_tokens=2)
    assert [one.prompt for one in found] == [one.prompt for one in alone]
