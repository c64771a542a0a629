"""The forward for GPUs: on one where there is one, otherwise its kernels run in Triton's interpreter, without graphs."""

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.engines.gpu import passes
from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.graphs import FEW, CapturedGraphs, Graphs
from specbeam.engines.gpu.kernels import Scores, activated, attended, normed, rotate_and_store
from specbeam.engines.gpu.pages import PAGE, PagedStore
from specbeam.engines.gpu.parts import WHOLE
from specbeam.engines.gpu.products import rounded_matrix
from specbeam.engines.gpu.staging import Inputs, Staging
from specbeam.engines.torch.captured import MOST_GRAPHS
from specbeam.engines.torch.sizes import rounded_up
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from specbeam.models.pair import Pair
from specbeam.models.quantised import rounding_of
from tests.models.test_compiled_forward import MODELS, scored
from tests.models.test_families import MODELS as FAMILY_MODELS
from tests.models.test_families import VARIANTS, model_of
from tests.models.test_huggingface import check_random_turns
from tests.support import words
from tests.support.seats import plain_logits, seat
from tests.support.tiny_models import FAMILIES, MIXTURES, NO_SDPA, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [torch.float32, torch.float16] + [torch.bfloat16] * (
    DEVICE == "cuda"
)  # the interpreter cannot multiply bfloat16
OFF = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape, kind):
    return torch.randn(*shape, device=DEVICE).to(kind)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 48, 2560])
def test_norms_and_gates(kind, width):
    x, weight, both = random(3, width, kind=kind), random(width, kind=kind), random(3, 2 * width, kind=kind)
    plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    assert_near(normed(x, weight, 1e-6), plain, kind)
    gate, up = both.float().chunk(2, -1)
    assert_near(activated(both), torch.nn.functional.silu(gate) * up, kind)


