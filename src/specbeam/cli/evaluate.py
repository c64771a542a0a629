"""`specbeam evaluate`: is the output what it is declared to be?"""

import dataclasses
import json as json_format
from pathlib import Path

from specbeam.cli.common import method_from, quiet_load
from specbeam.cli.generate import gather
from specbeam.errors import BadPrompt
from specbeam.evaluate.same_beams import differences


def same_beams(
    prompts: list[str], files: list[Path], model: str, draft: str | None, settings: list[str], seed: int,
    batch_size: int, max_new_tokens: int, json: bool,
) -> int:  # fmt: skip
    """Exit code 1 if beams differ and rounding does not explain it."""
    asked, _ = gather(prompts, files)
    if not asked:
        raise BadPrompt("there is no prompt; give one as an argument, with --file, or on standard input")
    pair = quiet_load(model, draft)
    method = method_from("dsbd", ["width=fixed", *settings])
    found = differences(pair, [one.text for one in asked], method, seed, batch_size, max_new_tokens=max_new_tokens)
    for one in found:
        if json:
            print(json_format.dumps(dataclasses.asdict(one)))
        else:
            why = "rounding" if one.is_rounding else "NOT rounding"
            print(f"{asked[one.prompt].place}, step {one.step}: beams differ at a gap of {one.gap:.2g} ({why})")
            for name, paths in (("plain", one.plain), ("dsbd", one.other)):
                texts = [pair.tokenizer.decode(path) if pair.tokenizer else str(path) for path in paths]
                print(f"  {name:6} {texts}")
    if not json:
        print(f"{len(asked) - len(found)} of {len(asked)} prompts: the same {method.beams} beams")
    return int(any(not one.is_rounding for one in found))
