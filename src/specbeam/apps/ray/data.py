"""Jobs on a cluster: the rows of a Ray data set decoded by `map_batches`, with the columns and seeds of `specbeam batch`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbeam import load
from specbeam.apps.jobs.answering import ANSWER_COLUMNS, answer_rows, work_of
from specbeam.apps.jobs.rows import Columns, row_of
from specbeam.doors import as_plain, method_from, usual_method
from specbeam.errors import BadSetting

ROWS_OF_BLOCK = 64  # blocks are written as a whole, so a lost worker costs at most one
CPUS = 0.5  # Ray CPUs per worker; a resumed job also needs CPUs for the filter that reads finished rows


class Decode:
    """A callable class for ``Dataset.map_batches``: each worker loads the pair once, and decodes blocks of rows.

    An answer has the columns of ``specbeam batch`` (`jobs.answering.ANSWER_COLUMNS`). The row's id keeps its type and the
    name of its column, so that answers can be joined and filtered by it; `beams` is JSON text, which any file format can
    store. The seed of a row depends on `seed` and its id only, so a block that is decoded again after the loss of a worker
    has the same texts. A row that cannot be decoded has an `error`, and does not affect other rows.

    Args:
        target, draft: as for `specbeam.load`; names or paths that each machine of the cluster can read.
        method, settings: a recipe by name, and its settings as NAME=VALUE; None: the pair's default, as in `generate`.
        id_column, prompt_column: the columns that are read. Each row needs an id, because blocks have no row numbers.
        seed, batch_size: see `jobs.answering.Work`.
        device, dtype, quantize, engine: see `specbeam.load`.
        options: options of `specbeam.generate`; the column "settings" of a row overrides them.

    Raises:
        BadSetting: the id column has the name of a column of answers, or a setting is invalid.
    """

    def __init__(
        self,
        target: str = "bundled",
        draft: str | None = None,
        method: str | None = None,
        settings: Sequence[str] = (),
        id_column: str = "id",
        prompt_column: str = "prompt",
        seed: int = 0,
        batch_size: int = 32,
        device: str | None = None,
        dtype: str = "auto",
        quantize: Any = None,
        engine: Any = "auto",
        **options: Any,
    ) -> None:
        if id_column != "id" and id_column in ANSWER_COLUMNS:
            raise BadSetting(f"id_column is {id_column!r}, which is a column of answers; rename the column")
        pair = load(target, draft, device=device, dtype=dtype, quantize=quantize, engine=engine)
        self.columns = Columns(id=id_column, prompt=prompt_column)
        chosen = usual_method(pair, settings) if method is None else method_from(method, settings)
        self.work = work_of(pair, chosen, seed, batch_size, options)

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the answers to the rows of a block, in order."""
        import json

        rows = []
        for number, values in enumerate(zip(*block.values(), strict=True)):
            fields = {self.columns.id: None}
            for name, value in zip(block, values, strict=True):
                fields[name] = as_plain(value)
            rows.append(row_of(number, fields, self.columns))
        answers: dict[int, dict[str, Any]] = {}
        for row, record in answer_rows(self.work, rows):
            beams = record["beams"]
            if beams is not None:
                record["beams"] = json.dumps(beams, ensure_ascii=False)
            answers[row.number] = record
        columns = {}
        for name, kind in ANSWER_COLUMNS.items():
            if name != "id":
                columns[name] = _column([answers[row.number][name] for row in rows], kind)
        ids = block.get(self.columns.id, np.full(len(rows), "", dtype=object))
        return {self.columns.id: ids, **columns}


def _column(values: list[Any], kind: str) -> np.ndarray:
    """Return a column of the same type in each block; missing numbers are NaN or -1."""
    if kind == "number":
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if kind == "integer":
        return np.array([-1 if value is None else value for value in values], dtype=np.int64)
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


def decode_table(
    source: str | Path,
    out: str | Path,
    checkpoint: str | Path,
    workers: int = 1,
    rows_of_block: int = ROWS_OF_BLOCK,
    id_column: str = "id",
    num_cpus: float = CPUS,
    num_gpus: float = 0.0,
    **decode: Any,
) -> None:
    """Decode a table on a Ray cluster into a folder of Parquet files. Repeat the call to resume an interrupted job.

    Ray Data's checkpoint stores the ids of finished rows, block by block: an interruption costs the blocks in progress.

    Args:
        source: a table (.jsonl, .csv or .parquet) or a folder of Parquet files, that all machines can read.
        out: a folder that all machines can write.
        checkpoint: a folder for the ids that are done; delete it with `out` to start again.
        workers: number of processes that each hold the models.
        rows_of_block: rows that are decoded and written together.
        num_cpus, num_gpus: resources of each worker, as Ray counts.
        decode: the arguments of `Decode`.
    """
    import ray
    from ray.data.checkpoint import CheckpointConfig

    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column=id_column,
        checkpoint_path=str(checkpoint),
        delete_checkpoint_on_success=False,  # otherwise rerunning a finished job would write each answer twice
    )
    readers = {".jsonl": ray.data.read_json, ".csv": ray.data.read_csv}
    suffix = Path(source).suffix
    rows = readers.get(suffix, ray.data.read_parquet)(str(source))
    answers = rows.repartition(target_num_rows_per_block=rows_of_block).map_batches(
        Decode,
        fn_constructor_kwargs={"id_column": id_column, **decode},
        batch_size=rows_of_block,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    answers.write_parquet(str(out))
