"""Products from panels against those of numpy, and what the compiled forward makes of them."""

import inspect
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

import numba

from specbeam.core.compiling.processor import dot_of_bytes, features
from specbeam.core.forest import Forest
from specbeam.engines.cpu import decoder, shares, sums, team, tiles
from specbeam.engines.cpu import layers as loops
from specbeam.engines.cpu import panels as panels_module
from specbeam.engines.cpu.binary_panels import transpose_bits, write_binaries
from specbeam.engines.cpu.block_panels import rounded_blocks
from specbeam.engines.cpu.panels import empty_panels, fits_bfloat16, in_panels, multiply
from specbeam.engines.cpu.rounding import GROUP, rounded_groups
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.dual_binary import BINARY_GROUP, dual_binary_of, rounded_binaries
from specbeam.models.huggingface import HuggingFaceLM
from tests.models.test_compiled_forward import scored
from tests.support.quick import first_quick
from tests.support.rounding import in_bfloat16, rounded
from tests.support.tiny_models import tiny

BLOCKS = {"blocks of 4 bits": 4, "blocks of 8 bits": 8}
KINDS = ["float32", "bfloat16", "bfloat16 pairs", "float16", "int8", "int4", "nibbles", *BLOCKS, "dual binary"] + [
    "tiles",
    "int8 tiles",
] * tiles.available()
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="the processor has no tile registers")


def product(x, panels, threads=1):
    out = np.full((len(x), len(panels) * WIDTH), np.nan, dtype=np.float32)
    multiply(x, panels, out, threads)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "depth"), [(1, 4), (33, 8), (96, 60), (200, 256)])
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 16, 17, 30, 32, 48, 250])
def test_products_are_those_of_numpy(rows, columns, depth, kind):
    rng = np.random.default_rng(rows)
    depth = -(-depth // GROUP) * GROUP if kind in ("int4", "nibbles", *BLOCKS) else depth
    depth = -(-depth // BINARY_GROUP) * BINARY_GROUP if kind == "dual binary" else depth
    matrix = in_bfloat16(rng.standard_normal((columns, depth)))
    assert fits_bfloat16(matrix)
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    if kind == "float16":
        matrix = in_float16(matrix)
    expected, given = x, matrix
    if kind.startswith("int8"):
        numbers, scales = rounded(matrix)
        assert np.abs(numbers * scales[:, None] - matrix).max() <= 0.5001 * scales.max()
        assert (np.abs(numbers).max(1) == 127).all()
        expected, matrix = on_the_grid(x), numbers * scales[:, None]
    if kind == "bfloat16 pairs":
        expected = in_bfloat16(x)
    if kind == "int4":
        numbers, scales = rounded_groups(matrix)
        in_groups = numbers.reshape(*scales.shape, GROUP)
        assert in_groups.min() >= -8
        assert in_groups.max() <= 7
        assert (in_groups.min(2) == -8).all()
        steps = matrix.reshape(in_groups.shape) / scales[..., None]
        is_near = steps <= 7.5  # what is as far on the other side as the farthest is beyond the largest number
        assert np.abs(in_groups - steps)[is_near].max() <= 0.5001
        assert (in_groups[~is_near] == 7).all()
        assert fits_bfloat16(scales.repeat(2, 1))
        expected, matrix = on_the_grid(x), (in_groups * scales[..., None]).reshape(matrix.shape)
    if kind == "nibbles":
        numbers, scales = rounded_groups(matrix)
        matrix = (numbers.reshape(*scales.shape, GROUP) * scales[..., None]).reshape(matrix.shape)
    if kind in BLOCKS:
        near = rounded_blocks(matrix, BLOCKS[kind]).weights()
        assert np.abs(near - matrix).max() <= 1.2 * np.abs(matrix).max() / 2 ** BLOCKS[kind]
        matrix = near
    if kind == "dual binary":
        expected, matrix = on_the_grid(x), rounded_binaries(matrix).weights()
    found = product(x, in_panels(given, kind))
    if kind == "nibbles" or kind in BLOCKS:  # rows are not rounded, and weights are exact
        assert (found == product(x, in_panels(matrix, "float32"))).all()
    expected = expected.astype(float) @ matrix.T.astype(float)
    np.testing.assert_allclose(found[:, :columns], expected, atol=2e-5 * depth**0.5)
    assert not found[:, columns:].any()


def in_float16(matrix):
    """Numbers that float16 has and bfloat16 has not, some of them too small for its full precision."""
    small = np.where(np.arange(matrix.shape[1]) % 7 == 3, np.float32(1e-6), np.float32(1.001))
    return (matrix * small).astype(np.float16).astype(np.float32)


def on_the_grid(x):
    """Rows rounded to multiples of a 127th of their largest number."""
    steps = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return np.rint(x / steps) * steps


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("int") or kind == "bfloat16 pairs"])
@pytest.mark.parametrize("rows", [2, 20])
def test_a_row_with_nan_has_products_of_nan_and_the_others_have_none(rows, kind):
    x = np.ones((rows, 64), dtype=np.float32)
    x[1, 5] = np.nan
    found = product(x, in_panels(np.ones((40, 64), dtype=np.float32), kind))[:, :40]
    assert np.isnan(found[1]).all()
    assert not np.isnan(np.delete(found, 1, 0)).any()


