"""Stand-ins for transformers' models and tokenizers: what a text needs of them, without an import of transformers.

`load` makes them of folders that it has loaded and checked before (models/loading/known_folders.py). The compiled forward
reads its weights and settings from the stand-in of a model; the forward of transformers is loaded when something needs the
model object itself, such as `Pair.target_model`.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_LOCK = RLock()
_NOTHING: Mapping[str, Any] = {}
MODULES = {one.__name__: one for one in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.Conv1d)}


class StandIn:
    """What stands in for an object of transformers until that object is needed.

    Attributes:
        load_whole: loads the object.
    """

    load_whole: Callable[[], Any]
    _whole: Any = None

    @property
    def is_replaced(self) -> bool:
        """Whether the object has been loaded, so that changes of it count and not what stood in for it."""
        return self._whole is not None

    def whole(self) -> Any:
        """Return the object of transformers, which is loaded once."""
        if self._whole is not None:  # without the lock, which another object's load may hold
            return self._whole
        with _LOCK:
            if self._whole is None:
                object.__setattr__(self, "_whole", self.load_whole())
        return self._whole


def whole(held: Any) -> Any:
    """Return an object of transformers, loaded if a stand-in is held instead of it; anything else unchanged."""
    return held.whole() if isinstance(held, StandIn) else held


def at_hand(held: Any) -> Any:
    """Return what is held: a stand-in, unless the object of transformers was loaded since."""
    return held.whole() if isinstance(held, StandIn) and held.is_replaced else held


class StoredConfig(SimpleNamespace):
    """A configuration as transformers has read it: its settings by name, defaults included.

    Args:
        stated: the result of its `to_dict`.
    """

    def __init__(self, settings: Mapping[str, Any] = _NOTHING, stated: Mapping[str, Any] = _NOTHING) -> None:
        super().__init__(**settings)
        self._stated = dict(stated)

    def get_text_config(self, decoder: bool | None = None) -> "StoredConfig":
        """Return the configuration itself; models with a configuration for each part have no stand-in."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that a file of the configuration states."""
        return dict(self._stated)