def assert_near(found, plain, kind):
    torch.testing.assert_close(found.float(), plain, atol=OFF[kind], rtol=OFF[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [1, 3, 200], ids="on {} processors".format)
@pytest.mark.parametrize(
    ("heads", "size", "counts"), [((4, 2), 8, [2, 3]), ((6, 1), 24, [1, 7]), ((2, 2), 64, [5, 70])]
)
def test_attention_looks_where_it_may(kind, processors, heads, size, counts):
    rows, caches, extents = sum(counts), [1, 0], [64, 192]
    q = random(rows, heads[0], size, kind=kind)
    store = store_of(heads[1], size, kind, {1: 64, 0: 192})
    keys, values = (torch.stack([whole(store, row, 1, one) for row in (0, 1)]) for one in (0, 1))
    seen = torch.rand(2, rows, 192, device=DEVICE) < 0.3
    seen[:, :, 5] = True
    inputs = inputs_of(rows, counts, caches, extents, seen)
    found = attended(q, heads[1], store.layer(1), inputs, 2, max(counts), processors, Scores(1, size**-0.5))
    start = 0
    for count, cache, extent in zip(counts, caches, extents, strict=True):
        mine, start = slice(start, start + count), start + count
        k, v = (one[cache, :, :extent].float().repeat_interleave(heads[0] // heads[1], 0) for one in (keys, values))
        scores = torch.einsum("rhd,hsd->hrs", q[mine].float(), k) * size**-0.5
        weights = scores.masked_fill(~seen[1, mine, :extent], -torch.inf).softmax(-1)
        assert_near(found[mine], torch.einsum("hrs,hsd->rhd", weights, v).reshape(count, -1), kind)


def store_of(heads, size, kind, slots):
    """Return a store of two layers, whose rows have these numbers of slots, of random numbers; its pages are mixed up."""
    store = PagedStore(2, heads, size, torch.empty(0, dtype=kind, device=DEVICE))
    for count in range(1, 3):
        for row, most in slots.items():
            store.reserve_row(row, most * count // 2)
    for page in store._pages:
        page.copy_(random(*page.shape, kind=kind))
    return store


def whole(store, row, layer, part):
    """Return all keys (part 0) or values (part 1) of a row of a store in one layer, with zeros up to 192 slots."""
    found = [store._pages[page][layer, part] for page in store._by_row[row]]
    return torch.nn.functional.pad(torch.cat(found, 1), (0, 0, 0, 192 - PAGE * len(found)))


def inputs_of(rows, counts, caches, extents, seen):
    """`seen`: bool[kinds, rows, slots] of all sessions one after the other."""
    firsts, sessions, bytes_ = [sum(counts[:place]) for place in range(len(counts))], [], []
    for first, count, cache, extent in zip(firsts, counts, caches, extents, strict=True):
        mine = seen[:, first : first + count, :extent]
        sessions.append([first, count, cache, extent, sum(map(len, bytes_)), count * extent])
        bytes_.append(mine.reshape(-1).view(torch.uint8))
    table = torch.zeros(6, 8, dtype=torch.int32, device=DEVICE)
    table[:, : len(counts)] = numbers(sessions).T
    return Inputs(*[numbers([0] * rows)] * 5, table, keys=None, seen=torch.cat(bytes_))


def numbers(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_turned_and_stored_but_not_in_the_waste_slot(kind):
    heads, size, rows = (4, 2), 16, 3
    qkv, angles = random(rows, 8 * size, kind=kind), random(2, 10, size // 2, kind=torch.float32)
    store = store_of(2, size, kind, {0: 64, 1: 128})
    for page in store._pages:
        page.zero_()
    inputs = inputs_of(rows, [rows], [0], [64], torch.ones(1, rows, 64, dtype=torch.bool, device=DEVICE))._replace(
        positions=numbers([9, 0, 4]), caches=numbers([1, 0, 1]), slots=numbers([7, 0, 100])
    )
    q = rotate_and_store(qkv, heads, angles, inputs, store.layer(1))
    keys, values = (torch.stack([whole(store, row, 1, one) for row in (0, 1)]) for one in (0, 1))
    every = qkv.float().view(rows, 8, 2, size // 2)
    cos, sin = angles[:, [9, 0, 4]][:, :, None]
    both = torch.cat([every[:, :, 0] * cos - every[:, :, 1] * sin, every[:, :, 1] * cos + every[:, :, 0] * sin], -1)
    assert_near(q, both[:, :4], kind)
    for row, cache, slot in ((0, 1, 7), (2, 1, 100)):
        assert_near(keys[cache, :, slot], both[row, 4:6], kind)
        assert_near(values[cache, :, slot], qkv.float().view(rows, 8, size)[row, 6:], kind)
    assert int(keys.count_nonzero(dim=(1, 3)).bool().sum()) == 2
    assert (
        sum(int(page.count_nonzero()) for page in store._pages) == 4 * 2 * size
    )  # two slots, keys and values, two heads


ON_GPU = pytest.mark.gpu  # what takes the interpreter too long
QUICK = ("qwen2-window",)
QUICK_TOO = ("gemma3", "opt-350m", "falcon-40b")
QUICK_VARIANT = ("falcon-40b", {"alibi": True, "bias": True})
NEWEST = ("opt", "opt-350m", "bloom", "falcon", "falcon-40b", "falcon-rw")
OTHERS = sorted({*FAMILY_MODELS} - {"llama", "mistral", "qwen2"})


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else ON_GPU) for one in MODELS])
def test_logits_are_those_of_the_model(name):
    model = tiny(name.split(",")[0].split("3")[0], **MODELS[name])
    if MODELS[name].get("attention_bias"):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.bias = None
    model = model.to(DEVICE)
    lm = HuggingFaceLM(model, chunk=5, engine="gpu")
    assert lm.engine == "gpu"
    check_random_turns(lm, model, turns=6 if DEVICE == "cuda" else 2)


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK_TOO else ON_GPU) for one in OTHERS])
def test_logits_of_every_family_are_those_of_the_model(name):
    """Of all that the table says of a family: norms, caps, windows, multipliers, positions, gates."""
    model = model_of(name).to(DEVICE)
    lm = HuggingFaceLM(model, engine="gpu")
    prompt = torch.randint(3, 61, (7,)).tolist()
    forest = Forest.rooted([prompt[-1]]).grown([7, 8], [0, 0])
    found = scored(lm, prompt, forest)
    expected = plain_logits(model, [prompt + forest.path(node) for node in range(forest.size)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [pytest.param(*one, marks=() if one == QUICK_VARIANT else ON_GPU) for one in VARIANTS if one[0] in NEWEST],
    ids=str,
)
def test_logits_of_every_configuration_are_those_of_the_model(name, changes):
    """Turns of several sessions: their rows are behind each other, and so are masks and positions of slots."""
    model = model_of(name, **changes).to(DEVICE)
    check_random_turns(HuggingFaceLM(model, chunk=5, engine="gpu"), model, turns=6 if DEVICE == "cuda" else 2)


@pytest.mark.parametrize("name", ["bloom", pytest.param("falcon-rw", marks=ON_GPU)])
def test_models_with_alibi_score_trees_of_several_sessions(name):
    model = model_of(name).to(DEVICE)
    lm = HuggingFaceLM(model, chunk=5, engine="gpu")
    check_random_turns(lm, model, turns=6 if DEVICE == "cuda" else 2)
    check_scores_forests(lm)


def test_prompts_are_split_where_their_masks_are_large(monkeypatch):
    model = tiny("llama").to(DEVICE)
    lm, seats = HuggingFaceLM(model, chunk=5, engine="gpu"), [seat(range(3, 12)), seat(range(20, 28))]
    monkeypatch.setattr(passes, "MOST_MASK_BYTES", 1)
    rows = lm.extend(seats, [Forest.rooted([one.prompt[-1]]) for one in seats])
    for one, found in zip(seats, rows, strict=True):
        torch.testing.assert_close(found.logits, plain_logits(model, [one.prompt]), atol=2e-4, rtol=2e-4)


def test_a_bad_token_leaves_the_others_as_they_were():
    lm = HuggingFaceLM(tiny("llama").to(DEVICE), engine="gpu")
    good, bad = seat([3, 4]), seat([3, 99])
    with pytest.raises(IndexError, match="a token is outside"):
        lm.extend([good, bad], [Forest.rooted([4]), Forest.rooted([99])])
    assert good.state[lm].trie.stored == 1  # the empty path alone


class Captor:
    """Stands for the maker of graphs: what it captures gives sevens."""

    def __call__(self, work):
        return SimpleNamespace(replay=lambda: None), torch.full((1, 64), 7.0)

    def clear(self):
        pass


def test_graphs_read_the_staging_that_they_were_captured_with():
    own, other = Staging(torch.device("cpu"), 8, 2, 64), Staging(torch.device("cpu"), 8, 2, 64)
    own.inputs.seen.fill_(1)
    other.inputs.seen.fill_(2)
    decoder, store = GpuDecoder.__new__(GpuDecoder), PagedStore(1, 1, 8, torch.zeros(0))
    decoder.forward = lambda inputs, shape, store, part: inputs.seen.float()[None]
    graphs = Graphs(decoder, store, own, capture=False)
    graphs.capture = Captor()
    shapes = [PassShape(rows, 1, rows, rows) for rows in range(1, 200)]
    found = [int(graphs.run(staging, shapes[0])[0, 0]) for staging in (own, own, other, own)]
    assert found == [1, 7, 2, 7]
    for shape in shapes[1:]:
        graphs.run(own, shape)
    assert len(graphs.graphs.made) == MOST_GRAPHS
    assert int(graphs.run(own, shapes[0])[0, 0]) == 1, "it was to make room"
    assert int(graphs.run(own, shapes[0])[0, 0]) == 7
    store.reserve(300, 64)  # more rows than the table of pages has
    assert int(graphs.run(own, shapes[0])[0, 0]) == 1, "it would read the old table"


@ON_GPU
def test_a_store_that_grows_keeps_what_it_has():
    model = tiny("llama", max_position_embeddings=2048).to(DEVICE)
    check_random_turns(HuggingFaceLM(model, chunk=5, engine="gpu"), model)
    lm = HuggingFaceLM(model, engine="gpu")
    for length in (5, 1100):
        path = torch.randint(0, 61, (length,)).tolist()
        found = scored(lm, path, Forest.rooted([path[-1]]).grown([3, 4], [0, 1]))
        plain = model(torch.tensor([[*path, 3, 4]], device=DEVICE)).logits[0, -3:].float().cpu()
        torch.testing.assert_close(found, plain, atol=2e-4, rtol=2e-4)


@ON_GPU
def test_graphs_hold_for_a_store_that_grows():
    """Pages are added to a store, and none is moved: what was captured before reads and writes those that came later."""
    model = tiny("llama", max_position_embeddings=2048).to(DEVICE)
    lm = HuggingFaceLM(model, engine="gpu")
    forest = Forest.rooted([8]).grown([1, 2], [0, 0])
    expected = plain_logits(model, [[5, 6, 8], [5, 6, 8, 1], [5, 6, 8, 2]])
    scored(lm, [5, 6, 8], forest)
    before = {size: graph for size, (graph, _) in lm.runner.graphs.step_graphs.items()}
    pages = len(lm.runner.store._pages)
    assert before
    path = torch.randint(0, 61, (1900,)).tolist()
    long, short = seat(path), seat([5, 6, 8])
    lm.extend([long], [Forest.rooted([path[-1]])])
    (found,) = lm.extend([short], [forest])
    torch.testing.assert_close(found.logits, expected, atol=2e-4, rtol=2e-4)
    assert len(lm.runner.store._pages) > pages
    assert all(lm.runner.graphs.step_graphs[size][0] is graph for size, graph in before.items())


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="fp8 is for GPUs that have it")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "phi3", "opt", "bloom", "falcon-40b"])
def test_fp8_runs_the_model_of_the_rounded_weights(family):
    model = model_of(family).to(DEVICE, torch.bfloat16)
    lm = language_model(model, quantize="fp8")
    assert lm.engine == "fp8"
    assert rounding_of(lm) == "fp8"
    twin = model_of(family).to(DEVICE, torch.bfloat16).float()
    decoder = GpuDecoder(twin)  # its matrices are those of the twin
    for layer in decoder.layers:
        for matrix in (layer.qkv, layer.out, layer.up, layer.down):
            round_in_place(matrix.numbers)
    embedding = twin.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(
        embedding.weight.clone()
    )  # tokens are looked up among the numbers as they are
    round_in_place(twin.get_output_embeddings().weight.data)
    prompt = torch.randint(3, 61, (7,)).tolist()
    forest = Forest.rooted([prompt[-1]]).grown([7, 8], [0, 0])
    found = scored(lm, prompt, forest)
    expected = plain_logits(twin, [prompt + forest.path(node) for node in range(forest.size)]).cpu()
    off = (found - expected).abs().max() / expected.std()
    assert float(off) < 0.1  # of products of bfloat16 numbers in a few layers


