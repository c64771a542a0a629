"""Layers of transformers in a head: the target's own class of layer, run on rows that the head chooses.

A module of multi-token prediction has a layer of the target's kind: with experts, gates, norms of queries and keys, or
latent attention. transformers implements all of them. Its layers pass queries, keys and values to an attention function
chosen by name; the function here lets the head choose which rows a row attends to (`Attend`).
"""

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specbeam.core.errors import BadHead, NotSupported
from specbeam.engines.cache_names import cache_argument
from specbeam.engines.eligibility import layers_of
from specbeam.models.heads.arrays import Rows
from specbeam.models.heads.layers import Attend, LayerSizes, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "specbeam_head"  # the name of the attention function
# Arguments of attention without an effect here; any other argument would change the result.
_HARMLESS = ("dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position")
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def attention_of_rows(
    module: nn.Module,
    query: Float[Tensor, "batch heads rows size"],
    key: Float[Tensor, "batch kv_heads rows size"],
    value: Float[Tensor, "batch kv_heads rows value_size"],
    attention_mask: None,
    scaling: float | None = None,
    attend: Attend | None = None,
    number: int = 0,
    **others: Any,
) -> tuple[Float[Tensor, "batch rows heads value_size"], None]:
    """Call the head's attention; see transformers' `AttentionInterface`.

    Args:
        attend, number: see `Attend`.

    Raises `NotSupported` if the layer sets further arguments, like a window, a cap or sinks.
    """
    unknown = {name: found for name, found in others.items() if found is not None and name not in _HARMLESS}
    if unknown or attend is None:
        raise NotSupported(f"{type(module).__name__} asks its attention for {', '.join(sorted(unknown)) or 'no rows'}")
    stretch = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
    if abs(stretch - 1) > 1e-9:  # the head divides by the root of the size itself
        query = query * stretch
    return attend(number, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


class BorrowedLayer(nn.Module):
    """A decoder layer of transformers, called as `DecoderLayer` is.

    Args:
        inner: the layer. Its configuration names `ATTENTION`.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Rows, angles: Any, layer: int, attend: Attend) -> Rows:
        """Return the rows after the layer."""
        angles = tuple(one.to(x.dtype) for one in angles)  # transformers' layers rotate in the type of their input
        if x.ndim == 3:
            return self._batch(x, angles, layer, attend)

        def attend_flat(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return attend(number, queries[0], keys[0], values[0])[None]

        return self._batch(x[None], tuple(one[None] for one in angles), layer, attend_flat)[0]

    def _batch(
        self, x: Float[Tensor, "batch rows width"], angles: Any, layer: int, attend: Attend
    ) -> Float[Tensor, "batch rows width"]:
        found = self.inner(
            x,
            attention_mask=None,
            position_embeddings=angles,
            attend=attend,
            number=layer,
            **cache_argument(self.inner, None),
        )
        return found[0] if isinstance(found, tuple) else found


class BorrowedRotary(Rotary):
    """The rotation by positions of a target's layers.

    Args:
        angles: the target's module that makes cosines and sines of positions.
    """

    def __init__(self, angles: nn.Module, config: Any) -> None:
        nn.Module.__init__(self)
        self.angles = angles
        stated = getattr(config, "rope_parameters", None) or {}
        self.rope = {
            "rope_type": stated.get("rope_type", "default"),
            "rope_theta": float(stated.get("rope_theta") or 0.0),
        }
        self.positions = int(getattr(config, "max_position_embeddings", 0) or 2048)


class Borrowed:
    """The target's kind of layer, for modules of the same kind.

    Args:
        config: the configuration of the layers; None: the target's own.
        where: name of the files with the weights, for errors.

    Raises `BadHead` if the target's layers cannot run on chosen rows.
    """

    def __init__(self, target: "PreTrainedModel", where: str, config: Any = None) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attention_of_rows)
        self.where = where
        self.config = copy.deepcopy(config if config is not None else target.config.get_text_config())
        self.config._attn_implementation = ATTENTION
        try:
            self.layers: nn.ModuleList | None = layers_of(target)
        except NotSupported as error:
            raise BadHead(f"{where} has modules of the target's kind, and {error}") from error
        self.name = type(target).__name__
        theirs = getattr(target.get_decoder(), "rotary_emb", None)
        if theirs is None or getattr(self.layers[0], "input_layernorm", None) is None:
            raise BadHead(f"{where} has modules with layers as in {self.name}, which are not supported")
        made = copy.deepcopy(theirs) if config is None else type(theirs)(self.config)
        self.rotary = BorrowedRotary(made.to(target.get_input_embeddings().weight.device), self.config)

    @property
    def sizes(self) -> LayerSizes:
        """The sizes of the layers by their configuration."""
        config = self.config
        heads = int(config.num_attention_heads)
        return LayerSizes(
            width=int(config.hidden_size),
            reads=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            inner=int(config.intermediate_size),
            eps=float(config.rms_norm_eps),
        )

    def layer(self, tensors: Mapping[str, Tensor], like: Tensor) -> BorrowedLayer:
        """Return a layer with these weights, named as in checkpoints of the target.

        Args:
            like: the weights get its type and device.
        """
        place, found = self._matching(tensors)
        assert self.layers is not None
        with torch.device("meta"):
            inner = type(self.layers[place])(self.config, place)
        expected = inner.state_dict()
        parameters = dict(inner.named_parameters())
        for name, tensor in found.items():
            if tensor.shape != expected[name].shape:
                raise BadHead(
                    f"{self.where}: {name} is {[*tensor.shape]}, and {[*expected[name].shape]} was expected, as in the "
                    f"layers of {self.name}"
                )
            dtype = like.dtype if name in parameters else expected[name].dtype
            found[name] = tensor.to(like.device, dtype)
        inner.load_state_dict(found, assign=True)
        layer = BorrowedLayer(inner.eval()).requires_grad_(False)
        self._check(layer, like)
        return layer

    def norm(self, weight: Tensor, like: Tensor) -> nn.Module:
        """Return a norm of the layers' kind; some kinds add one to the weight."""
        assert self.layers is not None
        norm: Any = copy.deepcopy(self.layers[0].input_layernorm)
        norm.weight = nn.Parameter(weight.to(like), requires_grad=False)
        return norm

    def _matching(self, tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        """Return the number of the last layer of the target with exactly these weight names, and the weights."""
        assert self.layers is not None
        for place in reversed(range(len(self.layers))):
            names = set(self.layers[place].state_dict())
            found = joined_experts(tensors, names)
            if set(found) == names:
                return place, found
        names = set(self.layers[-1].state_dict())
        found = joined_experts(tensors, names)
        lacks = ", ".join(sorted(names - set(found))[:4])
        strange = ", ".join(sorted(set(found) - names)[:4])
        raise BadHead(
            f"{self.where}: a module has other tensors than the layers of {self.name} have"
            + (f"; it lacks {lacks}" if lacks else "")
            + (f"; it has {strange}" if strange else "")
        )

    def _check(self, layer: BorrowedLayer, like: Tensor) -> None:
        """Raise `BadHead` unless a layer calls attention once, with supported arguments."""
        asked = []

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            asked.append(number)
            groups = queries.shape[-2] // values.shape[-2]
            return values.repeat_interleave(groups, -2)

        row = torch.zeros(1, self.sizes.width, dtype=like.dtype, device=like.device)
        try:
            with torch.no_grad():
                layer(row, self.rotary(torch.zeros(1, dtype=torch.long, device=like.device)), 3, attend)
        except NotSupported as error:
            raise BadHead(f"{self.where}: {error}, which heads cannot compute") from error
        if asked != [3]:
            raise BadHead(
                f"{self.where}: the layers of {self.name} call attention by rows {len(asked)} times; once was expected"
            )


def joined_experts(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return weights by name, with the weights of single experts joined where transformers has one weight for all experts.

    Args:
        names: the names of the weights in transformers' layer.
    """
    joined = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None or f"{found[1]}.gate_up_proj" not in names:
            joined[name] = tensor
            continue
        experts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(place for place, _ in parts)
        every = [(place, part) for place in range(count) for part in ("gate_proj", "up_proj", "down_proj")]
        if missing := [f"{prefix}.{place}.{part}.weight" for place, part in every if (place, part) not in parts]:
            raise BadHead(f"an expert lacks a tensor: {missing[0]}")
        gates = [torch.cat([parts[place, "gate_proj"], parts[place, "up_proj"]]) for place in range(count)]
        joined[f"{prefix}.gate_up_proj"] = torch.stack(gates)
        joined[f"{prefix}.down_proj"] = torch.stack([parts[place, "down_proj"] for place in range(count)])
    return joined
