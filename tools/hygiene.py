"""Look for what no review should have to find: python tools/hygiene.py [FILE ...]

Without files it looks at all that git tracks. It finds files that are too large, white space at the ends of lines, a missing
or doubled line break at the end, marks of a merge, tabs in Python, and TOML, YAML and JSON that cannot be read.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
MOST_BYTES = 1_000_000
LARGE = ("src/specbeam/bundled/",)  # the models that come with the package
TEXTS = {".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".cff", ".txt", ".json", ".ipynb", ".css", ".svg", ".tsv"}


def faults(file: Path) -> Iterator[str]:
    """Yield what is wrong with a file."""
    name = file.relative_to(ROOT).as_posix()
    content = file.read_bytes()
    if len(content) > MOST_BYTES and not name.startswith(LARGE):
        yield f"{name}: {len(content):,} bytes; at most {MOST_BYTES:,}"
    if file.suffix not in TEXTS and file.name != "Makefile":
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield f"{name}: not UTF-8: {error.reason} at byte {error.start}"
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line != line.rstrip() and file.suffix not in (".ipynb", ".tsv"):
            yield f"{name}, line {number}: white space at its end"
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            yield f"{name}, line {number}: a mark of a merge"
        if file.suffix in (".py", ".pyi") and "\t" in line:
            yield f"{name}, line {number}: a tab"
    ends_well = text.endswith("\n") and not text.endswith("\n\n")
    if text and not ends_well and file.suffix != ".json":  # libraries write JSON without it
        yield f"{name}: must end with one line break"
    yield from _unreadable(name, file.suffix, text)


def _unreadable(name: str, suffix: str, text: str) -> Iterator[str]:
    try:
        if suffix == ".toml":
            tomllib.loads(text)
        if suffix in (".json", ".ipynb"):
            json.loads(text)
        if suffix in (".yml", ".yaml", ".cff"):
            yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        yield f"{name}: {error}"


def tracked() -> list[Path]:
    """Return the files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def main() -> int:
    """Print all faults; return 1 if there are any, else 0."""
    files = [Path(name).resolve() for name in sys.argv[1:]] or tracked()
    found = [fault for file in files for fault in faults(file)]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
