"""Random calls: they are the same for a seed, they are judged, and a process that ends badly is a fault of its call."""

import json
from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.errors import BadSetting, BrokenPart
from specbeam.lab.fuzz import campaign as campaigns
from specbeam.lab.fuzz.calls import RandomCall, random_call
from specbeam.lab.fuzz.campaign import CRASHED, HUNG, campaign
from specbeam.lab.fuzz.invariants import broken_invariants, of_options
from specbeam.lab.fuzz.trying import BROKEN, REFUSED, tried
from specbeam.lab.fuzz.worlds import WORLDS, world
from tests.doors.cli.test_commands import specbeam


@pytest.fixture(scope="module")
def alone():
    return world("no draft")


CALL = RandomCall("beam_search", {"beams": 3}, [[5, 6, 7]], {"max_new_tokens": 5, "seed": 1}, "generate")


def test_a_seed_gives_the_same_calls(alone):
    def drawn(seed):
        return [str(random_call(alone, "no draft", seed, number)) for number in range(30)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_words_are_not_given_where_recipes_take_parts(alone):
    """Under the type checker of the test run, such a call would be a crash or a refusal by the number of calls before."""
    calls = [random_call(alone, "no draft", 0, number) for number in range(200)]
    settings = [call.settings for call in calls if call.method in ("beam_search", "beam_sampling")]
    assert any("rule" in one for one in settings)
    assert all(one.get(name) is None for one in settings for name in ("drafter", "rule", "controller"))


def test_random_calls_hold_all_invariants(alone):
    for number in range(40):
        call = random_call(alone, "no draft", 0, number)
        outcome = tried(alone, call)
        assert outcome.kind in ("answered", REFUSED), (str(call), outcome.text)


def test_a_refusal_is_no_fault(alone):
    outcome = tried(alone, replace(CALL, options={"max_new_tokens": 0}))
    assert outcome.kind == REFUSED
    assert "max_new_tokens is 0" in outcome.text


def test_what_is_wrong_with_an_answer_is_named(alone):
    method = CALL.make()
    answers = sb.generate(alone.pair, CALL.prompts, method, **CALL.options)
    (answer,) = answers
    assert [*broken_invariants(alone, CALL, method, answers)] == []
    (first, *others) = answer.beams
    wrong = {
        "not in the vocabulary": replace(answer, tokens=[999]),
        "not among its beams": replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % 61]),
        "beams are not in order": replace(answer, beams=[*others, first]),
        "the method has 3": replace(answer, beams=[*answer.beams, first]),
        "plain forwards give": replace(answer, beams=[replace(first, score=first.score + 0.5), *others]),
        "the report counts": replace(answer, report=replace(answer.report, tokens=99)),
    }
    for words, damaged in wrong.items():
        found = [*broken_invariants(alone, CALL, method, [damaged])]
        assert any(words in why for why in found), (words, found)


def test_a_text_that_a_stop_string_ends_need_not_be_whole(alone):
    """The schema holds for texts that end by themselves."""
    (answer,) = sb.generate(alone.pair, CALL.prompts, CALL.make(), **CALL.options)
    cut = replace(answer, text='{"a', beams=[replace(answer.beams[0], finished=True)])
    options = {"json_schema": {"type": "object"}}
    stopped = replace(CALL, options=options | {"stop_strings": "a"})
    assert [*of_options(alone, stopped, cut)] == []
    (fault,) = of_options(alone, replace(CALL, options=options), cut)
    assert "is not JSON" in fault


def test_other_texts_without_drafts_are_a_fault(alone, monkeypatch):
    given = sb.generate(alone.pair, CALL.prompts, CALL.make(), **CALL.options)
    other = [replace(given[0], tokens=[1], beams=[replace(given[0].beams[0], tokens=[1], score=0.0)])]
    answers = iter([given, other])
    monkeypatch.setattr(sb, "generate", lambda *given, **options: next(answers))
    outcome = tried(alone, CALL)
    assert outcome.kind == BROKEN
    assert "without drafts" in outcome.text


def test_an_error_of_a_part_is_a_crash(alone, monkeypatch):
    def broken(*given, **options):
        raise BrokenPart("prompt 0, step 3: KeyError")

    monkeypatch.setattr(sb, "generate", broken)
    assert tried(alone, CALL).kind == CRASHED
    monkeypatch.setattr(sb, "generate", lambda *given, **options: 1 / 0)
    assert tried(alone, CALL).kind == CRASHED


def test_a_process_that_dies_or_hangs_is_a_fault_of_its_call_and_the_next_one_goes_on(monkeypatch):
    program = """
import json, os, sys, time
(name, seed, first, calls) = sys.argv[2:]
for number in range(int(first), int(first) + int(calls)):
    print(json.dumps({"begin": number, "call": f"call {number}"}), flush=True)
    if number == 1:
        os._exit(7)
    if number == 2:
        time.sleep(600)
    print(json.dumps({"end": number, "method": "m", "kind": "answered", "text": ""}), flush=True)
"""
    begin = campaigns.subprocess.Popen

    def started(command, **options):
        return begin([command[0], "-c", program, *command[2:]], **options)

    heard = []

    class RingsAtOnce(campaigns._Alarm):
        """An alarm whose time is up at the sixth sign of life: when call 2 has begun."""

        def wind(self):
            heard.append(self)
            if len(heard) == 6:
                self._ring()

    monkeypatch.setattr(campaigns.subprocess, "Popen", started)
    monkeypatch.setattr(campaigns, "_Alarm", RingsAtOnce)
    tally = campaign(4, 0, ["no draft"])
    found = [(fault.number, fault.kind, fault.call) for fault in tally.faults]
    assert found == [(1, CRASHED, "call 1"), (2, HUNG, "call 2")]
    assert "exit code 7" in tally.faults[0].text
    assert tally.outcomes["answered"] == 2


def test_wrong_arguments_are_refused():
    with pytest.raises(BadSetting, match="world is 'x'"):
        campaign(3, 0, ["x"])
    with pytest.raises(BadSetting, match="calls is 0"):
        campaign(0, 0)


def test_the_command_says_what_it_tried():
    code, out, _ = specbeam("evaluate", "fuzz", "--world", "no draft", "--calls", "3", "--seed", "2", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["calls"] == 3
    assert said["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_random_calls_of_every_world_hold_all_invariants(name):
    tally = campaign(25, 11, [name])
    assert tally.faults == []
