"""specbeam: decode with beams at the price of one sequence.

>>> import specbeam as sb
>>> pair = sb.load("bundled")
>>> sb.generate(pair, "Ein Hund läuft.", method=sb.dsbd(beams=4), seed=7)[0].text  # doctest: +SKIP
'A dog is running.'
"""

import os

from specbeam.core.lazy import attached

__version__ = "0.1.0"

# libgomp's threads spin while they wait. With the default spin count, one more busy process makes a pass four times slower;
# a hundredth of it keeps nine tenths of the speed on an idle machine. libgomp reads the variable when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "3000"

__getattr__, __dir__, _names = attached(__name__, __file__)  # the names are listed in __init__.pyi
__all__ = ["__version__", *_names]
