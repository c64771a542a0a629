"""Hidden states, learnt rows, ranges of layers and skipped sublayers in the forward for GPUs, and all recipes that need them.

On a GPU where there is one, otherwise in Triton's interpreter, without graphs. What it gives is compared with transformers'
own forward on a CPU.
"""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.decode import Decoder
from specbeam.core.forest import Forest
from specbeam.core.records import Needs
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.gpu.ranges import StateRows
from specbeam.errors import NotSupported
from specbeam.models.early_layers import early_layers
from specbeam.models.heads.exit import ExitHead, ExitLM
from specbeam.models.heads.feature import FeatureSizes
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.read import head_model
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import LiveLayers
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.pair import Pair
from specbeam.models.skipping import Skipping, SkippingLM
from specbeam.models.sublayers import Sublayers
from tests.models.test_gpu import DEVICE, ON_GPU, StepByStep
from tests.models.test_skipping import drafted_logits, without
from tests.support.extra_rows import extra_head, with_extra_rows
from tests.support.heads import VOCAB, block_of, chimera_of, denoiser_of, trunk_of
from tests.support.remembered import tiny_remembering
from tests.support.seats import moved, node_paths, plain_logits, random_forest, random_turn, seat
from tests.support.tiny_models import tiny

CLOSE = {"atol": 3e-4, "rtol": 3e-4}
NEEDS = Needs(logits=True, hidden=True, prompt=True, taps=(0, 1, 2))


def models(family="llama", **changes):
    """The same model twice: where the forward for GPUs runs, and on the CPU."""
    model = tiny(family, seed=1, vocab_size=VOCAB, **changes)
    return copy.deepcopy(model).to(DEVICE), model


