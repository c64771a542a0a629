"""The warp: the settings and functions that turn logits into the decoded law."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.core.beams import Beams
from specbeam.core.constraint import Constrained
from specbeam.core.errors import BrokenLaw, BrokenProcessor, DeadEnd, NotSupported, SpecbeamError
from specbeam.core.laws.edits import NO_EDITS, Edits, TimestampRules
from specbeam.core.laws.joint import JointLaw, all_pairs, condition_of, joint_law, odds_among
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation, largest
from specbeam.core.laws.reduce import BROKEN, DEAD, SOUND, condition_of_row, log_probabilities
from specbeam.core.laws.rows import RowLaw, any_broken, row_law
from specbeam.core.ranked import Ranked, whole_rows

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Paths = Callable[[], Int64[np.ndarray, "beams length"]]
Rows = Float[np.ndarray, "rows vocab"]
_NO_SHIFT = np.zeros(1)
_FIELDS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
_OPTIONS = {
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "MinLengthLogitsProcessor": "min_length",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "AllowedTokens": "prefix_allowed_tokens_fn",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "SequenceBiasLogitsProcessor": "sequence_bias",
}
_MENDS_ROWS = "InfNanRemoveLogitsProcessor"  # `remove_invalid_values`: replaces NaN and infinities by numbers

# Processors of transformers after which the probabilities of a row sum to at most 1: they ban tokens, leave one token, or
# normalise.
_NEVER_RAISE = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}


@dataclass(frozen=True, eq=False)
class Warp:
    """The settings that turn logits into the decoded law.

    Args:
        processors: logits processors of transformers or the user (penalties, bans), which depend on the path and process
            each beam's row separately.
        truncation: temperature, top-k, top-p and min-p, applied to the flattened joint law of all beams, as in DSBD (arXiv
            2409.16560, sec. 3.1).
        greedy: whether to choose the best pairs instead of drawing (temperature 0).
        search: whether to follow the order of transformers' beam modes: processors and truncation process the
            log-probabilities of each beam's row separately, and the result is not renormalised.
        constraint: the processor with a state per path, if any; the session passes it the surviving beams.
        others: further warpers of transformers. They process the joint law last, and may only ban.
    """

    processors: "LogitsProcessorList | None" = None
    truncation: Truncation = NO_TRUNCATION
    greedy: bool = False
    search: bool = False
    constraint: Constrained | None = None
    others: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        temperature, top_k, top_p, min_p, least, by_row, _ = self.truncation
        normalise = not (self.search and self.processors)
        exact = Truncation(
            float(temperature), int(top_k), float(top_p), float(min_p), int(least), bool(by_row), normalise
        )
        object.__setattr__(self, "truncation", exact)  # steps are compiled for these types

    @property
    def takes_raw_rows(self) -> bool:
        """Whether no processor or warper changes rows in Python."""
        return not self.processors and not self.others

    @property
    def is_for_runs(self) -> bool:
        """Whether compiled runs can compute the laws: processors process rows separately, and no warper sees the laws."""
        together = any(getattr(one, "sees_beams_together", False) for one in self.processors or [])
        return not self.others and not together

    @cached_property
    def is_bounded(self) -> bool:
        """Whether the probabilities of each row are known to sum to at most 1 before truncation and temperature."""
        return self.truncation.normalise or all(_never_raises(one) for one in self.processors or [])

    def edits(self, prompt: list[int]) -> Edits | None:
        """Return the edits of the processors for steps; None if Python must call the processors.

        Args:
            prompt: the tokens before the new ones.
        """
        makes_logp = not self.truncation.normalise
        edits = NO_EDITS._replace(prompt=np.array(prompt, dtype=np.int64), of_logp=makes_logp)
        for one in self.processors or []:
            edited = _with_edit(edits, one)
            if edited is None:
                return None
            edits = edited
        return edits

    @property
    def cut(self) -> Truncation:
        """The truncation; none at temperature 0."""
        if self.greedy:
            return NO_TRUNCATION._replace(normalise=self.truncation.normalise)
        return self.truncation


def _never_raises(processor: Any) -> bool:
    """Return whether the probabilities of each row still sum to at most 1 after a processor of log-probabilities."""
    import transformers

    kind = type(processor)
    name = kind.__name__
    if issubclass(kind, Constrained) or getattr(processor, "only_bans", False):
        return True
    if getattr(transformers, name, None) is not kind:
        return False
    if name == "RepetitionPenaltyLogitsProcessor":
        return bool(processor.penalty >= 1)
    if name == "ForcedEOSTokenLogitsProcessor":  # each of the end tokens would get probability 1
        return bool(processor.eos_token_id.numel() == 1)
    return name in _NEVER_RAISE


def _with_edit(edits: Edits, processor: Any) -> Edits | None:
    """Return the edits extended by a processor of transformers; None if edits cannot express it, or not in this order."""
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    if edits.timestamps.begin >= 0:  # they come last, because they compare the likelihoods that are left
        return None
    if type(processor) is SuppressTokensLogitsProcessor:
        return _with_bans(edits, processor.suppress_tokens.reshape(-1).tolist())
    if type(processor) is NoBadWordsLogitsProcessor:
        words = list(processor.sequence_bias)
        return _with_bans(edits, [word[0] for word in words]) if all(len(word) == 1 for word in words) else None
    begins = getattr(processor, "begin_index", None) == len(edits.prompt)
    if type(processor) is SuppressTokensAtBeginLogitsProcessor and begins:
        tokens = processor.begin_suppress_tokens.reshape(-1).cpu().numpy().astype(np.int64)
        return edits._replace(banned_first=np.concatenate([edits.banned_first, tokens]))
    if type(processor) is WhisperTimeStampLogitsProcessor and begins:
        return edits._replace(timestamps=_timestamp_rules(processor))
    nothing_before = edits.penalty == 1 and edits.least == 0
    if type(processor) is RepetitionPenaltyLogitsProcessor and nothing_before:
        whole = processor.prompt_ignore_length is None
        return edits._replace(penalty=float(processor.penalty)) if whole else None
    if type(processor) is MinNewTokensLengthLogitsProcessor and edits.least == 0:
        least = processor.prompt_length_to_skip + processor.min_new_tokens - len(edits.prompt)
        eos = processor.eos_token_id.reshape(-1).cpu().numpy().astype(np.int64)
        return edits._replace(least=max(int(least), 0), eos=eos)
    return None


def _timestamp_rules(processor: Any) -> TimestampRules:
    """Return the rules of a `WhisperTimeStampLogitsProcessor`."""
    begin = int(processor.timestamp_begin)
    latest = processor.max_initial_timestamp_index
    return TimestampRules(
        begin,
        int(processor.no_timestamps_token_id),
        int(processor.eos_token_id),
        sys.maxsize - 1 if latest is None else begin + int(latest),
        bool(processor._detect_timestamp_from_logprob),
    )


def _with_bans(edits: Edits, tokens: list[int]) -> Edits:
    """Return edits with further banned tokens. The order does not matter, because other edits keep -inf."""
    return edits._replace(banned=np.concatenate([edits.banned, np.array(tokens, dtype=np.int64)]))


def truncation_of(warpers: Sequence[Any]) -> tuple[Truncation, tuple[Any, ...]]:
    """Return the truncation equal to transformers' warpers, and the warpers that do not fit its order."""
    made: dict[str, Any] = {}
    others: list[Any] = []
    order = list(_FIELDS)
    for one in warpers:
        name = type(one).__name__
        if name == order[0] and (made or others):
            raise NotSupported("the temperature comes after other warpers; put it first")
        later = order[order.index(name) :] if name in order else []
        if later and not others and not any(_FIELDS[kind] in made for kind in later):
            made[_FIELDS[name]] = getattr(one, _FIELDS[name])
            made["least"] = max(getattr(one, "min_tokens_to_keep", 1), made.get("least", 1))
        else:
            others.append(one)
    return Truncation(**made), tuple(others)


