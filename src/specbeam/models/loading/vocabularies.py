"""Comparison of the draft's tokens with the target's, by their tokenizers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from jaxtyping import Bool

from specbeam.core.errors import SpecbeamError, VocabularyMismatch, warn
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.models.checkpoints.folders import BUNDLED
from specbeam.models.huggingface import vocab_of
from specbeam.models.loading.known_folders import tokenizer_at_hand
from specbeam.models.loading.language_models import OnModel
from specbeam.models.loading.tokenizers import has_tokenizer_files, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_PADDING = 1024  # vocabularies are padded to multiples of at most this number
_ADVICE = "choose a draft of the same family, trained with the target's tokenizer"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model: their number, and their spelling by its tokenizer.

    Attributes:
        rows: number of tokens that the model can read and write.
        tokenizer: None if no spelling is known.
    """

    rows: int
    tokenizer: Any

    @cached_property
    def words(self) -> dict[int, str]:
        """The spelling of each token that both the tokenizer and the model have."""
        return {token: word for word, token in self.tokenizer.get_vocab().items() if 0 <= token < self.rows}

    @cached_property
    def added(self) -> set[int]:
        """The special tokens and other tokens that were added after the tokenizer was trained."""
        return {*self.special, *(int(token) for token in self._decoder_of_added)}

    @cached_property
    def special(self) -> set[int]:
        """The special tokens, such as end-of-text tokens and chat markers."""
        named = {int(token) for token in getattr(self.tokenizer, "all_special_ids", ())}
        return named | {int(token) for token, one in self._decoder_of_added.items() if getattr(one, "special", False)}

    @property
    def _decoder_of_added(self) -> dict[Any, Any]:
        return getattr(self.tokenizer, "added_tokens_decoder", {})


@dataclass(frozen=True)
class ComparedTokens:
    """The result of comparing a draft's tokens with a target's.

    Attributes:
        shared: the common tokens; None: the vocabularies are the same.
        warning: a warning for users; "" for none.
    """

    shared: SharedTokens | None
    warning: str = ""


def tokens_in_common(
    target: "PreTrainedModel", draft: "PreTrainedModel", tokenizer: Any, target_source: Any, draft_source: Any
) -> SharedTokens | None:
    """Return the tokens that a draft shares with its target; None if their vocabularies are the same.

    Ids that both models have are compared. Ids of only one model, such as padding rows of an embedding and tokens added at
    the end, are never drafted.

    Args:
        tokenizer: the target's, as `load` returns it; None: the tokenizer in the model's folder, if there is one.
        target_source, draft_source: arguments of `load`: a path, a hub id or a model object.

    Raises `VocabularyMismatch` if ordinary tokens differ, or if sizes differ and nothing can be compared. Warns if special
    tokens have other names, and if nothing can be compared but padding may explain different sizes.
    """
    draft_source = _with_tokenizer(draft_source)
    if draft is target or _is_same_name(draft_source, target_source):
        return None
    sizes = (vocab_of(target), vocab_of(draft))
    name = getattr(tokenizer, "name_or_path", "")
    key = (ref(target), sizes, (name, len(tokenizer)) if name else tokenizer)
    known: OnModel | None = vars(draft).get("_specbeam_compared")
    if known is None or known.key != key:
        known = OnModel(key, _compared(target, draft, tokenizer, target_source, draft_source))
        object.__setattr__(draft, "_specbeam_compared", known)
    if known.found.warning:
        warn(known.found.warning)
    return known.found.shared


def _compared(
    target: "PreTrainedModel", draft: "PreTrainedModel", tokenizer: Any, target_source: Any, draft_source: Any
) -> ComparedTokens:
    """Compare the draft's vocabulary with the target's; see `tokens_in_common`."""
    own_tokenizer = _tokenizer_of(target, target_source) if tokenizer is None else tokenizer
    own = Vocabulary(vocab_of(target), _with_words(own_tokenizer))
    other = Vocabulary(_rows_of(draft), _with_words(_tokenizer_of(draft, draft_source)))
    both_spell = own.tokenizer is not None and other.tokenizer is not None
    known, warning = _known_by_words(own, other) if both_spell else _known_by_size(own, other)
    is_whole = known.all() and len(known) == vocab_of(draft)
    return ComparedTokens(None if is_whole else SharedTokens(known, _stand_in(other, draft)), warning)


def _is_same_name(first: Any, second: Any) -> bool:
    return isinstance(first, (str, Path)) and isinstance(second, (str, Path)) and str(first) == str(second)


def _with_tokenizer(source: Any) -> Any:
    """Return the folder of the bundled target for that of the bundled draft, whose tokenizer is there."""
    is_bundled = isinstance(source, (str, Path)) and Path(source) == BUNDLED / "draft"
    return BUNDLED / "target" if is_bundled else source


def _rows_of(draft: "PreTrainedModel") -> int:
    """Return the number of tokens that a draft can both read and write."""
    if reads_sources(draft):
        return vocab_of(draft)
    embedding: Any = draft.get_input_embeddings()
    return min(vocab_of(draft), int(embedding.weight.shape[0]))


