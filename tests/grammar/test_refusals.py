"""What is refused, and how it is said; the command line."""

import json
import sys

import pytest

import specbeam as sb
from specbeam import errors
from specbeam.cli.main import main
from specbeam.grammar.compiled import BACKENDS
from tests.grammar.forms import FORMS, POINTS, SUM, WORDS, characters, valid
from tests.support import words
from tests.support.tiny_models import tiny


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": '{"type": '}, "json_schema is no JSON"),
        ({"json_schema": {"type": "thing"}}, "json_schema cannot be kept to"),
        ({"regex": "(abc"}, "regex cannot be kept to"),
        ({"grammar": "start: nothing"}, "grammar cannot be kept to"),
        ({"grammar": "nothing"}, "grammar cannot be kept to"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar are given"),
        ({"regex": "a", "grammar_backend": "hope"}, "must be 'llguidance' or 'xgrammar'"),
        ({"regex": "ä+"}, "no token of this vocabulary can begin"),
        ({"regex": "a", "eos_token_id": []}, "there is no end token"),
    ],
)
def test_a_broken_form_is_refused_before_anything_is_decoded(options, message):
    pair = characters()
    before = pair.target.passes
    with pytest.raises(errors.BadSetting, match=message):
        sb.generate(pair, "abc", "sampling", **options)
    assert pair.target.passes == before


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


def test_forms_are_about_text(backend):
    model = tiny("llama")
    with pytest.raises(errors.NotSupported, match="there is no tokenizer"):
        sb.generate(sb.load(model), [[4, 5]], "sampling", regex="a", grammar_backend=backend)
    tokenizer = words.tokenizer()
    from tokenizers import decoders

    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(errors.NotSupported, match="by their neighbours"):
        sb.generate(sb.load(model, tokenizer=tokenizer), "abc", "sampling", regex="a", grammar_backend=backend)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_library_is_named_with_the_command_that_brings_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.MissingPackage, match=r"pip install 'specbeam\["):
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
    (tmp_path / "sum.lark").write_text(SUM)
    for option, value, form in (
        ("--json-schema", json.dumps(POINTS), "points"), ("--json-schema", str(tmp_path / "points.json"), "points"),
        ("--regex", WORDS, "words"), ("--grammar", str(tmp_path / "sum.lark"), "sum"),
    ):  # fmt: skip
        assert specbeam(monkeypatch, "generate", "abc", *saved, option, value) == 0
        assert valid(FORMS[form], capsys.readouterr().out.rstrip("\n"))


def test_mistakes_on_the_command_line(saved, monkeypatch, capsys):
    for arguments, message in (
        (("--json-schema", "person.json"), "there is no file person.json"),
        (("--grammar", "sum.lark"), "there is no file sum.lark"),
        (("--regex", "(a"), "regex cannot be kept to"),
        (("--regex", "a", "--json-schema", "{}"), "json_schema and regex are given"),
    ):
        assert specbeam(monkeypatch, "generate", "abc", *saved, *arguments) == 2
        assert message in capsys.readouterr().err
