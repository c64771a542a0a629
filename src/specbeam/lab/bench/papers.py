"""The experiments of the papers on any pair: quality against speed, energy and memory, in one interleaved run.

All contenders answer a question before the next one comes, in rotating order. Each answer is written to a file at once,
so a run that was interrupted goes on where it stopped.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from specbeam import (
    Method,
    Pair,
    beam_sampling,
    dsbd,
    generate,
    mmtad,
    mtad,
    rsd_c,
    rsd_s,
    sampling,
    specinfer,
    speculative_sampling,
)
from specbeam.doors import EnergyMeter, as_json, prompt_of_messages, writing
from specbeam.errors import BadPrompt, BadSetting
from specbeam.lab.bench.host import LAW
from specbeam.lab.bench.method_figures import Figure
from specbeam.lab.bench.paper_tasks import PaperQuestion, PaperTask
from specbeam.lab.bench.speed import memory_of, rotated
from specbeam.lab.evaluate.intervals import interval, share_interval
from specbeam.lab.evaluate.perplexity import PromptScorer, exp

Paper = Literal["dsbd", "mtad", "rsd"]
PAPERS: tuple[str, ...] = get_args(Paper)
PLAIN = "sampling"
_LOG = "runs.jsonl"
_TREE = (3, 2, 1, 1, 1, 1)  # children of SpecInfer and RSD-C by layer; cut to the depth
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class PaperGrid:
    """The settings of a paper's experiment. None: those of its authors.

    Attributes:
        widths: numbers of beams, or of RSD-S's sequences.
        thresholds: of DSBD's dynamic width, or of MTAD's acceptance.
        depths: numbers of draft layers per pass.
        law: temperature and truncations of all contenders, by the names of `specbeam.generate`. Those that are given replace
            the authors' of the same name.
        max_new_tokens: of each answer.
        seed: of all contenders.
    """

    widths: tuple[int, ...] | None = None
    thresholds: tuple[float, ...] | None = None
    depths: tuple[int, ...] | None = None
    law: Mapping[str, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    seed: int = 0

    def of(self, paper: str) -> "PaperGrid":
        """Return these settings, with the paper's own settings in place of None."""
        usual = _AUTHORS[paper]
        return PaperGrid(
            usual.widths if self.widths is None else self.widths,
            usual.thresholds if self.thresholds is None else self.thresholds,
            usual.depths if self.depths is None else self.depths,
            {**usual.law, **self.law},
            usual.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            self.seed,
        )


_AUTHORS = {
    "dsbd": PaperGrid((1, 2, 3, 4, 5), (0.7, 0.9), (3,), {"temperature": 1.0, **LAW}, 100),
    "mtad": PaperGrid((4,), (0.1, 0.3, 0.5, 0.7, 0.9), (4,), {"temperature": 1.0, **LAW}, 128),
    "rsd": PaperGrid((2, 3, 4), (), (2, 3, 4, 5), {"temperature": 0.3}, 128),
}


@dataclass(frozen=True)
class PaperContender:
    """A contender of an experiment.

    Attributes:
        family: the contenders of a line in the plot.
        against: name of the contender that its speed is compared with.
    """

    name: str
    family: str
    method: Method
    against: str = PLAIN


def contenders_of(paper: str, grid: PaperGrid) -> list[PaperContender]:
    """Return the contenders of a paper's experiment."""
    grid = grid.of(paper)
    found = [PaperContender(PLAIN, "plain sampling", sampling())]
    for depth in grid.depths or ():
        fixed: Any = {"controller": "fixed"}
        chain = speculative_sampling(depth, **fixed)
        found.append(PaperContender(f"speculative sampling, depth {depth}", "speculative sampling", chain))
        counts = (4, 2, 2) if paper == "mtad" else _TREE[:depth]
        tree = specinfer(counts, **fixed)
        found.append(PaperContender(f"SpecInfer {counts}", "SpecInfer", tree))
    of_paper = {"dsbd": _of_dsbd, "mtad": _of_mtad, "rsd": _of_rsd}[paper]
    found += of_paper(grid)
    by_name = {one.name: one for one in found}  # SpecInfer's tree may be the same for several depths
    return list(by_name.values())


