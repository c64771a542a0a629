"""A model's own forward by torch.compile: for models that transformers runs, on a CPU."""

import inspect
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from specbeam.errors import NotSupported
from specbeam.measure import kept_figures as measured

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_FORMS = 64  # of one forward: one or several sessions, one or several tokens, rows, ...; beyond, it is run as it is


def torch_compiled(model: "PreTrainedModel") -> Callable[..., Any]:
    """The forward, for passes of any size; compiled at the first ones, and kept on disk for later processes (where
    `TORCHINDUCTOR_CACHE_DIR` says, by default beside what specbeam has measured).

    Raises `NotSupported` where there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise NotSupported(
            f"compile=True needs a C++ compiler, and there is no {compiler} here; install one, name it in the variable CXX, "
            "or leave compile out"
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(measured.folder() / "torch"))
    known = inspect.signature(torch.compile).parameters
    forms = dict[str, Any]()
    if "recompile_limit" in known:  # in older versions of torch it is one for all models of a class, and low
        forms = {"recompile_limit": MOST_FORMS, "isolate_recompiles": True}
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=True, **forms)
    return compiled
