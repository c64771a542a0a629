"""The worked example: what its grammar generates to the end runs on its database."""

from pathlib import Path

import numpy as np
import pytest
from examples.text_to_sql.sql import Schema, empty_database, grammar_of, runs
from transformers import AutoTokenizer

import specbeam as sb
from specbeam.core.constraint import Constrained, Form
from specbeam.doors.grammar.compiled import BACKENDS, compiled
from specbeam.models.pair import BUNDLED
from tests.doors.grammar.forms import RECIPES

SHOP = Schema(
    {
        "customer": ["id", "Name", "home town", "group"],
        "order": ["id", "customer_id", 'the "total"', "18_plus"],
        "Names": ["Name", "Name_2"],
    },
    [("order", "customer_id", "customer", "id"), ("order", "id", "order", "id")],
)
STRANGE = Schema(
    {"a]b": ["c]d", 'quo"te', "back\\slash"], "new\nline": ["tab\there", "semi;colon", "'"], "über": ["T1", "ß"]},
    [("a]b", "c]d", "new\nline", "tab\there")],
)
pytestmark = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


def walked(schema, backend, walks):
    """Texts of random walks through the grammar, whatever a model thinks of them."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    constraint = compiled(Form("grammar", grammar_of(schema)), backend, tokenizer, 6144, (2,))
    rng, texts = np.random.default_rng(0), []
    for _ in range(walks):
        bans, path = Constrained(constraint, (2,), 0), []
        while 2 not in path:
            bans.keep(np.array([path], dtype=np.int64))
            allowed = bans.allowed(np.array([path], dtype=np.int64), 6144)[0]
            path.append(int(rng.choice(np.flatnonzero(allowed))))
        texts.append(tokenizer.decode(path, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    ("backend", "walks"), [("llguidance", 15), *(pytest.param(name, 300, marks=pytest.mark.slow) for name in BACKENDS)]
)
@pytest.mark.parametrize("schema", [SHOP, STRANGE], ids=["shop", "strange"])
def test_random_walks_through_the_grammar_run(schema, backend, walks):
    pytest.importorskip(backend)
    texts, database = walked(schema, backend, walks), empty_database(schema)
    assert [text for text in texts if not runs(database, text)] == []
    if schema is SHOP and walks == 300:
        for part in (
            " JOIN ",
            " WHERE ",
            " GROUP BY ",
            " ORDER BY ",
            " UNION ",
            "NOT IN (SELECT ",
            '"order"',
            '"home town"',
        ):
            assert any(part in text for text in texts), part


@pytest.mark.parametrize(
    ("columns", "links"),
    [
        ({}, []),
        ({"empty": []}, []),
        ({"a": ["b"]}, [("a", "b", "gone", "c")]),
        ({"a": ["b"]}, [("a", "c", "a", "b")]),
    ],
)
def test_a_schema_of_which_nothing_can_be_asked_is_refused(columns, links):
    with pytest.raises(ValueError, match=r"cannot be asked anything|not in the schema"):
        Schema(columns, links)


def test_links_to_tables_that_are_left_out_are_left_out_too(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "text_to_sql")
    from spider import schema_of

    entry = {
        "table_names_original": ["a", "sqlite_sequence", "empty"],
        "column_names_original": [[-1, "*"], [0, "b"], [1, "c"]],
        "foreign_keys": [[1, 2], [1, 1]],
    }
    schema = schema_of(entry)
    assert (schema.columns, schema.links) == ({"a": ["b"]}, [("a", "b", "a", "b")])


def test_the_judge_refuses_what_is_wrong():
    database = empty_database(SHOP)
    assert runs(database, "SELECT Name FROM customer")
    for text in (
        "SELECT Nam FROM customer",
        "SELECT Name FROM shop",
        "Der Hund schläft.",
        "",
        "SELECT 1; SELECT 2",
        "BEGIN",
        "ATTACH 'other' AS other",
        "QUERY PLAN SELECT Name FROM customer",
        "DELETE FROM customer",
        "\0",
    ):
        assert not runs(database, text)


def test_a_model_of_german_writes_sql():
    pair, database = sb.load("bundled"), empty_database(SHOP)
    options = {"seed": 0, "max_new_tokens": 600}
    (free,) = sb.generate(pair, "Wie viele Kunden gibt es?", **options)
    (bound,) = sb.generate(pair, "Wie viele Kunden gibt es?", grammar=grammar_of(SHOP), **options)
    assert not runs(database, free.text)
    assert runs(database, bound.text)


@pytest.mark.slow
@pytest.mark.parametrize("schema", [SHOP, STRANGE], ids=["shop", "strange"])
def test_two_hundred_answers_run(schema):
    """Twenty questions to each of ten methods; SQLite is the judge."""
    pair, database = sb.load("bundled"), empty_database(schema)
    questions = [f"Wie viele {what} gibt es{when}?" for what in WHAT for when in ("", " heute", " noch", " hier")]
    found = [
        one
        for recipe in RECIPES
        for one in sb.generate(
            pair, questions, RECIPES[recipe](), seed=1, max_new_tokens=600, grammar=grammar_of(schema)
        )
    ]
    assert len(found) == 200
    assert all(one.beams[0].finished for one in found)
    assert [one.text for one in found if not runs(database, one.text)] == []
    assert len({one.text for one in found}) > 20


WHAT = ("Kunden", "Hunde", "Namen", "Tage", "Bücher")
