"""Spec-Bench: its questions by its six tasks, each method against plain decoding of the target, by its figures and ours."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from specbeam import Method, Pair, generate, sampling, turns_of
from specbeam.doors import as_json, prompt_of_messages, spread, text_of, write_output
from specbeam.errors import BadPrompt, BadSetting
from specbeam.lab.evaluate.intervals import ratio_interval

TASKS = ("multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag")
PLAIN = "plain"
WARM_UPS = 3  # answers to the first question that do not count, as in Spec-Bench


@dataclass(frozen=True)
class Question:
    """A question of Spec-Bench; the eight kinds of MT-bench are the task "multi-turn"."""

    id: int
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        return self.category if self.category in TASKS else TASKS[0]


@dataclass(frozen=True)
class Reply:
    """A contender's answers to the turns of a question, as lists with an entry per turn.

    Attributes:
        tokens: number of new tokens, the end token included, by our count.
        seconds: by the clock that was asked for.
        cut: number of prompts of which the beginning was left out, because the model has too few positions.
    """

    texts: list[str]
    tokens: list[int]
    passes: list[int]
    seconds: list[float]
    cut: int


@dataclass(frozen=True)
class SpecBenchLine:
    """The figures of a method in a task, or in all of them.

    Attributes:
        accepted: Spec-Bench's "mean accepted tokens": new tokens per pass of the target, over all passes.
        their_speedup: Spec-Bench's: the mean over questions of tokens per second, over that of plain decoding.
        speedup: ours: seconds per token of plain decoding divided by the method's, over all tokens.
        low, high: its 95 % interval, by bootstrap over questions.
        same: share of the questions whose texts equal plain decoding.
    """

    method: str
    task: str
    questions: int
    tokens: int
    accepted: float
    their_speedup: float
    speedup: float
    low: float
    high: float
    same: float


def read_questions(path: Path, each: int | None = None) -> list[Question]:
    """Read Spec-Bench's question.jsonl, plain or packed by gzip.

    Args:
        each: maximum number of questions of a task, taken at even distances; None: all.

    Raises:
        MissingFile: there is no such file.
        BadPrompt: it holds no questions of Spec-Bench.
    """
    content = text_of(path, "Spec-Bench has it as data/spec_bench/question.jsonl")
    try:
        found = [json.loads(line) for line in content.split("\n") if line.strip()]
        questions = [Question(one["question_id"], one["category"], tuple(one["turns"])) for one in found]
    except (ValueError, KeyError, TypeError) as error:
        raise BadPrompt(f"{path} does not hold lines with question_id, category and turns: {error}") from error
    if not questions:
        raise BadPrompt(f"{path} holds no questions; give Spec-Bench's question.jsonl")
    by_task = {task: [one for one in questions if one.task == task] for task in TASKS}
    found = []
    for task in TASKS:
        found += by_task[task] if each is None else spread(by_task[task], each)
    return found


def specbench(
    pair: Pair,
    questions: Sequence[Question],
    methods: dict[str, Method],
    seed: int = 0,
    max_new_tokens: int = 1024,
    temperature: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    on_question: Callable[[Question], None] = lambda question: None,
) -> dict[str, list[Reply]]:
    """Answer questions one by one, by plain decoding and by each method in turn; return the replies by contender.

    The contenders take turns at each question, so that what disturbs the machine disturbs all.

    Args:
        methods: by the name that their figures have.
        temperature: for methods that draw; 0 is Spec-Bench's greedy decoding.
        clock: returns seconds; `time.process_time` on a machine that has other work.
    """
    contenders = {PLAIN: sampling(), **methods}
    replies: dict[str, list[Reply]] = {name: [] for name in contenders}
    for method in contenders.values():
        for _ in range(WARM_UPS):
            answer(pair, questions[0], method, seed, min(max_new_tokens, 32), temperature, clock)
    for number, question in enumerate(questions):
        order = list(contenders)
        shift = number % len(order)
        for name in order[shift:] + order[:shift]:
            found = answer(pair, question, contenders[name], seed, max_new_tokens, temperature, clock)
            replies[name].append(found)
        on_question(question)
    return replies


def answer(
    pair: Pair,
    question: Question,
    method: Method,
    seed: int,
    max_new_tokens: int,
    temperature: float,
    clock: Callable[[], float],
) -> Reply:
    """Answer the turns of a question, each after those before it.

    Raises `BadSetting` if `max_new_tokens` leaves no room for a prompt.
    """
    options = _options(method, max_new_tokens, temperature)
    chat: list[dict[str, str]] = []
    reply = Reply([], [], [], [], 0)
    cut = 0
    for turn in question.turns:
        chat.append({"role": "user", "content": turn})
        prompt = prompt_of(pair, chat)
        room = _room_for_prompt(pair, prompt, max_new_tokens)
        cut += len(prompt) > room
        began = clock()
        (found,) = generate(pair, prompt[-room:], method, seed=seed, **options)
        reply.seconds.append(clock() - began)
        reply.texts.append(found.text)
        reply.tokens.append(len(found.tokens))
        reply.passes.append(found.report.target_passes)
        chat.append({"role": "assistant", "content": found.text})
    return Reply(reply.texts, reply.tokens, reply.passes, reply.seconds, cut)


def _options(method: Method, max_new_tokens: int, temperature: float) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens} | ({} if method.greedy else {"temperature": temperature})


def _room_for_prompt(pair: Pair, prompt: list[int], max_new_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt. Raises `BadSetting` if there is no room."""
    positions = pair.room(0)
    if positions is None:
        return len(prompt)
    if positions <= max_new_tokens:
        raise BadSetting(
            f"max_new_tokens is {max_new_tokens}, and the models have {positions} positions; ask for fewer, so that a "
            "prompt has room"
        )
    return positions - max_new_tokens


