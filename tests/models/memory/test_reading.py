"""Reading in segments with gradients: equal to the definition, causal where it has to be."""

import pytest
import torch
from torch.nn import functional

from specbeam.lab.train.remembering import MemoryDocument, check_texts, learn_texts, padded
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.reading import SegmentReader
from tests.support.remembered import Naive, tiny_remembering

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
QUERIES = ["previous_tail", "refresh", "first_half"]


@pytest.fixture(scope="module")
def remembering():
    return tiny_remembering()


@torch.no_grad()
def logits_of(model, recall, plan, texts):
    rows = [segment.hidden for segment in SegmentReader(model, recall, plan).read(torch.tensor(texts))]
    return model.get_output_embeddings()(torch.cat(rows, dim=1))


@pytest.mark.parametrize("recall_by", ["attention", "previous", "initial"])
@pytest.mark.parametrize("query", QUERIES[:2])
def test_each_row_is_that_of_the_definition(remembering, query, recall_by):
    """Segments shorter than, as long as, and longer by one than the text; the last one is short."""
    model, recall = remembering
    plan = MemoryPlan(4, 2, 3, 0.5, recall_by, query)
    naive = Naive(model, recall, plan)
    found = logits_of(model, recall, plan, [TEXT])[0]
    for stop in range(1, len(TEXT) + 1):
        assert torch.allclose(found[stop - 1], naive.logits(TEXT[:stop]), atol=1e-10), stop


def test_a_query_of_the_first_half_sees_tokens_ahead_and_the_others_do_not(remembering):
    model, recall = remembering
    changed = {query: _rows_that_change(model, recall, query) for query in QUERIES}
    assert changed["previous_tail"] == {}
    assert changed["refresh"] == {}
    assert set(changed["first_half"]) == {
        13,
        14,
    }  # a token of the first half of the last segment, but not its first one


def _rows_that_change(model, recall, query):
    """Earlier rows of the segment of each token of the last full segment, if they change with this token, by its place."""
    plan = MemoryPlan(6, 2, 3, 0.5, "attention", query)
    before = logits_of(model, recall, plan, [TEXT])[0]
    found = {}
    for place in range(12, 18):
        other = [*TEXT]
        other[place] = (other[place] + 1) % 11
        after = logits_of(model, recall, plan, [other])[0]
        differs = [row for row in range(place) if not torch.equal(before[row], after[row])]
        if differs:
            assert min(differs) == 12  # nothing changes in earlier segments
            found[place] = differs
    return found


def test_rows_of_the_later_half_do_not_depend_on_which_causal_reading_it_is(remembering):
    model, recall = remembering
    first_half = logits_of(model, recall, MemoryPlan(6, 2, query="first_half"), [TEXT])[0]
    refreshed = logits_of(model, recall, MemoryPlan(6, 2, query="refresh"), [TEXT])[0]
    later = [place for place in range(len(TEXT)) if place % 6 >= 2]
    early = [place for place in range(12, len(TEXT)) if place % 6 < 2]
    assert torch.allclose(first_half[later], refreshed[later], atol=1e-12)
    assert not torch.allclose(first_half[early], refreshed[early], atol=1e-6)


def test_padding_on_the_right_changes_nothing_before_it(remembering):
    model, recall = remembering
    plan = MemoryPlan(4, 2, query="refresh")
    together = logits_of(model, recall, plan, [TEXT, [*TEXT[:11], *[0] * 7]])
    assert torch.allclose(together[0], logits_of(model, recall, plan, [TEXT])[0], atol=1e-10)
    assert torch.allclose(together[1, :11], logits_of(model, recall, plan, [TEXT[:11]])[0], atol=1e-10)


def test_one_memory_makes_attention_the_recurrent_mode(remembering):
    model, recall = remembering
    text = TEXT[:12]
    by_attention = logits_of(model, recall, MemoryPlan(6, 2, recall="attention"), [text])
    previous = logits_of(model, recall, MemoryPlan(6, 2, recall="previous"), [text])
    assert torch.allclose(by_attention, previous, atol=1e-12)


def test_gradients_reach_all_weights_and_the_first_segment_unless_they_are_cut():
    model, recall = tiny_remembering()
    recall.requires_grad_(True)
    for depth, reaches in ((None, True), (2, False)):
        table = model.get_input_embeddings().weight
        model.zero_grad()
        recall.zero_grad()
        only_first = [10, 10, 10, 10, *TEXT[4:8], *TEXT[:4], *TEXT[4:8]]  # token 10 is in the first segment alone
        reader = SegmentReader(model, recall, MemoryPlan(4, 2, query="first_half"), depth)
        loss = learn_texts(reader, [MemoryDocument(only_first)], "last", torch.device("cpu"))
        assert loss > 0
        assert bool(table.grad[10].any()) == reaches
        for weight in (recall.summary, recall.queries.weight, recall.keys.weight):
            assert weight.grad is not None
            assert weight.grad.any()
        assert bool(recall.first.grad is not None and recall.first.grad.any()) == reaches


def test_losses_count_every_token_that_has_one_before_it(remembering):
    model, recall = remembering
    plan = MemoryPlan(6, 2)
    logits = logits_of(model, recall, plan, [TEXT])[0, :-1].float()
    each = functional.cross_entropy(logits, torch.tensor(TEXT[1:]), reduction="none")
    reader = SegmentReader(model, recall, plan)
    whole = learn_texts(reader, [MemoryDocument(TEXT)], "all", torch.device("cpu"))
    assert len(each) == 3 * 6 - 1
    assert whole == pytest.approx(float(each.mean()), rel=1e-5)
    last = learn_texts(reader, [MemoryDocument(TEXT)], "last", torch.device("cpu"))
    assert last == pytest.approx(float(each[-6:].mean()), rel=1e-5)
    weights = [0.0] * 16 + [1.0, 3.0]
    answer = learn_texts(reader, [MemoryDocument(TEXT, weights, 2)], "all", torch.device("cpu"))
    assert answer == pytest.approx(float((each[-2] + 3 * each[-1]) / 4), rel=1e-5)
    held_out, later, forgetful, answers = check_texts(model, recall, plan, [MemoryDocument(TEXT)])
    assert held_out == pytest.approx(float(each.mean()), rel=1e-5)
    assert later == pytest.approx(float(each[[place - 1 for place in range(18) if place % 6 >= 3]].mean()), rel=1e-5)
    assert forgetful != pytest.approx(held_out)
    assert answers != answers  # there are none
    assert padded([MemoryDocument([1, 2]), MemoryDocument([3])], torch.device("cpu"))[1].tolist() == [[1, 1], [1, 0]]
