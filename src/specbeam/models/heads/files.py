"""The files of a draft head: its configuration and its tensors, from a folder, a hub id, or a module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specbeam.core.errors import BadHead, MissingFile, SpecbeamError
from specbeam.engines.eligibility import output_shape
from specbeam.models.checkpoints.boundary import json_object, reading
from specbeam.models.checkpoints.headers import read_tensors, tensors_in
from specbeam.models.checkpoints.hub import hub_lookups, hub_note
from specbeam.models.checkpoints.numbers import fault_of
from specbeam.models.heads.fields import Fields

TENSOR_FILES = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt")
MAPS = ("d2t", "t2d")  # tensors that name tokens
_LISTED = 6  # names that an error lists


@dataclass(eq=False)
class HeadFiles:
    """A stored head. Readers take its tensors by name, and check that none is left.

    Attributes:
        where: the name of the head, for errors.
        config: the content of its config.json.
        tensors: by name, without the taken ones.
        target: the model that the head drafts for.
        taken: names of the taken tensors.
    """

    where: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: Any = None
    taken: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is left to take."""
        return name in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor. Raises `BadHead` if it is missing, has another shape than stated, or is not finite."""
        found = self._found(name)
        if shape:
            self.check_shape(name, shape)
        del self.tensors[name]
        if name not in MAPS and (fault := fault_of(found)):
            raise BadHead(f"{self.where}: {name} {fault}; the weights of a head must be finite floats")
        self.taken.add(name)
        return found

    def _found(self, name: str) -> Tensor:
        if not self.has(name):
            raise BadHead(f"{self.where} has no tensor {name}; it has {_some(self.tensors)}")
        return self.tensors[name]

    def check_all_taken(self) -> None:
        """Raise `BadHead` if tensors are left, which means that the head is of another kind."""
        if self.tensors:
            raise BadHead(
                f"{self.where} holds tensors that are not known: {_some(self.tensors)}; heads of this kind cannot be read"
            )

    @property
    def fields(self) -> Fields:
        """The fields of its config.json, for checked reading."""
        return Fields(self.where, self.config)

    @property
    def width(self) -> int:
        """The size of the target's hidden states."""
        return int(self.target.config.get_text_config().hidden_size)

    @property
    def vocab(self) -> int:
        """The number of tokens that the target gives logits for."""
        return output_shape(self.target)[0]

    def size(self, name: str, axis: int) -> int:
        """Return the number of rows (axis 0) or columns (axis 1) of a matrix. Raises `BadHead` if it is missing."""
        found = self._found(name)
        if found.ndim != 2:
            raise BadHead(f"{self.where}: {name} is {[*found.shape]}; it must be a matrix")
        return found.shape[axis]

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `BadHead` if a tensor has another shape than stated."""
        found = self.tensors.get(name)
        if found is not None and tuple(found.shape) != shape:
            raise BadHead(f"{self.where}: {name} is {[*found.shape]}, and {[*shape]} was expected by its config.json")

    def check_size(self, name: str, axis: int, stated: int, by: str) -> None:
        """Raise `BadHead` unless a matrix has the stated number of rows (axis 0) or columns (axis 1).

        Sizes are checked before a head is made, which might not fit in memory.

        Args:
            by: the fields that state it, for the error.
        """
        found = self.size(name, axis)
        if found != stated:
            what = "rows" if axis == 0 else "columns"
            raise BadHead(f"{self.where}: {name} has {found} {what}, and {stated} by {by} in config.json")


def _some(names: Mapping[str, Any]) -> str:
    if not names:
        return "none"
    listed = sorted(names)
    more = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def read_files(source: "str | Path | nn.Module", target: Any = None) -> HeadFiles:
    """Return the files of a head from a folder, a hub id, or a module with a `config`.

    Raises `MissingFile` if there are none, and `BadHead` if they cannot be read.
    """
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        if config is None:
            raise BadHead(f"{type(source).__name__} has no config, so its kind of head is unknown")
        described = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
        tensors = {name: tensor.detach() for name, tensor in source.state_dict().items()}
        return HeadFiles(type(source).__name__, described, tensors, target)
    folder = folder_of(source)
    return HeadFiles(str(source), read_config(folder), _read_tensors(folder), target)


def folder_of(source: "str | Path", patterns: Sequence[str] = ("*.json", *TENSOR_FILES)) -> Path:
    """Return the folder of a head; a head on the hub is fetched. Raises `MissingFile` if there is none.

    Args:
        patterns: patterns of the file names to fetch.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    what = f"{source} is neither a folder nor a repository that can be fetched"
    with reading(what, MissingFile, hub_note()), hub_lookups(source):
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises `MissingFile` or `BadHead`."""
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFile(f"{folder} holds no config.json")
    return json_object(path, BadHead)


def names_in(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder, without reading the tensors; empty if the files cannot be read."""
    try:
        return {*tensors_in(_files_in(folder))}
    except SpecbeamError:
        return set()


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = _files_in(folder)
    if not paths:
        raise MissingFile(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = read_tensors(path, BadHead)
        if twice := sorted(tensors.keys() & found.keys()):
            raise BadHead(f"several files in {folder} hold {twice[0]}, including {path.name}; keep one of them")
        tensors |= found
    return tensors


def _files_in(folder: Path) -> list[Path]:
    safe, *pickled = TENSOR_FILES
    return sorted(folder.glob(safe)) or sorted(path for pattern in pickled for path in folder.glob(pattern))
