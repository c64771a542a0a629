"""Speech to text, window by window; the timestamps of a window determine where the next one begins."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from specbeam import (
    Generation,
    Method,
    Pair,
    beam_search,
    generate,
    sampling,
    speculative_beam_search,
    speculative_sampling,
)
from specbeam.apps.speech.audio import RATE, Samples, is_silent, read_audio
from specbeam.apps.speech.likelihood import score_window
from specbeam.apps.speech.records import Segment, Transcript
from specbeam.apps.speech.windows import HOP_S, STEP_S, Features, features_of, slices_of, within
from specbeam.doors import (
    OF_ENCODER_DECODERS,
    Settings,
    SpeechTokens,
    TextFacts,
    check_names,
    code_of,
    is_integer,
    require,
    speech_tokens_of,
)
from specbeam.engines import Source
from specbeam.errors import BadSetting, NotSupported
from specbeam.models import EncoderDecoderLM, as_pair, hub_lookups, reading
from specbeam.recipes import resolve

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BEAMS = 5
Limit = float | None | Literal["auto"]
RESETS = 0.5  # temperature above which a window is not a prompt for the next one
# Aliases of options in openai/whisper, faster-whisper and transformers.
ALIASES = {
    "initial_prompt": "prompt",
    "logprob_threshold": "log_prob_threshold",
    "condition_on_prev_tokens": "condition_on_previous_text",
}
# Options of `generate` that a transcription sets itself.
_OWN = ("decoder_input_ids", "decoder_start_token_id", "num_return_sequences", "streamer", "on_result")


@dataclass(frozen=True)
class Thresholds:
    """Thresholds at which a window is decoded again at the next temperature, or counts as silence. None: never.

    Attributes:
        compression_ratio: largest zlib compression ratio; a text with a larger one repeats itself.
        log_prob: smallest average log-likelihood per token.
        no_speech: a window with a larger probability of silence counts as silence if its text fails `log_prob`, or if there
            is no `log_prob`.
    """

    compression_ratio: float | None = 2.4
    log_prob: float | None = -1.0
    no_speech: float | None = 0.6

    def __post_init__(self) -> None:
        for name in ("compression_ratio", "log_prob", "no_speech"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
            require(value is None or is_number, f"{name}_threshold", value, "a number, or None")


def thresholds_of(
    config: Any, compression_ratio: Limit = "auto", log_prob: Limit = "auto", no_speech: Limit = "auto"
) -> Thresholds:
    """Return thresholds. "auto" is the value in the model's generation config, or else the usual one.

    Raises `NotSupported` for "auto" if the config sets a compression ratio threshold, because transformers compares it
    with the ratio of tokens, not of text.
    """
    own = getattr(config, "compression_ratio_threshold", None)
    if own is not None and compression_ratio == "auto":
        raise NotSupported(
            f"the model's generation_config sets compression_ratio_threshold={own}, a ratio of token bytes in transformers; "
            "give compression_ratio_threshold, which is a ratio of text bytes here (2.4 is usual)"
        )
    usual = Thresholds()
    given = {
        "compression_ratio": (compression_ratio, None),
        "log_prob": (log_prob, getattr(config, "logprob_threshold", None)),
        "no_speech": (no_speech, getattr(config, "no_speech_threshold", None)),
    }
    found: dict[str, Any] = {}
    for name, (wanted, stated) in given.items():
        default = getattr(usual, name) if stated is None else stated
        found[name] = default if wanted == "auto" else wanted
    return Thresholds(**found)


@dataclass
class Listening:
    """The transcription of one recording in progress.

    Attributes:
        start: the first tokens of the decoder, without the text of previous windows.
        prompt: tokens of the caller's prompt, which counts as previous text.
        said: the prompt and the tokens of previous windows, for conditioning the next one.
        seek: the frame at which the next window begins.
        known: the source of the first window, if its language was detected: it is encoded already.
    """

    features: Features
    transcript: Transcript
    start: list[int]
    prompt: list[int]
    said: list[int]
    seek: int = 0
    known: Source | None = None
    segments: list[Segment] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether all of the audio is transcribed."""
        return self.seek >= self.features.frames

    def count(self, texts: list[Generation]) -> None:
        """Add the passes of one window, which its texts shared."""
        before = self.transcript
        self.transcript = replace(
            before,
            target_passes=before.target_passes + max(text.report.target_passes for text in texts),
            draft_passes=before.draft_passes + max(text.report.draft_passes for text in texts),
            law=before.law or texts[0].report.law,
        )


