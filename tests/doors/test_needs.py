"""Parts say what they need of each row: ranked tokens, hidden states, those of the prompt."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.answers import LOGITS, ranked_rows
from specbeam.core.control.fixed import FixedShape
from specbeam.core.decode import decode
from specbeam.core.draft.lookup import RETRIEVED, PromptLookup, retrieved_chains
from specbeam.core.forest import Forest
from specbeam.core.records import Needs, Scored
from specbeam.core.session import Parts
from specbeam.core.verify.walk import MatchRule
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.eligibility import layers_of
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.table import TableLM
from tests.support.seats import moved, random_forest, random_turn, seat
from tests.support.tiny_models import FAMILIES, tiny

ENGINES = ["plain", "compiled"]
EVERYTHING = Needs(logits=True, ranked=5, hidden=True, prompt=True)


def head_inputs(model, paths):
    """What the model's head reads behind each path, by plain forwards."""
    heard = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, given: heard.append(given[0][0, -1])
    )
    with torch.inference_mode():
        for path in paths:
            model(input_ids=torch.tensor([path]))
    handle.remove()
    return torch.stack(heard)


def stream_states(model, path, taps):
    """What enters layers behind a path, by a plain forward; the number of layers stands for what leaves the last one."""
    states = []

    def enter(module, given, named):
        states.append(given[0] if given else named["hidden_states"])

    def leave(module, given, out):
        states.append(out[0] if isinstance(out, tuple) else out)

    layers = layers_of(model)
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(leave))
    with torch.inference_mode():
        model(input_ids=torch.tensor([path]))
    for handle in handles:
        handle.remove()
    return torch.cat([states[tap][0, -1] for tap in taps])


def paths_of(texts, forest):
    roots = forest.root_of(np.arange(forest.size))
    return [texts[root] + forest.path(node) for node, root in enumerate(roots)]


def check_hidden_states(lm, model, chunk_sizes=(1, 4, 17)):
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, lm.vocab, length).tolist()) for length in chunk_sizes]
    for turn_number in range(4):
        forests = [random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 5) for one in seats]
        for one, forest, scored in zip(
            seats, forests, lm.extend(seats, forests, [EVERYTHING] * len(seats)), strict=True
        ):
            expected = head_inputs(model, paths_of(one.texts, forest))
            torch.testing.assert_close(scored.hidden, expected, atol=2e-4, rtol=2e-4)
            head = model.get_output_embeddings().weight
            if model.config.model_type == "llama":
                torch.testing.assert_close(scored.hidden @ head.detach().T, scored.logits, atol=2e-4, rtol=2e-4)
            before = range(1, len(one.prompt)) if turn_number == 0 else range(0)
            assert len(scored.prompt) == len(before)
            for row, stop in zip(scored.prompt, before, strict=True):
                expected = head_inputs(model, [one.prompt[:stop]])[0]
                torch.testing.assert_close(row, expected, atol=2e-4, rtol=2e-4)
            turn = random_turn(rng, forest, lm.vocab)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_states_are_what_the_head_reads(family):
    model = tiny(family)
    check_hidden_states(HuggingFaceLM(model, chunk=5, engine="plain"), model)


