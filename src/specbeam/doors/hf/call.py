"""The arguments that `generate` passes to a custom_generate function, checked and translated."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.names import hint
from specbeam.doors.options.generation_config import contradiction, read
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import config_names, warper_names
from specbeam.engines.cache_names import NAMES
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.source import Source
from specbeam.errors import BadSetting, NotSupported
from specbeam.recipes.method import Method

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

_KNOWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
# Arguments of the model that `generate` adds itself, or that have no effect.
_WITHOUT_EFFECT = {"use_cache", "logits_to_keep", "cache_position"}
_CHECKED = {"attention_mask", *NAMES, "position_ids", "token_type_ids"}
_OF_SOURCES = {"encoder_outputs", "decoder_attention_mask"}  # of encoder-decoder models
# Unsupported outputs.
_OUTPUTS = ("output_logits", "output_attentions", "output_hidden_states")


@dataclass
class Call:
    """The arguments of a call of a custom_generate function.

    Raises:
        NotSupported: an argument would be ignored.
    """

    model: "PreTrainedModel"
    input_ids: torch.Tensor  # int64[rows, length]: each prompt `repeats` times, padded
    processors: "LogitsProcessorList | None"
    criteria: "StoppingCriteriaList | None"
    given_config: "GenerationConfig | None"
    model_kwargs: dict[str, Any]
    own_names: Collection[str] = ()  # of the function's own arguments, for hints

    @classmethod
    def of(
        cls, model: "PreTrainedModel", input_ids: torch.Tensor, given: dict[str, Any], own_names: Collection[str] = ()
    ) -> "Call":
        """Return the call with the arguments that `generate` passes by name."""
        model_kwargs = dict(given)
        processors = model_kwargs.pop("logits_processor", None)
        criteria = model_kwargs.pop("stopping_criteria", None)
        config = model_kwargs.pop("generation_config", None)
        return cls(model, input_ids, processors, criteria, config, model_kwargs, own_names)

    def __post_init__(self) -> None:
        criteria = [type(criterion).__name__ for criterion in self.criteria or []]
        unsupported = [name for name in criteria if name not in _KNOWN_CRITERIA]
        if unsupported:
            raise NotSupported(
                f"stopping criteria {', '.join(unsupported)} are not supported; use max_new_tokens and eos_token_id"
            )
        for name in _OUTPUTS:
            if getattr(self.config, name, None):
                raise NotSupported(f"{name} is not supported; leave it out")
        # `generate` has already applied token healing, and a time limit is one of the criteria.
        strategies = read(self.config, (*config_names(), *warper_names(), "token_healing", "max_time"))
        if strategies.refused:
            raise NotSupported(f"{strategies.reason} is not supported; leave it out")
        if self.config.guidance_scale not in (None, 1):
            raise NotSupported("guidance_scale is not supported here; leave it out, or use sb.generate")
        given = {name for name, value in self.model_kwargs.items() if value is not None}
        known = _WITHOUT_EFFECT | _CHECKED | (_OF_SOURCES if self.reads else set())
        unknown = given - known
        if unknown:
            first = min(unknown)
            near = hint(first, self.own_names) if first not in self.own_names else ""
            raise NotSupported(f"{', '.join(sorted(unknown))} would be ignored; leave it out{near}")
        self._check_inputs()

    def check_method(self, method: Method) -> None:
        """Raise `BadSetting` if num_beams or do_sample of `generate` contradicts the method."""
        reason = contradiction(self.config, method.name, method.beams, not (method.greedy or self.greedy))
        if reason is not None:
            raise BadSetting(reason)

    def _check_inputs(self) -> None:
        """Raise `NotSupported` for a non-empty cache, for token types, and for positions other than 0, 1, 2, ..."""
        for name in NAMES:
            cache = self.model_kwargs.get(name)
            if cache is not None and cache.get_seq_length():
                raise NotSupported(
                    f"{name} has {cache.get_seq_length()} tokens; specbeam has its own cache: leave it out"
                )
        token_types = self.model_kwargs.get("token_type_ids")
        if token_types is not None and bool(token_types.any()):
            raise NotSupported("token_type_ids would be ignored; leave it out")
        positions = self.model_kwargs.get("position_ids")
        mask = self.prompt_mask
        if positions is not None:
            visible = torch.ones_like(self.input_ids) if mask is None else mask.bool().long()
            if not torch.equal(positions * visible, (visible.cumsum(-1) - 1) * visible):
                raise NotSupported("position_ids other than 0, 1, 2, ... are not supported; leave them out")

    @property
    def reads(self) -> bool:
        """Whether this is an encoder-decoder model; the prompts are then those of its decoder."""
        return reads_sources(self.model)

    @property
    def prompt_mask(self) -> torch.Tensor | None:
        """A mask of the tokens of the prompts other than padding; None: all."""
        return self.model_kwargs.get("decoder_attention_mask" if self.reads else "attention_mask")

    @property
    def config(self) -> "GenerationConfig":
        """The generation config."""
        assert self.given_config is not None, "transformers passes a generation config"
        return self.given_config

    @property
    def beams(self) -> int:
        """The number of beams."""
        return int(self.config.num_beams or 1)

    @property
    def answers(self) -> int:
        """The number of return sequences per prompt."""
        return int(self.config.num_return_sequences or 1)

    @property
    def repeats(self) -> int:
        """The number of rows per prompt in `generate`'s expanded inputs."""
        return max(self.beams, self.answers)

    @property
    def greedy(self) -> bool:
        """Whether do_sample is False."""
        return not self.config.do_sample

    @cached_property
    def rows(self) -> torch.Tensor:
        """The prompts, each once, padded: int64[prompts, length]."""
        repeats = self.repeats
        ids = self.input_ids
        if self.reads:
            return ids[::repeats]
        if len(ids) % repeats == 0 and bool((ids.view(-1, repeats, ids.shape[1]) == ids[::repeats, None]).all()):
            return ids[::repeats]
        return ids

    def prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of each prompt without padding, and the padding tokens of each prompt."""
        rows = self.rows
        mask = self.prompt_mask
        if mask is None:
            return [row.tolist() for row in rows], [[] for _ in rows]
        pairs = list(zip(rows, mask[:: len(mask) // len(rows)].bool(), strict=True))
        return [row[keep].tolist() for row, keep in pairs], [row[~keep].tolist() for row, keep in pairs]

    def sources(self, encoder: Any, given: torch.Tensor | None) -> list[Source] | None:
        """Return the encoder output of each source, without padding; None for a decoder-only model.

        Args:
            encoder: the target's encoder.
            given: the padded sources, int64[prompts, length], for a draft model with another encoder.

        Raises `NotSupported` or `BadSetting` if there is no encoder output, or if the shape of `given` differs from it.
        """
        if not self.reads:
            if given is not None:
                raise NotSupported("sources is for encoder-decoder models; leave it out")
            return None
        output = self.model_kwargs.get("encoder_outputs")
        if output is None:
            raise NotSupported(
                "encoder_outputs is missing; call this function through model.generate(custom_generate=...)"
            )
        states = output[0][:: self.repeats]
        mask = self.model_kwargs.get("attention_mask")
        kept = torch.ones(states.shape[:2], dtype=torch.bool)
        if mask is not None and mask.ndim == 2 and mask.shape[1] == states.shape[1]:  # the mask of a text
            kept = mask[:: self.repeats].bool()
        if given is None:
            return [Source.of_states(row[keep]) for row, keep in zip(states, kept.to(states.device), strict=True)]
        if given.shape[:2] != states.shape[:2]:
            raise BadSetting(f"sources is {[*given.shape]}; it must be the inputs of generate, {[*states.shape[:2]]}")
        found = []
        for row, keep, tokens in zip(states, kept.to(states.device), given, strict=True):
            source = Source.of_tokens(tokens[keep.to(tokens.device)].tolist())
            source.states[encoder] = row[keep][None]
            found.append(source)
        return found

    def settings(self) -> Settings:
        """Return the settings of the generation config other than processors and warpers."""
        config = self.config
        most = config.max_new_tokens
        return Settings(
            max_new_tokens=int(config.max_length) - self.input_ids.shape[1] if most is None else int(most),
            num_return_sequences=self.answers,
            eos_token_id=[] if config.eos_token_id is None else config.eos_token_id,  # not the tokenizer's
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
            early_stopping=config.early_stopping or False,
        )

    @property
    def filler(self) -> int:
        """The padding token after shorter rows, as in `generate`.

        With one beam: the pad token, else the first end token, else 0. With several beams: -1 without an end token, else the
        pad token, or the first end token if the pad token is None or 0.
        """
        eos = self.config.eos_token_id
        first = eos
        if isinstance(eos, (list, tuple)):
            first = eos[0] if eos else None
        pad = self.config.pad_token_id
        if self.beams > 1:
            return int(pad or first) if first is not None else -1
        known = [token for token in (pad, first) if token is not None]
        return int(known[0]) if known else 0
