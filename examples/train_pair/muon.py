"""Muon: momentum whose matrix updates are made orthogonal. In float32, because few CPUs multiply bfloat16 quickly."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with singular values about 1, float[count, rows, columns]; Newton-Schulz of degree five."""
    a, b, c = 3.4445, -4.7750, 2.0315  # coefficients of Jordan et al. 2024: fastest growth from zero, loose around one
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For the matrices inside the blocks. Matrices of one shape are stacked and updated together."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        groups = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        super().__init__([{"params": group} for group in groups.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = group["params"]
            gradient = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            trace = state.setdefault("trace", torch.zeros_like(gradient))
            trace.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalized(gradient.lerp(trace, group["momentum"]))
            rows, columns = update.shape[-2:]
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(matrices, update, strict=True):
                matrix.sub_(change, alpha=scale)
