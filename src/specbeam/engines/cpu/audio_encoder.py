"""The compiled encoder of audio: two convolutions turn the features of a window into rows for the layers."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import nn

from specbeam.engines.arrays import Features, Integers, OwnStates, States
from specbeam.engines.cpu.decoder import CompiledDecoder, kind_of_panels, panels_of
from specbeam.engines.cpu.encoder import CompiledEncoder
from specbeam.engines.cpu.extras import GELU, Extras, numbers_of
from specbeam.engines.cpu.layers import activate, projected
from specbeam.engines.cpu.panels import steps_in
from specbeam.engines.cpu.team import TEAM
from specbeam.engines.cpu.window_attention import FORM, do_window_share
from specbeam.engines.cpu.window_layers import ROWS_TOGETHER, all_window_layers
from specbeam.engines.mapped import MappedFiles, mapped_files
from specbeam.engines.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNEL = 3  # neighbouring rows that a convolution reads for each output row
STRIDES = (1, 2)  # of the first and the second convolution, in rows


def misfit_of_convolutions(encoder: Any) -> str:
    """Return the reason why the convolutions of an audio encoder are not supported; "" if they are."""
    for name, stride in zip(("conv1", "conv2"), STRIDES, strict=True):
        found = getattr(encoder, name, None)
        if type(found) is not nn.Conv1d or found.padding_mode != "zeros":
            return f"its module {name} is not a plain one-dimensional convolution"
        shape = found.kernel_size, found.stride, found.padding, found.dilation, found.groups
        if shape != ((KERNEL,), (stride,), (1,), (1,), 1):
            return f"its convolution {name} has another kernel, stride, padding, dilation or number of groups"
        if (deep := KERNEL * found.in_channels) % steps_in("float32"):
            return f"its convolution {name} is {deep} deep, which must be a multiple of {steps_in('float32')}"
    return ""


class Convolution:
    """A convolution over rows, followed by GELU: one product of concatenated neighbouring rows with a matrix.

    Its weights are never rounded: they are few, and all later layers read its output.

    Args:
        module: transformers' convolution.
        extras: of the encoder's layers; the settings of the inner layer are replaced.
        tiled: see `kind_of_panels`.
        files: mapped files, released after the weights are laid out.
    """

    def __init__(self, module: Any, extras: Extras, tiled: bool, files: MappedFiles) -> None:
        matrix = module.weight.detach().permute(0, 2, 1).flatten(1)
        self.panels = panels_of([[matrix]], kind_of_panels([matrix], None, tiled, files), files)[0]
        self.bias = numbers_of(module.weight.new_zeros(0) if module.bias is None else module.bias)
        self.columns = int(module.out_channels)
        self.stride = int(module.stride[0])
        self.extras = extras._replace(activation=GELU, gated=False)

    def made_of(
        self, padded: Float32[np.ndarray, "rows width"], threads: int
    ) -> Float32[np.ndarray, "made_rows columns"]:
        """Return the output of the convolution, with a row of zeros at both ends, as in `padded`.

        Args:
            threads: see `panels.multiply`.
        """
        width = padded.shape[1]
        count = (len(padded) - KERNEL) // self.stride + 1
        step = padded.itemsize
        neighbours = np.lib.stride_tricks.as_strided(
            padded, (count, KERNEL * width), (self.stride * width * step, step), writeable=False
        )
        made = np.zeros((count + 2, self.columns), dtype=np.float32)
        for first in range(0, count, ROWS_TOGETHER):
            some = neighbours[first : first + ROWS_TOGETHER].copy()
            both = projected(some, self.panels, self.bias, threads)
            activate(both, self.columns, self.extras, made[1 + first : 1 + first + len(some)])
        return made


class AudioEncoder(CompiledEncoder):
    """The encoder of audio windows; see `CompiledEncoder`. transformers' encoder reads windows of other lengths.

    Its convolutions keep their type when the matrices of its layers are rounded.
    """

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder) -> None:
        super().__init__(model, decoder)
        body: Any = self.module
        files = mapped_files(model)
        tiled = "tiles" in decoder.kind
        self.dtype = body.conv1.weight.dtype
        self.shape = int(body.conv1.in_channels), len(self.places) * STRIDES[1]
        self.convolutions = [
            Convolution(module, self.weights.extras, tiled, files) for module in (body.conv1, body.conv2)
        ]
        if self.threads > 1:
            for convolution in self.convolutions:
                TEAM.learn(convolution.panels)
            TEAM.learn_function(FORM, do_window_share)

    def forward(self, input_features: torch.Tensor) -> tuple[Float[torch.Tensor, "windows frames hidden"]]:
        """Return the states of windows, given their features, float[windows, channels, frames].

        Raises `ValueError` if the windows are not of the model's length.
        """
        if input_features.shape[1:] != self.shape:
            return (self.module(input_features=input_features)[0],)
        states = self.read([self._as_read(features) for features in input_features])
        return (torch.from_numpy(np.stack(states)),)

    def _as_read(self, features: Float[torch.Tensor, "channels frames"]) -> Features:
        found: Features = features.to(self.dtype).float().numpy()
        return found

    def inputs_of(self, source: Source) -> Features | None:
        if source.name != "input_features" or source.inputs is None or source.inputs.shape[1:] != self.shape:
            return None
        return self._as_read(source.inputs[0])

    def rows_of(self, inputs: Features) -> int:
        return inputs.shape[1] // STRIDES[1]

    def states_by_transformers(self, inputs: Features) -> Float[torch.Tensor, "rows hidden"]:
        """See `CompiledEncoder`; a short window gets the model's first positions."""
        whole = self.module_in_float32()
        short: Any = copy.deepcopy(whole, {id(weight): weight for weight in whole.parameters()})
        rows = self.rows_of(inputs)
        short.config.max_source_positions = rows
        short.embed_positions = nn.Embedding.from_pretrained(short.embed_positions.weight[:rows])
        states: torch.Tensor = short(input_features=torch.from_numpy(inputs)[None])[0]
        return states[0]

    def entering(self, sources: Sequence[Features]) -> list[OwnStates]:
        first, second = self.convolutions
        each = []
        with TEAM.threads(self.threads) as threads:
            for features in sources:
                padded = np.zeros((features.shape[1] + 2, len(features)), dtype=np.float32)
                padded[1:-1] = features.T
                made = second.made_of(first.made_of(padded, threads), threads)
                each.append(made[1:-1] + self.places[: len(made) - 2])
        return each

    def run_layers(
        self,
        x: States,
        places: Integers,
        lengths: Int64[np.ndarray, " sources"],
    ) -> None:
        ends = np.cumsum(lengths)
        with TEAM.threads(self.threads) as threads:
            all_window_layers(x, self.stack(self.weights), places, ends, threads)
