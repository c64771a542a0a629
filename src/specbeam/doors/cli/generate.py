"""The command `specbeam generate`: answers to prompts, written as soon as possible."""

import json as json_format
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.common import (
    INTERRUPTED,
    ProgressBar,
    as_json,
    complain,
    follow_rank_0,
    method_for,
    require_text,
    say,
)
from specbeam.doors.cli.options import DecodingArguments, Json, PromptArguments
from specbeam.doors.model_files import require_tokenizer
from specbeam.doors.places import suffix_of
from specbeam.doors.prompts import of_record, placed_rows, require_lines
from specbeam.errors import BadPrompt, SpecbeamError, TooFewAnswers, counted

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
    index: int  # number among all arguments and lines, from 0; blank and unreadable lines count, too


@dataclass
class Writer:
    """A writer of answers to standard output: JSON at once, plain text in the order of the prompts.

    Plain text has an empty line per missing answer, so that its lines stay beside the prompts: of blank and unreadable
    lines, and of prompts that failed. An answer with line breaks is written as it is; a message says so if there are
    several answers.

    Attributes:
        prompts: all prompts, by number.
        json: whether to write answers as lines of JSON.
        expected: number of answers per prompt.
        places: number of arguments and lines, blank ones included.
        done: the answers so far, by number of the prompt.
        failed: numbers of the failed prompts.
        written: number of prompts, counted from the first, whose answers are written or that failed.
        lines: number of arguments and lines, counted from the first, that have their place in the output.
        audits: the audits of all texts; several answers of beams have the same one.
        has_line_breaks: whether an answer that was written as plain text had line breaks.
    """

    prompts: list[PromptSource]
    json: bool
    expected: int
    places: int
    done: "dict[int, list[Generation]]" = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    written: int = 0
    lines: int = 0
    audits: "dict[int, Audit]" = field(default_factory=dict)
    has_line_breaks: bool = False

    def take(self, number: int, result: "Generation | SpecbeamError") -> None:
        """Record an answer or error of a prompt, and write all answers that are ready."""
        if isinstance(result, SpecbeamError):
            for generation in result.generations if isinstance(result, TooFewAnswers) else []:
                self.take(number, generation)
            self.failed.add(number)
            complain(about(self.prompts[number].place, number, str(result)))
        else:
            self.done.setdefault(number, []).append(result)
            found = result.report.audit
            if found is not None:
                self.audits[id(found)] = found
            if self.json:
                source = self.prompts[number]
                print(as_json(source.index, source.text, result), flush=True)
        self._write_ready()

    def _write_ready(self) -> None:
        while self.written < len(self.prompts) and self._is_complete(self.written):
            self._write(self.written)
            self.written += 1

    def _is_complete(self, number: int) -> bool:
        return number in self.failed or len(self.done.get(number, [])) == self.expected

    def _write(self, number: int) -> None:
        """Write the answers of a prompt as plain text, below an empty line for each line without answers before it."""
        source = self.prompts[number]
        self._leave_blank(source.index)
        answers = self.done.get(number, [])
        if not self.json:
            for generation in answers:
                say(generation.text)
                self._note_line_breaks(generation.text)
            for _ in range(self.expected - len(answers)):
                say("")
        self.lines = source.index + 1

    def _note_line_breaks(self, text: str) -> None:
        """Say once that an answer of several has line breaks."""
        if "\n" in text and not self.has_line_breaks and self.places * self.expected > 1:
            self.has_line_breaks = True
            complain("note: answers have line breaks, so that lines are not answers; --json writes an answer per line")

    def _leave_blank(self, index: int) -> None:
        """Write empty lines up to the place with this index."""
        if not self.json:
            for _ in range(self.expected * (index - self.lines)):
                say("")
        self.lines = index

    def close(self, is_whole: bool) -> None:
        """Write finished answers that wait for earlier prompts, so that an interrupt loses none.

        Args:
            is_whole: whether all prompts were tried; otherwise nothing stands for those that were not.
        """
        for number in sorted(self.done):
            if number >= self.written:
                self._write(number)
        if is_whole:
            self._leave_blank(self.places)


