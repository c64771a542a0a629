"""The command `specbeam bench serve`: a load of many clients on a server."""

import dataclasses
import json as json_format
from dataclasses import dataclass
from pathlib import Path

from specbeam.doors.cli.common import print_json
from specbeam.doors.cli.generate import gather
from specbeam.errors import BadSetting
from specbeam.lab.bench.serving import Load, LoadReport, measure_load
from specbeam.models.pair import BUNDLED


@dataclass(frozen=True)
class PromptShape:
    """The prompts of a load.

    Args:
        files: where they are; none: the demo's sentences.
        joined: number of these that make one prompt.
        before: what each prompt begins with.
    """

    files: list[Path]
    joined: int = 1
    before: str = ""

    def prompts(self) -> list[str]:
        texts = [one.text for one in gather([], self.files)[0]] if self.files else _sentences()
        starts = range(0, len(texts), self.joined)
        return [self.before + " ".join(texts[start : start + self.joined]) for start in starts]


def run(
    url: str,
    clients: int,
    requests: int,
    seconds: float | None,
    rate: float | None,
    gone: float,
    body: str,
    shape: PromptShape,
    max_new_tokens: int,
    stream: bool,
    key: str,
    json: bool,
) -> int:
    """Put the load on the server, print its figures, and return the exit code: 1 if a request was not answered."""
    try:
        fields = json_format.loads(body)
    except ValueError as error:
        raise BadSetting(f"--body is {body!r}; it must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadSetting(f"--body is {body!r}; it must be a JSON object")
    fields = {"max_tokens": max_new_tokens} | fields
    load = Load(shape.prompts(), fields, clients, requests, rate, gone, stream, key, seconds=seconds)
    report = measure_load(url, load)
    if json:
        record = dataclasses.asdict(report)
        del record["once"]
        print_json(record)
    else:
        _show(report)
    return 0 if report.answered + report.gone == report.requests else 1


def _sentences() -> list[str]:
    """Return the German sentences of the demo."""
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines if line]


def _show(report: LoadReport) -> None:
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    table = Table("figure", "value", box=None, pad_edge=False)
    table.add_row("answered", f"{report.answered} of {report.requests}, {report.gone} went away as planned")
    table.add_row("by status", ", ".join(f"{status}: {number}" for status, number in report.statuses.items()))
    table.add_row("requests per second", f"{report.requests_per_s:.2f}")
    table.add_row("tokens per second", f"{report.tokens_per_s:.1f}")
    table.add_row("seconds per request", "median {:.3f}, 99 % {:.3f}".format(*report.waited_s))
    if report.first_s is not None:
        table.add_row("seconds to first text", "median {:.3f}, 99 % {:.3f}".format(*report.first_s))
    if report.per_token_s is not None:
        table.add_row("seconds per further token", "median {:.4f}, 99 % {:.4f}".format(*report.per_token_s))
    if report.passes_per_token is not None:
        table.add_row("target passes per token", f"{report.passes_per_token:.2f}")
    Screen().print(table)
