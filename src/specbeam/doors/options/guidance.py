"""Classifier-free guidance: a second pass of the target without the prompt corrects its rows."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64

from specbeam.engines.cache_names import cache_argument, cache_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Guidance:
    """A logits processor that moves log-probabilities away from those without the prompt, by a factor.

    As in transformers, the text without the prompt begins with the prompt's last token (arXiv 2306.17806).

    Args:
        model: the target, as transformers runs it.
        scale: the factor; 1 changes nothing.
        prompt_length: number of tokens at the start of each path.
        by_place: True: as in transformers' beam modes, the second pass is not reordered with the beams: its text consists of
            the tokens of the same row at each step. This needs one call per step with all live beams. False: each path has
            its own text, in any order of calls.
    """

    def __init__(self, model: "PreTrainedModel", scale: float, prompt_length: int, by_place: bool = False) -> None:
        self.model = model
        self.scale = scale
        self.prompt_length = prompt_length
        self.by_place = by_place
        self._paths: list[tuple[int, ...]] = []  # the paths in the cache, by row
        self._cache: Any = None
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1

    def __call__(
        self, input_ids: Int64[torch.Tensor, "paths length"], scores: Float[torch.Tensor, "paths vocab"]
    ) -> Float[torch.Tensor, "paths vocab"]:
        """Return the guided scores of rows; paths start with the prompt."""
        logp = scores.log_softmax(-1)
        without = self._without_prompt(input_ids[:, self.prompt_length - 1 :]).to(scores)
        return self.scale * (logp - without) + without

    def _without_prompt(self, paths: Int64[torch.Tensor, "paths length"]) -> Float[torch.Tensor, "paths vocab"]:
        """Return the log-probabilities after each path. Paths one token longer than in the last call reuse its cache."""
        found = [tuple(path) for path in paths.tolist()]
        parents = self._parents(found)
        cache = None
        if parents is not None:
            cache = self._cache
            cache.reorder_cache(torch.tensor(parents, device=self.model.device))
            paths = paths[:, -1:]
        ids = paths.to(self.model.device)
        output = self.model(input_ids=ids, **cache_argument(self.model, cache), **self._options)
        self._cache = cache_of(output)
        self._paths = found
        logp: torch.Tensor = output.logits[:, -1].float().log_softmax(-1)
        return logp

    def _parents(self, paths: list[tuple[int, ...]]) -> list[int] | None:
        """Return the cache row that each path extends; None if some path extends none."""
        if self.by_place:
            if len(paths[0]) == 1:
                return None
            return [row if row < len(self._paths) else 0 for row in range(len(paths))]
        rows = {path: row for row, path in enumerate(self._paths)}
        parents = [rows.get(path[:-1]) for path in paths]
        known = [row for row in parents if row is not None]
        return known if len(known) == len(paths) else None
