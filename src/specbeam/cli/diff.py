"""`specbeam diff`: plain transformers and specbeam side by side, with the reason for each difference."""

import dataclasses
import json as json_format
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbeam.cli.common import method_from, quiet_load
from specbeam.cli.generate import gather
from specbeam.errors import BadPrompt, BadSetting
from specbeam.evaluate.against_transformers import Comparison, Difference, comparisons
from specbeam.evaluate.beam_options import Covered, with_every_option
from specbeam.pair import Pair
from specbeam.recipes.method import Method


def run(
    model: str, draft: str | None, prompts: list[str], files: list[Path], beams: int, settings: list[str], rows: int,
    every_option: bool, batch_size: int, max_new_tokens: int, dtype: str, json: bool,
) -> int:  # fmt: skip
    """Exit code 1 if beams differ and rounding does not explain it."""
    from rich.console import Console
    from rich.progress import track

    if any(one.startswith("beams=") for one in settings):
        raise BadSetting("--set beams=... would let the methods differ; the number of beams is --beams")
    if beams < 2:
        raise BadSetting(f"--beams is {beams}; transformers searches with at least 2")
    for name, value in (("--rows", rows), ("--batch-size", batch_size)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")
    asked, unreadable = gather(prompts, files)
    if not asked:
        raise BadPrompt("there is no prompt; give one as an argument, with --prompts, or on standard input")
    pair = quiet_load(model, draft, dtype=dtype)
    methods = _methods(pair, beams, settings)
    asked = asked[:rows]
    found = _found(pair, [one.text for one in asked], methods, every_option, batch_size, max_new_tokens)
    places = [one.place for one in asked]
    seen = []
    total = None if every_option else len(asked) * len(methods)
    bar = track(found, "comparing", total, console=Console(stderr=True), transient=True)
    for one in bar:
        seen.append(one.comparison)
        if json:
            print(_as_json(one))
        elif one.comparison.failure is not None:
            print(f"{places[one.comparison.prompt]}, {one.comparison.method}: {one.comparison.failure}")
        elif one.comparison.difference is not None:
            _show(pair, places[one.comparison.prompt], one, one.comparison.difference)
    bad = [one for one in seen if one.failure is not None or not _is_fine(one)]
    if not json:
        print(_summary(seen, "runs" if every_option else "prompts", beams))
    return int(bool(bad or unreadable))


def _methods(pair: Pair, beams: int, settings: list[str]) -> list[Method]:
    methods = [method_from("beam_search", [f"beams={beams}"])]
    if pair.draft is not None or settings:
        methods.append(method_from("speculative_beam_search", [f"beams={beams}", *settings]))
    return methods


def _found(
    pair: Pair, texts: Sequence[str], methods: list[Method], every_option: bool, batch_size: int, max_new_tokens: int
) -> Iterator[Covered]:
    if every_option:
        return with_every_option(pair, texts, methods, batch_size, max_new_tokens)
    options = {"max_new_tokens": max_new_tokens}
    return (Covered(options, one) for one in comparisons(pair, texts, methods, batch_size, **options))


def _is_fine(one: Comparison) -> bool:
    return one.difference is None or one.difference.is_rounding


def _shown(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value if _is_plain(value) else "(one of ours)" for name, value in options.items()}


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, list) and all(map(_is_plain, value)))


def _as_json(one: Covered) -> str:
    record = dataclasses.asdict(one.comparison) | {"options": _shown(one.options)}
    if one.comparison.difference is not None:
        record["difference"]["is_rounding"] = one.comparison.difference.is_rounding
    return json_format.dumps(record)


def _show(pair: Pair, place: str, one: Covered, difference: Difference) -> None:
    where = "the score" if difference.step is None else f"token {difference.step + 1}"
    gap = "" if difference.gap is None else f", logits {difference.gap:.2g} apart"
    print(f"{place}, {one.comparison.method}: {where} of beam {difference.beam + 1} differs{gap}: {_why(difference)}; "
          f"{_shown(one.options)}")  # fmt: skip
    for who, tokens in (("transformers", difference.theirs), ("specbeam", difference.ours)):
        print(f"  {who:12} {pair.tokenizer.decode(tokens) if pair.tokenizer else tokens}")


def _why(difference: Difference) -> str:
    distance = f"logits within {difference.apart:.2g} of a plain forward, whose own vary by {difference.noise:.2g}"
    if not difference.replayed:
        return "NOT rounding: transformers' search finds others in the very logits that specbeam saw"
    if not difference.is_rounding:
        return f"NOT rounding: {distance}"
    return f"rounding: transformers' search finds the same in the logits that specbeam saw, {distance}"


def _summary(seen: list[Comparison], unit: str, beams: int) -> str:
    lines = []
    for name in dict.fromkeys(one.method for one in seen):
        mine = [one for one in seen if one.method == name]
        counts = Counter(map(_kind, mine))
        off = max((one.off for one in mine if _kind(one) == "same"), default=0.0)
        line = f"{name}: {counts['same']} of {len(mine)} {unit} give the same {beams} beams"
        line += f", scores within {off:.2g}" if counts["same"] else ""
        line += "".join(f"; {counts[kind]} {said}" for kind, said in _OTHERS.items() if counts[kind])
        lines.append(line)
    return "\n".join(lines)


_OTHERS = {
    "scores": "the same beams with scores apart by rounding",
    "rounding": "differ by rounding",
    "other": "differ otherwise",
    "failed": "failed",
}


def _kind(one: Comparison) -> str:
    if one.failure is not None:
        return "failed"
    if one.difference is None:
        return "same"
    if not one.difference.is_rounding:
        return "other"
    return "scores" if one.difference.step is None else "rounding"