@pytest.mark.parametrize("sizes", [(1, 4, 17), (13,), (3,)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_of_our_own_give_hidden_states(engine, sizes):
    model = tiny("llama", vocab_size=64)
    check_hidden_states(HuggingFaceLM(model, chunk=5, engine=engine), model, sizes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_asked_for_hidden_states_gives_the_same_logits(engine):
    model = tiny("llama", vocab_size=64)
    lm = HuggingFaceLM(model, chunk=5, engine=engine)
    forest = Forest.rooted([9]).grown([3, 4, 5], [0, 1, 1])
    plain, asked = seat(range(3, 10)), seat(range(3, 10))
    (expected,) = lm.extend([plain], [forest])
    expected = expected.logits.clone()
    lm.close(plain)
    (found,) = lm.extend([asked], [forest], [EVERYTHING])
    rounding = 0 if engine == "compiled" else 1e-6  # torch may add in another order in an array elsewhere in memory
    torch.testing.assert_close(found.logits, expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        *((family, "plain") for family in sorted(FAMILIES)),
        *(
            (family, "compiled")
            for family in ("llama", "gemma2", "gpt2", "gpt_neox", "granite", "olmo2", "opt", "bloom")
        ),
    ],
)
def test_taps_are_the_states_between_layers(family, engine, hidden):
    """Of drafts and of the prompt, which comes in chunks; several sessions side by side, turn after turn."""
    model = tiny(family, **({"vocab_size": 64} if engine != "plain" else {}))
    lm = HuggingFaceLM(model, chunk=5, engine=engine)
    layers = len(layers_of(model))
    taps = (0, 1, layers)
    needs = Needs(logits=True, hidden=hidden, prompt=True, taps=taps)
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, lm.vocab, length).tolist()) for length in (1, 4, 17)]
    size = model.get_input_embeddings().weight.shape[1]
    close = {"atol": 2e-4, "rtol": 2e-4}
    for turn_number in range(3):
        forests = [random_forest(rng, [text[-1] for text in one.texts], lm.vocab, 5) for one in seats]
        answers = lm.extend(seats, forests, [needs] * len(seats))
        for one, forest, scored in zip(seats, forests, answers, strict=True):
            assert scored.hidden.shape == (forest.size, (len(taps) + hidden) * size)
            paths = paths_of(one.texts, forest)
            expected = torch.stack([stream_states(model, path, taps) for path in paths])
            torch.testing.assert_close(scored.hidden[:, hidden * size :], expected, **close)
            if hidden:
                torch.testing.assert_close(scored.hidden[:, :size], head_inputs(model, paths), **close)
            before = range(1, len(one.prompt)) if turn_number == 0 else range(0)
            assert len(scored.prompt) == len(before)
            for row, stop in zip(scored.prompt, before, strict=True):
                wanted = stream_states(model, one.prompt[:stop], taps)
                torch.testing.assert_close(row[hidden * size :], wanted, **close)
            turn = random_turn(rng, forest, lm.vocab)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_taps_that_a_model_does_not_have_are_refused():
    for engine in ENGINES:
        lm = HuggingFaceLM(tiny("llama", vocab_size=64), engine=engine)
        layers = len(layers_of(lm.model))
        assert lm.lacks(Needs(taps=(0, layers))) == ""
        assert f"has {layers} layers" in lm.lacks(Needs(taps=(layers + 1,)))


def test_parts_that_need_other_states_do_not_go_together():
    assert Needs(logits=True) | Needs(taps=(1, 2)) == Needs(logits=True, taps=(1, 2))
    assert Needs(prompt=True) | Needs(hidden=True) == Needs(hidden=True, prompt=True)
    with pytest.raises(BadSetting, match="different hidden states"):
        Needs(taps=(1, 2)) | Needs(hidden=True)


def test_the_model_is_left_without_hooks():
    model = tiny("gpt2")
    lm = HuggingFaceLM(model, engine="plain")
    lm.extend([seat([3, 4])], [Forest.rooted([4])], [EVERYTHING])
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_ranked_rows_hold_the_likeliest_tokens_in_the_order_of_the_vocabulary():
    rows = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [5.0, 1.0, 1.0, 0.0, 1.0]])
    for count, tokens in ((1, [[1], [0]]), (2, [[1, 3], [0, 1]]), (4, [[1, 2, 3, 4], [0, 1, 2, 4]])):
        ranked = ranked_rows(rows, count)
        assert ranked.tokens.tolist() == tokens
        np.testing.assert_array_equal(ranked.logits, rows.numpy()[[[0], [1]], ranked.tokens])
        np.testing.assert_allclose(ranked.norms, rows.logsumexp(-1), rtol=1e-6)
    assert ranked_rows(rows, 9).tokens.shape == (2, 5)


@dataclass(frozen=True)
class RankedMatch:
    """Keeps drafts that are the likeliest token after their parent, and reads the first of each ranking alone."""

    needs: ClassVar[Needs] = Needs(ranked=1)

    def verify(self, session, forest, scored):
        assert scored.logits.numel() == 0
        rows = torch.full((forest.size, 64), -100.0)
        rows.scatter_(1, torch.from_numpy(scored.ranked.tokens), 0.0)
        return MatchRule().verify(session, forest, rows)


def parts(drafter, rule, depth=3):
    return Parts(drafter, rule, FixedShape(depth, 1), "exact: greedy")


def method(drafter, rule, depth=3):
    return sb.Method("own", "exact: greedy", 1, lambda target, draft: parts(drafter, rule, depth), greedy=True)


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", seed=1, vocab_size=64))


