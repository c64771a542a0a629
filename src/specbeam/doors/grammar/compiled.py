"""Compilation of a form (JSON schema, regular expression or grammar) to a constraint, with all errors before decoding."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from specbeam.core.constraint import Constrained, Constraint, Form
from specbeam.doors.grammar.spelling import in_lines
from specbeam.doors.grammar.with_llguidance import LLGuidance
from specbeam.doors.grammar.with_xgrammar import XGrammar
from specbeam.doors.options.checks import GRAMMAR_BACKENDS
from specbeam.errors import BadSetting, MissingPackage, NotSupported, warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# constraint class by package name
BACKENDS: dict[str, Callable[..., Constraint]] = dict(zip(GRAMMAR_BACKENDS, [LLGuidance, XGrammar], strict=True))

KEPT = 32  # compiled forms cached per tokenizer; the least recently used are dropped
_COMPILED: "weakref.WeakKeyDictionary[Any, OrderedDict[tuple[Any, ...], Constraint]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def compiled(
    form: Form, backend: str, tokenizer: "PreTrainedTokenizerBase | None", vocab: int, eos: tuple[int, ...]
) -> Constraint:
    """Return the constraint that enforces a form on the output of a model with `vocab` logits and this tokenizer.

    The last `KEPT` forms per tokenizer are cached, because compiling a large schema takes longer than a short text.

    Args:
        form: the form of texts.
        backend: "llguidance" or "xgrammar".
        eos: the end tokens.

    Raises:
        BadSetting: the form is invalid, no text of these tokens matches it, or there is no end token.
        MissingPackage: the backend is not installed.
        NotSupported: there is no tokenizer, or its tokens do not determine the text.
    """
    if tokenizer is None:
        raise NotSupported(f"{form.kind} needs a tokenizer; give load(tokenizer=...)")
    if not any(token < vocab for token in eos):
        raise BadSetting(f"{form.kind} needs an end token, and there is none; set eos_token_id")
    key = (form, backend, len(tokenizer), tokenizer.eos_token_id, tuple(tokenizer.all_special_ids), vocab, eos)
    with _LOCK:
        constraint = _COMPILED.setdefault(tokenizer, OrderedDict()).get(key)
    if constraint is None:  # compile without the lock, which other threads need
        constraint = _compile(form, backend, tokenizer, vocab, eos)
    with _LOCK:
        known = _COMPILED[tokenizer]
        known[key] = constraint
        known.move_to_end(key)
        while len(known) > KEPT:
            known.popitem(last=False)
    for complaint in getattr(constraint, "complaints", ()):
        warn(complaint)
    return constraint


def _compile(
    form: Form, backend: str, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]
) -> Constraint:
    """Return a new constraint; see `compiled`."""
    try:
        constraint = BACKENDS[backend](form, tokenizer, vocab, eos)
    except ImportError as error:
        extra = "grammar" if backend == "llguidance" else backend
        raise MissingPackage(f"{form.kind} needs {backend}: pip install 'specbeam[{extra}]'") from error
    except (BadSetting, NotSupported):
        raise
    except (TypeError, ValueError) as error:  # raised by the library for an invalid form
        raise BadSetting(f"{form.kind} cannot be enforced:{in_lines(str(error))}") from error
    if not Constrained(constraint, eos, 0).allowed(np.zeros((1, 0), dtype=np.int64), vocab).any():
        raise BadSetting(f"no token of this vocabulary can begin a text of the {form.kind}")
    return constraint
