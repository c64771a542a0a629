"""The tokens by which a Whisper model is told what to do, and by which it tells times."""

from dataclasses import dataclass
from typing import Any

from specbeam.errors import BadSetting, NotSupported
from specbeam.pair import Pair


@dataclass(frozen=True, eq=False)
class SpeechTokens:
    """The special tokens of one model, read from its generation config.

    Attributes:
        begin: the token that the decoder begins with.
        end: the end token.
        before: stands before what was said before; None if it is not known.
        no_timestamps: asks for text without timestamps.
        languages, tasks: tokens by name, like "<|en|>" and "transcribe"; empty for a model of one language.
        frames_per_step: number of frames between two timestamps.
        config: the generation config.
    """

    begin: int
    end: int
    before: int | None
    no_timestamps: int
    languages: dict[str, int]
    tasks: dict[str, int]
    frames_per_step: int
    config: Any

    @property
    def first_timestamp(self) -> int:
        """The token that stands for 0 seconds."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int | None:
        """The token whose odds say that there is no speech."""
        return self.no_timestamps - 1

    def code_of(self, language: str | None) -> str | None:
        """Return the code of a language that is given as a code, a name or a token; None for none."""
        if language is None or not self.languages:
            return None
        return self._token_name(language).strip("<|>")

    def start(self, language: str | None, task: str, timestamps: bool) -> list[int]:
        """Return what the decoder begins with.

        Raises `BadSetting` for a language or a task that the model does not know, and for any if it knows one language.
        """
        found = [self.begin]
        if self.languages:
            if task not in self.tasks:
                raise BadSetting(f"task is {task!r}; this model knows {', '.join(self.tasks)}")
            if language is not None:
                found.append(self.languages[self._token_name(language)])
            found.append(self.tasks[task])
        elif language is not None or task != "transcribe":
            raise BadSetting("this model writes down English alone; leave language and task out")
        return found if timestamps else [*found, self.no_timestamps]

    def _token_name(self, language: str) -> str:
        """Return the token of a language that is given as a code, a name or a token."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        wanted = language.lower()
        code = TO_LANGUAGE_CODE.get(wanted, wanted)
        for name in (wanted, f"<|{code}|>"):
            if name in self.languages:
                return name
        known = ", ".join(sorted(name.strip("<|>") for name in self.languages))
        raise BadSetting(f"language is {language!r}; this model knows {known}")

    def processors(self, begin: int, timestamps: bool) -> list[Any]:
        """Return the logits processors that keep timestamps in order, for texts whose first token is number `begin`."""
        from transformers import WhisperTimeStampLogitsProcessor

        return [WhisperTimeStampLogitsProcessor(self.config, begin)] if timestamps else []


def speech_tokens(pair: Pair) -> SpeechTokens:
    """Return the special tokens of a Whisper model. Raises `NotSupported` if its generation config does not name them."""
    config: Any = getattr(pair.target_model, "generation_config", None)
    no_timestamps = getattr(config, "no_timestamps_token_id", None)
    begin = getattr(config, "decoder_start_token_id", None)
    if begin is None:
        begin = pair.target_model.config.decoder_start_token_id
    if no_timestamps is None or begin is None:
        raise NotSupported(
            f"the generation_config of {type(pair.target_model).__name__} does not name no_timestamps_token_id; take the "
            "generation_config.json of the model's page"
        )
    is_multilingual = bool(getattr(config, "is_multilingual", getattr(config, "lang_to_id", None)))
    end = config.eos_token_id
    return SpeechTokens(
        begin=int(begin),
        end=int(end[0] if isinstance(end, (list, tuple)) else end),
        before=_before(pair, config),
        no_timestamps=int(no_timestamps),
        languages=dict(getattr(config, "lang_to_id", None) or {}) if is_multilingual else {},
        tasks=dict(getattr(config, "task_to_id", None) or {}) if is_multilingual else {},
        frames_per_step=2,
        config=config,
    )


def _before(pair: Pair, config: Any) -> int | None:
    """Return the token that stands before what was said before; None if it is not known."""
    stated = getattr(config, "prev_sot_token_id", None)
    if stated is not None:
        return int(stated)
    if pair.tokenizer is None:
        return None
    found: Any = pair.tokenizer.convert_tokens_to_ids("<|startofprev|>")
    return None if found is None or found == pair.tokenizer.unk_token_id else int(found)
