"""Score a trained pair: BLEU and exact match on held-out data, acceptance per draft token, cost of a draft step.

python measure.py --data DATA --pair PAIR      (a folder with target/ and draft/; default: the bundled pair)
"""

import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import sacrebleu
import typer
from corpus import sounds, translations

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.generation import Request
from specbeam.models.pair import BUNDLED

SEARCH = {"temperature": 0.0}


def main(
    data: Annotated[Path, typer.Option(help="folder that holds tatoeba_deu_eng/ and cmudict/")],
    pair: Annotated[Path, typer.Option(help="folder of the pair")] = BUNDLED,
    rows: Annotated[int, typer.Option(help="held-out rows of each job, drawn at random")] = 2000,
) -> None:
    models = sb.load(pair / "target", pair / "draft")
    rng = random.Random(0)
    sentences = some(translations(data, "valid"), rows, rng)
    words = some(sounds(data, "valid"), rows, rng)
    for name in ("target", "draft"):
        alone = sb.load(pair / name, tokenizer=pair / "target")
        for mode, method, options in (("sampling", sb.sampling(), {}), ("beam search 4", sb.beam_sampling(4), SEARCH)):
            english = answers(alone, sentences, method, options)
            bleu = sacrebleu.corpus_bleu(english, [[one.answers[0] for one in sentences]]).score
            spoken = answers(alone, words, method, options)
            right = sum(text in one.answers for text, one in zip(spoken, words, strict=True)) / len(words)
            print(f"{name:6} {mode:13} BLEU {bleu:.2f}  words right {right:.3f}", flush=True)
    for job, examples in (("translation", sentences), ("sounds", words)):
        print(f"acceptance per draft token, {job}: {acceptance(models, [one.prompt for one in examples[:300]]):.3f}")
    target_ms, draft_ms = costs(models)
    print(
        f"target pass of 28 nodes {target_ms:.2f} ms, draft step of 6 nodes {draft_ms:.2f} ms: "
        f"{target_ms / draft_ms:.1f} to 1"
    )


def some(examples: list, count: int, rng: random.Random) -> list:
    return rng.sample(examples, min(count, len(examples)))


def answers(models: sb.Pair, examples: list, method: sb.Method, options: dict) -> list[str]:
    prompts = [one.prompt for one in examples]
    return [
        one.text for one in sb.generate(models, prompts, method, seed=0, max_new_tokens=80, batch_size=64, **options)
    ]


def acceptance(models: sb.Pair, prompts: list[str]) -> float:
    """Accepted draft tokens of those that were judged, in speculative sampling."""
    request = Request.of(models, prompts, sb.speculative_sampling(4), Settings(max_new_tokens=80), seed=0)
    accepted = judged = 0
    for turns in decode(models.target, request.sessions):
        for _, turn in turns:
            accepted += turn.verdict.accepted
            judged += min(turn.verdict.accepted + 1, turn.forest.siblings.size)
    return accepted / judged


def costs(models: sb.Pair) -> tuple[float, float]:
    """Milliseconds of a target pass over a forest of 28 nodes and of a draft step of 6, medians, interleaved."""
    prompt = models.tokenizer("Der alte Mann füttert jeden Morgen die Vögel.")["input_ids"]
    root = Forest.rooted([prompt[-1]])
    wide = root.grown(range(10, 38), [0] * 6 + list(range(1, 23)))
    narrow = root.grown(range(10, 16), [0] * 6)
    times: dict[str, list[float]] = {"target": [], "draft": []}
    for _ in range(60):
        for name, lm, forest in (("target", models.target, wide), ("draft", models.draft, narrow)):
            owner = SimpleNamespace(prompt=prompt, state={})  # all that a model needs of a session
            lm.extend([owner], [root])
            began = time.perf_counter()
            lm.extend([owner], [forest])
            times[name].append(1000 * (time.perf_counter() - began))
            lm.close(owner)
    return statistics.median(times["target"]), statistics.median(times["draft"])


if __name__ == "__main__":
    typer.run(main)
