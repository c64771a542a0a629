"""The targets that `load` finds by the beginning of their name, such as "vllm:MODEL", and by engine objects."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.core.errors import BadSetting, MissingFile
from specbeam.models.chains.chains import Scorer
from specbeam.models.chains.in_llama_cpp import opened_file
from specbeam.models.chains.in_vllm import async_scorer, offline_scorer, vllm_engine
from specbeam.models.chains.over_http import http_scorer, model_card, opened_server
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.loading.tokenizers import read_tokenizer


class OpenedTarget(NamedTuple):
    """A target that another program runs.

    Attributes:
        scorer: scores chains.
        source: a path or hub id of the model's tokenizer and generation config; None if it is not known.
        config: the model's config, of transformers; None if it is not known.
        eos: the end tokens, if only the engine knows them.
    """

    scorer: Scorer
    source: str | None
    config: Any = None
    eos: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ServedModel:
    """Stands for the model object of a target that another program runs.

    Attributes:
        name_or_path: of the model.
        vocab: number of its tokens.
        config: its config, of transformers; None if it is not known.
        generation_config: its generation config, of transformers; None if it is not known.
    """

    name_or_path: str
    vocab: int
    config: Any = None
    generation_config: Any = None


class Wanted(NamedTuple):
    """What a user wants of a target.

    Attributes:
        name: after the beginning and its colon.
        dtype: of `load`, as a name.
        tokenizer: of `load`.
    """

    name: str
    dtype: str
    tokenizer: Any


Opener = Callable[[Wanted], OpenedTarget]
_OPENERS: dict[str, Opener] = {}


def add_target(beginning: str, opener: Opener) -> None:
    """Let `load` open targets whose names begin with `beginning` and a colon.

    Args:
        opener: returns the target.

    Raises `BadSetting` if there is such a beginning already.
    """
    if beginning in _OPENERS:
        raise BadSetting(f"targets that begin with {beginning!r} are known already")
    _OPENERS[beginning] = opener


def opened_target(target: Any, dtype: Any, tokenizer: Any) -> OpenedTarget | None:
    """Return the target that another program runs; None if transformers loads the target."""
    if isinstance(target, str):
        beginning, colon, rest = target.partition(":")
        opener = _OPENERS.get(beginning) if colon else None
        if opener is None:
            return None
        if not rest:
            raise BadSetting(f"{target!r} names no model; give {beginning}:MODEL")
        return opener(Wanted(rest, str(dtype).removeprefix("torch."), tokenizer))
    if type(target).__module__.split(".")[0] != "vllm":
        return None
    is_async = hasattr(target, "generate") and not hasattr(target, "llm_engine")
    scorer = async_scorer(target) if is_async else offline_scorer(target)
    return _of_vllm(scorer, target.vllm_config if is_async else target.llm_engine.vllm_config)


def open_vllm(wanted: Wanted) -> OpenedTarget:
    """Return the target "vllm:MODEL"."""
    engine = vllm_engine(wanted.name, wanted.dtype)
    return _of_vllm(offline_scorer(engine), engine.llm_engine.vllm_config)


def _of_vllm(scorer: Scorer, config: Any) -> OpenedTarget:
    return OpenedTarget(scorer, str(config.model_config.tokenizer), config.model_config.hf_text_config)


def open_server(wanted: Wanted) -> OpenedTarget:
    """Return the target "openai:URL"; the server names its model, whose files must be at hand for tokenizer and config."""
    server = opened_server(wanted.name)
    card = model_card(server)
    source = wanted.tokenizer
    if not isinstance(source, (str, Path)):
        source = card.get("root") or card["id"]
    config = config_of(str(source))
    if config is not None:
        vocab = int(config.get_text_config().vocab_size)
    elif wanted.tokenizer not in (None, False):
        tokenizer = read_tokenizer(wanted.tokenizer)
        assert tokenizer is not None
        vocab = len(tokenizer)
    else:
        raise MissingFile(
            f"the server {server.url} runs {card['id']}, whose config is not on this machine; give its folder or hub id: "
            "load(tokenizer=...)"
        )
    return OpenedTarget(http_scorer(server, card, vocab), str(source), config)


def open_llama_cpp(wanted: Wanted) -> OpenedTarget:
    """Return the target "llama.cpp:FILE". The text of its tokens is that of a tokenizer of transformers."""
    scorer = opened_file(wanted.name)
    return OpenedTarget(scorer, wanted.name, None, scorer.eos)


def config_of(source: str) -> Any:
    """Return the config of a model's folder or hub repository; None if it cannot be read."""
    from transformers import AutoConfig

    try:
        with hub_lookups(source):
            return AutoConfig.from_pretrained(source)
    except (OSError, ValueError):
        return None


add_target("vllm", open_vllm)
add_target("openai", open_server)
add_target("llama.cpp", open_llama_cpp)
