"""What a generation config of transformers says: settings, things that change nothing, and things that contradict."""

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from specbeam.errors import BadSetting

if TYPE_CHECKING:
    from transformers import GenerationConfig

WARPERS = ("temperature", "top_k", "top_p", "min_p")
# What a model's own config says about its texts; how many texts are wanted is the caller's business.
OF_MODELS = (
    "max_new_tokens",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "stop_strings",
    "length_penalty",
    "early_stopping",
)
# Fields of a generation config that say nothing about the text, or that the recipe answers.
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
    "decoder_start_token_id",
)


def read(config: "GenerationConfig", names: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """What a generation config sets of the settings `names`, and the names of what is none and would change the text."""
    if not hasattr(config, "to_diff_dict"):
        raise BadSetting(
            f"generation_config is a {type(config).__name__}; it must be a GenerationConfig of transformers, and single "
            "options can be given by name"
        )
    usual = _usual()
    given = {name: value for name, value in vars(config).items() if value is not None and value != usual.get(name)}
    others = [name for name in given if name not in names and name not in _HARMLESS and not name.startswith("_")]
    return {name: value for name, value in given.items() if name in names}, sorted(others)


@cache
def _usual() -> dict[str, Any]:
    """What a generation config holds that sets nothing. `to_diff_dict` would copy and compare, 2 ms long."""
    from transformers import GenerationConfig

    return vars(GenerationConfig())


def contradiction(config: "GenerationConfig | None", name: str, beams: int, draws: bool) -> str | None:
    """What a generation config says of the method itself that is not so."""
    if config is None:
        return None
    if config.num_beams not in (None, beams):
        return f"generation_config has num_beams={config.num_beams}, and {name} keeps {beams}: sb.{name}({config.num_beams})"
    if config.do_sample is not None and config.do_sample != draws:
        what = "draws nothing" if config.do_sample else "draws"
        return f"generation_config has do_sample={config.do_sample}, and {name} {what}: take another method"
    return None
