"""Generation configs of transformers: supported settings, unsupported fields, and contradictions to the method."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from specbeam.errors import BadSetting
from specbeam.models.stand_ins import StoredGenerationConfig

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Settings that transformers reads for encoder-decoder models only.
OF_ENCODER_DECODERS = ("decoder_start_token_id",)
# Fields of a model's own config that do not change texts of specbeam.
_HARMLESS = (
    "bos_token_id",
    "eos_token_id",  # read with the model, see `Pair.eos`
    "pad_token_id",
    "decoder_start_token_id",  # without an encoder, transformers does not read it either
    "transformers_version",
    # decided by the method or the caller
    "do_sample",  # see `contradiction`
    "num_beams",  # see `contradiction`
    "num_return_sequences",
    # storage and compilation
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "return_legacy_cache",
    "low_memory",
    "prefill_chunk_size",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    # outputs other than the text
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    # transformers' own drafts, which do not change texts
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "speculation_type",
    "use_mtp",
    "generation_kwargs",
)
# Fields of speech models about tokens and windows, read or decided by `transcribe`.
_OF_SPEECH = (
    "alignment_heads",
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "forced_decoder_ids",
    "is_multilingual",
    "lang_to_id",
    "language",
    "logprob_threshold",
    "max_initial_timestamp_index",
    "median_filter_width",
    "no_speech_threshold",
    "no_timestamps_token_id",
    "prev_sot_token_id",
    "prompt_condition_type",
    "return_segments",
    "return_timestamps",
    "return_token_timestamps",
    "task",
    "task_to_id",
)
# Values without effect, besides None.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beam_groups": (0, 1),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "token_healing": (False,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "dola_layers": ([],),
}
# Advice for unsupported fields.
ADVICE: Mapping[str, str] = {
    "num_beam_groups": "diverse beam search is not supported; sb.beam_sampling(4) draws different texts",
    "diversity_penalty": "diverse beam search is not supported; sb.beam_sampling(4) draws different texts",
    "penalty_alpha": "contrastive search is not supported",
    "dola_layers": "contrasting layers (DoLa) is not supported",
    "constraints": "give json_schema, regex or grammar, or a logits_processor",
    "force_words_ids": "give json_schema, regex or grammar, or a logits_processor",
    "token_healing": "end the prompt where a token ends",
    "max_time": "give max_new_tokens",
    "assistant_ensemble_weight": "it changes the law of the text; drafts of specbeam do not",
}


@dataclass(frozen=True)
class ConfigFields:
    """The fields set by a generation config.

    Attributes:
        settings: the values of fields that specbeam supports, by name.
        refused: the values of fields that transformers supports and specbeam does not, by name.
        unknown: sorted names of fields unknown to transformers' `generate`.
    """

    settings: dict[str, Any]
    refused: dict[str, Any]
    unknown: list[str]

    @property
    def reason(self) -> str:
        """The unsupported fields with their values and alternatives; "" if there are none."""
        parts = []
        for name, value in self.refused.items():
            advice = f" ({ADVICE[name]})" if name in ADVICE else ""
            parts.append(f"{name}={value!r}{advice}")
        return ", ".join(parts)


def read(config: "GenerationConfig | StoredGenerationConfig", names: Collection[str]) -> ConfigFields:
    """Return the fields of a generation config that differ from an empty one.

    Args:
        config: the generation config.
        names: the settings to take from it.

    Raises `BadSetting` if `config` is not a generation config.
    """
    is_stored = isinstance(config, StoredGenerationConfig)
    if not is_stored and not hasattr(config, "to_diff_dict"):
        raise BadSetting(
            f"generation_config is a {type(config).__name__}; it must be a GenerationConfig of transformers; or give single "
            "options by name"
        )
    defaults = config.empty if is_stored else _defaults()
    harmless = (*_HARMLESS, *(_OF_SPEECH if hasattr(config, "no_timestamps_token_id") else ()))
    changed = {name: value for name, value in vars(config).items() if value is not None and value != defaults.get(name)}
    settings = {name: value for name, value in changed.items() if name in names}
    others = {
        name: value
        for name, value in changed.items()
        if name not in (*names, *harmless) and not name.startswith("_") and value not in _NEUTRAL.get(name, ())
    }
    refused = {name: others[name] for name in sorted(others) if name in defaults}
    return ConfigFields(settings, refused, sorted(set(others) - set(refused)))


@cache
def _defaults() -> dict[str, Any]:
    """Return the fields of an empty generation config. `to_diff_dict` would take 2 ms per call."""
    from transformers import GenerationConfig

    return dict(vars(GenerationConfig()))


def contradiction(config: "GenerationConfig | None", name: str, beams: int, draws: bool) -> str | None:
    """Return the contradiction between a generation config and the method as text, or None.

    Args:
        config: the generation config, or None.
        name: the method's name.
        beams: the method's number of beams.
        draws: whether the method draws tokens with these settings.
    """
    if config is None:
        return None
    if config.num_beams not in (None, beams):
        wider = f"use sb.{name}({config.num_beams})"
        if beams == 1 and config.num_beams > 1:
            wider = f"leave num_beams out, or use sb.dsbd({config.num_beams})"
        return f"generation_config has num_beams={config.num_beams}, and {name} has {beams}: {wider}"
    if config.do_sample is not None and config.do_sample != draws:
        what = "does not sample" if config.do_sample else "samples"
        return f"generation_config has do_sample={config.do_sample}, and {name} {what}: use another method"
    return None
