"""The default method of a pair, the same in Python, on the command line and in the server."""

from collections.abc import Sequence

from specbeam.doors.method_names import usual_name
from specbeam.doors.method_text import method_from
from specbeam.models.pair import Pair
from specbeam.recipes.method import Method

USUAL_BEAMS = 4  # default of both recipes
WITHOUT_DRAFTS = "decoded without drafts, as the pair has no draft model"


def usual_method(pair: Pair, settings: Sequence[str] = ()) -> Method:
    """Return the default method of a pair. Without a draft, the text of its law mentions this.

    Args:
        pair: the models.
        settings: settings of the recipe, as NAME=VALUE.
    """
    method = method_from(usual_name(pair.draft is not None), settings)
    if pair.draft is not None:
        return method
    return method.with_parts(law=f"{method.law}; {WITHOUT_DRAFTS}")