def check_same_rows(ours, theirs, needs, sizes, turns=3, grow=None, inputs=(None, None)):
    """Let two language models score the same random forests, turn by turn, and compare all that they give.

    Args:
        sizes: lengths of the prompts.
        grow: adds extra rows to a forest; None: there are none.
        inputs: of the extra rows in each model.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, size).tolist() for size in sizes]
    sides = [(lm, [seat(prompt) for prompt in prompts]) for lm in (ours, theirs)]
    for (_, seats), given in zip(sides, inputs, strict=True):
        for one in seats:
            one.extra_inputs = given
    texts = [[prompt] for prompt in prompts]
    for _ in range(turns):
        forests = [random_forest(rng, [text[-1] for text in each], VOCAB, 3) for each in texts]
        asked = forests if grow is None else [grow(*both) for both in zip(sides[0][1], forests, strict=True)]
        found, expected = (lm.extend(seats, asked, [needs] * len(seats)) for lm, seats in sides)
        for one, other in zip(found, expected, strict=True):
            for name in ("logits", "hidden", "prompt"):
                torch.testing.assert_close(getattr(one, name).cpu(), getattr(other, name).cpu(), **CLOSE)
        for number, forest in enumerate(forests):
            turn = random_turn(rng, forest, VOCAB)
            for lm, seats in sides:
                lm.settle(seats[number], turn)
            texts[number] = moved(texts[number], forest, turn)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(one, marks=ON_GPU) for one in ("gemma3", "gpt2", "gpt_neox", "opt-350m", "falcon", "bloom")),
    ],
)
def test_hidden_states_are_those_of_transformers(family):
    """Of drafts and of prompts in chunks, for several sessions at once and for one."""
    model, twin = models(family)
    other = "compiled" if family == "bloom" else "plain"  # transformers' forward cannot score its trees
    ours, theirs = HuggingFaceLM(model, 5, "gpu"), HuggingFaceLM(twin, 5, other)
    check_same_rows(ours, theirs, NEEDS, (1, 9))
    check_same_rows(ours, theirs, Needs(logits=True, hidden=True), (4,))


def test_sessions_with_and_without_hidden_states_take_a_turn_together():
    model, twin = models()
    ours, theirs = HuggingFaceLM(model, 5, "gpu"), HuggingFaceLM(twin, 5, "plain")
    forests = [Forest.rooted([7]).grown([3, 4], [0, 0]), Forest.rooted([9]).grown([5], [0])]
    each = [NEEDS, Needs(logits=True)]
    found, expected = (lm.extend([seat([5, 6, 7]), seat([8, 9])], forests, each) for lm in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits, other.logits, **CLOSE)
        torch.testing.assert_close(one.hidden.cpu(), other.hidden, **CLOSE)
    assert [len(one.hidden) for one in found] == [3, 0]


@pytest.mark.skipif(not compiling.AVAILABLE or DEVICE == "cuda", reason="on a GPU steps meet the driver")
def test_compiled_steps_leave_hidden_states_on_the_device(monkeypatch):
    model, twin = models()
    ours, theirs = HuggingFaceLM(model, 5, "gpu"), HuggingFaceLM(twin, 5, "plain")
    driver = StepByStep(ours.runner)
    driver.logits = torch.zeros(64, VOCAB)
    monkeypatch.setattr(ours.runner.graphs, "captured_for_steps", driver.captured_for_steps)
    check_same_rows(ours, theirs, NEEDS, (9,), turns=4)
    assert driver.launched >= 4


def grown_below_new_nodes(one, forest):
    """The forest with extra rows below the nodes that no pass has scored."""
    stored = [cache.trie for cache in one.state.values()]
    scored = np.flatnonzero(stored[0].root_at < stored[0].stored) if stored else []
    return with_extra_rows(forest, [node for node in range(forest.size) if node not in scored], depth=2)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("bita", "llama"),
        pytest.param("hidden_transfer", "llama", marks=pytest.mark.slow),
        *(
            pytest.param(kind, family, marks=ON_GPU)
            for kind in ("bita", "hidden_transfer")
            for family in ("gpt2", "qwen2-window")
        ),
    ],
)
def test_learnt_rows_are_those_of_transformers(kind, family):
    """Embeddings of their own with a prefix that they alone see, or states that enter at an inner layer."""
    model, twin = models(family)
    heads = [extra_head(one.cpu(), kind, depth=2) for one in (model, twin)]
    model.to(DEVICE)
    heads[0].to(DEVICE).load_state_dict(heads[1].state_dict())
    ours, theirs = HuggingFaceLM(model, 5, "gpu"), HuggingFaceLM(twin, 5, "plain")
    inputs = tuple(head.inputs for head in heads)
    check_same_rows(ours, theirs, Needs(logits=True), (9,), grow=grown_below_new_nodes, inputs=inputs)
    if DEVICE == "cuda":
        check_same_rows(ours, theirs, Needs(logits=True), (1, 9, 4), turns=6, grow=grown_below_new_nodes, inputs=inputs)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=ON_GPU)])
def test_prompts_of_embeddings_are_read(family):
    model, twin = models(family)
    ours, theirs = HuggingFaceLM(model, 3, "gpu"), HuggingFaceLM(twin, 3, "plain")
    vectors = torch.randn(2, 32)
    forest = Forest.rooted([7]).grown([3, 4], [0, 0])
    rows = []
    for lm in (ours, theirs):
        one = seat([5, -1, 6, 8, -2, 7])
        one.vectors = {lm: vectors.to(lm.device)}
        rows.append(lm.extend([one], [forest])[0].logits)
    torch.testing.assert_close(*rows, **CLOSE)
    wrong = seat([-3, 7])
    wrong.vectors = {ours: vectors}
    with pytest.raises(NotSupported, match="vectors has only 2 rows"):
        ours.extend([wrong], [forest])


@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=ON_GPU) for one in ("gpt2", "gemma3", "bloom"))])
def test_first_layers_draft_on_the_targets_cache(family):
    """The target's pass continues from their output, on the nodes that it is given."""
    model, twin = models(family, num_hidden_layers=3)
    lm = HuggingFaceLM(model, 5, "gpu")
    first = LiveLayers(lm, 2)
    short = early_layers(twin, 2)
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(3, VOCAB, length).tolist()) for length in (1, 8)]
    for turn_number in range(3):
        forests = [random_forest(rng, [text[-1] for text in one.texts], VOCAB, 3) for one in seats]
        if turn_number != 1:  # a turn without a draft
            for one, forest, found in zip(seats, forests, first.extend(seats, forests), strict=True):
                expected = plain_logits(short.model, node_paths(one.texts, forest))
                torch.testing.assert_close(found.logits, expected, **CLOSE)
        given = [forest.selected(np.arange(forest.size - 1)) for forest in forests]
        root, token = np.array([0]), np.array([7])
        given = [forest.grown([7], [0]) if forest.find(root, token)[0] < 0 else forest for forest in given]
        for one, forest, found in zip(seats, given, lm.extend(seats, given), strict=True):
            expected = plain_logits(twin, node_paths(one.texts, forest))
            torch.testing.assert_close(found.logits, expected, **CLOSE)
            turn = random_turn(rng, forest, VOCAB)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
    for one in seats:
        lm.compact(one)
        lm.close(one)
    assert lm.caches == []


