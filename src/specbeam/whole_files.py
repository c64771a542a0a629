"""Files that are whole or not there, whenever the process that writes them ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield another path to write to; what is written there takes the place of `path` when nothing has gone wrong."""
    part = path.with_name(path.name + ".part")
    yield part
    part.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    with whole(path) as part:
        part.write_bytes(content)