def on_host(logits: Float[torch.Tensor, "rows vocab"]) -> Rows:
    """Return logits as a contiguous array, float32 or float64, without a copy if possible."""
    logits = logits.detach()
    if logits.device.type != "cpu":
        logits = logits.cpu()
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return np.ascontiguousarray(logits.numpy())


def processed_rows(rows: Rows, warp: Warp, paths: Paths) -> Rows:
    """Return rows after the logits processors.

    Args:
        paths: returns prompt and tokens of each row, int64[rows, length]; called only if there are processors.

    Raises `BrokenLaw` if the model's rows contain NaN or +inf that no processor removes; `BrokenProcessor` if the rows of a
    processor do, or if it raises an error.
    """
    if not warp.processors:
        return rows
    mends = any(type(one).__name__ == _MENDS_ROWS for one in warp.processors)
    if not mends:
        check_rows(rows)
    if warp.search:
        is_broken = mends and any_broken(rows)  # then use torch's result, which transformers' processors get
        rows = torch.from_numpy(rows).log_softmax(-1).numpy() if is_broken else log_probabilities(rows)
    return _processed(torch.from_numpy(rows), warp.processors, paths())


def law_of_beams(rows: Rows, beams: Beams, warp: Warp) -> JointLaw:
    """Return the warped law of (beam, token) pairs from rows after the processors.

    Raises `BrokenLaw` if the rows contain NaN or +inf, `DeadEnd` if all tokens are banned.
    """
    counts = np.ones_like(beams.counts) if warp.greedy else beams.counts
    law = law_of_processed(whole_rows(rows), beams.scores, counts, warp)
    check_condition(condition_of(law), rows, warp)
    return left_by_others(law, warp) if warp.others and not warp.greedy else law


def law_of_processed(
    rows: Ranked, scores: Float64[np.ndarray, " beams"], counts: Int64[np.ndarray, " beams"], warp: Warp
) -> JointLaw:
    """Return the joint law of rows after the processors, before further warpers."""
    return joint_law(rows, scores, counts, warp.cut)


def check_condition(condition: int, rows: Rows, warp: Warp) -> None:
    """Raise `BrokenLaw` if rows are BROKEN, `DeadEnd` if they are DEAD."""
    if condition == BROKEN:
        check_rows(rows)
    if condition == DEAD:
        raise DeadEnd(f"every token is banned: {_banning(warp)} left nothing to draw")


