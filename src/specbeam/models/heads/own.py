"""The format of heads without a published format: weights, and a configuration with the fields of their shape."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from specbeam.core.errors import BadHead
from specbeam.core.records import FINAL
from specbeam.models.heads.bita import Bita
from specbeam.models.heads.block import BlockShape
from specbeam.models.heads.chimera import OWN, READ_OUTS, Chimera, ChimeraShape
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.exit import ExitHead, exit_config, read_exit
from specbeam.models.heads.extra_rows import ExtraHead
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.head import Head
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.layers import LayerSizes, Rotary
from specbeam.models.heads.reading import (
    FIELD_NAMES,
    MOST_ROWS,
    check_layers,
    check_taps,
    check_target,
    embedding_of,
    filled,
    own_head,
    rope_of,
    rotary_of,
    stored_layers,
    token_parts,
)
from specbeam.models.heads.trunk import PairTrunk, TrunkShape
from specbeam.models.heads.vocabulary import read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "specbeam_head"  # the field with the kind
EXTRA = ("bita", "hidden_transfer")  # kinds of extra rows in the target's own pass
EXIT = "eesd"  # the kind with an exit layer
PAIRS = ("attention", "projection", "normed projection")
_Made = TypeVar("_Made", LayerSizes, TrunkShape, ChimeraShape, BlockShape)


def extra_rows_config(head: ExtraHead) -> dict[str, Any]:
    """Return the configuration of a head of extra rows."""
    target = head.target.config.get_text_config()
    of_target = {"model_type": target.model_type, "width": target.hidden_size, "layers": target.num_hidden_layers}
    config = {
        "depth": head.depth,
        "target": of_target,
        "ranks": [[round(odds, 5) for odds in row] for row in head.ranks],
        "base_model_name_or_path": head.target.config.name_or_path or None,
    }
    if isinstance(head, Bita):
        _, kv_heads, prefix, size = head.keys.shape
        return {FIELD: "bita", **config, "kv_heads": kv_heads, "prefix": prefix, "head_size": size}
    assert isinstance(head, HiddenTransfer)
    return {FIELD: "hidden_transfer", **config, "enters": head.layer, "behind": head.behind}


def own_config(kind: str, head: PairTrunk | Chimera | Denoiser | ExitHead, target: "PreTrainedModel") -> dict[str, Any]:
    """Return the configuration of a head of this kind, made for this target."""
    if isinstance(head, ExitHead):
        return {FIELD: kind, **exit_config(head)}
    shape = {name: value for name, value in asdict(head.shape).items() if name not in ("sizes", "views")}
    return {
        FIELD: kind,
        "sizes": asdict(head.shape.sizes),
        "shape": shape,
        "rope": head.rotary.rope,
        "positions": head.rotary.positions,
        "base_model_name_or_path": target.config.name_or_path or None,
    }


def read_own(files: HeadFiles) -> Head:
    """Return a head in this format. Raises `BadHead` if it cannot be read."""
    top = files.fields
    kind = top.text(FIELD)
    kinds = (*READERS, *EXTRA, EXIT)
    if kind not in kinds:
        raise top.bad(FIELD, f"one of {', '.join(kinds)}")
    if kind == EXIT:
        return read_exit(files)
    if kind in EXTRA:
        return _read_extra_rows(kind, files)
    given = top.required("sizes")
    for name in ("shape", "rope"):
        top.required(name)
    top.whole("positions")
    sizes = _made(LayerSizes, given, {})
    if sizes.reads != sizes.width:
        raise given.bad("reads", f"the width, {sizes.width}")
    return filled(READERS[kind](files, sizes), files)


def _read_extra_rows(kind: str, files: HeadFiles) -> ExtraHead:
    """Return a head of extra rows."""
    top = files.fields
    target = files.target
    config = target.config.get_text_config()
    layers = config.num_hidden_layers
    expected = {"model_type": config.model_type, "width": files.width, "layers": layers}
    check_target(files, expected, "the head was trained in its passes")
    depth = top.whole("depth", most=MOST_ROWS)
    head: ExtraHead
    if kind == "bita":
        kv_heads = top.whole("kv_heads")
        prefix = top.whole("prefix", least=0, most=MOST_ROWS)
        shape = (layers, kv_heads, prefix, top.whole("head_size"))
        files.check_shape("keys", shape)  # before a head of this shape is made
        head = Bita(target, depth, shape, files.width)
    else:
        layer = top.whole("enters")
        if layer >= layers:
            raise top.bad("enters", f"below {layers}, the number of layers of the target")
        behind = top.whole("behind", 0, least=0, most=MOST_ROWS)
        head = HiddenTransfer(target, depth, layer, files.width, behind)
    head.ranks = _ranks(top)
    return filled(head, files)


def _ranks(top: Fields) -> tuple[tuple[float, ...], ...]:
    """Return the mean probabilities of a head's likeliest tokens. Raises `BadHead` if they are not between 0 and 1."""
    ranks = top.values.get("ranks") or []
    expected = "a table of probabilities, from 0 to 1"
    try:
        found = tuple(tuple(float(odds) for odds in row) for row in ranks)
    except (TypeError, ValueError) as error:
        raise top.bad("ranks", expected) from error
    if not all(0 <= odds <= 1 for row in found for odds in row):
        raise top.bad("ranks", expected)
    return found


