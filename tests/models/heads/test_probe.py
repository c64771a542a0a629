"""The probe: a head that was read in a wrong way is recognised by how well it drafts."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.records import FINAL
from specbeam.doors.cli.common import demo_sentences
from specbeam.lab.train.heads import KINDS
from specbeam.lab.train.medusa import new_medusa
from specbeam.lab.train.plan import planned
from specbeam.models.heads import probe
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.probe import (
    LONGEST,
    TOKENS,
    Overlap,
    TextStarts,
    drawn_text,
    drawn_texts,
    fit_of,
    probed,
    probed_text,
)
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.tokenizers import text_starts
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
    drawn = drawn_texts(target, TextStarts([[3, 4]]))
    texts = [probed_text(target, text, (0, 1, 2), given) for text, given in drawn]
    learning = [weight for name, weight in head.named_parameters() if "embed_tokens" not in name]
    optimiser = torch.optim.Adam(learning, 1e-2)
    for step in range(steps):
        trees, laws, _ = texts[step % len(texts)]
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
    found = probed(trained, target, TextStarts([[3, 4]]))
    assert found.changes == ()
    assert found.head is trained
    assert found.fit == found.documented
    assert found.fit.score > 0.25
    assert not [one for one in recwarn if "head" in str(one.message)]


def test_another_reading_that_fits_better_is_taken_with_a_warning(target, trained):
    """Read as if the numbers of its hidden states meant what leaves a layer, and not what enters it."""
    wrong = trained.changed(taps=(0, 1))
    with pytest.warns(UserWarning, match="read with hidden states one layer later, against its files"):
        found = probed(wrong, target, TextStarts([[3, 4]]))
    assert found.changes[0] == "hidden states one layer later"
    assert found.fit.score > found.documented.score + probe.CLEARLY
    assert found.head.shape.taps == (1, 2)
    assert wrong.shape.taps == (0, 1)  # what was given stays as it was


def test_a_head_that_fits_nothing_is_named(target):
    head = trunk_of(target.model, "eagle3", seed=9).changed(ROPE)
    with torch.no_grad():
        head.lm_head.weight *= 50
    with pytest.warns(UserWarning, match="hardly fits the target"):
        probed(head, target, TextStarts([[3, 4]]))


def test_fits_are_means_of_overlaps(target, trained):
    """Of the first draft behind each token, and of the second: row by row, by chains."""
    trees, laws, _ = probed_text(target, [5, 6, 9, 4, 7, 3, 3, 8, 2, 5, 6, 1], (0, 1, 2))
    tokens = trees.tokens[0].tolist()
    with torch.inference_mode():
        features = trained.features(trees.states_at((1, 2))[0])
    expected = []
    given = 4
    for depth in (1, 2):
        overlaps = []
        for last in range(given - 1, len(tokens)):
            known = [*features[: last + 1 - depth], *[None] * (depth - 1)]
            drafted = chain_logits(trained, tokens[: last + 1], known).softmax(-1)
            overlaps.append(float(torch.minimum(drafted, laws[last]).sum()))
        expected.append(sum(overlaps) / len(overlaps))
    found = fit_of(trained, [probe.ProbedText(trees, laws, given)])
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


def test_texts_are_drawn_from_the_target(target):
    """Each token with the target's probability, until an end token; as many as are wanted in all."""
    rng = np.random.default_rng(2)
    thirds = [drawn_text(target, [3, 4], 1, (), rng)[2] for _ in range(400)]
    with torch.inference_mode():
        law = target.model(input_ids=torch.tensor([[3, 4]])).logits[0, -1].softmax(-1).numpy()
    likeliest = int(law.argmax())
    spread = (law[likeliest] * (1 - law[likeliest]) / 400) ** 0.5
    assert abs(thirds.count(likeliest) / 400 - law[likeliest]) < 4 * spread
    texts = drawn_texts(target, TextStarts([[3, 4], [5, 6, 7]]))
    assert [(text[:given], len(text) - given) for text, given in texts] == [
        ([3, 4], LONGEST),
        ([5, 6, 7], TOKENS - LONGEST),
    ]
    assert drawn_texts(target, TextStarts([[3, 4], [5, 6, 7]])) == texts
    every = tuple(range(VOCAB))
    assert [len(text) - given for text, given in drawn_texts(target, TextStarts([[3, 4]], every), 5)] == [1] * 5


def test_the_bundled_target_draws_translations_and_an_untrained_head_fits_them_badly():
    """Its greedy text after an English sentence repeats itself: there the same head had an overlap above 0.7."""
    pair = sb.load("bundled")
    texts = text_starts(pair.target_model, pair.tokenizer, pair.target.vocab)
    assert [pair.tokenizer.decode(start, skip_special_tokens=True) for start in texts.starts] == demo_sentences()
    drawn = drawn_texts(pair.target, texts)
    assert sum(len(text) - given for text, given in drawn) == TOKENS
    assert all(text[-1] in pair.eos for text, _ in drawn[:-1])
    head = new_medusa(pair.target_model, planned(pair.target_model, KINDS["medusa"].usual, {}), None)
    with pytest.warns(UserWarning, match="hardly fits the target: .* is it for another target, or hardly trained?"):
        found = probed(head, pair.target, texts)
    assert found.fit.first < 0.1


def test_the_target_hands_out_what_the_head_reads_alone(target, trained, monkeypatch):
    """Not every engine has hidden states to hand out, and an exit head reads none."""
    asked = []

    def extend(sessions, forests, needs=None):
        asked.extend(needs or [])
        return HuggingFaceLM.extend(target, sessions, forests, needs)

    monkeypatch.setattr(target, "extend", extend)
    probed(ExitHead(target.model, 1), target, TextStarts([[3, 4]]))
    probed(trained, target, TextStarts([[3, 4]]))
    assert [(one.states, one.columns) for one in asked] == [(False, (FINAL,))] * 2 + [(True, (0, 1, 2))] * 2
