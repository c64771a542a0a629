"""Metrics of the quality of texts: BLEU and exact match, against one reference per text."""

from collections.abc import Sequence
from importlib.util import find_spec

from specbeam.errors import MissingPackage


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of texts that equal their reference, without spaces around them."""
    return sum(hits(texts, references)) / len(texts)


def hits(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return 1 for each text that equals its reference without spaces around them, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(texts, references, strict=True)]


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the corpus BLEU of sacrebleu, 0 to 100."""
    check_bleu()
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def bleu_counts(texts: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """Return the counts of each text that `bleu` adds up over texts.

    They are the matches by size of n-gram, the n-grams by size, and the lengths of the text and of its reference.
    """
    check_bleu()
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)  # the setting for single texts; the counts are the same
    scores = [metric.sentence_score(text, [answer]) for text, answer in zip(texts, references, strict=True)]
    return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]


def bleu_of(counts: Sequence[float]) -> float:
    """Return the corpus BLEU, 0 to 100, from the sums over texts of `bleu_counts`."""
    from sacrebleu.metrics import BLEU

    *grams, length, reference = [round(count) for count in counts]
    half = len(grams) // 2
    return float(BLEU.compute_bleu(grams[:half], grams[half:], length, reference, smooth_method="exp").score)


def has_bleu() -> bool:
    """Return whether sacrebleu is installed."""
    return find_spec("sacrebleu") is not None


def check_bleu() -> None:
    """Raise `MissingPackage` if sacrebleu is not installed."""
    if not has_bleu():
        raise MissingPackage("BLEU is computed by sacrebleu: pip install 'specbeam[bench]'")