def test_a_rule_that_reads_rankings_alone_writes_what_greedy_writes(pair):
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    expected = sb.generate(pair, prompt, "greedy", max_new_tokens=20)[0]
    found = sb.generate(pair, prompt, method(PromptLookup(), RankedMatch()), max_new_tokens=20)[0]
    assert found.tokens == expected.tokens


@dataclass(frozen=True)
class NextFromHidden:
    """A head on hidden states: after each live beam, tokens near what it saw; the prompt's own rows teach it.

    A row of the prompt was followed by the prompt's next token. A beam is continued by the token that followed the row which
    its own last row is most like, and so on along the text: retrieval by hidden states.
    """

    needs: ClassVar[Needs] = Needs(hidden=True, prompt=True)
    no_law_reason: ClassVar[str] = RETRIEVED

    def draft(self, sessions, shapes):
        return [self._chain(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chain(self, session, shape):
        memory = session.state.get(self)
        text = [*session.prompt, *session.settled]
        if memory is None:
            return Forest.rooted(session.beams.tokens)
        rows = torch.cat(memory)  # of all tokens but the last
        assert len(rows) == len(text) - 1
        if len(rows) < 2:
            return Forest.rooted(session.beams.tokens)
        like = (rows[:-1] - rows[-1]).norm(dim=-1).argmin()
        guesses = text[int(like) + 2 : int(like) + 2 + shape.depth]
        return retrieved_chains(session, [guesses])

    def settle(self, session, turn):
        memory = session.state.setdefault(self, [turn.scored.prompt])
        node = 0
        kept = [0]
        for layer in turn.verdict.steps[:-1]:
            node = int(layer.beams.nodes[0])
            kept.append(node)
        memory.append(turn.scored.hidden[kept].clone())

    def close(self, session):
        session.state.pop(self, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drafter_of_hidden_states_sees_every_row_of_the_text(engine):
    """The drafter itself checks that it has a row for each token; the text is that of greedy decoding."""
    model = tiny("llama", seed=1, vocab_size=64)
    own = sb.load(model)
    own = replace(own, target=HuggingFaceLM(model, chunk=4, engine=engine))
    for prompt in ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9], [3, 4]):
        expected = sb.generate(own, prompt, "greedy", max_new_tokens=30)[0]
        found = sb.generate(own, prompt, method(NextFromHidden(), MatchRule()), max_new_tokens=30)[0]
        assert found.tokens == expected.tokens
    assert found.report.accepted > 0


def test_what_each_part_needs_is_what_they_need_together():
    both = parts(NextFromHidden(), RankedMatch())
    assert both.needs == Needs(ranked=1, hidden=True, prompt=True)
    assert parts(PromptLookup(), MatchRule()).needs == LOGITS
    assert parts(NextFromHidden(), MatchRule()).needs == Needs(logits=True, hidden=True, prompt=True)


def sessions_of(pair, method, *prompts):
    return [
        Request.of(pair, prompt, method, Settings.given({"max_new_tokens": 5}, None), 1).sessions[0]
        for prompt in prompts
    ]


class LogitsAlone:
    """A model of somebody's own that knows no needs."""

    def __init__(self, lm):
        self.lm, self.vocab, self.max_positions = lm, lm.vocab, None

    def extend(self, sessions, forests):
        return [Scored(found.logits) for found in self.lm.extend(sessions, forests)]

    def __getattr__(self, name: str) -> Any:
        if name in ("lacks", "fill"):
            raise AttributeError(name)
        return getattr(self.lm, name)


def test_a_model_that_gives_no_hidden_states_is_refused_before_the_first_pass(pair):
    hidden = sessions_of(pair, method(NextFromHidden(), MatchRule()), [3, 4, 5])
    for lm in (TableLM([1 / 64] * 64), LogitsAlone(pair.target)):
        with pytest.raises(
            NotSupported, match=r"a part needs .*hidden=True.* (has no hidden states|returns logits only)"
        ):
            list(decode(lm, hidden))


def test_a_model_that_knows_no_needs_serves_parts_that_have_none(pair):
    first, second = (sessions_of(pair, method(PromptLookup(), MatchRule()), [3, 4, 5])[0] for _ in range(2))
    for lm, session in ((pair.target, first), (LogitsAlone(pair.target), second)):
        list(decode(lm, [session]))
    assert first.failure is None
    assert first.settled == second.settled
