"""The options `--grow`, `--grow-draft` and `--grow-vocab`: pairs whose models are enlarged before they are timed."""

import re
from dataclasses import replace
from typing import Any

from specbeam.doors.cli.common import quiet_load
from specbeam.engines.eligibility import reads_sources
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.bench.widen_head import grown_head
from specbeam.lab.bench.widen_model import grown
from specbeam.lab.bench.widen_reader import grown_reader
from specbeam.lab.bench.widen_vocabulary import with_words
from specbeam.models.heads.head import Head
from specbeam.models.heads.read import head_model
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair, load
from specbeam.models.quantised import is_rounding


def grown_pair(
    model: str, draft: str | None, grow: str | None, grow_draft: str | None = None, quantize: Any = None,
    grow_vocab: str | None = None, sources: bool = False,
) -> Pair:  # fmt: skip
    """Load a pair, and enlarge its models without changing what they compute.

    Args:
        model, draft: paths or hub ids of target and draft.
        grow, grow_draft: numbers of parameters like "100M"; None: the model stays as it is. Those of the new words count.
        quantize: as for `specbeam.load`.
        grow_vocab: the number of words of both models, like "128K"; None: it stays as it is.
        sources: whether the command takes encoder-decoder models; see `quiet_load`.
    """
    if grow is None and grow_draft is None and grow_vocab is None:
        return quiet_load(model, draft, quantize=quantize, sources=sources)
    pair = quiet_load(model, draft, sources=sources)
    target = pair.target_model
    if grow_vocab is not None and reads_sources(target):
        raise BadSetting(
            f"--grow-vocab is for decoder-only models, and {type(target).__name__} has an encoder; leave it out"
        )
    draft_model: Any = pair.draft_model
    if is_rounding(draft):
        if grow_draft is not None:
            raise BadSetting(f"--draft {draft} is the target itself, which --grow enlarges; leave --grow-draft out")
        return load(_enlarged(target, grow, grow_vocab), draft, pair.tokenizer, quantize=quantize)
    head = getattr(pair.draft, "head", None)
    if head is not None:
        return _with_head(pair, head, grow, grow_draft, quantize, grow_vocab)
    if grow_vocab is not None and draft_model is not None:
        draft_model = with_words(draft_model, parameters(grow_vocab, "--grow-vocab"))
    target = _enlarged(target, grow, grow_vocab)
    if grow_draft is not None:
        if draft_model is None:
            raise BadSetting("--grow-draft enlarges the draft model, and there is none; give --draft")
        draft_model = _grown(draft_model, parameters(grow_draft, "--grow-draft"))
    return load(target, draft_model, pair.tokenizer, quantize=quantize)


def _with_head(
    pair: Pair, head: Head, grow: str | None, grow_draft: str | None, quantize: Any, grow_vocab: str | None
) -> Pair:
    """Return a pair whose target is enlarged, and whose draft is a head that grows with it.

    Raises `BadSetting` for heads that do not, and for options that change the words or a draft model.
    """
    if grow is None or grow_draft is not None or grow_vocab is not None:
        raise BadSetting(
            "--grow-draft and --grow-vocab change models, and the draft is a head, which has the target's words: leave them "
            "out, or take a draft model"
        )
    target = grown(pair.target_model, parameters(grow))
    try:
        larger = grown_head(head, target)
    except NotSupported as error:
        raise BadSetting(f"--grow enlarges the target, and the draft fits the small one alone: {error}") from error
    alone = load(target, None, pair.tokenizer, quantize=quantize)
    assert isinstance(alone.target, HuggingFaceLM)
    return replace(alone, draft=head_model(larger, alone.target))


def _enlarged(target: Any, grow: str | None, grow_vocab: str | None) -> Any:
    """Return the target with the vocabulary and the size that these options ask for."""
    if grow_vocab is not None:
        target = with_words(target, parameters(grow_vocab, "--grow-vocab"))
    if grow is not None:
        target = _grown(target, parameters(grow))
    return target


def _grown(model: Any, count: int) -> Any:
    """Return a model of about this many weights with the same function."""
    return grown_reader(model, count) if reads_sources(model) else grown(model, count)


def parameters(text: str, option: str = "--grow") -> int:
    """Return the number that a text like "100M", "1.5B", "128K" or "5000" stands for.

    Raises `BadSetting`, which names the option, if the text is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise BadSetting(f"{option} is {text!r}; it must be a number like 128K, 100M or 1.5B")
    return round(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2].upper()])
