"""Outputs of any decoder, read from files: prompts, the tokens or texts after them, and perhaps references."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam import Pair
from specbeam.errors import BadPrompt, MissingFile
from specbeam.lab.evaluate.lines import lines_of
from specbeam.models import EncoderDecoderLM


@dataclass(frozen=True)
class Outputs:
    """The outputs in a file, as parallel lists.

    Attributes:
        prompts: token ids of the prompts.
        tokens: token ids of the outputs.
        texts: texts of the outputs.
        references: right answers; empty unless every output has one.
        places: file and line of each output, for errors.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]
    references: list[str]
    places: list[str]


def read_outputs(path: Path, pair: Pair, ended: bool = False) -> Outputs:
    """Read a file of JSON objects, one per line, as `specbeam generate --json` writes them.

    A line needs "prompt" (text or token ids) and "tokens" (ids of the output) or "text"; it may have "reference".

    Args:
        pair: its tokenizer reads texts.
        ended: whether outputs that have a text but no tokens are complete; then the end token is added and scored too.

    Raises:
        MissingFile: there is no such file.
        BadPrompt: a line cannot be read (the error names file and line), there are no outputs, or only some have
            references.
    """
    if not path.is_file():
        raise MissingFile(f"there is no file {path}; write one with `specbeam generate --json ... > {path}`")
    outputs = Outputs([], [], [], [], [])
    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            try:
                _append(outputs, json.loads(line), pair, ended)
                outputs.places.append(f"{path}, line {number}")
            except (ValueError, KeyError, TypeError) as error:
                raise BadPrompt(
                    f"{path}, line {number}: {error}; expected a JSON object with 'prompt' and 'tokens' or 'text'"
                ) from error
    if not outputs.tokens:
        raise BadPrompt(
            f"{path} holds no outputs; expected JSON objects with 'prompt' and 'tokens' or 'text', one per line"
        )
    if len(outputs.references) not in (0, len(outputs.tokens)):
        raise BadPrompt(
            f"{path}: {len(outputs.references)} of {len(outputs.tokens)} lines have a 'reference'; all or none must"
        )
    return outputs


def _append(outputs: Outputs, record: Any, pair: Pair, ended: bool) -> None:
    """Append the output in a record to all lists but `places`; raise `ValueError` or `KeyError` if it has none."""
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}")
    tokens, text, reference = (record.get(name) for name in ("tokens", "text", "reference"))
    if tokens is None and text is None:
        raise ValueError("neither 'tokens' nor 'text'")
    for name, value in (("text", text), ("reference", reference)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"'{name}' is {value!r}, not a text")
    outputs.prompts.append(_token_ids(record["prompt"], pair, special=True))
    if tokens is None:
        tokens = [*_ids_of_output(text, pair), *(_end_token(pair) if ended else [])]
    outputs.tokens.append(_checked_ids(tokens))
    if text is None:
        text = pair.tokenizer.decode(tokens, skip_special_tokens=True) if pair.tokenizer is not None else ""
    outputs.texts.append(text)
    if reference is not None:
        outputs.references.append(reference)


def _end_token(pair: Pair) -> list[int]:
    """Return a list with one end token: the tokenizer's if generation stops at it, else the first."""
    if not pair.eos:
        raise ValueError("texts cannot be ended: neither generation config nor tokenizer has an end token")
    preferred = getattr(pair.tokenizer, "eos_token_id", None)
    return [preferred if preferred in pair.eos else pair.eos[0]]


def _ids_of_output(text: Any, pair: Pair) -> list[int]:
    """Return the token ids of the text of an output; models that translate may write with other tokens than they read."""
    if pair.tokenizer is None or not isinstance(pair.target, EncoderDecoderLM):
        return _token_ids(text, pair, special=False)
    return list(pair.tokenizer(text_target=text, add_special_tokens=False)["input_ids"])


def _token_ids(source: Any, pair: Pair, special: bool) -> list[int]:
    """Return the token ids of a text or of a list of token ids; `special`: with the special tokens of a prompt."""
    if not isinstance(source, str):
        return _checked_ids(source)
    if pair.tokenizer is None:
        raise ValueError("found text, but there is no tokenizer; give token ids")
    return list(pair.tokenizer(source, add_special_tokens=special)["input_ids"])


def _checked_ids(source: Any) -> list[int]:
    """Return a list of token ids. Raises `ValueError` for anything else."""
    if not isinstance(source, list) or not all(type(token) is int for token in source):
        raise ValueError(f"{source!r} is not a list of token ids")
    return source
