"""Triton's interpreter, which runs kernels for GPUs on a CPU."""

from importlib.util import find_spec
from types import SimpleNamespace


def patch_language_once():
    """Let a kernel patch Triton's language when it begins, and not again in each call of a function inside it.

    Each patch looks at all names of the language, which took a quarter of the tests of kernels.
    """
    if find_spec("triton") is None:
        return
    from triton.language import core
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterError

    patch_modules = interpreter._patch_lang
    both = SimpleNamespace(
        __globals__={"tl": interpreter.tl, "core": core}
    )  # functions of Triton's own use the second one

    def call(self, *args, **named):
        function = self.rewrite()
        try:
            return function(*args, **named)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter._patch_lang = lambda function: patch_modules(both)
    InterpretedFunction.__call__ = call