def generate(given: GenerateArguments) -> int:
    """Generate text for prompts from arguments, files or standard input, in the order of the prompts.

    Each blank line of the input, and each prompt that fails, gives an empty line. With --json, answers are written as they
    finish, and "index" counts all arguments and lines, blank ones too.
    """
    follow_rank_0(given.loading)
    sources, unreadable, places = placed_prompts(given.texts, given.file, _prompt_of)  # before what imports torch
    if not sources and not unreadable:
        place = f" in {', '.join(map(str, given.file))}" if given.file else ""
        raise BadPrompt(f"there is no prompt{place}; give one as an argument, with --file, or on standard input")
    if any(isinstance(source.text, str) for source in sources):
        require_tokenizer(given.model)
    options = given.checked_options()
    pair = given.load(options)
    writer = Writer(sources, given.json, options.get("num_return_sequences", 1), places)
    is_whole = False
    if sources:
        try:
            _answer(pair, writer, given, options)
            is_whole = True
        except KeyboardInterrupt:
            complain(
                f"interrupted; finished answers are written ({len(writer.done)} of {counted(len(sources), 'prompt')})"
            )
            return INTERRUPTED
        except SpecbeamError:  # the writer has reported the failures of a SomeFailed
            if not writer.failed:
                raise
            is_whole = True
        finally:
            writer.close(is_whole)
    is_suspicious = given.audit and _print_audit([*writer.audits.values()])
    if any(name in options for name in ("json_schema", "regex", "grammar")):
        _report_cut_off(writer)
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


def _report_cut_off(writer: Writer) -> None:
    """Print a message if texts reached their limit before they satisfied their constraint."""
    cut = sum(not answer.beam.finished for answers in writer.done.values() for answer in answers)
    if cut:
        complain(f"note: {counted(cut, 'answer')} reached the length limit before the end of the constraint")


def _print_audit(audits: "list[Audit]") -> bool:
    """Print the outcome of an audit on standard error. Returns whether it failed."""
    from specbeam.core.audit import ALARM, Audit
    from specbeam.core.audits import evidence_of

    audit = sum(audits, Audit())
    evidence = evidence_of(audits)
    has_failed = not evidence < ALARM
    if audit.empty:
        complain("audit: there was nothing to test")
        return has_failed
    word = "FAILED" if has_failed else "passed"
    complain(
        f"audit {word}: evidence {evidence:.3g} against the law (fewer than one in {ALARM:,.0f} correct runs "
        f"reach {ALARM:,.0f}); z_accept {audit.z_accept:.2f} over {audit.trials} trials, "
        f"z_logp {audit.z_logp:.2f} over {audit.draws} draws, {audit.impossible} impossible tokens"
    )
    return has_failed


def gather(prompts: list[str], files: list[Path]) -> tuple[list[PromptSource], int]:
    """Return the prompts of `placed_prompts`, which must be texts, and the number of unreadable lines."""
    sources, unreadable, _ = placed_prompts(prompts, files, _text_of)
    return sources, unreadable


