"""From what texts have to look like to a constraint, with everything that can be wrong found before decoding."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from specbeam.core.constraint import Constrained, Constraint, Form
from specbeam.errors import BadSetting, MissingPackage, NotSupported
from specbeam.grammar.with_llguidance import LLGuidance
from specbeam.grammar.with_xgrammar import XGrammar
from specbeam.options.checks import GRAMMAR_BACKENDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In the order of their names in settings.py.
BACKENDS: dict[str, tuple[Callable[..., Constraint], str]] = dict(
    zip(GRAMMAR_BACKENDS, [(LLGuidance, "specbeam[grammar]"), (XGrammar, "specbeam[xgrammar]")], strict=True)
)


def compiled(
    form: Form, backend: str, tokenizer: "PreTrainedTokenizerBase | None", vocab: int, eos: tuple[int, ...]
) -> Constraint:
    """The constraint of a form, for texts of this tokenizer out of a model with `vocab` logits.

    Raises:
        BadSetting: the form is broken, or no text of these tokens has it.
        MissingPackage: the backend is not installed.
        NotSupported: there is no tokenizer, or one whose tokens do not spell text.
    """
    if tokenizer is None:
        raise NotSupported(f"{form.kind} is about text, and there is no tokenizer; give load(tokenizer=...)")
    if not any(token < vocab for token in eos):
        raise BadSetting(f"{form.kind} says where a text ends, and there is no end token; set eos_token_id")
    make, extra = BACKENDS[backend]
    try:
        constraint = make(form, tokenizer, vocab, eos)
    except ImportError as error:
        raise MissingPackage(f"{form.kind} needs {backend}: pip install '{extra}'") from error
    except (BadSetting, NotSupported):
        raise
    except (TypeError, ValueError) as error:  # of the library, about the form
        raise BadSetting(f"{form.kind} cannot be kept to: {' '.join(str(error).split())}") from error
    if not Constrained(constraint, eos, 0).allowed(np.zeros((1, 0), dtype=np.int64), vocab).any():
        raise BadSetting(f"no token of this vocabulary can begin a text that keeps to the {form.kind}")
    return constraint
