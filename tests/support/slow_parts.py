"""Methods whose parts take a while to make, as on a machine that compiles them."""

import time

import specbeam as sb
from specbeam.doors import compilation_watch


def compile_slowly(patch, seconds=0.4):
    """Let the parts of each method be made as slowly as if they were compiled, and let a server say so almost at once."""
    patch.setattr("specbeam.apps.serve.asking.COMPILING_S", 0.05)
    watch = compilation_watch()
    kind = type(sb.sampling())
    make = kind.parts

    def slow(self, *given):
        watch.note(True)
        time.sleep(seconds)
        watch.note(False)
        return make(self, *given)

    patch.setattr(kind, "parts", slow)