def _trunk(files: HeadFiles, sizes: LayerSizes) -> PairTrunk:
    """Return a pair trunk without its weights (FSPAD, EAGLE)."""
    top = files.fields
    given = top.inner("shape")
    shape = _made(TrunkShape, given, {"sizes": sizes, "views": ()})
    _check_width(files, given, "target_width", shape.target_width)
    if shape.pairs not in PAIRS:
        raise given.bad("pairs", f"one of {', '.join(PAIRS)}")
    if shape.norms_features not in ("no", "all", "each"):
        raise given.bad("norms_features", "'no', 'all' or 'each'")
    count = files.size("fc.weight", 1) // shape.target_width if shape.pairs == "attention" else 1
    if len(shape.taps) != count:
        raise given.bad("taps", f"a list of {count} numbers, one for each hidden state that the head reads")
    _check_layers(files, sizes, shape.layers)
    if shape.sampling:
        files.check_size("feature_sampling.up_proj.weight", 0, shape.sampling, "shape.sampling")
    if shape.alignment:
        files.check_size("alignment.up_proj.weight", 0, shape.alignment, "shape.alignment")
    if shape.pairs == "attention":
        check_taps(files, shape.taps, "as stated")
    embedding = embedding_of(files, files.width)
    head = own_head(files, shape.draft_vocab, sizes.width, embedding)
    return PairTrunk(shape, _rotary(files, sizes), embedding, head, read_tokens(files, shape.draft_vocab))


def _chimera(files: HeadFiles, sizes: LayerSizes) -> Chimera:
    """Return a Chimera head without its weights."""
    given = files.fields.inner("shape")
    shape = _made(ChimeraShape, given, {"sizes": sizes})
    if shape.read_out not in READ_OUTS:
        raise given.bad("read_out", f"one of {', '.join(READ_OUTS)}")
    if shape.depth > MOST_ROWS:
        raise given.bad("depth", f"at most {MOST_ROWS}")
    _check_width(files, files.fields.inner("sizes"), "width", sizes.width)
    for part, rows in sizes.rows().items():
        files.check_size(f"layer.{part}.weight", 0, rows, "sizes")
    read_outs = "matrices" if shape.read_out == OWN else "maps"
    if not files.has(f"{read_outs}.{shape.depth - 1}.weight"):
        raise given.bad("depth", f"the number of tensors {read_outs}.*.weight")
    embedding = embedding_of(files, sizes.width)
    head = None if shape.read_out == OWN else own_head(files, shape.draft_vocab, sizes.width, embedding)
    return Chimera(shape, _rotary(files, sizes), embedding, head, read_tokens(files, shape.draft_vocab))


def _denoiser(files: HeadFiles, sizes: LayerSizes) -> Denoiser:
    """Return a SpecDiff head without its weights."""
    given = files.fields.inner("shape")
    shape = _made(BlockShape, given, {"sizes": sizes, "views": ()})
    plain = BlockShape(sizes, shape.layers, shape.taps, shape.target_width, shape.rows, 1, shape.draft_vocab)
    for one in fields(BlockShape):
        expected = getattr(plain, one.name)
        if getattr(shape, one.name) != expected:
            raise given.bad(one.name, f"{expected!r} in SpecDiff heads")
    if not 2 <= shape.rows <= MOST_ROWS:
        raise given.bad("rows", f"from 2 to {MOST_ROWS}")
    _check_width(files, given, "target_width", shape.target_width)
    _check_layers(files, sizes, shape.layers)
    check_taps(files, shape.taps, "as stated")
    return Denoiser(shape, _rotary(files, sizes), *token_parts(files, shape.draft_vocab, sizes.width))


READERS: dict[str, Callable[[HeadFiles, LayerSizes], Head]] = {
    "fspad": _trunk,
    "chimera": _chimera,
    "specdiff": _denoiser,
    "eagle": _trunk,
}


def _rotary(files: HeadFiles, sizes: LayerSizes) -> Rotary:
    return rotary_of(files.fields, sizes, rope_of(files.fields, "rope"), "rope", "positions")


def _check_width(files: HeadFiles, given: Fields, name: str, width: int) -> None:
    if width != files.width:
        raise given.bad(name, f"the width of the target, {files.width}")


def _check_layers(files: HeadFiles, sizes: LayerSizes, layers: int) -> None:
    """Raise `BadHead` unless the tensors have `layers` layers of the stated sizes."""
    check_layers(files, files.fields.inner("sizes"), sizes, {name: name for name in FIELD_NAMES})
    stored = stored_layers(files)
    if stored != layers:
        raise files.fields.inner("shape").bad("layers", f"{stored}, the number of layers with tensors")


def _made(kind: "type[_Made]", given: Fields, known: Mapping[str, Any]) -> "_Made":
    """Return a record of this kind from fields of the same names. Raises `BadHead` for unknown or invalid fields.

    Args:
        known: further fields with their values.
    """
    names = {one.name: one for one in fields(kind)}
    readable = names.keys() - known.keys()
    if strange := sorted(given.values.keys() - readable):
        raise BadHead(f"{given.where}: {given.inside.rstrip('.')} has unknown fields: {', '.join(strange)}")
    found = dict(known)
    for name, one in names.items():
        if name in readable:
            found[name] = _field(given, name, one.type, None if one.default is MISSING else one.default)
    return kind(**found)


def _field(given: Fields, name: str, kind: Any, default: Any) -> Any:
    """Return a field of this type, or the default if it is missing or null."""
    if kind is bool:
        return given.flag(name, bool(default))
    if kind is int:
        return given.whole(name, default, least=0 if default == 0 else 1)
    if kind is float:
        return given.number(name, default, most=1.0)
    if kind is str:
        return given.text(name, default or "")
    return given.wholes(name, least=FINAL)
