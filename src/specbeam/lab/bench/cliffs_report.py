"""The table of cliffs as Markdown: an overview of ratios, and every cell with its spread."""

from collections.abc import Sequence

from specbeam.lab.bench.cliffs import CLIFF, SLOWER, SpeedCell
from specbeam.lab.bench.speed import Spread
from specbeam.lab.bench.tables import markdown_table, spread_text


def as_markdown(cells: Sequence[SpeedCell]) -> str:
    """Return a page: a summary, an overview and the figures of each kind of prompts and batch size, and the errors."""
    parts = [summary(cells)]
    for kind, size in dict.fromkeys((cell.kind, cell.batch_size) for cell in cells):
        table = [cell for cell in cells if (cell.kind, cell.batch_size) == (kind, size)]
        parts += [f"## {kind} prompts, {size} at once", overview(table), figures(table)]
    messages = dict.fromkeys(cell.message for cell in cells if cell.message)
    if messages:
        lines = [" ".join(message.split()) for message in messages]
        parts.append("What broke:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def summary(cells: Sequence[SpeedCell]) -> str:
    """Return a sentence with the number of cells, of measured ones, and of flagged ones."""
    measured = [cell for cell in cells if cell.ours is not None]
    compared = [cell for cell in measured if cell.ratio is not None]
    slower = [cell for cell in measured if SLOWER in cell.flags]
    steep = [cell for cell in measured if CLIFF in cell.flags]
    return (
        f"{len(measured)} cells of {len(cells)} measured: {len(slower)} of {len(compared)} slower than transformers, "
        f"{len(steep)} below half of their method's best."
    )


def overview(cells: Sequence[SpeedCell]) -> str:
    """Return a table with a row per method and a column per option: the median ratio to transformers, and the flags.

    Args:
        cells: cells of one kind of prompts and one batch size.
    """
    options = list(dict.fromkeys(cell.option for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    places = {(cell.method, cell.option): cell for cell in cells}
    rows = []
    for method in methods:
        cells_of_method = [_ratio_and_flags(places[method, option]) for option in options]
        rows.append([method, *cells_of_method])
    return markdown_table(["ratio to transformers", *options], rows)


def figures(cells: Sequence[SpeedCell]) -> str:
    """Return a table with a row per cell: medians of the rounds, with the smallest and the largest round."""
    heads = ["method", "option", "tokens/s", "transformers", "its tokens/s", "ratio", "of its best", "flags"]
    rows = []
    for cell in cells:
        share = "" if cell.of_best is None else f"{cell.of_best:.2f}"
        rows.append([
            cell.method, cell.option, _spread(cell.ours, 1, cell.why_not_ours), cell.replaces.replace("_", " "),
            _spread(cell.theirs, 1, cell.why_not_theirs), _spread(cell.ratio, 2, ""), share, _flags(cell),
        ])  # fmt: skip
    return markdown_table(heads, rows)


def _ratio_and_flags(cell: SpeedCell) -> str:
    if cell.ours is None:
        return cell.why_not_ours
    ratio = f"({cell.why_not_theirs})"
    if cell.ratio is not None:
        ratio = f"{cell.ratio.median:.2f}"
    return f"{ratio} {_flags(cell)}".strip()


def _flags(cell: SpeedCell) -> str:
    return " ".join(f"**{flag}**" for flag in cell.flags)


def _spread(spread: Spread | None, digits: int, why_not: str) -> str:
    if spread is None:
        return why_not
    return spread_text(spread, digits)
