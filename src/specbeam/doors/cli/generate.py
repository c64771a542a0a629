"""The command `specbeam generate`: answers to prompts, written as soon as possible."""

import json as json_format
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.common import ProgressBar, as_json, complain, follow_rank_0, method_for, require_text, say
from specbeam.doors.cli.options import DecodingArguments, Json, PromptArguments
from specbeam.doors.places import OPENERS
from specbeam.doors.prompts import of_record, read
from specbeam.errors import BadPrompt, SpecbeamError, TooFewAnswers

if TYPE_CHECKING:
    from specbeam.core.audit import Audit
    from specbeam.core.records import Generation
    from specbeam.models.pair import Pair


class GenerateArguments(PromptArguments, DecodingArguments):
    """Arguments of the command."""

    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed gives the same answers. By default random.")
    ] = None
    audit: Annotated[
        bool, typer.Option("--audit", help="Test while decoding that the output has the method's declared law.")
    ] = False
    profile: Annotated[
        bool, typer.Option("--profile", help="Print the time spent in each part of a turn to standard error.")
    ] = False
    json: Json = False


@dataclass(frozen=True)
class PromptSource:
    """A prompt and its origin."""

    text: Any  # or another form for `specbeam.generate`: token ids, a chat, an encoding
    place: str  # for messages: "argument 1", or a file and a line


@dataclass
class Writer:
    """A writer of answers to standard output: JSON at once, plain text in the order of the prompts.

    Attributes:
        prompts: all prompts, by number.
        json: whether to write answers as lines of JSON.
        expected: number of answers per prompt.
        done: the answers so far, by number of the prompt.
        failed: numbers of the failed prompts.
        written: number of prompts, counted from the first, whose answers are written or that failed.
        audit: sum of the audits of all answers; None without audits.
    """

    prompts: list[PromptSource]
    json: bool
    expected: int
    done: "dict[int, list[Generation]]" = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    written: int = 0
    audit: "Audit | None" = None

    def take(self, number: int, result: "Generation | SpecbeamError") -> None:
        """Record an answer or error of a prompt, and write all answers that are ready."""
        if isinstance(result, SpecbeamError):
            for generation in result.generations if isinstance(result, TooFewAnswers) else []:
                self.take(number, generation)
            self.failed.add(number)
            complain(f"{self.prompts[number].place}: {result}")
        else:
            self.done.setdefault(number, []).append(result)
            found = result.report.audit
            if found is not None:
                self.audit = found if self.audit is None else self.audit + found
            if self.json:
                print(as_json(number, self.prompts[number].text, result), flush=True)
        self._write_ready()

    def _write_ready(self) -> None:
        while self.written < len(self.prompts) and self._is_complete(self.written):
            self._write(self.written)
            self.written += 1

    def _is_complete(self, number: int) -> bool:
        return number in self.failed or len(self.done.get(number, [])) == self.expected

    def _write(self, number: int) -> None:
        if not self.json:
            for generation in self.done.get(number, []):
                say(generation.text)

    def close(self) -> None:
        """Write finished answers that wait for earlier prompts, so that an interrupt loses none."""
        for number in sorted(self.done):
            if number >= self.written:
                self._write(number)


def generate(given: GenerateArguments) -> int:
    """Generate text for prompts from arguments, files or standard input."""
    follow_rank_0(given.loading)
    sources, unreadable = gather(given.texts, given.file, _prompt_of)  # before what imports torch
    if not sources and not unreadable:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    options = given.checked_options()
    pair = given.load(options)
    writer = Writer(sources, given.json, options.get("num_return_sequences", 1))
    if sources:
        try:
            _answer(pair, writer, given, options)
        except KeyboardInterrupt:
            complain("interrupted; finished answers are written")
            return 130
        except SpecbeamError:  # the writer has reported the failures of a SomeFailed
            if not writer.failed:
                raise
        finally:
            writer.close()
    is_suspicious = writer.audit is not None and writer.audit.suspicious
    if given.audit:
        _print_audit(writer.audit)
    return 1 if unreadable or writer.failed or is_suspicious else 0


