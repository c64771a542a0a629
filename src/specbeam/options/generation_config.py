"""Reading a generation config of transformers: its settings, its unsupported fields, and contradictions to the method."""

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from transformers import GenerationConfig

WARPERS = ("temperature", "top_k", "top_p", "min_p")
# Settings that are taken from a model's own config, besides the warpers. The number of texts is left to the caller.
OF_MODELS = (
    "max_new_tokens",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "stop_strings",
    "length_penalty",
    "early_stopping",
    "min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "renormalize_logits",
)
# Settings that only encoder-decoder models have in their own config, or that transformers takes from it for them alone.
OF_ENCODER_DECODERS = ("max_length", "decoder_start_token_id")
# Fields of a generation config that do not change the text, or that the method decides.
_HARMLESS = (
    "bos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
    "do_sample",  # see `contradiction`
    "num_beams",  # see `contradiction`
    "return_dict_in_generate",
    "output_scores",
    "cache_implementation",
    "cache_config",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "disable_compile",
    # what speech models say of their tokens, which `transcribe` reads
    "alignment_heads",
    "is_multilingual",
    "lang_to_id",
    "max_initial_timestamp_index",
    "median_filter_width",
    "no_timestamps_token_id",
    "prev_sot_token_id",
    "return_timestamps",
    "task_to_id",
)


def read(config: "GenerationConfig", names: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that a generation config sets for the settings `names`, and the names of other fields that would
    change the text, sorted.

    Raises `BadSetting` if `config` is no generation config.
    """
    if not hasattr(config, "to_diff_dict"):
        raise BadSetting(
            f"generation_config is a {type(config).__name__}; it must be a GenerationConfig of transformers, and single "
            "options can be given by name"
        )
    defaults = _defaults()
    changed = {name: value for name, value in vars(config).items() if value is not None and value != defaults.get(name)}
    others = [name for name in changed if name not in names and name not in _HARMLESS and not name.startswith("_")]
    return {name: value for name, value in changed.items() if name in names}, sorted(others)


@cache
def _defaults() -> dict[str, Any]:
    """Return the fields of an empty generation config. `to_diff_dict` would take 2 ms per call to copy and compare."""
    from transformers import GenerationConfig

    return dict(vars(GenerationConfig()))


def contradiction(config: "GenerationConfig | None", name: str, beams: int, draws: bool) -> str | None:
    """Return the reason why a generation config contradicts the method, or None if it does not.

    Args:
        config: the generation config, or None.
        name: the method's name.
        beams: the method's number of beams.
        draws: whether the method draws tokens with these settings.
    """
    if config is None:
        return None
    if config.num_beams not in (None, beams):
        return f"generation_config has num_beams={config.num_beams}, and {name} keeps {beams}: sb.{name}({config.num_beams})"
    if config.do_sample is not None and config.do_sample != draws:
        what = "draws nothing" if config.do_sample else "draws"
        return f"generation_config has do_sample={config.do_sample}, and {name} {what}: take another method"
    return None