@torch.no_grad()
def round_in_place(numbers):
    rounded = rounded_matrix(numbers)
    numbers.copy_(rounded.numbers.float() * rounded.scales[:, None])


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="fp8 is for GPUs that have it")
def test_a_target_drafts_for_itself_in_fp8():
    pair = sb.load(tiny("llama").to(DEVICE, torch.bfloat16), "fp8", tokenizer=words.tokenizer())
    assert (pair.target.engine, pair.draft.engine) == ("gpu", "fp8")
    (answer,) = sb.generate(pair, "abc", "speculative_sampling", seed=1, max_new_tokens=24, temperature=0)
    assert answer.tokens == sb.generate(pair, "abc", "greedy", max_new_tokens=24)[0].tokens


def test_the_model_stays_what_it_was(tmp_path):
    model, twin = tiny("qwen2").to(DEVICE), tiny("qwen2").to(DEVICE)
    lm = HuggingFaceLM(model, engine="gpu")
    assert (
        lm.runner.decoder.layers[0].qkv.numbers.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    )
    for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    again = HuggingFaceLM(model, engine="gpu").runner.decoder.layers[0]
    before = lm.runner.decoder.layers[0]
    assert again.qkv_bias.data_ptr() == before.qkv_bias.data_ptr()
    for name in ("qkv", "up"):
        assert getattr(again, name).numbers.data_ptr() == getattr(before, name).numbers.data_ptr()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).to(DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), twin.parameters(), strict=True))


