"""Readers of heads on one feature: Medusa, Hydra, MLP speculators, ReDrafter."""

import re
from collections.abc import Mapping
from typing import Any

from specbeam.core.errors import BadHead
from specbeam.models.heads.feature import UNLIMITED, FeatureHead, FeatureSizes
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.reading import embedding_of, filled
from specbeam.models.heads.recurrent import Hydra, MLPSpeculator, ReDrafter

MOST_HEADS = 1024
# (pattern of names in a file, the name here); the first matching pattern counts
MEDUSA_NAMES = [
    (r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(.*)", r"blocks.\1.\2.linear.\3"),
    (r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight", r"matrices.\1.weight"),
    (r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
    (r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight", r"matrices.\1.weight"),
]
HYDRA_NAMES = [
    (r"hydra_mlp\.(\d+)\.(\d+)\.(.*)", r"blocks.\1.\2.\3"),
    (r"hydra_lm_head\.(\d+)\.(weight|bias)", r"matrices.\1.\2"),
    (r"input_embed_fn\.weight", "embed_tokens.weight"),
]
SPECULATOR_NAMES = [(r"(?:speculator\.)?(emb|proj|head|ln)\.(\d+)\.(weight|bias)", r"\1.\2.\3")]
REDRAFTER_NAMES = [(r"lm_head\.(.*)", r"network.\1")]


def kind_on_feature(config: Mapping[str, Any]) -> str | None:
    """Return the kind of head on one feature by a configuration; None if it is another kind."""
    model_type = config.get("model_type")
    if "medusa_num_heads" in config or model_type == "medusa":
        return "medusa"
    if "hydra_num_heads" in config:
        return "hydra"
    return {"mlp_speculator": "mlp_speculator", "recurrent_drafting_drafter": "redrafter"}.get(str(model_type))


def read_on_feature(files: HeadFiles) -> FeatureHead:
    """Return a head on one feature. Raises `BadHead` if it cannot be read."""
    kind = kind_on_feature(files.config)
    readers = {"medusa": _medusa, "hydra": _hydra, "mlp_speculator": _mlp_speculator, "redrafter": _redrafter}
    assert kind is not None
    return readers[kind](files)


def _sizes(files: HeadFiles, depth: int) -> FeatureSizes:
    return FeatureSizes(files.width, files.vocab, files.vocab, depth)


def _rename(files: HeadFiles, names: list[tuple[str, str]]) -> None:
    """Rename tensors to the names here; names that no pattern matches stay."""
    files.tensors = {_renamed(name, names): tensor for name, tensor in files.tensors.items()}


def _renamed(name: str, names: list[tuple[str, str]]) -> str:
    for pattern, ours in names:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    return name


def _count(files: HeadFiles, pattern: str) -> int:
    return max((int(found[1]) + 1 for name in files.tensors if (found := re.match(pattern, name))), default=0)


def _counts(files: HeadFiles, kind: str, first: str) -> tuple[int, int]:
    """Return the numbers of heads and of their residual layers, by their tensors. Raises `BadHead` if there are none.

    Args:
        kind: the name of the kind of heads, for the error.
        first: the name of their first tensor in files, for the error.
    """
    depth = _count(files, r"blocks\.(\d+)\.")
    if depth == 0:
        raise BadHead(f"{files.where} holds no {kind} heads: there is no tensor {first}")
    return depth, _count(files, r"blocks\.0\.(\d+)\.")


def _medusa(files: HeadFiles) -> Medusa:
    """Read Medusa heads. Published configurations state fewer heads than their files hold, so tensors determine it."""
    _check_count(files.fields, "medusa_num_heads")
    _rename(files, MEDUSA_NAMES)
    depth, layers = _counts(files, "Medusa", "0.0.linear.weight")
    shares_matrix = not files.has("matrices.0.weight")
    if not shares_matrix:
        return filled(Medusa(_sizes(files, depth), layers), files)
    head = Medusa(_sizes(files, depth), layers, files.target.get_output_embeddings())
    return filled(head, files, ("matrices.",))


def _check_count(fields: Fields, name: str) -> None:
    """Raise `BadHead` for an invalid number of heads; it is not used, because the tensors determine the number."""
    fields.whole(name, 1, most=MOST_HEADS)


def _hydra(files: HeadFiles) -> Hydra:
    fields = files.fields
    kind = fields.text("hydra_head_arch", "mlp")
    is_grounded = fields.flag("grounded_heads", default=True)
    if kind != "mlp" or not is_grounded:
        raise BadHead(
            f"{files.where}: hydra_head_arch is {kind!r}, grounded_heads {is_grounded} in config.json; only grounded Hydra "
            "heads of the kind 'mlp' can be read"
        )
    _check_count(fields, "hydra_num_heads")
    _rename(files, HYDRA_NAMES)
    depth, layers = _counts(files, "Hydra", "hydra_mlp.0.0.linear.weight")
    sizes = _sizes(files, depth)
    head = Hydra(sizes, layers, embedding_of(files, sizes.width))
    return filled(head, files)


def _mlp_speculator(files: HeadFiles) -> MLPSpeculator:
    _rename(files, SPECULATOR_NAMES)
    fields = files.fields
    depth = fields.whole("n_predict", most=MOST_HEADS)
    sizes = _sizes(files, depth)
    if fields.whole("emb_dim") != sizes.width:
        raise fields.bad("emb_dim", f"the width of the target, {sizes.width}")
    inner = fields.whole("inner_dim", 0, least=0) or sizes.width
    files.check_size("proj.0.weight", 0, inner, "inner_dim")
    is_tied = fields.flag("tie_weights", default=False)
    if not is_tied:
        _check_depth(files, depth)
    head = MLPSpeculator(sizes, inner, fields.flag("scale_input", default=False))
    if is_tied:  # files hold shared weights once, or for each head
        for name, _ in head.named_parameters():
            part, number, rest = name.split(".", 2)
            reads_state = part == "proj" and number != "0"  # the first projection reads the feature
            first = f"{part}.{int(reads_state)}.{rest}"
            if name not in files.tensors and first in files.tensors:
                files.tensors[name] = files.tensors[first].clone()
    return filled(head, files)


def _check_depth(files: HeadFiles, depth: int) -> None:
    """Raise `BadHead` unless the files hold the stated number of heads."""
    found = _count(files, r"emb\.(\d+)\.")
    if found != depth:
        raise files.fields.bad("n_predict", f"{found}, the number of heads with tensors")


def _redrafter(files: HeadFiles) -> ReDrafter:
    _rename(files, REDRAFTER_NAMES)
    sizes = _sizes(files, UNLIMITED)
    fields = files.fields
    if fields.whole("hidden_size") != sizes.width:
        raise fields.bad("hidden_size", f"the width of the target, {sizes.width}")
    layers = fields.whole("num_draft_layers", least=0, most=MOST_HEADS)
    exit_size = fields.whole("exit_dim", 2 * sizes.width)
    if not files.has(f"network.{layers}.weight"):
        raise fields.bad(
            "num_draft_layers", f"the number of the tensor lm_head.*.weight; there is no lm_head.{layers}.weight"
        )
    files.check_size(f"network.{layers}.weight", 1, exit_size, "exit_dim")
    head = ReDrafter(
        sizes,
        layers=layers,
        exit_size=exit_size,
        is_recurrent=fields.flag("rnn", default=False),
        embedding=files.target.get_input_embeddings(),
    )
    return filled(head, files)
