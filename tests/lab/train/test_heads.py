"""Heads trained from prompts alone: they learn, go on after a kill, are written as others read them, and wrong input is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import specbeam as sb
from specbeam.core.control.best_tree import ranked_tree
from specbeam.core.control.cost import CostCurve
from specbeam.errors import BadHead, BadSetting, NotSupported
from specbeam.lab.train import DrawPlan, Schedule, drawing, fitting, train_head
from specbeam.lab.train.batches import batches_of
from specbeam.lab.train.exit_choice import candidates, expected_speed
from specbeam.lab.train.heads import KINDS
from specbeam.lab.train.losses import overlap
from specbeam.lab.train.plan import planned, usual_taps
from specbeam.lab.train.teacher import scored
from specbeam.lab.train.trees import Trees
from specbeam.models.heads.exit import ExitHead, ExitLM
from specbeam.models.heads.read import read_head
from specbeam.recipes.tuning.costs import CONTEXT
from tests.support.heads import chain_logits
from tests.support.tiny_models import tiny

DRAWS = DrawPlan(beams=2, max_new_tokens=5, seed=2)
SCHEDULE = Schedule(epochs=3, rate=0.02, embedding_rate=0.01, batch_tokens=200, seed=3)
EXTRA = ("bita", "hidden_transfer")
PROMPTS: list = [[1 + number % 7, 2 + number % 5, 3 + number % 11] for number in range(60)]


@pytest.fixture(scope="module")
def pair():
    """A tiny target whose laws are sharp enough that a draft can be right or wrong."""
    model = tiny("llama", seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
    return sb.load(model)


@pytest.fixture(scope="module")
def drawn(pair, tmp_path_factory):
    """Trees that all trainings share: the first of them draws."""
    return tmp_path_factory.mktemp("trees")


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(drawing, "FILE_TREES", 16)


def trained(pair, out, drawn, kind="eagle3", **changes):
    options = {"draws": DRAWS, "schedule": SCHEDULE, "trees": drawn, **changes}
    return train_head(kind, pair, PROMPTS, out, **options)


def kinds(*quick):
    """All kinds of heads; but for these, each is slow."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_and_is_used(kind, pair, small_files, drawn, tmp_path):
    """What is read of its folder drafts as what was trained, and beams are those without a draft."""
    learns_and_is_used(kind, {}, pair, drawn, tmp_path)


@pytest.fixture(scope="module")
def opt_pair():
    """A target without rotary positions, RMSNorm and gates."""
    model = tiny("opt", seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
    pair = sb.load(model)
    assert pair.target.engine != "plain"
    return pair


@pytest.fixture(scope="module")
def opt_drawn(opt_pair, tmp_path_factory):
    return tmp_path_factory.mktemp("opt_trees")


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "eesd"])
def test_a_head_of_an_opt_learns_and_is_used(kind, opt_pair, small_files, opt_drawn, tmp_path):
    learns_and_is_used(kind, {}, opt_pair, opt_drawn, tmp_path)


def test_a_target_whose_head_reads_projected_states_takes_no_heads(tmp_path):
    pair = sb.load(tiny("opt-350m"))
    with pytest.raises(NotSupported, match=r"projects them from 32 to 64 numbers: use a draft model"):
        train_head("eesd", pair, PROMPTS, tmp_path, draws=DRAWS, schedule=SCHEDULE)


def test_an_exit_layer_cannot_be_trained_where_transformers_scores_no_trees(tmp_path):
    with pytest.raises(NotSupported, match="cannot be trained for BloomForCausalLM: it uses ALiBi"):
        train_head("eesd", sb.load(tiny("bloom")), PROMPTS, tmp_path, draws=DRAWS, schedule=SCHEDULE)


@pytest.mark.parametrize("kind", kinds("dspark", "chimera"))
def test_a_head_of_another_shape_learns_and_is_used(kind, pair, small_files, drawn, tmp_path):
    learns_and_is_used(kind, {"draft_vocab": 40, "layers": 2, "depth": 2}, pair, drawn, tmp_path)


