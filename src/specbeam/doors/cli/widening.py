"""The options `--grow`, `--grow-draft` and `--grow-vocab`: models that are enlarged before they are timed."""

from dataclasses import dataclass, replace
from typing import Any

from specbeam.doors.cli.common import quiet_load
from specbeam.doors.cli.options import parameters
from specbeam.engines.choices import is_rounding
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


@dataclass(frozen=True)
class GrownSizes:
    """The sizes to which models are enlarged, as texts like "100M"; None: unchanged.

    Attributes:
        grow: number of weights of the target, new tokens included.
        grow_draft: number of weights of the draft model, new tokens included.
        grow_vocab: number of tokens of both models.
    """

    grow: str | None = None
    grow_draft: str | None = None
    grow_vocab: str | None = None


def grown_pair(model: str, draft: str | None, growth: GrownSizes, sources: bool = False, **options: Any) -> Pair:
    """Load a pair, and enlarge its models without changing their outputs.

    Args:
        model, draft: paths or hub ids of target and draft.
        growth: the sizes.
        sources: whether the command supports encoder-decoder models; see `quiet_load`.
        options: options of `specbeam.load`.
    """
    if growth == GrownSizes():
        return quiet_load(model, draft, sources=sources, **options)
    grow_draft = growth.grow_draft
    grow_vocab = growth.grow_vocab
    pair = quiet_load(model, draft, sources=sources)
    target = pair.target_model
    if grow_vocab is not None and reads_sources(target):
        raise BadSetting(
            f"--grow-vocab is for decoder-only models, and {type(target).__name__} has an encoder; leave it out"
        )
    draft_model: Any = pair.draft_model
    if is_rounding(draft):
        if grow_draft is not None:
            raise BadSetting(f"--draft {draft} is the target itself, enlarged by --grow; leave --grow-draft out")
        return load(_enlarged(target, growth), draft, pair.tokenizer, **options)
    head = getattr(pair.draft, "head", None)
    if head is not None:
        return _with_head(pair, head, growth, options)
    if grow_vocab is not None and draft_model is not None:
        draft_model = with_words(draft_model, parameters(grow_vocab, "--grow-vocab"))
    target = _enlarged(target, growth)
    if grow_draft is not None:
        if draft_model is None:
            raise BadSetting("--grow-draft needs a draft model; give --draft")
        draft_model = _grown(draft_model, parameters(grow_draft, "--grow-draft"))
    return load(target, draft_model, pair.tokenizer, **options)


def _with_head(pair: Pair, head: Head, growth: GrownSizes, options: dict[str, Any]) -> Pair:
    """Return a pair with an enlarged target and an equally enlarged head.

    Raises `BadSetting` for heads that cannot be enlarged, and for other options than `grow`.
    """
    if growth.grow is None or growth != GrownSizes(growth.grow):
        raise BadSetting(
            "the draft is a head, which has the target's size and vocabulary; leave --grow-draft and --grow-vocab out, or "
            "give a draft model"
        )
    target = grown(pair.target_model, parameters(growth.grow))
    try:
        larger = grown_head(head, target)
    except NotSupported as error:
        raise BadSetting(f"--grow enlarges the target, and the draft fits only the original one: {error}") from error
    alone = load(target, None, pair.tokenizer, **options)
    assert isinstance(alone.target, HuggingFaceLM)
    return replace(alone, draft=head_model(larger, alone.target))


def _enlarged(target: Any, growth: GrownSizes) -> Any:
    """Return the target with the vocabulary and the size of the options."""
    if growth.grow_vocab is not None:
        target = with_words(target, parameters(growth.grow_vocab, "--grow-vocab"))
    if growth.grow is not None:
        target = _grown(target, parameters(growth.grow))
    return target


def _grown(model: Any, count: int) -> Any:
    """Return a model with about this number of weights and the same outputs."""
    return grown_reader(model, count) if reads_sources(model) else grown(model, count)
