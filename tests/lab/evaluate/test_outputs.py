"""Outputs read from files."""

import json

import pytest

import specbeam as sb
from specbeam.doors.cli.common import as_json
from specbeam.doors.cli.generate import gather
from specbeam.errors import BadPrompt, MissingFile
from specbeam.lab.evaluate.outputs import read_outputs
from specbeam.lab.evaluate.perplexity import perplexity
from specbeam.lab.evaluate.task import bleu, exact_match
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
        ('{"prompt": "a", "text": [5, 6], "reference": "x"}', r"line 1: 'text' is \[5, 6\], not a text"),
        ('{"prompt": "a", "text": "b", "reference": 7}', "line 1: 'reference' is 7, not a text"),
        ('{"prompt": "a", "tokens": "b"}', "line 1: 'b' is not a list of token ids"),
        ('{"prompt": 5, "text": "b"}', "line 1: 5 is not a list of token ids"),
        ('{"prompt": [5, 1.5], "text": "b"}', "is not a list of token ids"),
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


def test_only_line_breaks_end_a_line(tmp_path):
    """What `generate --json` writes holds the text as it is; U+2028, U+0085 and others break lines for `splitlines`."""
    pair, texts = words.pair(), ["a\u2028b", "c\x85d", "e\x0bf", "g\x1ch"]
    done = [sb.Generation(text, [5, 6], [], sb.Report("exact", 2), [4]) for text in texts]
    lines = [as_json(number, "a\u2029b", one) for number, one in enumerate(done)]
    (tmp_path / "o.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = read_outputs(tmp_path / "o.jsonl", pair)
    assert found.texts == texts
    assert found.places == [f"{tmp_path / 'o.jsonl'}, line {number}" for number in (1, 2, 3, 4)]
    assert gather([], [tmp_path / "o.jsonl"])[0][0].text == "a\u2029b"
    assert len(gather([], [tmp_path / "o.jsonl"])[0]) == 4


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "o.jsonl").write_bytes(b'{"prompt": "a", "text": "b"}\n{"prompt": "\xe4"}\n')
    with pytest.raises(BadPrompt, match=r"o\.jsonl, line 2: byte 0xe4 is not UTF-8"):
        read_outputs(tmp_path / "o.jsonl", words.pair())


def test_texts_are_ended_as_generation_ends(tmp_path):
    """By the model's generation config; of several end tokens by the tokenizer's, if it is one of them."""
    file = written(tmp_path / "o.jsonl", {"prompt": "a", "text": "b"})
    pair = words.pair()
    for own, expected in (([7, 9], 7), (9, 9), ([7, 1], 1)):
        pair.target_model.generation_config.eos_token_id = own
        assert read_outputs(file, pair, ended=True).tokens == [[5, expected]]
    pair.target_model.generation_config.eos_token_id = None
    pair.tokenizer.eos_token = None
    with pytest.raises(BadPrompt, match="line 1: texts cannot be ended"):
        read_outputs(file, pair, ended=True)


def test_what_cannot_be_scored_is_named_by_file_and_line(tmp_path):
    file = written(tmp_path / "o.jsonl", {"prompt": "a", "tokens": [5]}, "", {"prompt": "a", "tokens": []})
    found = read_outputs(file, words.pair())
    with pytest.raises(BadPrompt, match=r"o\.jsonl, line 3: output 1 is empty"):
        perplexity(words.pair(), found.prompts, found.tokens, found.places)


def test_bleu_of_the_reference_is_full():
    assert bleu(["the old man feeds the birds"], ["the old man feeds the birds"]) == pytest.approx(100)
