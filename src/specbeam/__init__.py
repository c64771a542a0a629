"""specbeam: decode with beams at the price of one sequence.

>>> import specbeam as sb
>>> pair = sb.load("bundled")
>>> sb.generate(pair, "Ein Hund läuft.", method=sb.dsbd(beams=4), seed=7)[0].text  # doctest: +SKIP
'A dog is running.'
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# libgomp's threads wait for each other by spinning, by default so long that one more busy process makes a pass four times
# as slow. Spinning a hundredth of that keeps nine tenths of the speed of an idle machine. libgomp reads the number when
# torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "3000"

# The module of each public name. They are imported on first use, so that `import specbeam` and `specbeam --help` do not
# wait for torch.
_HOMES = {
    "load": "pair",
    "Pair": "pair",
    "generate": "generation",
    "stream": "generation",
    "methods": "recipes.catalogue",
    "Method": "recipes.method",
    **dict.fromkeys(("greedy", "sampling", "beam_sampling", "dsbd"), "recipes.beams"),
    **dict.fromkeys(("beam_search", "speculative_beam_search"), "recipes.search"),
    **dict.fromkeys(("speculative_sampling", "block_verification", "specinfer", "rsd_c", "rsd_s"), "recipes.sequence"),
    **dict.fromkeys(("sequoia", "spechub", "traversal", "dyspec", "multi_draft"), "recipes.sequence"),
    **dict.fromkeys(
        ("opt_tree", "gsd", "propd"),
        "recipes.sequence",
    ),
    **dict.fromkeys(
        ("prompt_lookup", "suffix_match", "token_recycling"),
        "recipes.lookup",
    ),
    **dict.fromkeys(
        ("eagle", "fspad", "medusa", "mtp", "chimera", "specdiff", "eesd", "bita", "hidden_transfer"),
        "recipes.heads",
    ),
    "auto": "recipes.auto",
    "mtjd": "recipes.joint_tokens",
    **dict.fromkeys(("mtad", "mjsd", "mmtad"), "recipes.joint_beams"),
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
    from specbeam.recipes.auto import auto as auto
    from specbeam.recipes.beams import beam_sampling as beam_sampling
    from specbeam.recipes.beams import dsbd as dsbd
    from specbeam.recipes.beams import greedy as greedy
    from specbeam.recipes.beams import sampling as sampling
    from specbeam.recipes.catalogue import methods as methods
    from specbeam.recipes.heads import bita as bita
    from specbeam.recipes.heads import chimera as chimera
    from specbeam.recipes.heads import eagle as eagle
    from specbeam.recipes.heads import eesd as eesd
    from specbeam.recipes.heads import fspad as fspad
    from specbeam.recipes.heads import hidden_transfer as hidden_transfer
    from specbeam.recipes.heads import medusa as medusa
    from specbeam.recipes.heads import mtp as mtp
    from specbeam.recipes.heads import specdiff as specdiff
    from specbeam.recipes.joint_beams import mjsd as mjsd
    from specbeam.recipes.joint_beams import mmtad as mmtad
    from specbeam.recipes.joint_beams import mtad as mtad
    from specbeam.recipes.joint_tokens import mtjd as mtjd
    from specbeam.recipes.lookup import prompt_lookup as prompt_lookup
    from specbeam.recipes.lookup import suffix_match as suffix_match
    from specbeam.recipes.lookup import token_recycling as token_recycling
    from specbeam.recipes.method import Method as Method
    from specbeam.recipes.search import beam_search as beam_search
    from specbeam.recipes.search import speculative_beam_search as speculative_beam_search
    from specbeam.recipes.sequence import block_verification as block_verification
    from specbeam.recipes.sequence import dyspec as dyspec
    from specbeam.recipes.sequence import gsd as gsd
    from specbeam.recipes.sequence import multi_draft as multi_draft
    from specbeam.recipes.sequence import opt_tree as opt_tree
    from specbeam.recipes.sequence import propd as propd
    from specbeam.recipes.sequence import rsd_c as rsd_c
    from specbeam.recipes.sequence import rsd_s as rsd_s
    from specbeam.recipes.sequence import sequoia as sequoia
    from specbeam.recipes.sequence import spechub as spechub
    from specbeam.recipes.sequence import specinfer as specinfer
    from specbeam.recipes.sequence import speculative_sampling as speculative_sampling
    from specbeam.recipes.sequence import traversal as traversal
    from specbeam.records import Beam as Beam
    from specbeam.records import Generation as Generation
    from specbeam.records import Report as Report


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
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