@pytest.mark.parametrize("kind", ["int8", "int4", "dual binary"])
def test_rows_and_columns_of_zeros_stay_zeros(kind):
    depth = BINARY_GROUP  # a multiple of all groups
    matrix = np.ones((5, depth), dtype=np.float32)
    matrix[3] = 0
    found = product(np.array([[0], [1]], dtype=np.float32).repeat(depth, 1), in_panels(matrix, kind))
    assert not found[0].any()
    np.testing.assert_allclose(found[1, :5], [depth, depth, depth, 0, depth], rtol=1e-6)


def some_binaries(columns, depth, rng):
    """A matrix of two binary matrices whose scales have nothing to do with each other."""
    scales = in_bfloat16(rng.standard_normal((2, columns, depth // BINARY_GROUP)))
    return dual_binary_of(rng.random((2, columns, depth)) < 0.4, scales)


def panels_of_binaries(matrix):
    panels = empty_panels(1, matrix.planes.shape[2], matrix.depth, "dual binary")[0]
    write_binaries(panels.view(np.int32), matrix)
    return panels


def law_of_binaries(x, matrix):
    """What the product is, step by step: integers by group, then two sums that are rounded once each."""
    largest = np.abs(x).max(1, keepdims=True)
    numbers = np.rint(x * (np.float32(127) / largest)).astype(int)
    steps = np.arange(matrix.depth)
    bits = matrix.planes[:, steps // 32] >> (steps % 32).astype(np.uint32)[:, None] & 1
    total = np.zeros((len(x), bits.shape[2]), dtype=np.float32)
    for group in range(matrix.depth // BINARY_GROUP):
        here = slice(group * BINARY_GROUP, (group + 1) * BINARY_GROUP)
        for which in range(2):
            counted = numbers[:, here] @ bits[which, here].astype(int)
            total = (total + matrix.scales[which, group].astype(float) * counted).astype(np.float32)
    return total * (largest / np.float32(127))


@pytest.mark.parametrize("rows", [1, 5, 12, 13])
def test_products_with_two_binary_matrices_are_their_law_to_the_last_bit(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 3 * BINARY_GROUP)).astype(np.float32)
    matrix = some_binaries(70, 3 * BINARY_GROUP, rng)
    found = product(x, panels_of_binaries(matrix))
    assert (found[:, :70] == law_of_binaries(x, matrix)).all()
    np.testing.assert_allclose(found[:, :70], on_the_grid(x) @ matrix.weights().T, atol=1e-4)


@pytest.mark.parametrize("rows", first_quick([5, 1, 12]))
def test_common_bits_are_counted_alike_on_machines_without_products_of_bytes(rows, monkeypatch):
    """By other LLVM code, compiled anew under another name, from rows that are split into their bits."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 2 * BINARY_GROUP)).astype(np.float32)
    matrix = some_binaries(70, 2 * BINARY_GROUP, rng)
    panels = panels_of_binaries(matrix)
    monkeypatch.setattr(sums, "DOT_OF_BYTES", "")
    each = x.shape[1] // 4 + 1
    split = np.empty(rows * each, dtype=np.uint32)
    parts = panels_module.part_count(rows)
    for part in range(parts):
        start, here = panels_module.part_of_rows(part, parts, rows)
        transpose_bits(x, start, here, split[start * each :], np.empty(x.shape[1], dtype=np.uint8))
    written = []
    count_of = sums._LoopOfPlanes._count
    monkeypatch.setattr(sums._LoopOfPlanes, "_count", lambda *given: written.append(1) or count_of(*given))
    times = numba.njit(error_model="numpy")(inspect.unwrap(panels_module._multiply_panel_in_parts.py_func))
    out = np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32)
    for panel in range(len(panels)):
        times(panels, panel, split.view(np.uint16), *x.shape, out, 0)
    assert written
    assert (out[:, :70] == law_of_binaries(x, matrix)).all()


@pytest.mark.parametrize(
    ("kind", "rows"), first_quick([("int8", 5), ("int8", 30), ("int8", 1), ("int8", 12), ("int4", 5)], 2)
)
def test_bytes_are_summed_alike_on_machines_that_have_no_instruction_for_it(kind, rows, monkeypatch):
    """By other LLVM code, compiled anew under another name."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    panels = in_panels(rng.standard_normal((96, 256)).astype(np.float32), kind)
    expected, written = product(x, panels), []
    monkeypatch.setattr(sums, "DOT_OF_BYTES", "")
    product_of = sums._LoopOfBytes._with_products
    monkeypatch.setattr(sums._LoopOfBytes, "_with_products", lambda *given: written.append(1) or product_of(*given))
    standing = numba.njit(inspect.unwrap(panels_module._transposed_parts.py_func))
    times = numba.njit(error_model="numpy")(inspect.unwrap(panels_module._multiply_panel_in_parts.py_func))
    out = np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32)
    for panel in range(len(panels)):
        times(panels, panel, standing(x, panels), *x.shape, out, 0)
    assert written
    assert (out == expected).all()


@pytest.mark.parametrize(("kind", "rows"), [("int8", 5), ("int8", 12), ("int4", 5)])
def test_bytes_are_summed_alike_by_products_of_signed_bytes(kind, rows, monkeypatch):
    """As by ARM's instruction "sdot", whose place other code takes here."""

    def signed_products(loop, total, first, second):
        for place in range(4):
            low, high = ((one << 24 - 8 * place).shifted_with_sign(24) for one in (first, second))
            total = total + low * high
        return total

    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    panels = in_panels(rng.standard_normal((96, 256)).astype(np.float32), kind)
    expected = product(x, panels)
    monkeypatch.setattr(sums, "DOT_OF_BYTES", "sdot")
    monkeypatch.setattr(sums._LoopOfBytes, "_with_products", signed_products)
    standing = numba.njit(inspect.unwrap(panels_module._transposed_parts.py_func))
    times = numba.njit(error_model="numpy")(inspect.unwrap(panels_module._multiply_panel_in_parts.py_func))
    out = np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32)
    for panel in range(len(panels)):
        times(panels, panel, standing(x, panels), *x.shape, out, 0)
    assert (out == expected).all()


@pytest.mark.skipif(
    dot_of_bytes(features()) != "vpmaddubsw",
    reason="only processors without VNNI use vpmaddubsw, and for some others LLVM never ends to compile it; see "
    "make test-processors",
)
@pytest.mark.parametrize(("kind", "rows"), first_quick([("int8", 5), ("int4", 5), ("int8", 12), ("int4", 12)], 2))
def test_bytes_are_summed_alike_in_pairs(kind, rows, monkeypatch):
    """Pairs have 16 bits: the largest numbers fit, and no sum of them is cut off."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    weights = rng.standard_normal((96, 256)).astype(np.float32)
    x[: rows // 2] = np.sign(x[: rows // 2])
    weights[:48] = np.sign(weights[:48])
    x[0] = -1
    weights[:8] = -1
    weights[8:16] = 1
    panels = in_panels(weights, kind)
    found = []
    for instruction in ("", "vpmaddubsw"):
        monkeypatch.setattr(sums, "DOT_OF_BYTES", instruction)
        standing = numba.njit(inspect.unwrap(panels_module._transposed_parts.py_func))
        times = numba.njit(error_model="numpy")(inspect.unwrap(panels_module._multiply_panel_in_parts.py_func))
        out = np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32)
        for panel in range(len(panels)):
            times(panels, panel, standing(x, panels), *x.shape, out, 0)
        found.append(out)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("rows", [1, 5, 12, 30])
def test_pairs_are_summed_alike_on_machines_that_have_no_instruction_for_it(rows, monkeypatch):
    """By other LLVM code, compiled anew under another name."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    panels = in_panels(in_bfloat16(rng.standard_normal((96, 256))), "bfloat16 pairs")
    expected, written = product(x, panels), []
    monkeypatch.setattr(sums, "DOT_OF_BFLOAT16", "")
    product_of = sums._LoopOfPairs._product
    monkeypatch.setattr(sums._LoopOfPairs, "_product", lambda *given: written.append(1) or product_of(*given))
    transposed = numba.njit(inspect.unwrap(panels_module._transposed_parts.py_func))
    times = numba.njit(error_model="numpy")(inspect.unwrap(panels_module._multiply_panel_in_parts.py_func))
    out = np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32)
    for panel in range(len(panels)):
        times(panels, panel, transposed(x, panels), *x.shape, out, 0)
    assert written
    assert (out == expected).all()


def test_bfloat16_is_rounded_to_as_torch_does():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.exp2(np.arange(1000) % 60 - 30)
    x = np.append(x.astype(np.float32), np.float32([1.00390625, 1.01171875, -0.0, 3.0]))  # two halves among them
    assert (in_bfloat16(x) == torch.from_numpy(x).to(torch.bfloat16).float().numpy()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind, monkeypatch):
    """Three threads, more than this machine may have processors, over and over: shares are never lost nor done twice."""
    monkeypatch.setattr(team, "allowed_threads", lambda: 3)
    rng = np.random.default_rng(0)
    columns = {"nibbles": 8000, "dual binary": 32000, **dict.fromkeys(BLOCKS, 8000)}.get(kind, 2400)  # enough to share
    matrix, x = (
        rng.standard_normal((columns, 512)).astype(np.float32),
        rng.standard_normal((37, 512)).astype(np.float32),
    )
    assert not fits_bfloat16(matrix)
    panels = in_panels(matrix if kind == "float32" else in_bfloat16(matrix), kind)
    assert panels.size >= panels_module._SHARED_FROM
    helping = team.Team()
    helping.learn(panels)
    expected = {rows: product(x[:rows], panels) for rows in (1, 5, 37)}
    with helping.threads(3) as threads:
        assert threads == helping.address
        for turn in range(300):
            rows = (1, 5, 37)[turn % 3]
            assert (product(x[:rows], panels, threads) == expected[rows]).all()
        until = time.monotonic() + 20
        while helping.memory[shares.HELPED] == 0 and time.monotonic() < until:
            product(x, panels, threads)
    assert helping.memory[shares.HELPED] > 0
    assert helping.memory[shares.OPEN] == 0


def test_threads_help_large_models_alone(monkeypatch):
    monkeypatch.setattr(team, "most_threads", lambda: 4)
    assert [team.threads_for(weights) for weights in (8_000_000, 29_999_999, 30_000_000)] == [1, 1, 4]
    model = tiny("llama")
    assert HuggingFaceLM(model).runner.decoder.threads == 1
    monkeypatch.setattr(team, "HELPED_FROM", 0)
    assert HuggingFaceLM(model).runner.decoder.threads == 4


def test_a_product_waits_for_no_thread_that_does_not_come(monkeypatch):
    monkeypatch.setattr(team, "allowed_threads", lambda: 2)
    monkeypatch.setattr(team, "_help", lambda memory, waker: None)
    panels = in_panels(np.ones((2400, 512), dtype=np.float32))
    helping = team.Team()
    helping.learn(panels)
    with helping.threads(2) as threads:
        assert (product(np.ones((1, 512), dtype=np.float32), panels, threads) == 512).all()


def test_panels_that_the_helpers_do_not_know_are_multiplied_by_one_thread(monkeypatch):
    monkeypatch.setattr(team, "allowed_threads", lambda: 2)
    helping = team.Team()
    panels = in_panels(np.ones((2400, 512), dtype=np.float32))
    with helping.threads(2) as threads:
        assert (product(np.ones((1, 512), dtype=np.float32), panels, threads) == 512).all()
    assert helping.memory[shares.TICKET] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.parametrize("holder", ["another thread", "the one that forks"])
def test_a_process_that_is_forked_while_the_team_works_has_a_team_of_its_own(holder, monkeypatch):
    monkeypatch.setattr(team, "allowed_threads", lambda: 2)
    panels = in_panels(np.ones((2400, 512), dtype=np.float32))
    x = np.ones((1, 512), dtype=np.float32)
    team.TEAM.learn(panels)
    product(x, panels)
    taken = threading.Event()
    ended = threading.Event()

    def multiplied():
        with team.TEAM.threads(2) as threads:
            return threads, bool((product(x, panels, threads) == 512).all())

    def hold():
        with team.TEAM.threads(2):
            taken.set()
            ended.wait(30)

    def fork(before=0):
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        signal.alarm(20)  # a child that waits for ever ends, and has failed
        alone = bool(before == 0 or (product(x, panels, before) == 512).all())
        after, is_right = multiplied()
        os._exit(0 if alone and is_right and after != before and len(team.TEAM.wakers) == 1 else 1)

    if holder == "another thread":
        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(30)
        status = fork()
        ended.set()
        thread.join()
    else:
        with team.TEAM.threads(2) as before:
            status = fork(before)
    assert status == 0
    assert multiplied()[1]
    assert (team.TEAM.depth, team.TEAM.memory[shares.OPEN]) == (0, 0)


def test_a_team_that_gets_no_thread_works_with_those_that_are_there(monkeypatch):
    monkeypatch.setattr(team, "allowed_threads", lambda: 3)
    start = threading.Thread.start

    def fails_for_the_second(thread):
        if thread.name == "specbeam-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    panels = in_panels(np.ones((2400, 512), dtype=np.float32))
    helping = team.Team()
    helping.learn(panels)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails_for_the_second)
        with helping.threads(3) as threads:
            assert helping.memory[shares.THREADS] == 2
            assert (product(np.ones((1, 512), dtype=np.float32), panels, threads) == 512).all()
    assert (helping.depth, helping.memory[shares.OPEN]) == (0, 0)
    with helping.threads(3):
        assert len(helping.wakers) == 2