def test_where_triton_does_not_work_transformers_runs_the_model(monkeypatch):
    def fails(self):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(passes.GpuPasses, "try_out", fails)
    engine = "auto" if DEVICE == "cuda" else "gpu"
    refuses = nullcontext() if DEVICE == "cuda" else pytest.raises(NotSupported, match="the forward for GPUs")
    with refuses, pytest.warns(UserWarning, match=r"Triton does not work here.*no compiler"):
        assert HuggingFaceLM(tiny("llama").to(DEVICE), engine=engine).engine == "plain"


def test_weights_can_be_trained_wherever_they_were_laid_out():
    model = tiny("llama").to(DEVICE)
    with torch.inference_mode():
        HuggingFaceLM(model, engine="gpu")
    model(torch.tensor([[3, 4, 5]], device=DEVICE)).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None


def test_what_the_model_has_not_is_refused():
    lm = HuggingFaceLM(tiny("llama", max_position_embeddings=16).to(DEVICE), engine="gpu")
    with pytest.raises(IndexError, match="a position is beyond"):
        scored(lm, [3] * 18, Forest.rooted([3]))
    with pytest.raises(IndexError, match="a token is outside"):
        scored(lm, [3, 99], Forest.rooted([3]))


def test_sizes_of_passes():
    counts = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33)
    assert [rounded_up(count) for count in counts] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


