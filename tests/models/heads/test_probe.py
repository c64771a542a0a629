"""The probe: a head that was read in a wrong way is recognised by how well it drafts."""

import pytest
import torch

from specbeam.core.records import FINAL
from specbeam.models.heads import probe
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.probe import Overlap, fit_of, probed, probed_text, written_text
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.heads import VOCAB, chain_logits, trunk_of
from tests.support.tiny_models import tiny

ROPE = {"rope_type": "default", "rope_theta": 500000.0}


@pytest.fixture(scope="module")
def target():
    """A tiny model whose laws are sharp enough to tell readings apart."""
    model = tiny("llama", seed=1, vocab_size=VOCAB)
    with torch.no_grad():
        model.lm_head.weight *= 5
    return HuggingFaceLM(model, engine="plain")


@pytest.fixture(scope="module")
def trained(target):
    """A head that was taught to draft for the target, for as long as it takes to tell readings apart."""
    return taught(target, trunk_of(target.model, "eagle3, one norm", seed=3).changed(ROPE))


def taught(target, head, steps=150):
    texts = [probed_text(target, written_text(target, [first, first + 1], 40), (0, 1, 2)) for first in range(2, 10)]
    learning = [weight for name, weight in head.named_parameters() if "embed_tokens" not in name]
    optimiser = torch.optim.Adam(learning, 1e-2)
    for step in range(steps):
        trees, laws = texts[step % len(texts)]
        loss = torch.zeros(())
        for nodes, logits, *_ in head.drafts(trees, 2, torch.ones_like(trees.tokens, dtype=torch.bool)):
            loss = loss - (laws[nodes] * logits.log_softmax(-1)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for weight in head.parameters():
        weight.requires_grad_(False)
    return head


def test_a_head_that_is_read_as_it_was_trained_stays_as_it_is(target, trained, recwarn):
    found = probed(trained, target, [3, 4])
    assert found.changes == ()
    assert found.head is trained
    assert found.fit == found.documented
    assert found.fit.score > 0.25
    assert not [one for one in recwarn if "head" in str(one.message)]


def test_another_reading_that_fits_better_is_taken_with_a_warning(target, trained):
    """Read as if the numbers of its hidden states meant what leaves a layer, and not what enters it."""
    wrong = trained.changed(taps=(0, 1))
    with pytest.warns(UserWarning, match="read with hidden states one layer later, against its files"):
        found = probed(wrong, target, [3, 4])
    assert found.changes[0] == "hidden states one layer later"
    assert found.fit.score > found.documented.score + probe.CLEARLY
    assert found.head.shape.taps == (1, 2)
    assert wrong.shape.taps == (0, 1)  # what was given stays as it was


def test_a_head_that_fits_nothing_is_named(target):
    head = trunk_of(target.model, "eagle3", seed=9).changed(ROPE)
    with torch.no_grad():
        head.lm_head.weight *= 50
    with pytest.warns(UserWarning, match="hardly fits the target"):
        probed(head, target, [3, 4])


def test_fits_are_means_of_overlaps(target, trained):
    """Of the first draft behind each token, and of the second: row by row, by chains."""
    trees, laws = probed_text(target, written_text(target, [5, 6], 12), (0, 1, 2))
    tokens = trees.tokens[0].tolist()
    with torch.inference_mode():
        features = trained.features(trees.states_at((1, 2))[0])
    expected = []
    for depth in (1, 2):
        overlaps = []
        for last in range(depth, len(tokens)):
            given = [*features[: last + 1 - depth], *[None] * (depth - 1)]
            drafted = chain_logits(trained, tokens[: last + 1], given).softmax(-1)
            overlaps.append(float(torch.minimum(drafted, laws[last]).sum()))
        expected.append(sum(overlaps) / len(overlaps))
    found = fit_of(trained, probe.ProbedText(trees, laws))
    assert (found.first, found.second) == pytest.approx(tuple(expected), abs=1e-5)
    assert Overlap(0.5, 0.3).score == pytest.approx(0.4)


def test_readings_that_are_tried(target, trained):
    names = [name for name, _ in trained.other_readings(3)]
    assert names == [
        "hidden states one layer earlier", "hidden states one layer later", "positions of base 10000", "attention added to the normed feature",
        "normed states fed back",
    ]  # fmt: skip
    scaled = trained.changed({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    assert "positions without scaling" in [name for name, _ in scaled.other_readings(2)]
    for _, one in trained.other_readings(3):
        assert one.fc.weight is trained.fc.weight
    eagle = trunk_of(target.model, "eagle").changed(ROPE)
    assert [name for name, _ in eagle.other_readings(2)] == ["positions of base 10000"]


def test_the_text_is_what_the_target_writes(target):
    text = written_text(target, [3, 4], 9)
    assert len(text) == 9
    with torch.inference_mode():
        logits = target.model(input_ids=torch.tensor([text])).logits[0]
    assert logits[1:-1].argmax(-1).tolist() == text[2:]


def test_the_target_hands_out_what_the_head_reads_alone(target, trained, monkeypatch):
    """Not every engine has hidden states to hand out, and an exit head reads none."""
    asked = []

    def extend(sessions, forests, needs=None):
        asked.extend(needs or [])
        return HuggingFaceLM.extend(target, sessions, forests, needs)

    monkeypatch.setattr(target, "extend", extend)
    probed(ExitHead(target.model, 1), target, [3, 4])
    probed(trained, target, [3, 4])
    assert [(one.states, one.columns) for one in asked] == [(False, (FINAL,)), (True, (0, 1, 2))]
