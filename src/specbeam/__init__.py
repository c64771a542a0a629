"""specbeam: decode with beams at the price of one sequence.

>>> import specbeam as sb
>>> pair = sb.load("bundled")
>>> sb.generate(pair, "Ein Hund läuft.", method=sb.dsbd(beams=4), seed=7)[0].text  # doctest: +SKIP
'A dog is running.'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Loaded on first use, so that `import specbeam` and `specbeam --help` do not wait for torch.
_HOMES = {
    "load": "pair",
    "Pair": "pair",
    "generate": "generation",
    "stream": "generation",
    "methods": "recipes",
    "Method": "recipes",
    "greedy": "recipes",
    "sampling": "recipes",
    "beam_sampling": "recipes",
    "dsbd": "recipes",
    "Beam": "records",
    "Generation": "records",
    "Report": "records",
    "SpecbeamError": "errors",
    "hf": "",
}
__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from specbeam import hf as hf
    from specbeam.errors import SpecbeamError as SpecbeamError
    from specbeam.generation import generate as generate
    from specbeam.generation import stream as stream
    from specbeam.pair import Pair as Pair
    from specbeam.pair import load as load
    from specbeam.recipes import Method as Method
    from specbeam.recipes import beam_sampling as beam_sampling
    from specbeam.recipes import dsbd as dsbd
    from specbeam.recipes import greedy as greedy
    from specbeam.recipes import methods as methods
    from specbeam.recipes import sampling as sampling
    from specbeam.records import Beam as Beam
    from specbeam.records import Generation as Generation
    from specbeam.records import Report as Report


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specbeam' has no attribute {name!r}")
    home = _HOMES[name]
    value = import_module(f"specbeam.{home}") if home else import_module(f"specbeam.{name}")
    if home:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
