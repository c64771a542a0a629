"""Reports in Markdown: as they are in files and pipes, with drawn tables on a terminal."""

from itertools import groupby

_BETWEEN = 3  # columns between two cells of a drawn table


def print_report(text: str) -> None:
    """Print a report. On a terminal its tables are drawn, without columns that are empty, in parts that fit the width."""
    from specbeam.doors.cli.screen import Screen

    console = Screen()
    if not console.is_terminal:
        print(text)
        return
    for is_table, lines in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            for part in parts_of([_cells(line) for line in lines], console.width):
                console.print(_drawn(part))
        else:
            console.print("\n".join(lines))


def parts_of(table: list[list[str]], width: int) -> list[list[list[str]]]:
    """Return a table as several ones, each with the first column and at most `width` columns of text wide if possible.

    Args:
        table: the heads, the line below them, and the rows of a table in Markdown, as lists of cells.
    """
    heads, _, *rows = table
    used = [place for place in range(1, len(heads)) if any(row[place] for row in rows)]
    sizes = [max(len(line[place]) for line in (heads, *rows)) + _BETWEEN for place in range(len(heads))]
    groups: list[list[int]] = [[]]
    for place in used:
        taken = sizes[0] + sum(sizes[one] for one in groups[-1])
        if groups[-1] and taken + sizes[place] > width:
            groups.append([])
        groups[-1].append(place)
    return [[[line[place] for place in (0, *group)] for line in (heads, *rows)] for group in groups]


def _cells(line: str) -> list[str]:
    """Return the cells of a line of a table in Markdown, without marks of code and bold type."""
    cells = line.removeprefix("|").removesuffix("|").split(" | ")
    return [cell.strip().replace("`", "").replace("**", "") for cell in cells]


def _drawn(table: list[list[str]]) -> object:
    """Return a table of rich; the first column is aligned to the left, as all of text."""
    from rich.table import Table

    heads, *rows = table
    drawn = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0))
    for head in heads:
        drawn.add_column(head, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