def test_first_layers_may_draft_from_a_later_turn_on():
    """Roots that passes of all layers have stored are stored again, and nothing else."""
    model, twin = models(num_hidden_layers=3)
    lm = HuggingFaceLM(model, 5, "gpu")
    short = early_layers(twin, 2)
    rng = np.random.default_rng(3)
    one = seat(rng.integers(3, VOCAB, 7).tolist())
    for turn_number in range(4):
        forest = random_forest(rng, [text[-1] for text in one.texts], VOCAB, 3)
        if turn_number > 1:
            (found,) = LiveLayers(lm, 2).extend([one], [forest])
            expected = plain_logits(short.model, node_paths(one.texts, forest))
            torch.testing.assert_close(found.logits, expected, **CLOSE)
        (found,) = lm.extend([one], [forest])
        torch.testing.assert_close(found.logits, plain_logits(twin, node_paths(one.texts, forest)), **CLOSE)
        turn = random_turn(rng, forest, VOCAB)
        lm.settle(one, turn)
        one.texts = moved(one.texts, forest, turn)


def test_an_exit_layer_drafts_after_the_first_layers():
    model, twin = models(num_hidden_layers=3)
    lm = HuggingFaceLM(model, 5, "gpu")
    torch.manual_seed(3)
    head = ExitHead(twin, 1).requires_grad_(False)
    for weight in head.parameters():
        weight += 0.1 * torch.randn_like(weight)
    own = ExitHead(model, 1).requires_grad_(False).to(DEVICE)
    own.load_state_dict(head.state_dict())
    draft = ExitLM(own, lm)
    needs = draft.needs_of_target
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(3, VOCAB, length).tolist()) for length in (1, 8)]
    for _ in range(3):
        forests = [random_forest(rng, [text[-1] for text in one.texts], VOCAB, 3) for one in seats]
        for one, forest, found in zip(seats, forests, draft.extend(seats, forests), strict=True):
            expected = plain_logits(head.exited(), node_paths(one.texts, forest))
            torch.testing.assert_close(found.logits, expected, **CLOSE)
        for one, forest, found in zip(seats, forests, lm.extend(seats, forests, [needs] * 2), strict=True):
            torch.testing.assert_close(found.logits, plain_logits(twin, node_paths(one.texts, forest)), **CLOSE)
            turn = random_turn(rng, forest, VOCAB)
            lm.settle(one, turn)
            lm.compact(one)
            one.texts = moved(one.texts, forest, turn)


@pytest.mark.parametrize("engine", ["gpu", "layers"])
def test_sublayers_are_skipped_and_leave_no_trace(engine):
    model, twin = models(num_hidden_layers=4)
    lm = HuggingFaceLM(model if engine == "gpu" else twin, 5, engine)
    skipped = Sublayers((1,), (1, 2))
    draft = SkippingLM(lm, Skipping(skipped))
    fewer = without(twin, skipped)
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(3, VOCAB, length).tolist()) for length in (1, 5)]
    for _ in range(2):
        forests = [random_forest(rng, [text[-1] for text in one.texts], VOCAB, 3) for one in seats]
        for one, forest, found in zip(seats, forests, draft.extend(seats, forests), strict=True):
            roots = forest.root_of(np.arange(forest.size))
            texts = [one.texts[root][:-1] for root in roots]
            paths = [[one.texts[root][-1], *forest.path(node)] for node, root in enumerate(roots)]
            rows = [drafted_logits(twin, fewer, *both) for both in zip(texts, paths, strict=True)]
            torch.testing.assert_close(found.logits, torch.stack(rows), **CLOSE)
        for one, forest, found in zip(seats, forests, lm.extend(seats, forests), strict=True):
            torch.testing.assert_close(found.logits, plain_logits(twin, node_paths(one.texts, forest)), **CLOSE)
            turn = random_turn(rng, forest, VOCAB)
            draft.settle(one, turn)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)