def test_loading_leaves_the_threads_of_torch_alone():
    before = torch.get_num_threads()
    HuggingFaceLM(tiny("llama"), engine="compiled")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind):
    rng = np.random.default_rng(0)
    panels = in_panels(in_bfloat16(rng.standard_normal((64, 128))), kind)
    x = rng.standard_normal((220, 128)).astype(np.float32)
    together = product(x, panels)
    for row in range(len(x)):
        assert (product(x[row : row + 1], panels) == together[row]).all()


@pytest.mark.parametrize("kind", ["float32", *["int8 tiles"] * tiles.available()])
@pytest.mark.parametrize("vocab", [7, 64, 75])
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_logits_have_no_columns_beyond_the_vocabulary(rows, vocab, kind):
    rng = np.random.default_rng(0)
    panels = in_panels(in_bfloat16(rng.standard_normal((vocab, 64))), kind)
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    room = np.full(rows * vocab + WIDTH, np.nan, dtype=np.float32)
    logits = room[: rows * vocab].reshape(rows, vocab)
    loops.score_rows(x, np.empty(0, dtype=np.float32), 0.0, panels[:0], panels, logits, 1)
    assert np.array_equal(logits, product(x, panels)[:, :vocab])
    assert np.isnan(room[rows * vocab :]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_that_is_laid_out_in_parts_has_the_same_panels(kind, monkeypatch):
    matrix = in_bfloat16(np.random.default_rng(0).standard_normal((200, 64)))
    whole = in_panels(matrix, kind)
    monkeypatch.setattr(panels_module, "_LAID_OUT_TOGETHER", 1)
    assert in_panels(matrix, kind).tobytes() == whole.tobytes()
    assert whole.ctypes.data % panels_module.LINE == 0


@pytest.mark.parametrize("kind", KINDS)
def test_threads_write_the_same_panels(kind, monkeypatch):
    matrix = in_bfloat16(np.random.default_rng(1).standard_normal((7 * WIDTH - 3, 192)))
    at_once = in_panels(matrix, kind)
    monkeypatch.setattr(panels_module, "_LAID_OUT_TOGETHER", WIDTH * 192)
    monkeypatch.setattr(panels_module, "allowed_threads", lambda: 3)
    assert in_panels(matrix, kind).tobytes() == at_once.tobytes()


def hard_matrix():
    """Zeros of both signs, ties of both signs, groups without a sign, tiny and huge numbers, halves between two steps."""
    matrix = np.random.default_rng(0).standard_normal((12, 4 * GROUP)).astype(np.float32)
    matrix[1] = 0
    matrix[2] = -0.0
    matrix[3, :GROUP] = 1e-35
    matrix[4] = np.round(4 * matrix[4]) / 4
    matrix[5, 3] = 1e30
    matrix[6] = -np.abs(matrix[6])
    matrix[7] = np.abs(matrix[7])
    matrix[8, [5, 9]] = (7.0, -7.0)
    matrix[9, [5, 9]] = (-7.0, 7.0)
    matrix[10] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, 4 * GROUP)
    return matrix