@dataclass(frozen=True, eq=False)
class SpeechWindow:
    """A window being decoded.

    Attributes:
        start: the first tokens of the decoder, with the text of previous windows.
    """

    listening: Listening
    source: Source
    start: list[int]


@dataclass(frozen=True)
class Heard:
    """The text of a window at one temperature."""

    tokens: list[int]  # without the end token
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float  # NaN if no threshold uses it


def transcribe(
    pair: Pair | str | Path,
    audio: Any,
    method: Method | str | None = None,
    *,
    rate: float | None = None,
    language: str | None = None,
    task: str | None = None,
    prompt: str | None = None,
    condition_on_previous_text: bool | None = None,
    timestamps: bool = True,
    temperature: float | Sequence[float] = TEMPERATURES,
    best_of: int = 5,
    compression_ratio_threshold: Limit = "auto",
    log_prob_threshold: Limit = "auto",
    no_speech_threshold: Limit = "auto",
    seed: int | None = None,
    batch_size: int = 8,
    feature_extractor: "WhisperFeatureExtractor | None" = None,
    on_progress: Callable[[int, float, float], None] | None = None,
    on_segment: Callable[[int, Segment], None] | None = None,
    **options: Any,
) -> list[Transcript]:
    """Transcribe or translate speech with a Whisper model.

    Windows of 30 seconds are decoded one after the other. The timestamps of a window determine where the next one begins,
    and cut its text into segments, as in transformers; with the same method both give the same tokens and times, except that
    no time is beyond the end of the audio. A window whose text repeats itself or is unlikely, by the thresholds, is decoded
    again at the next temperature. Silent audio has no segments.

    Defaults come from the model's generation config: language, task, the `forced_decoder_ids` of older configs, suppressed
    tokens, `max_length`, `num_beams`, thresholds, and everything else that `generate` reads from it.

    Args:
        pair: the models, from `load`; or the path or hub id of a model, which is loaded after the audio has been read.
        audio: one recording or a list of them; each is a file, or an array for `specbeam.apps.speech.audio.read_audio`.
        method: the recipe, or its name, at temperature 0, which must be among the temperatures. None: beam search with 5
            beams, or the model's own `num_beams`, with drafts if there is a draft.
        rate: samples per second of arrays; None: 16,000.
        language: a code or a name, such as "de" or "german"; None: the model detects it in the first window.
        task: "transcribe", or "translate" for English text; None: the model's own, or else "transcribe".
        prompt: a text that the model reads as previous text, for names and spelling. Also `initial_prompt`.
        condition_on_previous_text: whether a window is conditioned on the texts of all windows since the last one that was
            decoded above temperature 0.5. Otherwise it is conditioned on the prompt. None: the model's own setting, or else
            False, as in transformers (openai/whisper: True). Also `condition_on_prev_tokens`.
        timestamps: whether the model is asked for timestamps. Without them each window is one segment, unless the model
            writes timestamps anyway.
        temperature: temperature of a window, or a sequence, whose next one is used if a text fails a threshold. Above 0,
            texts are sampled.
        best_of: number of texts sampled above temperature 0, of which the likeliest is used.
        compression_ratio_threshold, log_prob_threshold, no_speech_threshold: see `Thresholds`; "auto": the model's own, or
            else the usual ones, 2.4, -1.0 and 0.6. Also `logprob_threshold`.
        seed: the same seed gives the same transcript. None: a random seed.
        batch_size: maximum number of recordings whose windows are decoded together.
        feature_extractor: None: the one in the model's folder, or Whisper's usual one.
        on_progress: called with (number of the recording, seconds done, total seconds) after each window.
        on_segment: called with (number of the recording, segment) for each segment as soon as its window is decoded.
        options: as for `generate`: max_new_tokens, length_penalty, repetition_penalty, ...

    Returns: a transcript for each recording.

    Raises:
        NotSupported: the model is not a Whisper model, or its generation config has a setting that is not supported.
        BadSetting: an option is invalid, or the model does not know the language or the task.
        MissingFile, MissingPackage, BadAudio: see `read_audio`.

    Source: arXiv 2212.04356. Thresholds are named as in faster-whisper; the names of openai/whisper are aliases;
    `compression_ratio` is a ratio of texts as there, not of tokens as in transformers.
    """
    given = {
        "prompt": prompt,
        "condition_on_previous_text": condition_on_previous_text,
        "log_prob_threshold": log_prob_threshold,
    }
    named = _without_aliases(given, options)
    require(isinstance(timestamps, bool), "timestamps", timestamps, "True or False (there are none of words)")
    require(seed is None or (is_integer(seed) and seed >= 0), "seed", seed, "an integer of at least 0, or None")
    require(is_integer(batch_size) and batch_size >= 1, "batch_size", batch_size, "an integer of at least 1")
    check_method_is_used(method, temperature)
    audios = audio if isinstance(audio, (list, tuple)) and not _is_samples(audio) else [audio]
    sounds = [read_audio(one, rate) for one in audios]
    models = as_pair(pair)
    listener_of(models)
    check_names(
        transcribe,
        {name: value for name, value in options.items() if name not in (*_OWN, "generation_config", "audit")},
        ["beam_search" if models.draft is None else "speculative_beam_search"],
        without=_OWN,
    )
    thresholds = thresholds_of(
        models.generation_config,
        compression_ratio_threshold,
        named["log_prob_threshold"],
        no_speech_threshold,
    )
    settings = SpeechSettings(
        method, thresholds, temperature, best_of, seed, options, timestamps, named["condition_on_previous_text"]
    )
    ears = ears_of(models, settings)
    extractor = feature_extractor if feature_extractor is not None else extractor_of(models)
    done: list[Transcript] = []
    for first in range(0, len(sounds), batch_size):
        part = sounds[first : first + batch_size]
        listenings = [ears.begin(extractor, one, language, task, named["prompt"]) for one in part]
        for number, segments in ears.listen(listenings):
            one = listenings[number]
            if on_segment is not None:
                for segment in segments:
                    on_segment(first + number, segment)
            if on_progress is not None:
                seconds = one.transcript.duration
                on_progress(first + number, min(one.seek * HOP_S, seconds), seconds)
        done += [ears.finished(one) for one in listenings]
    return done