def test_rows_of_states_are_reused_and_grow():
    states = StateRows(torch.zeros(1, 4), rows=8)
    first = states.take(4, lambda: pytest.fail("some are free"))
    second = states.take(3, lambda: pytest.fail("some are free"))
    assert sorted([*first, *second]) == [*range(1, 8)]
    states.rows[second] = 5.0
    third = states.take(3, lambda: second)
    assert not {*third} & {*second, 0}
    assert len(states.rows) == 8
    fourth = states.take(5, lambda: np.concatenate([second, third]))
    assert len(states.rows) == 16
    assert not {*fourth} & {*second, *third, 0}
    assert (states.rows[second] == 5.0).all()


# Recipes.


def heads_of(model):
    """A head of each kind, by the name of its recipe."""
    sizes = FeatureSizes(model.config.hidden_size, VOCAB, VOCAB, 3)
    return {
        "eagle": lambda: trunk_of(model, "eagle3"),
        "fspad": lambda: trunk_of(model, "eagle", sampling=16, alignment=16),
        "medusa": lambda: Medusa(sizes, 1),
        "mtp": lambda: ModulesInARow([trunk_of(model, "mtp"), trunk_of(model, "mtp", seed=1)]),
        "chimera": lambda: chimera_of(model),
        "specdiff": lambda: denoiser_of(model),
        "dflash": lambda: block_of(model, "mask rows"),
        "dspark": lambda: block_of(model, "anchored"),
        "eesd": lambda: ExitHead(model, 1).requires_grad_(False),
        "bita": lambda: extra_head(model, "bita"),
        "hidden_transfer": lambda: extra_head(model, "hidden_transfer"),
    }


TREE = {"nodes": 4, "depth": 2, "top": 2, "controller": "fixed"}
METHODS = {
    "specdiff": sb.specdiff(steps=1, depth=2, controller="fixed"),
    "dflash": sb.opt_tree(4, 2, controller="fixed"),
    "dspark": sb.speculative_sampling(2, controller="fixed"),
    "eesd": sb.eesd(depth=2, controller="fixed"),
    "bita": sb.bita(nodes=4, depth=2, controller="fixed"),
    "hidden_transfer": sb.hidden_transfer(nodes=4, depth=2, controller="fixed"),
    "swift": sb.swift("a1 m2", depth=2, siblings=False, controller="fixed"),
    "clasp": sb.swift("clasp", ratio=0.5, every=1, depth=2, siblings=False, controller="fixed"),
    "propd": sb.propd(4, 2, early=1, controller="fixed"),
}
NAMES = (
    "eagle",
    "fspad",
    "medusa",
    "mtp",
    "chimera",
    "specdiff",
    "dflash",
    "dspark",
    "eesd",
    "bita",
    "hidden_transfer",
)

QUICK = ("eagle", "dspark", "eesd", "bita", "swift")  # one of each kind


def texts_of(model, name, engine, **options):
    """The texts of a recipe with an engine."""
    device = DEVICE if engine == "gpu" else "cpu"
    torch.manual_seed(0)
    head = heads_of(model.cpu())[name]().to(device, model.dtype) if name in NAMES else None
    target = HuggingFaceLM(model.to(device), 512, engine)
    draft = None if head is None else head_model(head, target)
    if name == "propd":
        small = tiny("llama", vocab_size=VOCAB, num_hidden_layers=1)
        draft = HuggingFaceLM(small.to(device, model.dtype), 512, engine)
    method = METHODS[name] if name in METHODS else getattr(sb, name)(**TREE)
    pair = Pair(model, None, None, target, draft)
    prompts = [[5, 6, 7, 8], [9, 3]]
    found = sb.generate(pair, prompts, method, seed=4, max_new_tokens=4, eos_token_id=[], **options)
    assert all(one.report.draft_passes > 0 for one in found)
    return [one.tokens for one in found]


@pytest.mark.usefixtures("turn_by_turn")
@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in (*NAMES, "propd", "swift", "clasp")],
)
def test_recipes_write_the_same_texts_as_with_transformers(name, temperature):
    layers = 4 if name in ("swift", "clasp") else 2
    model, twin = models(num_hidden_layers=layers)
    other = "layers" if name in ("swift", "clasp", "eesd", "propd") else "plain"
    assert texts_of(model, name, "gpu", temperature=temperature) == texts_of(twin, name, other, temperature=temperature)


# What it cannot run.


