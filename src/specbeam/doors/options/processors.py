"""The logits processors and warpers of the settings, in the order of transformers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbeam.core.laws.ranking import Truncation
from specbeam.doors.options.checks import as_list
from specbeam.doors.options.table import OPTIONS, warper_names
from specbeam.errors import BadSetting, NotSupported, warn

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LogitsProcessorList

    from specbeam.doors.options.settings import Settings

WITHOUT_LEAST = ("temperature", "top_h")  # options whose warpers have no minimum number of tokens


@dataclass(frozen=True)
class TextFacts:
    """The facts about a text on which its warp depends, besides the settings.

    Attributes:
        eos: the end tokens.
        prompt_length: number of tokens of the prompt.
        number: number of the prompt, for `prefix_allowed_tokens_fn`.
        most: maximum number of new tokens, the last of which is `forced_eos_token_id`; None if unknown.
        search: whether warpers work as in transformers' beam modes: the rows of a call are the live beams of one step, and
            each row keeps at least two tokens, and one more than there are end tokens, so that a beam can continue.
        source: the tokens of the encoder's input or, without an encoder, of the prompt; None for audio.
        vocab: size of the target's vocabulary; 0 if unknown.
        guidance: the processor for `guidance_scale`, or None.
        only_bans: whether processors of options must not raise the probability of a token, as a best-first search needs.
    """

    eos: tuple[int, ...]
    prompt_length: int
    number: int = 0
    most: int | None = None
    search: bool = False
    source: Sequence[int] | None = ()
    vocab: int = 0
    guidance: Callable[..., Any] | None = None
    only_bans: bool = False


def processors_of(settings: "Settings", text: TextFacts) -> list[Any]:
    """Return the logits processors that run before all warpers: from the settings first, then from the user.

    As in transformers, a user's processor replaces one of the same type.
    """
    given = list(settings.logits_processor or [])
    made = list(_made_of_options(settings, text))
    if not given:
        return made
    from transformers import LogitsProcessor

    merged = []
    for one in made:
        same = [another for another in given if type(another) is type(one) and isinstance(one, LogitsProcessor)]
        if same:
            warn(
                f"the {type(one).__name__} in logits_processor replaces the one of the options, as in transformers",
            )
        merged.append(same[0] if same else one)
    return merged + [one for one in given if not any(one is another for another in merged)]


def _made_of_options(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors of the settings."""
    if text.guidance is not None:
        yield text.guidance
    yield from _of_sequences(settings, text)
    yield from _of_lengths(settings, text)
    if settings.prefix_allowed_tokens_fn is not None:
        yield AllowedTokens(settings.prefix_allowed_tokens_fn, text.number, text.search, text.only_bans)
    if settings.forced_bos_token_id is not None:
        yield _made("ForcedBOSTokenLogitsProcessor", settings.forced_bos_token_id)
    if settings.forced_eos_token_id is not None and text.most is not None:
        yield _made(
            "ForcedEOSTokenLogitsProcessor", text.prompt_length + text.most, as_list(settings.forced_eos_token_id)
        )
    if settings.remove_invalid_values:
        yield _made("InfNanRemoveLogitsProcessor")
    yield from _at_the_end(settings, text)


def _made(name: str, *values: Any) -> Any:
    """Return a processor of transformers, which most texts do without."""
    import transformers

    return getattr(transformers, name)(*values)


