"""Spec-Bench: methods against plain decoding of the target on its six tasks, with its statistics and ours."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specbeam import Method, Pair, generate, sampling, turns_of
from specbeam.doors import as_json, prompt_of_messages, spread, text_of, write_output
from specbeam.errors import BadPrompt, BadSetting
from specbeam.lab.bench.speed import rotated
from specbeam.lab.evaluate.intervals import ratio_interval

TASKS = ("multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag")
PLAIN = "plain"
WARM_UPS = 3  # answers to the first question that do not count, as in Spec-Bench


@dataclass(frozen=True)
class Question:
    """A question of Spec-Bench; the eight categories of MT-bench are the task "multi-turn"."""

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
        tokens: numbers of new tokens, including the end token.
        seconds: durations by the given clock.
        cut: number of prompts that were cut, because the model has too few positions.
    """

    texts: list[str]
    tokens: list[int]
    passes: list[int]
    seconds: list[float]
    cut: int


@dataclass(frozen=True)
class SpecBenchSettings:
    """How questions are answered.

    Attributes:
        temperature: temperature of methods that sample; 0 is Spec-Bench's greedy decoding.
    """

    seed: int = 0
    max_new_tokens: int = 1024
    temperature: float = 0.0

    def options(self, method: Method) -> dict[str, Any]:
        """Return the options of `specbeam.generate` for a method."""
        options: dict[str, Any] = {"seed": self.seed, "max_new_tokens": self.max_new_tokens}
        if not method.greedy:
            options["temperature"] = self.temperature
        return options

    def prompt_of(self, pair: Pair, chat: list[dict[str, str]]) -> "CutPrompt":
        """Return the tokens of a chat, cut at the beginning if they leave no room for the answer.

        Raises `BadSetting` if `max_new_tokens` leaves no room for a prompt.
        """
        tokens = prompt_of(pair, chat)
        positions = pair.room(0)
        if positions is None:
            return CutPrompt(tokens, False)
        room = positions - self.max_new_tokens
        if room <= 0:
            raise BadSetting(
                f"max_new_tokens is {self.max_new_tokens}, and the models have {positions} positions; ask for fewer, so "
                "that a prompt has room"
            )
        return CutPrompt(tokens[-room:], len(tokens) > room)


USUAL = SpecBenchSettings()


class CutPrompt(NamedTuple):
    """A prompt, and whether its beginning was left out."""

    tokens: list[int]
    is_cut: bool


@dataclass(frozen=True)
class SpecBenchLine:
    """The figures of a method in a task, or in all of them.

    Attributes:
        accepted: Spec-Bench's "mean accepted tokens": new tokens per pass of the target, over all passes.
        their_speedup: Spec-Bench's: mean tokens per second over questions, divided by plain decoding's.
        speedup: ours: plain decoding's seconds per token divided by the method's, over all tokens.
        low, high: the 95 % interval of `speedup`, by bootstrap over questions.
        same: share of the questions whose texts equal those of plain decoding.
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
        BadPrompt: the file holds no questions of Spec-Bench.
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
    settings: SpecBenchSettings = USUAL,
    clock: Callable[[], float] = time.perf_counter,
    on_question: Callable[[Question], None] = lambda question: None,
) -> dict[str, list[Reply]]:
    """Answer questions by plain decoding and by each method; return the replies by contender.

    All contenders answer a question before the next one comes, so that disturbances of the machine affect all of them.

    Args:
        methods: methods by the names of their figures.
        clock: returns seconds; `time.process_time` on a busy machine.
    """
    contenders = {PLAIN: sampling(), **methods}
    replies: dict[str, list[Reply]] = {name: [] for name in contenders}
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, 32))
    for method in contenders.values():
        for _ in range(WARM_UPS):
            answer(pair, questions[0], method, short, clock)
    for number, question in enumerate(questions):
        for name in rotated([*contenders], number):
            replies[name].append(answer(pair, question, contenders[name], settings, clock))
        on_question(question)
    return replies


def answer(
    pair: Pair, question: Question, method: Method, settings: SpecBenchSettings, clock: Callable[[], float]
) -> Reply:
    """Answer the turns of a question one after the other.

    Raises `BadSetting` if `max_new_tokens` leaves no room for a prompt.
    """
    options = settings.options(method)
    chat: list[dict[str, str]] = []
    reply = Reply([], [], [], [], 0)
    cut = 0
    for turn in question.turns:
        chat.append({"role": "user", "content": turn})
        prompt = settings.prompt_of(pair, chat)
        cut += prompt.is_cut
        began = clock()
        (found,) = generate(pair, prompt.tokens, method, **options)
        reply.seconds.append(clock() - began)
        reply.texts.append(found.text)
        reply.tokens.append(len(found.tokens))
        reply.passes.append(found.report.target_passes)
        chat.append({"role": "assistant", "content": found.text})
    return replace(reply, cut=cut)


def prompt_of(pair: Pair, chat: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a chat by the tokenizer's template; without a template, of its texts one after the other."""
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise BadPrompt("Spec-Bench's questions are texts, but this pair has no tokenizer; load it with one")
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
    # Texts may differ in length from plain decoding's, so seconds are scaled to the same number of tokens.
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
    settings: SpecBenchSettings,
) -> None:
    """Write a file of answers for Spec-Bench's evaluation/speed.py.

    A further run, which is not timed, counts the tokens accepted by each pass.
    """
    options = settings.options(method)
    lines: list[str] = []
    for question, reply in zip(questions, replies, strict=True):
        lengths: list[int] = []
        chat: list[dict[str, str]] = []
        for turn, text in zip(question.turns, reply.texts, strict=True):
            chat.append({"role": "user", "content": turn})
            turns = turns_of(pair, settings.prompt_of(pair, chat).tokens, method, **options)
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
