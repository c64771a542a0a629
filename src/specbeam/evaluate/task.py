"""What a text is worth to its reader: BLEU and exact match against one reference each."""

from collections.abc import Sequence
from importlib.util import find_spec

from specbeam.errors import MissingPackage


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    """Share of texts that are their reference, spaces around them left out."""
    return sum(hits(texts, references)) / len(texts)


def hits(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """1 for each text that is its reference, else 0."""
    return [float(text.strip() == answer.strip()) for text, answer in zip(texts, references, strict=True)]


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu, 0 to 100."""
    check_bleu()
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def bleu_counts(texts: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """What `bleu` adds up over texts: matches and n-grams by size, length of the text and of its reference."""
    check_bleu()
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)  # of single texts; the counts are the same
    found = [metric.sentence_score(text, [answer]) for text, answer in zip(texts, references, strict=True)]
    return [[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in found]


def bleu_of(counts: Sequence[float]) -> float:
    """Corpus BLEU from sums of `bleu_counts`."""
    from sacrebleu.metrics import BLEU

    *grams, length, reference = [round(count) for count in counts]
    half = len(grams) // 2
    return float(BLEU.compute_bleu(grams[:half], grams[half:], length, reference, smooth_method="exp").score)


def check_bleu() -> None:
    if find_spec("sacrebleu") is None:
        raise MissingPackage("BLEU is computed by sacrebleu: pip install 'specbeam[bench]'")