class StepByStep:
    """Stands for the driver: what loops ask of it is done at once, on the host."""

    def __init__(self, runner):
        self.runner, self.launched = runner, 0
        self.logits = torch.zeros(FEW, runner.vocab)
        whole = ctypes.c_int64
        copy, one = ctypes.CFUNCTYPE(ctypes.c_int, *[whole] * 4), ctypes.CFUNCTYPE(ctypes.c_int, whole)
        launch = ctypes.CFUNCTYPE(ctypes.c_int, whole, whole)
        self.functions = copy(self.copy), launch(self.launch), copy(self.copy), one(lambda stream: 0)
        self.calls = tuple(ctypes.cast(one, ctypes.c_void_p).value for one in self.functions)

    def copy(self, goal, source, size, stream):
        ctypes.memmove(goal, source, size)
        return 0

    def launch(self, size, stream):
        runner, self.launched = self.runner, self.launched + 1
        with torch.inference_mode():
            self.logits[:size] = runner.decoder.forward(
                runner.staging.inputs, PassShape(size, 1, size, size), runner.store, self.part
            )
        return 0

    def captured_for_steps(self, most, part=WHOLE):
        self.part = part
        sizes = np.array([rounded_up(count) for count in range(most + 1)])
        return CapturedGraphs(np.stack([sizes, sizes, np.full_like(sizes, self.logits.data_ptr())]), 0, self.calls)