def _beams(count: int) -> str:
    return "1 beam" if count == 1 else f"{count} beams"


def _of_dsbd(grid: PaperGrid) -> Iterator[PaperContender]:
    for width in grid.widths or ():
        plain = f"beam sampling, {_beams(width)}"
        yield PaperContender(plain, "beam sampling", beam_sampling(width))
        beams = f"DSBD, {_beams(width)}"
        for depth in grid.depths or ():
            fixed = dsbd(width, width + 2, depth, "fixed")
            yield PaperContender(f"{beams}, depth {depth}", "DSBD, fixed width", fixed, plain)
            for threshold in grid.thresholds or ():
                dynamic = dsbd(width, width + 2, depth, "dynamic", threshold)
                name = f"{beams}, depth {depth}, threshold {threshold:g}"
                yield PaperContender(name, "DSBD, dynamic width", dynamic, plain)
        yield PaperContender(f"{beams}, auto", "DSBD, auto", dsbd(width, width="auto"), plain)


def _of_mtad(grid: PaperGrid) -> Iterator[PaperContender]:
    for width in grid.widths or ():
        yield PaperContender(f"beam sampling, {_beams(width)}", "beam sampling", beam_sampling(width))
        for depth in grid.depths or ():
            for threshold in grid.thresholds or ():
                settings = f"{_beams(width)}, depth {depth}, threshold {threshold:g}"
                yield PaperContender(f"MTAD, {settings}", "MTAD", mtad(width, depth, threshold))
                yield PaperContender(f"MMTAD, {settings}", "MMTAD", mmtad(width, depth, threshold))


def _of_rsd(grid: PaperGrid) -> Iterator[PaperContender]:
    for depth in grid.depths or ():
        counts = _TREE[:depth]
        yield PaperContender(f"RSD-C {counts}", "RSD-C", rsd_c(counts, controller="fixed"))
        for width in grid.widths or ():
            sequences = rsd_s(width, depth, controller="fixed")
            yield PaperContender(f"RSD-S, {width} sequences, depth {depth}", "RSD-S", sequences)


@dataclass(frozen=True)
class PaperAnswer:
    """A contender's answers to the turns of a question, with their cost.

    Attributes:
        tokens: numbers of new tokens of each turn.
        passes: target passes of each turn.
        seconds: wall time of each turn.
        joules: of all turns; None without a counter.
        logp: log-likelihood of each turn's tokens under the raw law of the target, before it was rounded, in nats.
        widths: mean number of live beams of each turn.
        quality: 1.0 for a right answer; None if another program judges.
        memory_mb: peak of memory above that before, at the contender's warm-up; None if it cannot be read.
    """

    task: str
    question: str
    contender: str
    texts: list[str]
    tokens: list[int]
    passes: list[int]
    seconds: list[float]
    joules: float | None
    logp: list[float]
    widths: list[float]
    peak_kv_tokens: int
    quality: float | None
    memory_mb: float | None


@dataclass
class AnswerLog:
    """The answers of a run, by task, question and contender; in a file, if it has a folder."""

    folder: Path | None = None
    answers: dict[tuple[str, str, str], PaperAnswer] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path | None, settings: dict[str, Any]) -> "AnswerLog":
        """Return the log in a folder, which is begun if there is none.

        Raises `BadSetting` if the folder holds a run with other settings.

        Args:
            settings: JSON values that identify the run.
        """
        log = cls(folder)
        if folder is None:
            return log
        path = folder / _LOG
        if not path.is_file():
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(as_json(settings) + "\n")
            return log
        first, *lines = path.read_text().split("\n")
        try:
            before = json.loads(first)
            for line in lines[:-1]:  # an interrupted run may have left half a line at the end
                answer = PaperAnswer(**json.loads(line))
                log.answers[answer.task, answer.question, answer.contender] = answer
        except (ValueError, TypeError) as error:
            raise BadPrompt(f"{path} is not the log of a run: {error}; give another folder") from error
        now = json.loads(as_json(settings))
        if before != now:
            other = next(name for name in {**before, **now} if before.get(name) != now.get(name))
            raise BadSetting(
                f"{folder} holds a run with other settings: {other} was {before.get(other)!r} and is "
                f"{now.get(other)!r}; give another folder"
            )
        if lines[-1:] != [""]:
            path.write_text("\n".join([first, *lines[:-1]]) + "\n")
        return log

    def add(self, answer: PaperAnswer) -> None:
        """Record an answer."""
        self.answers[answer.task, answer.question, answer.contender] = answer
        if self.folder is not None:
            with writing(self.folder), (self.folder / _LOG).open("a") as file:
                file.write(as_json(dataclasses.asdict(answer)) + "\n")


