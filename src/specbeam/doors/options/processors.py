"""The logits processors and warpers that settings ask for, in the order in which transformers applies them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbeam.core.laws.ranking import Truncation
from specbeam.doors.options.checks import as_list
from specbeam.doors.options.table import OPTIONS, warper_names
from specbeam.errors import BadSetting, NotSupported

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LogitsProcessorList

    from specbeam.doors.options.settings import Settings

WITHOUT_LEAST = ("temperature", "top_h")  # options whose warpers keep no least number of tokens


@dataclass(frozen=True)
class TextFacts:
    """The facts about a text that its processors depend on, besides the settings.

    Attributes:
        eos: the end tokens.
        prompt_length: number of tokens of the prompt.
        number: of the prompt, for `prefix_allowed_tokens_fn`.
        most: maximum number of new tokens, of which `forced_eos_token_id` is the last; None if it is not known.
        search: whether the rows of a call are the live beams of one step, as in transformers' beam modes.
        source: the tokens that an encoder reads, or those of the prompt; None for a source that is not text.
        vocab: number of tokens that the target knows; 0 if it is not known.
        guidance: the processor for `guidance_scale`; None without one.
    """

    eos: tuple[int, ...]
    prompt_length: int
    number: int = 0
    most: int | None = None
    search: bool = False
    source: Sequence[int] | None = ()
    vocab: int = 0
    guidance: Callable[..., Any] | None = None


def processors_of(settings: "Settings", text: TextFacts) -> list[Any]:
    """Return the logits processors before all warpers: those that the settings ask for, then those of the user.

    As in transformers, a user's processor takes the place of one of the same type that the settings ask for.
    """
    from transformers import LogitsProcessor

    given = list(settings.logits_processor or [])
    merged = []
    for one in _made_of_options(settings, text):
        same = [another for another in given if type(another) is type(one) and isinstance(one, LogitsProcessor)]
        if same:
            warnings.warn(
                f"the {type(one).__name__} in logits_processor takes the place of the one that the options ask for, as in "
                "transformers",
                stacklevel=2,
            )
        merged.append(same[0] if same else one)
    return merged + [one for one in given if not any(one is another for another in merged)]


def _made_of_options(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that the settings ask for."""
    from transformers import ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor, InfNanRemoveLogitsProcessor

    if text.guidance is not None:
        yield text.guidance
    yield from _by_what_is_repeated(settings, text)
    yield from _by_length(settings, text)
    if settings.prefix_allowed_tokens_fn is not None:
        yield AllowedTokens(settings.prefix_allowed_tokens_fn, text.number, text.search)
    if settings.forced_bos_token_id is not None:
        yield ForcedBOSTokenLogitsProcessor(settings.forced_bos_token_id)
    if settings.forced_eos_token_id is not None and text.most is not None:
        yield ForcedEOSTokenLogitsProcessor(text.prompt_length + text.most, as_list(settings.forced_eos_token_id))
    if settings.remove_invalid_values:
        yield InfNanRemoveLogitsProcessor()
    yield from _at_the_end(settings, text)


