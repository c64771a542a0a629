"""`specbeam generate`: prompts in, answers out, each written as soon as it may be."""

import json as json_format
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbeam.audit import ALARM, Audit
from specbeam.cli.common import as_json, method_from, quiet_load, text_or_file
from specbeam.cli.profile import profile_if
from specbeam.errors import BadPrompt, MissingFile, SpecbeamError, TooFewAnswers
from specbeam.evaluate.lines import lines_of
from specbeam.generation import generate
from specbeam.records import Generation


@dataclass(frozen=True)
class PromptSource:
    """One prompt and where it came from."""

    text: str
    place: str


@dataclass
class Writer:
    """Writes answers: JSON at once, plain text in the order of the prompts."""

    asked: list[PromptSource]
    json: bool
    expected: int  # answers per prompt
    done: dict[int, list[Generation]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    written: int = 0
    audit: Audit = field(default_factory=Audit)

    def take(self, number: int, result: Generation | SpecbeamError) -> None:
        if isinstance(result, SpecbeamError):
            for one in result.generations if isinstance(result, TooFewAnswers) else []:
                self.take(number, one)
            self.failed.add(number)
            complain(f"{self.asked[number].place}: {result}")
        else:
            self.done.setdefault(number, []).append(result)
            self.audit += result.report.audit or Audit()
            if self.json:
                print(as_json(number, self.asked[number].text, result), flush=True)
        self._write_ready()

    def _write_ready(self) -> None:
        while self.written < len(self.asked) and self._complete(self.written):
            self._write(self.written)
            self.written += 1

    def _complete(self, number: int) -> bool:
        return number in self.failed or len(self.done.get(number, [])) == self.expected

    def _write(self, number: int) -> None:
        if not self.json:
            for one in self.done.get(number, []):
                print(one.text, flush=True)

    def close(self) -> None:
        """Write what is finished behind an unfinished prompt: an interrupt must not cost it."""
        for number in sorted(self.done):
            if number >= self.written and not self.json:
                for one in self.done[number]:
                    print(one.text, flush=True)


def run(
    prompts: list[str],
    files: list[Path],
    model: str,
    draft: str | None,
    device: str | None,
    quantize: str | None,
    compile: bool,
    method_name: str,
    settings: list[str],
    options: dict[str, Any],
    seed: int | None,
    batch_size: int,
    audit: bool,
    profile: bool,
    json: bool,
) -> int:
    """Exit code: 0, or 1 if a prompt failed."""
    method = method_from(method_name, settings)
    for name, mark in (("json_schema", "{"), ("grammar", ":")):
        options[name] = text_or_file(options[name], mark, name)
    if not method.lossless:
        complain(f"note: {method.name} is {method.law}")
    asked, unreadable = gather(prompts, files)
    if not asked and not unreadable:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    pair = quiet_load(model, draft, device, quantize=quantize, compile=compile)
    writer = Writer(asked, json, options["num_return_sequences"])
    if asked:
        with _progress(len(asked)) as advance:

            def take(number: int, result: Generation | SpecbeamError) -> None:
                writer.take(number, result)
                advance()

            try:
                texts = [one.text for one in asked]
                if profile:  # kernels are loaded and caches made before the clock runs
                    generate(pair, texts[0], method, seed=seed, **options | {"max_new_tokens": 8})
                with profile_if(profile) as answers:
                    answers += generate(
                        pair, texts, method, seed=seed, batch_size=batch_size, audit=audit, on_result=take, **options
                    )
            except KeyboardInterrupt:
                complain("interrupted; what was finished is written")
                return 130
            except SpecbeamError:  # SomeFailed too: each failure was named when it came
                if not writer.failed:
                    raise
            finally:
                writer.close()
    if audit:
        _say(writer.audit)
    return 1 if unreadable or writer.failed or writer.audit.suspicious else 0


def _say(audit: Audit) -> None:
    if audit.empty:
        complain("audit: nothing to test, for nothing was left to chance")
        return
    word = "FAILED" if audit.suspicious else "passed"
    complain(
        f"audit {word}: evidence {audit.evidence:.3g} against the law (a correct run ever reaches {ALARM:,.0f} less than "
        f"once in so many runs); z_accept {audit.z_accept:.2f} over {audit.trials} trials, z_logp {audit.z_logp:.2f} over "
        f"{audit.draws} draws, {audit.impossible} impossible tokens"
    )


def gather(prompts: list[str], files: list[Path]) -> tuple[list[PromptSource], int]:
    """All prompts, and how many lines could not be read."""
    asked = [PromptSource(text, f"argument {number}") for number, text in enumerate(prompts, 1)]
    unreadable = 0
    if not prompts and not files and not sys.stdin.isatty():
        asked += [
            PromptSource(line, f"standard input, line {number}")
            for number, line in _filled(sys.stdin.read().split("\n"))
        ]
    for file in files:
        if not file.is_file():
            raise MissingFile(f"there is no file {file}")
        for number, line in _filled(lines_of(file)):
            place = f"{file}, line {number}"
            try:
                asked.append(PromptSource(_prompt_of(line) if file.suffix == ".jsonl" else line, place))
            except ValueError as error:
                unreadable += 1
                complain(f"{place}: {error}")
    return asked, unreadable


def _filled(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _prompt_of(line: str) -> str:
    try:
        record = json_format.loads(line)
    except json_format.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    text = record.get("prompt") if isinstance(record, dict) else record
    if not isinstance(text, str):
        raise ValueError('expected a JSON string or an object with a text field "prompt"')
    return text


class _progress:  # noqa: N801
    """A bar on standard error if that is a terminal and there is more than one prompt."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self.bar = Progress(console=console, transient=True, disable=not console.is_terminal or self.total < 2)
        task = self.bar.add_task("prompts", total=self.total)
        self.bar.start()
        return lambda: self.bar.advance(task)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def complain(text: str) -> None:
    print(f"specbeam: {text}", file=sys.stderr, flush=True)
