"""The command `specbeam bench speed`: methods and baselines on the same prompts, in one interleaved run."""

import shlex
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import generation
from specbeam.doors.cli.common import bundled_rows, check_has_head, complain, in_one_line, method_from, print_records
from specbeam.doors.cli.options import (
    Compute,
    DraftVocab,
    Grow,
    GrowVocab,
    Json,
    PairArguments,
    Plot,
    PromptFiles,
    PromptTexts,
    QuantizeDraft,
    QuantizeTarget,
    Rounds,
    SpacedRows,
    checked,
    parameters,
)
from specbeam.doors.cli.reports import print_report
from specbeam.doors.method_names import settings_in
from specbeam.doors.options.table import warper_names
from specbeam.doors.prompts import PromptRow, read, spread
from specbeam.errors import BadSetting, NotSupported, one_of
from specbeam.lab.words import BASELINES, of_rounds

if TYPE_CHECKING:
    from specbeam.lab.bench.outcome import Contender
    from specbeam.models.pair import Pair

DEFAULT = [
    "transformers/sampling",
    "transformers/beam_sampling",
    "transformers/beam_search",
    "sampling",
    "speculative_sampling",
    "beam_sampling",
    "dsbd",
    "dsbd width=auto",
    "beam_search",
    "speculative_beam_search",
]
# Options that transformers or CTranslate2 lack, or whose figures would not be comparable.
NOT_COMPARED = ("num_return_sequences", "json_schema", "regex", "grammar", "grammar_backend", "max_length")


def _words(text: str) -> list[str]:
    """Return the name of a contender and its settings. Raises `BadSetting` if there is none, or a quote is not closed."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise BadSetting(f"a contender is {text!r}, which cannot be read: {error}") from error
    if not found:
        raise BadSetting("a contender is empty; give a method or a baseline, such as 'dsbd beams=4'")
    return found


def _check_contender(text: str) -> None:
    """Raise `BadSetting` for an unknown method, setting or baseline."""
    name, *settings = _words(text)
    engine, _, mode = name.partition("/")
    if mode:
        one_of("a baseline", engine, BASELINES)
    else:
        settings_in(name, settings)


class SpeedArguments(PairArguments):
    """Arguments of the command."""

    contenders: Annotated[
        list[str],
        typer.Argument(
            help="Methods and baselines, such as 'dsbd beams=4 depth=2', 'transformers/beam_sampling beams=4' or "
            "'ctranslate2/beam_search compute_type=int8'. Speeds are compared with the first one. By default, a selection.",
            callback=checked(_check_contender),
        ),
    ] = []
    prompt: PromptTexts = []
    file: PromptFiles = []
    columns: Annotated[
        tuple[int, int], typer.Option(help="Columns of prompt and answer in a .tsv, counted from 1.")
    ] = (1, 2)
    grow: Grow = None
    grow_draft: Annotated[
        str | None,
        typer.Option(
            help="Enlarge the draft model to this number of weights without changing its outputs.",
            callback=checked(partial(parameters, option="--grow-draft")),
        ),
    ] = None
    grow_vocab: GrowVocab = None
    quantize: QuantizeTarget = None
    quantize_draft: QuantizeDraft = None
    compute: Compute = None
    draft_vocab: DraftVocab = None
    rows: SpacedRows = 30
    batch_size: Annotated[
        list[int], typer.Option(min=1, help="Number of prompts decoded together. May be given several times.")
    ] = [1]
    repeats: Rounds = 7
    options: dict[str, Any] = generation(without=NOT_COMPARED, max_new_tokens=64)
    plot: Plot = None
    json: Json = False


def speed(given: SpeedArguments) -> int:
    """Measure speed, quality and memory of methods, transformers and CTranslate2 in one interleaved run."""
    found = _prompts(given)
    from specbeam.doors.cli.screen import progress_bar
    from specbeam.lab.bench.speed import speed as measure
    from specbeam.lab.evaluate.task import has_bleu

    for text in given.contenders:
        name, *settings = _words(text)
        if "/" not in name:
            check_has_head(method_from(name, settings), given.draft)
    pair = _pair(given)
    _check_sources(pair, found)
    prompts = spread(found or demo_rows(), given.rows)
    if not has_bleu() and all(row.answer is not None for row in prompts):
        complain("note: BLEU is left out, because sacrebleu is missing: pip install 'specbeam[bench]'")
    running = [_contender(pair, text, given.options) for text in given.contenders or [*DEFAULT, *_of_head(pair)]]
    tables = []
    with progress_bar() as progress:
        for size in given.batch_size:
            bar = progress.add_task(f"{size} at once", total=given.repeats * -(-len(prompts) // size))
            tables.append(measure(pair, running, prompts, size, given.repeats, partial(progress.advance, bar)))
    _show(given, pair, tables)
    return 0


def _pair(given: SpeedArguments) -> "Pair":
    """Return the pair to measure."""
    from specbeam.doors.cli.widening import GrownSizes, grown_pair
    from specbeam.doors.sources import hears

    options = given.named("quantize", "quantize_draft", "compute", "draft_vocab", "engine")
    pair = grown_pair(given.model, given.draft, given.make(GrownSizes), sources=True, **options)
    if hears(pair):
        raise NotSupported(
            f"bench speed is for models of text, and {type(pair.known('target_model')).__name__} reads audio; give another "
            "model (specbeam transcribe runs this one)"
        )
    return pair


def _prompts(given: SpeedArguments) -> list[PromptRow]:
    """Return the prompts of the command line and of files."""
    of_files = [row for file in given.file for row in read(str(file), None, given.columns)]
    return [*map(PromptRow, given.prompt), *of_files]


def _check_sources(pair: "Pair", found: list[PromptRow]) -> None:
    """Raise `BadSetting` if there is no prompt and the demo's sentences do not suit this pair."""
    from specbeam.engines.eligibility import reads_sources

    if not found and reads_sources(pair.known("target_model")):
        raise BadSetting(
            f"{type(pair.known('target_model')).__name__} is an encoder-decoder model; give sources for it by "
            "--prompt or --file"
        )


