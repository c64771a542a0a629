"""Loading of tokenizers from files, hub ids or the folder of a model object."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.errors import MissingFile, MissingPackage, warn
from specbeam.models.adapters import adapter_at
from specbeam.models.checkpoints.boundary import beginning, json_object, reading
from specbeam.models.checkpoints.folders import BUNDLED, gguf_in
from specbeam.models.checkpoints.gguf import read_header
from specbeam.models.checkpoints.headers import file_of
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.heads.probe import TextStarts
from specbeam.models.loading.models import name_or_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# SentencePiece files in published folders of Marian, T5 and M2M100.
_PIECES = ("source.spm", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "tokenizer.model")
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", *_PIECES, "vocab.json")
_SETTINGS = ("config.json", "tokenizer_config.json")
_WORDS_OF_GGUF = "tokenizer.ggml.tokens"
_FEW = 64  # vocabularies up to this size are checked for tokens other than special ones
_READ_PIECES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # package: its module


def read_tokenizer(source: Any, fetch: bool = True) -> "PreTrainedTokenizerBase | None":
    """Return a tokenizer object unchanged, or load the tokenizer at a path or hub id, or of a model object.

    Returns None if a model object does not name a folder with a tokenizer, or, with a warning, if the tokenizer has only
    special tokens.

    Raises `MissingFile` if loading fails, `MissingPackage` if a package is missing.
    """
    if isinstance(source, (str, Path)):
        from transformers import AutoTokenizer

        if (file := gguf_in(source)) is not None:
            return _tokenizer_of_gguf(file)
        place = source if Path(source).expanduser().exists() else name_or_path(source)
        if (adapter := adapter_at(place)) is not None and not has_tokenizer_files(str(source), fetch):
            return read_tokenizer(adapter.base, fetch)
        path = Path(source).expanduser()
        name = str(path) if path.is_dir() else name_or_path(source)  # a folder need not hold a model
        # Without trust_remote_code, transformers would ask on the terminal whether custom code may run.
        options = {"trust_remote_code": False} if _names_code(name) else {}
        try:
            what = f"could not load a tokenizer from {source}"
            with reading(what, MissingFile, "; give load(tokenizer=...)"), hub_lookups(name):
                tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not fetch, **options)
        except MissingFile as error:
            _check_reads_pieces(name, error)
            raise
        return tokenizer if _has_words(tokenizer, name) else None
    if isinstance(source, torch.nn.Module):
        folder = getattr(source, "name_or_path", "")
        if folder and gguf_in(folder) is not None:
            return read_tokenizer(folder)
        has_tokenizer = folder and (Path(folder) / "tokenizer_config.json").is_file()
        return read_tokenizer(folder) if has_tokenizer else None
    return source


def has_tokenizer_files(name: str, fetch: bool) -> bool:
    """Return whether a folder or hub repository has files of a tokenizer.

    Args:
        fetch: whether to download files that are missing in the hub's cache.
    """
    if (file := gguf_in(name)) is not None:
        return _WORDS_OF_GGUF in read_header(file).metadata
    if Path(name).expanduser().is_dir():
        return any((Path(name).expanduser() / file).is_file() for file in _TOKENIZER_FILES)
    return any(_is_on_hub(name, file, fetch) for file in _TOKENIZER_FILES)


def _tokenizer_of_gguf(file: Path) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in a GGUF file, which transformers makes of its metadata; None, with a warning, without words."""
    from transformers import PreTrainedTokenizerFast

    if _WORDS_OF_GGUF not in read_header(file).metadata:
        warn(
            f"{file} holds no tokenizer; the model is loaded without one, for prompts of token ids; for prompts of text, "
            "use load(tokenizer=...)",
        )
        return None
    with reading(f"could not make a tokenizer of {file}", MissingFile, "; give load(tokenizer=...)"):
        # AutoTokenizer would first read the model's configuration, which takes ten times as long.
        found: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    found.name_or_path = str(file)
    return found


def _is_on_hub(name: str, file: str, fetch: bool) -> bool:
    """Return whether a hub repository has a file; False if it does not exist or cannot be reached."""
    from transformers.utils import cached_file

    try:
        with hub_lookups(name):
            found = cached_file(name, file, local_files_only=not fetch, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return False
    return found is not None


def _names_code(name: str) -> bool:
    """Return whether the config files of a model or tokenizer name custom code. Raises `MissingFile` if they are broken."""
    held = [json_object(path, MissingFile) for file in _SETTINGS if (path := file_of(name, file)) is not None]
    return any("auto_map" in settings for settings in held)


def _has_words(tokenizer: Any, name: str) -> bool:
    """Return whether a tokenizer has tokens besides special ones, and warn if not.

    transformers creates tokenizers of some classes without words if their files are missing.
    """
    if len(tokenizer) > _FEW or not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        return True
    warn(
        f"the tokenizer of {name} has no words, only {', '.join(tokenizer.all_special_tokens)}: its tokenizer.json (or "
        "vocab.json with merges.txt, or tokenizer.model) is missing or empty. The model is loaded without a tokenizer, for "
        "prompts of token ids; for prompts of text, use load(tokenizer=...)",
    )
    return False


def _check_reads_pieces(name: str, error: Exception) -> None:
    """Raise `MissingPackage` if a tokenizer is only a SentencePiece model and a package to read it is missing.

    The error of transformers does not name the missing package.

    Args:
        name: path or hub id of the tokenizer.
        error: the error of transformers.
    """
    missing = [package for package, module in _READ_PIECES.items() if not _is_there(module)]
    if not missing or _is_on_hub(name, "tokenizer.json", fetch=False):
        return
    file = next((file for file in _PIECES if _is_on_hub(name, file, fetch=False)), None)
    if file is not None:
        raise MissingPackage(
            f"the tokenizer of {name} is a SentencePiece model ({file}), and {' and '.join(missing)} is missing: "
            f"pip install {' '.join(_READ_PIECES)}; the error of transformers is {beginning(error)}"
        ) from error


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def ends_of(model: Any, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[int, ...]:
    """Return the end tokens from a model's generation config, or else from the tokenizer."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def text_starts(model: Any, tokenizer: "PreTrainedTokenizerBase | None", vocab: int) -> TextStarts:
    """Return the beginnings of the texts on which a head is probed: for the bundled target sentences to translate."""
    ends = ends_of(model, tokenizer)
    if tokenizer is None:
        return TextStarts([_few_tokens(vocab)], ends)
    if Path(model.name_or_path) == BUNDLED / "target":
        lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
        return TextStarts([list(tokenizer(line.split("\t")[0])["input_ids"]) for line in lines], ends)
    tokens = list(tokenizer("A dog is running.")["input_ids"])[:8]
    return TextStarts([tokens if len(tokens) > 1 else _few_tokens(vocab)], ends)


def _few_tokens(vocab: int) -> list[int]:
    return [min(3, vocab - 1), min(4, vocab - 1)]
