"""The recipe that is chosen by measurement."""

from specbeam.errors import NotSupported
from specbeam.laws.named import EXACT
from specbeam.lm.base import LM
from specbeam.recipes.method import Method
from specbeam.session import Parts


def auto() -> Method:
    """Decode with the fastest exact method for one sequence, measured on the first prompts.

    Law: exact: plain sampling
    Paper: none

    The candidates are timed once for each combination of target model, draft model, sampling settings and machine, and the
    winner is kept on disk. Approximate methods are never candidates.
    """

    def build(target: LM | None, draft: LM | None) -> Parts:
        raise NotSupported("auto has to be measured first; it works in generate() and on the command line")

    return Method("auto", EXACT, 1, build)