def _answer(pair: "Pair", writer: Writer, given: GenerateArguments, options: dict[str, Any]) -> None:
    """Answer the prompts of a writer."""
    from specbeam.doors.cli.profile import profile_if
    from specbeam.generation import generate as answered

    method = method_for(pair, given.method, given.setting)
    texts = [source.text for source in writer.prompts]
    with ProgressBar() as bar:
        finished = 0
        bar.show(finished, len(texts))

        def take(number: int, result: "Generation | SpecbeamError") -> None:
            nonlocal finished
            writer.take(number, result)
            finished += 1
            bar.show(finished, len(texts))

        if given.profile:  # warm up before time is measured: load kernels, allocate caches
            short: Any = options | {"max_new_tokens": 8}
            answered(pair, texts[0], method, seed=given.seed, **short)
        with profile_if(given.profile) as answers:
            all_options: Any = options
            answers += answered(
                pair,
                texts,
                method,
                seed=given.seed,
                batch_size=given.batch_size,
                audit=given.audit,
                on_result=take,
                **all_options,
            )


def _print_audit(audit: "Audit | None") -> None:
    """Print the outcome of an audit on standard error."""
    from specbeam.core.audit import ALARM

    if audit is None or audit.empty:
        complain("audit: nothing to test, because nothing was drawn at random")
        return
    word = "FAILED" if audit.suspicious else "passed"
    complain(
        f"audit {word}: evidence {audit.evidence:.3g} against the law (fewer than one in {ALARM:,.0f} correct runs "
        f"reach {ALARM:,.0f}); z_accept {audit.z_accept:.2f} over {audit.trials} trials, "
        f"z_logp {audit.z_logp:.2f} over {audit.draws} draws, {audit.impossible} impossible tokens"
    )


def gather(
    prompts: list[str], files: list[Path], of_json: Callable[[str], Any] | None = None
) -> tuple[list[PromptSource], int]:
    """Return the prompts of arguments and files, and the number of unreadable lines.

    Without arguments and files, prompts are read from standard input unless it is a terminal. Blank lines are skipped
    (arguments and JSON may have blank prompts), and unreadable lines are reported on standard error.

    Args:
        of_json: returns the prompt of a line of JSON, or raises `ValueError`; None: prompts must be texts.
    """
    for number, text in enumerate(prompts, 1):
        require_text(f"argument {number}", text)
    of_json = of_json or _text_of
    sources = [PromptSource(text, f"argument {number}") for number, text in enumerate(prompts, 1)]
    unreadable = 0
    if not prompts and not files and not sys.stdin.isatty():
        sources += [
            PromptSource(line, f"standard input, line {number}") for number, line in _numbered_lines(_standard_input())
        ]
    for file in files:
        if not file.is_file() or file.suffix in (".tsv", *OPENERS):
            rows = read(str(file))
            sources += [PromptSource(row.prompt, f"{file}, prompt {number}") for number, row in enumerate(rows, 1)]
            continue
        from specbeam.lab.evaluate.lines import lines_of

        for number, line in _numbered_lines(lines_of(file)):
            place = f"{file}, line {number}"
            try:
                sources.append(PromptSource(of_json(line) if file.suffix == ".jsonl" else line, place))
            except ValueError as error:
                unreadable += 1
                complain(f"{place}: {error}")
    return sources, unreadable


def _standard_input() -> list[str]:
    """Return the lines of standard input. Raises `BadPrompt` for bytes that are invalid in its encoding."""
    try:
        text = sys.stdin.read()
        text.encode("utf-8")  # Python may let invalid bytes through, as surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadPrompt(
            f"standard input is not valid {sys.stdin.encoding}: {error.reason}; give it as UTF-8"
        ) from error
    return text.split("\n")


def _numbered_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Return the lines that are not blank, numbered from 1."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


_NO_PROMPT = 'expected a JSON string or an object with a text field "prompt"'
_NO_TEXTS = ("input_ids", "prompt_token_ids", "messages")  # fields with prompts other than texts


def _prompt_of(line: str) -> Any:
    """Return the prompt of a line of JSON: a text, or the object itself if it has token ids or a chat.

    Raises `ValueError` if there is none.
    """
    record = _loaded(line)
    if isinstance(record, dict) and any(record.get(name) is not None for name in _NO_TEXTS):
        return record
    return _text_of(line)


def _text_of(line: str) -> str:
    """Return the text of the prompt in a line of JSON. Raises `ValueError` if there is none."""
    try:
        text = of_record(_loaded(line)).prompt
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(_NO_PROMPT) from error
    if not isinstance(text, str):
        raise ValueError(_NO_PROMPT)
    return text


def _loaded(line: str) -> Any:
    try:
        return json_format.loads(line)
    except json_format.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
