"""A draft that runs the first layers of the target on the target's own cache, and a target that runs the others."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.fixed import FixedShape
from specbeam.core.decode import Decoder, decode
from specbeam.core.draft.beams import BeamDrafter
from specbeam.core.forest import Forest
from specbeam.core.records import Needs
from specbeam.core.session import Parts
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BadForest, BadSetting, NotSupported
from specbeam.models.early_layers import early_layers
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import LiveLayers
from specbeam.models.pair import Pair
from tests.support.seats import moved, node_paths, plain_logits, random_forest, random_turn, seat
from tests.support.tiny_models import tiny

LAYERS = 4
LONG = [(7 * place + 3) % 60 for place in range(90)]


def target_of(chunk=16, share_from=None, engine="compiled", family="llama"):
    more = {"no_rope_layers": [1, 0, 1, 0]} if family == "smollm3" else {}
    model = tiny(family, seed=1, vocab_size=64, num_hidden_layers=LAYERS, **more)
    return HuggingFaceLM(model, chunk, engine, share_from)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        *((family, layers) for family in ("llama", "qwen2-window") for layers in (1, 3)),
        *((family, 3) for family in ("gemma3", "gpt2", "gpt_neox", "olmo2", "granite", "smollm3", "opt", "falcon-rw")),
    ],
)
def test_both_opinions_are_those_of_plain_forwards(family, layers):
    """Of sessions that come early and late in a turn, with nodes that the first layers saw and nodes that they did not."""
    lm = target_of(5, family=family)
    early, short = LiveLayers(lm, layers), early_layers(lm.model, layers)
    rng = np.random.default_rng(1)
    seats = [seat(rng.integers(0, 64, length).tolist()) for length in (1, 7, 23)]
    for turn_number in range(6):
        forests = [random_forest(rng, [text[-1] for text in one.texts], 64, 4) for one in seats]
        asks = turn_number != 2  # a turn without a draft
        if asks:
            for one, forest, found in zip(seats, forests, early.extend(seats, forests), strict=True):
                expected = plain_logits(short.model, node_paths(one.texts, forest))
                torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)
        if turn_number % 2:  # the last layer of a draft, which nobody looked at
            grown = [forest.grown([int(rng.integers(64))], [forest.size - 1]) for forest in forests]
        else:
            grown = forests
        for one, forest, found in zip(seats, grown, lm.extend(seats, grown), strict=True):
            expected = plain_logits(lm.model, node_paths(one.texts, forest))
            torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)
            turn = random_turn(rng, forest, 64)
            lm.settle(one, turn)
            one.texts = moved(one.texts, forest, turn)
        if turn_number == 3:
            lm.close(seats.pop(0))
            seats.append(seat([3, 4]))


def method(beams, draft_beams, depth, layers):
    law = "exact: beam sampling"

    def build(target, draft):
        plain = sb.dsbd(beams, draft_beams, depth, "fixed").build(target, target)
        drafter = BeamDrafter(LiveLayers(target, layers), beams)
        return Parts(drafter, plain.rule, FixedShape(depth, draft_beams), law)

    return sb.Method("live layers", law, beams, build)


def sessions_of(lm, chosen, prompts, tokens=12):
    settings = Settings.given({"max_new_tokens": tokens, "eos_token_id": []}, None)
    return Request.of(Pair(lm.model, None, None, lm, None), prompts, chosen, settings, 3).sessions


def texts(sessions):
    assert [session.failure for session in sessions] == [None] * len(sessions)
    return [[one.tokens for one in session.hypotheses()] for session in sessions]


@pytest.mark.parametrize("share_from", [None, 8])
@pytest.mark.parametrize(("beams", "depth"), [(1, 3), (3, 2)])
def test_texts_are_those_of_the_target_alone(beams, depth, share_from):
    lm = target_of(share_from=share_from)
    prompts = [[3, 4, 5], LONG, [*LONG, 5], [9]]
    found = sessions_of(lm, method(beams, beams + 2, depth, 2), prompts)
    plain = sessions_of(lm, sb.beam_sampling(beams), prompts)
    list(decode(lm, found))
    list(decode(lm, plain))
    assert texts(found) == texts(plain)
    assert lm.caches == []
    assert sum(session.count.accepted for session in found) > 0


def test_each_layer_runs_once_on_each_row(monkeypatch):
    lm = target_of(chunk=512)
    ran = []
    forward = lm.runner.decoder.forward

    def counted(rows, store, vectors, layers, *others):
        ran.append((len(rows.tokens), layers.indices(LAYERS)))
        return forward(rows, store, vectors, layers, *others)

    monkeypatch.setattr(lm.runner.decoder, "forward", counted)
    (session,) = sessions_of(lm, method(1, 2, 3, 1), [[3, 4, 5]])
    nodes = 0
    for done in decode(lm, [session]):
        for _, turn in done:
            nodes += turn.forest.size
    rows = {layer: sum(count for count, some in ran if layer in range(*some)) for layer in range(LAYERS)}
    assert set(rows.values()) == {rows[0]}
    assert rows[0] <= nodes + 2  # the prompt's first tokens; a root that was a draft is not computed again


def test_a_cancelled_draft_leaves_nothing_behind():
    lm = target_of()
    first, second = sessions_of(lm, method(1, 2, 2, 2), [[3, 4, 5], [7, 8]])
    decoder = Decoder(lm)
    decoder.add(first)
    decoder.add(second)
    decoder.step()
    decoder.cancel(first)
    while decoder.busy:
        decoder.step()
    assert lm.caches == []
    (plain,) = sessions_of(lm, sb.beam_sampling(1), [[7, 8]])
    list(decode(lm, [plain]))
    assert texts([second]) == texts([plain])


def test_hidden_states_are_behind_all_layers():
    lm = target_of()
    one = seat([3, 4, 5])
    needs = Needs(logits=True, hidden=True)
    forest = Forest.rooted([5]).grown([6], [0])
    lm._cache(one, needs)
    LiveLayers(lm, 2).extend([one], [forest])
    (found,) = lm.extend([one], [forest], [needs])
    head = lm.model.get_output_embeddings().weight.detach()
    torch.testing.assert_close(found.hidden @ head.T, found.logits, atol=2e-4, rtol=2e-4)


def test_engines_that_run_all_layers_at_once_refuse():
    with pytest.raises(
        NotSupported,
        match=r"need the compiled forward, rounded or not, the forward for GPUs, or engine='layers'.*early_layers",
    ):
        LiveLayers(target_of(engine="plain"), 2)


@pytest.mark.parametrize("layers", [0, LAYERS])
def test_some_layers_have_to_be_left(layers):
    with pytest.raises(BadSetting, match="LlamaForCausalLM has 4 layers: choose 1 to 3"):
        LiveLayers(target_of(), layers)


@pytest.mark.parametrize("engine", ["compiled", "layers"])
def test_drafts_that_the_target_is_not_given_leave_its_cache(engine):
    """Their slots are free for others, and the rows of those that are left are those of plain forwards."""
    lm, one = target_of(engine=engine), seat([3, 4])
    early = LiveLayers(lm, 1)
    rng = np.random.default_rng(4)
    for _ in range(5):
        forest = random_forest(rng, [text[-1] for text in one.texts], 64, 7)
        early.extend([one], [forest])
        kept = [node for node in range(forest.size) if forest.parents[node] < 0 or node % 2]
        kept = [node for node in kept if forest.parents[node] < 0 or forest.parents[node] in kept]
        pruned = forest.selected(np.array(kept))
        before = lm.held(one)
        (found,) = lm.extend([one], [pruned])
        assert lm.held(one) == before - (forest.size - pruned.size)
        expected = plain_logits(lm.model, node_paths(one.texts, pruned))
        torch.testing.assert_close(found.logits, expected, atol=3e-4, rtol=3e-4)
        turn = random_turn(rng, pruned, 64)
        lm.settle(one, turn)
        one.texts = moved(one.texts, pruned, turn)


def test_a_turn_may_end_without_a_pass_of_the_target():
    """If all drafts are left out and the rows of the roots are known; the drafts are gone then, too."""
    lm, one = target_of(), seat([3, 4])
    early = LiveLayers(lm, 1)
    forest = Forest.rooted([4]).grown([5], [0])
    lm.extend([one], [forest])
    rng = np.random.default_rng(0)
    lm.settle(one, random_turn(rng, forest, 64))
    one = seat([3, 4])
    early.extend([one], [forest])
    roots = Forest.rooted([4])
    lm.extend([one], [roots])
    turn = random_turn(rng, roots, 64)
    lm.settle(one, turn)
    assert lm.held(one) == 2


def test_a_forest_in_another_order_is_refused():
    lm, one = target_of(), seat([3, 4])
    LiveLayers(lm, 1).extend([one], [Forest.rooted([4]).grown([5, 6], [0, 0])])
    for other in (Forest.rooted([4]).grown([6, 5], [0, 0]), Forest.rooted([4]).grown([7, 5], [0, 0])):
        with pytest.raises(
            BadForest, match=r"have processed 3 nodes.*must begin with those that it keeps, in the same order"
        ):
            lm.extend([one], [other])


def test_two_drafts_of_different_depth_cannot_share_a_session():
    lm, one = target_of(), seat([3, 4])
    LiveLayers(lm, 1).extend([one], [Forest.rooted([4])])
    with pytest.raises(NotSupported, match="already drafts with 1 layers, and not with 2"):
        LiveLayers(lm, 2).extend([one], [Forest.rooted([4])])
