"""A model's own forward through torch.compile, for models that transformers runs on a CPU."""

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

# The most forms of a forward that are compiled: for one or several sessions, one or several tokens, rows, ... Passes that
# would need a further form run the forward uncompiled.
MOST_FORMS = 64


def torch_compiled(model: "PreTrainedModel") -> Callable[..., Any]:
    """Return the model's forward compiled by torch, for passes of any size.

    It is compiled at the first passes. The code is kept on disk for later processes: in `TORCHINDUCTOR_CACHE_DIR`, by
    default a folder in specbeam's cache.

    Raises `NotSupported` if there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise NotSupported(
            f"compile=True needs a C++ compiler, and there is no {compiler} here; install one, name it in the variable CXX, "
            "or leave compile out"
        )
    lend_folder("TORCHINDUCTOR_CACHE_DIR", "torch")
    known = inspect.signature(torch.compile).parameters
    forms = dict[str, Any]()
    if "recompile_limit" in known:  # older versions of torch have one low limit for all models of a class
        forms = {"recompile_limit": MOST_FORMS, "isolate_recompiles": True}
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=True, **forms)
    return compiled
