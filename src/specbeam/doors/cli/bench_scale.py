"""The command `specbeam bench scale`: what a target costs that is spread over devices, assumed or fitted to passes."""

import json as json_format
import math
from dataclasses import asdict
from pathlib import Path

from specbeam.doors.cli.common import complain, print_json
from specbeam.doors.places import require_file
from specbeam.errors import BadSetting, MissingFile
from specbeam.lab.bench.provenance import provenance
from specbeam.lab.bench.scale import (
    Cluster,
    ModelSize,
    PassSample,
    TurnParts,
    TurnPlan,
    fitted_prices,
    held_out,
    turn_parts,
)

TARGET_70B = ModelSize(layers=80, width=8192, weight_bytes=140e9, kv_bytes=2 * 80 * 8 * 128 * 2)
DRAFT_1B = ModelSize(layers=16, width=2048, weight_bytes=2e9, kv_bytes=2 * 16 * 8 * 64 * 2)


def check_given(measure: str | None, samples: list[Path] | None, json: bool) -> None:
    """Raise `BadSetting` for options that do not go together."""
    if measure is not None and samples:
        raise BadSetting("--measure times passes, and --samples reads those that were timed; give one of them")
    if (measure is not None or samples) and json:
        raise BadSetting("--json is for the table; --measure prints JSON in any case, and --samples has none")


def measure(model: str, rows: list[int], stored: int, repeats: int) -> int:
    """Time passes of a model and print them as lines of JSON; return the exit code."""
    from transformers.utils import logging

    from specbeam.lab.bench.scale_passes import scale_passes

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for sample in scale_passes(model, rows, stored, repeats):
        print_json(asdict(sample) | {"provenance": provenance()})
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
    require_file(path, "give a file of passes that `bench scale --measure` has printed")
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json_format.loads(line)
            record.pop("provenance", None)
            found.append(PassSample(**record | {"size": ModelSize(**record["size"])}))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MissingFile(f"{path} does not hold passes that `bench scale --measure` has printed: {error}") from error
    if not found:
        raise MissingFile(f"{path} is empty; give a file of passes that `bench scale --measure` has printed")
    return found


def assume(ranks: list[int], devices: int, beams: int, plan: TurnPlan, cluster: Cluster, json: bool) -> int:
    """Print what a 70 B target with a 1 B draft would cost by the model; return the exit code."""
    _check(ranks, devices, beams, plan, cluster)
    columns = [turn_parts(TARGET_70B, DRAFT_1B, count, beams, plan, cluster) for count in ranks]
    if json:
        for one in columns:
            print_json(asdict(one) | {"turn": one.turn, "speedup": one.speedup})
        return 0
    complain("a model, not a measurement: 70 B over devices that nobody has timed here")
    print(f"| per turn of {plan.requests} requests | " + " | ".join(f"70 B on {count}" for count in ranks) + " |")
    print("| --- |" + " --: |" * len(ranks))
    for title, text in table_rows(columns, devices):
        print(f"| {title} | " + " | ".join(text) + " |")
    return 0


def _check(ranks: list[int], devices: int, beams: int, plan: TurnPlan, cluster: Cluster) -> None:
    """Raise `BadSetting`, by the name of its option, for a number that says nothing."""
    counts = {"--ranks": min(ranks), "--devices": devices, "--beams": beams, "--requests": plan.requests}
    for name, count in counts.items():
        if count < 1:
            raise BadSetting(f"{name} is {count}; it must be at least 1")
    if max(ranks) > devices:
        raise BadSetting(f"--ranks is {max(ranks)}, and --devices {devices}; a target needs as many devices as ranks")
    if not (plan.kept > 0 and math.isfinite(plan.kept)):
        raise BadSetting(f"--kept is {plan.kept}; it must be above 0, and finite")
    others = {
        "--depth": plan.depth,
        "--stored": plan.stored,
        "--reduce-us": 1e6 * cluster.reduce_s,
        "--host-ms": 1e3 * cluster.host_s,
    }
    for name, value in others.items():
        if not (value >= 0 and math.isfinite(value)):
            raise BadSetting(f"{name} is {value:g}; it must be 0 or more, and finite")


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
