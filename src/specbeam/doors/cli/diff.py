"""The command `specbeam evaluate diff`: the beams of transformers and of specbeam, with the reason for each difference."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbeam.doors.cli.common import check_options, method_from, print_json, quiet_load, say
from specbeam.doors.cli.generate import gather
from specbeam.errors import BadPrompt, BadSetting
from specbeam.lab.evaluate.against_transformers import Comparison, Difference, comparisons
from specbeam.lab.evaluate.beam_options import ComparedRun, with_every_option
from specbeam.models.pair import Pair
from specbeam.recipes.method import Method


def run(
    model: str, draft: str | None, prompts: list[str], files: list[Path], beams: int, settings: list[str], rows: int,
    every_option: bool, batch_size: int, max_new_tokens: int, dtype: str, json: bool,
) -> int:  # fmt: skip
    """Compare the beam searches of transformers and of specbeam, and print each difference.

    Returns exit code 1 if beams differ and rounding does not explain it, if a prompt failed, or if a line could not be
    read; else 0.
    """
    from rich.progress import track

    from specbeam.doors.cli.screen import Screen

    if any(setting.startswith("beams=") for setting in settings):
        raise BadSetting("--set beams=... would let the methods differ; the number of beams is --beams")
    if beams < 2:
        raise BadSetting(f"--beams is {beams}; transformers searches with at least 2")
    for name, value in (("--rows", rows), ("--batch-size", batch_size)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")
    sources, unreadable = gather(prompts, files)
    if not sources:
        raise BadPrompt("there is no prompt; give one as an argument, with --prompt or --file, or on standard input")
    check_options({"max_new_tokens": max_new_tokens})
    method_from("speculative_beam_search", [f"beams={beams}", *settings])
    pair = quiet_load(model, draft, dtype=dtype)
    methods = _methods(pair, beams, settings)
    sources = sources[:rows]
    texts = [source.text for source in sources]
    runs = _runs(pair, texts, methods, every_option, batch_size, max_new_tokens)
    seen: list[Comparison] = []
    total = None if every_option else len(sources) * len(methods)
    for run in track(runs, "comparing", total, console=Screen(stderr=True), transient=True):
        comparison = run.comparison
        place = sources[comparison.prompt].place
        seen.append(comparison)
        if json:
            print_json(_record(run))
        elif comparison.failure is not None:
            print(f"{place}, {comparison.method}: {comparison.failure}")
        elif comparison.difference is not None:
            _show(pair, place, run, comparison.difference)
    bad = [comparison for comparison in seen if comparison.failure is not None or not _is_fine(comparison)]
    if not json:
        print(_summary(seen, "runs" if every_option else "prompts", beams))
    return int(bool(bad or unreadable))


def _methods(pair: Pair, beams: int, settings: list[str]) -> list[Method]:
    """Return the methods to compare: beam search, and if there is a draft or a setting, the speculative one."""
    methods = [method_from("beam_search", [f"beams={beams}"])]
    if pair.draft is not None or settings:
        methods.append(method_from("speculative_beam_search", [f"beams={beams}", *settings]))
    return methods


def _runs(
    pair: Pair, texts: Sequence[str], methods: list[Method], every_option: bool, batch_size: int, max_new_tokens: int
) -> Iterator[ComparedRun]:
    """Yield the comparisons of all prompts and methods, each with its options."""
    if every_option:
        return with_every_option(pair, texts, methods, batch_size, max_new_tokens)
    options = {"max_new_tokens": max_new_tokens}
    found = comparisons(pair, texts, methods, batch_size, **options)
    return (ComparedRun(options, comparison) for comparison in found)


def _is_fine(comparison: Comparison) -> bool:
    return comparison.difference is None or comparison.difference.is_rounding


def _printable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a note in place of functions and objects."""
    return {name: value if _is_plain(value) else "(one of ours)" for name, value in options.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, list) and all(map(_is_plain, value)))


def _record(run: ComparedRun) -> dict[str, Any]:
    """Return a comparison with its options, for JSON."""
    record = dataclasses.asdict(run.comparison) | {"options": _printable(run.options)}
    if run.comparison.difference is not None:
        record["difference"]["is_rounding"] = run.comparison.difference.is_rounding
    return record


def _show(pair: Pair, place: str, run: ComparedRun, difference: Difference) -> None:
    """Print a difference with its reason and with the beams of both sides."""
    where = "the score" if difference.step is None else f"token {difference.step + 1}"
    gap = "" if difference.gap is None else f", logits {difference.gap:.2g} apart"
    print(f"{place}, {run.comparison.method}: {where} of beam {difference.beam + 1} differs{gap}: {_why(difference)}; "
          f"{_printable(run.options)}")  # fmt: skip
    for side, tokens in (("transformers", difference.theirs), ("specbeam", difference.ours)):
        say(f"  {side:12} {pair.tokenizer.decode(tokens) if pair.tokenizer else tokens}")


def _why(difference: Difference) -> str:
    """Return a text that says whether rounding explains a difference, and why."""
    distance = f"logits within {difference.apart:.2g} of a plain forward, whose own vary by {difference.noise:.2g}"
    if not difference.replayed:
        return "NOT rounding: transformers' search finds other beams in the same logits that specbeam saw"
    if not difference.is_rounding:
        return f"NOT rounding: {distance}"
    return f"rounding: transformers' search finds the same beams in the logits that specbeam saw, {distance}"


def _summary(seen: list[Comparison], unit: str, beams: int) -> str:
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


# kind of a comparison whose beams are not the same -> what the summary says of it
_OTHER_KINDS = {
    "scores": "the same beams with scores apart by rounding",
    "rounding": "differ by rounding",
    "other": "differ otherwise",
    "failed": "failed",
}


def _kind(comparison: Comparison) -> str:
    """Return "same" or a key of `_OTHER_KINDS`."""
    if comparison.failure is not None:
        return "failed"
    if comparison.difference is None:
        return "same"
    if not comparison.difference.is_rounding:
        return "other"
    return "scores" if comparison.difference.step is None else "rounding"
