"""The recipe that is chosen by measurement."""

from specbeam.errors import NotSupported
from specbeam.laws.named import EXACT
from specbeam.lm.base import LM
from specbeam.recipes.method import Method
from specbeam.session import Parts


def auto() -> Method:
    """The fastest exact method for one sequence, by measurement on the first prompts; the choice is kept on disk.

    Law: exact: plain sampling
    Paper: none

    What it depends on: both models, the sampling settings, the machine. Approximate methods are never chosen.
    """

    def build(target: LM | None, draft: LM | None) -> Parts:
        raise NotSupported("auto has to be measured first; it works in generate() and on the command line")

    return Method("auto", EXACT, 1, build)
