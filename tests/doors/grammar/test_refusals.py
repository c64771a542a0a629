"""What is refused, and how it is said; the command line."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import specbeam as sb
from specbeam import errors
from specbeam.core.constraint import Constrained, Form
from specbeam.doors.cli.main import main
from specbeam.doors.grammar.compiled import BACKENDS, compiled
from tests.doors.grammar.forms import FORMS, POINTS, SUM, WORDS, characters, valid
from tests.support import words
from tests.support.checking import refused
from tests.support.tiny_models import tiny


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": '{"type": '}, "json_schema is not valid JSON"),
        ({"json_schema": {"type": "thing"}}, "json_schema cannot be enforced"),
        ({"regex": "(abc"}, "regex cannot be enforced"),
        ({"grammar": "start: nothing"}, "grammar cannot be enforced"),
        ({"grammar": "nothing"}, "grammar cannot be enforced"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar are given"),
        ({"regex": "a", "grammar_backend": "hope"}, "must be 'llguidance' or 'xgrammar'"),
        ({"regex": "ä+"}, "no token of this vocabulary can begin"),
        ({"regex": "a", "eos_token_id": []}, "regex needs an end token"),
        ({"regex": "a", "eos_token_id": [5000]}, "eos_token_id is 5000; the model's vocabulary is 0 to 86"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is -1"),
        ({"regex": "\ud800"}, "half a character"),
        ({"json_schema": False}, "json_schema is False; it must be an object"),
        ({"json_schema": "false"}, "json_schema is False; it must be an object"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not valid JSON: .*not JSON compliant"),
        ({"json_schema": '{"maximum": NaN}'}, "json_schema is not valid JSON"),
        ({"json_schema": {"type": object}}, "json_schema is not valid JSON"),
    ],
)
def test_a_broken_form_is_refused_before_anything_is_decoded(options, message):
    pair = characters()
    before = pair.target.passes
    with pytest.raises(errors.BadSetting, match=message):
        sb.generate(pair, "abc", "sampling", **options)
    assert pair.target.passes == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": re.compile("a")}, "regex is re.compile.* it must be a text"),
        ({"regex": 5}, "regex is 5; it must be a text"),
        ({"regex": b"a"}, "regex is b'a'; it must be a text"),
        ({"regex": ["a", "b"]}, "one form serves all prompts"),
        ({"grammar": Path("x.lark")}, r"grammar=path.read_text\(\)"),
        ({"json_schema": Path("x.json")}, r"json_schema=path.read_text\(\)"),
        ({"json_schema": 5}, "json_schema is 5; it must be an object"),
        ({"json_schema": [{}]}, "it must be an object"),
    ],
)
def test_what_is_no_text_is_refused_at_the_door(options, message):
    with refused(message):
        sb.generate(characters(), "abc", "sampling", **options)


def test_what_a_schema_asks_for_and_nobody_can_enforce_is_refused():
    for schema in ({"not": {"type": "string"}}, {"type": "array", "uniqueItems": True}):
        with pytest.raises(errors.BadSetting, match="Unimplemented"):
            sb.generate(characters(), "abc", "sampling", json_schema=schema)
    with pytest.warns(UserWarning, match="Unimplemented"):  # unless the schema says that it may be passed over
        sb.generate(
            characters(),
            "abc",
            "sampling",
            max_new_tokens=3,
            json_schema={"not": {"type": "null"}, "x-guidance": {"lenient": True}},
        )


@pytest.mark.parametrize("schema", [True, "true", {}, "{}"])
def test_a_schema_that_asks_for_nothing_is_kept_by_any_json(schema, backend):
    (one,) = sb.generate(
        characters(), "abc", "sampling", seed=1, max_new_tokens=60, json_schema=schema, grammar_backend=backend
    )
    assert not one.beams[0].finished or json.loads(one.text) is not NotImplemented


def test_xgrammar_refuses_what_it_would_pass_over_in_silence():
    pytest.importorskip("xgrammar")
    for schema in (
        {"type": "string", "pattern": "(?=a)"},
        {"items": [{"pattern": r"\\(?<!b)"}]},
        {"patternProperties": {"^(?!a)": {}}},
    ):
        with pytest.raises(errors.BadSetting, match="uses look-around"):
            sb.generate(characters(), "abc", "sampling", json_schema=schema, grammar_backend="xgrammar")
    (one,) = sb.generate(
        characters(), "abc", "sampling", seed=0, max_new_tokens=9,
        json_schema={"type": "string", "pattern": r"^\(?a$"}, grammar_backend="xgrammar",
    )  # fmt: skip
    assert one.text in ('"a"', '"(a"')
    with pytest.raises(errors.BadSetting, match=r"^regex cannot be enforced: [^\[/]*$"):
        sb.generate(characters(), "abc", "sampling", regex="(abc", grammar_backend="xgrammar")


def test_tokens_that_are_no_text_by_themselves_are_never_allowed(backend):
    tokenizer = words.tokenizer("\ufffd")
    made, unknown = Form("regex", "[^x]{1,3}"), tokenizer.convert_tokens_to_ids("\ufffd")
    bans = Constrained(compiled(made, backend, tokenizer, len(tokenizer), (1,)), (1,), 0)
    allowed = bans.allowed(np.zeros((1, 0), dtype=np.int64), len(tokenizer))[0]
    assert allowed[tokenizer.convert_tokens_to_ids("a")]
    assert not allowed[unknown]


def test_forms_are_about_text(backend):
    model = tiny("llama")
    with pytest.raises(errors.NotSupported, match="regex needs a tokenizer"):
        sb.generate(sb.load(model), [[4, 5]], "sampling", regex="a", grammar_backend=backend)
    tokenizer = words.tokenizer()
    from tokenizers import decoders

    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(errors.NotSupported, match="depends on their neighbours"):
        sb.generate(sb.load(model, tokenizer=tokenizer), "abc", "sampling", regex="a", grammar_backend=backend)


def test_a_place_in_a_form_is_marked_by_a_caret_below_it():
    with pytest.raises(errors.BadSetting) as found:
        sb.generate(characters(), "abc", "sampling", grammar="start: (")
    first, *_, form, caret = str(found.value).splitlines()
    assert first == "grammar cannot be enforced:"
    assert caret.index("^") == form.index("(") + 1
    with pytest.raises(errors.BadSetting) as found:
        sb.generate(characters(), "abc", "sampling", json_schema={"type": "thing"})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_library_is_named_with_the_command_that_brings_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.MissingPackage, match=rf"needs {name}: pip install 'specbeam\[\w+\]'"):
        sb.generate(characters(), "abc", "sampling", regex="a", grammar_backend=name)


def test_one_prompt_that_gets_stuck_costs_itself_only():
    """This vocabulary has no ö, so the text that began with y has no way on."""
    pair = characters()
    bans = [[pair.tokenizer.convert_tokens_to_ids("y")]]
    with pytest.raises(errors.BrokenLaw, match="nothing to draw"):
        sb.generate(pair, "abc", "greedy", regex="yö")
    with pytest.raises(errors.SomeFailed) as caught:
        sb.generate(pair, ["abc", "", "abd"], "sampling", seed=0, regex="yö|x", bad_words_ids=bans)
    assert [one and one.text for one in caught.value.generations] == ["x", None, "x"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    pair = characters()
    for name, model in (("target", pair.target_model), ("draft", pair.draft_model)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    return ["-m", str(folder / "target"), "-d", str(folder / "draft"), "--seed", "1"]


def specbeam(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["specbeam", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_the_command_line_takes_forms_and_their_files(saved, monkeypatch, tmp_path, capsys):
    (tmp_path / "points.json").write_text(json.dumps(POINTS))
    (tmp_path / "a:sum.lark").write_text(SUM)
    for option, value, form in (
        ("--json-schema", json.dumps(POINTS), "points"), ("--json-schema", str(tmp_path / "points.json"), "points"),
        ("--regex", WORDS, "words"), ("--grammar", str(tmp_path / "a:sum.lark"), "sum"),
    ):  # fmt: skip
        assert specbeam(monkeypatch, "generate", "abc", *saved, option, value) == 0
        assert valid(FORMS[form], capsys.readouterr().out.rstrip("\n"))


def test_mistakes_on_the_command_line(saved, monkeypatch, tmp_path, capsys):
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"const": "ä"}'.encode("latin-1"))
    for arguments, message in (
        (("--json-schema", "person.json"), "there is no file person.json"),
        (("--grammar", "sum.lark"), "there is no file sum.lark"),
        (("--grammar", "x" * 5000), f"there is no file {'x' * 60}..., and a grammar would contain"),
        (("--grammar", str(tmp_path)), "cannot be read"),
        (("--json-schema", str(latin)), "is not UTF-8"),
        (("--json-schema", "false"), "json_schema is False; it must be an object"),
        (("--regex", "(a"), "regex cannot be enforced"),
        (("--regex", "a", "--json-schema", "{}"), "json_schema and regex are given"),
    ):
        assert specbeam(monkeypatch, "generate", "abc", *saved, *arguments) == 2
        assert message in capsys.readouterr().err
