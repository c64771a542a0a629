"""The check that a model scores token trees like plain texts."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbeam.core.errors import BrokenLaw, NotSupported, SpecbeamError, UnsupportedModel
from specbeam.core.forest import Forest
from specbeam.engines.choices import OWN_ROUNDINGS, ROUNDED_ENGINES
from specbeam.engines.cpu.audio_encoder import AudioEncoder
from specbeam.engines.cpu.encoder import CompiledEncoder, TextEncoder
from specbeam.engines.dual_binary import meets_rounded_rows
from specbeam.engines.mapped import is_mapped
from specbeam.engines.packed import matrices_of
from specbeam.engines.shared_tokens import readable
from specbeam.engines.source import Source
from specbeam.engines.torch.in_float32 import as_loaded
from specbeam.models.checkpoints.numbers import broken_weight
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.engines import COMPILED
from specbeam.models.huggingface import HuggingFaceLM

# Limits of differences between logits on a tree and on plain texts, in standard deviations of the logits.
_EXACT = 1e-3
_MOST_BY_ROUNDED_NUMBERS = 0.3
# An entry of a row that rounds to its neighbour changes all layers above it: by a root mean square of up to 0.22 in int8 and
# int4 in SmolLM2-135M, by 0.83 in one logit. Rows of unrelated texts differ by about 1.4.
_MOST_BY_ROUNDED_ROWS = 0.5
CHECKED_SOURCE = 24  # tokens of the source on which a compiled encoder is checked


def check_scores_forests(lm: HuggingFaceLM, role: str = "") -> None:
    """Raise an error unless the logits of a small token tree equal those of plain forwards on its paths.

    The largest difference may be 1e-3 standard deviations of the logits in float32, and 0.3 in other types: sums over a tree
    have another order than sums over a path, so a number may round to the neighbouring value. For engines that round whole
    rows the limit is a root mean square of 0.5 instead, and a token must not change the logits of nodes that do not see it.

    Args:
        role: prefix of the model's name in errors, such as "the draft model ".

    Raises:
        UnsupportedModel: the model cannot score the tree, or scores it wrong.
        BrokenLaw: its logits without a tree are NaN or infinite.
        NotSupported: torch could not compile the model.
    """
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, lm.vocab, 5).tolist()
    tokens = rng.integers(0, lm.vocab, 6).tolist()
    source = None
    if isinstance(lm, EncoderDecoderLM):
        source = lm.made_up_source()
        prompt = _without_padding(prompt, lm)
        tokens = _without_padding(tokens, lm)
    forest = Forest.rooted([prompt[-1]]).grown(tokens, [0, 0, 1, 2, 2, 4])
    owner = _owner(lm, prompt, source)
    name = f"{role}{type(lm.model).__name__}"
    if lm.engine in OWN_ROUNDINGS and not is_mapped(lm.model) and (fault := broken_weight(lm.model)):
        raise BrokenLaw(f"{name} cannot be rounded to {lm.engine}: its weight {fault}")
    # In this case the engine computes in float32, and the weights may have another type.
    widened = (is_mapped(lm.model) or bool(matrices_of(lm.model))) and lm.engine in COMPILED and source is None
    try:
        found = lm.extend([owner], [forest])[0].logits.float().clone()
        lm.close(owner)  # frees its row of the store for the paths
        if _rounds(lm):
            _check_sees_paths_alone(lm, owner, forest, found, name)
        expected = torch.stack(_logits_of_nodes(lm, prompt, forest, source, widened))
    except SpecbeamError:
        raise
    except Exception as error:
        if lm.engine == "torch":
            raise NotSupported(
                f"torch could not compile {name}: {type(error).__name__}: {error}; leave compile out"
            ) from error
        raise UnsupportedModel(
            f"{name} could not score a token tree: {type(error).__name__}: {error}. Its forward must take a 4-dimensional "
            "attention mask, position_ids and a transformers Cache"
        ) from error
    finally:
        lm.close(owner)
    if lm.shared is not None:  # other tokens have -inf on both sides
        is_drafted = torch.from_numpy(lm.shared.drafted)
        found = found[:, is_drafted.to(found.device)]
        expected = expected[:, is_drafted.to(expected.device)]
    expected = expected.float().to(found.device)
    _check_finite(lm, expected, name)
    is_banned = expected == -torch.inf  # models that ban tokens give them -inf
    if bool((is_banned != (found == -torch.inf)).any()):
        raise _does_not_honour(name, "they are -inf for other tokens than on plain texts")
    expected = expected.masked_fill(is_banned, 0.0)
    found = found.masked_fill(is_banned, 0.0)
    spread = expected[~is_banned].std().clamp_min(1e-6)
    errors = (found - expected) / spread
    if _rounds(lm):
        error_in_spreads = float(errors.square().mean(1).sqrt().max())
        limit = _MOST_BY_ROUNDED_ROWS
    else:
        error_in_spreads = float(errors.abs().max())
        is_in_float32 = widened or lm.model.dtype == torch.float32
        limit = _EXACT if is_in_float32 else _MOST_BY_ROUNDED_NUMBERS
    if not error_in_spreads <= limit:
        raise _does_not_honour(name, f"they are off by {error_in_spreads:.2g} standard deviations")
    if isinstance(lm, EncoderDecoderLM):
        _check_encoder(lm, name)


def _check_sees_paths_alone(lm: HuggingFaceLM, owner: Any, forest: Forest, found: torch.Tensor, name: str) -> None:
    """Raise `UnsupportedModel` if logits on a path of a tree change with the tokens of nodes that are not on it.

    Args:
        owner: whose cache is at the forest's root.
        forest: a tree that `lm` has scored.
        found: its logits, float[nodes, vocab].
        name: the model's name in errors.
    """
    path = [forest.size - 1]
    while path[-1] > 0:
        path.append(int(forest.parents[path[-1]]))
    others = sorted(set(range(forest.size)) - set(path))
    tokens = forest.tokens.copy()
    tokens[others] = np.roll(tokens[others], 1)
    logits = lm.extend([owner], [forest._replace(tokens=tokens)])[0].logits.float()[path]
    lm.close(owner)
    before = found[path]
    is_same = (logits == before) | (logits.isnan() & before.isnan())
    change = torch.where(is_same, 0.0, logits - before).abs().max()
    spread = before[before.isfinite()].std().clamp_min(1e-6)
    if not change / spread <= _EXACT:
        raise _does_not_honour(
            name, f"tokens that are not on a node's path change them by {change / spread:.2g} standard deviations"
        )


def _does_not_honour(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} ignores the given masks or positions: its logits on a token tree are wrong ({what}); specbeam needs a "
        "decoder whose attention takes both from the caller"
    )


def _check_finite(lm: HuggingFaceLM, logits: torch.Tensor, name: str) -> None:
    """Raise `BrokenLaw` if logits of plain forwards hold NaN or +inf, and name a weight that does, if there is one."""
    if bool(logits.isnan().any()):
        what = "NaN"
    elif bool((logits == torch.inf).any()):
        what = "infinite"
    else:
        return
    fault = broken_weight(lm.model)
    why = (
        f"its weight {fault}"
        if fault
        else f"its weights are finite, and sums overflow in {lm.model.dtype}; try float32"
    )
    raise BrokenLaw(f"the logits of {name} are {what} for ordinary tokens: {why}")


def _check_encoder(lm: EncoderDecoderLM, name: str) -> None:
    """Raise `UnsupportedModel` unless a compiled encoder has the output of transformers' encoder in float32.

    The difference may be 1e-3 of the standard deviation. Encoders with rounded matrices are not compared.

    Args:
        name: the model's name in errors.
    """
    encoder = lm.encoder
    if not isinstance(encoder, CompiledEncoder) or encoder.kind.startswith("int"):
        return
    error = encoder.error_on(_checked_inputs(lm, encoder))
    if math.isnan(error):
        fault = broken_weight(lm.model) or "its weights are finite"
        raise BrokenLaw(f"the states of {name}'s encoder are NaN or infinite for an ordinary source: {fault}")
    if not error <= 1e-3:
        raise UnsupportedModel(
            f"the encoder of {name} differs from its family's: compiled states are off by {error:.2g} standard "
            "deviations; set SPECBEAM_KERNELS=off to let transformers run the model"
        )


def _checked_inputs(lm: EncoderDecoderLM, encoder: CompiledEncoder) -> np.ndarray:
    """Return the test input of a compiled encoder: tokens, or features of a short window of audio."""
    rng = np.random.default_rng(0)
    if isinstance(encoder, TextEncoder):
        length = CHECKED_SOURCE if lm.most_source is None else min(CHECKED_SOURCE, lm.most_source)
        tokens = rng.integers(0, min(lm.vocab, len(encoder.embedding)), length).tolist()
        return np.array(_without_padding(tokens, lm))
    assert isinstance(encoder, AudioEncoder)
    channels, frames = encoder.shape
    return rng.standard_normal((channels, min(2 * CHECKED_SOURCE, frames)), dtype=np.float32)


def _without_padding(tokens: list[int], lm: EncoderDecoderLM) -> list[int]:
    """Return the tokens without padding, after which some decoders count positions differently."""
    padding = lm.model.config.pad_token_id
    return [(token + 1) % lm.vocab if token == padding else token for token in tokens]


def _logits_of_nodes(
    lm: HuggingFaceLM, prompt: list[int], forest: Forest, source: Source | None, widened: bool
) -> list[torch.Tensor]:
    """Return the logits of each node of a tree, float[vocab], computed without a tree; see `_plain_logits`.

    Engines that round, and models whose weights stay in their files, run one pass per leaf for all nodes on its path.

    Args:
        widened: whether the model's weights stay in their files and are called in float32.
    """
    if source is not None or not (widened or _rounds(lm)):
        return [_plain_logits(lm, prompt + forest.path(node), source) for node in range(forest.size)]
    leaves = sorted(set(range(forest.size)) - set(forest.parents.tolist()))
    paths = [forest.path(leaf) for leaf in leaves]
    along = _logits_along(lm, prompt, paths)
    found = []
    for node in range(forest.size):
        path = forest.path(node)
        leaf = next(number for number, whole in enumerate(paths) if whole[: len(path)] == path)
        found.append(along[leaf][len(path)])
    if _rounds(lm):  # one node as a prompt, which shares nothing with the tree
        found[leaves[-1]] = _plain_logits(lm, prompt + paths[-1])
    return found


@torch.inference_mode()
def _plain_logits(lm: HuggingFaceLM, path: list[int], source: Source | None = None) -> torch.Tensor:
    """Return the logits after a path, float[vocab], computed without a tree.

    They come from the model object, or from `lm` if its engine rounds weights, or keys and values.
    """
    if _rounds(lm):
        return _own_logits(lm, path, [], source)[0]
    if source is not None:
        assert isinstance(lm, EncoderDecoderLM)
        return lm.plain_logits(source, path)
    return _called(lm, [path])[0, -1]


def _own_logits(lm: HuggingFaceLM, prompt: list[int], path: list[int], source: Source | None = None) -> torch.Tensor:
    """Return the engine's logits after a prompt and after each token of a path, float[1 + path, vocab]."""
    owner = _owner(lm, prompt, source)
    try:
        forest = Forest.rooted([prompt[-1]])
        if path:
            forest = forest.grown(path, range(len(path)))
        return lm.extend([owner], [forest])[0].logits.clone()
    finally:
        lm.close(owner)


