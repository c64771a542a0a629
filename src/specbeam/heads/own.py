"""The format of heads that have no other: the fields of their shape, as they are called here, beside their weights."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from specbeam.errors import BadHead
from specbeam.heads.files import HeadFiles
from specbeam.heads.layers import LayerSizes, Rotary
from specbeam.heads.reading import check_taps, embedding_of, fill, head_of, own_head, width_of
from specbeam.heads.trunk import PairTrunk, TrunkShape
from specbeam.heads.vocabulary import read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "specbeam_head"  # names the kind
KINDS = ("fspad",)


def own_config(kind: str, head: PairTrunk) -> dict[str, Any]:
    """Return the configuration of a head of this kind."""
    shape = {name: value for name, value in asdict(head.shape).items() if name != "sizes"}
    return {
        FIELD: kind,
        "sizes": asdict(head.shape.sizes),
        "shape": shape,
        "rope": head.rotary.rope,
        "positions": head.rotary.positions,
    }


def read_own(files: HeadFiles, target: "PreTrainedModel") -> PairTrunk:
    """Return a head in this format. Raises `BadHead` if it cannot be read."""
    config = files.config
    kind = config.get(FIELD)
    if kind not in KINDS:
        raise BadHead(f"{files.where}: {FIELD} is {kind!r} in config.json; it must be one of {', '.join(KINDS)}")
    sizes = LayerSizes(**_fields(files, "sizes"))
    given = _fields(files, "shape")
    shape = TrunkShape(sizes=sizes, **{**given, "taps": tuple(given.get("taps", ()))})
    if shape.target_width != width_of(target):
        raise BadHead(
            f"{files.where} is for a target of width {shape.target_width}, and this one's is {width_of(target)}"
        )
    embedding = embedding_of(files, target, width_of(target))
    head = own_head(files, shape.draft_vocab, sizes.width, embedding, target)
    tokens = read_tokens(files, shape.draft_vocab, head_of(target).weight.shape[0])
    trunk = PairTrunk(shape, Rotary(sizes, _fields(files, "rope"), files.whole("positions")), embedding, head, tokens)
    if shape.pairs == "attention":
        check_taps(files, target, shape.taps, "as stated")
    fill(trunk, files, target)
    files.check_all_taken()
    return trunk


def _fields(files: HeadFiles, name: str) -> dict[str, Any]:
    """Return an object of the configuration. Raises `BadHead` if it is none, or has fields that are not known."""
    found = files.config.get(name)
    if not isinstance(found, Mapping):
        raise BadHead(f"{files.where}: config.json has no {name}")
    known = {"sizes": {one.name for one in fields(LayerSizes)}, "shape": {one.name for one in fields(TrunkShape)}}
    if name in known and (strange := sorted(set(found) - known[name])):
        raise BadHead(f"{files.where}: {name} has fields that are not known: {', '.join(strange)}")
    return dict(found)
