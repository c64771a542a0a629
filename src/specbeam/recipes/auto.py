"""The recipe that chooses a method by measurement."""

from specbeam.core.errors import NotSupported
from specbeam.core.laws.named import EXACT
from specbeam.core.lm import LM
from specbeam.core.session import Parts
from specbeam.recipes.method import Method, recipe


@recipe
def auto() -> Method:
    """Decode with the fastest exact method for one sequence, measured on the first prompts.

    Law: exact: plain sampling
    Paper: none

    The candidates are timed once per combination of target, draft model, sampling settings and machine, and the fastest
    is saved on disk. Approximate methods are never candidates.
    """

    def build(target: LM | None, draft: LM | None) -> Parts:
        raise NotSupported("auto measures methods before it decodes; use it with generate() or on the command line")

    return Method("auto", EXACT, 1, build)