def _owner(lm: HuggingFaceLM, prompt: list[int], source: Source | None) -> Any:
    return SimpleNamespace(prompt=prompt, state={}, context={} if source is None else {lm: source})


def _rounds(lm: HuggingFaceLM) -> bool:
    """Return whether a language model's engine rounds weights, rows, or keys and values."""
    return lm.engine in ROUNDED_ENGINES or lm.kv != "float32" or meets_rounded_rows(lm.model)


@torch.inference_mode()
def _logits_along(lm: HuggingFaceLM, prompt: list[int], paths: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits after a prompt and after each token of each path.

    They come from an engine that rounds; or from a model in mapped files, called once in float32, so that its files are read
    once.
    """
    if _rounds(lm):
        return [_own_logits(lm, prompt, path) for path in paths]
    longest = max(len(path) for path in paths)
    rows = [prompt + path + [prompt[-1]] * (longest - len(path)) for path in paths]  # causal: padding changes nothing
    with as_loaded(lm.model):
        logits = _called(lm, rows, use_cache=False)
    return list(logits[:, len(prompt) - 1 :])


def _called(lm: HuggingFaceLM, rows: list[list[int]], **options: Any) -> torch.Tensor:
    """Return the model object's logits for texts of equal length, float[texts, length, vocab]."""
    tokens = torch.from_numpy(readable(lm.shared, np.array(rows))).to(lm.device)
    logits: torch.Tensor = lm.model(input_ids=tokens, **options).logits
    return logits if lm.shared is None else lm.shared.fitted_logits(logits)
