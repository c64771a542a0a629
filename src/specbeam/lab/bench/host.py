"""The cost of decoding on the host: turns of many sessions with models that compute nothing."""

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import specbeam as sb
from specbeam.recipes import IdleRuns

LAUNCHES, SENT, BYTES = range(3)
LAW = {"top_k": 10, "top_p": 0.9}  # of methods that draw
DRAFT_NOISE = 0.3  # standard deviation of the draft model's logits around the target's


@dataclass(frozen=True)
class HostPlan:
    """The settings of a measurement.

    Args:
        vocab: number of tokens.
        sessions: number of texts that are decoded together.
        beams, draft_beams, depth: of the methods.
        tokens: number of new tokens of each text.
        rounds: number of repetitions, after one that compiles.
    """

    vocab: int = 128_000
    sessions: int = 16
    beams: int = 4
    draft_beams: int = 6
    depth: int = 4
    tokens: int = 96
    rounds: int = 7


@dataclass(frozen=True)
class HostFigures:
    """The cost of one method on the host, for one turn of one session; medians of rounds."""

    method: str
    host_ms_per_session_turn: float  # processor time
    lowest_ms: float
    highest_ms: float
    bytes_per_row: float  # that pass from the models for each row
    launches_per_turn: float  # passes of both models for one turn of all sessions
    allocations_per_turn: float  # pages of memory taken from the system in one turn of all sessions


def host_costs(plan: HostPlan, names: Sequence[str]) -> Iterator[HostFigures]:
    """Yield the cost of each of these methods, see `methods_of`."""
    target = IdleRuns(plan.vocab, seed=0)
    draft = IdleRuns(plan.vocab, seed=0, noise=DRAFT_NOISE)
    for name in names:
        yield _cost_of(name, plan, target, draft)


def _cost_of(name: str, plan: HostPlan, target: IdleRuns, draft: IdleRuns) -> HostFigures:
    """Return the cost of one method."""
    method = methods_of(plan)[name]
    law: dict[str, Any] = {} if "search" in name else LAW
    pair = sb.Pair(None, None, None, target, draft)
    prompts = [[3, 4, 5 + number] for number in range(plan.sessions)]
    seconds = []
    pages = []
    turns = 1
    for number in range(plan.rounds + 1):
        for model in (target, draft):
            model.counts[:] = 0
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.process_time()
        found = sb.generate(
            pair, prompts, method, batch_size=plan.sessions, max_new_tokens=plan.tokens, eos_token_id=[], seed=7, **law
        )
        spent = time.process_time() - began
        turns = sum(one.report.target_passes for one in found)
        if number:  # the first round compiles
            seconds.append(spent / turns)
            new_pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            pages.append(new_pages * plan.sessions / turns)
    counts = target.counts + draft.counts
    seconds.sort()
    middle = len(seconds) // 2
    return HostFigures(
        method=name,
        host_ms_per_session_turn=1e3 * seconds[middle],
        lowest_ms=1e3 * seconds[0],
        highest_ms=1e3 * seconds[-1],
        bytes_per_row=float(counts[BYTES] / max(counts[SENT], 1)),
        launches_per_turn=float(counts[LAUNCHES] * plan.sessions / turns),
        allocations_per_turn=sorted(pages)[middle],
    )


def methods_of(plan: HostPlan) -> dict[str, sb.Method]:
    """Return the methods that can be measured, by name."""
    drafts: dict[str, Any] = {"draft_beams": plan.draft_beams, "depth": plan.depth}
    return {
        "beam_sampling": sb.beam_sampling(plan.beams),
        "dsbd": sb.dsbd(plan.beams, **drafts),
        "dsbd dynamic": sb.dsbd(plan.beams, width="dynamic", **drafts),
        "beam_search": sb.beam_search(plan.beams),
        "speculative_beam_search": sb.speculative_beam_search(plan.beams, **drafts),
        "sampling": sb.sampling(),
        "speculative_sampling": sb.speculative_sampling(plan.depth, controller="fixed"),
    }
