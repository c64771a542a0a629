"""Loading pairs: side by side in threads, and options that are refused before anything is read."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import specbeam as sb
from specbeam.pair import BUNDLED
from tests.support.checking import refused


def test_pairs_load_side_by_side_in_threads():
    with ThreadPoolExecutor(4) as pool:
        pairs = list(pool.map(lambda _: sb.load("bundled"), range(4)))
    texts = {sb.generate(pair, "Tom ist hier.", "greedy", max_new_tokens=4)[0].text for pair in pairs}
    assert len(texts) == 1
    assert not any(weight.is_meta for pair in pairs for weight in pair.target_model.parameters())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantize", "int3"),
        ("quantize_draft", "int3"),
        ("share_from", 0),
        ("share_from", True),
        ("share_from", "never"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(option, value):
    with refused(f"{option} is {value!r}"):
        sb.load("no/such/folder", **{option: value})


def test_one_model_object_has_one_language_model_for_all_threads():
    tokenizer = sb.load("bundled").tokenizer
    model = sb.load(BUNDLED / "draft", tokenizer=tokenizer).target_model
    del model._specbeam
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: sb.load(model, tokenizer=tokenizer).target, range(4)))
    assert len(set(map(id, found))) == 1
