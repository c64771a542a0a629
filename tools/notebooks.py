"""Run the notebooks in docs/notebooks and keep their outputs in them: python tools/notebooks.py

No kernel is needed: cells are plain Python, run one after the other in one room. What a cell prints, and what its last
expression shows, is its output, as in any notebook.
"""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"


def notebooks() -> list[Path]:
    """Return all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(notebook: Path) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Run a notebook; return what its file holds, and the outputs of each of its code cells."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    room: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    return content, [outputs_of("".join(cell["source"]), room, notebook.name) for cell in cells]


def outputs_of(code: str, room: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Run a cell; return its outputs in the form of a notebook's file."""
    tree = ast.parse(code)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = io.StringIO()
    shown = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), room)
        if last is not None:
            shown = eval(compile(last, name, "eval"), room)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines_of(printed.getvalue())})
    if shown is not None:
        outputs.append({"data": data_of(shown), "metadata": {}, "output_type": "display_data"})
    return outputs


def data_of(shown: Any) -> dict[str, list[str]]:
    """Return what a notebook shows of a value: its picture if it has one, else its text."""
    if hasattr(shown, "_repr_svg_"):
        return {"image/svg+xml": lines_of(shown._repr_svg_()), "text/plain": ["<a forest>"]}
    return {"text/plain": lines_of(repr(shown))}


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their ends."""
    return text.splitlines(keepends=True)


def main() -> None:
    """Run all notebooks and write their outputs."""
    for notebook in notebooks():
        content, outputs = run(notebook)
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        for number, (cell, output) in enumerate(zip(cells, outputs, strict=True), 1):
            cell["outputs"] = output
            cell["execution_count"] = number
        notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{notebook.name}: {len(cells)} cells")


if __name__ == "__main__":
    main()
