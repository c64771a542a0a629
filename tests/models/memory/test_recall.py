"""Recall by hand: the numbers of arXiv 2405.06067's equations worked out on vectors of two numbers."""

import pytest
import torch

from specbeam.errors import BadSetting
from specbeam.models.memory.plan import MemoryPlan, segment_of_window
from specbeam.models.memory.recall import Recall
from specbeam.models.memory.windows import Past
from tests.support.remembered import ForwardLM, tiny_remembering

MEMORIES = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
SUMMARY = torch.tensor([[2.0, 0.0]])


def identity(size=2):
    recall = Recall(size, size)
    with torch.no_grad():
        recall.queries.weight.copy_(torch.eye(size))
        recall.keys.weight.copy_(torch.eye(size))
    return recall.requires_grad_(False)


def test_a_query_recalls_the_mixture_of_memories_that_the_equations_give():
    recall = identity()
    assert recall.mixture(SUMMARY, MEMORIES)[0].tolist() == pytest.approx([0.44581, 0.10838, 0.44581], abs=1e-5)
    assert recall(SUMMARY, MEMORIES)[0].tolist() == pytest.approx([0.89162, 0.55419], abs=1e-5)
    newest = MEMORIES[:, 1:]
    assert recall.mixture(SUMMARY, newest)[0].tolist() == pytest.approx([0.19557, 0.80443], abs=1e-5)
    assert recall(SUMMARY, newest)[0].tolist() == pytest.approx([0.80443, 1.0], abs=1e-5)


def test_a_scale_by_the_width_and_not_by_its_root_would_be_seen():
    """The authors' training divides by d_h: another mixture."""
    by_width = (SUMMARY @ MEMORIES[0].T / 2).softmax(-1)[0]
    assert by_width.tolist() == pytest.approx([0.42232, 0.15536, 0.42232], abs=1e-5)
    assert (by_width @ MEMORIES[0]).tolist() == pytest.approx([0.84464, 0.57768], abs=1e-5)
    assert not torch.allclose(by_width, identity().mixture(SUMMARY, MEMORIES)[0], atol=1e-2)


def test_one_memory_is_recalled_whatever_is_asked():
    for query in (SUMMARY, -3 * SUMMARY):
        assert identity()(query, MEMORIES[:, :1]).tolist() == [[1.0, 0.0]]


def test_without_maps_all_memories_have_one_share_and_their_order_never_matters():
    recall = identity()
    order = [2, 0, 1]
    assert torch.equal(recall.mixture(SUMMARY, MEMORIES[:, order]), recall.mixture(SUMMARY, MEMORIES)[:, order])
    assert torch.allclose(recall(SUMMARY, MEMORIES[:, order]), recall(SUMMARY, MEMORIES))
    with torch.no_grad():
        recall.queries.weight.zero_()
        recall.keys.weight.zero_()
    assert recall.mixture(SUMMARY, MEMORIES)[0].tolist() == pytest.approx([1 / 3] * 3)
    assert recall(SUMMARY, MEMORIES)[0].tolist() == pytest.approx([2 / 3, 2 / 3])


def test_lengths_follow_from_the_window():
    plan = MemoryPlan(segment_of_window(256, 32))
    assert (plan.segment, plan.summarised, plan.window) == (222, 111, 256)
    assert 1 + plan.segment + 1 == 224  # the first segment has no sensory tokens
    assert MemoryPlan(12, 4).summarised == 6
    assert MemoryPlan(12, 4, share=0.01).summarised == 1


@pytest.mark.parametrize(
    ("size", "width", "count"), [(512, 4096, 4.19), (576, 1536, 1.77), (896, 4864, 8.72), (2560, 4096, 20.97)]
)
def test_a_memory_has_as_many_weights_as_the_paper_counts(size, width, count):
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in Recall(size, width).parameters())
    assert weights == 2 * size * width + 2 * size
    assert round(weights / 1e6, 2) == pytest.approx(count, abs=0.011)


def test_a_segment_sees_the_last_memories_only():
    from specbeam.models.memory.lm import MemoryLM

    model, recall = tiny_remembering()
    lm = MemoryLM(ForwardLM(model), MemoryPlan(2, 1, memories=3), recall)
    past = Past()
    for number in range(4):
        past = lm._with_memory(past, lm._after(past, (number, number)), torch.full((1,), float(number)))
    assert [float(memory) for memory in past.memories] == [1, 2, 3]  # those that segment 4 recalls from
    assert lm._sensory(past) == (3,)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"segment": 0}, "segment is 0"),
        ({"segment": 4, "sensory": 5}, "from 0 to segment, 4"),
        ({"segment": 4, "sensory": 0, "memories": 0}, "memories is 0"),
        ({"segment": 4, "sensory": 0, "share": 0.0}, "share is 0.0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(values, said):
    with pytest.raises(BadSetting, match=said):
        MemoryPlan(**values)


def test_a_window_without_room_for_a_segment_is_refused():
    with pytest.raises(BadSetting, match="leaves 0 tokens"):
        segment_of_window(34, 32)
