"""Perplexity of a model with layers of few bits, by several methods, beside a copy that `specbeam train dbllm` made.

    python examples/two_bits/measure.py MODEL --copy FOLDER --data texts.txt --calibration other_texts.txt

Layers are rounded in groups of 64 weights; the embedding and the head stay as they are. "rtn" is rounding to the nearest
number of a grid from the least to the largest weight of a group; "grid" is the grid of 2 bits from which `train dbllm`
starts; "gptq" rounds column by column and corrects the columns that follow (arXiv 2210.17323). These run in float32.
"int4", "int8" and "copy, rows of 8 bits" are specbeam's compiled forwards.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn

import specbeam as sb
from specbeam.core import Forest
from specbeam.doors.prompts import read, spread
from specbeam.engines import rounded_binaries
from specbeam.lab.train.dbllm import names_of_matrices

GROUP = 64
DAMP = 0.01  # of the mean of the diagonal, added to GPTQ's matrix of second moments


class Window(NamedTuple):
    """A piece of text, and the number of its first tokens that are not scored."""

    tokens: list[int]
    before: int = 1


def windows_of(path: Path, tokenizer, length: int, count: int) -> list[Window]:
    """Return pieces of a text, `length` tokens each; of a .tsv file its answers (first column) after their prompts."""
    if path.suffix == ".txt":
        ids = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - length + 1, length)
        return [Window(ids[start : start + length]) for start in starts][:count]
    found = []
    for row in spread(list(read(str(path), columns=(2, 1))), count):
        prompt = tokenizer(row.prompt)["input_ids"]
        answer = tokenizer(row.answer, add_special_tokens=False)["input_ids"]
        found.append(Window([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
    return found


@torch.no_grad()
def by_model(model: nn.Module) -> Callable[[list[int]], Tensor]:
    """Return the function that computes logits by transformers."""
    return lambda window: model(torch.tensor([window])).logits[0]


def by_engine(pair: sb.Pair) -> Callable[[list[int]], Tensor]:
    """Return the function that computes logits by specbeam's forward."""

    def logits(window: list[int]) -> Tensor:
        owner = SimpleNamespace(prompt=window[:1], state={}, context={})
        forest = Forest.rooted(window[:1]).grown(window[1:], range(len(window) - 1))
        try:
            return pair.target.extend([owner], [forest])[0].logits.clone()
        finally:
            pair.target.close(owner)

    return logits


@torch.no_grad()
def losses(windows: list[Window], logits_of: Callable[[list[int]], Tensor]) -> Tensor:
    """Return the loss of each window in nats, summed over the scored tokens."""
    found = []
    for tokens, before in windows:
        logits = logits_of(tokens)[before - 1 : -1].double()
        following = torch.tensor(tokens[before:])
        found.append(nn.functional.cross_entropy(logits, following, reduction="sum"))
    return torch.stack(found)


def nearest(weight: Tensor, bits: int) -> Tensor:
    """Round to the nearest of 2 ** bits equally spaced numbers from the least to the largest of each group."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, step = grid_of(groups, bits)
    return (torch.round((groups - low) / step).clamp(0, 2**bits - 1) * step + low).flatten(1)


def grid_of(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the least number of a grid, and its step, for each group."""
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / (2**bits - 1)
    return low, step.clamp_min(1e-9)


def gptq(weight: Tensor, moments: Tensor, bits: int) -> Tensor:
    """Round input by input, and let the inputs that follow make up for the error on the calibration texts."""
    rest = weight.clone()
    moments = moments + DAMP * moments.diagonal().mean() * torch.eye(len(moments))
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    rounded = torch.empty_like(rest)
    for first in range(0, weight.shape[1], GROUP):
        here = slice(first, first + GROUP)
        group = rest[:, here].clone()
        corner = inverse[here, here]
        low, step = grid_of(group, bits)
        errors = torch.empty_like(group)
        for place in range(GROUP):
            column = group[:, place : place + 1]
            nearby = torch.round((column - low) / step).clamp(0, 2**bits - 1) * step + low
            rounded[:, first + place] = nearby[:, 0]
            errors[:, place] = ((column - nearby) / corner[place, place])[:, 0]
            group[:, place + 1 :] -= errors[:, place : place + 1] * corner[place, place + 1 :]
        rest[:, here.stop :] -= errors @ inverse[here, here.stop :]
    return rounded


@torch.no_grad()
def moments_of(model: nn.Module, names: list[str], windows: list[Window]) -> dict[str, Tensor]:
    """Return the second moments of the inputs of each matrix on calibration texts, by the unrounded model."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
            rows = given[0].flatten(0, -2)
            found[name] = found.get(name, 0) + rows.T @ rows

        return add

    hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    for window in windows:
        model(torch.tensor([window.tokens]))
    for one in hooks:
        one.remove()
    return found


def rounded_models(model: nn.Module, calibration: list[Window]) -> Iterator[tuple[str, float]]:
    """Round the layers of a model in place, by one method after the other; yield its name and bits per weight."""
    names = names_of_matrices(model)
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    moments = moments_of(model, names, calibration)
    methods: dict[str, Callable[[str], Tensor]] = {}
    for bits in (4, 3, 2):
        methods[f"rtn {bits}"] = lambda name, bits=bits: nearest(weights[name], bits)
        methods[f"gptq {bits}"] = lambda name, bits=bits: gptq(weights[name], moments[name], bits)
    methods["grid 2"] = lambda name: torch.from_numpy(rounded_binaries(weights[name].numpy()).weights())
    for method, rounded in methods.items():
        for name in names:
            model.get_submodule(name).weight.data = rounded(name)
        yield method, int(method[-1]) + 32 / GROUP  # two numbers of 16 bits for each group


def main(
    model: Annotated[str, typer.Argument(help="Model: a path, a hub id, or 'bundled'.")],
    data: Annotated[Path, typer.Option(help="File to score: .txt, or a .tsv of answers and prompts.")],
    calibration: Annotated[Path, typer.Option(help="Another such file, for GPTQ.")],
    copy: Annotated[Path | None, typer.Option(help="Folder that `specbeam train dbllm` wrote.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window of .txt.")] = 256,
    count: Annotated[int, typer.Option(help="Number of windows to score.")] = 40,
    held: Annotated[int, typer.Option(help="Number of windows for GPTQ.")] = 32,
) -> None:
    """Print bits per weight, perplexity, and the loss beyond that of the full model, with its standard error."""
    full = sb.load(model, check=False)
    windows = windows_of(data, full.tokenizer, length, count)
    other = windows_of(calibration, full.tokenizer, length, held)
    base = losses(windows, by_model(full.target_model))
    scored = sum(len(window.tokens) - window.before for window in windows)

    def show(name: str, bits: float, found: Tensor) -> None:
        more = found - base
        error = more.std() * math.sqrt(len(more)) / scored
        perplexity = (found.sum() / scored).exp()
        print(f"{name:24} {bits:5.2f} {perplexity:9.3f}  {more.sum() / scored:+.4f} ({error:.4f}) nats", flush=True)

    show("full", 32, base)
    for name, bits in (("int8", 8), ("int4", 4.5)):
        show(name, bits, losses(windows, by_engine(sb.load(model, quantize=name, check=False))))
    if copy is not None:
        trained = sb.load(copy, check=False)
        show("copy", 2.5, losses(windows, by_model(trained.target_model)))
        show("copy, rows of 8 bits", 2.5, losses(windows, by_engine(trained)))
    for name, bits in rounded_models(full.target_model, other):
        show(name, bits, losses(windows, by_model(full.target_model)))


if __name__ == "__main__":
    typer.run(main)