@pytest.mark.skipif(
    not compiling.AVAILABLE or DEVICE == "cuda", reason="loops are compiled; on a GPU they meet the driver"
)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("dsbd", "llama"),
        pytest.param("speculative_sampling", "llama", marks=pytest.mark.slow),
        pytest.param("dsbd", "bloom", marks=pytest.mark.slow),
    ],
)
def test_loops_run_passes(name, family, monkeypatch):
    target, draft = tiny(family), tiny(family, seed=1, num_hidden_layers=1)
    host = sb.load(target, draft, tokenizer=words.tokenizer())
    there = Pair(target, draft, host.tokenizer, *(HuggingFaceLM(one, engine="gpu") for one in (target, draft)))
    drivers = [StepByStep(lm.runner) for lm in (there.target, there.draft)]
    for lm, driver in zip((there.target, there.draft), drivers, strict=True):
        monkeypatch.setattr(lm.runner.graphs, "captured_for_steps", driver.captured_for_steps)
    texts = [sb.generate(pair, "abc", name, seed=1, max_new_tokens=8)[0].tokens for pair in (host, there)]
    assert texts[0] == texts[1]
    assert all(driver.launched > 2 for driver in drivers)


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_captured_passes_are_those_run_step_by_step(kind):
    model = tiny("llama").to(DEVICE, kind)
    captured, plain = HuggingFaceLM(model, engine="gpu"), HuggingFaceLM(model, engine="gpu")
    plain.runner.graphs.capture, plain.runner.graphs.steps_can_launch = None, False
    prompt = [5, 6, 7, 8]
    forest = Forest.rooted([8]).grown([1, 2, 3], [0, 0, 1])
    for _ in range(4):
        assert torch.equal(scored(captured, prompt, forest), scored(plain, prompt, forest))
    graphs = captured.runner.graphs
    assert graphs.step_graphs or any(graphs.graphs.made.values())


@ON_GPU
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "falcon"])
def test_methods_draw_on_a_gpu_what_they_draw_on_a_cpu(family):
    target, draft = tiny(family), tiny(family, seed=1, num_hidden_layers=1)
    host = sb.load(target, draft, tokenizer=words.tokenizer())
    there = sb.load(tiny(family).cuda(), tiny(family, seed=1, num_hidden_layers=1).cuda(), tokenizer=words.tokenizer())
    assert there.target.engine == there.draft.engine == "gpu"
    for name in ("dsbd", "beam_sampling", "speculative_sampling", "rsd_s", "speculative_beam_search"):
        texts = [
            [one.tokens for one in sb.generate(pair, ["abc", "Hello you"], name, seed=1, max_new_tokens=24)]
            for pair in (host, there)
        ]
        assert texts[0] == texts[1], name


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_load_checks_a_token_tree(kind):
    model = tiny("llama").to(DEVICE, kind)
    lm = language_model(model)
    assert lm.engine == "gpu"
    assert language_model(model) is lm
    check_scores_forests(lm)


@ON_GPU
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_any_model_have_its_logits(family):
    for attention in ("sdpa", "eager"):
        if attention == "eager" or family not in NO_SDPA:
            model = tiny(family, attention).to(DEVICE)
            lm = HuggingFaceLM(model, chunk=5, engine="plain")
            # Experts in float32 are multiplied one after the other, and how many rows chose each is read on the host.
            looks_at_numbers = family == "falcon" or family in MIXTURES
            with pytest.warns(UserWarning, match="cannot be captured") if looks_at_numbers else nullcontext():
                check_random_turns(lm, model)
            assert any(lm.runner.captured.graphs.made.values()) is not looks_at_numbers


@ON_GPU
def test_models_that_are_gone_do_not_end_a_capture():
    """What only the garbage collector frees holds their graphs; freed during a capture they would end it."""
    often = gc.get_threshold()
    try:
        for _ in range(3):
            model = tiny("qwen2").to(DEVICE)
            lm = HuggingFaceLM(model, chunk=5, engine="plain")
            lm.itself = lm
            gc.set_threshold(20)
            check_random_turns(lm, model)
            assert any(lm.runner.captured.graphs.made.values())
    finally:
        gc.set_threshold(*often)


@ON_GPU
def test_models_that_cannot_be_captured_are_called_as_they_are():
    model = tiny("gpt2").to(DEVICE)
    model.register_forward_hook(lambda *_: torch.zeros(1, device=DEVICE).item() or None)  # looks at a number
    lm = HuggingFaceLM(model, chunk=5)
    assert lm.engine == "plain"
    with pytest.warns(UserWarning, match="cannot be captured"):
        check_random_turns(lm, model)
    assert not any(lm.runner.captured.graphs.made.values())
