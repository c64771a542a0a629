"""JSON schemas, regular expressions and grammars: what comes out is valid by judges that know nothing of us."""

import json
import re
import sys

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import specbeam as sb
from specbeam import errors
from specbeam.cli.main import main
from specbeam.constraint import Constrained, Form
from specbeam.grammar.compiled import BACKENDS, compiled
from specbeam.pair import BUNDLED
from specbeam.request import Request
from specbeam.settings import Settings
from tests.support import words
from tests.support.tiny_models import tiny
from tests.test_beam_search import METHODS, by_transformers
from tests.test_generation import beams_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", None]}, "maxItems": 3},
        "home": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                    "required": ["zip"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
POINTS = {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "array", "prefixItems": [
    {"type": "boolean"}, {"type": "integer", "minimum": -99, "maximum": 99}], "minItems": 2, "maxItems": 2,
    "items": False}}  # fmt: skip
WORDS = r"[a-z]{2,5}( [a-z]{2,5}){0,3}[.!]"
CODE = r"([A-Z][0-9]{2}|x+){1,3}=(yes|no)?"
SUM = """
start: term (op term){0,3}
op: " + " | " - " | "*"
term: NUMBER | "(" NUMBER op NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
FORMS = {
    "person": {"json_schema": PERSON},
    "points": {"json_schema": json.dumps(POINTS)},
    "words": {"regex": WORDS},
    "code": {"regex": CODE},
    "sum": {"grammar": SUM},
}
RECIPES = {
    "sampling": sb.sampling,
    "dsbd": lambda: sb.dsbd(3, 5, 3),
    "dsbd, rejection": lambda: sb.dsbd(3, 5, 3, coupling="rejection"),
    "search": lambda: sb.speculative_beam_search(3, 5, 3),
    "hf sampling": lambda: sb.dsbd(3, 5, 3, "fixed", semantics="hf"),
    "rsd_s": sb.rsd_s,
    "traversal": sb.traversal,
    "sequoia": sb.sequoia,
    "lookup": sb.prompt_lookup,
    "recycling": sb.token_recycling,
}
needs_pair = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


@pytest.fixture(params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param)
    return request.param


def characters():
    """Models of which each token is a character."""
    tokenizer = words.tokenizer(words.JSON)
    models = [tiny("llama", seed=seed, vocab_size=len(tokenizer)) for seed in (0, 1)]
    return sb.load(*models, tokenizer=tokenizer)


def byte_pairs():
    """Models with more logits than their byte-level tokenizer has tokens."""
    models = [tiny("llama", seed=seed, vocab_size=6160, eos_token_id=2) for seed in (0, 1)]
    return sb.load(*models, tokenizer=AutoTokenizer.from_pretrained(BUNDLED / "target"))


@pytest.fixture(
    scope="module", params=[characters, pytest.param(byte_pairs, marks=needs_pair)], ids=lambda make: make.__name__
)
def pair(request):
    return request.param()


def valid(form, text):
    if "json_schema" in form:
        schema = form["json_schema"]
        jsonschema.Draft202012Validator(json.loads(schema) if isinstance(schema, str) else schema).validate(
            json.loads(text)
        )
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text)
    else:
        assert re.fullmatch(r"[0-9+*() -]+", text)
        eval(text)  # what Python reads as a sum is one
    return True


def generated(pair, form, recipe, count, **options):
    """The valid texts of `count` prompts."""
    prompts = ["abc" + "xyz"[number % 3] * (number // 3) for number in range(count)]
    found = sb.generate(pair, prompts, RECIPES[recipe](), seed=3, max_new_tokens=150, **form, **options)
    return [one.text for one in found if valid(form, one.text)]


@pytest.mark.parametrize(("form", "recipe"), zip(FORMS, RECIPES, strict=False))
def test_texts_are_valid(pair, form, recipe):
    assert len(generated(pair, FORMS[form], recipe, 4)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_texts_are_valid(pair, form, backend):
    """Twenty prompts for each of ten methods, per form, tokenizer and library."""
    found = [text for recipe in RECIPES for text in generated(pair, FORMS[form], recipe, 20, grammar_backend=backend)]
    assert len(found) == 200
    assert len(set(found)) > 20


LANGUAGE = ["ab", "abc", "abd c", "b", "ba ba", "c, a", "c. "]


@pytest.mark.parametrize("form", [Form("regex", "ab|abc|abd c|b|ba ba|c, a|c\\. "), Form(
    "grammar", 'start: "a" "b" ("c" | "d c")? | "b" | "ba ba" | "c, a" | "c. "')], ids=lambda form: form.kind)  # fmt: skip
def test_the_allowed_tokens_are_those_of_the_language(form, backend):
    tokenizer = words.tokenizer()
    bans = Constrained(compiled(form, backend, tokenizer, 64, (1,)), (1,), 0)
    for text in LANGUAGE:
        path = tokenizer(text)["input_ids"]
        for place in range(len(path) + 1):
            head = text[:place]
            follow = {one[place] for one in LANGUAGE if one.startswith(head) and len(one) > place}
            expected = {tokenizer.convert_tokens_to_ids(character) for character in follow} | (
                {1} if head in LANGUAGE else set()
            )
            assert (
                set(np.flatnonzero(bans.allowed(np.array([path[:place]], dtype=np.int64), 64)[0]).tolist()) == expected
            )


@needs_pair
def test_byte_level_tokens_go_on_within_the_language(backend):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    language = ["The dog sleeps.", "The dog runs.", "Über Öl läuft es", "the", "the cat"]
    grammar = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in language)
    bans = Constrained(compiled(Form("grammar", grammar), backend, tokenizer, 6144, (2,)), (2,), 0)
    rng = np.random.default_rng(0)
    for _ in range(30):
        path = []
        while 2 not in path:
            allowed = np.flatnonzero(bans.allowed(np.array([path], dtype=np.int64), 6144)[0]).tolist()
            texts = {token: tokenizer.decode([*path, token]).rstrip("\ufffd") for token in allowed if token != 2}
            assert all(any(one.startswith(text) for one in language) for text in texts.values())
            assert (2 in allowed) == (tokenizer.decode(path) in language)
            path.append(int(rng.choice(allowed)))
        assert tokenizer.decode(path[:-1]) in language


def test_a_state_is_not_changed_by_what_becomes_of_it(backend):
    tokenizer = words.tokenizer(words.JSON)
    made = lambda: compiled(Form("json_schema", json.dumps(PERSON)), backend, tokenizer, len(tokenizer), (1,))  # noqa: E731
    rng, constraint = np.random.default_rng(1), made()
    known = Constrained(constraint, (1,), 0)
    paths = [()]
    for _ in range(120):
        path = paths[rng.integers(len(paths))]
        allowed = np.flatnonzero(known.allowed(np.array([path], dtype=np.int64), len(tokenizer))[0])
        token = int(rng.choice(allowed))
        if token != 1:
            paths.append((*path, token))
    for path in paths[::7]:  # a walker that never branched sees the same
        lone, row = Constrained(constraint, (1,), 0), np.array([path], dtype=np.int64)
        assert (lone.allowed(row, len(tokenizer)) == known.allowed(row, len(tokenizer))).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize(
    ("beams", "form"),
    [
        (3, "words"),
        (1, "sum"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "words"), (3, "sum"), (4, "person"))),
    ],
)
def test_same_seed_same_beams_with_and_without_a_draft(beams, form, options):
    pair, prompts = characters(), ["abc", "x"]
    plain, fast = (
        sb.generate(pair, prompts, method, seed=5, max_new_tokens=60, **FORMS[form], **options)
        for method in (sb.beam_sampling(beams), sb.dsbd(beams, beams + 2, 3, "fixed"))
    )
    assert beams_of(fast) == beams_of(plain)


SEARCHES = [
    ("words", {"length_penalty": 2.0, "early_stopping": True}),
    ("sum", {}),
    *(
        pytest.param(form, options, marks=pytest.mark.slow)
        for form in ("words", "sum")
        for options in (
            {"repetition_penalty": 1.4},
            {"length_penalty": -0.5},
            {"early_stopping": "never", "min_new_tokens": 4},
        )
    ),
]


@pytest.mark.parametrize(("form", "options"), SEARCHES, ids=str)
def test_beam_search_is_that_of_transformers_with_the_same_masks(form, options):
    pair, vocab = characters(), len(words.tokenizer(words.JSON))
    asked = Form(*next((name, text) for name, text in FORMS[form].items()))
    bans = Constrained(compiled(asked, "llguidance", pair.tokenizer, vocab, (1,)), (1,), 0)
    for prompt, beams in (("abc", 3), ("Hello there", 5)):
        length = len(pair.tokenizer(prompt)["input_ids"])

        def allowed(batch, tokens, length=length):
            return np.flatnonzero(bans.allowed(tokens[None, length:].numpy(), vocab)[0]).tolist()

        expected = by_transformers(pair, prompt, beams, 30, prefix_allowed_tokens_fn=allowed, **options)
        for name in ("plain", "drafted", "prompt_lookup"):
            made = METHODS[name](beams)
            (one,) = sb.generate(pair, prompt, made, max_new_tokens=30, **FORMS[form], **options)
            found = [(beam.tokens, pytest.approx(beam.score, abs=1e-4)) for beam in one.beams if beam.finished]
            real = [(tokens, score) for tokens, score in expected if score > -1e6]  # it fills up with beams of -1e9
            assert found[: len(real)] == real
            assert len(real) > 1


def test_at_temperature_zero_all_are_greedy():
    pair = characters()
    options = {"max_new_tokens": 60, "json_schema": json.dumps(POINTS)}
    plain = sb.generate(pair, "abc", "greedy", **options)[0]
    for recipe in (sb.speculative_sampling(), sb.traversal(), sb.opt_tree(), sb.gsd()):
        assert sb.generate(pair, "abc", recipe, temperature=0, **options)[0].tokens == plain.tokens


def test_every_token_has_the_renormalised_law():
    """Scores of a sampled text, computed again from plain forwards: odds over the allowed tokens."""
    pair = characters()
    (one,) = sb.generate(pair, "abc", sb.rsd_s(), seed=1, max_new_tokens=40, regex=WORDS)
    bans = Constrained(compiled(Form("regex", WORDS), "llguidance", pair.tokenizer, 86, (1,)), (1,), 0)
    with torch.inference_mode():
        logits = pair.target_model(torch.tensor([one.prompt + one.tokens])).logits[0, len(one.prompt) - 1 : -1].double()
    score = 0.0
    for place, token in enumerate(one.tokens):
        allowed = bans.allowed(np.array([one.tokens[:place]], dtype=np.int64), logits.shape[1])[0]
        score += float(logits[place].masked_fill(~torch.from_numpy(allowed), -torch.inf).log_softmax(-1)[token])
    assert one.beams[0].score * len(one.tokens) == pytest.approx(score, abs=1e-4)
    assert one.report.law == "exact: plain sampling; constrained by regex"


def test_a_text_that_is_cut_off_goes_behind_those_that_ended():
    mixed, prompts = 0, ["abc", "Hello world", "x", "The end.", "no yes no yes", "why"]
    form = {"regex": "[a-z]{3}( [a-z]{20})?"}
    for one in sb.generate(characters(), prompts, sb.beam_sampling(4), seed=0, max_new_tokens=7, **form):
        finished = [beam.finished for beam in one.beams]
        assert finished == sorted(finished, reverse=True)
        mixed += len(set(finished)) == 2
        assert not finished[0] or re.fullmatch("[a-z]{3}", one.text)
    assert mixed > 0


def test_an_end_token_that_is_text_ends_a_text_only_where_it_may():
    pair = characters()
    newline = pair.tokenizer.convert_tokens_to_ids("\n")
    for one in sb.generate(pair, ["a", "b", "c"], "sampling", seed=0, regex="[a-z\n]{2}", eos_token_id=[newline]):
        assert one.tokens.index(newline) == 2


def test_the_last_bits_of_a_session_are_few():
    pair = characters()
    request = Request(
        pair, "abc", sb.dsbd(3, 5, 3), Settings.given({"max_new_tokens": 60, "json_schema": PERSON}, None), 1
    )
    from specbeam.decode import decode

    held = [len(request.sessions[0].warp.constraint) for _ in decode(pair.target, request.sessions)]
    assert max(held) <= 3 + 3 * 5


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
