"""The default method of a pair, the same in Python, on the command line and in the server."""

from collections.abc import Sequence

from specbeam.doors.method_text import method_from
from specbeam.models.pair import Pair
from specbeam.recipes.method import Method

USUAL_BEAMS = 4  # default of both recipes
WITHOUT_DRAFTS = "decoded without drafts, as the pair has no draft model"


def usual_name(pair: Pair) -> str:
    """Return the name of a pair's default recipe: `dsbd` with a draft, otherwise the recipe with the same law."""
    return "beam_sampling" if pair.draft is None else "dsbd"


def usual_method(pair: Pair, settings: Sequence[str] = ()) -> Method:
    """Return the default method of a pair. Without a draft, the text of its law mentions this.

    Args:
        pair: the models.
        settings: settings of the recipe, as NAME=VALUE.
    """
    method = method_from(usual_name(pair), settings)
    if pair.draft is not None:
        return method
    return method.with_parts(law=f"{method.law}; {WITHOUT_DRAFTS}")
