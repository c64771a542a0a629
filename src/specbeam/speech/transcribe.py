"""Speech to text: windows of audio one after the other, each begun where the timestamps of the last one say."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbeam.checkpoints.boundary import reading
from specbeam.engines.source import Source
from specbeam.errors import BadSetting, NotSupported
from specbeam.generation import generate
from specbeam.lm.encoder_decoder import EncoderDecoderLM
from specbeam.options.checks import is_integer, require
from specbeam.pair import Pair, load
from specbeam.recipes.beams import sampling
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search, speculative_beam_search
from specbeam.recipes.sequence import speculative_sampling
from specbeam.records import Generation
from specbeam.speech.audio import RATE, Samples, is_silent, read_audio
from specbeam.speech.records import Segment, Transcript
from specbeam.speech.tokens import SpeechTokens, speech_tokens
from specbeam.speech.windows import STEP_S, Features, features_of, slices_of

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BEAMS = 5


@dataclass(frozen=True)
class Thresholds:
    """When a window is decoded again at the next temperature, or taken for silence. None: never.

    Attributes:
        compression_ratio: a text that zlib makes smaller than by this factor repeats itself.
        log_prob: the least average log-likelihood per token.
        no_speech: a window with a larger probability of silence, whose text fails `log_prob`, is silence.
    """

    compression_ratio: float | None = 2.4
    log_prob: float | None = -1.0
    no_speech: float | None = 0.6


@dataclass
class Listening:
    """The state of one audio: how far it is transcribed.

    Attributes:
        seek: the frame at which the next window begins.
        start: what the decoder begins with.
    """

    features: Features
    transcript: Transcript
    start: list[int]
    seek: int = 0
    segments: list[Segment] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether all of the audio is transcribed."""
        return self.seek >= self.features.frames

    def count(self, texts: list[Generation]) -> None:
        """Add the passes of the texts of one window, which shared them."""
        before = self.transcript
        self.transcript = replace(
            before,
            target_passes=before.target_passes + max(text.report.target_passes for text in texts),
            draft_passes=before.draft_passes + max(text.report.draft_passes for text in texts),
            law=before.law or texts[0].report.law,
        )


@dataclass(frozen=True, eq=False)
class SpeechWindow:
    """A window that is being decoded."""

    listening: Listening
    source: Source
    no_speech_prob: float


@dataclass(frozen=True)
class Heard:
    """The text of a window at one temperature."""

    tokens: list[int]  # without the end token
    temperature: float
    avg_logprob: float
    compression_ratio: float


def transcribe(
    pair: Pair | str | Path,
    audio: Any,
    method: Method | str | None = None,
    *,
    rate: int | None = None,
    language: str | None = None,
    task: str = "transcribe",
    prompt: str | None = None,
    timestamps: bool = True,
    temperature: float | Sequence[float] = TEMPERATURES,
    best_of: int = 5,
    compression_ratio_threshold: float | None = 2.4,
    log_prob_threshold: float | None = -1.0,
    no_speech_threshold: float | None = 0.6,
    seed: int | None = None,
    batch_size: int = 8,
    feature_extractor: "WhisperFeatureExtractor | None" = None,
    on_progress: Callable[[int, float, float], None] | None = None,
    **options: Any,
) -> list[Transcript]:
    """Write down what is said in audio, by a Whisper model.

    Windows of 30 seconds are decoded one after the other. The timestamps of a window say where the next one begins, and cut
    its text into segments, as in transformers; with the same method both give the same tokens and times. A window whose text
    repeats itself, or is unlikely, is decoded again at the next temperature, as the thresholds say. Audio that is silent
    throughout has no segments.

    Args:
        pair: the models, from `load`; or the path or hub id of a model.
        audio: one audio or a list of them; each is a file, or an array as `specbeam.speech.audio.read_audio` takes it.
        method: the recipe, or its name, at temperature 0. None: beam search with 5 beams, with drafts if there is a draft.
        rate: samples per second of arrays; None: 16,000.
        language: a code or a name, such as "de" or "german"; None: the model detects it in the first window.
        task: "transcribe", or "translate" for English text.
        prompt: a text that the model takes for what was said before, for names and spelling.
        timestamps: whether the model writes timestamps. Without them each window is one segment.
        temperature: of each window; of a sequence the next one is taken if a text fails a threshold. Above 0 texts are
            drawn.
        best_of: number of texts that are drawn above temperature 0, of which the likeliest is taken.
        compression_ratio_threshold, log_prob_threshold, no_speech_threshold: see `Thresholds`.
        seed: the same seed gives the same transcript. None: a random seed.
        batch_size: maximum number of audios whose windows are decoded side by side.
        feature_extractor: None: that of the model's folder, or the usual one of Whisper.
        on_progress: called with (number of the audio, seconds done, seconds in all) after each window.
        options: as for `generate`: max_new_tokens, length_penalty, repetition_penalty, ...

    Returns: a transcript for each audio.

    Raises:
        NotSupported: the model is not a Whisper model.
        BadSetting: an option is wrong, or the model does not know the language or the task.
        MissingFile, MissingPackage, BadAudio: see `read_audio`.

    Source: arXiv 2212.04356. The names of thresholds are those of faster-whisper; `compression_ratio` is of texts as there,
    and not of tokens as in transformers.
    """
    models = pair if isinstance(pair, Pair) else load(pair)
    thresholds = Thresholds(compression_ratio_threshold, log_prob_threshold, no_speech_threshold)
    require(is_integer(batch_size) and batch_size >= 1, "batch_size", batch_size, "an integer of at least 1")
    ears = ears_of(models, method, thresholds, temperature, best_of, seed, options, timestamps)
    extractor = feature_extractor if feature_extractor is not None else extractor_of(models)
    given = audio if isinstance(audio, (list, tuple)) and not _is_samples(audio) else [audio]
    sounds = [read_audio(one, rate) for one in given]
    done: list[Transcript] = []
    for first in range(0, len(sounds), batch_size):
        part = sounds[first : first + batch_size]
        listenings = [ears.begin(extractor, one, language, task, prompt) for one in part]
        while going := [one for one in listenings if not one.over]:
            ears.hear(going)
            for number, one in enumerate(listenings):
                if on_progress is not None and one in going:
                    on_progress(first + number, one.seek / 100, one.transcript.duration)
        done += [ears.finished(one) for one in listenings]
    return done


