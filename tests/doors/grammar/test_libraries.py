"""What the grammar libraries tell: the tokens of a language, whatever way a walker came."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from specbeam.core.constraint import Constrained, Form
from specbeam.doors.grammar.compiled import KEPT, compiled
from specbeam.models.pair import BUNDLED
from tests.doors.grammar.forms import CODE, PERSON, SUM, needs_pair
from tests.support import words

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


@pytest.mark.parametrize(
    "form",
    [Form("grammar", SUM), Form("regex", CODE), Form("json_schema", json.dumps(PERSON))],
    ids=lambda form: form.kind,
)
def test_walkers_that_move_about_tell_what_fresh_ones_tell(form, backend):
    tokenizer, rng = words.tokenizer(words.JSON), np.random.default_rng(1)
    constraint = compiled(form, backend, tokenizer, len(tokenizer), (1,))
    bans, live = Constrained(constraint, (1,), 0), [[]]
    for _ in range(6):
        paths = list(live)
        for _ in range(20):
            path = paths[rng.integers(len(paths))]
            row = np.array([path], dtype=np.int64)
            fresh = Constrained(constraint, (1,), 0).allowed(row, len(tokenizer))
            assert (bans.allowed(row, len(tokenizer)) == fresh).all()
            paths += [[*path, int(token)] for token in np.flatnonzero(fresh[0])[-3:] if token != 1]
        longest = max(map(len, paths))
        live = [path for path in paths if len(path) == longest][:3]
        bans.keep(np.array(live, dtype=np.int64))


def test_a_walker_that_goes_back_forgets_what_it_saw(backend):
    """llguidance 1.9.1 gives the mask behind the first text for the second, which is as long."""
    tokenizer = words.tokenizer(words.JSON)
    constraint = compiled(Form("grammar", SUM), backend, tokenizer, len(tokenizer), (1,))
    moving, fresh = constraint.start(), constraint.start()
    first, second = (tokenizer.convert_tokens_to_ids(list(text)) for text in ("(806*8", "7 - (8"))
    for token in first:
        moving.take(token)
    constraint.allowed([moving])
    moving.back(len(first))
    for token in second:
        moving.take(token)
        fresh.take(token)
    assert (constraint.allowed([moving]) == constraint.allowed([fresh])).all()


def test_a_walker_comes_back_from_a_dead_end(backend):
    tokenizer = words.tokenizer()
    constraint = compiled(Form("regex", "ab|yaö"), backend, tokenizer, 64, (1,))
    walker, (a, b, y) = constraint.start(), tokenizer.convert_tokens_to_ids(["a", "b", "y"])
    for token in (y, a):
        walker.take(token)
        found = constraint.allowed([walker])
    assert not found.any()
    walker.back(2)
    walker.take(a)
    assert np.flatnonzero(np.unpackbits(constraint.allowed([walker])[0], bitorder="little")).tolist() == [b]


def test_masks_of_many_walkers_are_those_of_each(backend):
    tokenizer = words.tokenizer(words.JSON)
    constraint = compiled(Form("json_schema", json.dumps(PERSON)), backend, tokenizer, len(tokenizer), (1,))
    walkers = [constraint.start() for _ in range(40)]
    for place, walker in enumerate(walkers):
        for token in tokenizer.convert_tokens_to_ids(list('{"name":"abcde')[: 1 + place % 13]):
            walker.take(token)
    alone = np.concatenate([constraint.allowed([walker.copy()]) for walker in walkers])
    assert (constraint.allowed(walkers) == alone).all()


def test_forms_are_compiled_once_per_tokenizer(backend):
    tokenizer = words.tokenizer()
    made = [compiled(Form("regex", "a" * number), backend, tokenizer, 64, (1,)) for number in range(1, KEPT + 2)]
    again = [compiled(Form("regex", "a" * number), backend, tokenizer, 64, (1,)) for number in range(KEPT + 1, 0, -1)]
    assert again[:-1] == made[:0:-1]
    assert again[-1] is not made[0]  # the one used longest ago was dropped
    assert compiled(Form("regex", "aa"), backend, words.tokenizer(), 64, (1,)) is not made[1]
