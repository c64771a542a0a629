"""The rows of a job: a prompt in one of three formats, an id, and settings."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbeam.doors import aliases, as_plain, hint, is_integer, of_record, row_names
from specbeam.errors import BadPrompt, BadSetting

OF_ENCODINGS = ("attention_mask", "token_type_ids", "position_ids")  # other columns of a tokenizer
MOST_TEXTS = 1024  # texts of a row, which are all started at once


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read; others are ignored."""

    id: str = "id"
    prompt: str = "prompt"  # a text, a list of token ids, or messages
    messages: str = "messages"  # a chat: dictionaries with "role" and "content"
    token_ids: str = "prompt_token_ids"
    settings: str = "settings"  # a dictionary


USUAL_COLUMNS = Columns()


@dataclass(frozen=True)
class JobRow:
    """A prompt of a job.

    Attributes:
        number: number of the row in its source, from 1.
        id: a text or an integer; None if the id cannot be read.
        prompt: a text, token ids, messages, or an encoding as a dictionary.
        is_chat: whether the prompt is messages.
        settings: settings of the row, by the names of `row_names` and "seed".
        error: why the row cannot be decoded; "" if it can.
    """

    number: int
    id: str | int | None
    prompt: Any = None
    is_chat: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        """The text that identifies the row and seeds its random numbers: its id, or else its number."""
        return f"row {self.number}" if self.id is None else str(self.id)

    @property
    def digest(self) -> str:
        """A hash of everything that the answer depends on. Raises `TypeError` or `ValueError` if it is not JSON."""
        read = [self.id, self.prompt, self.is_chat, dict(self.settings), self.error]
        content = json.dumps(read, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(content.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def row_of(number: int, fields: Mapping[str, Any], columns: Columns) -> JobRow:
    """Return the row with these fields; if they cannot be read, it has an error.

    Lists and dictionaries may be given as JSON text, because some tables hold only texts; the column `prompt` is never
    parsed. Without a column of ids the number is the id.
    """
    identity: str | int | None = None
    try:
        identity = _id_in(fields, columns, number)
        prompt, is_chat = _prompt_in(fields, columns)
        settings = _settings_in(fields, columns)
        json.dumps([prompt, settings], ensure_ascii=False).encode(
            "utf-8"
        )  # raises for anything that is not JSON or not Unicode
        row = JobRow(number, identity, prompt, is_chat, settings)
        assert row.digest
    except (BadPrompt, BadSetting) as error:
        return JobRow(number, identity, error=f"{type(error).__name__}: {error}")
    except UnicodeEncodeError:
        return JobRow(number, identity, error="BadPrompt: the row has half a surrogate pair; write valid Unicode")
    except (TypeError, ValueError, RecursionError) as error:
        return JobRow(number, identity, error=f"BadPrompt: a field of the row is not JSON: {error}")
    return row


def check_columns(names: Sequence[str], columns: Columns, table: str) -> None:
    """Raise `BadPrompt` if the columns of a table have no prompt.

    Args:
        names: all columns of the table.
        table: what errors call it.
    """
    wanted = (columns.prompt, columns.messages, columns.token_ids)
    if any(name in names for name in (*wanted, "input_ids")):
        return
    try:
        of_record(dict.fromkeys(names, "a text"))
    except KeyError as error:
        found = ", ".join(map(repr, names))
        raise BadPrompt(
            f"{table} has no column {', '.join(wanted[:2])} or {wanted[2]}, only {found}; rename one, or give "
            "--prompt-column, and put commas between the columns of a CSV"
        ) from error


def _id_in(fields: Mapping[str, Any], columns: Columns, number: int) -> str | int:
    if columns.id not in fields:
        return number
    found = fields[columns.id]
    if isinstance(found, str) and found:
        found.encode("utf-8")
        return found
    if is_integer(found) and not -(2**63) <= found < 2**63:
        raise BadPrompt(f"the {columns.id} of the row is {found}, which exceeds 64 bits; write it as a text")
    if is_integer(found):
        return int(found)
    raise BadPrompt(f"the {columns.id} of the row is {found!r}; it must be a text or an integer")


def _prompt_in(fields: Mapping[str, Any], columns: Columns) -> tuple[Any, bool]:
    """Return the prompt of a row, and whether it is messages."""
    names = (columns.prompt, columns.messages, columns.token_ids)
    fields = {name: as_plain(value) for name, value in fields.items()}
    given = [name for name in names if fields.get(name) is not None and _is_filled(fields[name])]
    if len(given) > 1:
        raise BadPrompt(f"the row has {' and '.join(given)}; fill only one of them")
    if not given and fields.get("input_ids") is not None:
        read = ["input_ids", *(name for name in OF_ENCODINGS if fields.get(name) is not None)]
        return {name: _from_json(fields[name], name) for name in read}, False
    prompt = fields.get(columns.prompt)
    holds_texts = isinstance(prompt, list) and any(isinstance(one, str) for one in prompt)
    if not given or (given == [columns.prompt] and holds_texts):
        try:
            return of_record({**fields, "prompt": prompt}).prompt, False  # the fields of published sets
        except ValueError as error:
            raise BadPrompt(str(error)) from error
        except (KeyError, TypeError, IndexError) as error:
            raise BadPrompt(f"the row has no {', '.join(names[:2])} or {names[2]}") from error
    (name,) = given
    if name == columns.prompt:
        if not isinstance(fields[name], (str, list)):
            raise BadPrompt(f"the {name} of the row is {fields[name]!r}; it must be a text or a list of token ids")
        return fields[name], False
    found = _from_json(fields[name], name)
    if name == columns.token_ids:
        if not isinstance(found, list):
            raise BadPrompt(f"the {name} of the row are {str(found)[:80]!r}; they must be a list of token ids")
        return found, False
    if not isinstance(found, list) or not all(isinstance(one, dict) and "role" in one for one in found):
        raise BadPrompt(
            f"the {name} of the row are {str(found)[:80]!r}; they must be a list of dictionaries with a role"
        )
    return found, True


def _is_filled(value: Any) -> bool:
    """Return whether a field is filled; tables have empty texts for empty fields."""
    return not (isinstance(value, (str, list)) and len(value) == 0)


def _settings_in(fields: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    found = fields.get(columns.settings)
    if found is None or found == "":
        return {}
    found = _from_json(found, columns.settings)
    if not isinstance(found, dict):
        raise BadSetting(f"the {columns.settings} of the row are {str(found)[:80]!r}; they must be a dictionary")
    given = {name: value for name, value in found.items() if value is not None}
    known = (*row_names(), "seed")
    unknown = sorted(set(given) - set(known))
    if unknown:
        near = hint(unknown[0], known, aliases())
        raise BadSetting(f"a row has no setting {', '.join(map(repr, unknown))}{near}; it has {', '.join(known)}")
    seed = given.get("seed", 0)
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise BadSetting(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1")
    count = given.get("num_return_sequences", 1)
    if is_integer(count) and count > MOST_TEXTS:
        raise BadSetting(f"num_return_sequences is {count}; a row may have at most {MOST_TEXTS:,} texts")
    return given


def _from_json(value: Any, name: str) -> Any:
    """Return a value; the parsed value if it is a JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadPrompt(f"the {name} of the row are not JSON: {error}") from error


def row_seed(seed: int, row: JobRow) -> int:
    """Return the seed of a row, 63 bits: from its settings, or else derived from the job's seed and the row's id."""
    own = row.settings.get("seed")
    if own is not None:
        return int(own)
    digest = hashlib.blake2b(f"{seed}\0{row.name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