class StoredGenerationConfig(SimpleNamespace):
    """A generation config as transformers has read it.

    Args:
        settings: its fields, by name.
        empty: the fields of an empty generation config.
    """

    def __init__(self, settings: Mapping[str, Any] = _NOTHING, empty: Mapping[str, Any] = _NOTHING) -> None:
        super().__init__(**settings)
        self._empty = dict(empty)
        self._given = dict(settings)

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that were set since."""
        return {name: value for name, value in self.to_dict().items() if value != self._given.get(name)}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def empty(self) -> dict[str, Any]:
        """The fields of an empty generation config."""
        return dict(self._empty)


class FixedAngles(nn.Module):
    """Rotary angles that do not depend on the length of the text, as transformers' modules compute them.

    Args:
        frequencies: float32[pairs].
        factor: factor of cosines and sines.
    """

    def __init__(self, frequencies: Sequence[float], factor: float) -> None:
        super().__init__()
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32)
        self.factor = factor

    @torch.no_grad()
    def forward(self, like: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32[1, positions, 2 * pairs], of each position."""
        angles = (self.frequencies[None, :, None] @ places[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos() * self.factor, both.sin() * self.factor


class DistanceRanges(nn.Module):
    """An attention module that counts distances by ranges, like T5's.

    Attributes:
        ranges: the range of each distance, by distance; see `known_folders`.
        first: the first of these distances.
    """

    ranges: Tensor
    first: int

    def _relative_position_bucket(self, ahead: Tensor) -> Tensor:
        """Return the range of each distance ahead; under the name that transformers gives this method."""
        return self.ranges[-ahead - self.first]


class Sines(nn.Module):
    """Embeddings of positions by sines and cosines, as transformers' M2M100 computes them."""

    def get_embedding(self, count: int, width: int, padding: int) -> Tensor:
        """Return the embeddings of the first positions, float[count, width]; that of the padding position is zero."""
        half = width // 2
        step = math.log(10000) / (half - 1)
        rates = torch.exp(torch.arange(half).float() * -step)
        angles = torch.arange(count).float()[:, None] * rates
        found = torch.cat((angles.sin(), angles.cos(), torch.zeros(count, width % 2)), dim=1)
        found[padding] = 0
        return found


class StandInEncoder(nn.Module):
    """The encoder of a stand-in. transformers' encoder is loaded when it is called.

    Attributes:
        main_input_name: "input_ids" or "input_features".
        config: the configuration of the model.
    """

    main_input_name: str
    config: StoredConfig
    load: Callable[[], Any]

    def get_input_embeddings(self) -> Any:
        """Return the embeddings of tokens."""
        return self.embed_tokens

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the result of transformers' encoder."""
        return self.load()(*inputs, **named)


class StandInModel(StandIn, nn.Module):
    """The weights of a model in modules without a forward, under the names of transformers, with its configuration."""

    config: StoredConfig
    generation_config: StoredGenerationConfig | None
    name_or_path: str
    dtype: torch.dtype
    _paths: Mapping[str, str]

    @classmethod
    def of(
        cls,
        described: Mapping[str, Any],
        name: str,
        weights: Callable[[str], Tensor],
        load_whole: Callable[[], Any],
    ) -> "StandInModel":
        """Make the stand-in of a model.

        Args:
            described: its description; see `known_folders.describe_model`.
            name: its folder.
            weights: returns a tensor of its files by name.
            load_whole: loads the model object.
        """
        kind = type(described["class"], (cls,), {})
        model: StandInModel = kind()
        model.load_whole = load_whole
        model.config = StoredConfig(described["config"]["settings"], described["config"]["stated"])
        generation = described["generation_config"]
        model.generation_config = None
        if generation is not None:
            model.generation_config = StoredGenerationConfig(generation["settings"], generation["empty"])
        model.name_or_path = name
        model._paths = described["paths"]
        made = {stored: nn.Parameter(tensor_in(one), requires_grad=False) for stored, one in described["made"].items()}
        for part in described["modules"]:
            _place(model, part, made, weights)
        for buffer, one in described["buffers"].items():
            model.register_buffer(buffer, tensor_in(one))
        model.dtype = next(model.parameters()).dtype
        if "encoder" in described["paths"]:
            encoder = model.get_encoder()
            encoder.config = model.config
            encoder.load = lambda: model.whole().get_encoder()
        return model.eval()

    def whole(self) -> Any:
        """Return the model object of transformers, with what was set in the generation config of its stand-in."""
        if self._whole is None and self.generation_config is not None and self.generation_config.changed:
            load_unchanged = self.load_whole
            changed = self.generation_config.changed

            def load_whole() -> Any:
                model = load_unchanged()
                vars(model.generation_config).update(changed)
                return model

            self.load_whole = load_whole
        return super().whole()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def base_model(self) -> Any:
        """The module without the head."""
        return self.get_submodule(self._paths["base"])

    def get_input_embeddings(self) -> Any:
        """Return the embeddings of tokens."""
        return self.get_submodule(self._paths["input"])

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.get_submodule(self._paths["output"])

    def get_encoder(self) -> Any:
        """Return the encoder of a model that has one."""
        return self.get_submodule(self._paths["encoder"])

    def get_decoder(self) -> Any:
        """Return the decoder of a model that has an encoder."""
        return self.get_submodule(self._paths["decoder"])

    def num_parameters(self) -> int:
        """Return the number of weights; tied ones count once."""
        return sum(weight.numel() for weight in self.parameters())


def _place(
    model: nn.Module, part: Mapping[str, Any], made: dict[str, nn.Parameter], weights: Callable[[str], Tensor]
) -> None:
    """Add a module to a stand-in.

    Args:
        part: its description.
        made: the weights so far, by their names in the files or in the description; tied weights are one.
        weights: see `StandInModel.of`.
    """
    if "frequencies" in part:
        module: nn.Module = FixedAngles(part["frequencies"], part["factor"])
    else:
        kind = _KINDS.get(part["kind"], nn.Module)
        module = kind.__new__(kind)  # without weights of its own
        nn.Module.__init__(module)
        vars(module).update(part["settings"])
        vars(module).update({name: tuple(value) for name, value in part["tuples"].items()})
        if "ranges" in part:
            vars(module).update(ranges=torch.tensor(part["ranges"]), first=part["first"])
        for name, number in part["numbers"].items():
            module.register_buffer(name, torch.tensor(number), persistent=False)
    for name, stored in part["weights"].items():
        if stored is not None and stored not in made:
            made[stored] = nn.Parameter(weights(stored), requires_grad=False)
        module.register_parameter(name, None if stored is None else made[stored])
    parent, _, own = part["path"].rpartition(".")
    if own:
        model.get_submodule(parent).add_module(own, module)


_KINDS: dict[str, Any] = {**MODULES, "DistanceRanges": DistanceRanges, "Sines": Sines, "StandInEncoder": StandInEncoder}


def written(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor in a form that JSON can hold."""
    floats = tensor.detach().float().contiguous()
    numbers = base64.b64encode(floats.numpy().tobytes()).decode()
    return {"shape": list(tensor.shape), "float32": numbers}


def tensor_in(found: Mapping[str, Any]) -> Tensor:
    """Return a tensor from the form in which `written` gave it."""
    numbers = bytearray(base64.b64decode(found["float32"]))
    return torch.frombuffer(numbers, dtype=torch.float32).reshape(found["shape"])


class StandInTokenizer(StandIn):
    """A tokenizer of the `tokenizers` library that encodes and decodes like the one that transformers makes of a folder.

    Anything else is read from the tokenizer of transformers.

    Args:
        described: its description; see `known_folders.describe_tokenizer`.
        backend: the tokenizer of the library.
        name: its folder.
        load_whole: loads the tokenizer of transformers.
    """

    clean_up_tokenization_spaces = False

    def __init__(self, described: Mapping[str, Any], backend: Any, name: str, load_whole: Callable[[], Any]) -> None:
        self.load_whole = load_whole
        self.backend_tokenizer = backend
        self.name_or_path = name
        self.__dict__.update(described["settings"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return the token ids of a text as "input_ids", with special tokens unless `add_special_tokens` is False."""
        if not isinstance(text, str) or not options.keys() <= {"add_special_tokens", "verbose"}:
            return self.whole()(text, **options)
        adds_special_tokens = options.get("add_special_tokens", True)
        tokens = self.backend_tokenizer.encode(text, add_special_tokens=adds_special_tokens).ids
        if len(tokens) > self.model_max_length and options.get("verbose", True):
            return self.whole()(text, **options)  # logs that the text is long
        return {"input_ids": tokens}

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Return the text of tokens."""
        is_usual = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        if not is_usual or options.get("clean_up_tokenization_spaces"):
            return self.whole().decode(tokens, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, tokens: Any, **options: Any) -> Any:
        """Return the name of a token, or the names of several."""
        if type(tokens) is not int or options:
            return self.whole().convert_ids_to_tokens(tokens, **options)
        return self.backend_tokenizer.id_to_token(tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that were added after training, by their ids."""
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found
