"""The command `specbeam evaluate diff`: the beams of transformers and of specbeam, with the reason for each difference."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.common import method_from, print_json, quiet_load, say
from specbeam.doors.cli.generate import about, gather
from specbeam.doors.cli.options import Json, NewTokens, PairArguments, PromptArguments, Settings, checked
from specbeam.errors import BadPrompt, BadSetting, one_of

if TYPE_CHECKING:
    from specbeam.lab.evaluate.against_transformers import Comparison, Difference
    from specbeam.lab.evaluate.beam_options import ComparedRun
    from specbeam.models.pair import Pair
    from specbeam.recipes.method import Method


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def _check_dtype(name: str) -> None:
    """Raise `BadSetting` for an unknown type of weights."""
    one_of("dtype", name, DTYPES)


class DiffArguments(PromptArguments, PairArguments):
    """Arguments of the command."""

    beams: Annotated[int, typer.Option(min=2, help="Number of beams, at least 2 as in transformers.")] = 4
    setting: Settings = []
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of prompts; the first ones are taken.")] = 1000
    every_option: Annotated[
        bool,
        typer.Option(
            "--every-option",
            help="Use different search options for each prompt, so that all pairs of values of two options occur.",
        ),
    ] = False
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that specbeam decodes together.")] = 1
    max_new_tokens: NewTokens = 64
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the weights: float32, bfloat16, ...; 'auto': that of the checkpoint.",
            callback=checked(_check_dtype),
        ),
    ] = "auto"
    json: Json = False


def diff(given: DiffArguments) -> int:
    """Compare beam searches of transformers and specbeam; show each difference and whether rounding explains it.

    The exit code is 1 if rounding does not explain a difference, a prompt failed, or a line could not be read.
    """
    from specbeam.doors.cli.screen import progress_bar

    if any(setting.startswith("beams=") for setting in given.setting):
        raise BadSetting("--set beams=... would change one of the methods only; give --beams")
    sources, unreadable = gather(given.texts, given.file)
    if not sources:
        raise BadPrompt("there is no prompt; give one as an argument, with --prompt or --file, or on standard input")
    method_from("speculative_beam_search", [f"beams={given.beams}", *given.setting])
    pair = quiet_load(**given.pair, dtype=given.dtype)
    methods = _methods(pair, given.beams, given.setting)
    sources = sources[: given.rows]
    runs = _runs(pair, [source.text for source in sources], methods, given)
    seen: list[Comparison] = []
    total = None if given.every_option else len(sources) * len(methods)
    with progress_bar() as bar:
        for run in bar.track(runs, total, description="comparisons"):
            comparison = run.comparison
            place = sources[comparison.prompt].place
            seen.append(comparison)
            if given.json:
                print_json(_record(run))
            elif comparison.failure is not None:
                print(about(f"{place}, {comparison.method}", comparison.prompt, str(comparison.failure)))
            elif comparison.difference is not None:
                _show(pair, place, run, comparison.difference)
    bad = [comparison for comparison in seen if comparison.failure is not None or not _is_fine(comparison)]
    if not given.json:
        print(_summary(seen, "runs" if given.every_option else "prompts", given.beams))
    return int(bool(bad or unreadable))


def _methods(pair: "Pair", beams: int, settings: list[str]) -> "list[Method]":
    """Return the methods to compare: beam search and, with a draft or a setting, speculative beam search."""
    methods = [method_from("beam_search", [f"beams={beams}"])]
    if pair.draft is not None or settings:
        methods.append(method_from("speculative_beam_search", [f"beams={beams}", *settings]))
    return methods


def _runs(pair: "Pair", texts: Sequence[str], methods: "list[Method]", given: DiffArguments) -> "Iterator[ComparedRun]":
    """Yield the comparisons of all prompts and methods, each with its options."""
    from specbeam.lab.evaluate.against_transformers import comparisons
    from specbeam.lab.evaluate.beam_options import ComparedRun, with_every_option

    if given.every_option:
        return with_every_option(pair, texts, methods, given.batch_size, given.max_new_tokens)
    options = {"max_new_tokens": given.max_new_tokens}
    found = comparisons(pair, texts, methods, given.batch_size, **options)
    return (ComparedRun(options, comparison) for comparison in found)


def _is_fine(comparison: "Comparison") -> bool:
    return comparison.difference is None or comparison.difference.is_rounding


def _printable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with functions and other objects replaced by a note."""
    return {name: value if _is_plain(value) else "(an object)" for name, value in options.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, list) and all(map(_is_plain, value)))


def _record(run: "ComparedRun") -> dict[str, Any]:
    """Return a comparison with its options, for JSON."""
    record = dataclasses.asdict(run.comparison) | {"options": _printable(run.options)}
    if run.comparison.difference is not None:
        record["difference"]["is_rounding"] = run.comparison.difference.is_rounding
    return record


def _show(pair: "Pair", place: str, run: "ComparedRun", difference: "Difference") -> None:
    """Print a difference with its reason and both beams."""
    where = "the score" if difference.step is None else f"token {difference.step + 1}"
    gap = "" if difference.gap is None else f", logits {difference.gap:.2g} apart"
    print(f"{place}, {run.comparison.method}: {where} of beam {difference.beam + 1} differs{gap}: {_why(difference)}; "
          f"{_printable(run.options)}")  # fmt: skip
    for side, tokens in (("transformers", difference.theirs), ("specbeam", difference.ours)):
        say(f"  {side:12} {pair.tokenizer.decode(tokens) if pair.tokenizer else tokens}")


def _why(difference: "Difference") -> str:
    """Return whether rounding explains a difference, and why, as text."""
    distance = (
        f"logits within {difference.apart:.2g} of a plain forward; two plain forwards differ by {difference.noise:.2g}"
    )
    if not difference.replayed:
        return "NOT rounding: on specbeam's logits, transformers' search finds other beams"
    if not difference.is_rounding:
        return f"NOT rounding: {distance}"
    return f"rounding: on specbeam's logits, transformers' search finds the same beams; {distance}"


def _summary(seen: "list[Comparison]", unit: str, beams: int) -> str:
    """Return a line per method with the numbers of equal and of different beams."""
    lines = []
    for name in dict.fromkeys(comparison.method for comparison in seen):
        of_method = [comparison for comparison in seen if comparison.method == name]
        counts = Counter(map(_kind, of_method))
        off = max((comparison.off for comparison in of_method if _kind(comparison) == "same"), default=0.0)
        line = f"{name}: {counts['same']} of {len(of_method)} {unit} give the same {beams} beams"
        line += f", scores within {off:.2g}" if counts["same"] else ""
        line += "".join(f"; {counts[kind]} {text}" for kind, text in _OTHER_KINDS.items() if counts[kind])
        lines.append(line)
    return "\n".join(lines)


# kind of a comparison without equal beams -> its text in the summary
_OTHER_KINDS = {
    "scores": "have the same beams with scores that differ by rounding",
    "rounding": "differ by rounding",
    "other": "differ otherwise",
    "failed": "failed",
}


def _kind(comparison: "Comparison") -> str:
    """Return "same" or a key of `_OTHER_KINDS`."""
    if comparison.failure is not None:
        return "failed"
    if comparison.difference is None:
        return "same"
    if not comparison.difference.is_rounding:
        return "other"
    return "scores" if comparison.difference.step is None else "rounding"
