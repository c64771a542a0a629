"""Functions shared by commands: methods from text, loading without progress bars, output as JSON."""

import dataclasses
import gc
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.core.garbage import rarely_collected
from specbeam.doors import plain
from specbeam.doors.method_names import settings_in
from specbeam.doors.model_files import require_text_model
from specbeam.doors.options.table import checked_values
from specbeam.doors.places import require_file
from specbeam.doors.progress import silence_transformers
from specbeam.errors import BadPrompt, BadSetting, MissingFile, NotSupported

if TYPE_CHECKING:
    from specbeam.core.records import Generation
    from specbeam.models.pair import Pair
    from specbeam.recipes.method import Method

INTERRUPTED = 130  # the exit code that shells give a program that SIGINT ended


def quiet_load(model: str, draft: str | None, *, sources: bool = False, hears: bool = False, **options: Any) -> "Pair":
    """Load a pair with `specbeam.load`, without transformers' progress bars and messages.

    A folder written by `specbeam train hmt` stands for its model with this memory, as target and as draft.

    Args:
        sources: whether the command supports encoder-decoder models; otherwise they raise `NotSupported`.
        hears: whether the command supports models that read audio; otherwise they raise `NotSupported`, before loading.
        options: options of `specbeam.load`.
    """
    if not hears:
        require_text_model(model)
    from specbeam.doors.cli.screen import working

    with working(f"loading {model}"), rarely_collected():
        from specbeam.doors.sources import require_prompts
        from specbeam.doors.with_memory import load_by_name

        silence_transformers()
        pair = load_by_name(model, draft, **{"dtype": "auto"} | options)
    if not sources:
        require_prompts(pair, "this command")
    return pair


def method_from(name: str, settings: Sequence[str]) -> "Method":
    """Return a method by name, with settings as NAME=VALUE; see `method_text.method_from`."""
    settings_in(name, settings)  # before torch is imported
    is_first = "specbeam.doors.method_text" not in sys.modules
    with rarely_collected():
        from specbeam.doors.method_text import method_from as made

        if is_first:  # what was imported lives as long as the process, and no collection need look at it
            gc.freeze()
    return made(name, settings)


def check_method(name: str | None, settings: Sequence[str], draft: str | None) -> "Method":
    """Return a method, and print a note if it is not lossless. Raises `BadSetting` if it is unknown, or a setting is wrong.

    Args:
        name: name of the method; None: the default.
        draft: see `check_has_head`.
    """
    method = method_from(name or "dsbd", settings)
    check_has_head(method, draft)
    if not method.lossless:
        complain(f"note: {method.name} is {method.law}")
    return method


def check_has_head(method: "Method", draft: str | None) -> None:
    """Raise `NotSupported` for a method that drafts with a head, and no draft, before models are loaded.

    Args:
        draft: the option --draft; None: none, or the draft model of the bundled pair.
    """
    if method.head and draft is None:
        place = "mtp" if method.name == "mtp" else "FOLDER"
        raise NotSupported(
            f"{method.name} drafts with {method.head}: give it with --draft {place}, or choose a method without one "
            "(`specbeam methods`); `specbeam train` makes heads"
        )


def method_for(pair: "Pair", name: str | None, settings: Sequence[str]) -> "Method":
    """Return a method by name with its settings; without a name, the default method of the pair."""
    from specbeam.doors.usual import usual_method

    return usual_method(pair, settings) if name is None else method_from(name, settings)


def bundled_rows(name: str) -> list[tuple[str, str]]:
    """Return the prompts and reference answers of a file of the bundled pair."""
    from specbeam.models.checkpoints.folders import BUNDLED

    lines = (BUNDLED / name).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line]
    return [(row[0], row[1]) for row in rows]


def demo_sentences() -> list[str]:
    """Return the German sentences of the bundled pair."""
    return [sentence for sentence, _ in bundled_rows("sentences.tsv")]


