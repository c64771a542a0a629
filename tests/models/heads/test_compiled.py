"""Heads that compiled layers run, on the bundled target: the texts of decoding without them, turn by turn, in runs, side by side."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.engines.kv.store import PanelStore
from specbeam.errors import NotSupported
from specbeam.lab.train.heads import KINDS
from specbeam.lab.train.plan import planned
from specbeam.models.heads.compiled import CompiledHead
from specbeam.models.heads.lm import BlockLM, TrunkLM
from specbeam.models.heads.read import head_model
from specbeam.models.pair import BUNDLED
from tests.support.heads import VOCAB, block_of, trunk_of
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

OPTIONS = {"max_new_tokens": 12, "seed": 3}
CHAIN = sb.speculative_sampling(3)
BEAMS = sb.dsbd(4, 6, 3, "fixed")
ONE_BEAM = sb.dsbd(1, 3, 3, "fixed")


def sentences(count):
    lines = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines][:count]


def words(count):
    """Words of the bundled target's second task, which have no end of a sentence."""
    texts = sorted({word.strip(".,!?").lower() for line in sentences(200) for word in line.split()})
    return [word for word in texts if len(word) > 3][:count]


@pytest.fixture(scope="module")
def pair():
    return sb.load(BUNDLED / "target")


@pytest.fixture(scope="module")
def heads(pair):
    """A head of each kind with first weights, which nobody has trained, and the last matrix of the target."""
    found = {}
    for kind in ("eagle3", "dspark", "medusa"):
        torch.manual_seed(1)
        plan = planned(pair.target_model, KINDS[kind].usual, {})
        found[kind] = head_model(KINDS[kind].new(pair.target_model, plan, None), pair.target)
    return found


def with_head(pair, heads, kind):
    return replace(pair, draft=heads[kind])


def greedy_of(pair, prompts, tokens):
    """What transformers' greedy decoding makes of prompts."""
    found = []
    for prompt in prompts:
        given = pair.tokenizer(prompt, return_tensors="pt")
        made = pair.target_model.generate(**given, do_sample=False, max_new_tokens=tokens)
        found.append(made[0, given["input_ids"].shape[1] :].tolist())
    return found


def watched(monkeypatch):
    """A list to which the number of turns of each compiled run is added."""
    loop, seen = runs.run_turns, []

    def run_turns(target, draft, spec, live, start, room, turns, dice):
        found = loop(target, draft, spec, live, start, room, turns, dice)
        seen.append(int(room.numbers[runs.DONE]))
        return found

    monkeypatch.setattr(runs, "run_turns", run_turns)
    return seen