def _is_samples(audio: Sequence[Any]) -> bool:
    """Return whether a list holds samples and not audios."""
    return bool(audio) and isinstance(audio[0], float)


@dataclass(frozen=True, eq=False)
class Models:
    """What runs the models of a transcription.

    Attributes:
        generate: decodes windows, as `specbeam.generate` does.
        call: calls a function that runs a model, and returns what it returns.
    """

    generate: Callable[..., list[Generation]] = generate
    call: Callable[[Callable[[], Any]], Any] = lambda function: function()


def ears_of(
    pair: Pair,
    method: Method | str | None = None,
    thresholds: Thresholds | None = None,
    temperature: float | Sequence[float] = TEMPERATURES,
    best_of: int = 5,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    timestamps: bool = True,
    models: Models | None = None,
) -> "Ears":
    """Return the checked settings of a transcription; the arguments and errors are those of `transcribe`.

    Args:
        models: what runs the models; None: this thread does.
    """
    lm = listener_of(pair)
    temperatures = _temperatures(temperature)
    require(is_integer(best_of) and best_of >= 1, "best_of", best_of, "an integer of at least 1")
    return Ears(
        pair, lm, speech_tokens(pair), methods_of(pair, method), thresholds or Thresholds(), temperatures, best_of, seed,
        options or {}, timestamps, models or Models(),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ears:
    """A model with all settings of a transcription.

    Attributes:
        methods: at temperature 0, and above.
        models: what runs the models.
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
    timestamps: bool
    models: Models

    def begin(self, extractor: Any, samples: Samples, language: str | None, task: str, prompt: str | None) -> Listening:
        """Return the state of an audio of which nothing is transcribed yet. Silence is over already."""
        features = features_of(self.lm, extractor, samples)
        duration = len(samples) / RATE
        silent = is_silent(samples)
        found = language
        if language is None and self.tokens.languages and not silent:
            found = self._detected(features)
        start = self.tokens.start(None if silent and language is None else found, task, self.timestamps)
        if prompt is not None:
            start = [*self._prompt_tokens(prompt), *start]
        transcript = Transcript("", self.tokens.code_of(found), duration)
        return Listening(features, transcript, start, features.frames if silent else 0)

    def _logits(self, source: Source, path: list[int]) -> torch.Tensor:
        """Return the logits after a path, float[vocab]."""

        @torch.inference_mode()
        def run() -> torch.Tensor:
            return self.lm.plain_logits(source, path)

        found: torch.Tensor = self.models.call(run)
        return found

    def _detected(self, features: Features) -> str:
        """Return the likeliest language of the first window."""
        logits = self._logits(Source.of_features(features.at(0)), [self.tokens.begin])
        return max(self.tokens.languages, key=lambda name: float(logits[self.tokens.languages[name]]))

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a text that is taken for what was said before. Raises `BadSetting` if it is too long."""
        tokenizer = self.pair.tokenizer
        if tokenizer is None or self.tokens.before is None:
            raise NotSupported("prompt needs a tokenizer with the token <|startofprev|>; leave it out")
        found = list(tokenizer(f" {prompt.strip()}", add_special_tokens=False)["input_ids"])
        most = int(self.lm.max_positions or 448) // 2 - 1
        if len(found) > most:
            raise BadSetting(
                f"prompt has {len(found)} tokens, and the model takes {most} of what was said before; shorten it"
            )
        return [self.tokens.before, *found]

    def hear(self, listenings: list[Listening]) -> None:
        """Decode the next window of each audio, and move it on."""
        windows = [self._window(one) for one in listenings]
        waiting = windows
        heard: dict[int, Heard] = {}
        for temperature in self.temperatures:
            for window, found in zip(waiting, self._decoded(waiting, temperature), strict=True):
                heard[id(window)] = found
            waiting = [window for window in waiting if self._fails(heard[id(window)], window)]
            if not waiting:
                break
        for window in windows:
            self._take(window, heard[id(window)])

    def _window(self, listening: Listening) -> SpeechWindow:
        source = Source.of_features(listening.features.at(listening.seek))
        source.keeps = True  # it is decoded at several temperatures
        return SpeechWindow(listening, source, self._no_speech_prob(source, listening.start))

    def _no_speech_prob(self, source: Source, start: list[int]) -> float:
        """Return the probability that a window holds no speech; NaN if there is no threshold for it."""
        token = self.tokens.no_speech
        if self.thresholds.no_speech is None or token is None:
            return math.nan
        until = start.index(self.tokens.begin) + 1
        logits = self._logits(source, start[:until])
        return float(logits.float().softmax(-1)[token])

    def _decoded(self, windows: list[SpeechWindow], temperature: float) -> list[Heard]:
        """Return the texts of windows at a temperature, in their order. Windows with equally long prompts share passes."""
        found: dict[int, Heard] = {}
        by_length: dict[int, list[SpeechWindow]] = {}
        for window in windows:
            by_length.setdefault(len(window.listening.start), []).append(window)
        for length, group in by_length.items():
            draws = temperature > 0
            options = self._options(temperature, length)
            answers = self.models.generate(
                self.pair,
                [window.source for window in group],
                self.methods[draws],
                seed=self._seed(group, temperature),
                decoder_input_ids=[window.listening.start for window in group],
                logits_processor=self.tokens.processors(length, self.timestamps),
                **options,
            )
            per_window = len(answers) // len(group)
            for number, window in enumerate(group):
                texts = answers[number * per_window : (number + 1) * per_window]
                window.listening.count(texts)
                found[id(window)] = max(
                    (self._heard(text, temperature) for text in texts), key=lambda one: one.avg_logprob
                )
        return [found[id(window)] for window in windows]

    def _options(self, temperature: float, length: int) -> dict[str, Any]:
        """Return the options of a call for windows whose decoder begins with `length` tokens."""
        options = {"temperature": temperature} | self.options
        if temperature > 0:
            options["num_return_sequences"] = self.best_of
        if options.get("max_new_tokens") is None and options.get("max_length") is None:
            most = self.lm.max_positions
            options["max_new_tokens"] = None if most is None else most - length
        return options

    def _seed(self, windows: list[SpeechWindow], temperature: float) -> int | None:
        """Return the seed of a call; each window has chance of its own, as its features have."""
        return None if self.seed is None else self.seed + round(10 * temperature)

    def _heard(self, answer: Generation, temperature: float) -> Heard:
        tokens = answer.tokens
        beam = next(beam for beam in answer.beams if beam.tokens == tokens)
        penalty = float(self.options.get("length_penalty") or 1.0)
        average = beam.score * max(len(tokens), 1) ** (penalty - 1.0)
        if tokens and tokens[-1] == self.tokens.end:
            tokens = tokens[:-1]
        return Heard(tokens, temperature, average, compression_ratio(self._text(tokens)))

    def _text(self, tokens: list[int]) -> str:
        """Return the text of tokens without timestamps; "" without a tokenizer."""
        if self.pair.tokenizer is None:
            return ""
        spoken = [token for token in tokens if token < self.tokens.first_timestamp]
        return str(self.pair.tokenizer.decode(spoken, skip_special_tokens=True))

    def _fails(self, heard: Heard, window: SpeechWindow) -> bool:
        """Return whether a window is decoded again at the next temperature."""
        if self._is_silence(heard, window):
            return False
        limit = self.thresholds.compression_ratio
        repeats = limit is not None and heard.compression_ratio > limit
        return repeats or self._is_unlikely(heard)

    def _is_unlikely(self, heard: Heard) -> bool:
        limit = self.thresholds.log_prob
        return limit is not None and heard.avg_logprob < limit

    def _is_silence(self, heard: Heard, window: SpeechWindow) -> bool:
        limit = self.thresholds.no_speech
        return limit is not None and window.no_speech_prob > limit and self._is_unlikely(heard)

    def _take(self, window: SpeechWindow, heard: Heard) -> None:
        """Add the segments of a window to its audio, and move on to where the next one begins."""
        listening = window.listening
        left = listening.features.left(listening.seek)
        if self._is_silence(heard, window) or not heard.tokens:
            listening.seek += left
            return
        slices, frames = slices_of(heard.tokens, self.tokens.first_timestamp, left, self.tokens.frames_per_step)
        offset = listening.seek / self.tokens.frames_per_step * STEP_S
        for one in slices:
            listening.segments.append(
                Segment(
                    start=offset + one.start * STEP_S,
                    end=offset + one.end * STEP_S,
                    text=self._text(one.tokens),
                    tokens=one.tokens,
                    temperature=heard.temperature,
                    avg_logprob=heard.avg_logprob,
                    compression_ratio=heard.compression_ratio,
                    no_speech_prob=window.no_speech_prob,
                    seek=listening.seek,
                )
            )
        listening.seek += frames if frames > 0 else left  # a pair of timestamps at 0 would never end

    def finished(self, listening: Listening) -> Transcript:
        """Return the transcript of an audio that is over."""
        text = "".join(segment.text for segment in listening.segments).strip()
        return replace(listening.transcript, text=text, segments=listening.segments)


def compression_ratio(text: str) -> float:
    """Return the bytes of a text divided by those that zlib makes of them; NaN for no text."""
    raw = text.encode("utf-8")
    return len(raw) / len(zlib.compress(raw)) if raw else math.nan


def listener_of(pair: Pair) -> EncoderDecoderLM:
    """Return the target of a pair if it hears. Raises `NotSupported` if it does not, or is none of Whisper's kind."""
    target = pair.target
    if not isinstance(target, EncoderDecoderLM) or target.model.config.model_type != "whisper":
        raise NotSupported(
            f"{type(pair.target_model).__name__} does not write down speech; transcribe takes Whisper models "
            "(openai/whisper-*, distil-whisper/*)"
        )
    return target


def _temperatures(given: float | Sequence[float]) -> tuple[float, ...]:
    """Return the temperatures in their order. Raises `BadSetting` if there are none, or one is negative."""
    temperatures = (given,) if isinstance(given, (int, float)) else tuple(given)
    are_fine = bool(temperatures) and all(
        isinstance(one, (int, float)) and not isinstance(one, bool) and np.isfinite(one) and one >= 0
        for one in temperatures
    )
    require(are_fine, "temperature", given, "a number of at least 0, or a sequence of them")
    return tuple(float(one) for one in temperatures)


def methods_of(pair: Pair, method: Method | str | None) -> tuple[Method, Method]:
    """Return the methods at temperature 0 and above; None for the usual ones."""
    drafts = pair.draft is not None
    usual = speculative_beam_search(BEAMS) if drafts else beam_search(BEAMS)
    first = usual if method is None else resolve(method)
    return first, speculative_sampling() if drafts else sampling()


def extractor_of(pair: Pair) -> Any:
    """Return the feature extractor in the model's folder, or one of the model's shape."""
    from transformers import WhisperFeatureExtractor

    lm = listener_of(pair)
    folder = Path(pair.target_model.name_or_path or "")
    if pair.target_model.name_or_path and (not folder.exists() or (folder / "preprocessor_config.json").is_file()):
        with reading(f"the preprocessor_config.json of {folder} cannot be read"):
            return WhisperFeatureExtractor.from_pretrained(pair.target_model.name_or_path)
    assert lm.most_source is not None
    channels = int(lm.model.config.num_mel_bins)
    return WhisperFeatureExtractor(feature_size=channels, chunk_length=lm.most_source // 100)
