"""The command `specbeam best`: the most probable texts of prompts, one by one, each with a certificate."""

from typing import Annotated, Any

import typer

from specbeam.doors.cli.arguments import generation
from specbeam.doors.cli.common import check_options, complain, print_json, quiet_load, say, with_files
from specbeam.doors.cli.generate import about, gather
from specbeam.doors.cli.options import Json, LoadArguments, PromptArguments, checked
from specbeam.doors.model_files import require_tokenizer
from specbeam.errors import BadPrompt, SpecbeamError, one_of

DRAFTERS = ("auto", "model", "prompt_lookup", "none")


def _check_drafter(name: str) -> None:
    """Raise `BadSetting` for an unknown drafter."""
    one_of("drafter", name, DRAFTERS)


class BestArguments(PromptArguments, LoadArguments):
    """Arguments of the command."""

    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of texts per prompt.")] = 5
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of prefixes that the target scores per prompt.")] = (
        2000
    )
    width: Annotated[int, typer.Option(min=1, help="Number of prefixes that it scores in a pass.")] = 16
    drafter: Annotated[
        str,
        typer.Option(help="What drafts: 'model', 'prompt_lookup', 'none' or 'auto'.", callback=checked(_check_drafter)),
    ] = "auto"
    options: dict[str, Any] = generation(without=["num_return_sequences", "early_stopping"])
    json: Json = False


def best(given: BestArguments) -> int:
    """Write the most probable texts of each prompt, best first, each with its log-likelihood and whether it is certain.

    With several prompts, each stands in a line above its texts. In JSON, "index" counts all arguments and lines, blank ones
    too.
    """
    given.check_what_runs()
    require_tokenizer(given.model)
    sources, unreadable = gather(given.texts, given.file)
    if not sources and not unreadable:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    options: Any = with_files(given.options)
    check_options(options)
    from specbeam.doors.best import best as found
    from specbeam.doors.best import best_settings
    from specbeam.recipes.best import best_first

    best_first(given.n, given.limit, given.width, drafter=given.drafter)  # checks the values
    best_settings(options)
    pair = quiet_load(**given.loading, sources=True)
    failed = unreadable
    for source in sources:
        try:
            texts = found(
                pair,
                source.text,
                given.n,
                limit=given.limit,
                width=given.width,
                drafter=given.drafter,  # type: ignore[arg-type]
                **options,
            )
            if len(sources) > 1 and not given.json:
                say(source.text)
            for rank, beam in enumerate(texts, 1):
                if given.json:
                    record = {"index": source.index, "prompt": source.text, "rank": rank, "text": beam.text}
                    record |= {"tokens": beam.tokens, "score": beam.score, "bound": beam.bound, "certain": beam.certain}
                    if beam.item is not None:
                        record["item"] = beam.item
                    print_json(record)
                else:
                    doubt = "" if beam.certain else f"  (not certain: up to {beam.bound:.3f} is possible)"
                    say(f"{beam.score:9.3f}  {beam.text}{doubt}")
        except SpecbeamError as error:
            complain(about(source.place, 0, str(error)))
            failed += 1
    return 1 if failed else 0
