"""Further draft models that a recipe takes as settings, loaded and checked like the draft of a pair."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.engines.choices import is_rounding
from specbeam.models.engines import MAPPING
from specbeam.models.heads.read import is_head
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.drafts import DraftOptions, GivenDraft, draft_of
from specbeam.models.loading.language_models import ShareFrom, fingerprint
from specbeam.models.loading.models import bundled_folder, model_of
from specbeam.models.loading.vocabularies import tokens_in_common

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class FurtherDrafts:
    """Loads further drafts for a target; see `HuggingFaceLM.further_draft`.

    Attributes:
        tokenizer: the target's, or None.
        source: the `target` argument of `load`.
        dtype, device, check, share_from, engine: see `load`.
    """

    target: HuggingFaceLM
    tokenizer: Any
    source: Any
    dtype: "str | torch.dtype"
    device: torch.device
    check: bool
    share_from: ShareFrom
    engine: str = "auto"

    def __call__(self, source: Any, kept: dict[Any, Any]) -> LM:
        """Return the language model of a further draft.

        Args:
            source: a model object, a folder or a hub id.
            kept: models of earlier calls for the same recipe and target; updated in place.

        Raises the errors of `load`, and `BadSetting` if `source` is something else.
        """
        source = bundled_folder(source, "draft")
        key = source if isinstance(source, torch.nn.Module) else str(source)
        model, state, made = kept[key] if key in kept else (self._model(source), None, None)
        if made is not None and state == fingerprint(model):
            return made
        shared = tokens_in_common(self.target.model, model, self.tokenizer, self.source, source)
        options = DraftOptions(self.check, share_from=self.share_from, engine=self.engine)
        made = draft_of(GivenDraft(model), model, self.target, self.tokenizer, options, shared)
        assert made is not None
        kept[key] = (model, fingerprint(model), made)
        return made

    def _model(self, source: Any) -> "PreTrainedModel":
        """Return the model object of a draft. Raises an error for draft heads and other values."""
        is_name = isinstance(source, (str, Path))
        if not is_name and not isinstance(source, torch.nn.Module):
            raise BadSetting(
                f"a further draft is {source!r}; it must be a model object, a folder, a hub id or a language model"
            )
        if is_rounding(source) or source == "swift":
            raise BadSetting(
                f"a further draft is {source!r}, which is the target itself; give it to load(draft={source!r})"
            )
        if is_head(source):
            name = source if is_name else type(source).__name__
            raise NotSupported(
                f"{name} is a draft head, and further drafts must be models; give a head to load(draft=...)"
            )
        return model_of(source, self.dtype, self.device, may_map=self.engine in MAPPING)
