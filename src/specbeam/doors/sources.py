"""Prompts of decoder-only models, and sources, which are the inputs of encoder-decoder models."""

from collections.abc import Sequence
from typing import Any

import torch

from specbeam.core.lm import LM
from specbeam.core.session import Session
from specbeam.doors.inputs import PromptReader, features_in, is_array, prompts_in
from specbeam.doors.options.checks import as_list, is_integer
from specbeam.doors.options.settings import Settings
from specbeam.doors.speech_tokens import speech_tokens_of
from specbeam.engines.source import Source
from specbeam.errors import BadPrompt, BadSetting, NoPrompts, NotSupported
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.pair import Pair


def as_prompts(given: Any) -> list[Any]:
    """Return a list of single prompts or sources, from any form listed in `inputs` or a `Source`.

    Raises `NoPrompts` for anything else. The function is idempotent.
    """
    try:
        return [given] if isinstance(given, Source) else prompts_in(given)
    except BadPrompt as error:
        raise NoPrompts(str(error)) from error


def token_ids(pair: Pair, prompt: Any, number: int, vocab: int) -> list[int]:
    """Return the token ids of prompt `number`, without padding. Raises `BadPrompt` if it is empty or cannot be read.

    Args:
        vocab: vocabulary size of the model or encoder that reads the prompt.
    """
    pad, unsure = _pad_tokens(pair)
    return PromptReader(pair.known("tokenizer"), vocab, pad, unsure).ids(prompt, f"prompt {number}")


def _pad_tokens(pair: Pair) -> tuple[int | None, list[int]]:
    """Return the token that is certainly padding, or None, and the tokens that may be padding.

    As in transformers, the first one is the pad token of the target's generation config, by default the tokenizer's, unless
    it is also an end token.
    """
    holders = (pair.generation_config, pair.known("tokenizer"))
    pads = [getattr(holder, "pad_token_id", None) for holder in holders]
    known = [int(pad) for pad in pads if pad is not None]
    sure = next((pad for pad in known[:1] if pad not in pair.eos), None)
    return sure, [pad for pad in known if pad != sure]


def readers(pair: Pair, further: Sequence[LM] = ()) -> list[EncoderDecoderLM]:
    """Return the encoder-decoder models of a pair, each once.

    Args:
        further: further draft models.
    """
    every = dict.fromkeys((pair.target, pair.draft, *further))
    return [lm for lm in every if isinstance(lm, EncoderDecoderLM)]


def hears(pair: Pair) -> bool:
    """Return whether a pair reads audio."""
    return isinstance(pair.target, EncoderDecoderLM) and pair.target.input_name == "input_features"


def sources_in(session: Session) -> list[Source]:
    """Return the sources of a session, for all models."""
    return [source for source in session.context.values() if isinstance(source, Source)]


def source_length(session: Session) -> int:
    """Return the length of a session's source; 0 without a source."""
    lengths = [source.inputs.shape[-1] for source in sources_in(session) if source.inputs is not None]
    return max(lengths, default=0)


def source_of(pair: Pair, given: Any, number: int, reading: Sequence[EncoderDecoderLM]) -> tuple[Source, list[int]]:
    """Return source `number`, and integers that identify it, for the seeds of its sessions.

    Args:
        reading: the models that read it.

    Raises `BadPrompt` if it is empty, too long or of the wrong kind. Sources are never truncated.
    """
    target = pair.target
    assert isinstance(target, EncoderDecoderLM)
    if isinstance(given, Source):
        if given.name == "input_ids" and given.inputs is not None:
            _check_length(reading, int(given.inputs.shape[1]), number)
        return given, _digest(given)
    if target.input_name == "input_features":
        source = Source.of_features(_features(target, given, number))
        return source, _digest(source)
    vocab = min(_encoder_vocab(lm) for lm in reading if lm.shared is None)
    ids = token_ids(pair, given, number, vocab)
    _check_length(reading, len(ids), number)
    return Source.of_tokens(ids), ids


def _check_length(reading: Sequence[EncoderDecoderLM], length: int, number: int) -> None:
    """Raise `BadPrompt` if an encoder has too few positions for the tokens of source `number`."""
    for lm in reading:
        if lm.most_source is not None and length > lm.most_source:
            raise BadPrompt(
                f"prompt {number} has {length} tokens, and the encoder of {lm.model_name} has {lm.most_source} positions; "
                "shorten it, or split it into sentences"
            )