def placed_prompts(
    prompts: list[str], files: list[Path], of_json: Callable[[str], Any]
) -> tuple[list[PromptSource], int, int]:
    """Return the prompts of arguments and files, the number of unreadable lines, and that of all arguments and lines.

    The argument "-" stands for standard input, which is also read without arguments and files unless it is a terminal.
    Blank lines have an index and no prompt (arguments and JSON may have blank prompts), and unreadable lines are reported
    on standard error.

    Args:
        of_json: returns the prompt of a line of JSON, or raises `ValueError`.
    """
    reads_input = prompts == ["-"] or not (prompts or files or sys.stdin.isatty())
    if reads_input:
        prompts = []
    for number, text in enumerate(prompts, 1):
        require_text(f"argument {number}", text)
        if _is_name_of_file(text):
            complain(f"note: {text} is read as a prompt; --file reads the file")
    sources = [PromptSource(text, f"argument {number}", number - 1) for number, text in enumerate(prompts, 1)]
    places = len(prompts)
    unreadable = 0
    if reads_input:
        lines = _standard_input()
        if _is_prompt_object(lines[0] if lines else ""):
            complain("warning: standard input seems to be JSON lines, but is read as text; give a .jsonl by --file")
        sources += _prompts_of(_filled(lines), "standard input, line")
        places += len(lines)
    for file in files:
        if not file.is_file() or suffix_of(file) == ".tsv":
            rows = placed_rows(str(file))
            texts = [None if row is None else row.prompt for row in rows]
            found = _prompts_of(texts, f"{file}, prompt")
        else:
            from specbeam.lab.evaluate.lines import lines_of

            require_lines(file)
            texts = _filled(lines_of(file))
            found = _prompts_of(texts, f"{file}, line")
            if suffix_of(file) == ".jsonl":
                found, wrong = _read_json(found, of_json)
                unreadable += wrong
        sources += [replace(one, index=places + one.index) for one in found]
        places += len(texts)
    return sources, unreadable, places


def _filled(lines: list[str]) -> list[str | None]:
    """Return lines, with None for a blank one."""
    return [line if line.strip() else None for line in lines]


def _prompts_of(texts: Sequence[str | None], what: str) -> list[PromptSource]:
    """Return the prompts of texts, None for a blank line; their places are `what` and their numbers from 1."""
    numbered = enumerate(texts)
    return [PromptSource(text, f"{what} {index + 1}", index) for index, text in numbered if text is not None]


def _read_json(lines: list[PromptSource], of_json: Callable[[str], Any]) -> tuple[list[PromptSource], int]:
    """Return the prompts in lines of JSON, and the number of unreadable lines, which are reported."""
    found = []
    for line in lines:
        try:
            found.append(replace(line, text=of_json(line.text)))
        except ValueError as error:
            complain(f"{line.place}: {error}")
    return found, len(lines) - len(found)


def _standard_input() -> list[str]:
    """Return the lines of standard input. Raises `BadPrompt` if a byte is invalid in its encoding."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff").replace("\r\n", "\n")
        text.encode("utf-8")  # Python may let invalid bytes through, as surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadPrompt(
            f"standard input is not valid {sys.stdin.encoding}: {error.reason}; give it as UTF-8"
        ) from error
    return text.removesuffix("\n").split("\n") if text else []


def _is_name_of_file(text: str) -> bool:
    """Return whether a prompt is the name of a file with a suffix."""
    try:
        return bool(Path(text).suffix) and Path(text).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def _is_prompt_object(line: str) -> bool:
    """Return whether a line is an object of JSON with a prompt."""
    if not line.startswith("{"):
        return False
    try:
        _prompt_of(line)
    except ValueError:
        return False
    return True


_NO_PROMPT = 'expected a JSON string or an object with a text field "prompt"'
_NO_TEXTS = ("input_ids", "prompt_token_ids", "messages")  # fields with prompts other than texts


def about(place: str, number: int, error: str) -> str:
    """Return the message about a prompt, with its place instead of its number."""
    named = f"prompt {number}"
    is_named = error.startswith((f"{named} ", f"{named},", f"{named}:"))
    return place + error.removeprefix(named) if is_named else f"{place}: {error}"


def _prompt_of(line: str) -> Any:
    """Return the prompt of a line of JSON: a text, or the object itself if it has token ids or a chat.

    Raises `ValueError` if there is none.
    """
    record = _loaded(line)
    if isinstance(record, dict):
        prompt = record.get("prompt")
        is_text = not isinstance(prompt, list) or any(isinstance(part, str) for part in prompt)
        if not is_text or any(record.get(name) is not None for name in _NO_TEXTS):
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
