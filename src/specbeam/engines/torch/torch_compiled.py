"""transformers' forward through torch.compile, for models that no specbeam engine runs on a CPU."""

import inspect
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.caches.folders import lend_folder
from specbeam.core.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Maximum number of compiled forms of a forward: for one or several sessions, one or several tokens, ... Passes that
# need further forms run uncompiled.
MOST_FORMS = 64


def torch_compiled(model: "PreTrainedModel") -> Callable[..., Any]:
    """Return the model's forward compiled by torch, for passes of any size.

    The first passes compile it. The code is cached on disk, in `TORCHINDUCTOR_CACHE_DIR` or by default in specbeam's cache.

    Raises `NotSupported` if there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise NotSupported(
            f"compile=True needs a C++ compiler, but {compiler} was not found; install one, set CXX to its name, or leave "
            "compile out"
        )
    lend_folder("TORCHINDUCTOR_CACHE_DIR", "torch")
    known = inspect.signature(torch.compile).parameters
    forms = dict[str, Any]()
    if "recompile_limit" in known:  # older versions of torch have one low limit for all models of a class
        forms = {"recompile_limit": MOST_FORMS, "isolate_recompiles": True}
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=True, **forms)
    return compiled
