"""The tokens of heads with their own vocabulary."""

import torch
from jaxtyping import Int64
from torch import Tensor

from specbeam.core.errors import BadHead
from specbeam.models.heads.arrays import TokenMap
from specbeam.models.heads.files import HeadFiles


def read_tokens(files: HeadFiles, count: int) -> TokenMap:
    """Return the target's token for each of the head's, from the maps `d2t` and `t2d`; None if they are the same.

    `d2t` holds the target's token id minus the head's. With a wrong map a head would silently draft wrong tokens, so
    implausible maps are refused.

    Args:
        count: number of the head's tokens.

    Raises `BadHead`.
    """
    vocab = files.vocab
    differences = _taken(files, "d2t")
    marks = _taken(files, "t2d")
    if count > vocab:
        raise BadHead(f"{files.where} has logits for {count} tokens, and the target has {vocab}")
    if differences is None:
        if count < vocab:
            raise BadHead(f"{files.where} has logits for {count} of {vocab} tokens, and no map d2t of these tokens")
        return None
    if len(differences) != count:
        raise BadHead(f"{files.where}: d2t has {len(differences)} entries, and the head has {count} tokens")
    tokens = torch.arange(count) + differences.cpu()
    if count and (tokens.min() < 0 or tokens.max() >= vocab):
        raise BadHead(f"{files.where}: d2t names tokens from {tokens.min()} to {tokens.max()}; the target has {vocab}")
    if (tokens[1:] <= tokens[:-1]).any():
        raise BadHead(f"{files.where}: the tokens of d2t do not ascend")
    if marks is not None:
        _check_is_same(files, tokens, marks.bool().cpu(), vocab)
    elif count < vocab and not differences.any():
        raise BadHead(f"{files.where}: d2t is all zero, which means the first {count} tokens: was the map lost?")
    return None if count == vocab else tokens


def _taken(files: HeadFiles, name: str) -> Int64[Tensor, " n"] | None:
    """Take a map and return it as integers; None if there is none. Raises `BadHead` for other types."""
    if not files.has(name):
        return None
    found = files.take(name)
    if found.is_floating_point() or found.is_complex():
        raise BadHead(f"{files.where}: {name} is stored as {found.dtype}; it must hold integers")
    return found.long()


def _check_is_same(files: HeadFiles, tokens: Tensor, is_drafted: Tensor, vocab: int) -> None:
    """Raise `BadHead` unless `t2d` is true at these tokens and nowhere else."""
    if len(is_drafted) < vocab:
        raise BadHead(f"{files.where}: t2d has {len(is_drafted)} entries, and the target has {vocab} tokens")
    if int(is_drafted.sum()) != len(tokens) or not is_drafted[tokens].all():
        raise BadHead(f"{files.where}: t2d and d2t name different tokens")
