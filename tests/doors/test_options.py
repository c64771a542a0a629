"""The table of options: it agrees with the types that editors see, and every door hints at what was meant."""

import inspect
from typing import get_type_hints

import pytest

import specbeam as sb
from specbeam.apps.jobs.rows import Columns, row_of
from specbeam.core.names import nearest
from specbeam.doors.method_text import method_from
from specbeam.doors.options import table
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import OPTIONS, Options, aliases, checked_values
from specbeam.errors import BadSetting
from specbeam.generation import generate, stream, turns_of
from tests.doors.cli.test_commands import specbeam
from tests.support import words


def test_each_option_has_a_type_and_an_entry():
    assert list(Options.__annotations__) == list(OPTIONS)
    assert set(get_type_hints(Options, localns={"Tensor": object, "LogitsProcessorList": object})) == set(OPTIONS)


@pytest.mark.parametrize("function", [generate, stream, turns_of])
def test_the_functions_that_generate_take_the_options_of_the_table(function):
    assert "table.Options" in str(inspect.signature(function).parameters["options"].annotation)


def test_settings_hold_what_was_given_and_defaults():
    settings = Settings(top_k=3)
    assert settings.top_k == 3
    assert settings.temperature is None
    assert settings.num_return_sequences == 1
    assert settings.changed(top_k=None) == Settings()
    assert repr(settings) == "Settings(top_k=3)"
    with pytest.raises(AttributeError, match="no option top_q"):
        _ = settings.top_q


@pytest.mark.parametrize(
    ("given", "meant"),
    [("top_q", "top_p"), ("max_tokens", "max_new_tokens"), ("n", "num_return_sequences"), ("zzz", "")],
)
def test_a_misspelt_or_foreign_name_is_recognised(given, meant):
    assert nearest(given, OPTIONS, aliases()) == meant


def test_every_door_asks_whether_you_meant_the_near_name():
    pair = words.pair()
    hint = r"\(did you mean {}\?\)"
    with pytest.raises(BadSetting, match="no option temprature " + hint.format("temperature")):
        sb.generate(pair, "abc", temprature=1)
    with pytest.raises(BadSetting, match="no option stop " + hint.format("stop_strings")):
        next(sb.stream(pair, "abc", stop=["a"]))
    with pytest.raises(BadSetting, match="dsbd has no setting 'beam' " + hint.format("beams")):
        method_from("dsbd", ["beam=2"])
    row = row_of(1, {"prompt": "abc", "settings": {"top-p": 0.5}}, Columns())
    assert "(did you mean top_p?)" in row.error
    code, _, err = specbeam("generate", "abc", "--temprature", "1")
    assert code == 2
    assert "--temperature" in err


def test_the_page_of_options_lists_each_once():
    page = table.as_markdown()
    for name in OPTIONS:
        assert len([line for line in page.splitlines() if line.startswith(f"| `{name}` |")]) == 1
    assert "`--stop`" in page
    assert "`specbeam.no_repeat_ngram_size`" in page


@pytest.mark.parametrize("has_draft", [True, False])
def test_the_default_method_has_one_law_with_and_without_a_draft(has_draft):
    """And without one the report says so."""
    pair = words.pair(draft_seed=1 if has_draft else None)
    (found,) = sb.generate(pair, "abc", seed=3, max_new_tokens=8)
    (expected,) = sb.generate(pair, "abc", sb.beam_sampling(4), seed=3, max_new_tokens=8)
    assert [beam.tokens for beam in found.beams] == [beam.tokens for beam in expected.beams]
    assert found.report.law.startswith(expected.report.law)
    assert ("decoded without drafts" in found.report.law) == (not has_draft)
    assert "".join(sb.stream(pair, "abc", seed=3, max_new_tokens=8)) == found.text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"num_beams": 4}, "num_beams, but methods have beams: give method=sb.dsbd(beams=4)"),
        (
            {"num_beams": 4, "do_sample": True},
            "do_sample: methods sample, unless their name says greedy or search; leave it out; num_beams, but methods have "
            "beams: give method=sb.dsbd(beams=4)",
        ),
        (
            {"num_beams": 4, "do_sample": False},
            "do_sample: methods decide that; greedy, beam_search and speculative_beam_search draw nothing; num_beams, but "
            "methods have beams: give method=sb.speculative_beam_search(beams=4)",
        ),
        ({"methd": "dsbd"}, "methd (did you mean method?)"),
        ({"sed": 1, "top_q": 0.5}, "sed (did you mean seed?); top_q (did you mean top_p?)"),
        ({"assistant_model": "x"}, "assistant_model: give sb.load(target, draft=...)"),
        ({"max_time": 3}, "max_time: give max_new_tokens"),
    ],
)
def test_each_unknown_option_has_its_advice(options, advice):
    pair = words.pair()
    calls = {
        "generate": lambda: sb.generate(pair, "abc", **options),
        "stream": lambda: next(sb.stream(pair, "abc", **options)),
        "turns_of": lambda: next(sb.turns_of(pair, "abc", **options)),
    }
    for name, call in calls.items():
        with pytest.raises(BadSetting) as found:
            call()
        assert str(found.value) == f"{name}() has no option {advice}"


def test_an_option_without_advice_is_answered_with_all_options():
    with pytest.raises(BadSetting, match=r"generate\(\) has no option zzz; it has prompts, method, seed, .*, top_k, "):
        sb.generate(words.pair(), "abc", zzz=4)
    with pytest.raises(BadSetting, match=r"best\(\) has no option num_beams; it has prompt, n, limit, "):
        sb.best(words.pair(), "abc", num_beams=4)
    with pytest.raises(BadSetting, match=r"no option prompt_length \(did you mean"):
        checked_values({"prompt_length": 4})


def test_methods_without_a_draft_are_suggested_to_pairs_without_one():
    with pytest.raises(BadSetting, match=r"give method=sb\.beam_sampling\(beams=4\)"):
        sb.generate(words.pair(draft_seed=None), "abc", num_beams=4)
