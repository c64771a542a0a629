"""Outputs of any decoder, read from files: a prompt and what came after it, perhaps with a reference."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import BadPrompt, MissingFile
from specbeam.evaluate.lines import lines_of
from specbeam.pair import Pair


@dataclass(frozen=True)
class Outputs:
    """Parallel lists. `references` is empty unless every output has one."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]
    references: list[str]
    places: list[str]  # file and line


def read_outputs(path: Path, pair: Pair, ended: bool = False) -> Outputs:
    """Read a file of JSON objects, one per line, as `specbeam generate --json` writes them.

    A line needs "prompt" (text or token ids) and "tokens" (ids of the output) or "text"; it may have "reference".

    Args:
        path: the file.
        pair: its tokenizer reads texts.
        ended: texts without tokens are complete, so that the end token that generation stops at is scored behind them.

    Raises:
        MissingFile, BadPrompt: with file and line.
    """
    if not path.is_file():
        raise MissingFile(f"there is no file {path}; write one with `specbeam generate --json ... > {path}`")
    found = Outputs([], [], [], [], [])
    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            try:
                _take(found, json.loads(line), pair, ended)
                found.places.append(f"{path}, line {number}")
            except (ValueError, KeyError, TypeError) as error:
                raise BadPrompt(
                    f"{path}, line {number}: {error}; expected a JSON object with 'prompt' and 'tokens' or 'text'"
                ) from error
    if not found.tokens:
        raise BadPrompt(
            f"{path} holds no outputs; expected JSON objects with 'prompt' and 'tokens' or 'text', one per line"
        )
    if len(found.references) not in (0, len(found.tokens)):
        raise BadPrompt(
            f"{path}: {len(found.references)} of {len(found.tokens)} lines have a 'reference'; all or none must"
        )
    return found


def _take(found: Outputs, record: Any, pair: Pair, ended: bool) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}")
    tokens, text, reference = (record.get(name) for name in ("tokens", "text", "reference"))
    if tokens is None and text is None:
        raise ValueError("neither 'tokens' nor 'text'")
    for name, value in (("text", text), ("reference", reference)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"'{name}' is {value!r} and no text")
    found.prompts.append(_ids(record["prompt"], pair, special=True))
    if tokens is None:
        tokens = [*_ids(text, pair, special=False), *(_end(pair) if ended else [])]
    found.tokens.append(_listed(tokens))
    if text is None:
        text = pair.tokenizer.decode(tokens, skip_special_tokens=True) if pair.tokenizer is not None else ""
    found.texts.append(text)
    if reference is not None:
        found.references.append(reference)


def _end(pair: Pair) -> list[int]:
    if not pair.eos:
        raise ValueError("texts cannot be ended, for neither generation config nor tokenizer names an end token")
    usual = getattr(pair.tokenizer, "eos_token_id", None)
    return [usual if usual in pair.eos else pair.eos[0]]


def _ids(source: Any, pair: Pair, special: bool) -> list[int]:
    if not isinstance(source, str):
        return _listed(source)
    if pair.tokenizer is None:
        raise ValueError("found text, but there is no tokenizer; give token ids")
    return list(pair.tokenizer(source, add_special_tokens=special)["input_ids"])


def _listed(source: Any) -> list[int]:
    if not isinstance(source, list) or not all(type(token) is int for token in source):
        raise ValueError(f"{source!r} is no list of token ids")
    return source