def session_of(lm, context):
    request = Request.of(Pair(lm.model, None, None, lm, None), [[3, 4]], sb.greedy(), Settings.given({}, None), 3)
    (session,) = request.sessions
    session.context = {lm: context}
    return session


def test_a_context_is_left_to_transformers_with_a_warning():
    model, _ = models("gpt2")
    lm = HuggingFaceLM(model, engine="gpu")
    context = {"token_type_ids": torch.zeros(1, 1, dtype=torch.long)}
    running = seat([3, 4])
    lm.extend([running], [Forest.rooted([4])])
    with pytest.raises(NotSupported, match=r"load the model with engine='plain'.*while texts are decoded"):
        Decoder(lm).add(session_of(lm, context))
    lm.close(running)
    with pytest.warns(UserWarning, match="transformers' forward runs this GPT2LMHeadModel from now on"):
        assert lm.refuses(session_of(lm, context)) == ""
    assert lm.engine == "plain"
    wrong = HuggingFaceLM(models("gpt2")[0], engine="gpu")
    with pytest.raises(NotSupported, match="context holds pictures, which GPT2LMHeadModel does not take"):
        Decoder(wrong).add(session_of(wrong, {"pictures": torch.zeros(1, 1)}))
    assert wrong.engine == "gpu"


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
@pytest.mark.parametrize("kind", ["hidden states", "bita", "first layers", "skipped"])
def test_captured_passes_give_what_launched_ones_give(kind):
    model, _ = models(num_hidden_layers=3)
    head = extra_head(model.cpu(), "bita", depth=2).to(DEVICE)
    model.to(DEVICE)
    rows = []
    for captured in (True, False):
        lm = HuggingFaceLM(model, engine="gpu")
        graphs = lm.runner.graphs
        if not captured:
            graphs.capture, graphs.steps_can_launch = None, False
        skipping = SkippingLM(lm, Skipping("a1 m1"))
        found = []
        for _ in range(4):
            one = seat([5, 6, 7, 8])
            forest = Forest.rooted([8]).grown([1, 2, 3], [0, 0, 1])
            if kind == "bita":
                one.extra_inputs = head.inputs if not found else found[0][1]
                scored = lm.extend([one], [with_extra_rows(forest, depth=2)])[0]
                found.append((scored.logits.clone(), one.extra_inputs))
            elif kind == "hidden states":
                scored = lm.extend([one], [forest], [NEEDS])[0]
                found.append((torch.cat([scored.hidden, scored.logits.to(DEVICE)], 1), None))
            elif kind == "first layers":
                early = LiveLayers(lm, 1).extend([one], [forest])[0].logits.clone()
                found.append((torch.cat([early, lm.extend([one], [forest])[0].logits]), None))
            else:
                found.append((skipping.extend([one], [forest])[0].logits.clone(), None))
                skipping.close(one)
            lm.close(one)
        assert all(torch.equal(found[0][0], each) for each, _ in found[1:])
        assert not captured or graphs.step_graphs or any(graphs.graphs.made.values())
        rows.append(found[0][0])
    assert torch.equal(*rows)


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU only in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recipes_decode_in_half_precision(dtype):
    model = tiny("llama", seed=1, vocab_size=VOCAB, num_hidden_layers=4).to(DEVICE, dtype)
    for name in (*NAMES, "propd", "swift", "clasp"):
        texts = texts_of(model, name, "gpu", temperature=0.0)
        assert all(len(text) == 4 for text in texts), name


def test_a_memory_reads_and_writes_the_texts_of_transformers():
    """Its windows begin with embeddings, and the last hidden states of some rows are memories."""
    model, recall = tiny_remembering(double=False, seed=1)
    twin = copy.deepcopy(model)
    plan = MemoryPlan(5, 2, 3, 0.5, "attention", "refresh")
    texts = []
    for one, engine in ((model.to(DEVICE), "gpu"), (twin, "plain")):
        lm = HuggingFaceLM(one, engine=engine)
        pair = sb.hmt(Pair(one, None, None, lm, None), (plan, copy.deepcopy(recall)))
        assert pair.target.engine == engine
        found = sb.generate(pair, [[3, 1, 4, 1, 5, 9, 2]], sb.greedy(), max_new_tokens=5, eos_token_id=[])
        texts.append(found[0].tokens)
    assert texts[0] == texts[1]
