"""Write the list of the forms of steps that a first text needs: `make first-text`, when a slow test says so.

Compiles all of them, which takes a minute.
"""

import atexit
import os
import shutil
import tempfile

os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="specbeam-first-text-")
os.environ["SPECBEAM_CACHE"] = os.environ["NUMBA_CACHE_DIR"]  # so nothing is known of the costs of the pair, either
os.environ["SPECBEAM_COMPILERS"] = "1"

from typing import Any

from numba.core.dispatcher import Dispatcher

import specbeam as sb
from specbeam.core.compiling.code_cache import CodeCache
from specbeam.core.compiling.form_list import PLACE, StepForm, text_of
from specbeam.core.compiling.registered import modules_of_package


class Recorder:
    """What is compiled, and what each form calls."""

    def __init__(self) -> None:
        self.forms: list[StepForm] = []
        self.numbers: dict[Any, int] = {}  # of the forms, by function and kinds
        self.needs: list[list[int]] = []  # of the forms that are being compiled, the outermost first

    def compile(self, dispatcher: Any, kinds: Any) -> Any:
        """Compile a form, in place of numba's method."""
        kept = isinstance(dispatcher._cache, CodeCache)
        if not kept:
            return COMPILE(dispatcher, kinds)
        key = (dispatcher, tuple(kinds))
        if key not in self.numbers:
            self.needs.append([])
            try:
                found = COMPILE(dispatcher, kinds)
            finally:
                needs = sorted(set(self.needs.pop()))
            source = dispatcher.py_func
            name = source.__qualname__.removeprefix("call_")
            form = StepForm(source.__module__, name, name != source.__qualname__, tuple(kinds), needs)
            assert form.function().py_func is source, form
            self.numbers[key] = len(self.forms)
            self.forms.append(form)
        else:
            found = COMPILE(dispatcher, kinds)
        if self.needs:
            self.needs[-1].append(self.numbers[key])
        return found


atexit.register(shutil.rmtree, os.environ["NUMBA_CACHE_DIR"], ignore_errors=True)
COMPILE = Dispatcher.compile
recorder = Recorder()
Dispatcher.compile = lambda dispatcher, kinds: recorder.compile(dispatcher, kinds)
pair = sb.load("bundled")
print(sb.generate(pair, "Die Katze schläft.", seed=1)[0].text)
PLACE.write_text(text_of(modules_of_package("specbeam"), recorder.forms))
print(f"{PLACE}: {len(recorder.forms)} forms")
