"""A plan: what a call asks for, decoded once, from which sessions can be begun as often as one likes."""

from dataclasses import FrozenInstanceError

import pytest

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.doors.plan import CallPlan, PlannedText
from specbeam.doors.request import Request
from specbeam.errors import BadPrompt, BadSetting, NotSupported
from tests.support import words

PROMPTS = ["abc", "", [3, 4, 5]]
OPTIONS = {"max_new_tokens": 6, "temperature": 0.7, "top_k": 5}


@pytest.fixture(scope="module")
def pair():
    return words.pair()


def test_a_plan_holds_numbers_and_the_error_of_each_wrong_prompt(pair):
    plan = CallPlan.of(pair, PROMPTS, sb.dsbd(3), OPTIONS, seed=7)
    first, wrong, last = plan.texts
    assert isinstance(wrong, BadPrompt)
    assert plan.prompt_of == (0, 1, 2)
    assert isinstance(first, PlannedText)
    assert first.prompt == pair.tokenizer("abc")["input_ids"]
    assert last.prompt == [3, 4, 5]
    assert first.limits.max_new_tokens == 6
    assert first.warp.truncation[:2] == (0.7, 5)
    assert plan.method.beams == 3
    with pytest.raises(FrozenInstanceError):
        plan.audit = True


def test_independent_answers_take_a_place_each(pair):
    plan = CallPlan.of(pair, ["abc", "Hello"], "sampling", OPTIONS | {"num_return_sequences": 3}, seed=7)
    assert plan.prompt_of == (0, 0, 0, 1, 1, 1)
    assert (plan.answers, plan.answers_per_session) == (3, 1)
    assert len({text.key for text in plan.texts}) == 6
    together = CallPlan.of(pair, ["abc", "Hello"], sb.dsbd(3), OPTIONS | {"num_return_sequences": 3}, seed=7)
    assert together.prompt_of == (0, 1)
    assert together.answers_per_session == 3


def test_the_sessions_of_a_plan_decode_the_texts_of_generate_each_time(pair):
    plan = CallPlan.of(pair, ["abc", "Hello you"], sb.dsbd(3), OPTIONS, seed=7)
    expected = [one.text for one in sb.generate(pair, ["abc", "Hello you"], sb.dsbd(3), seed=7, **OPTIONS)]
    for _ in range(2):
        request = Request(plan)
        for _ in decode(pair.target, request.sessions):
            pass
        assert [request.result(session)[0].text for session in request.sessions] == expected


def test_wrong_options_are_refused_before_anything_is_decoded(pair):
    with pytest.raises(BadSetting, match="temperature is -1"):
        CallPlan.of(pair, "abc", options={"temperature": -1})
    with pytest.raises(NotSupported, match="greedy does not draw, so top_k would be ignored"):
        CallPlan.of(pair, "abc", sb.greedy(), {"top_k": 3})


def test_a_prompt_without_room_for_a_text_is_told_to_be_shorter(caplog):
    pair = words.pair()
    most = pair.target.max_positions
    with pytest.raises(BadPrompt) as found:
        sb.generate(pair, "a" * (most + 1), "greedy")
    assert str(found.value).endswith(
        f"which leaves no room for a new one: the model has {most} positions; shorten the prompt"
    )
    with pytest.raises(
        BadPrompt, match=f"may get 8 new tokens, but the model has {most} positions; .* max_new_tokens to 3$"
    ):
        sb.generate(pair, [3] * (most - 3), "greedy", max_new_tokens=8)


def test_long_prompts_are_no_warnings_of_the_tokenizer(caplog):
    pair = sb.load("bundled")
    pair.tokenizer.deprecation_warnings.clear()
    with caplog.at_level("WARNING"), pytest.raises(BadPrompt, match="leaves no room"):
        sb.generate(pair, "Ein Hund. " * 1000, "greedy")
    assert not caplog.records


def test_a_law_without_chance_says_so(pair):
    assert CallPlan.of(pair, "abc", sb.dsbd(3), {"temperature": 0}).parts.law.endswith(
        "; at temperature 0, so nothing is drawn"
    )
    assert "nothing is drawn" not in CallPlan.of(pair, "abc", sb.dsbd(3), {"temperature": 0.5}).parts.law
    assert CallPlan.of(pair, "abc", "greedy", {"temperature": 0}).parts.law == "exact: greedy"
