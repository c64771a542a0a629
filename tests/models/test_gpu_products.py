"""Products of rows with matrices on a GPU, in 16 bits and in fp8; elsewhere their kernel runs in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from specbeam.engines.gpu.products import FP8, GpuMatrix, ProductBlocks, multiplied, rounded_matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ProductBlocks(16, 16, 32, 4, 2)
KINDS = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter cannot multiply bfloat16
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape, kind):
    return torch.randn(*shape, device=DEVICE).to(kind)


def assert_products(found, x, matrix, more=0.0):
    """Compare with products in float64: sums in float32 are off by the rounding of the product and of what it is added to."""
    numbers = matrix.numbers.double()
    if matrix.scales is not None:
        numbers = numbers * matrix.scales.double()[:, None]
    product = x.double() @ numbers.T
    exact = product + more
    step = ROUNDING[found.dtype] * (product.abs() + exact.abs()) + 1e-5 * x.shape[1]
    assert bool(((found.double() - exact).abs() <= step).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "blocks",
    [SMALL, ProductBlocks(32, 32, 16, 4, 3), ProductBlocks(16, 16, 16, 4, 2, 3)],
    ids=["narrow", "wide", "in parts"],
)
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 48, 20), (19, 64, 33), (40, 32, 16)])
@pytest.mark.parametrize("is_rounded", [False, True], ids=["as they are", "fp8"])
def test_products_are_those_of_the_numbers(kind, blocks, rows, width, outputs, is_rounded):
    numbers = random(outputs, width, kind=kind)
    x, bias = random(rows, width, kind=kind), random(outputs, kind=kind)
    matrix = rounded_matrix(numbers) if is_rounded else GpuMatrix(numbers)
    assert_products(multiplied(x, matrix, blocks=blocks), x, matrix)
    assert_products(multiplied(x, matrix, bias, blocks=blocks), x, matrix, bias.double())
    before = random(rows, outputs, kind=kind)
    goal = before.clone()
    assert multiplied(x, matrix, add_to=goal, blocks=blocks) is goal
    assert_products(goal, x, matrix, before.double())


def test_a_row_has_the_same_bits_whatever_the_others_are():
    matrix = rounded_matrix(random(33, 64, kind=torch.float16))
    x = random(20, 64, kind=torch.float16)
    alone = torch.cat([multiplied(row[None], matrix, blocks=SMALL) for row in x])
    assert torch.equal(multiplied(x, matrix, blocks=SMALL), alone)


def test_rounded_numbers_are_the_nearest_of_fp8():
    numbers = random(12, 40, kind=torch.float32) * torch.logspace(-6, 6, 12, device=DEVICE)[:, None]
    numbers[3] = 0
    matrix = rounded_matrix(numbers)
    back = matrix.numbers.float() * matrix.scales[:, None]
    assert matrix.numbers.dtype == FP8
    assert matrix.bytes == 12 * 40 + 4 * 12
    assert torch.equal(back[3], numbers[3])
    largest = numbers.abs().amax(1, keepdim=True)
    torch.testing.assert_close(back.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)
    # Half a step: a sixteenth of a number, but no less than that of the smallest normal number of fp8, 2 ** -6.
    nearest = torch.maximum(numbers.abs() / 16, largest / 448 * 2.0**-10)
    assert bool(((back - numbers).abs() <= 1.0001 * nearest).all())


def test_matrices_that_lie_across_are_multiplied_too():
    x, across = random(2, 32, kind=torch.float16), random(32, 16, kind=torch.float16).t()
    for matrix in (GpuMatrix(across), rounded_matrix(across)):
        goal = torch.zeros(2, 16, device=DEVICE, dtype=torch.float16)
        assert_products(multiplied(x, matrix, across[:, 0].contiguous(), goal), x, matrix, across[:, 0].double())