WITHOUT_USE = [("draft_vocab", kind) for kind in KINDS if KINDS[kind].usual.get("draft_vocab")]


@pytest.mark.parametrize(("name", "kind"), [*WITHOUT_USE, ("layers", "chimera")])
def test_what_a_kind_of_head_has_no_use_for_is_refused(name, kind, pair, drawn, tmp_path):
    with pytest.raises(BadSetting, match=f"{name} is 40, but {kind} heads do not use it"):
        trained(pair, tmp_path, drawn, kind, plan={name: 40})


def learns_and_is_used(kind, plan, pair, drawn, tmp_path):
    if kind == "chimera" and plan:
        plan = {"draft_vocab": 40, "depth": 2, "read_out": "own"}
    if KINDS[kind].usual.get("draft_vocab") and plan:
        plan = {"medusa": {"layers": 2, "depth": 2}, "eesd": {"exit_layer": 1}}.get(kind, {"depth": 2})
    done = trained(pair, tmp_path, drawn, kind, plan=plan)
    first, last = done.curve[0], done.curve[-1]
    assert last.epoch == 3
    if kind == "eesd":  # a copy of the last layer, behind all others, is the target itself
        assert first.acceptance > 0.99
        assert last.acceptance > 0.8
    elif kind in ("medusa", *EXTRA):  # they begin near some law of the target, and a random target has little to learn
        assert last.loss < done.curve[1].loss
    else:
        before, after = (np.mean([point.acceptance, *point.deeper]) for point in (first, last))
        assert after > before + 0.05
    assert len(last.deeper) == (plan or KINDS[kind].usual).get("depth", 1) - 1
    loaded = sb.load(pair.target_model, draft=tmp_path, probe=False)
    options = {"seed": 1, "max_new_tokens": 8, "eos_token_id": []}
    ours = sb.generate(loaded, PROMPTS[:3], sb.dsbd(2, 3, 2), **options)
    plain = sb.generate(loaded, PROMPTS[:3], sb.beam_sampling(2), **options)
    assert [one.tokens for one in ours] == [one.tokens for one in plain]
    assert ours[0].report.draft_passes > 0
    tokens = loaded.draft.head.tokens
    assert (tokens is None) == ("draft_vocab" not in plan)
    held_out = Trees.read(drawn / "held_out.npz")
    (batch,) = batches_of(held_out, 100_000, np.random.default_rng(0))
    head = read_head(tmp_path, pair.target_model)
    with torch.no_grad():
        (rows, *_) = head.drafts(scored(pair.target_model, batch, head.taps), 1, batch.learnt)
        laws = (batch.learnt.flatten().cumsum(0) - 1)[rows.nodes]
        ids = batch.ids[laws]
        known = torch.ones_like(ids, dtype=torch.bool)
        if tokens is not None:
            known = torch.isin(ids, tokens)
            ids = torch.searchsorted(tokens, ids).clamp_max(len(tokens) - 1)
        overlaps, _ = overlap(rows.logits, ids, batch.logp[laws], known)
        weights = batch.weights[laws]
    assert float((overlaps * weights).sum() / weights.sum()) == pytest.approx(last.acceptance, abs=3e-3)  # bfloat16


# SpecDiff draws while it learns; an exit layer, and rows in the target's pass, have their own ways to learn.
KILLED = [
    *(
        pytest.param(kind, False, marks=() if kind in ("eagle3", "specdiff", "eesd", "bita") else pytest.mark.slow)
        for kind in KINDS
    ),
    ("eagle3", True),
    pytest.param("dspark", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "in_bfloat16"), KILLED)
