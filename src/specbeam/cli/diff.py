"""`specbeam diff`: plain transformers and specbeam side by side, with the reason for each difference."""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam.cli.common import method_from, quiet_load
from specbeam.cli.generate import gather
from specbeam.errors import BadPrompt
from specbeam.evaluate.against_transformers import differences


def run(
    model: str, draft: str | None, prompts: list[str], files: list[Path], beams: int, settings: list[str], rows: int,
    batch_size: int, max_new_tokens: int, dtype: str, json: bool,
) -> int:  # fmt: skip
    """Exit code 1 if beams differ and rounding does not explain it."""
    from rich.console import Console
    from rich.progress import track

    asked, _ = gather(prompts, files)
    if not asked:
        raise BadPrompt("there is no prompt; give one as an argument, with --prompts, or on standard input")
    pair = quiet_load(model, draft, dtype=dtype)
    name = "beam_search" if pair.draft is None else "speculative_beam_search"
    more = (
        []
        if pair.draft is None or any(one.startswith("draft_beams=") for one in settings)
        else [f"draft_beams={beams + 2}"]
    )
    method = method_from(name, [f"beams={beams}", *more, *settings])
    texts = [one.text for one in asked[:rows]]
    bad = same = 0
    found = differences(pair, texts, method, batch_size, max_new_tokens=max_new_tokens)
    for number, one in enumerate(track(found, "comparing", len(texts), console=Console(stderr=True), transient=True)):
        if one is None:
            same += 1
            continue
        bad += not one.is_rounding
        if json:
            print(json_format.dumps(dataclasses.asdict(one) | {"is_rounding": one.is_rounding}))
            continue
        why = "rounding" if one.is_rounding else "NOT rounding"
        print(f"{asked[number].place}: beam {one.beam + 1}, token {one.step + 1} differs: closest decision {one.gap:.2g}, "
              f"noise of scores {one.noise:.2g} ({why})")  # fmt: skip
        for who, tokens in (("transformers", one.theirs), ("specbeam", one.ours)):
            print(f"  {who:12} {pair.tokenizer.decode(tokens) if pair.tokenizer else tokens}")
    if not json:
        other = len(texts) - same - bad
        print(f"{same} of {len(texts)} prompts: the same {beams} beams; {other} differ by rounding, {bad} otherwise")
    return int(bad > 0)