def _show(given: SpeedArguments, pair: "Pair", tables: list[Any]) -> None:
    """Print and plot the measurements."""
    from specbeam.lab.bench.provenance import provenance
    from specbeam.lab.bench.speed_report import as_markdown, plot

    origin = provenance() | {"vocabulary": str(pair.target.vocab)}
    for table in tables:
        if given.json:
            print_records(table, provenance=origin)
        else:
            print_report(as_markdown(table) + "\n")
    if not given.json:
        print(
            f"Ratios are to {tables[0][0].name}, round by round; {of_rounds(given.repeats)}. ",
            end="",
        )
        print(in_one_line(origin))
    if given.plot is not None:
        plot([line for table in tables for line in table], given.plot)


def _of_head(pair: "Pair") -> list[str]:
    """Return the method of the paper of the pair's draft head; [] without a head or a method."""
    from specbeam.recipes.heads import paper_of

    head = getattr(pair.draft, "head", None)
    name = "" if head is None else paper_of(head)
    return [name] if name else []


def _contender(pair: "Pair", text: str, options: dict[str, Any]) -> "Contender":
    """Return the contender for a text such as "dsbd beams=4" or "transformers/sampling"."""
    from specbeam.lab.bench.baselines import MAKERS
    from specbeam.lab.bench.outcome import specbeam

    name, *settings = shlex.split(text)
    engine, _, mode = name.partition("/")
    if not mode:
        return specbeam(pair, text, method_from(name, settings), **_options_for(name, options))
    own_options = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        own_options[key] = _read(value)
    return MAKERS[engine](pair, mode, **own_options, **options)


def _options_for(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, without warpers if the method does not sample."""
    warpers = warper_names() if name in ("greedy", "beam_search", "speculative_beam_search") else ()
    return {key: value for key, value in options.items() if key not in warpers}


def _read(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def demo_rows() -> list[PromptRow]:
    """Return the German sentences of the bundled pair with their translations."""
    return [PromptRow(sentence, translation) for sentence, translation in bundled_rows("sentences.tsv")]
