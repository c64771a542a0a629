"""What a text is worth to its reader: BLEU and exact match against one reference each."""

from collections.abc import Sequence

from specbeam.errors import MissingPackage


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    """Share of texts that are their reference, spaces around them left out."""
    return sum(text.strip() == answer.strip() for text, answer in zip(texts, references, strict=True)) / len(texts)


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu, 0 to 100."""
    try:
        import sacrebleu
    except ImportError as error:
        raise MissingPackage("BLEU is computed by sacrebleu: pip install 'specbeam[bench]'") from error
    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)