def _of_sequences(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that find sequences of tokens in the text or its source."""
    biases = biases_of(settings.sequence_bias)
    if biases:
        yield _made("SequenceBiasLogitsProcessor", [[list(words), bias] for words, bias in biases.items()])
    if settings.encoder_repetition_penalty not in (None, 1):
        penalty = float(settings.encoder_repetition_penalty)
        yield _made("EncoderRepetitionPenaltyLogitsProcessor", penalty, _source(text, "encoder_repetition_penalty"))
    if settings.repetition_penalty not in (None, 1):
        yield _made("RepetitionPenaltyLogitsProcessor", float(settings.repetition_penalty))
    if settings.no_repeat_ngram_size:
        yield _made("NoRepeatNGramLogitsProcessor", settings.no_repeat_ngram_size)
    if settings.encoder_no_repeat_ngram_size:
        source = _source(text, "encoder_no_repeat_ngram_size")
        yield _made("EncoderNoRepeatNGramLogitsProcessor", settings.encoder_no_repeat_ngram_size, source)
    if settings.bad_words_ids:
        words = [list(word) for word in settings.bad_words_ids]
        yield _made("NoBadWordsLogitsProcessor", words, list(text.eos) or None)


def _source(text: TextFacts, name: str) -> "Tensor":
    """Return the tokens of the source, int64[1, length]. Raises `NotSupported` for audio."""
    import torch

    if text.source is None:
        raise NotSupported(f"{name} needs a source of tokens, and this source is audio; unset it")
    return torch.tensor([list(text.source)], dtype=torch.long)


def _of_lengths(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that ban end tokens from short texts. `min_new_tokens` takes precedence over `min_length`."""
    ends = list(text.eos)
    if settings.min_length and settings.min_new_tokens is None and ends:
        yield _made("MinLengthLogitsProcessor", settings.min_length, ends)
    if settings.min_new_tokens and ends:
        yield _made("MinNewTokensLengthLogitsProcessor", text.prompt_length, settings.min_new_tokens, ends)


def _at_the_end(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the last processors: the score increase of end tokens in long texts, and bans of tokens.

    Raises `BadSetting` for a score increase without end tokens.
    """
    if settings.exponential_decay_length_penalty is not None:
        ends = [token for token in text.eos if text.vocab == 0 or token < text.vocab]
        if not ends:
            raise BadSetting(
                "exponential_decay_length_penalty needs end tokens, and there are none; give eos_token_id, or unset it"
            )
        start, factor = settings.exponential_decay_length_penalty
        yield _made("ExponentialDecayLengthPenalty", (int(start), float(factor)), ends, text.prompt_length)
    if settings.suppress_tokens:
        yield _made("SuppressTokensLogitsProcessor", list(settings.suppress_tokens))
    if settings.begin_suppress_tokens:
        begin = text.prompt_length
        if begin == 1 and settings.forced_bos_token_id is not None:
            begin += 1
        yield _made("SuppressTokensAtBeginLogitsProcessor", list(settings.begin_suppress_tokens), begin)
    for name, option in OPTIONS.items():
        if option.make is not None and option.is_on(settings.values[name]):
            yield option.make(settings.values[name], text)


def warpers_of(settings: "Settings", least: int) -> list[Any]:
    """Return the warpers of the settings.

    Args:
        least: minimum number of tokens that each warper keeps.
    """
    import transformers

    found: list[Any] = []
    for name, option in OPTIONS.items():
        value = settings.values[name]
        if not option.warper or not option.is_on(value):
            continue
        kind = getattr(transformers, option.warper)  # the earliest supported version lacks some of them
        value = value if isinstance(value, int) and name == "top_k" else float(value)
        found.append(kind(value) if name in WITHOUT_LEAST else kind(value, min_tokens_to_keep=least))
    return found


def has_further_warpers(settings: "Settings") -> bool:
    """Return whether the settings have warpers other than those of a `Truncation`."""
    further = [name for name in warper_names() if name not in Truncation._fields]
    return any(OPTIONS[name].is_on(settings.values[name]) for name in further)


def watermark_of(settings: "Settings", vocab: int) -> list[Any]:
    """Return the watermark processor, which comes after all warpers, in a list; [] without one."""
    config = watermarking_config(settings.watermarking_config)
    return [] if config is None else [config.construct_processor(vocab, "cpu")]


def watermarking_config(given: Any) -> Any:
    """Return a `WatermarkingConfig` of transformers, from itself or from a mapping of its fields; None for None.

    Raises `BadSetting` for anything else or for wrong fields, and `NotSupported` for SynthID, whose processor has state
    that depends on the order of calls.
    """
    if given is None:
        return None
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

    if isinstance(given, SynthIDTextWatermarkingConfig):
        raise NotSupported("watermarking_config is for SynthID, which is not supported; give a WatermarkingConfig")
    if isinstance(given, Mapping):
        try:
            given = WatermarkingConfig(**given)
        except TypeError as error:
            raise BadSetting(f"watermarking_config has wrong fields: {error}") from error
    if not isinstance(given, WatermarkingConfig):
        raise BadSetting(
            f"watermarking_config is {given!r}; it must be a WatermarkingConfig of transformers, or a mapping of its fields"
        )
    if not 0 < given.greenlist_ratio < 1:
        raise BadSetting(
            f"watermarking_config has greenlist_ratio={given.greenlist_ratio!r}; it must be between 0 and 1"
        )
    try:
        given.validate()
    except (TypeError, ValueError) as error:
        raise BadSetting(f"watermarking_config is wrong: {error}") from error
    return given


def biases_of(given: Any) -> dict[tuple[int, ...], float]:
    """Return the bias of each sequence of tokens, from a mapping or a list of pairs, as in transformers.

    Raises `ValueError` or `TypeError` for anything else.
    """
    if given is None:
        return {}
    pairs = given.items() if isinstance(given, Mapping) else given
    return {tuple(tokens): float(bias) for tokens, bias in pairs}


@dataclass(frozen=True)
class AllowedTokens:
    """A logits processor that applies a `prefix_allowed_tokens_fn` to one prompt, as transformers does.

    Args:
        allowed: the `prefix_allowed_tokens_fn`: takes the number of a prompt and its tokens, returns the allowed tokens.
        prompt: number of the prompt.
        sees_beams_together: whether the rows of a call are the live beams of one step. If other processors have banned all
            allowed tokens of a row, transformers allows them again with score 0; for beams of one step, only if that is the
            case in all rows.
        only_bans: whether such tokens stay banned, so that the text goes no further.
    """

    allowed: "Callable[[int, Tensor], list[int]]"
    prompt: int
    sees_beams_together: bool = False
    only_bans: bool = False

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        from transformers import PrefixConstrainedLogitsProcessor

        beams = len(input_ids) if self.sees_beams_together and not self.only_bans else 1
        processor = PrefixConstrainedLogitsProcessor(lambda _, tokens: self.allowed(self.prompt, tokens), beams)
        banned: Tensor = processor(input_ids, scores)
        return banned.masked_fill(scores.isneginf(), -math.inf) if self.only_bans else banned


def joined(*lists: "Sequence[Any] | None") -> "LogitsProcessorList | None":
    """Return the concatenation of lists of processors; None if empty."""
    found = [processor for processors in lists for processor in processors or []]
    if not found:
        return None
    from transformers import LogitsProcessorList

    return LogitsProcessorList(found)
