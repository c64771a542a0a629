"""Reading of GGUF files (llama.cpp): their metadata, and the places of their tensors, without the numbers.

The `gguf` package and transformers' reader take half a minute for a vocabulary of 150,000 tokens, build the header several
times, and read truncated files without an error. So specbeam reads the header itself. The format is documented in
`docs/gguf.md` of the ggml project.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.core.errors import BadCheckpoint, NotSupported
from specbeam.engines.blocks import BLOCKS

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_OF_ONE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_ALIGNMENT = 32
_LEAST_BYTES = {"key": 13, "tensor": 24, _STRING: 8, _ARRAY: 12}  # of an entry: a larger count cannot be right
PLAIN_TYPES = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}  # name and bytes of a number
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
        type: ggml's number of its type.
        shape: as in torch: the numbers of the last dimension follow each other.
        start: offset of its first byte in the file.
        bytes: its size.
    """

    type: int
    shape: tuple[int, ...]
    start: int
    bytes: int

    @property
    def type_name(self) -> str:
        """Ggml's name of its type."""
        return type_name(self.type)


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        metadata: values by key. An array of strings or numbers is a list.
        tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The name of the model's architecture in llama.cpp."""
        return str(self.metadata.get("general.architecture", ""))

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture, such as "block_count"; `default` if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def type_name(number: int) -> str:
    """Return ggml's name of a type."""
    if number in BLOCKS:
        return BLOCKS[number].name
    if number in PLAIN_TYPES:
        return PLAIN_TYPES[number][0]
    return _OTHER_TYPES.get(number, f"type {number}")


def read_header(path: Path) -> GgufFile:
    """Return the header of a GGUF file.

    Raises `BadCheckpoint` if it is broken, or if the file ends before its last tensor; `NotSupported` if it is a part of a
    model or another version of the format.
    """
    size = path.stat().st_size
    if size < 24:
        raise BadCheckpoint(f"{path} has {size} bytes, too few for a GGUF file; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _Reader(path, content).header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise BadCheckpoint(
                f"{path} cannot be read: its header is broken or ends too early ({error}); download it again"
            ) from error


class _Reader:
    """A reader of the header of a file, from its beginning to its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.at = 0

    def header(self) -> GgufFile:
        magic = self.content[:4]
        if magic != _MAGIC:
            raise BadCheckpoint(f"{self.path} begins with {magic!r} and not with {_MAGIC!r}: it is not a GGUF file")
        version, tensors, keys = struct.unpack_from("<IQQ", self.content, 4)
        if version not in _VERSIONS:
            raise NotSupported(
                f"{self.path} is version {version} of GGUF, and specbeam reads {' and '.join(map(str, _VERSIONS))}, little-"
                "endian; convert the original model again"
            )
        self.at = 24
        self._check_count(keys, "key")
        metadata = {}
        for _ in range(keys):
            name = self._string()
            metadata[name] = self._value(self._number("I"))
        self._check_count(tensors, "tensor")
        entries = [self._entry() for _ in range(tensors)]
        if metadata.get("split.count", 1) > 1:
            raise NotSupported(
                f"{self.path} is one of {metadata['split.count']} parts of a split GGUF model, and specbeam reads whole "
                "files; join them with llama-gguf-split --merge, and give the result"
            )
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadCheckpoint(f"{self.path} has general.alignment {alignment!r}; it must be a number of bytes")
        start = -(-self.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in found:
                raise BadCheckpoint(f"{self.path} holds two tensors of the name {name}; download it again")
            found[name] = self._placed(name, kind, shape, start + offset)
        return GgufFile(self.path, metadata, found)

    def _placed(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        """Return a tensor. Raises `BadCheckpoint` if it ends beyond the file, `NotSupported` for an unknown type."""
        count = math.prod(shape)
        if kind in PLAIN_TYPES:
            size = count * PLAIN_TYPES[kind][1]
        elif kind in BLOCKS:
            block = BLOCKS[kind]
            if not shape or shape[-1] % block.weights:
                raise BadCheckpoint(
                    f"{self.path}: {name} is {[*shape]}, and blocks of {block.name} hold {block.weights} numbers of a row; "
                    "download the file again"
                )
            size = count // block.weights * block.bytes
        else:
            known = ", ".join([*(one.name for one in BLOCKS.values()), *(one for one, _ in PLAIN_TYPES.values())])
            raise NotSupported(
                f"{self.path}: {name} is in {type_name(kind)}, and specbeam reads {known}; give the model in one of these, "
                "such as a Q4_K_M file"
            )
        if start + size > len(self.content):
            raise BadCheckpoint(
                f"{self.path} has {len(self.content):,} bytes, and {name} ends at {start + size:,}: the file is not "
                "complete; download it again"
            )
        return GgufTensor(kind, shape, start, size)

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, type, shape and offset of the next tensor."""
        name = self._string()
        dimensions = self._number("I")
        if dimensions > 4:
            raise BadCheckpoint(f"{self.path}: {name} has {dimensions} dimensions; at most 4 are possible")
        shape = [self._number("Q") for _ in range(dimensions)]
        return name, self._number("I"), tuple(reversed(shape)), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in _OF_ONE:
            return self._number(_OF_ONE[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise BadCheckpoint(f"{self.path} cannot be read: its header holds a value of the unknown type {kind}")
        inner = self._number("I")
        count = self._number("Q")
        if inner in _OF_ONE:
            size = struct.calcsize("<" + _OF_ONE[inner])
            self._check_count(count, size)
            found = struct.unpack_from(f"<{count}{_OF_ONE[inner]}", self.content, self.at)
            self.at += count * size
            return list(found)
        self._check_count(count, inner if inner in (_STRING, _ARRAY) else 1)
        return [self._value(inner) for _ in range(count)]

    def _number(self, code: str) -> Any:
        (found,) = struct.unpack_from("<" + code, self.content, self.at)
        self.at += struct.calcsize("<" + code)
        return found

    def _string(self) -> str:
        length = self._number("Q")
        self._check_count(length, 1)
        found = self.content[self.at : self.at + length].decode("utf-8")
        self.at += length
        return found

    def _check_count(self, count: int, what: Any) -> None:
        """Raise `BadCheckpoint` if the rest of the file cannot hold this number of entries.

        Args:
            what: a key of `_LEAST_BYTES`, or the bytes of an entry.
        """
        least = _LEAST_BYTES.get(what, what)
        if count * least > len(self.content) - self.at:
            raise BadCheckpoint(
                f"{self.path} cannot be read: its header announces {count:,} entries, and {len(self.content) - self.at:,} "
                "bytes follow; the file is broken or not complete: download it again"
            )
