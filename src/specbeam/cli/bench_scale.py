"""The command `specbeam bench scale`: what a target costs that is spread over devices, assumed or fitted to passes."""

import json as json_format
from dataclasses import asdict
from pathlib import Path

from specbeam.bench.provenance import provenance
from specbeam.bench.scale import (
    Cluster,
    ModelSize,
    PassSample,
    TurnParts,
    TurnPlan,
    fitted_prices,
    held_out,
    turn_parts,
)
from specbeam.cli.common import complain
from specbeam.errors import BadSetting, MissingFile

TARGET_70B = ModelSize(layers=80, width=8192, weight_bytes=140e9, kv_bytes=2 * 80 * 8 * 128 * 2)
DRAFT_1B = ModelSize(layers=16, width=2048, weight_bytes=2e9, kv_bytes=2 * 16 * 8 * 64 * 2)


def measure(model: str, rows: list[int], stored: int, repeats: int) -> int:
    """Time passes of a model and print them as lines of JSON; return the exit code."""
    from transformers.utils import logging

    from specbeam.bench.scale_passes import scale_passes

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for sample in scale_passes(model, rows, stored, repeats):
        print(json_format.dumps(asdict(sample) | {"provenance": provenance()}))
    return 0


def check(files: list[Path]) -> int:
    """Fit prices to measured passes, predict those of each model by the others, and print both; return the exit code."""
    samples = [sample for file in files for sample in read_samples(file)]
    for rows in sorted({one.rows for one in samples}):
        prices = fitted_prices([one for one in samples if one.rows == rows])
        print(
            f"{rows} rows: {1e6 * prices.layer_s:.0f} us a layer, {1e-9 / prices.byte_s if prices.byte_s else 0:.2f} GB/s, "
            f"{1e6 * prices.reduce_s:.0f} us a sum, {1e6 * prices.tell_s:.0f} us to tell"
        )
    print("\n| model | GB of weights | ranks | rows | measured, ms | predicted by the others, ms | error |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    predictions = held_out(samples)
    for one in predictions:
        sample = one.sample
        low_high = f"{1e3 * sample.low:.1f} to {1e3 * sample.high:.1f}"
        print(
            f"| {sample.model} | {sample.size.weight_bytes / 1e9:.3f} | {sample.ranks} | {sample.rows} "
            f"| {1e3 * sample.seconds:.1f} ({low_high}) | {1e3 * one.seconds:.1f} | {one.error:+.0%} |"
        )
    errors = sorted(abs(one.error) for one in predictions)
    print(f"\nabsolute error: median {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}")
    return 0


def read_samples(path: Path) -> list[PassSample]:
    """Return the passes in a file that `measure` wrote. Raises `MissingFile` if it holds none."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json_format.loads(line)
            record.pop("provenance", None)
            found.append(PassSample(**record | {"size": ModelSize(**record["size"])}))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise MissingFile(f"{path} does not hold passes that `bench scale --measure` has printed: {error}") from error
    return found


def assume(ranks: list[int], devices: int, beams: int, plan: TurnPlan, cluster: Cluster, json: bool) -> int:
    """Print what a 70 B target with a 1 B draft would cost by the model; return the exit code."""
    for name, value in (("--ranks", min(ranks)), ("--devices", devices), ("--beams", beams), ("--rows", plan.rows)):
        if value < 1:
            raise BadSetting(f"{name} is {value}; it must be at least 1")
    columns = [turn_parts(TARGET_70B, DRAFT_1B, count, beams, plan, cluster) for count in ranks]
    if json:
        for one in columns:
            print(json_format.dumps(asdict(one) | {"turn": one.turn, "speedup": one.speedup}))
        return 0
    complain("a model, not a measurement: 70 B over devices that nobody has timed here")
    print(f"| per turn of {plan.requests} requests | " + " | ".join(f"70 B on {count}" for count in ranks) + " |")
    print("| --- |" + " --: |" * len(ranks))
    for title, text in table_rows(columns, devices):
        print(f"| {title} | " + " | ".join(text) + " |")
    return 0


def table_rows(columns: list[TurnParts], devices: int) -> list[tuple[str, list[str]]]:
    """Return the lines of a table: the name of each, and a text for each column."""
    parts = [
        ("weights", "weights"),
        ("keys and values", "cache"),
        ("arithmetic beyond reading", "arithmetic"),
        ("sums over devices", "sums"),
        ("draft passes, on one device", "drafts"),
        ("host", "host"),
        ("**turn**", "turn"),
        ("a pass without drafts", "plain"),
    ]
    rows = [(title, [f"{1e3 * getattr(one, name):.1f} ms" for one in columns]) for title, name in parts]
    rows.append(("speed-up by drafts", [f"{one.speedup:.1f}" for one in columns]))
    rows.append(
        (
            f"layers of text per second: one replica, {devices} devices",
            [f"{one.layers_per_s(one.ranks):.0f}, {one.layers_per_s(devices):.0f}" for one in columns],
        )
    )
    return rows