def prompt_of(pair: Pair, chat: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a chat by the tokenizer's template; without one, of its texts one after the other."""
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise BadPrompt("Spec-Bench's questions are texts, and this pair has no tokenizer")
    if getattr(tokenizer, "chat_template", None):
        return prompt_of_messages(tokenizer, None, chat)
    return list(tokenizer("\n\n".join(one["content"] for one in chat))["input_ids"])


def lines_of_specbench(questions: Sequence[Question], replies: dict[str, list[Reply]]) -> list[SpecBenchLine]:
    """Return the figures of each method, by task and overall."""
    lines = []
    for name in replies:
        if name == PLAIN:
            continue
        for task in (*TASKS, "overall"):
            chosen = [number for number, one in enumerate(questions) if task in (one.task, "overall")]
            if chosen:
                own = [replies[name][number] for number in chosen]
                plain = [replies[PLAIN][number] for number in chosen]
                lines.append(_line(name, task, own, plain))
    return lines


def _line(name: str, task: str, own: list[Reply], plain: list[Reply]) -> SpecBenchLine:
    tokens = sum(sum(one.tokens) for one in own)
    passes = sum(sum(one.passes) for one in own)
    plain_tokens = sum(sum(one.tokens) for one in plain)
    plain_s = [sum(one.seconds) for one in plain]
    own_s = [sum(one.seconds) for one in own]
    # Texts may have other lengths than plain ones, so seconds are scaled to the same number of tokens.
    scale = plain_tokens / tokens
    low, high = ratio_interval(plain_s, [seconds * scale for seconds in own_s])
    return SpecBenchLine(
        method=name,
        task=task,
        questions=len(own),
        tokens=tokens,
        accepted=tokens / passes,
        their_speedup=fmean(_rate(one) for one in own) / fmean(_rate(one) for one in plain),
        speedup=sum(plain_s) / (sum(own_s) * scale),
        low=low,
        high=high,
        same=fmean(one.texts == other.texts for one, other in zip(own, plain, strict=True)),
    )


def _rate(reply: Reply) -> float:
    """Return tokens per second of a question."""
    return sum(reply.tokens) / sum(reply.seconds)


def write_answers(
    path: Path,
    pair: Pair,
    questions: Sequence[Question],
    replies: Sequence[Reply],
    name: str,
    method: Method,
    seed: int = 0,
    max_new_tokens: int = 1024,
    temperature: float = 0.0,
) -> None:
    """Write a file of answers that Spec-Bench's evaluation/speed.py reads.

    The tokens that each pass accepted are counted in a run of their own, turn by turn, which is not timed.
    """
    options = _options(method, max_new_tokens, temperature)
    lines: list[str] = []
    for question, reply in zip(questions, replies, strict=True):
        lengths: list[int] = []
        chat: list[dict[str, str]] = []
        for turn, text in zip(question.turns, reply.texts, strict=True):
            chat.append({"role": "user", "content": turn})
            prompt = prompt_of(pair, chat)
            room = _room_for_prompt(pair, prompt, max_new_tokens)
            turns = turns_of(pair, prompt[-room:], method, seed=seed, **options)
            lengths += [one.verdict.layers.size for one in turns]
            chat.append({"role": "assistant", "content": text})
        choice = {
            "index": 0,
            "turns": reply.texts,
            "decoding_steps": reply.passes,
            "new_tokens": reply.tokens,
            "wall_time": reply.seconds,
            "accept_lengths": lengths,
        }
        record = {"question_id": question.id, "category": question.category, "answer_id": f"{name}-{question.id}",
                  "model_id": name, "choices": [choice], "tstamp": time.time()}  # fmt: skip
        lines.append(as_json(record) + "\n")
    write_output(path, "".join(lines))


def as_records(lines: Sequence[SpecBenchLine]) -> list[dict[str, Any]]:
    """Return lines as dictionaries, for JSON."""
    return [asdict(line) for line in lines]