def _by_what_is_repeated(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that look for words and n-grams in the text or its source."""
    from transformers import (
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    biases = biases_of(settings.sequence_bias)
    if biases:
        yield SequenceBiasLogitsProcessor([[list(words), bias] for words, bias in biases.items()])
    if settings.encoder_repetition_penalty not in (None, 1):
        penalty = float(settings.encoder_repetition_penalty)
        yield EncoderRepetitionPenaltyLogitsProcessor(penalty, _source(text, "encoder_repetition_penalty"))
    if settings.repetition_penalty not in (None, 1):
        yield RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty))
    if settings.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size)
    if settings.encoder_no_repeat_ngram_size:
        source = _source(text, "encoder_no_repeat_ngram_size")
        yield EncoderNoRepeatNGramLogitsProcessor(settings.encoder_no_repeat_ngram_size, source)
    if settings.bad_words_ids:
        words = [list(word) for word in settings.bad_words_ids]
        yield NoBadWordsLogitsProcessor(words, list(text.eos) or None)


def _source(text: TextFacts, name: str) -> "Tensor":
    """Return the tokens of the source as a batch of one. Raises `NotSupported` if it is not text."""
    import torch

    if text.source is None:
        raise NotSupported(
            f"{name} compares a text with the tokens of its source, and this source is no text; unset it"
        )
    return torch.tensor([list(text.source)], dtype=torch.long)


def _by_length(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that ban end tokens from short texts. Of two minimum lengths that of new tokens counts."""
    from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

    ends = list(text.eos)
    if settings.min_length and settings.min_new_tokens is None and ends:
        yield MinLengthLogitsProcessor(settings.min_length, ends)
    if settings.min_new_tokens and ends:
        yield MinNewTokensLengthLogitsProcessor(text.prompt_length, settings.min_new_tokens, ends)


def _at_the_end(settings: "Settings", text: TextFacts) -> Iterator[Any]:
    """Yield the processors that come last: the one that raises end tokens in long texts, and bans of tokens.

    Raises `BadSetting` if end tokens are to be raised and there are none.
    """
    from transformers import (
        ExponentialDecayLengthPenalty,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
    )

    if settings.exponential_decay_length_penalty is not None:
        ends = [token for token in text.eos if text.vocab == 0 or token < text.vocab]
        if not ends:
            raise BadSetting(
                "exponential_decay_length_penalty raises the scores of end tokens, and there are none; give eos_token_id, "
                "or unset it"
            )
        start, factor = settings.exponential_decay_length_penalty
        yield ExponentialDecayLengthPenalty((int(start), float(factor)), ends, text.prompt_length)
    if settings.suppress_tokens:
        yield SuppressTokensLogitsProcessor(list(settings.suppress_tokens))
    if settings.begin_suppress_tokens:
        begin = text.prompt_length
        if begin == 1 and settings.forced_bos_token_id is not None:
            begin += 1
        yield SuppressTokensAtBeginLogitsProcessor(list(settings.begin_suppress_tokens), begin)
    for name, option in OPTIONS.items():
        if option.make is not None and option.is_on(settings.values[name]):
            yield option.make(settings.values[name], text)


def warpers_of(settings: "Settings", least: int) -> list[Any]:
    """Return the warpers that the settings ask for.

    Args:
        least: number of tokens that each of them keeps at least.
    """
    import transformers

    found: list[Any] = []
    for name, option in OPTIONS.items():
        value = settings.values[name]
        if not option.warper or not option.is_on(value):
            continue
        kind = getattr(transformers, option.warper)  # not all are in the earliest version that specbeam takes
        value = value if isinstance(value, int) and name == "top_k" else float(value)
        found.append(kind(value) if name in WITHOUT_LEAST else kind(value, min_tokens_to_keep=least))
    return found


def has_further_warpers(settings: "Settings") -> bool:
    """Return whether the settings ask for warpers besides those of a `Truncation`: temperature, top-k, top-p and min-p."""
    further = [name for name in warper_names() if name not in Truncation._fields]
    return any(OPTIONS[name].is_on(settings.values[name]) for name in further)


def watermark_of(settings: "Settings", vocab: int) -> list[Any]:
    """Return the processor that marks texts, which comes after all warpers; an empty list without one."""
    config = watermarking_config(settings.watermarking_config)
    return [] if config is None else [config.construct_processor(vocab, "cpu")]


def watermarking_config(given: Any) -> Any:
    """Return a `WatermarkingConfig` of transformers, which may be given as a mapping of its fields; None for None.

    Raises `BadSetting` if it is neither, or its fields are wrong, and `NotSupported` for SynthID, whose processor keeps a
    state for each text in the order of its tokens.
    """
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

    if given is None:
        return None
    if isinstance(given, SynthIDTextWatermarkingConfig):
        raise NotSupported("watermarking_config asks for SynthID, which is not built; give a WatermarkingConfig")
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
    """Return the bias of each sequence of tokens, from a mapping or from a list of pairs, as in transformers.

    Raises `ValueError` or `TypeError` if `given` is neither.
    """
    if given is None:
        return {}
    pairs = given.items() if isinstance(given, Mapping) else given
    biases = {}
    for tokens, bias in pairs:
        biases[tuple(tokens)] = float(bias)
    return biases


@dataclass(frozen=True)
class AllowedTokens:
    """A logits processor that applies a `prefix_allowed_tokens_fn` to one prompt, as transformers does.

    Args:
        allowed: the `prefix_allowed_tokens_fn`: takes the number of a prompt and its tokens, returns the allowed tokens.
        prompt: number of the prompt.
        sees_beams_together: whether the rows of a call are the live beams of one step. If other processors have banned every
            allowed token of a row, transformers allows them again with score 0; with this only if it is so for all beams.
    """

    allowed: "Callable[[int, Tensor], list[int]]"
    prompt: int
    sees_beams_together: bool = False

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        from transformers import PrefixConstrainedLogitsProcessor

        beams = len(input_ids) if self.sees_beams_together else 1
        processor = PrefixConstrainedLogitsProcessor(lambda _, tokens: self.allowed(self.prompt, tokens), beams)
        banned: Tensor = processor(input_ids, scores)
        return banned


def joined(*lists: "Sequence[Any] | None") -> "LogitsProcessorList | None":
    """Return the processors of several lists in one list; None if there are none."""
    from transformers import LogitsProcessorList

    return LogitsProcessorList([processor for processors in lists for processor in processors or []]) or None
