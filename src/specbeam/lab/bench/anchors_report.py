"""The table of `bench anchors`."""

from collections.abc import Sequence
from statistics import median

from specbeam.errors import counted
from specbeam.lab.bench.anchors import OURS, AnchorRow, Setting
from specbeam.lab.bench.tables import markdown_table, spread_text


def as_markdown(rows: Sequence[AnchorRow], rivals: Sequence[str]) -> str:
    """Return a table with a row per model, bits and mode, and the ratios to the fastest setting of each rival that ran."""
    measured = {setting.program for row in rows for setting in row.best}
    present = [rival for rival in rivals if rival in measured]
    heads = ["model", "bits", "mode", "specbeam, tokens/s", *(f"{rival}, ratio" for rival in present)]
    lines = []
    for row in rows:
        own, *others = row.best
        by_program = {one.program: one for one in others}
        cells = [_cell(by_program.get(rival)) for rival in present]
        setting = own.name.removeprefix(OURS)  # such as " with drafts"
        lines.append([row.hub, str(row.bits), row.mode, f"{spread_text(own.rate, 1)}{setting}", *cells])
    return markdown_table(heads, lines)


def _cell(setting: Setting | None) -> str:
    """Return specbeam's speed divided by that of a setting of a rival, by the clock and by processor time."""
    if setting is None:
        return ""
    form = setting.name.removeprefix(setting.program).strip()
    return f"{spread_text(setting.ours, 2)}; {setting.ours_by_processor.median:.2f} {form}".strip()


def summary(rows: Sequence[AnchorRow]) -> str:
    """Return a sentence with the least and the median ratio to the fastest rival of each row; "" without rivals."""
    ratios = sorted(
        min(one.ours.median for one in row.best if one.program != OURS) for row in rows if len(row.best) > 1
    )
    if not ratios:
        return ""
    middle = median(ratios)
    return (
        f"Ratio to the fastest rival, over {counted(len(ratios), 'row')}: median {middle:.2f}, least {ratios[0]:.2f}."
    )
