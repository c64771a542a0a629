"""Facts about a model from the small files of its folder, known before anything heavy is imported."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbeam.core.errors import BadCheckpoint, BadSetting, MissingFile, NotSupported
from specbeam.core.names import hint
from specbeam.models.checkpoints.boundary import json_object
from specbeam.models.checkpoints.folders import ADAPTER, CONFIG, checked_folder, gguf_in

SHOWN = 8  # languages named in an error
# English names of languages by their own names, where these are far from them, or near another one.
_OWN_NAMES = {
    "deutsch": "german", "español": "spanish", "français": "french", "nederlands": "dutch", "suomi": "finnish",
    "svenska": "swedish", "türkçe": "turkish", "русский": "russian", "中文": "chinese", "日本語": "japanese",
}  # fmt: skip
MEMORY = "memory.json"  # in folders of `specbeam train hmt`
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SERVED = re.compile(
    r"[\w.-]{2,}:."
)  # the beginning of the name of a target that another program runs, as "vllm:MODEL"
_OF_TOKENIZER = re.compile(r"tok|vocab|merges|\.(model|spm)$")  # in the name of a file
# Names of languages in tokenizers of translation models: eng_Latn (NLLB), fr_XX (mBART), __fr__ (M2M100).
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")


def check_model(name: str) -> None:
    """Raise an error if a name is a path at which there is no model. What is no path is left to loading."""
    path = require_place_of_model(name)
    if _SERVED.match(name) or _needs_no_config(path) or not path.exists():
        return
    json_object(checked_folder(path) / CONFIG)


def _needs_no_config(path: Path) -> bool:
    """Return whether a path holds a model with memories, an adapter or a GGUF model, which `load` describes otherwise."""
    return any((path / file).is_file() for file in (MEMORY, ADAPTER)) or gguf_in(path) is not None


def require_place_of_model(name: str) -> Path:
    """Return the path that a name would be. Raises `MissingFile` if it can only be a path, and there is nothing."""
    path = Path(name).expanduser()
    is_path = path.is_absolute() or name.startswith((".", "~"))
    is_path |= not (_HUB_ID.fullmatch(name) or _SERVED.match(name))
    if is_path and not path.exists():
        raise MissingFile(f"there is no folder {path}; give a folder that save_pretrained wrote, or a hub id")
    return path


def has_chat_template(name: str) -> bool:
    """Return False if a model's folder has no chat template; True if it has, or if that is not known."""
    folder = Path(name).expanduser()
    if name == "bundled" or not folder.is_dir() or _needs_no_config(folder):
        return True
    if any((folder / file).is_file() for file in ("chat_template.jinja", "chat_template.json")):
        return True
    return any("chat_template" in _read(folder, file) for file in ("tokenizer_config.json", "processor_config.json"))


def require_chat_template(name: str) -> None:
    """Raise `NotSupported` if a model's folder has no chat template."""
    if not has_chat_template(name):
        raise NotSupported(f"{name} has no chat template; give --chat-template, or use `specbeam generate`")


def check_languages(name: str, *languages: str | None) -> None:
    """Raise `BadSetting` for a language that is missing in the list of languages in a model's folder.

    Models without such a list, and those on the hub, are left to loading. Raises `NotSupported` for the bundled pair, which
    has no languages to choose.
    """
    if name == "bundled" and any(language is not None for language in languages):
        raise NotSupported("the bundled pair translates from German to English; leave the languages out")
    folder = Path(name).expanduser()
    files = ("tokenizer_config.json", "special_tokens_map.json")
    known = {text for file in files for text in _texts(_read(folder, file)) if _LANGUAGE.fullmatch(text)}
    for language in languages:
        if known and language is not None and not {language, f"__{language}__"} & known:
            names = sorted(one.strip("_") for one in known)
            raise BadSetting(
                f"{name} does not know the language {language!r}{hint(language, names)}; it has {', '.join(names)}"
            )


def require_speech_model(name: str) -> None:
    """Raise `NotSupported` if a model's folder holds another model than a Whisper model."""
    kind = "llama" if name == "bundled" else _read(Path(name).expanduser(), CONFIG).get("model_type", "whisper")
    if kind != "whisper":
        raise NotSupported(
            f"{name} is a {kind} model, which does not transcribe speech; transcribe needs Whisper models "
            "(openai/whisper-*, distil-whisper/*)"
        )


def require_text_model(name: str) -> None:
    """Raise `NotSupported` if a model's folder holds a Whisper model, which reads audio."""
    if name != "bundled" and _read(Path(name).expanduser(), CONFIG).get("model_type") == "whisper":
        raise NotSupported(f"{name} is a whisper model, which reads audio; use specbeam transcribe")


def require_tokenizer(name: str) -> None:
    """Raise `MissingFile` if the folder of a text model has no file of a tokenizer. What is no folder is left to loading."""
    require_text_model(name)
    folder = Path(name).expanduser()
    if name == "bundled" or not folder.is_dir() or _needs_no_config(folder):
        return
    if not any(_OF_TOKENIZER.search(file.name) for file in folder.iterdir()):
        raise MissingFile(
            f"{name} has no tokenizer files, such as tokenizer.json; copy the model's into the folder, or give prompts of "
            'token ids: "prompt_token_ids" in a .jsonl file of specbeam generate'
        )


def spoken_languages(name: str) -> list[str]:
    """Return the codes of the languages in the list of a Whisper model's folder; none without such a list."""
    known = _read(Path(name).expanduser(), "generation_config.json").get("lang_to_id")
    return sorted(token.strip("<|>") for token in known) if isinstance(known, dict) else []


def check_spoken_language(name: str, language: str | None) -> None:
    """Raise `BadSetting` for a language that is missing in the list of a Whisper model's folder; see `check_languages`.

    Args:
        language: a code, a name or a token, such as "de", "german" or "<|de|>".
    """
    codes = spoken_languages(name)
    if language is None or not codes:
        return
    spoken_code(language, codes)


def spoken_code(language: str, codes: Sequence[str]) -> str:
    """Return the code of a language, such as "de". Raises `BadSetting` unless a Whisper model knows it.

    Args:
        language: a code, a name or a token; see `check_spoken_language`.
        codes: the codes of the languages of the model.
    """
    wanted = language.lower().strip("<|>")
    if wanted in codes:
        return wanted
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code = TO_LANGUAGE_CODE.get(wanted)
    if code not in codes:
        names = [name for name, code_of_name in TO_LANGUAGE_CODE.items() if code_of_name in codes]
        near = hint(wanted, [*codes, *names], _OWN_NAMES)
        some = ", ".join(codes[:SHOWN]) + (" and others" if len(codes) > SHOWN else "")
        raise BadSetting(
            f"language is {language!r}{near}; this model knows {len(codes)} languages, by a code ({some}) or an English "
            "name, such as german"
        )
    return code


def _read(folder: Path, file: str) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it is missing or broken, which loading reports."""
    try:
        return json_object(folder / file) if (folder / file).is_file() else {}
    except (BadCheckpoint, json.JSONDecodeError):
        return {}


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