def test_rounding_is_what_its_formulas_say():
    matrix = hard_matrix()
    scales = np.maximum(np.abs(matrix).max(1), 1e-30).astype(np.float32) / np.float32(127)
    numbers, found = rounded(matrix)
    assert found.tobytes() == scales.tobytes()
    assert (numbers == np.rint(matrix / scales[:, None])).all()
    groups = matrix.reshape(len(matrix), -1, GROUP)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    scales = in_bfloat16(farthest / np.float32(-8))
    divisors = np.where(np.abs(scales) < 1e-30, np.float32(1), scales)
    numbers, found = rounded_groups(matrix)
    assert found.tobytes() == scales.tobytes()
    assert (numbers.reshape(groups.shape) == np.clip(np.rint(groups / divisors[..., None]), -8, 7)).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_bits_of_bfloat16_are_rounded_like_the_numbers_that_they_stand_for(kind):
    matrix = in_bfloat16(hard_matrix())
    (panels,) = decoder.panels_of([[torch.from_numpy(matrix).to(torch.bfloat16)]], kind)
    assert panels.tobytes() == in_panels(matrix, kind).tobytes()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", *["tiles"] * tiles.available()])
def test_bits_of_two_bytes_are_laid_out_like_the_numbers_that_they_stand_for(kind):
    matrix = in_bfloat16(np.random.default_rng(0).standard_normal((40, 64)))
    words = torch.float16 if kind == "float16" else torch.bfloat16
    parts = [torch.from_numpy(part).to(words) for part in (matrix[:13], matrix[13:])]
    (panels,) = decoder.panels_of([parts], kind)
    assert panels.tobytes() == in_panels(torch.cat(parts).float().numpy(), kind).tobytes()


