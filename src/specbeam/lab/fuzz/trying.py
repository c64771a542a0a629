"""One random call and its outcome: an answer that satisfies all invariants, a refusal, or a fault."""

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import specbeam
from specbeam import Generation, Method
from specbeam.doors import warper_names
from specbeam.errors import BrokenPart, SomeFailed, SpecbeamError
from specbeam.lab.fuzz.calls import RandomCall
from specbeam.lab.fuzz.invariants import broken_invariants, differs_by_more_than_rounding, plain_method
from specbeam.lab.fuzz.worlds import World

ANSWERED = "answered"
REFUSED = "refused"
BROKEN = "broken"
CRASHED = "crashed"


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call: its kind, and the sentence of a refusal, invariant or fault."""

    kind: str
    text: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def tried(world: World, call: RandomCall) -> CallOutcome:
    """Make a call, and return its outcome. Catches everything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)  # numpy's warnings about numbers that are not finite
            return _outcome(world, call)
    except BrokenPart as error:
        return CallOutcome(CRASHED, _trace(error))
    except SomeFailed as error:
        crashes = [one for one in error.failures if isinstance(one, BrokenPart)]
        return CallOutcome(CRASHED, _trace(crashes[0])) if crashes else CallOutcome(REFUSED, str(error.failures[0]))
    except SpecbeamError as error:
        return CallOutcome(REFUSED, f"{type(error).__name__}: {error}")
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return CallOutcome(CRASHED, _trace(error))


def _trace(error: BaseException) -> str:
    whole = traceback.format_exception(error)
    return "".join(whole)[-3000:]


def _outcome(world: World, call: RandomCall) -> CallOutcome:
    method = call.make()
    if call.door == "streamer":
        streamer = _Streamer()
        answers = _answers(world, call, method, streamer=streamer)
        faults = [*broken_invariants(world, call, method, answers)]
        if streamer.tokens[len(answers[0].prompt) :] != answers[0].tokens:
            faults.append(f"the streamer got {streamer.tokens}")
    elif call.door in ("stream", "cancelled stream"):
        faults = _faults_of_stream(world, call, method)
    elif call.door in ("turns", "cancelled turns"):
        faults = _faults_of_turns(world, call, method)
    elif call.door == "audit":
        answers = _answers(world, call, method, audit=True)
        faults = [*broken_invariants(world, call, method, answers)]
        faults += [f"the audit failed: {one.report.audit}" for one in answers if one.report.audit.suspicious]  # type: ignore[union-attr]
    else:
        answers = _answers(world, call, method)
        faults = [*broken_invariants(world, call, method, answers)]
        faults += _faults_of_comparisons(world, call, method, answers)
    return CallOutcome(BROKEN, "; ".join(faults[:3])) if faults else CallOutcome(ANSWERED)


def _answers(world: World, call: RandomCall, method: Method, **more: Any) -> list[Generation]:
    return specbeam.generate(world.pair, call.prompts, method, **call.options, **more)


def _faults_of_comparisons(world: World, call: RandomCall, method: Method, answers: Sequence[Generation]) -> list[str]:
    """Return faults found by decoding again in ways that must give the same texts."""
    faults = []
    same_method = call.make()  # with its own cache
    if call.door == "again":
        why = differs_by_more_than_rounding(answers, _answers(world, call, same_method), world.same_alone)
        faults.append(why and f"called again: {why}")
    count = call.options.get("num_return_sequences", 1)
    different = len({str(prompt) for prompt in call.prompts}) == len(call.prompts)
    if call.door == "one by one" and different:
        for number, prompt in enumerate(call.prompts):
            alone = _answers(world, replace(call, prompts=[prompt]), call.make())
            together = answers[number * count : (number + 1) * count]
            why = differs_by_more_than_rounding(together, alone, world.same_alone)
            faults.append(why and f"prompt {number} alone: {why}")
    plain = plain_method(method)
    is_sure = method.greedy or call.options.get("temperature") == 0
    if plain is not None and method.lossless and is_sure:
        options = {name: value for name, value in call.options.items() if name not in warper_names()}
        if method.beams == 1 and count > 1:
            options["num_return_sequences"] = 1
        expected = specbeam.generate(world.pair, call.prompts, plain, **options)
        given = answers if len(expected) == len(answers) else answers[::count]
        why = differs_by_more_than_rounding(expected, given, world.same_alone)
        faults.append(why and f"without drafts: {why}")
    return [fault for fault in faults if fault]


def _faults_of_stream(world: World, call: RandomCall, method: Method) -> list[str]:
    options = {name: value for name, value in call.options.items() if name != "batch_size"}
    pieces = []
    for number, piece in enumerate(specbeam.stream(world.pair, call.prompts[0], method, **options)):
        pieces.append(piece)
        if call.door == "cancelled stream" and number == 1:
            break
    if call.door == "cancelled stream":
        return _faults_after_cancelling(world)
    (answer,) = _answers(world, call, call.make())
    text = "".join(pieces)
    if text != answer.text:
        return [f"the stream is {text!r}, and the text is {answer.text!r}"]
    return []


def _faults_of_turns(world: World, call: RandomCall, method: Method) -> list[str]:
    options = {name: value for name, value in call.options.items() if name != "batch_size"}
    turns = specbeam.turns_of(world.pair, call.prompts[0], method, **options)
    for number, _ in enumerate(turns):
        if call.door == "cancelled turns" and number == 1:
            break
    turns.close()  # type: ignore[attr-defined]
    return _faults_after_cancelling(world)


def _faults_after_cancelling(world: World) -> list[str]:
    """Return faults if a cancelled call left caches behind."""
    caches = getattr(world.pair.target, "caches", None)
    return [f"a cancelled call left {len(caches)} caches"] if caches else []


class _Streamer:
    """A streamer that stores all its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: Any) -> None:
        self.tokens += tokens.reshape(-1).tolist()

    def end(self) -> None: ...