def _encoder_vocab(lm: EncoderDecoderLM) -> int:
    """Return the vocabulary size of an encoder, which may differ from that of its decoder."""
    return int(lm.encoder.get_input_embeddings().weight.shape[0])


def copied_tokens(pair: Pair, source: Source) -> list[int]:
    """Return the source tokens that a text may copy; [] for audio, or if encoder and decoder have different vocabularies."""
    target = pair.target
    assert isinstance(target, EncoderDecoderLM)
    if source.inputs is None or source.name != "input_ids":
        return []
    if not getattr(target.known.config, "share_encoder_decoder_embeddings", True):
        return []
    return [int(token) for token in source.inputs[0].tolist()] if _encoder_vocab(target) == target.vocab else []


def _features(lm: EncoderDecoderLM, given: Any, number: int) -> torch.Tensor:
    """Return the features of a window of audio, float[channels, frames]. Raises `BadPrompt` for a wrong shape."""
    channels = int(lm.known.config.num_mel_bins)
    wanted = (
        f"{lm.model_name} reads features, float[{channels}, {lm.most_source}] (specbeam transcribe reads audio files)"
    )
    given = features_in(given)
    if not _are_features(given):
        raise BadPrompt(f"prompt {number} is {type(given).__name__}; {wanted}")
    features = torch.as_tensor(given)
    if [*features.shape] != [channels, lm.most_source]:
        raise BadPrompt(f"prompt {number} has the shape {[*features.shape]}; {wanted}")
    if not bool(features.isfinite().all()):
        raise BadPrompt(f"prompt {number} has numbers that are not finite; {wanted}")
    return features.float()


def _are_features(value: Any) -> bool:
    """Return whether a value is the features of a window of audio."""
    return is_array(value) and value.ndim == 2 and bool(torch.as_tensor(value).is_floating_point())


def _digest(source: Source) -> list[int]:
    """Return integers that identify a source."""
    held = source.inputs if source.inputs is not None else source.given
    assert held is not None
    if not held.is_floating_point():
        return [int(token) for token in held[0].tolist()]
    numbers = held[0].double()
    rows = torch.arange(1, numbers.shape[0] + 1, dtype=torch.float64, device=numbers.device)
    columns = torch.arange(1, numbers.shape[1] + 1, dtype=torch.float64, device=numbers.device)
    sums = torch.stack([numbers.sum(), (rows @ numbers) @ columns.cos(), rows.cos() @ (numbers @ columns)])
    return [int(value) for value in sums.cpu().view(torch.int64).tolist()]


def check_decoder_prompt(pair: Pair, settings: Settings, count: int) -> None:
    """Raise an error if the decoder prompts do not match the models or the number of sources."""
    given = settings.decoder_input_ids
    if not isinstance(pair.target, EncoderDecoderLM):
        for name in ("decoder_input_ids", "decoder_start_token_id"):
            if getattr(settings, name) is not None:
                raise NotSupported(
                    f"{name} is for encoder-decoder models, and {type(pair.known('target_model')).__name__} has no encoder; "
                    "leave it out"
                )
        return
    if given is not None and settings.decoder_start_token_id is not None and not _starts_of_model(pair, settings):
        raise BadSetting("decoder_input_ids contains the start token; leave decoder_start_token_id out")
    if given is not None and not is_integer(given[0]) and len(given) != count:
        raise BadSetting(
            f"decoder_input_ids has {len(given)} prompts, and there are {count} sources; give one list, or one per source"
        )


def _starts_of_model(pair: Pair, settings: Settings) -> bool:
    """Return whether the start token is the one in the model's own generation config."""
    config = getattr(pair.known("target_model"), "generation_config", None)
    return bool(settings.decoder_start_token_id == getattr(config, "decoder_start_token_id", None))


