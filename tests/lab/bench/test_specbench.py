"""Spec-Bench: its tasks, its numbers beside ours, and files that its scripts read."""

import gzip
import itertools
import json
from statistics import fmean

import pytest

import specbeam as sb
from specbeam.errors import BadPrompt, BadSetting, MissingFile
from specbeam.lab.bench.specbench import (
    PLAIN,
    TASKS,
    Question,
    Reply,
    SpecBenchSettings,
    lines_of_specbench,
    read_questions,
    specbench,
    write_answers,
)
from tests.support import words


@pytest.fixture(scope="module")
def pair():
    return words.pair(check=False)


def test_questions_are_read_by_their_six_tasks(tmp_path):
    kinds = ["writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag", "qa", "qa", "qa"]
    lines = [{"question_id": k, "category": kind, "turns": [f"{kind} {k}"]} for k, kind in enumerate(kinds)]
    with gzip.open(tmp_path / "question.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    found = read_questions(tmp_path / "question.jsonl.gz")
    assert [one.task for one in found][:2] == [TASKS[0], TASKS[0]]
    assert {one.id for one in found} == set(range(10))
    few = read_questions(tmp_path / "question.jsonl.gz", each=2)
    assert [one.id for one in few if one.task == "qa"] == [7, 9]  # at even distances from 4, 7, 8, 9
    (tmp_path / "other.jsonl").write_text('{"prompt": "abc"}\n')
    with pytest.raises(BadPrompt, match="question_id"):
        read_questions(tmp_path / "other.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BadPrompt, match="holds no questions"):
        read_questions(tmp_path / "empty.jsonl")
    with pytest.raises(MissingFile, match="there is no file"):
        read_questions(tmp_path / "none.jsonl")


def test_new_tokens_that_leave_no_room_for_a_prompt_are_refused(pair):
    with pytest.raises(BadSetting, match=r"max_new_tokens is 999, and the models have \d+ positions"):
        specbench(pair, [Question(1, "qa", ("abc",))], {}, SpecBenchSettings(max_new_tokens=999))


def test_figures_are_theirs_and_ours_as_their_names_say():
    questions = [Question(1, "qa", ("a",)), Question(2, "rag", ("b",))]
    plain = [Reply(["x"], [10], [10], [1.0], 0), Reply(["y"], [100], [100], [10.0], 0)]
    fast = [Reply(["x"], [10], [2], [0.25], 0), Reply(["z"], [100], [50], [10.0], 0)]
    lines = {line.task: line for line in lines_of_specbench(questions, {PLAIN: plain, "fast": fast})}
    assert set(lines) == {"qa", "rag", "overall"}
    assert lines["qa"].speedup == lines["qa"].their_speedup == 4
    whole = lines["overall"]
    assert whole.accepted == pytest.approx(110 / 52)
    assert whole.their_speedup == pytest.approx(fmean([40, 10]) / fmean([10, 10]))  # short answers weigh as long ones
    assert whole.speedup == pytest.approx(11 / 10.25)  # all tokens in all their time
    assert whole.low <= whole.speedup <= whole.high
    assert whole.same == 0.5


def test_methods_answer_turn_after_turn_and_files_hold_what_each_pass_accepted(pair, tmp_path):
    questions = [Question(7, "writing", ("abc def", "and then")), Question(8, "qa", ("why, " * 80,))]
    methods = {"speculative_sampling": sb.speculative_sampling(depth=2)}
    ticks = itertools.count()
    settings = SpecBenchSettings(max_new_tokens=6)
    replies = specbench(pair, questions, methods, settings, clock=lambda: float(next(ticks)))
    assert set(replies) == {PLAIN, "speculative_sampling"}
    (first, second) = replies["speculative_sampling"]
    assert [one.texts for one in replies[PLAIN]] == [first.texts, second.texts]  # greedy, whatever drafts there are
    assert len(first.tokens) == 2
    assert first.seconds == [1.0, 1.0]
    assert (first.cut, second.cut) == (0, 1)  # 400 characters do not fit 256 positions
    prompt = pair.tokenizer(f"abc def\n\n{first.texts[0]}\n\nand then")["input_ids"]
    again = sb.generate(pair, prompt, sb.greedy(), max_new_tokens=6)[0]
    assert first.texts[1] == again.text
    path = tmp_path / "answers.jsonl"
    method = methods["speculative_sampling"]
    write_answers(path, pair, questions, replies["speculative_sampling"], "mine", method, settings)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (choice,) = records[0]["choices"]
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) == sum(first.tokens)
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == set(records[0])
