"""Pictures of a turn's forest, for terminals and as SVG."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbeam.core.records import Turn
from specbeam.doors.places import write_output
from specbeam.doors.plain import for_xml

if TYPE_CHECKING:
    from rich.tree import Tree

Words = Callable[[int], str]  # the text of a token
MARKS = {"root": "●", "accepted": "✓", "rejected": "✗", "resampled": "↻", "unused": "·"}
STYLES = {"root": "bold", "accepted": "bold green", "rejected": "red", "resampled": "bold yellow", "unused": "dim"}
COLOURS = {"root": "#333", "accepted": "#1a7f37", "rejected": "#cf222e", "resampled": "#9a6700", "unused": "#8c959f"}
MEANINGS = {
    "accepted": "draft accepted by the target",
    "rejected": "draft rejected by the target",
    "resampled": "the target's own choice, not drafted",
    "unused": "draft that was not reached",
}


@dataclass(frozen=True)
class Leaf:
    """A node of the picture: a root, a draft node, or the target's own choice where its token was not drafted."""

    parent: int  # index into the picture, -1 at a root
    text: str
    fate: str  # a key of MARKS
    p: float | None = None  # probability under the target's joint law; None if the layer was not reached
    q: float | None = None  # probability under the draft's joint law


def picture(turn: Turn, words: Words) -> list[Leaf]:
    """Return the nodes of a turn's forest with their fates, and the target's own choices; parents come first.

    The method must record its trials (`trace=True`).
    """
    forest = turn.forest
    nodes = [Leaf(int(parent), words(int(token)), "unused" if parent >= 0 else "root")
             for parent, token in zip(forest.parents, forest.tokens, strict=True)]  # fmt: skip
    for trial in turn.verdict.trials:
        leaf = Leaf(trial.parent, words(trial.token), trial.fate, trial.p, trial.q)
        if trial.node >= 0:
            nodes[trial.node] = leaf
        else:
            nodes.append(leaf)
    return nodes


def odds(leaf: Leaf) -> str:
    """Return a label with the probabilities of a node, such as "p 0.25 q 0.5"; "" if its layer was not reached."""
    if leaf.p is None:
        return ""
    draft = f" q {leaf.q:.2g}" if leaf.q else ""
    return f"p {leaf.p:.2g}{draft}"


def as_trees(nodes: list[Leaf]) -> list["Tree"]:
    """Return the picture as trees of the library rich, one per beam."""
    from rich.text import Text
    from rich.tree import Tree

    trees: dict[int, Tree] = {}  # by index of the node
    for index, leaf in enumerate(nodes):
        label = Text.assemble(
            (f"{MARKS[leaf.fate]} {leaf.text!r}", STYLES[leaf.fate]),
            ("  " + odds(leaf) if leaf.p is not None else "", "dim"),
        )
        trees[index] = Tree(label) if leaf.parent < 0 else trees[leaf.parent].add(label)
    return [trees[index] for index, leaf in enumerate(nodes) if leaf.parent < 0]


def as_label(text: str) -> str:
    """Return a text for matplotlib, with dollar signs escaped."""
    return for_xml(text).replace("$", r"\$")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a matplotlib figure to a file, in the format of the file's suffix."""
    raw = BytesIO()
    figure.savefig(raw, dpi=130, format=Path(path).suffix[1:].lower())
    write_output(Path(path), raw.getvalue())


class Svg(str):
    """The text of an SVG file; notebooks show the picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def as_svg(nodes: list[Leaf]) -> Svg:
    """Return the picture as SVG, with layers from left to right."""
    depth, row = _places(nodes)
    x = 30 + 190 * depth
    y = 50 + 30 * row
    width = int(x.max()) + 190
    height = int(y.max()) + 76
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    parts += [f'<text x="{30 + 190 * n}" y="24" font-size="12" fill="#666">{"beams" if n == 0 else f"layer {n}"}</text>'
              for n in range(int(depth.max()) + 1)]  # fmt: skip
    for index, leaf in enumerate(nodes):
        if leaf.parent >= 0:
            x0 = x[leaf.parent] + 8
            y0 = y[leaf.parent]
            x1 = x[index] - 8
            y1 = y[index]
            middle = (x0 + x1) / 2
            dash = ' stroke-dasharray="3 3"' if leaf.fate == "unused" else ""
            parts.append(
                f'<path d="M{x0:.0f} {y0:.0f} C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}" fill="none" '
                f'stroke="{COLOURS[leaf.fate]}"{dash}/>'
            )
    for index, leaf in enumerate(nodes):
        colour = COLOURS[leaf.fate]
        filled = colour if leaf.fate in ("root", "accepted", "resampled") else "white"
        parts.append(f'<circle cx="{x[index]:.0f}" cy="{y[index]:.0f}" r="6" fill="{filled}" stroke="{colour}"/>')
        parts.append(
            f'<text x="{x[index] + 11:.0f}" y="{y[index] - 3:.0f}" font-size="13" fill="{colour}">'
            f"{escape(for_xml(leaf.text))}</text>"
        )
        if leaf.p is not None:
            parts.append(
                f'<text x="{x[index] + 11:.0f}" y="{y[index] + 12:.0f}" font-size="9" fill="#777">{odds(leaf)}</text>'
            )
    for place, (fate, meaning) in enumerate(MEANINGS.items()):
        left = 30 + place % 2 * 250
        low = height - 32 + place // 2 * 18
        parts.append(f'<text x="{left}" y="{low}" font-size="11" fill="{COLOURS[fate]}">{MARKS[fate]} {meaning}</text>')
    return Svg("\n".join([*parts, "</svg>"]) + "\n")


def _places(nodes: list[Leaf]) -> tuple[np.ndarray, np.ndarray]:
    """Return the depth and the row of each node: one row per leaf, parents at the mean row of their children."""
    depth = np.zeros(len(nodes))
    children: dict[int, list[int]] = {index: [] for index in range(-1, len(nodes))}
    for index, leaf in enumerate(nodes):
        children[leaf.parent].append(index)
        depth[index] = 0 if leaf.parent < 0 else depth[leaf.parent] + 1
    row = np.zeros(len(nodes))
    free = 0  # the next free row

    def place(index: int) -> None:
        """Set the rows of a node and of all nodes below it."""
        nonlocal free
        for child in children[index]:
            place(child)
        if children[index]:
            row[index] = np.mean(row[children[index]])
        else:
            row[index] = free
            free += 1

    for root in children[-1]:
        place(root)
    return depth, row
