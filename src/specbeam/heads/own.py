"""The format of heads that have no other: the fields of their shape, as they are called here, beside their weights."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from specbeam.errors import BadHead
from specbeam.heads.fields import Fields
from specbeam.heads.files import HeadFiles
from specbeam.heads.layers import LayerSizes
from specbeam.heads.reading import (
    FIELD_NAMES,
    check_layers,
    check_taps,
    embedding_of,
    fill,
    head_of,
    own_head,
    rope_of,
    rotary_of,
    width_of,
)
from specbeam.heads.trunk import PairTrunk, TrunkShape
from specbeam.heads.vocabulary import read_tokens
from specbeam.records import FINAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "specbeam_head"  # names the kind
KINDS = ("fspad",)
PAIRS = ("attention", "projection", "normed projection")
_Made = TypeVar("_Made", LayerSizes, TrunkShape)


def own_config(kind: str, head: PairTrunk) -> dict[str, Any]:
    """Return the configuration of a head of this kind."""
    shape = {name: value for name, value in asdict(head.shape).items() if name not in ("sizes", "views")}
    return {
        FIELD: kind,
        "sizes": asdict(head.shape.sizes),
        "shape": shape,
        "rope": head.rotary.rope,
        "positions": head.rotary.positions,
    }


def read_own(files: HeadFiles, target: "PreTrainedModel") -> PairTrunk:
    """Return a head in this format. Raises `BadHead` if it cannot be read."""
    top = files.fields
    kind = top.text(FIELD)
    if kind not in KINDS:
        raise top.bad(FIELD, f"one of {', '.join(KINDS)}")
    for name in ("sizes", "shape", "rope", "positions"):
        if not top.has(name):
            raise top.missing(name)
    sizes = _made(LayerSizes, top.inner("sizes"), {})
    given = top.inner("shape")
    shape = _made(TrunkShape, given, {"sizes": sizes, "views": ()})
    if shape.target_width != width_of(target):
        raise given.bad("target_width", f"the width of the target, {width_of(target)}")
    if shape.pairs not in PAIRS:
        raise given.bad("pairs", f"one of {', '.join(PAIRS)}")
    if shape.norms_features not in ("no", "all", "each"):
        raise given.bad("norms_features", "'no', 'all' or 'each'")
    count = files.size("fc.weight", 1) // shape.target_width if shape.pairs == "attention" else 1
    if len(shape.taps) != count:
        raise given.bad("taps", f"a list of {count} numbers: so many hidden states are read")
    _check_sizes(files, top, shape)
    embedding = embedding_of(files, target, width_of(target))
    head = own_head(files, shape.draft_vocab, sizes.width, embedding, target)
    tokens = read_tokens(files, shape.draft_vocab, head_of(target).weight.shape[0])
    rotary = rotary_of(top, sizes, rope_of(top, "rope"), "rope", "positions")
    trunk = PairTrunk(shape, rotary, embedding, head, tokens)
    if shape.pairs == "attention":
        check_taps(files, target, shape.taps, "as stated")
    fill(trunk, files, target)
    files.check_all_taken()
    return trunk


def _made(kind: "type[_Made]", given: Fields, known: Mapping[str, Any]) -> "_Made":
    """Return a record of this kind from the fields of the same names. Raises `BadHead` if one is not known, or wrong.

    Args:
        known: fields that are not among those given.
    """
    names = {one.name: one for one in fields(kind)}
    if strange := sorted(set(given.values) - set(names) | set(given.values) & set(known)):
        raise BadHead(f"{given.where}: {given.inside.rstrip('.')} has fields that are not known: {', '.join(strange)}")
    found = dict(known)
    for name, one in names.items():
        if name in known:
            continue
        default = None if one.default is MISSING else one.default
        if one.type is bool:
            found[name] = given.flag(name, bool(default))
        elif one.type is int:
            found[name] = given.whole(name, default, least=0 if default == 0 else 1)
        elif one.type is float:
            found[name] = given.number(name, default, most=1.0)
        elif one.type is str:
            found[name] = given.text(name, default or "")
        else:
            found[name] = given.wholes(name, least=FINAL)
    return kind(**found)


def _check_sizes(files: HeadFiles, top: Fields, shape: TrunkShape) -> None:
    """Raise `BadHead` unless the tensors have the sizes that are stated."""
    sizes = shape.sizes
    given = top.inner("sizes")
    if sizes.reads != sizes.width:
        raise given.bad("reads", f"the width, {sizes.width}")
    check_layers(files, given, sizes, {name: name for name in FIELD_NAMES})
    layers = {name.split(".")[1] for name in files.tensors if name.startswith("layers.")}
    if len(layers) != shape.layers:
        raise top.inner("shape").bad("layers", f"{len(layers)}, the number of layers that there are tensors of")
    for name, part, inner in (
        ("sampling", "feature_sampling", shape.sampling),
        ("alignment", "alignment", shape.alignment),
    ):
        if inner:
            files.check_size(f"{part}.up_proj.weight", 0, inner, f"shape.{name}")
