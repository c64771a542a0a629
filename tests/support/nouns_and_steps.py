"""What docs/nouns_and_steps.md lists, read from the source: `python -m tests.support.nouns_and_steps` writes the page."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "specbeam"
PAGE = ROOT / "docs" / "nouns_and_steps.md"
ROOMS = ("core", "core/laws", "core/control", "core/draft", "core/verify")
HEAD = """# Nouns and steps

All that decides a turn, in the order of the rooms. A noun is a record of arrays, a step a pure function of them: numba compiles it for users,
Python runs its source for proofs, and it has one place. Private steps are left out.
"""


def page():
    """Return the text of the page."""
    parts = [HEAD]
    for path in _files():
        found = [*_entries(ast.parse(path.read_text()))]
        if found:
            lines = "\n".join(found)
            parts.append(f"## {path.relative_to(SOURCE)}\n\n{lines}\n")
    return "\n".join(parts)


def _files():
    for room in ROOMS:
        place = SOURCE / room
        yield from sorted(place.glob("*.py")) if place.is_dir() else [place]


def _entries(tree):
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases):
            yield f"- **{node.name}**: {_first_line(node)}"
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
            if marks & {"step", "open_step"}:
                yield f"- `{node.name}`: {_first_line(node)}"


def _first_line(node):
    return (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
