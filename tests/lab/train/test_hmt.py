"""Training of a memory: it learns to recall, goes on after a kill, is loaded, and refuses texts that it cannot learn from."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import specbeam as sb
from specbeam.doors.cli.main import app
from specbeam.errors import BadPrompt, BadSetting, MissingFile
from specbeam.lab.train import MemoryDocument, MemorySchedule, remembering, train_hmt
from specbeam.lab.train.hmt import read_documents, split_documents
from specbeam.lab.train.remembering import drawn_documents
from specbeam.models.memory.plan import MemoryPlan
from tests.support.remembered import Naive
from tests.support.tiny_models import tiny

PLAN = MemoryPlan(4, 1, 3, 0.5, "attention", "refresh")
SCHEDULE = MemorySchedule(((2, 3), (3, 3)), 1, batch=4, rate=1e-3, check_every=3, seed=5)
TEXTS = [np.random.default_rng(number).integers(11, size=14).tolist() for number in range(12)]


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama", vocab_size=11, bos_token_id=0, eos_token_id=10, pad_token_id=0))


def trained(pair, out, plan=PLAN, schedule=SCHEDULE, texts=TEXTS, **more):
    return train_hmt(pair, texts, out, plan, width=8, schedule=schedule, **more)


def weights_of(folder):
    return load_file(folder / "memory.safetensors") | load_file(folder / "backbone" / "model.safetensors")


def test_a_training_that_was_killed_goes_on_where_it_was(pair, tmp_path, monkeypatch):
    """Killed twice, between checks: weights and figures are, bit by bit, those of a training that was not disturbed."""
    seen = []
    whole = trained(pair, tmp_path / "whole", report=lambda *what: seen.append(what))
    assert seen[0] == ("remembering", 0, 7)
    assert seen[-1] == ("remembering", 7, 7)
    monkeypatch.setattr(remembering, "STATE_S", 0.0)

    class Killed(BaseException):
        pass

    def kill_at(when):
        def report(name, done, total):
            if done == when:
                raise Killed

        return report

    for when in (2, 5):
        with pytest.raises(Killed):
            trained(pair, tmp_path / "parts", report=kill_at(when))
    parts = trained(pair, tmp_path / "parts")
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    figures = [[(p.step, str(p.loss), p.held_out, p.later, p.forgetful) for p in done.curve] for done in (whole, parts)]
    assert figures[0] == figures[1]
    assert [point.step for point in whole.curve] == [0, 3, 6, 7]
    assert [json.loads(line)["step"] for line in (tmp_path / "parts/training/curve.jsonl").open()] == [0, 3, 6, 7]
    with pytest.raises(BadSetting, match=r"work with seed 5 \(now 6\)"):
        trained(pair, tmp_path / "parts", schedule=MemorySchedule(((2, 3), (3, 3)), 1, 4, 1e-3, check_every=3, seed=6))


def test_what_was_trained_is_decoded(pair, tmp_path):
    before = [weight.clone() for weight in pair.target_model.parameters()]
    trained(pair, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(before, pair.target_model.parameters(), strict=True))
    remembering_pair = sb.hmt(tmp_path)
    plan, recall = remembering_pair.target.plan, remembering_pair.target.recall
    assert plan == PLAN
    expected = Naive(remembering_pair.target_model, recall, plan).greedy(TEXTS[0], 6)
    (answer,) = sb.generate(remembering_pair, [TEXTS[0]], sb.greedy(), max_new_tokens=6, eos_token_id=[])
    assert answer.tokens == expected


def test_a_frozen_model_stays_as_it_is_and_its_memory_learns(pair, tmp_path):
    schedule = MemorySchedule(((2, 6),), batch=4, memory_rate=0.05, frozen=True, check_every=3, depth=1, loss_on="last")
    wanted = [weight.requires_grad for weight in pair.target_model.parameters()]
    done = trained(pair, tmp_path, schedule=schedule)
    assert [weight.requires_grad for weight in pair.target_model.parameters()] == wanted
    assert all(weight.grad is None for weight in pair.target_model.parameters())
    assert done.weights == 2 * 32 * 8 + 2 * 32
    assert not (tmp_path / "backbone").exists()
    with pytest.raises(MissingFile, match="give the model"):
        sb.hmt(tmp_path)
    assert sb.hmt(pair, tmp_path).target.plan == PLAN


@pytest.mark.slow
def test_a_fact_is_recalled_from_segments_ago(tmp_path):
    """Values of an earlier segment, of which there are four; the window of the one that asks does not reach them."""

    def text(number):
        random = np.random.default_rng([3, number])
        context = 1 + number % 2
        tokens = random.integers(4, 7, (context + 1, 4))
        value = int(random.integers(4))
        tokens[random.integers(context), 1:3] = 7, value
        tokens[-1, :] = 8, 4, 9, value
        return MemoryDocument(tokens.reshape(-1).tolist(), [0.1] * (tokens.size - 1) + [1.0], 1)

    texts = [text(number) for number in range(600)]
    schedule = MemorySchedule(((2, 120), (3, 240)), batch=32, rate=3e-3, memory_rate=3e-3, check_every=120)
    answers = {}
    for recall in ("attention", "initial"):
        model = sb.load(tiny("llama", vocab_size=11, bos_token_id=0, eos_token_id=10, pad_token_id=0))
        plan = MemoryPlan(4, 0, 5, 0.5, recall, "first_half")
        answers[recall] = trained(model, tmp_path / recall, plan, schedule, texts).curve[-1].answers
    assert answers["attention"] > 0.9
    assert answers["initial"] < 0.6


def test_texts_that_nothing_can_be_remembered_of_are_refused(pair, tmp_path):
    with pytest.raises(BadPrompt, match="the longest has 4 tokens; a memory needs texts longer than a segment of 4"):
        trained(pair, tmp_path, texts=[[1, 2, 3, 4]] * 3)
    with pytest.raises(BadPrompt, match="document 1 has 1 tokens"):
        trained(pair, tmp_path, texts=[TEXTS[0], [1]])
    with pytest.raises(BadPrompt, match="14 tokens and 2 weights"):
        trained(pair, tmp_path, texts=[MemoryDocument(TEXTS[0], [1.0, 1.0])])
    with pytest.raises(MissingFile, match="no tokenizer"):
        trained(pair, tmp_path, texts=["a text"])
    answered = [MemoryDocument(text, None, 1) for text in TEXTS]
    with pytest.raises(BadSetting, match=r"texts of 2 segments, 8 tokens.*the shortest has 14"):
        trained(pair, tmp_path, texts=answered)
    with pytest.raises(BadSetting, match="stages is"):
        MemorySchedule(((0, 3),))
    with pytest.raises(BadSetting, match="needs 263 positions"):
        trained(pair, tmp_path / "long", MemoryPlan(260, 1), texts=[[1] * 300])
    with pytest.raises(BadSetting, match="width is 0"):
        train_hmt(pair, TEXTS, tmp_path, PLAN, width=0)


def test_long_texts_are_learnt_in_pieces_and_answers_whole():
    long = MemoryDocument(list(range(100)))
    answered = MemoryDocument(list(range(100, 109)), None, 2)
    texts = drawn_documents([long, answered], 3, 4, 50, np.random.default_rng(0))
    pieces = [text for text in texts if text.answer == 0]
    assert all(len(text.tokens) == 12 for text in pieces)
    assert len({text.tokens[0] for text in pieces}) > 5
    assert answered in texts
    assert drawn_documents([long, answered], 2, 4, 20, np.random.default_rng(0)).count(answered) == 0
    learnt, held_out = split_documents([long], 4, 2, 0)
    assert learnt[0].tokens == long.tokens[:90]
    assert [token for piece in held_out for token in piece.tokens] == long.tokens[90:]
    learnt, held_out = split_documents([MemoryDocument([number] * 9) for number in range(30)], 4, 2, 0)
    assert {one.tokens[0] for one in learnt} | {one.tokens[0] for one in held_out} == set(range(30))
    assert len(learnt) == 27


def test_the_command_trains_and_prints_the_curve(tmp_path):
    class Letters:
        def __call__(self, text, **options):
            return {"input_ids": [ord(letter) % 11 for letter in text]}

    (tmp_path / "text.txt").write_text("one text over several lines,\nread as one " * 3)
    lines = [{"text": "another one"}, {"prompt": "a question", "answer": " yes"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = [tmp_path / "text.txt", tmp_path / "lines.jsonl"]
    documents = read_documents(files, Letters(), 0.5)
    assert [one.answer for one in documents] == [0, 0, 4]
    assert documents[2].weights == [0.5] * 10 + [1.0] * 4
    (tmp_path / "bad.jsonl").write_text('{"prompt": "no answer"}')
    with pytest.raises(BadPrompt, match="line 1 must have a text, or a prompt and an answer"):
        read_documents([tmp_path / "bad.jsonl"], Letters())
    with pytest.raises(MissingFile, match="there is no file"):
        read_documents([tmp_path / "none.txt"], Letters())
    run = CliRunner().invoke(app, ["train", "hmt", "-o", str(tmp_path / "out"), "--stages", "2"])
    assert isinstance(run.exception, BadSetting)
    assert "--stages is '2'" in str(run.exception)
    run = CliRunner().invoke(app, ["train", "hmt", "-o", str(tmp_path / "out"), "--window", "99", "--segment", "9"])
    assert "leave one out" in str(run.exception)
