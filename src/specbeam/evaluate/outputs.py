"""Outputs of any decoder, read from files: a prompt and what came after it, perhaps with a reference."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import BadPrompt, MissingFile
from specbeam.pair import Pair


@dataclass(frozen=True)
class Outputs:
    """Parallel lists. `references` is empty unless every output has one."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]
    references: list[str]


def read_outputs(path: Path, pair: Pair, ended: bool = False) -> Outputs:
    """Read a file of JSON objects, one per line, as `specbeam generate --json` writes them.

    A line needs "prompt" (text or token ids) and "tokens" (ids of the output) or "text"; it may have "reference".

    Args:
        path: the file.
        pair: its tokenizer reads texts.
        ended: texts without tokens are complete, so that an end token is scored behind them.

    Raises:
        MissingFile, BadPrompt: with file and line.
    """
    if not path.is_file():
        raise MissingFile(f"there is no file {path}; write one with `specbeam generate --json ... > {path}`")
    found = Outputs([], [], [], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                _take(found, json.loads(line), pair, ended)
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
    tokens, text = record.get("tokens"), record.get("text")
    if tokens is None and text is None:
        raise ValueError("neither 'tokens' nor 'text'")
    found.prompts.append(_ids(record["prompt"], pair, special=True))
    if tokens is None:
        tokens = _ids(text, pair, special=False)
        if ended and pair.tokenizer is not None:
            tokens = [*tokens, int(pair.tokenizer.eos_token_id)]
    found.tokens.append([int(token) for token in tokens])
    if text is None:
        text = pair.tokenizer.decode(tokens, skip_special_tokens=True) if pair.tokenizer is not None else ""
    found.texts.append(text)
    if "reference" in record:
        found.references.append(str(record["reference"]))


def _ids(source: Any, pair: Pair, special: bool) -> list[int]:
    if not isinstance(source, str):
        return [int(token) for token in source]
    if pair.tokenizer is None:
        raise ValueError("found text, but there is no tokenizer; give token ids")
    return list(pair.tokenizer(source, add_special_tokens=special)["input_ids"])