def test_float16_is_widened_alike_with_and_without_an_instruction_for_it():
    """All numbers that float16 has, by the forms of a few rows and of many, which widen them in different ways."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = bits[np.isfinite(bits)].astype(np.float32)
    matrix = np.resize(numbers, (len(numbers) // 4 + 1, 4))
    panels = in_panels(matrix, "float16")
    one = np.eye(4, dtype=np.float32)
    assert (product(one, panels)[:, : len(matrix)] == matrix.T).all()
    many = np.resize(one, (200, 4))
    assert (product(many, panels)[:4, : len(matrix)] == matrix.T).all()


def test_odd_depths_are_refused():
    with pytest.raises(ValueError, match="multiple of 4, found 6"):
        in_panels(np.zeros((3, 6), dtype=np.float32))
    with pytest.raises(ValueError, match="multiple of 32, found 48"):
        in_panels(np.zeros((3, 48), dtype=np.float32), "int4")


def test_what_is_broken_stays_broken():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    lm = HuggingFaceLM(model, engine="compiled")
    assert scored(lm, [3, 4], Forest.rooted([4])).isnan().all()


def test_exponentials_are_those_of_numpy():
    x = np.concatenate([np.linspace(-100, 80, 200 * WIDTH - 2), [0.0, -1e30]]).astype(np.float32)
    found = x.copy()
    loops.exponential(found, np.zeros(len(found), dtype=np.int32))
    np.testing.assert_allclose(found, np.exp(x.astype(float)), rtol=6e-7, atol=2e-38)


def test_weights_of_bfloat16_checkpoints_are_kept_in_it(packed):
    model = tiny("llama").to(torch.bfloat16).float()
    lm, exact = HuggingFaceLM(model, engine="compiled"), HuggingFaceLM(tiny("llama"), engine="compiled")
    assert lm.runner.decoder.head.dtype == np.uint32
    assert exact.runner.decoder.head.dtype == np.float32
    path = [3, 4, 5]
    expected = model(torch.tensor([path])).logits[0, -1]
    torch.testing.assert_close(scored(lm, path, Forest.rooted([5]))[0], expected, atol=2e-4, rtol=2e-4)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 12, 13, 31, 32, 50, 250])
@pytest.mark.parametrize(("columns", "depth"), [(33, 8), (96, 60), (200, 256), (64, 320)])
def test_bytes_are_summed_alike_with_and_without_tiles(rows, columns, depth):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    matrix = rng.standard_normal((columns, depth)).astype(np.float32)
    assert (product(x, in_panels(matrix, "int8 tiles")) == product(x, in_panels(matrix, "int8"))).all()


@needs_tiles
def test_tiles_lose_nothing_of_a_float32():
    """Against float64 they err as little as the sums of float32 do, over numbers of all sizes."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 512)).astype(np.float32) * np.exp2(rng.integers(-20, 20, (40, 1))).astype(np.float32)
    matrix = in_bfloat16(rng.standard_normal((96, 512)))
    exact = x.astype(float) @ matrix.T.astype(float)
    size = np.abs(x.astype(float)) @ np.abs(matrix.T.astype(float))
    off = {kind: (np.abs(product(x, in_panels(matrix, kind)) - exact) / size).max() for kind in ("bfloat16", "tiles")}
    assert off["tiles"] < 1.5 * off["bfloat16"] < 1e-6