def row_laws(rows: Rows, warp: Warp) -> list[RowLaw | None]:
    """Return the law of each processed row; None for rows whose tokens are all banned.

    At temperature 0 nothing is truncated, because only the order of the tokens matters. Raises `BrokenLaw` if rows
    contain NaN or +inf.
    """
    laws: list[RowLaw | None] = []
    for row in rows:
        condition = condition_of_row(row)
        if condition == BROKEN:
            check_rows(row[None])
        laws.append(None if condition != SOUND else _law_of_row(row, warp))
    return laws


def dense_logp(rows: Rows, warp: Warp) -> Float64[np.ndarray, "rows vocab"]:
    """Return the log-law of each processed row on the whole vocabulary; -inf if all tokens are banned. See `row_laws`."""
    found = np.full(rows.shape, -np.inf)
    for number, law in enumerate(row_laws(rows, warp)):
        if law is not None:
            found[number] = law.spread().logp
    return found


def _law_of_row(row: Float[np.ndarray, " vocab"], warp: Warp) -> RowLaw:
    if not warp.others or warp.greedy:
        return row_law(row, warp.cut)
    beams = Beams.start(0, 0)
    law = law_of_beams(row[None], beams, warp)
    pairs = all_pairs(law)
    return RowLaw(pairs, np.log(odds_among(law, pairs)), len(row))


def best_places(values: Float64[np.ndarray, " n"], count: int) -> Int64[np.ndarray, " k"]:
    """Return the indices of the `count` largest values above -inf, best first; ties in ascending order."""
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    return largest(values[None], _NO_SHIFT, count)[:count]


def left_by_others(law: JointLaw, warp: Warp) -> JointLaw:
    """Return the law of whole rows without the pairs banned by further warpers, which get the truncated joint law."""
    pairs = all_pairs(law)
    left = torch.full((law.logits.size,), -torch.inf, dtype=torch.float64)
    left[torch.from_numpy(pairs)] = torch.from_numpy(np.log(odds_among(law, pairs)))
    for one in warp.others:
        left = one(torch.zeros(1, 0, dtype=torch.long), left[None].clone())[0]
    banned = (left == -torch.inf).numpy().reshape(law.logits.shape)
    logits = np.where(banned, law.logits.dtype.type(-np.inf), law.logits)
    rows = law.rows._replace(logits=logits)
    return law._replace(rows=rows, truncation=Truncation(law.truncation.temperature), normalised=False)


def _banning(warp: Warp) -> str:
    """Return the names of the options that may have banned all tokens."""
    kinds = [type(one).__name__ for one in warp.processors or [] if not isinstance(one, Constrained)]
    kinds = [kind for kind in kinds if not kind.endswith("Warper") and kind != "RepetitionPenaltyLogitsProcessor"]
    names = [_OPTIONS.get(kind, kind) for kind in kinds]
    if warp.constraint is not None:
        names.append(warp.constraint.name)
    return " and ".join(names) or "the model"


def _broken(rows: Rows) -> str:
    """Return "NaN" or "+inf" if rows of logits contain them, else ""."""
    if not any_broken(rows):
        return ""
    return "NaN" if bool(np.isnan(rows).any()) else "+inf"


def check_rows(rows: Rows) -> None:
    """Raise `BrokenLaw` if logits contain NaN or +inf."""
    if what := _broken(rows):
        raise BrokenLaw(f"the model returned {what} logits; try float32, or check the weights for overflow")


def _through(
    processors: "LogitsProcessorList",
    paths: Int64[np.ndarray, "beams length"],
    logits: Float[torch.Tensor, "beams vocab"],
) -> Float[torch.Tensor, "beams vocab"]:
    """Return rows after all processors. `LogitsProcessorList` would inspect their signatures at each call."""
    tokens = torch.from_numpy(paths)
    for one in processors:
        logits = one(tokens, logits)
    return logits


def _processed(
    logits: Float[torch.Tensor, "beams vocab"],
    processors: "LogitsProcessorList",
    paths: Int64[np.ndarray, "beams length"],
) -> Rows:
    """Return rows after the processors. Raises `BrokenProcessor` for their errors."""
    if all(isinstance(one, Constrained) for one in processors):
        return on_host(_through(processors, paths, logits))
    try:
        with torch.no_grad():  # a processor may have weights
            processed = _through(processors, paths, logits.clone())  # a user's processor may write in place
    except SpecbeamError:
        raise
    except Exception as error:
        raise BrokenProcessor(f"a logits processor raised {type(error).__name__}: {error}") from error
    if processed.shape != logits.shape:
        raise BrokenProcessor(
            f"a logits processor returned {tuple(processed.shape)} for scores of {tuple(logits.shape)}"
        )
    rows = on_host(processed)
    if what := _broken(rows):
        check_rows(on_host(logits))  # raises `BrokenLaw` if the model's logits are the cause
        raise BrokenProcessor(f"a logits processor returned {what}; banned tokens must get -inf, others a finite score")
    return rows
