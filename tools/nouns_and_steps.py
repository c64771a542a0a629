"""Make the page that lists the records and steps that decide a turn, from their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "specbeam"
PLACES = ("core", "core/laws", "core/control", "core/draft", "core/verify")
STEPS = {"step", "open_step"}
HEAD = """# Nouns and steps

The records and functions that decide a turn, by file. A noun is a record of arrays. A step is a pure function of such
records: numba compiles it for users, and the proofs run its Python source. Private steps are left out.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for path in _files():
        entries = list(_entries(ast.parse(path.read_text(encoding="utf-8"))))
        if entries:
            lines = "\n".join(entries)
            parts.append(f"## {path.relative_to(SOURCE)}\n\n{lines}\n")
    return "\n".join(parts)


def _files() -> Iterator[Path]:
    for name in PLACES:
        place = SOURCE / name
        yield from sorted(place.glob("*.py")) if place.is_dir() else [place]


def _entries(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases):
            yield f"- **{node.name}**: {_first_line(node)}"
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
            if marks & STEPS:
                yield f"- `{node.name}`: {_first_line(node)}"


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
