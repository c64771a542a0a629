"""The two jobs of the bundled pair as (prompt, answer) texts, read from packed files.

German to English: the prompt is the German sentence as it stands. Letters to sounds: the prompt is ``<sounds>``
followed by the spelled word, the answer its ARPAbet sounds.
"""

import gzip
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Example:
    prompt: str
    answers: tuple[str, ...]  # every accepted answer; training uses each, scoring any


def spelled(word: str) -> str:
    """``dog`` -> ``<sounds> d o g``: one token per letter."""
    return "<sounds> " + " ".join(word.lower())


def translations(folder: Path, split: str) -> list[Example]:
    """German sentences with the English one they were paired with; columns are English, then one or more German."""
    rows = (line.split("\t") for line in _lines(folder / "tatoeba_deu_eng", split))
    return [Example(german, (english,)) for english, *germans in rows for german in germans]


def sounds(folder: Path, split: str) -> list[Example]:
    rows = (line.split("\t") for line in _lines(folder / "cmudict", split))
    return [Example(spelled(word), tuple(spoken.split(" | "))) for word, spoken in rows]


def joined_at_random(sentences: list[Example], part: float, seed: int) -> list[Example]:
    """Join a part of the sentences to paragraphs of 2 to 16, so that models learn to keep their place."""
    rng = random.Random(seed)
    shuffled = rng.sample(sentences, len(sentences))
    cut = int(part * len(shuffled))
    loose, examples = shuffled[:cut], shuffled[cut:]
    while loose:
        size = rng.choices(range(2, 17), weights=[0.7**n for n in range(15)])[0]
        examples.append(_joined(loose[:size]))
        loose = loose[size:]
    return examples


def _joined(parts: list[Example]) -> Example:
    return Example(" ".join(part.prompt for part in parts), (" ".join(part.answers[0] for part in parts),))


def _lines(folder: Path, split: str) -> Iterator[str]:
    """Lines of ``<split>.tsv.xz`` or ``<split>.tsv.gz``, whichever is there."""
    for ending, opened in ((".tsv.xz", lzma.open), (".tsv.gz", gzip.open)):
        path = folder / (split + ending)
        if path.exists():
            with opened(path, "rt", encoding="utf-8") as file:
                yield from (line.rstrip("\n") for line in file)
            return
    raise FileNotFoundError(f"no {split}.tsv.xz or {split}.tsv.gz in {folder}")
