"""The command `specbeam bench serve`: a load test of a server with many clients."""

import dataclasses
import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.bench import texts_of
from specbeam.doors.cli.common import complain, print_json
from specbeam.doors.cli.options import Json, NewTokens, PromptFiles, check_address, checked
from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from specbeam.lab.bench.serving import LoadReport


def _check_rate(rate: float) -> None:
    """Raise `BadSetting` unless a number may be one of requests per second."""
    if not rate > 0:
        raise BadSetting(f"--rate is {rate}; it must be more than 0 requests per second")


class LoadTestArguments(Record):
    """Arguments of the command."""

    url: Annotated[
        str, typer.Argument(help="Address of a server that speaks OpenAI's API.", callback=checked(check_address))
    ] = "http://127.0.0.1:8000"
    clients: Annotated[int, typer.Option(min=1, help="Number of clients; each has one request at a time.")] = 8
    requests: Annotated[int, typer.Option(min=1, help="Maximum total number of requests.")] = 100
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no request is sent; by default unlimited.")
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, at random times (Poisson); by default, each client sends its next request "
            "at once.",
            callback=checked(_check_rate),
        ),
    ] = None
    gone: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests whose client disconnects before the end.")
    ] = 0.0
    body: Annotated[str, typer.Option(help="Fields of each request as JSON, such as '{\"num_beams\": 4}'.")] = "{}"
    file: PromptFiles = []
    joined: Annotated[int, typer.Option(min=1, help="Number of prompts joined into one, for long prompts.")] = 1
    before: Annotated[str, typer.Option(help="Common beginning of all prompts, for shared prefixes.")] = ""
    max_new_tokens: NewTokens = 64
    stream: Annotated[bool, typer.Option(help="Stream the answers.")] = True
    key: Annotated[str, typer.Option(help="API key.", envvar="SPECBEAM_API_KEY")] = ""
    json: Json = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of each request. Raises `BadSetting` if --body is not a JSON object."""
        try:
            found = json_format.loads(self.body)
        except ValueError as error:
            raise BadSetting(f"--body is {self.body!r}; it must be JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadSetting(f"--body is {self.body!r}; it must be a JSON object")
        return {"max_tokens": self.max_new_tokens} | found

    @property
    def prompts(self) -> list[str]:
        """The prompts of the requests."""
        texts = texts_of([], self.file)
        starts = range(0, len(texts), self.joined)
        return [self.before + " ".join(texts[start : start + self.joined]) for start in starts]


def serve(given: LoadTestArguments) -> int:
    """Measure a server under the load of many clients: requests and tokens per second, and waiting times."""
    from specbeam.doors.cli.screen import working
    from specbeam.lab.bench.serving import Load, measure_load

    load = given.make(Load, body=given.fields, prompts=given.prompts)
    with working(f"sending up to {given.requests} requests"):
        report = measure_load(given.url, load)
    if given.json:
        record = dataclasses.asdict(report)
        del record["once"]
        print_json(record)
    else:
        _show(report)
    return 0 if report.answered + report.gone == report.requests else 1


def _show(report: "LoadReport") -> None:
    from rich.table import Table

    from specbeam.doors.cli.screen import Screen

    table = Table("figure", "value", box=None, pad_edge=False)
    table.add_row("answered", f"{report.answered} of {report.requests}, {report.gone} disconnected as planned")
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
    refusal = next((one.refusal for one in report.once if one.refusal), "")
    if refusal:
        complain(f"the first refusal: {refusal}")