def follow_rank_0(models: Mapping[str, Any]) -> None:
    """Follow rank 0 and end with it, in a process that torchrun has started for another rank.

    Call it before any input or output: only rank 0 reads and writes.

    Args:
        models: the arguments of `quiet_load`.
    """
    if models.get("tensor_parallel") and os.environ.get("RANK", "0") != "0":
        quiet_load(**models)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `BadSetting` for an option of `specbeam.generate` that is wrong for every model. Imports nothing heavy.

    Args:
        options: options by name.
    """
    for name, value in options.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                require_text(name, text)
    checked_values(options)


def require_text(name: str, text: str) -> None:
    """Raise `BadPrompt` if a text of the command line is not valid in its encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadPrompt(
            f"{name} is {text!r}, which is not valid {sys.getfilesystemencoding()}; give it as UTF-8"
        ) from error


def with_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of generation, with file names of schemas, grammars and catalogues replaced by their content."""
    found = dict(options)
    for name, mark in (("json_schema", "{"), ("grammar", ":")):
        if name in found:
            found[name] = text_or_file(found[name], mark, name)
    if found.get("catalogue") is not None:
        require_items(Path(found["catalogue"]))
        from specbeam.doors.catalogue import catalogue

        found["catalogue"] = catalogue(found["catalogue"])
    return found


def require_items(file: Path) -> None:
    """Raise `MissingFile` unless there is such a file of items. Imports nothing heavy, as `catalogue` does."""
    require_file(file, "give a file of items, such as a .txt with a text per line")


def text_or_file(value: str, mark: str, name: str) -> str:
    """Return the content of the file named `value`, or `value` itself if there is no such file.

    Args:
        value: a file name or a text.
        mark: a string in every such text, to tell a text from the name of a missing file.
        name: name of the option, for errors.

    Raises:
        BadSetting: the file is not UTF-8.
        MissingFile: the file cannot be read, or there is none and the value does not contain `mark`.
    """
    try:
        return Path(value).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadSetting(f"{value} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (OSError, ValueError) as error:  # no such file, or not a file name
        if mark in value or (name == "json_schema" and value in ("true", "false")):
            return value
        if _is_there(value):
            raise MissingFile(f"{value} cannot be read: {error}") from error
        short = value if len(value) <= 60 else value[:60] + "..."
        raise MissingFile(f"there is no file {short}, and a {name} would contain {mark!r}") from error


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def as_json(number: int, prompt: Any, generation: "Generation") -> str:
    """Return an answer as a line of JSON.

    Args:
        number: index of the prompt.
        prompt: the user's prompt; token ids stand for one that is not text, such as a chat.
    """
    record = {"index": number, "prompt": prompt, **generation.to_dict()}
    record["prompt_tokens"] = len(generation.prompt)
    if isinstance(prompt, str):
        record["prompt"] = prompt  # where `to_dict` has put the token ids
    return _line_of(record)


def print_json(record: Any) -> None:
    """Print a record as a line of JSON."""
    print(_line_of(record), flush=True)


def print_records(records: Iterable[Any], **others: Any) -> None:
    """Print dataclasses as lines of JSON.

    Args:
        others: further fields of each line.
    """
    for record in records:
        print_json(dataclasses.asdict(record) | others)


def in_one_line(figures: Mapping[str, Any]) -> str:
    """Return named values as text, such as the provenance of a measurement."""
    return "; ".join(f"{name}: {value}" for name, value in figures.items())


def _line_of(record: Any) -> str:
    """Return a line of JSON for standard output; in ASCII unless its encoding is UTF-8."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    return plain.as_json(record, is_ascii=encoding != "utf8")


def say(text: str) -> None:
    """Print a model's text; on a terminal, escape its control characters."""
    print(plain.for_terminal(text) if sys.stdout.isatty() else text, flush=True)


class ProgressBar:
    """A progress bar on standard error, shown on a terminal for more than one prompt."""

    def __enter__(self) -> "ProgressBar":
        from specbeam.doors.cli.screen import progress_bar

        self.bar = progress_bar()
        self.task = self.bar.add_task("prompts", total=None)
        return self

    def show(self, finished: int, total: int) -> None:
        """Show the number of finished prompts."""
        if total > 1 and not self.bar.live.is_started:
            self.bar.start()
        self.bar.update(self.task, completed=finished, total=total)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def complain(text: str) -> None:
    """Print a message on standard error."""
    print(f"specbeam: {plain.for_terminal(text)}", file=sys.stderr, flush=True)
