"""Exit heads: one trained layer after the target's first layers, followed by the target's output head (EESD).

The first layers belong to the target, so their output is exact for drafts, too. A row of the exit layer is never
computed from estimates, and is kept if its node survives.

Source: EESD (arXiv 2406.03853).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specbeam.core.answers import LOGITS
from specbeam.core.errors import BadHead, NotSupported
from specbeam.core.forest import Forest
from specbeam.core.lm import checked_needs
from specbeam.core.records import Needs, Scored
from specbeam.core.session import CacheOwner
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.eligibility import check_has_trees, layers_of, output_shape
from specbeam.engines.kv.masks import Masks
from specbeam.models.early_layers import last_norm, with_exit
from specbeam.models.heads.arrays import PerNode, Rows
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.head import DraftRows, Head, capped, wanted_below
from specbeam.models.heads.lm import HeadLM, TimedPrompt
from specbeam.models.heads.reading import check_target, filled
from specbeam.models.heads.trees import ScoredTrees
from specbeam.models.huggingface import CacheForSteps, EachNeeds, Forests, HuggingFaceLM, OnTargetsCache, Sessions
from specbeam.models.made_up import made_up_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExitHead(Head):
    """An exit layer with its norm, initialised as copies of the target's last layer and norm.

    Args:
        target: the model whose first layers and head surround it; their weights do not belong to this head.
        after: number of layers that run before it.
    """

    def __init__(self, target: "PreTrainedModel", after: int) -> None:
        super().__init__()
        total = len(layers_of(target))
        if not 1 <= after < total:
            raise BadHead(
                f"the exit layer is after {after} layers; {type(target).__name__} has {total}: it must be after 1 to "
                f"{total - 1} of them"
            )
        self.after = after
        self.layer = copy.deepcopy(layers_of(target)[-1]).float()
        self.norm = copy.deepcopy(last_norm(target)).float()
        for module in self.layer.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = after  # the cache stores keys and values by this index
        for weight in self.parameters():
            weight.requires_grad_(True)
        self.shared = (target,)  # in a tuple, so that its weights do not become the head's

    @property
    def target(self) -> "PreTrainedModel":
        """The model that it drafts for."""
        return self.shared[0]

    @property
    def described(self) -> dict[str, str]:
        return {
            "kind": f"EESD: an exit layer after the target's first {self.after} of {len(layers_of(self.target))} layers",
            "layers": "1, like the target's, with its own norm",
            "reads": f"the output of layer {self.after - 1} at the node itself, also at drafts",
        }

    def exited(self) -> "PreTrainedModel":
        """Return a model of the target's first layers, this layer, this norm, and the target's head."""
        return with_exit(self.target, self.after, self.layer, self.norm)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        """See `Head.drafts`: drafts of all depths have the same law, so it returns drafts one deep only."""
        given, named = self._what_reaches_it(trees)
        states = given[0] if given else named.pop("hidden_states")
        left = self.layer(self._as_own(states), *map(self._as_own, given[1:]), **_each(self._as_own, named))
        nodes = wanted_below(trees, wanted, 0)
        states = (left[0] if isinstance(left, tuple) else left).flatten(0, 1)[nodes]
        return [DraftRows(nodes, self._logits(states))]

    def _as_own(self, value: Any) -> Any:
        """Return a float tensor in the layer's type, without a gradient; anything else unchanged."""
        if isinstance(value, tuple):
            return tuple(self._as_own(one) for one in value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(next(self.layer.parameters()).dtype)
        return value

    def _logits(self, states: Rows) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of the tokens below nodes, given the output of the exit layer there."""
        head = self.target.get_output_embeddings()
        bias = getattr(head, "bias", None)
        normed = self.norm(states)
        rows = nn.functional.linear(
            normed, head.weight.detach().to(normed.dtype), None if bias is None else bias.detach().to(normed.dtype)
        )
        rows = rows / getattr(self.target.config, "logits_scaling", 1.0)
        return capped(rows, getattr(self.target.config, "final_logit_softcapping", None))

    @torch.no_grad()
    def _what_reaches_it(self, trees: ScoredTrees) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of this layer in a pass of the target over whole trees."""
        reached: list[Any] = []

        def keep(module: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            reached.append((given, dict(named)))
            raise _Reached

        check_has_trees(self.target)
        config = self.target.config.get_text_config()
        masks = Masks(config, config._attn_implementation or "eager", self.target.dtype)
        handle = self.layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.autocast(trees.tokens.device.type, enabled=False):  # decoding does not round either
                self.exited().base_model(
                    input_ids=trees.tokens,
                    position_ids=trees.depths,
                    attention_mask=masks.of_trees(trees.sees, trees.depths),
                    use_cache=False,
                )
        except _Reached:
            pass
        finally:
            handle.remove()
        ((given, named),) = reached
        return given, named


class _Reached(Exception):
    """Raised to end a pass that reaches the exit layer."""


def _each(change: Any, named: dict[str, Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in named.items()}


def exit_config(head: ExitHead) -> dict[str, Any]:
    """Return the configuration of an exit head: its place, and its target."""
    config = head.target.config.get_text_config()
    return {
        "exit_layer": head.after,
        "target": {
            "model_type": config.model_type,
            "hidden_size": int(config.hidden_size),
            "num_hidden_layers": len(layers_of(head.target)),
            "vocab_size": output_shape(head.target)[0],
        },
        "base_model_name_or_path": head.target.config.name_or_path or None,
    }


def read_exit(files: HeadFiles) -> ExitHead:
    """Return an exit head. Raises `BadHead` if it cannot be read, or is for a target of another shape."""
    after = files.fields.whole("exit_layer")
    try:
        head = ExitHead(files.target, after)
    except NotSupported as error:
        raise BadHead(f"{files.where} is an exit head, and {error}") from error
    why = "an exit layer works only in the model that it was trained for"
    check_target(files, exit_config(head)["target"], why)
    return filled(head, files)


class ExitLM(OnTargetsCache, HeadLM):
    """An exit head as a draft model on the target's own KV cache: nothing is computed twice.

    A pass runs the target's first layers and the exit layer on new nodes. The target's pass then runs the other layers on
    the same nodes. The keys and values of the exit layer are in the same slots as the target's, so beams share them, and
    they are kept and dropped together.

    Args:
        head: the exit head.
        target: the model that the head is for, run by an engine that runs ranges of layers.
    """

    head: ExitHead
    reads_prompt = False

    def __init__(self, head: ExitHead, target: HuggingFaceLM) -> None:
        super().__init__(head, target.vocab)
        self.target = target
        self.layer = target.ranged.exit_layer(head.layer, head.norm, head.after)
        self.max_positions = target.max_positions
        self.needs_of_target = Needs(logits=True, exit_layer=self.layer)

    def is_ready(self, session: CacheOwner) -> bool:
        """See `HeadLM.is_ready`: it drafts from the first turn on."""
        return True

    @property
    def bytes_read(self) -> int:
        """See `HuggingFaceLM.bytes_read`: those of the target's first layers."""
        return self.target.bytes_read * self.layer.after // len(layers_of(self.target.model))

    @property
    def supports_runs(self) -> bool:
        is_compiled = self.target.supports_runs and isinstance(self.target.runner, PackedPasses)
        return is_compiled and type(self).extend is ExitLM.extend

    @contextmanager
    def cache_for_steps(
        self, session: CacheOwner, fresh: int, more: int = 0, needs: Needs = LOGITS
    ) -> Iterator[CacheForSteps | None]:
        """See `HeadLM.cache_for_steps`: it is the target's cache, in which these steps run the first layers."""
        if not self.supports_runs or needs != LOGITS:
            yield None
            return
        layers = self.layer.after
        with self.target.early_cache_for_steps(session, fresh, layers, self.needs_of_target, self, more) as found:
            yield found

    def extend(self, sessions: Sessions, forests: Forests, needs: EachNeeds = None) -> list[Scored]:
        checked_needs(self, len(sessions), needs)  # the head returns only logits
        self.passes += 1
        return self.target.extend_early(sessions, forests, self.layer.after, self.needs_of_target)

    @contextmanager
    def stored(self, length: int) -> Iterator[TimedPrompt]:
        prompt = made_up_prompt(length, self.vocab)
        session: Any = SimpleNamespace(prompt=prompt, state={})
        self.extend([session], [Forest.rooted(prompt[-1:])])
        try:
            yield TimedPrompt(self, session)
        finally:
            self.target.close(session)

    def take_back(self, session: CacheOwner, forest: Forest) -> None:
        session.state[self.target].fit(forest)


def exit_model(head: ExitHead, target: HuggingFaceLM) -> "ExitLM | HuggingFaceLM":
    """Return an exit head as a draft model.

    If the engine runs ranges of layers, it drafts on the target's cache. Otherwise it is a separate model that shares the
    weights, and computes the first layers a second time; `how_it_runs` describes which.
    """
    if target.runner.runs_ranges:
        return ExitLM(head, target)
    model = HuggingFaceLM(head.exited(), share_from=target.share_from)
    model.head = head
    return model


def how_it_runs(head: ExitHead, target: HuggingFaceLM) -> str:
    """Return a description of where the head drafts, on the target's cache or on its own."""
    if target.runner.runs_ranges:
        return "on the target's own cache: its first layers run once"
    return (
        f"as a separate model: engine {target.engine!r} runs all layers of the target at once, so the first {head.after} "
        "are computed twice, and their keys and values stored twice"
    )