def _tokenizer_of(model: "PreTrainedModel", source: Any) -> Any:
    """Return the tokenizer from the folder or hub repository of a model; None if there is none.

    For a model object, nothing is downloaded. Raises `MissingFile` if a tokenizer cannot be read, `MissingPackage` if it
    needs a missing package.
    """
    is_object = isinstance(source, torch.nn.Module)
    name = str(_with_tokenizer(getattr(model, "name_or_path", "") if is_object else source))
    if not name or not has_tokenizer_files(name, fetch=not is_object):
        return None
    try:
        found = read_tokenizer(name, fetch=False) if is_object else tokenizer_at_hand(name)
    except SpecbeamError:
        if is_object:  # the folder that it came from may have changed since
            return None
        raise
    return found


def _with_words(tokenizer: Any) -> Any:
    """Return a tokenizer if it can list its tokens, otherwise None."""
    return tokenizer if hasattr(tokenizer, "get_vocab") else None


def _known_by_size(own: Vocabulary, other: Vocabulary) -> tuple[Bool[np.ndarray, " vocab"], str]:
    """Return which of the target's tokens a draft has, judged by sizes only, and a warning or "".

    Raises `VocabularyMismatch` unless padding explains a difference.
    """
    if own.rows == other.rows:
        return np.ones(own.rows, dtype=bool), ""
    sizes = f"draft has {other.rows} tokens, target has {own.rows}"
    tokenizer = own.tokenizer or other.tokenizer
    words = len(tokenizer.get_vocab()) if tokenizer is not None else None
    common = min(own.rows, other.rows)
    holds_all = words is not None and words <= common
    if not holds_all and not _is_padded(common, max(own.rows, other.rows)):
        raise VocabularyMismatch(
            f"{sizes}, and without both tokenizers their tokens cannot be compared; give target and draft as folders or hub "
            f"ids with their tokenizers, or {_ADVICE}"
        )
    warning = (
        f"{sizes}, and without both tokenizers their tokens cannot be compared: the first {common} are assumed to be the "
        "same, and the others are not drafted. If they are not the same, texts stay right, but drafts are rejected and cost "
        "time; give both models as folders or hub ids with their tokenizers"
    )
    return np.arange(own.rows) < common, warning


def _is_padded(smaller: int, larger: int) -> bool:
    """Return whether the larger vocabulary may be the smaller one padded to a multiple of a power of two."""
    unit = min(larger & -larger, MOST_PADDING)
    return larger - smaller < unit


def _known_by_words(own: Vocabulary, other: Vocabulary) -> tuple[Bool[np.ndarray, " vocab"], str]:
    """Return which of the target's tokens a draft has, judged by their spelling, and a warning or "".

    Raises `VocabularyMismatch` if ordinary tokens differ.
    """
    warning = "" if own.words == other.words else _warning_of_spelling(own, other)
    if own.rows == other.rows and own.words.keys() == other.words.keys():
        return np.ones(own.rows, dtype=bool), warning  # both have the same padding
    common = [*(own.words.keys() & other.words.keys())]
    known = np.zeros(own.rows, dtype=bool)
    known[common] = True
    return known, warning


def _warning_of_spelling(own: Vocabulary, other: Vocabulary) -> str:
    """Return a warning if special tokens have other names, otherwise "". Raises `VocabularyMismatch` for ordinary tokens."""
    common = sorted(own.words.keys() & other.words.keys())
    differing = [token for token in common if own.words[token] != other.words[token]]
    special = own.special | other.special
    added = own.added & other.added
    ordinary = [token for token in differing if token not in special or token not in added]
    if ordinary or not common:
        first = _difference(own, other, ordinary[0]) if ordinary else "they have no id in common"
        raise VocabularyMismatch(
            f"draft has {other.rows} tokens, target has {own.rows}, and the tokens differ (first difference: {first}); "
            f"{_ADVICE}"
        )
    if not differing:
        return ""
    return (
        f"the draft's tokenizer has other names for {len(differing)} of the target's special tokens (first difference: "
        f"{_difference(own, other, differing[0])}). Equal ids are assumed to be the same token: texts stay right, but "
        "drafts with these tokens may be rejected"
    )


def _difference(own: Vocabulary, other: Vocabulary, token: int) -> str:
    return f"token {token} is {own.words[token]!r} for the target and {other.words[token]!r} for the draft"


def _stand_in(vocabulary: Vocabulary, draft: "PreTrainedModel") -> int:
    """Return the token that a draft reads in place of tokens that it does not know: its unknown token, or token 0 or 1.

    The padding token does not serve: some models count no position for it.
    """
    unknown = getattr(vocabulary.tokenizer, "unk_token_id", None)
    if isinstance(unknown, int) and 0 <= unknown < vocabulary.rows:
        return unknown
    return 1 if draft.config.get_text_config().pad_token_id == 0 else 0