@needs_tiles
def test_a_model_by_tiles_is_the_same_model(packed, monkeypatch):
    model = tiny("llama").to(torch.bfloat16).float()
    monkeypatch.setattr(decoder, "TILED_FROM", 0)
    lm = HuggingFaceLM(model, engine="compiled")
    assert lm.runner.decoder.head.dtype == np.uint16
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "available", tiles.available.__wrapped__)
        patch.setenv("SPECBEAM_TILES", "off")
        assert HuggingFaceLM(model, engine="compiled").runner.decoder.head.dtype == np.uint32
    forest = Forest.rooted([5]).grown([7, 8, 9], [0, 0, 1])
    for found, path in zip(scored(lm, [3, 4, 5], forest), ([], [7], [8], [7, 9]), strict=True):
        expected = model(torch.tensor([[3, 4, 5, *path]])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@needs_tiles
def test_a_model_in_int8_of_any_size_is_the_same_with_and_without_tiles_to_the_last_bit(monkeypatch):
    model = tiny("llama")
    by_tiles = HuggingFaceLM(model, engine="int8")
    assert by_tiles.runner.decoder.head.dtype == np.int8
    with monkeypatch.context() as patch:
        patch.setattr(tiles, "available", lambda: False)
        by_vectors = HuggingFaceLM(model, engine="int8")
    assert by_vectors.runner.decoder.head.dtype == np.int32
    few, many = Forest.rooted([5]), Forest.rooted([5]).grown([*range(20)], [0] * 20)
    for forest in (few, many):
        assert (scored(by_tiles, [3, 4, 5], forest) == scored(by_vectors, [3, 4, 5], forest)).all()
