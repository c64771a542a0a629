"""Outputs read from files."""

import json

import pytest

import specbeam as sb
from specbeam.errors import BadPrompt, MissingFile
from specbeam.evaluate.outputs import read_outputs
from specbeam.evaluate.task import bleu, exact_match
from tests.support import words


def written(path, *records):
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
    return path


def test_tokens_go_before_text_and_text_is_read_with_the_tokenizer(tmp_path):
    pair = words.pair()
    found = read_outputs(
        written(
            tmp_path / "o.jsonl",
            {"prompt": "abc", "tokens": [5, 6, 1], "text": "bc", "reference": "bc"},
            "",
            {"prompt": [4, 5], "text": "cd", "reference": "x"},
        ),
        pair,
        ended=True,
    )
    ids = pair.tokenizer("abc")["input_ids"]
    assert found.prompts == [ids, [4, 5]]
    assert found.tokens == [[5, 6, 1], [6, 7, pair.tokenizer.eos_token_id]]
    assert found.texts == ["bc", "cd"]
    assert found.references == ["bc", "x"]
    assert exact_match(found.texts, found.references) == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[1]", "found list"),
        ('{"prompt": "a"}', "neither 'tokens' nor 'text'"),
        ('{"text": "a"}', "line 1: 'prompt'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, message):
    with pytest.raises(BadPrompt, match=message):
        read_outputs(written(tmp_path / "o.jsonl", line), words.pair())


def test_missing_and_mixed_files_are_refused(tmp_path):
    with pytest.raises(MissingFile, match="specbeam generate --json"):
        read_outputs(tmp_path / "none.jsonl", words.pair())
    with pytest.raises(BadPrompt, match="no outputs"):
        read_outputs(written(tmp_path / "e.jsonl", ""), words.pair())
    mixed = written(tmp_path / "m.jsonl", {"prompt": "a", "text": "b", "reference": "b"}, {"prompt": "a", "text": "b"})
    with pytest.raises(BadPrompt, match="1 of 2 lines have a 'reference'"):
        read_outputs(mixed, words.pair())
    alone = sb.load(words.pair().target_model)
    with pytest.raises(BadPrompt, match="there is no tokenizer"):
        read_outputs(written(tmp_path / "t.jsonl", {"prompt": "a", "text": "b"}), alone)


def test_bleu_of_the_reference_is_full():
    assert bleu(["the old man feeds the birds"], ["the old man feeds the birds"]) == pytest.approx(100)
