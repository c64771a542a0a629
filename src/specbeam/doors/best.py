"""`best`: the most probable texts of a prompt, one by one, each with a certificate."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from specbeam.core.decoder import Decoder
from specbeam.core.records import Beam, Report
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import Options, warper_names
from specbeam.doors.options.unknown import check_names
from specbeam.doors.request import Request
from specbeam.errors import NotSupported, TooFewAnswers, counted
from specbeam.models.pair import Pair, as_pair
from specbeam.recipes.best import LIMIT, WIDTH, Guesses, best_first

if TYPE_CHECKING:
    from transformers import GenerationConfig

_DIVERSE = ("num_beam_groups", "diversity_penalty")


class BestTexts(Iterator[Beam]):
    """The texts of `best`. The search runs only as far as the next text; `close` ends it.

    Attributes:
        count: number of texts so far.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        self._session = request.sessions[0]
        self._decoder = Decoder(request.pair.target, filling=1)
        self._decoder.add(self._session)
        self._session.count.restart()

    def __next__(self) -> Beam:
        session = self._session
        while len(session.ended) <= self.count and self._decoder.busy:
            self._decoder.step()
        if session.failure is not None:
            raise session.failure
        if len(session.ended) <= self.count:
            self.close()
            if self.count == 0:
                raise TooFewAnswers(
                    f"no text ended within {session.count.rows.scored} scored prefixes and {session.limits.max_new_tokens} "
                    "tokens; raise limit or max_new_tokens",
                    [],
                )
            raise StopIteration
        self.count += 1
        return self.request.beam(session, session.ended[self.count - 1])

    def __repr__(self) -> str:
        return f"<BestTexts, {counted(self.count, 'text')} so far; {self.report.law}>"

    @property
    def report(self) -> Report:
        """The law and the cost of the search so far. `rows.scored` is the number of prefixes that the target scored."""
        report = self._session.report(sum(len(text.tokens) for text in self._session.ended[: self.count]))
        return replace(report, seconds=self._session.count.seconds)

    def close(self) -> None:
        """End the search and free its memory."""
        self._decoder.close()

    def __del__(self) -> None:
        if hasattr(self, "_decoder"):
            self._decoder.close()


def best(
    pair: Pair | str | Path,
    prompt: Any,
    n: int | None = None,
    *,
    limit: int = LIMIT,
    width: int = WIDTH,
    drafter: Guesses = "auto",
    generation_config: "GenerationConfig | None" = None,
    **options: Unpack[Options],
) -> BestTexts:
    """Yield the most probable texts that end, best first, each with a certificate that no other text is better.

    A best-first search expands the most probable open prefix until a text that ended is more probable than all of them. The
    target scores many prefixes in a pass: the best ones, and those that a draft expects to come next.

    Args:
        pair: the models, from `load`; or a name or path for `load`.
        prompt: one prompt, in any form that `generate` takes.
        n: number of texts; None: as many as you take, within `limit`.
        limit: maximum number of prefixes that the target scores, which bounds time and memory. At the limit, the best texts
            found so far follow; those that are not certain have `certain` False.
        width: number of prefixes that the target scores in a pass.
        drafter: "model": the draft model runs the search ahead; "prompt_lookup": texts continue like earlier matches in
            prompt and source; "none"; "auto": "model" if the pair has a draft model.
        generation_config: a generation config of transformers; keyword arguments take precedence.
        options: the options of `generate`: `max_new_tokens` (texts that do not end within it are left out), constraints,
            bans, penalties, end tokens, `length_penalty` (0 by default).

    Returns:
        An iterator of beams with `text`, `tokens` (with the end token), `score` (the log-likelihood; with a length penalty
        log-likelihood / length ** length_penalty), `bound` (no text after it has a larger score) and `certain`. Its `report`
        has the cost so far, and `close` frees its memory.

    Raises:
        BadSetting, NotSupported: an option is wrong, or leaves the scores of prefixes without a bound.
        TooFewAnswers: no text ended within the limits.
    """
    pair = as_pair(pair, prompt)
    check_names(best, {name: value for name, value in options.items() if name not in _DIVERSE})
    settings = best_settings(options, generation_config)
    method = best_first(n, limit, width, drafter=drafter)
    request = Request.of(pair, prompt, method, settings)
    if len(request.prompt_of) != 1:
        raise NotSupported(f"best() searches the texts of one prompt, and there are {len(request.prompt_of)}")
    for error in request.refused.values():
        raise error
    return BestTexts(request)


def best_settings(options: Mapping[str, Any], config: "GenerationConfig | None" = None) -> Settings:
    """Return the settings of a best-first search: without a length penalty unless one is given.

    Raises `NotSupported` for options under which texts have no order by probability.
    """
    for name in _DIVERSE:
        if options.get(name) not in (None, 1, 0.0):
            raise NotSupported(
                f"best() does not support {name}: with it the score of a text depends on the other texts, so that no prefix "
                "has a bound and no order is certain"
            )
    given = {name: value for name, value in options.items() if name not in _DIVERSE}
    settings = Settings.given(given, config)
    for name in warper_names():
        if getattr(settings, name) is not None and settings.temperature != 0:
            raise NotSupported(
                f"best() does not support {name}: it gives the most probable texts of the model itself, and draws nothing; "
                "a truncated or tempered law is another one, without the texts outside of the truncation; leave it out"
            )
    if settings.num_return_sequences > 1:
        raise NotSupported("best() gives n texts of a prompt: give n in place of num_return_sequences")
    if settings.early_stopping:
        raise NotSupported("best() stops when a text is certain; leave out early_stopping")
    if settings.length_penalty is not None:
        return settings
    found = settings.changed(length_penalty=0.0)
    found.config = settings.config
    return found
