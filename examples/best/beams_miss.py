"""What beam search misses: how often `sb.best` proves a more probable text than beam search finds, and what it costs.

python examples/best/beams_miss.py                                        the bundled pair's own words and sentences
python examples/best/beams_miss.py --data DATA --rows 100                 held-out words and sentences (examples/train_pair)
python examples/best/beams_miss.py --spider FOLDER_OF_SPIDER --model MODEL    SQL that a grammar of the database allows
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import specbeam as sb
from specbeam.errors import TooFewAnswers
from specbeam.models.pair import BUNDLED

EXAMPLES = Path(__file__).parents[1]
WIDTHS = (4, 16, 64)
CLOSE = 1e-4  # log-likelihoods that differ by less are equal: sums of float32 in another order
SEARCH = {"length_penalty": 0.0, "early_stopping": "never"}


@dataclass
class Costs:
    """The cost of one search for each prompt."""

    passes: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    uncertain: int = 0


def main(
    data: Annotated[Path | None, typer.Option(help="folder with tatoeba_deu_eng/ and cmudict/")] = None,
    spider: Annotated[Path | None, typer.Option(help="folder of Spider")] = None,
    rows: Annotated[int, typer.Option(help="prompts of each kind")] = 60,
    limit: int = 20_000,
    model: str = "bundled",
) -> None:
    pair = sb.load(model)
    if spider is not None:
        measure(pair, "SQL", questions(spider, rows), limit)
        return
    for what, prompts in words_and_sentences(data, rows).items():
        measure(pair, what, [(prompt, {"max_new_tokens": 64}) for prompt in prompts], limit)


def words_and_sentences(data: Path | None, rows: int) -> dict[str, list[str]]:
    """Return the prompts of both jobs of the bundled pair."""
    if data is None:
        words = [line.split("\t")[0] for line in (BUNDLED / "words.tsv").read_text().splitlines()]
        sentences = [line.split("\t")[0] for line in (BUNDLED / "sentences.tsv").read_text().splitlines()]
        return {"words": ["<sounds> " + " ".join(word) for word in words][:rows], "sentences": sentences[:rows]}
    sys.path.insert(0, str(EXAMPLES / "train_pair"))
    from corpus import sounds, translations

    held_out = {"words": sounds(data, "valid"), "sentences": translations(data, "valid")}
    return {what: [one.prompt for one in found[:: len(found) // rows]][:rows] for what, found in held_out.items()}


def questions(folder: Path, rows: int) -> list[tuple[str, dict[str, Any]]]:
    """Return questions of Spider as prompts, each with the grammar of its database."""
    sys.path.insert(0, str(EXAMPLES / "text_to_sql"))
    from spider import questions as all_questions
    from spider import schemas
    from sql import grammar_of

    found = all_questions(folder)
    known = schemas(folder)
    prompts = []
    for name, question in found[:: max(len(found) // rows, 1)][:rows]:
        schema = known[name]
        tables = "\n".join(f"-- {table}({', '.join(columns)})" for table, columns in schema.columns.items())
        prompt = f"{tables}\n-- {question}\n"
        prompts.append((prompt, {"grammar": grammar_of(schema), "max_new_tokens": 64}))
    return prompts


def measure(pair: sb.Pair, what: str, prompts: Sequence[tuple[str, dict[str, Any]]], limit: int) -> None:
    """Print the table of one kind of prompts."""
    misses = dict.fromkeys(WIDTHS, 0)
    worse = dict.fromkeys(WIDTHS, 0)
    beams = {width: Costs() for width in (*WIDTHS, 10)}
    drafters = ("none",) if pair.draft is None else ("model", "none")
    best = {(n, drafter): Costs() for n in (1, 10) for drafter in drafters}
    for prompt, options in prompts:
        first = None
        for (n, drafter), costs in best.items():
            texts = timed_best(pair, prompt, n, drafter, limit, options, costs)
            costs.uncertain += not (texts and texts[-1].certain)
            if texts:
                first = texts[0] if first is None else first
                assert not texts[0].certain or abs(first.score - texts[0].score) < CLOSE, (prompt, drafter)
        for width, costs in beams.items():
            began = time.perf_counter()
            (answer,) = sb.generate(pair, prompt, sb.beam_search(width), **SEARCH, **options)
            costs.seconds.append(time.perf_counter() - began)
            costs.passes.append(answer.report.target_passes)
            costs.prefixes.append(answer.report.rows.scored)
            found = [one.score for one in answer.beams if one.finished and one.tokens[-1] in pair.eos]
            if width in misses and first is not None:
                misses[width] += not found or first.score > found[0] + CLOSE
                worse[width] += bool(found) and first.certain and first.score < found[0] - CLOSE
    print(f"\n{len(prompts)} {what}: of median passes, prefixes and milliseconds\n")
    print("| | passes | prefixes | ms | misses the best |\n| --- | --- | --- | --- | --- |")
    for width, costs in beams.items():
        missed = f"{misses[width]} of {len(prompts)}" if width in misses else ""
        print(row(f"beam search, {width} beams", costs, missed))
        assert worse.get(width, 0) == 0, "beam search found a better text than a certain best one"
    for (n, drafter), costs in best.items():
        drafts = "draft model" if drafter == "model" else "no drafts"
        print(row(f"`sb.best`, n = {n}, {drafts}", costs, f"{costs.uncertain} not certain"))
    if pair.draft is None:
        return
    over = sum(a > b for a, b in zip(best[10, "model"].passes, beams[10].passes, strict=True))
    print(
        f"\nbest 10 with the draft model took more passes than beam search with 10 beams for {over} of {len(prompts)}"
    )


def timed_best(
    pair: sb.Pair, prompt: str, n: int, drafter: Any, limit: int, options: dict[str, Any], costs: Costs
) -> list[sb.Beam]:
    """Return the best texts, and add what they cost."""
    began = time.perf_counter()
    search = sb.best(pair, prompt, n, limit=limit, drafter=drafter, **options)
    texts = []
    with suppress(TooFewAnswers):  # no text ended within the limit
        texts = list(search)
    costs.seconds.append(time.perf_counter() - began)
    costs.passes.append(search.report.target_passes)
    costs.prefixes.append(search.report.rows.scored)
    return texts


def row(name: str, costs: Costs, note: str) -> str:
    """Return a row of the table."""
    milliseconds = 1000 * median(costs.seconds)
    return f"| {name} | {median(costs.passes):.0f} | {median(costs.prefixes):.0f} | {milliseconds:.0f} | {note} |"


if __name__ == "__main__":
    typer.run(main)
