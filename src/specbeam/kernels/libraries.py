"""Libraries of compiled functions whose LLVM code is read only where they are linked.

A program that finds all code kept calls a few functions by their machine code, and links nothing. numba reads the LLVM code
of each nonetheless, to know the names in it; here they are kept beside it.
"""

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary

_WITH_NAMES = "with names"  # the kind of what is kept, beside numba's own kinds


class KeptLibrary(JITCodeLibrary):
    """A library that is kept with the names in its machine code, and with whether its callers call it by name.

    While a step is compiled all libraries are of this class, also those of other people's functions that it calls. numba
    keeps and loads these in its own way.
    """

    _shared_module: Any

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.is_called_by_name: bool | None = None  # None: nobody has said it yet, see `kernels.linking`
        self._bitcode: bytes | None = None  # LLVM code that was read from disk, for linking

    def _get_module_for_linking(self) -> Any:
        if self._bitcode is not None and self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def with_names(self, state: Any) -> Any:
        """Return what is kept: numba's machine code and LLVM code, the names in it, and whether callers call it by name."""
        (name, _, (machine_code, bitcode)) = state
        module = self._get_module_for_linking()
        every = [*module.functions, *module.global_variables]
        names = [one.name for one in every if not one.is_declaration]
        return name, _WITH_NAMES, (machine_code, bitcode, names, self.is_called_by_name)

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        (name, kind, data) = state
        if kind != _WITH_NAMES:  # of a function that a step calls and numba itself has kept
            return super()._unserialize(codegen, state)
        (machine_code, bitcode, names, is_called_by_name) = data
        library = cls(codegen, name)
        library._bitcode = bitcode
        library.is_called_by_name = is_called_by_name
        library.enable_object_caching()
        library._set_compiled_object(machine_code)
        library._finalize_final_module()
        codegen._engine._defined_symbols.update(names)
        return library
