"""The special tokens of Whisper models: language, task and timestamps."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from specbeam.doors.model_files import spoken_code
from specbeam.doors.options.checks import require
from specbeam.errors import BadSetting, NotSupported
from specbeam.models.pair import Pair


@dataclass(frozen=True, eq=False)
class SpeechTokens:
    """The special tokens of one model, read from its generation config.

    Attributes:
        begin: the start token of the decoder.
        ends: the end tokens.
        before: the token before the previous transcript; None if unknown.
        no_timestamps: the token for text without timestamps.
        languages, tasks: tokens by name, such as "<|en|>" and "transcribe"; empty for a model of one language.
        forced: the places and tokens that older configs force if neither language nor task is chosen; a None token stands
            for the language, which the model then detects. None: no forced tokens.
        frames_per_step: number of frames between two timestamps.
        config: the generation config.
    """

    begin: int
    ends: tuple[int, ...]
    before: int | None
    no_timestamps: int
    languages: dict[str, int]
    tasks: dict[str, int]
    forced: list[tuple[int, int | None]] | None
    frames_per_step: int
    config: Any

    @property
    def first_timestamp(self) -> int:
        """The token for 0 seconds."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """The token for windows without speech."""
        return self.no_timestamps - 1

    def choice(self, language: str | None, task: str | None) -> "SpokenChoice":
        """Return the language and the task, chosen by the caller or else by the generation config.

        A config without them may force tokens, as older ones do; otherwise the task is to transcribe.

        Raises `BadSetting` for an unknown language or task, and for any language if the model has only one.
        """
        wanted = language if language is not None else getattr(self.config, "language", None)
        aim = task if task is not None else getattr(self.config, "task", None)
        for name, found in (("language", wanted), ("task", aim)):
            require(found is None or isinstance(found, str), name, found, "a text, or None")
        if wanted is None and aim is None and self.forced is not None:
            return self._forced_choice(self.forced)
        if not self.languages:
            if wanted is not None or aim not in (None, "transcribe"):
                raise BadSetting(self._without_languages())
            return SpokenChoice(None, (), False)
        following: tuple[int, ...] = ()
        if self.tasks or aim not in (None, "transcribe"):
            chosen = aim or "transcribe"
            if chosen not in self.tasks:
                raise BadSetting(f"task is {chosen!r}; this model knows {', '.join(self.tasks)}")
            following = (self.tasks[chosen],)
        spoken = None if wanted is None else self._token_name(wanted)
        return SpokenChoice(spoken, following, spoken is None)

    def _forced_choice(self, forced: list[tuple[int, int | None]]) -> "SpokenChoice":
        """Return the choice made by forced tokens, without the token for no timestamps.

        Raises `NotSupported` if their places are not consecutive, or if a token other than the language is open.
        """
        tokens = [token for _, token in forced]
        follow = [place for place, _ in forced] == [*range(1, len(forced) + 1)]
        if not follow or None in tokens[1:]:
            raise NotSupported(
                f"the generation_config has forced_decoder_ids={forced}; their places must be 1, 2, ..., and only the first "
                "token may be None: give language and task"
            )
        following = tuple(token for token in tokens if token is not None and token != self.no_timestamps)
        names = {token: name for name, token in self.languages.items()}
        if tokens[0] in names:
            return SpokenChoice(names[tokens[0]], following[1:], False)
        return SpokenChoice(None, following, tokens[0] is None and bool(self.languages))

    def start(self, choice: "SpokenChoice", language: str | None, timestamps: bool) -> list[int]:
        """Return the first tokens of the decoder.

        Args:
            language: the name of the language's token; None: no token.
            timestamps: whether the model writes timestamps.
        """
        spoken = [] if language is None else [self.languages[language]]
        found = [self.begin, *spoken, *choice.following]
        return found if timestamps else [*found, self.no_timestamps]

    def _without_languages(self) -> str:
        """Return the reason why languages and tasks cannot be chosen."""
        if getattr(self.config, "is_multilingual", None) is False:
            return "this model transcribes English only; leave language and task out"
        return (
            "the generation_config of this model has no lang_to_id, so neither language nor task can be chosen; use the "
            "generation_config.json of the model's page"
        )

    def _token_name(self, language: str) -> str:
        """Return the token of a language, from its code, name or token."""
        return f"<|{spoken_code(language, sorted(name.strip('<|>') for name in self.languages))}|>"

    def processors(self, begin: int, timestamps: bool) -> list[Any]:
        """Return the logits processors that keep timestamps in order, for texts that begin at position `begin`."""
        from transformers import WhisperTimeStampLogitsProcessor

        if not timestamps:
            return []
        config: Any = self.config
        if not isinstance(config.eos_token_id, int):  # transformers' processor takes one, and allows tokens from it on
            config = SimpleNamespace(**(vars(self.config) | {"eos_token_id": min(self.ends)}))
        return [WhisperTimeStampLogitsProcessor(config, begin)]


@dataclass(frozen=True)
class SpokenChoice:
    """The language and the task of a transcription.

    Attributes:
        language: name of the language's token; None: it is detected, or has no token.
        following: the tokens after the language, such as the task.
        detects: whether the model detects the language.
    """

    language: str | None
    following: tuple[int, ...]
    detects: bool


def code_of(language: str | None) -> str | None:
    """Return the code of a language from the name of its token, such as "en" from "<|en|>"."""
    return None if language is None else language.strip("<|>")


def speech_tokens_of(pair: Pair) -> SpeechTokens:
    """Return the special tokens of a Whisper model. Raises `NotSupported` if its generation config lacks them."""
    config: Any = getattr(pair.known("target_model"), "generation_config", None)
    no_timestamps: Any = getattr(config, "no_timestamps_token_id", None)
    begin: Any = getattr(config, "decoder_start_token_id", None)
    if begin is None:
        begin = pair.known("target_model").config.decoder_start_token_id
    named = {"no_timestamps_token_id": no_timestamps, "decoder_start_token_id": begin, "eos_token_id": pair.eos or None}
    unnamed = [name for name, value in named.items() if value is None]
    if unnamed:
        raise NotSupported(
            f"the generation_config of {type(pair.known('target_model')).__name__} has no {', '.join(unnamed)}; use the "
            "generation_config.json of the model's page"
        )
    is_multilingual = bool(getattr(config, "is_multilingual", getattr(config, "lang_to_id", None)))
    return SpeechTokens(
        begin=begin,
        ends=tuple(int(end) for end in pair.eos),
        before=_before(pair, config),
        no_timestamps=int(no_timestamps),
        languages=dict(getattr(config, "lang_to_id", None) or {}) if is_multilingual else {},
        tasks=dict(getattr(config, "task_to_id", None) or {}) if is_multilingual else {},
        forced=_forced(pair, config),
        frames_per_step=2,
        config=config,
    )


def _forced(pair: Pair, config: Any) -> list[tuple[int, int | None]] | None:
    """Return the forced places and tokens of a config after the first token, or None."""
    pairs: Any = getattr(config, "forced_decoder_ids", None)
    if pairs is None:
        pairs = getattr(pair.known("target_model").config, "forced_decoder_ids", None)
    if not pairs:
        return None
    return [(int(place), None if token is None else int(token)) for place, token in pairs]


def _before(pair: Pair, config: Any) -> int | None:
    """Return the token before the previous transcript; None if unknown."""
    stated = getattr(config, "prev_sot_token_id", None)
    if stated is not None:
        return int(stated)
    if pair.tokenizer is None:
        return None
    found: Any = pair.tokenizer.convert_tokens_to_ids("<|startofprev|>")
    return None if found is None or found == pair.tokenizer.unk_token_id else int(found)