def _without_aliases(named: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return named options, completed by aliases, which are removed from `options`.

    Raises `BadSetting` if an option is given by two names.
    """
    found = {**named}
    for alias in [name for name in options if name in ALIASES]:
        name = ALIASES[alias]
        if named[name] not in (None, "auto") or found[name] is not named[name]:
            raise BadSetting(f"{alias} is an alias of {name}, and both are given; give one of them")
        found[name] = options.pop(alias)
    return found


def _is_samples(audio: Sequence[Any]) -> bool:
    """Return whether a sequence is the samples of one recording, and not a list of recordings."""
    return bool(audio) and isinstance(audio[0], float)


@dataclass(frozen=True, eq=False)
class Models:
    """The functions that run the models of a transcription.

    Attributes:
        generate: decodes windows, as `specbeam.generate` does.
        call: calls a function that runs a model, and returns its result.
    """

    generate: Callable[..., list[Generation]] = generate
    call: Callable[[Callable[[], Any]], Any] = lambda function: function()


@dataclass(frozen=True, eq=False)
class SpeechSettings:
    """The settings of a transcription as a caller gives them; see `transcribe`.

    Attributes:
        thresholds: None: those of the model's generation config, or else the usual ones.
        options: options for decoding windows.
        conditions: whether a window is conditioned on the text of previous windows; None: the model's own setting.
    """

    method: Method | str | None = None
    thresholds: Thresholds | None = None
    temperature: float | Sequence[float] = TEMPERATURES
    best_of: int = 5
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    timestamps: bool = True
    conditions: bool | None = None


def ears_of(pair: Pair, asked: SpeechSettings, models: Models | None = None) -> "Ears":
    """Return a model with checked settings of a transcription; the errors are those of `transcribe`.

    Args:
        models: functions that run the models; None: this thread runs them.
    """
    lm = listener_of(pair)
    tokens = speech_tokens_of(pair)
    temperatures = _temperatures(asked.temperature)
    require(is_integer(asked.best_of) and asked.best_of >= 1, "best_of", asked.best_of, "an integer of at least 1")
    conditions = asked.conditions
    if conditions is None:
        conditions = bool(getattr(tokens.config, "condition_on_prev_tokens", None))
    require(isinstance(conditions, bool), "condition_on_previous_text", conditions, "True, False or None")
    if conditions and tokens.before is None:
        raise NotSupported(_NO_BEFORE.format("condition_on_previous_text"))
    return Ears(
        pair=pair,
        lm=lm,
        tokens=tokens,
        methods=methods_of(pair, asked.method),
        thresholds=asked.thresholds or thresholds_of(tokens.config),
        temperatures=temperatures,
        best_of=asked.best_of,
        seed=asked.seed,
        options=asked.options,
        settings=_settings(asked.options, tokens.config),
        timestamps=asked.timestamps,
        conditions=conditions,
        models=models or Models(),
    )


_NO_BEFORE = "{} needs the token <|startofprev|>, which neither generation_config nor tokenizer has; leave it out"


def _settings(options: dict[str, Any], config: Any) -> Settings:
    """Return the checked options of a transcription, completed by the model's own generation config."""
    taken = [name for name in options if name in _OWN]
    if taken:
        raise BadSetting(
            f"transcribe sets {', '.join(taken)} itself; leave it out (best_of is the number of sampled texts)"
        )
    outside = ("audit", "generation_config")  # arguments of `generate` outside `Settings`
    settings = {name: value for name, value in options.items() if name not in outside}
    given = Settings.given(settings, options.get("generation_config"))
    return given.completed(config, draws=False, also=OF_ENCODER_DECODERS)


@dataclass(frozen=True, eq=False)
class Ears:
    """A model with all settings of a transcription.

    Attributes:
        methods: the methods at temperature 0 and above.
        options: the caller's options for decoding windows.
        settings: these options, checked and completed by the model's generation config.
        conditions: whether a window is conditioned on the text of previous windows.
        models: functions that run the models.
    """

    pair: Pair
    lm: EncoderDecoderLM
    tokens: SpeechTokens
    methods: tuple[Method, Method]
    thresholds: Thresholds
    temperatures: tuple[float, ...]
    best_of: int
    seed: int | None
    options: dict[str, Any]
    settings: Settings
    timestamps: bool
    conditions: bool
    models: Models

    @property
    def most_before(self) -> int:
        """The maximum number of tokens of previous text."""
        return self._positions // 2 - 1

    @property
    def _positions(self) -> int:
        return int(self.lm.max_positions or 448)

    def begin(
        self, extractor: Any, samples: Samples, language: str | None, task: str | None, prompt: str | None
    ) -> Listening:
        """Return a new transcription of a recording; it is over already if the recording is silent."""
        choice = self.tokens.choice(language, task)
        before = [] if prompt is None else self._prompt_tokens(prompt)
        features = features_of(self.lm, extractor, samples)
        silent = is_silent(samples)
        spoken = choice.language
        known: Source | None = None
        if choice.detects and not silent:
            known = _source_at(features, 0)
            spoken = self._detected(known)
        start = self.tokens.start(choice, spoken, self.timestamps)
        self._check_room(len(start))
        transcript = Transcript("", code_of(spoken), len(samples) / RATE)
        return Listening(features, transcript, start, before, before, features.frames if silent else 0, known)

    def _check_room(self, length: int) -> None:
        """Raise `BadSetting` if windows conditioned on earlier ones may have no room for their new tokens.

        Args:
            length: number of first tokens of the decoder, without previous text.
        """
        wanted = self.settings.max_new_tokens
        room = self._positions - 1 - self.most_before - length
        if self.conditions and wanted is not None and wanted > room:
            raise BadSetting(
                f"max_new_tokens is {wanted}, but with condition_on_previous_text there is room for {room}; lower it"
            )

    def _logits(self, source: Source, path: list[int]) -> torch.Tensor:
        """Return the logits after a path, float[vocab]."""
        found: torch.Tensor = self.models.call(lambda: self.lm.logits_after(source, path))
        return found

    def _detected(self, source: Source) -> str:
        """Return the likeliest language of a window."""
        logits = self._logits(source, [self.tokens.begin])
        return max(self.tokens.languages, key=lambda name: float(logits[self.tokens.languages[name]]))

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, which counts as previous text.

        Raises `BadSetting` if it is too long, or holds special tokens.
        """
        require(isinstance(prompt, str), "prompt", prompt, "a text, or None")
        tokenizer: Any = self.pair.tokenizer
        if tokenizer is None:
            raise NotSupported("prompt needs a tokenizer; give load() one, or leave it out")
        if self.tokens.before is None:
            raise NotSupported(_NO_BEFORE.format("prompt"))
        found = list(tokenizer(f" {prompt.strip()}", add_special_tokens=False)["input_ids"])
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        held = [token for token in found if token in special]
        if held:
            name = tokenizer.convert_ids_to_tokens(held[0])
            raise BadSetting(f"prompt has the special token {name}; remove it")
        most = self.most_before
        if len(found) > most:
            raise BadSetting(
                f"prompt has {len(found)} tokens, but the model reads at most {most} of previous text; shorten it"
            )
        return found

    def listen(self, listenings: list[Listening]) -> Iterator[tuple[int, list[Segment]]]:
        """Decode recordings window by window; yield the number of each recording with the segments of its new window."""
        while going := [number for number, one in enumerate(listenings) if not one.over]:
            known = [len(listenings[number].segments) for number in going]
            self.hear([listenings[number] for number in going])
            for number, before in zip(going, known, strict=True):
                yield number, listenings[number].segments[before:]

    def hear(self, listenings: list[Listening]) -> None:
        """Decode the next window of each recording."""
        windows = [self._window(one) for one in listenings]
        waiting = windows
        heard: dict[int, Heard] = {}
        for temperature in self.temperatures:
            for window, found in zip(waiting, self._decoded(waiting, temperature), strict=True):
                heard[id(window)] = found
            waiting = [window for window in waiting if self._fails(heard[id(window)])]
            if not waiting:
                break
        for window in windows:
            self._take(window, heard[id(window)])

    def _window(self, listening: Listening) -> SpeechWindow:
        source = listening.known or _source_at(listening.features, listening.seek)
        listening.known = None
        before = listening.said[-self.most_before :] if self.conditions else listening.prompt
        mark = [] if self.tokens.before is None else [self.tokens.before]
        start = [*mark, *before, *listening.start] if before else listening.start
        return SpeechWindow(listening, source, start)

    def _decoded(self, windows: list[SpeechWindow], temperature: float) -> list[Heard]:
        """Return the texts of windows at a temperature, in order. Windows with equally long prompts share passes."""
        found: dict[int, Heard] = {}
        by_length: dict[int, list[SpeechWindow]] = {}
        for window in windows:
            by_length.setdefault(len(window.start), []).append(window)
        for length, group in by_length.items():
            options = self._options(temperature, length)
            answers = self.models.generate(
                self.pair,
                [window.source for window in group],
                self.methods[temperature > 0],
                seed=self._seed(group, temperature),
                decoder_input_ids=[window.start for window in group],
                **options,
            )
            per_window = len(answers) // len(group)
            for number, window in enumerate(group):
                texts = answers[number * per_window : (number + 1) * per_window]
                window.listening.count(texts)
                found[id(window)] = self._heard(window, [text.tokens for text in texts], temperature, options)
        return [found[id(window)] for window in windows]

    def _options(self, temperature: float, length: int) -> dict[str, Any]:
        """Return the options of a call for windows whose decoder begins with `length` tokens."""
        options = {"temperature": temperature} | self.options
        options["logits_processor"] = self._processors(length)
        if temperature > 0:
            options["num_return_sequences"] = self.best_of
        options.pop("max_length", None)
        options["max_new_tokens"] = self._most_tokens(length)
        return options

    def _processors(self, length: int) -> list[Any]:
        """Return the logits processors for timestamps, followed by the caller's."""
        return [*self.tokens.processors(length, self.timestamps), *(self.settings.logits_processor or [])]

    def _most_tokens(self, length: int) -> int | None:
        """Return the maximum number of new tokens of a window whose decoder begins with `length` tokens.

        As in transformers, `max_length` does not count the first tokens of the decoder.
        """
        settings = self.settings
        room = self.pair.room(length)
        if settings.max_new_tokens is not None or settings.max_length is None:
            return room if settings.max_new_tokens is None else settings.max_new_tokens
        most = settings.max_length + min(self.most_before, length) - length
        require(
            most >= 1, "max_length", settings.max_length, f"more than {length} tokens, which the decoder begins with"
        )
        return most if room is None else min(most, room)

    def _seed(self, windows: list[SpeechWindow], temperature: float) -> int | None:
        """Return the seed of a call; each window gets independent noise."""
        return None if self.seed is None else self.seed + round(10 * temperature)

    def _heard(
        self, window: SpeechWindow, texts: list[list[int]], temperature: float, options: dict[str, Any]
    ) -> Heard:
        """Return the likeliest of the texts of a window, per token.

        Args:
            options: the options that it was decoded with.
        """
        start = window.start
        settings = self.settings.changed(logits_processor=options["logits_processor"], max_length=None)
        warp = settings.warp(TextFacts(self.ends, len(start), most=options["max_new_tokens"]), greedy=True)
        asks = self.thresholds.no_speech is not None
        head = start.index(self.tokens.begin) + 1
        scores = self.models.call(
            lambda: score_window(
                self.lm, window.source, start, head, texts, warp, self.tokens.no_speech if asks else None
            )
        )
        no_speech = math.nan if scores.no_speech is None else scores.no_speech
        heard = []
        for text, loglik in zip(texts, scores.logliks, strict=True):
            tokens = text[:-1] if text and text[-1] in self.ends else text
            ratio = compression_ratio(self._text(tokens))
            heard.append(Heard(tokens, temperature, loglik / (len(tokens) + 1), ratio, no_speech))
        return max(heard, key=lambda one: one.avg_logprob)

    @property
    def ends(self) -> tuple[int, ...]:
        """The end tokens."""
        return self.settings.eos(self.tokens.ends)

    def _text(self, tokens: list[int]) -> str:
        """Return the text of tokens without timestamps; "" without a tokenizer."""
        if self.pair.tokenizer is None:
            return ""
        spoken = [token for token in tokens if token < self.tokens.first_timestamp]
        return str(self.pair.tokenizer.decode(spoken, skip_special_tokens=True))

    def _fails(self, heard: Heard) -> bool:
        """Return whether a window is decoded again at the next temperature."""
        if self._is_silence(heard):
            return False
        limit = self.thresholds.compression_ratio
        repeats = limit is not None and heard.compression_ratio > limit
        return repeats or (self.thresholds.log_prob is not None and self._is_unlikely(heard))

    def _is_unlikely(self, heard: Heard) -> bool:
        """Return whether a text is less likely than the threshold; True without a threshold."""
        limit = self.thresholds.log_prob
        return limit is None or heard.avg_logprob < limit

    def _is_silence(self, heard: Heard) -> bool:
        limit = self.thresholds.no_speech
        return limit is not None and heard.no_speech_prob > limit and self._is_unlikely(heard)

    def _take(self, window: SpeechWindow, heard: Heard) -> None:
        """Add the segments of a window to its recording, and move to the beginning of the next window."""
        listening = window.listening
        left = listening.features.left(listening.seek)
        if self._is_silence(heard) or not heard.tokens:
            listening.seek += left
            return
        slices, frames = slices_of(heard.tokens, self.tokens.first_timestamp, left, self.tokens.frames_per_step)
        offset = listening.seek / self.tokens.frames_per_step * STEP_S
        duration = listening.transcript.duration
        for one in slices:
            start = within(offset + one.start * STEP_S, offset, duration)
            listening.segments.append(
                Segment(
                    start=start,
                    end=within(offset + one.end * STEP_S, start, duration),
                    text=self._text(one.tokens),
                    tokens=one.tokens,
                    temperature=heard.temperature,
                    avg_logprob=heard.avg_logprob,
                    compression_ratio=heard.compression_ratio,
                    no_speech_prob=heard.no_speech_prob,
                    seek=listening.seek,
                )
            )
            listening.said = [*listening.said, *self._to_be_continued(one.tokens)]
        if heard.temperature > RESETS:
            listening.said = listening.prompt
        listening.seek += frames if frames > 0 else left  # without this, a pair of timestamps at 0 would loop forever

    def _to_be_continued(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a segment for the prompt of the next window: of two timestamps at the end, only one."""
        if len(tokens) > 2 and tokens[-2] >= self.tokens.first_timestamp:
            return tokens[:-1]
        return tokens

    def finished(self, listening: Listening) -> Transcript:
        """Return the transcript of a finished recording."""
        text = "".join(segment.text for segment in listening.segments).strip()
        return replace(listening.transcript, text=text, segments=listening.segments)


def _source_at(features: Features, seek: int) -> Source:
    """Return the source of the window that begins at a frame."""
    source = Source.of_features(features.at(seek))
    source.keeps = True  # the window may be read several times: to detect its language, and at several temperatures
    return source


def compression_ratio(text: str) -> float:
    """Return the compression ratio of a text by zlib; NaN for the empty text."""
    raw = text.strip().encode("utf-8")
    return len(raw) / len(zlib.compress(raw)) if raw else math.nan


def listener_of(pair: Pair) -> EncoderDecoderLM:
    """Return the target of a pair. Raises `NotSupported` if it is not a Whisper model."""
    target = pair.target
    if not isinstance(target, EncoderDecoderLM) or target.known.config.model_type != "whisper":
        raise NotSupported(
            f"{type(pair.known('target_model')).__name__} does not transcribe speech; transcribe needs Whisper models "
            "(openai/whisper-*, distil-whisper/*)"
        )
    return target


def _temperatures(given: float | Sequence[float]) -> tuple[float, ...]:
    """Return the temperatures in order. Raises `BadSetting` if there are none, or one is negative."""
    temperatures = (given,) if isinstance(given, (int, float)) else tuple(given)
    are_fine = bool(temperatures) and all(
        isinstance(one, (int, float)) and not isinstance(one, bool) and np.isfinite(one) and one >= 0
        for one in temperatures
    )
    require(are_fine, "temperature", given, "a number of at least 0, or a sequence of them")
    return tuple(float(one) for one in temperatures)


def check_method_is_used(method: Method | str | None, temperature: float | Sequence[float]) -> None:
    """Raise `BadSetting` if a method is given and no temperature is 0, as texts are sampled above 0."""
    if method is not None and min(_temperatures(temperature)) > 0:
        raise BadSetting(
            f"temperature is {temperature}, and the method is for temperature 0: above it texts are sampled; leave the "
            "method out, or give temperature=0"
        )


def methods_of(pair: Pair, method: Method | str | None) -> tuple[Method, Method]:
    """Return the methods at temperature 0 and above; by default beam search, with the model's beams, and sampling."""
    drafts = pair.draft is not None
    if method is None:
        beams = int(getattr(pair.known("target_model").generation_config, "num_beams", None) or BEAMS)
        first = speculative_beam_search(beams) if drafts else beam_search(beams)
    else:
        first = resolve(method)
    return first, speculative_sampling() if drafts else sampling()


def extractor_of(pair: Pair) -> Any:
    """Return the feature extractor in the model's folder, or one of the model's shape."""
    from transformers import WhisperFeatureExtractor

    lm = listener_of(pair)
    name = pair.known("target_model").name_or_path
    folder = Path(name or "")
    if name and (not folder.exists() or (folder / "preprocessor_config.json").is_file()):
        with reading(f"the preprocessor_config.json of {folder} cannot be read"), hub_lookups(folder):
            return WhisperFeatureExtractor.from_pretrained(name)
    assert lm.most_source is not None
    channels = int(lm.known.config.num_mel_bins)
    return WhisperFeatureExtractor(feature_size=channels, chunk_length=lm.most_source // 100)
