"""What `generate` hands over, checked and in our words."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from specbeam.errors import NotSupported
from specbeam.options.settings import Settings

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

_KNOWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
# What `generate` adds by itself, or what changes nothing.
_PLACEHOLDERS = {"use_cache", "logits_to_keep", "cache_position"}
_LOOKED_AT = {"attention_mask", "past_key_values", "position_ids", "token_type_ids"}
_KEPT_BY_NONE = ("output_logits", "output_attentions", "output_hidden_states")
_OTHER_WAYS = (
    "guidance_scale", "num_beam_groups", "diversity_penalty", "penalty_alpha", "constraints", "force_words_ids",
    "dola_layers"
)  # fmt: skip


@dataclass
class Call:
    """One call of a custom_generate function.

    Raises:
        NotSupported: it asks for what would be ignored.
    """

    model: "PreTrainedModel"
    input_ids: torch.Tensor
    processors: "LogitsProcessorList | None"
    criteria: "StoppingCriteriaList | None"
    given_config: "GenerationConfig | None"
    model_kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: "PreTrainedModel", input_ids: torch.Tensor, given: dict[str, Any]) -> "Call":
        """From what `generate` passes by name."""
        rest = dict(given)
        processors = rest.pop("logits_processor", None)
        criteria = rest.pop("stopping_criteria", None)
        return cls(model, input_ids, processors, criteria, rest.pop("generation_config", None), rest)

    def __post_init__(self) -> None:
        strange = [type(one).__name__ for one in self.criteria or [] if type(one).__name__ not in _KNOWN_CRITERIA]
        if strange:
            raise NotSupported(
                f"stopping criteria {', '.join(strange)} are not honoured; use max_new_tokens and eos_token_id"
            )
        for name in _KEPT_BY_NONE:
            if getattr(self.config, name, None):
                raise NotSupported(f"{name} is not honoured; leave it out")
        for name in _OTHER_WAYS:
            if getattr(self.config, name, None) not in (None, 0, 0.0, 1):
                raise NotSupported(f"{name} is not honoured; leave it out")
        given = {name for name, value in self.model_kwargs.items() if value is not None}
        unknown = given - _PLACEHOLDERS - _LOOKED_AT
        if unknown:
            raise NotSupported(f"{', '.join(sorted(unknown))} would be ignored; leave it out")
        self._check_inputs()

    def _check_inputs(self) -> None:
        cache, kinds = (self.model_kwargs.get(name) for name in ("past_key_values", "token_type_ids"))
        if cache is not None and cache.get_seq_length():
            raise NotSupported(
                f"past_key_values holds {cache.get_seq_length()} tokens; specbeam keeps a cache of its own: leave it out"
            )
        if kinds is not None and bool(kinds.any()):
            raise NotSupported("token_type_ids would be ignored; leave it out")
        places, mask = (self.model_kwargs.get(name) for name in ("position_ids", "attention_mask"))
        if places is not None:
            seen = torch.ones_like(self.input_ids) if mask is None else mask.bool().long()
            if not torch.equal(places * seen, (seen.cumsum(-1) - 1) * seen):
                raise NotSupported("position_ids other than 0, 1, 2, ... are not honoured; leave it out")

    @property
    def config(self) -> "GenerationConfig":
        assert self.given_config is not None, "transformers hands over a generation config"
        return self.given_config

    @property
    def beams(self) -> int:
        return int(self.config.num_beams or 1)

    @property
    def answers(self) -> int:
        """Return sequences per prompt."""
        return int(self.config.num_return_sequences or 1)

    @property
    def repeats(self) -> int:
        """How often `generate` has repeated each prompt before it called us."""
        return max(self.beams, self.answers)

    @property
    def greedy(self) -> bool:
        return not self.config.do_sample

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64[prompts, length]: each prompt once, padded."""
        repeats = self.repeats
        ids = self.input_ids
        if len(ids) % repeats == 0 and bool((ids.view(-1, repeats, ids.shape[1]) == ids[::repeats, None]).all()):
            return ids[::repeats]
        return ids

    def prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows without padding, and their padding."""
        rows = self.rows
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return [row.tolist() for row in rows], [[] for _ in rows]
        pairs = list(zip(rows, mask[:: len(mask) // len(rows)].bool(), strict=True))
        return [row[keep].tolist() for row, keep in pairs], [row[~keep].tolist() for row, keep in pairs]

    def settings(self) -> Settings:
        config = self.config
        room = config.max_new_tokens
        return Settings(
            max_new_tokens=int(config.max_length) - self.input_ids.shape[1] if room is None else int(room),
            num_return_sequences=self.answers,
            eos_token_id=[] if config.eos_token_id is None else config.eos_token_id,  # not the tokenizer's
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=config.early_stopping or False,
        )

    @property
    def filler(self) -> int:
        """What stands behind a text that is shorter than others; as in `generate`, whose beams are not padded with 0."""
        eos = self.config.eos_token_id
        first = (eos[0] if eos else None) if isinstance(eos, (list, tuple)) else eos
        pad = self.config.pad_token_id
        if self.beams > 1:
            return int(pad or first) if first is not None else -1
        return int(pad if pad is not None else first if first is not None else 0)