@pytest.mark.parametrize(("kind", "method"), [("eagle3", ONE_BEAM), ("dspark", CHAIN), ("medusa", CHAIN)])
def test_drafts_at_temperature_0_are_transformers_greedy_text(kind, method, pair, heads):
    prompts = sentences(3)
    expected = greedy_of(pair, prompts, 12)
    drafting = with_head(pair, heads, kind)
    found = sb.generate(drafting, prompts, method, temperature=0.0, **OPTIONS)
    assert [one.tokens for one in found] == expected
    assert all(one.report.draft_passes > 0 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa"])
def test_drafts_at_temperature_0_are_transformers_greedy_text_on_200_prompts(kind, pair, heads):
    prompts = [*sentences(100), *words(200)][:200]
    assert len(prompts) == 200
    expected = greedy_of(pair, prompts, 16)
    drafting = with_head(pair, heads, kind)
    options = {"max_new_tokens": 16, "temperature": 0.0}
    for method in (CHAIN, sb.specinfer((2, 2)), ONE_BEAM):
        found = [sb.generate(drafting, [prompt], method, **options)[0].tokens for prompt in prompts]
        assert found == expected, method.name


@pytest.mark.parametrize(("kind", "method"), [("eagle3", BEAMS), ("dspark", CHAIN)])
def test_turns_with_heads_run_ahead(kind, method, pair, heads, monkeypatch):
    """All but the first, in which the target has scored nothing yet; texts and reports are those of turns one by one."""
    drafting = with_head(pair, heads, kind)
    seen = watched(monkeypatch)
    prompts = sentences(2)
    ahead = [sb.generate(drafting, [prompt], method, **OPTIONS)[0] for prompt in prompts]
    assert sum(seen) == sum(one.report.target_passes - 1 for one in ahead)
    monkeypatch.setattr("specbeam.core.decoder.run_ahead", lambda target, session, most_turns: False)
    one_by_one = [sb.generate(drafting, [prompt], method, **OPTIONS)[0] for prompt in prompts]
    for run, turned in zip(ahead, one_by_one, strict=True):
        assert [(beam.tokens, beam.score) for beam in run.beams] == [(beam.tokens, beam.score) for beam in turned.beams]
        for name in ("target_passes", "draft_passes", "accepted", "widths", "rows"):
            assert getattr(run.report, name) == getattr(turned.report, name), name


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dspark", marks=pytest.mark.slow), "medusa"])
def test_sixteen_prompts_at_once_have_the_beams_without_a_draft(kind, pair, heads):
    prompts = sentences(16)
    drafting = with_head(pair, heads, kind)
    found = sb.generate(drafting, prompts, BEAMS, batch_size=16, **OPTIONS)
    expected = sb.generate(pair, prompts, sb.beam_sampling(4), batch_size=16, **OPTIONS)
    assert [[beam.tokens for beam in one.beams] for one in found] == [
        [beam.tokens for beam in one.beams] for one in expected
    ]


def test_what_sessions_kept_is_free_when_they_are_over(pair, heads):
    drafting = with_head(pair, heads, "eagle3")
    sb.generate(drafting, sentences(3), BEAMS, batch_size=3, **OPTIONS)
    compiled = drafting.draft.compiled
    assert isinstance(compiled, CompiledHead)
    assert isinstance(compiled.store, PanelStore)
    assert sorted(compiled.free_rows) == list(range(compiled.rows))


def test_heads_that_compiled_layers_cannot_run_are_run_by_torch():
    model = tiny("llama", seed=1, vocab_size=VOCAB)
    cases = {
        "modules of FSPAD": lambda engine: TrunkLM(trunk_of(model, "fspad"), VOCAB, engine),
        "its correction is of kind 'gated'": lambda engine: BlockLM(block_of(model, "gated"), VOCAB, engine),
        "its correction is of kind 'rnn'": lambda engine: BlockLM(block_of(model, "recurrent"), VOCAB, engine),
        "its rows do not attend": lambda engine: BlockLM(block_of(model, "windows from the root"), VOCAB, engine),
        "positions depend on the length": lambda engine: TrunkLM(
            trunk_of(model, "eagle3").changed({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
            VOCAB,
            engine,
        ),
        # the last one, as it changes the embedding of the model
        "not in float32": lambda engine: TrunkLM(trunk_of(model, "eagle3").bfloat16(), VOCAB, engine),
    }
    for why, make in cases.items():
        assert make("auto").engine == "torch"
        with pytest.raises(NotSupported, match=why):
            make("compiled")


@pytest.fixture
def beside_words(tmp_path, monkeypatch):
    """Load a target that is kept in bfloat16, and the same in float32, each with a head of the same numbers."""
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)
    tiny("llama", seed=1, vocab_size=VOCAB).bfloat16().save_pretrained(tmp_path / "target")

    def load(kind):
        torch.manual_seed(1)
        kept = sb.load(tmp_path / "target", tokenizer=False)
        made = KINDS[kind].new(kept.target_model, planned(kept.target_model, KINDS[kind].usual, {}), None).bfloat16()
        wide = sb.load(tmp_path / "target", tokenizer=False, dtype="float32")
        pairs = [
            replace(pair, tokenizer=None, draft=head_model(head, pair.target))
            for pair, head in ((kept, made), (wide, copy.deepcopy(made).float()))
        ]
        assert {weight.dtype for weight in pairs[0].draft.head.parameters()} == {torch.bfloat16}
        return pairs

    return load


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_heads_of_a_target_that_is_kept_in_bfloat16_are_the_same_in_compiled_layers_as_in_float32(kind, beside_words):
    kept, wide = (pair.draft for pair in beside_words(kind))
    assert (kept.engine, wide.engine) == ("compiled", "compiled")
    found, expected = (tree_leaves(draft.compiled.model) for draft in (kept, wide))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_heads_draft_the_same_beside_a_target_that_is_kept_in_bfloat16(kind, beside_words):
    kept, wide = (sb.generate(pair, [[3, 4, 5]], CHAIN, **OPTIONS)[0] for pair in beside_words(kind))
    assert kept.report.draft_passes > 0
    assert (kept.tokens, kept.report.draft_passes) == (wide.tokens, wide.report.draft_passes)
