"""Loading of transformers models, with checks of the files before and of the result after."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.core.errors import BadCheckpoint, SpecbeamError
from specbeam.models.checkpoints.boundary import reading
from specbeam.models.checkpoints.configs import (
    check_fits_files,
    check_generation_config,
    class_for_texts,
    config_of,
    described_by,
)
from specbeam.models.checkpoints.folders import without_weights
from specbeam.models.checkpoints.headers import StoredTensor, tensors_in, weight_files
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.checkpoints.report import check_report, check_types, lacking_experts


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's files and their description, without the weights.

    Attributes:
        name: a folder or hub id.
        described: the content of config.json.
        config: transformers' configuration.
        kind: the transformers class that loads the model.
        files: the weight files.
        stored: descriptions of their tensors, by name.
    """

    name: str
    described: dict[str, Any]
    config: Any
    kind: Any
    files: tuple[Path, ...]
    stored: dict[str, StoredTensor]

    @property
    def is_rounded(self) -> bool:
        """Whether the configuration states that the weights are rounded."""
        return getattr(self.config, "quantization_config", None) is not None

    @property
    def reads_sources(self) -> bool:
        """Whether this is an encoder-decoder model."""
        return bool(getattr(self.config, "is_encoder_decoder", False))


def open_checkpoint(name: str, kind: Any = None) -> Checkpoint:
    """Return the checkpoint at a folder or hub id.

    Args:
        kind: the transformers class that loads it; None: the language model class of its configuration.

    Raises an error if the checkpoint is missing, broken or not supported.
    """
    described = described_by(name)
    config = config_of(name, described)
    kind = class_for_texts(name, described, config) if kind is None else kind
    check_generation_config(name)
    named = getattr(config, "transformers_weights", None)
    files = weight_files(name, named if isinstance(named, str) else None)
    if not files:
        raise without_weights(name, Path(name) if Path(name).is_dir() else None)
    stored = tensors_in(files)
    check_fits_files(name, config, stored, kind)
    return Checkpoint(name, described, config, kind, tuple(files), stored)


def pretrained(
    checkpoint: Checkpoint, what: str, error: type[SpecbeamError] = BadCheckpoint, end: str = "", **options: Any
) -> Any:
    """Return a model that transformers loads from files with all of their tensors.

    Raises an error that names the tensors if some are missing, unexpected, or of another shape or type.

    Args:
        what: beginning of the message for errors of a library.
        error: type of the error raised for errors of a library.
        end: end of its message.
        options: options of `from_pretrained`.
    """
    with reading(what, error, end + lacking_experts(checkpoint.stored)), hub_lookups(checkpoint.name):
        model, report = checkpoint.kind.from_pretrained(
            checkpoint.name,
            config=checkpoint.config,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_report` names them with their shapes
            **options,
        )
    try:
        check_report(checkpoint.name, report, model, checkpoint.described, checkpoint.stored)
    except BadCheckpoint as fault:
        raise BadCheckpoint(f"{fault}{end}") from fault
    if not checkpoint.is_rounded:
        check_types(checkpoint.name, checkpoint.stored, model)
    return model