def test_a_training_that_was_killed_goes_on_where_it_was(kind, in_bfloat16, pair, small_files, tmp_path, monkeypatch):
    """Killed while drawing, and again while learning: the weights are those of a training that was not disturbed.

    A training in bfloat16 goes on in it wherever it goes on.
    """
    monkeypatch.setattr(fitting, "prefers_bfloat16", lambda device: in_bfloat16)
    trained(pair, tmp_path / "whole", None, kind)
    monkeypatch.setattr(fitting, "STATE_S", 0.0)

    class Killed(BaseException):
        pass

    def kill_at(what, when):
        def report(name, done, total):
            if (name, done) == (what, when):
                raise Killed

        return report

    for what, when in (("drawing", 32), ("training", 6)):
        with pytest.raises(Killed):
            trained(pair, tmp_path / "parts", None, kind, report=kill_at(what, when))
        if what == "training":
            monkeypatch.setattr(fitting, "prefers_bfloat16", lambda device: False)
    done = trained(pair, tmp_path / "parts", None, kind)
    assert [point.epoch for point in done.curve] == [0, 1, 2, 3]
    paths = [next((tmp_path / name).glob("*.safetensors")) for name in ("whole", "parts")]
    whole, parts = (load_file(path) for path in paths)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    before = (tmp_path / "parts" / "config.json").read_text()
    assert json.loads(before) == json.loads((tmp_path / "whole" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_laws_and_losses_are_computed_in_float32_whatever_products_are(
    kind, pair, small_files, drawn, tmp_path, monkeypatch
):
    """So is what the target thinks of the trees; the losses of both ways are close, and not the same."""
    losses = {}
    for in_bfloat16 in (False, True):
        seen = []

        def watched(logits, *others, seen=seen):
            found = overlap(logits, *others)
            seen.append((logits.dtype, found[0].dtype, found[1].dtype))
            return found

        monkeypatch.setattr("specbeam.lab.train.heads.overlap", watched)
        monkeypatch.setattr(fitting, "prefers_bfloat16", lambda device, chosen=in_bfloat16: chosen)
        schedule = Schedule(epochs=1, rate=0.02, embedding_rate=0.01, batch_tokens=200, seed=3)
        done = trained(pair, tmp_path / str(in_bfloat16), drawn, kind, schedule=schedule)
        losses[in_bfloat16] = done.curve[-1].loss
        assert {logits for logits, *_ in seen} == ({torch.bfloat16, torch.float32} if in_bfloat16 else {torch.float32})
        assert {dtype for _, *made in seen for dtype in made} == {torch.float32}
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
    assert losses[True] != losses[False]


def test_trainings_share_what_the_target_draws(pair, small_files, drawn, tmp_path):
    trained(pair, tmp_path / "one", drawn)
    before = {path: path.stat().st_mtime_ns for path in drawn.iterdir() if path.suffix == ".npz"}
    assert len(before) == 5
    seen = []
    trained(pair, tmp_path / "two", drawn, plan={"depth": 2}, report=lambda *what: seen.append(what))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(BadSetting, match=r"holds work with beams 2 \(now 3\)"):
        trained(pair, tmp_path / "three", drawn, draws=DrawPlan(beams=3))


def test_hidden_states_are_those_of_the_target_by_layer(pair, small_files, drawn, tmp_path):
    """Of trees: each node sees its ancestors alone."""
    trained(pair, tmp_path, drawn)
    trees = Trees.read(drawn / "held_out.npz")
    (batch,) = batches_of(trees, 100_000, np.random.default_rng(0))
    layers = pair.target_model.config.num_hidden_layers
    found = scored(pair.target_model, batch, (0, 1, layers, -1)).states
    row = 0
    size = int((batch.parents[row] >= 0).sum()) + 1
    for node in (size - 1, size // 2):
        path = [node]
        while batch.parents[row, path[0]] >= 0:
            path.insert(0, int(batch.parents[row, path[0]]))
        with torch.no_grad():
            plain = pair.target_model(input_ids=batch.tokens[row, path][None], output_hidden_states=True)
        torch.testing.assert_close(found[0][row, node], plain.hidden_states[0][0, -1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1][row, node], plain.hidden_states[1][0, -1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[-1][row, node], plain.hidden_states[-1][0, -1], atol=1e-5, rtol=1e-5)
        normed = pair.target_model.model.norm(found[layers][row, node])
        torch.testing.assert_close(normed, found[-1][row, node], atol=1e-5, rtol=1e-5)


def test_a_head_learns_in_trees_what_it_would_draft_in_chains(pair, small_files, drawn, tmp_path):
    """Each node of a tree as a draft one, two and three deep, against rows one after the other."""
    trained(pair, tmp_path, drawn)
    head = read_head(tmp_path, pair.target_model)
    trees = Trees.read(drawn / "held_out.npz")
    (batch,) = batches_of(trees, 100_000, np.random.default_rng(0))
    shown = scored(pair.target_model, batch, head.taps)
    with torch.no_grad():
        features = head.features(shown.states_at(head.taps))
        drafts = head.drafts(shown, 3, batch.learnt)
    compared = 0
    length = batch.tokens.shape[1]
    for depth, (nodes, logits, *_) in enumerate(drafts, 1):
        for node, found in list(zip(nodes.tolist(), logits, strict=True))[::7]:
            row, column = divmod(node, length)
            path = [column]
            while batch.parents[row, path[0]] >= 0:
                path.insert(0, int(batch.parents[row, path[0]]))
            above = path[: len(path) - depth]
            given = [*features[row, above], *[None] * (depth - 1)]
            expected = chain_logits(head, batch.tokens[row, path].tolist(), given)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "eagle9"}, "kind is 'eagle9'; it must be one of eagle3"),
        ({"plan": {"layers": 0}}, "layers is 0"),
        ({"plan": {"width": 3}}, "width is not an option of a head; the options are behind, decay, depth,"),
        ({"plan": {"taps": (0, 99)}}, r"taps is \(0, 99\); LlamaForCausalLM has 2 layers"),
        ({"plan": {"taps": ()}}, r"taps is \(\); it must be a tuple"),
        ({"plan": {"taps": (-1, 1)}}, r"taps is \(-1, 1\); it must be a tuple of integers of at least 0"),
        ({"kind": "fspad", "plan": {"taps": (0,)}}, r"taps is \(0,\), but fspad heads do not use it"),
        ({"kind": "eagle3", "plan": {"prefix": 8}}, "prefix is 8, but eagle3 heads do not use it"),
        ({"kind": "bita", "plan": {"enters": 1}}, "enters is 1, but bita heads do not use it"),
        ({"kind": "bita", "plan": {"prefix": -1}}, "prefix is -1; it must be an integer of at least 0"),
        ({"kind": "hidden_transfer", "plan": {"enters": 2}}, "enters is 2; LlamaForCausalLM has 2 layers"),
        ({"kind": "hidden_transfer", "plan": {"enters": 0}}, "enters is 0; it must be an integer of at least 1"),
        ({"plan": {"decay": 0.0}}, r"decay is 0.0; it must be in \(0, 1\]"),
        ({"plan": {"variation": 2}}, "variation is 2"),
    ],
)
def test_wrong_options_are_refused(pair, tmp_path, drawn, changes, said):
    with pytest.raises(BadSetting, match=said):
        trained(pair, tmp_path / "out", drawn, **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_leaves_out_what_is_usual_for_the_kind(kind):
    filled = Schedule(epochs=2).filled(KINDS[kind].schedule)
    usual = {"bita": (0.02, 0.05), "eesd": (0.01, 0.002)}.get(kind, (0.02, 0.002))
    assert (filled.rate, filled.embedding_rate, filled.batch_tokens) == (*usual, 4_000)
    assert filled.epochs == 2
    assert Schedule(rate=0.5).filled(KINDS[kind].schedule).rate == 0.5


def test_plans(pair):
    plan = planned(pair.target_model, {"depth": 5}, {"layers": None, "draft_vocab": 10**9})
    assert (plan.depth, plan.layers, plan.draft_vocab) == (5, 1, pair.target.vocab)
    assert [usual_taps(layers) for layers in (2, 3, 8, 10, 32)] == [
        (0, 1, 2),
        (0, 1, 2),
        (2, 4, 5),
        (2, 5, 7),
        (2, 16, 29),
    ]


@pytest.mark.parametrize(
    ("kind", "more", "field", "value"),
    [("eagle3", [], "eagle_aux_hidden_state_layer_ids", [2, 5, 7]), ("eesd", ["--exit-layer", "3"], "exit_layer", 3)],
)
def test_the_command_trains_a_head_and_prints_the_curve(tmp_path, kind, more, field, value):
    from typer.testing import CliRunner

    from specbeam.doors.cli.main import app

    sentences = tmp_path / "sentences.txt"
    sentences.write_text("Ein Hund läuft.\nWo ist mein Hut?\nSie liest ein Buch.\nEr schläft.\n", encoding="utf-8")
    out = tmp_path / "head"
    args = ["train", kind, "--data", str(sentences), "-o", str(out), "--epochs", "1", "--max-new-tokens", "4", *more]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "acceptance, held out" in done.output
    assert ("4 deep" in done.output) == (kind == "eagle3")
    assert json.loads((out / "config.json").read_text())[field] == value


@pytest.mark.parametrize("kind", EXTRA)
def test_the_odds_of_the_likeliest_tokens_are_written(kind, pair, small_files, drawn, tmp_path):
    """By depth and rank, counted one by one; and the tree of the recipe is made of them."""
    trained(pair, tmp_path, drawn, kind, plan={"depth": 2})
    head = read_head(tmp_path, pair.target_model)
    assert len(head.ranks) == 2
    (batch,) = batches_of(Trees.read(drawn / "held_out.npz"), 100_000, np.random.default_rng(0))
    number = batch.learnt.flatten().cumsum(0) - 1
    for depth, rows in enumerate(head.drafts(scored(pair.target_model, batch, ()), 2, batch.learnt)):
        total, weight = np.zeros(3), 0.0
        for node, logits in zip(rows.nodes.tolist(), rows.logits, strict=True):
            law = int(number[node])
            odds = dict(zip(batch.ids[law].tolist(), batch.logp[law].exp().tolist(), strict=True))
            best = logits.argsort(descending=True)[:3].tolist()
            total += float(batch.weights[law]) * np.array([odds.get(token, 0.0) for token in best])
            weight += float(batch.weights[law])
        assert head.ranks[depth][:3] == pytest.approx(total / weight, abs=2e-5)
    loaded = sb.load(pair.target_model, draft=tmp_path, probe=False)
    make = {"bita": sb.bita, "hidden_transfer": sb.hidden_transfer}[kind]
    parts = make(nodes=5, depth=2, tree="measured").parts(loaded.target, loaded.draft)
    assert parts.drafter.growth.topology == ranked_tree(head.ranks, 5)


@pytest.mark.parametrize("kind", EXTRA)
def test_only_the_heads_own_weights_are_learnt(kind, pair, small_files, drawn, tmp_path):
    before = [weight.clone() for weight in pair.target_model.parameters()]
    done = trained(pair, tmp_path, drawn, kind)
    assert all(torch.equal(one, other) for one, other in zip(before, pair.target_model.parameters(), strict=True))
    assert all(weight.grad is None for weight in pair.target_model.parameters())
    width = pair.target_model.config.hidden_size
    sizes = {"bita": 2 * 2 * 2 * 16 * 8 + 3 * width, "hidden_transfer": 3 * (width + 1) * width}
    assert done.weights == sizes[kind]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"specbeam_head": "other"}, "specbeam_head is 'other' in config.json; it must be one of fspad, chimera"),
        ({"sizes": None}, "config.json has no sizes"),
        ({"shape": {"pairs": "projection", "colour": 1}}, "shape has unknown fields: colour"),
        ({"positions": None}, "config.json has no positions"),
    ],
)
def test_a_broken_head_of_our_own_format_is_refused_by_name(pair, small_files, drawn, tmp_path, changes, said):
    trained(pair, tmp_path, drawn, "fspad")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(BadHead, match=said):
        read_head(tmp_path, pair.target_model)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("chimera", {"read_out": "none"}, "shape.read_out is 'none' in config.json; it must be one of shared, own"),
        ("chimera", {"read_out": "own"}, r"shape.depth is 4 in config.json; it must be the number of tensors matrices"),
        ("chimera", {"depth": None}, "config.json has no shape.depth"),
        ("chimera", {"colour": 1}, "shape has unknown fields: colour"),
        ("chimera", {"depth": 9}, r"shape.depth is 9 in config.json; it must be the number of tensors maps"),
        ("specdiff", {"first_row": 2}, "shape.first_row is 2 in config.json; it must be 1 in SpecDiff heads"),
        ("specdiff", {"logit_cap": 1.0}, r"shape.logit_cap is 1\.0 in config.json; it must be 0\.0 in SpecDiff heads"),
        ("specdiff", {"taps": [0, 9, 1]}, "LlamaForCausalLM has 2 layers, so taps are numbers from 0 to 2"),
        ("specdiff", {"taps": [0, 1]}, "reads 3 hidden states, and 2 are named"),
        ("specdiff", {"target_width": 16}, "target_width is 16 in config.json; it must be the width of the target, 32"),
        ("specdiff", {"layers": 3}, "shape.layers is 3 in config.json; it must be 2"),
        ("specdiff", {"draft_vocab": 7}, r"no lm_head.weight, and 7 tokens"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(pair, kind, changes, said, tmp_path):
    """Each error names the folder, and the field or the tensor."""
    plan = planned(pair.target_model, KINDS[kind].usual, {})
    KINDS[kind].save(KINDS[kind].new(pair.target_model, plan, None), pair.target_model, plan, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    shape = {name: value for name, value in {**config["shape"], **changes}.items() if value is not None}
    path.write_text(json.dumps({**config, "shape": shape}))
    with pytest.raises(BadHead, match=said) as refusal:
        read_head(tmp_path, pair.target_model)
    assert str(tmp_path) in str(refusal.value)


def test_a_head_of_another_target_is_refused(pair, tmp_path):
    for kind in ("chimera", "specdiff"):
        plan = planned(pair.target_model, KINDS[kind].usual, {})
        KINDS[kind].save(KINDS[kind].new(pair.target_model, plan, None), pair.target_model, plan, tmp_path / kind)
        other = tiny("llama", hidden_size=64, intermediate_size=64)
        with pytest.raises(BadHead, match=r"width is 32 in config\.json; it must be the width of the target, 64"):
            read_head(tmp_path / kind, other)


def test_an_eagle_head_is_fspad_without_its_modules_and_each_can_be_left_out(pair, tmp_path):
    """What is written is read with the modules that it has, and belongs to the recipe of its paper."""
    modules = {"eagle": None, "both": "both", "sampling": "sampling", "alignment": "alignment"}
    found = {}
    for name, asked in modules.items():
        kind = "eagle" if asked is None else "fspad"
        plan = planned(pair.target_model, KINDS[kind].usual, {"modules": asked})
        folder = tmp_path / name
        KINDS[kind].save(KINDS[kind].new(pair.target_model, plan, None), pair.target_model, plan, folder)
        head = read_head(folder, pair.target_model)
        found[name] = (bool(head.shape.sampling), bool(head.shape.alignment), head.shape.logit_gradient)
        assert head.is_fspad == (kind == "fspad")
        drafting = sb.load(pair.target_model, draft=folder, probe=False)
        assert getattr(sb, kind)().parts(drafting.target, drafting.draft).law == "exact: plain sampling"
    assert found == {
        "eagle": (False, False, 1.0),
        "both": (True, True, 0.5),
        "sampling": (True, False, 1.0),
        "alignment": (False, True, 0.5),
    }
    with pytest.raises(BadSetting, match="modules is 'none'; it must be one of both, sampling, alignment"):
        planned(pair.target_model, {}, {"modules": "none"})


def test_a_part_of_the_gradient_of_logits_reaches_the_states(pair):
    """The numbers are the same, whatever the part."""
    head = KINDS["fspad"].new(pair.target_model, planned(pair.target_model, {}, {}), None)
    rows = torch.randn(3, head.shape.sizes.width)
    slopes = []
    for share in (0.5, 1.0):
        given = rows.clone().requires_grad_(True)
        made = head.changed(logit_gradient=share).logits(given)
        made.square().sum().backward()
        slopes.append((made.detach(), given.grad))
    torch.testing.assert_close(slopes[0][0], slopes[1][0])
    torch.testing.assert_close(slopes[0][1], 0.5 * slopes[1][1])


@pytest.fixture(scope="module")
def deep_pair():
    """A target of five layers, each of which changes a law, so that it matters after how many of them a head leaves."""
    model = tiny("llama", seed=1, num_hidden_layers=5)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
    return sb.load(model)


def test_an_exit_layer_learns_to_draft_and_stands_where_it_promises_most(deep_pair, small_files, tmp_path):
    """A short trial of a few numbers says which; a training that goes on takes what was chosen before."""
    seen = []
    done = trained(deep_pair, tmp_path, None, "eesd", report=lambda *what: seen.append(what))
    figures = json.loads((tmp_path / "training" / "exits.json").read_text())
    assert [one["after"] for one in figures] == candidates(5) == [1, 2]
    assert [what for what in seen if what[0] == "choosing"] == [("choosing", number, 2) for number in range(3)]
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["exit_layer"] == max(figures, key=lambda one: one["speed"])["after"]
    assert done.curve[-1].acceptance > done.curve[0].acceptance + 0.02
    other = [{**one, "speed": 9.0 if one["after"] != stated["exit_layer"] else 1.0} for one in figures]
    (tmp_path / "training" / "exits.json").write_text(json.dumps(other))
    (tmp_path / "training" / "state.pt").unlink()
    trained(deep_pair, tmp_path, None, "eesd")
    assert json.loads((tmp_path / "config.json").read_text())["exit_layer"] != stated["exit_layer"]


def test_the_number_of_layers_before_an_exit_can_be_given(deep_pair, small_files, tmp_path):
    trained(deep_pair, tmp_path, None, "eesd", plan={"exit_layer": 3}, schedule=replace(SCHEDULE, epochs=1))
    assert json.loads((tmp_path / "config.json").read_text())["exit_layer"] == 3
    assert not (tmp_path / "training" / "exits.json").exists()
    with pytest.raises(BadSetting, match="exit_layer is 5; it must be below 5, the target's number of layers"):
        trained(deep_pair, tmp_path / "other", None, "eesd", plan={"exit_layer": 5})
    with pytest.raises(BadSetting, match="exit_layer is 2, but eagle3 heads do not use it"):
        trained(deep_pair, tmp_path / "other", None, "eagle3", plan={"exit_layer": 2})


def test_the_expected_speed_is_that_of_the_best_chain_by_the_cost_of_passes(deep_pair):
    """Of a target that takes 10 ms a pass however many rows, and drafts of 2 ms behind its first layer: by hand."""
    draft = ExitLM(ExitHead(deep_pair.target_model, 1), deep_pair.target)
    target = deep_pair.target
    before = dict(target.curves)
    target.curves[CONTEXT] = CostCurve((1, 64), (0.010, 0.010))
    draft.curves[CONTEXT] = CostCurve((1, 64), (0.004, 0.004))
    found = expected_speed(target, draft, 1, 0.8)
    layer_s = (0.010 - 0.004) / 3
    speeds = {
        depth: sum(0.8**place for place in range(depth + 1)) / (depth * 0.004 + 0.010 - layer_s) * 0.010
        for depth in range(1, 17)
    }
    assert found.depth == max(speeds, key=speeds.get)
    assert found.speed == pytest.approx(max(speeds.values()))
    assert (found.draft_s, found.rest_s) == (0.004, pytest.approx(0.010 - layer_s))
    target.curves = before
