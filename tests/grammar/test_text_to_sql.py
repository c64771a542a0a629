"""The worked example: whatever its grammar generates runs on its database."""

import numpy as np
import pytest
from examples.text_to_sql.sql import Schema, empty_database, grammar_of, runs
from transformers import AutoTokenizer

import specbeam as sb
from specbeam.constraint import Constrained, Form
from specbeam.grammar.compiled import BACKENDS, compiled
from specbeam.pair import BUNDLED

SHOP = Schema(
    {
        "customer": ["id", "Name", "home town", "group"],
        "order": ["id", "customer_id", 'the "total"', "18_plus"],
        "Names": ["Name", "Name_2"],
    },
    [("order", "customer_id", "customer", "id"), ("order", "id", "order", "id")],
)
pytestmark = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


@pytest.mark.parametrize(
    ("backend", "walks"), [("llguidance", 15), *(pytest.param(name, 300, marks=pytest.mark.slow) for name in BACKENDS)]
)
def test_random_walks_through_the_grammar_run(backend, walks):
    pytest.importorskip(backend)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    constraint = compiled(Form("grammar", grammar_of(SHOP)), backend, tokenizer, 6144, (2,))
    database, rng, texts = empty_database(SHOP), np.random.default_rng(0), []
    for _ in range(walks):
        bans, path = Constrained(constraint, (2,), 0), []
        while 2 not in path:
            bans.keep(np.array([path], dtype=np.int64))
            allowed = bans.allowed(np.array([path], dtype=np.int64), 6144)[0]
            path.append(int(rng.choice(np.flatnonzero(allowed))))
        texts.append(tokenizer.decode(path, skip_special_tokens=True))
    assert [text for text in texts if not runs(database, text)] == []
    for part in (
        " JOIN ",
        " WHERE ",
        " GROUP BY ",
        " ORDER BY ",
        " UNION ",
        "NOT IN (SELECT ",
        "[order]",
        "[home town]",
    ):
        assert walks < 300 or any(part in text for text in texts), part


def test_the_judge_refuses_what_is_wrong():
    database = empty_database(SHOP)
    assert runs(database, "SELECT Name FROM customer")
    for text in (
        "SELECT Nam FROM customer",
        "SELECT Name FROM shop",
        "Der Hund schläft.",
        "",
        "SELECT 1; SELECT 2",
        "\0",
    ):
        assert not runs(database, text)


def test_a_model_of_german_writes_sql():
    pair, database = sb.load("bundled"), empty_database(SHOP)
    options = {"seed": 0, "max_new_tokens": 256}
    (free,) = sb.generate(pair, "Wie viele Kunden gibt es?", **options)
    (bound,) = sb.generate(pair, "Wie viele Kunden gibt es?", grammar=grammar_of(SHOP), **options)
    assert not runs(database, free.text)
    assert runs(database, bound.text)