def run_paper(
    pair: Pair,
    tasks: Sequence[PaperTask],
    contenders: Sequence[PaperContender],
    grid: PaperGrid,
    log: AnswerLog,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Answer all questions by all contenders that have not answered them yet, and record the answers.

    Args:
        grid: with all settings, see `PaperGrid.of`.
        on_progress: called after each question.
    """
    scorer = PromptScorer(pair)
    for task in tasks:
        memory: dict[str, float | None] = {}
        for number, question in enumerate(task.questions):
            for contender in rotated(contenders, number):
                if (task.name, question.id, contender.name) in log.answers:
                    continue
                if contender.name not in memory:
                    memory[contender.name] = _warm_up(pair, task, contender, grid)
                answer = _answer(scorer, task, question, contender, grid, memory[contender.name])
                log.add(answer)
            on_progress()


def _warm_up(pair: Pair, task: PaperTask, contender: PaperContender, grid: PaperGrid) -> float | None:
    """Answer the task's first question briefly; return the peak of memory above that before, in MB."""
    prompt = _tokens_of(pair, task, [task.questions[0].turns[0]], [])
    options = _options(contender, grid) | {"max_new_tokens": _WARM_UP_TOKENS}
    return memory_of(lambda: generate(pair, prompt, contender.method, **options), pair.target_model.device)


def _answer(
    scorer: PromptScorer,
    task: PaperTask,
    question: PaperQuestion,
    contender: PaperContender,
    grid: PaperGrid,
    memory_mb: float | None,
) -> PaperAnswer:
    """Answer the turns of a question one after the other."""
    pair = scorer.pair
    texts: list[str] = []
    reports = []
    joules: list[float | None] = []
    seconds = []
    logp = []
    for turn in range(len(question.turns)):
        prompt = _tokens_of(pair, task, question.turns[: turn + 1], texts)
        with EnergyMeter() as meter:
            began = time.perf_counter()
            (found,) = generate(pair, prompt, contender.method, **_options(contender, grid))
            seconds.append(time.perf_counter() - began)
        joules.append(meter.joules)
        logp.append(scorer.log_likelihood(prompt, found.tokens))
        texts.append(found.text)
        reports.append(found.report)
    known = [value for value in joules if value is not None]
    return PaperAnswer(
        task=task.name,
        question=question.id,
        contender=contender.name,
        texts=texts,
        tokens=[report.tokens for report in reports],
        passes=[report.target_passes for report in reports],
        seconds=seconds,
        joules=sum(known) if len(known) == len(joules) else None,
        logp=logp,
        widths=[fmean(report.widths) if report.widths else 1.0 for report in reports],
        peak_kv_tokens=max(report.peak_kv_tokens for report in reports),
        quality=None if task.judge is None else task.judge(question, texts[0]),
        memory_mb=memory_mb,
    )


def _options(contender: PaperContender, grid: PaperGrid) -> dict[str, Any]:
    """Return the options of `specbeam.generate`."""
    return {"seed": grid.seed, "max_new_tokens": grid.max_new_tokens, **grid.law}


def _tokens_of(pair: Pair, task: PaperTask, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Return the tokens of a prompt. Turns of a chat follow the tokenizer's template, if it has one."""
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise BadPrompt("the papers' questions are texts, and this pair has no tokenizer; load it with one")
    if not task.is_chat:
        return list(tokenizer(turns[-1])["input_ids"])
    chat = []
    for place, turn in enumerate(turns):
        chat.append({"role": "user", "content": turn})
        if place < len(answers):
            chat.append({"role": "assistant", "content": answers[place]})
    if getattr(tokenizer, "chat_template", None):
        return prompt_of_messages(tokenizer, None, chat)
    return list(tokenizer("\n\n".join(one["content"] for one in chat) + "\n\n")["input_ids"])


@dataclass(frozen=True)
class PaperLine:
    """The figures of a contender in a task.

    Attributes:
        quality: share of right answers; None if another program judges.
        speed: new tokens per second.
        ratio: speed divided by that of the contender `against`; None for that contender itself.
        perplexity: of the answers under the target's raw law: exp of minus the mean over answers of nats per token, as the
            authors report it.
        perplexity_of_tokens: the same, weighted by tokens.
        memory_mb: see `PaperAnswer`.
    """

    task: str
    contender: str
    family: str
    questions: int
    metric: str
    quality: Figure | None
    speed: Figure
    against: str
    ratio: Figure | None
    passes_per_token: float
    joules_per_token: float | None
    mean_width: float
    perplexity: float
    perplexity_of_tokens: float
    tokens_per_answer: float
    peak_kv_tokens: int
    memory_mb: float | None


def lines_of_paper(tasks: Sequence[PaperTask], contenders: Sequence[PaperContender], log: AnswerLog) -> list[PaperLine]:
    """Return the figures of each contender in each task."""
    lines = []
    for task in tasks:
        of = {
            one.name: [log.answers[task.name, question.id, one.name] for question in task.questions]
            for one in contenders
        }
        lines += [_line(task, contender, of[contender.name], of[contender.against]) for contender in contenders]
    return lines


def _line(task: PaperTask, contender: PaperContender, own: list[PaperAnswer], others: list[PaperAnswer]) -> PaperLine:
    tokens = [float(sum(one.tokens)) for one in own]
    seconds = [sum(one.seconds) for one in own]
    total = sum(tokens)
    joules = [one.joules for one in own if one.joules is not None]
    means = [nats / count for one in own for nats, count in zip(one.logp, one.tokens, strict=True) if count]
    memory = [one.memory_mb for one in own if one.memory_mb is not None]
    quality = None
    if task.judge is not None:
        right = [one.quality or 0.0 for one in own]
        quality = Figure(fmean(right), *share_interval(right, [1.0] * len(right)))
    ratio = None
    if contender.name != contender.against:
        of_others = [float(sum(one.tokens)) for one in others], [sum(one.seconds) for one in others]
        rate = total / sum(seconds) / (sum(of_others[0]) / sum(of_others[1]))
        ratio = Figure(rate, *interval((tokens, seconds, *of_others), lambda a, b, c, d: a / b / (c / d)))
    return PaperLine(
        task=task.name,
        contender=contender.name,
        family=contender.family,
        questions=len(own),
        metric=task.metric,
        quality=quality,
        speed=Figure(total / sum(seconds), *interval((tokens, seconds), lambda a, b: a / b)),
        against=contender.against,
        ratio=ratio,
        passes_per_token=sum(sum(one.passes) for one in own) / total,
        joules_per_token=sum(joules) / total if len(joules) == len(own) else None,
        mean_width=fmean(width for one in own for width in one.widths),
        perplexity=exp(-fmean(means)),
        perplexity_of_tokens=exp(-sum(sum(one.logp) for one in own) / total),
        tokens_per_answer=total / len(means),
        peak_kv_tokens=max(one.peak_kv_tokens for one in own),
        memory_mb=max(memory, default=None),
    )


def answers_for_judge(task: PaperTask, contender: PaperContender, log: AnswerLog) -> str:
    """Return the lines of a file that MT-bench's judge (FastChat, fastchat/llm_judge) reads as the answers of a model."""
    lines = []
    for question in task.questions:
        answer = log.answers[task.name, question.id, contender.name]
        number = int(question.id) if question.id.isdigit() else question.id
        record = {
            "question_id": number,
            "answer_id": f"{contender.name}-{question.id}",
            "model_id": contender.name,
            "choices": [{"index": 0, "turns": answer.texts}],
            "tstamp": time.time(),
        }
        lines.append(as_json(record) + "\n")
    return "".join(lines)