def decoder_prompt(pair: Pair, settings: Settings, number: int) -> list[int]:
    """Return the first tokens of the decoder for source `number`.

    As in transformers: the decoder_input_ids of the settings; else the start token of the settings, of the model's
    generation config, or of its config; else the bos token. Raises `BadSetting` if there is none, or if it is outside the
    vocabulary. A Whisper model whose generation config sets language, task or forced tokens begins with their tokens;
    raises `NotSupported` if the language would have to be detected.
    """
    given = settings.decoder_input_ids
    if given is None and (settings.decoder_start_token_id is None or _starts_of_model(pair, settings)):
        spoken = _spoken_prompt(pair)
        if spoken is not None:
            return spoken
    if given is not None:
        first: Any = given[0]
        tokens = as_list(given if is_integer(first) else given[number])
    else:
        start = _start_token(pair, settings)
        if start is None:
            raise BadSetting(
                f"the configs of {type(pair.known('target_model')).__name__} have no decoder_start_token_id; give it"
            )
        tokens = [start]
    unknown = [token for token in tokens if not 0 <= token < pair.target.vocab]
    if unknown:
        raise BadSetting(
            f"the decoder's first tokens include {unknown[0]}; the model's vocabulary is 0 to {pair.target.vocab - 1}"
        )
    return [int(token) for token in tokens]


def _spoken_prompt(pair: Pair) -> list[int] | None:
    """Return the tokens for language and task in a generation config of speech; None if it sets neither."""
    config = getattr(pair.known("target_model"), "generation_config", None)
    if getattr(config, "no_timestamps_token_id", None) is None:
        return None
    of_model = getattr(pair.known("target_model").config, "forced_decoder_ids", None)
    chosen = {name: getattr(config, name, None) for name in ("language", "task", "forced_decoder_ids")}
    chosen["forced_decoder_ids"] = chosen["forced_decoder_ids"] or of_model
    if not any(chosen.values()):
        return None
    tokens = speech_tokens_of(pair)
    choice = tokens.choice(None, None)
    if choice.detects:
        named = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value)
        raise NotSupported(
            f"the generation_config of {type(pair.known('target_model')).__name__} sets {named} without a language; give "
            "decoder_input_ids or the language in the generation_config, or use sb.transcribe, which detects it"
        )
    return tokens.start(choice, choice.language, timestamps=False)


def _start_token(pair: Pair, settings: Settings) -> int | None:
    """Return the start token of the decoder, or None."""
    if settings.decoder_start_token_id is not None:
        return settings.decoder_start_token_id
    generation = getattr(pair.known("target_model"), "generation_config", None)
    for config in (generation, pair.known("target_model").config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    begin = getattr(generation, "bos_token_id", None)
    return None if begin is None else int(begin)


def require_prompts(pair: Pair, who: str) -> None:
    """Raise `NotSupported` if the target of a pair is an encoder-decoder model."""
    if isinstance(pair.target, EncoderDecoderLM):
        raise NotSupported(
            f"{who} continues prompts, and {type(pair.known('target_model')).__name__} is an encoder-decoder model; give a "
            "decoder-only model"
        )


def set_languages(pair: Pair, options: dict[str, Any], source: str | None, target: str | None) -> None:
    """Set the languages of sources and texts, in the tokenizer and as `forced_bos_token_id` in `options`.

    Raises `NotSupported` if the tokenizer has no languages, and `BadSetting` for an unknown language.
    """
    if source is None and target is None:
        return
    tokenizer: Any = pair.tokenizer
    name = type(tokenizer).__name__
    if source is not None:
        if not hasattr(tokenizer, "src_lang"):
            raise NotSupported(f"{name} has no languages; leave the source language out")
        _language_token(tokenizer, source)
        tokenizer.src_lang = source
    if target is not None:
        if not hasattr(tokenizer, "src_lang"):
            raise NotSupported(f"{name} has no languages; leave the target language out")
        options["forced_bos_token_id"] = _language_token(tokenizer, target)


def _language_token(tokenizer: Any, language: str) -> int:
    """Return the token of a language. Raises `BadSetting` if there is none."""
    for name in (language, f"__{language}__"):
        token = tokenizer.convert_tokens_to_ids(name)
        if token is not None and token != tokenizer.unk_token_id:
            return int(token)
    raise BadSetting(
        f"{type(tokenizer).__name__} does not know the language {language!r}; give it as the model names it, like fra_Latn "
        "(NLLB), fr_XX (mBART) or fr (M2M100)"
    )
