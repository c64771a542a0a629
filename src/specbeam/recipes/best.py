"""The recipe of best-first search, which `sb.best` runs."""

from typing import Literal, get_args

from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.ahead import SearchAhead
from specbeam.core.errors import NotSupported, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Parts
from specbeam.core.verify.best import LAW, BestRule
from specbeam.recipes.method import MOST, Method, require_at_least_one

Guesses = Literal["auto", "model", "prompt_lookup", "none"]
LIMIT = 2000  # prefixes that the target scores for a prompt
WIDTH = 16  # prefixes that it scores in a pass
ROUNDS = 6  # rounds in which the prefixes of a pass are chosen


def best_first(
    n: int | None = None, limit: int = LIMIT, width: int = WIDTH, rounds: int = ROUNDS, drafter: str = "auto"
) -> Method:
    """Return the method whose answers are the most probable texts, best first, each with a bound.

    Args:
        n: number of texts; None: as many as end within `limit`.
        limit: maximum number of prefixes that the target scores.
        width: number of prefixes that it scores in a pass.
        rounds: number of rounds in which a drafter chooses them; after each round it guesses what comes below.
        drafter: "model": the draft model runs the search ahead; "prompt_lookup": texts continue like earlier matches;
            "none": only the best known prefixes are scored; "auto": "model" if the pair has a draft model that can.
    """
    count = MOST if n is None else n
    require_at_least_one(n=count, limit=limit, width=width, rounds=rounds)
    one_of("drafter", drafter, get_args(Guesses))

    def build(target: LM | None, draft: LM | None) -> Parts:
        why = _lacks(draft)
        if drafter == "model" and why:
            raise NotSupported(f"best-first search drafts with a model, and {why}; give drafter='prompt_lookup'")
        uses_model = drafter == "model" or (drafter == "auto" and not why)
        copies = drafter == "prompt_lookup" or (drafter == "auto" and bool(why))
        drafting = SearchAhead(limit, draft if uses_model else None, copies)
        return Parts(drafting, BestRule(limit), FixedShape(rounds, width, beyond=0), LAW)

    return Method("best_first", LAW, count, build, greedy=True, search=True)


def _lacks(draft: LM | None) -> str:
    """Return the reason why a draft model cannot run the search ahead; "" if it can."""
    if draft is None:
        return "the pair has no draft model"
    if getattr(draft, "needs_of_target", None) is not None or getattr(draft, "drafts_blocks", False):
        return "the pair's draft is a head, which drafts only below the target's newest tokens"
    return ""
