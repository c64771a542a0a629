"""Libraries of compiled functions that parse LLVM code only for linking, and make machine code only for calls.

A program that finds all its code in the cache calls a few functions by their machine code and links nothing. numba parses
the LLVM code of each nonetheless, to learn the symbols in it; here they are saved with it. And most functions, above all
numba's own, are only inlined into others, but numba makes machine code of these, too (costs: measurements/first_text.md).
"""

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment

from specbeam.core.compiling.counts import with_inlined_counts

_WITH_NAMES = "with names"  # our kind of serialised library, in addition to numba's kinds
_ENVIRONMENT = "_ZN08NumbaEnv"  # prefix of numba's variables with the address of a function's environment


class CachedLibrary(JITCodeLibrary):
    """A library that is saved with the symbols in its machine code, and with whether callers call it by name.

    While a step is compiled, all libraries are of this class, including those of third-party callees, which are then
    optimised like steps. numba caches these itself.
    """

    _final_module: Any
    _shared_module: Any

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.is_called_by_name: bool | None = None  # None: not decided yet, see `compiling.linking`
        self._bitcode: bytes | None = None  # LLVM code read from disk, for linking
        self._has_machine_code = False

    @property
    def codegen(self) -> Any:
        """The code generator, wrapped so that environments are set only in existing machine code."""
        return _Codegen(self)

    def _optimize_functions(self, module: Any) -> None:
        """Skip the optimisation of single functions, which the passes over the whole module repeat."""
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Optimise the whole module once. numba adds a cheaper pass before it, which removes a few more reference counts."""
        (manager, builder) = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        """Prepare for linking. Machine code is made when the address of a function is requested."""
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function's machine code; 0 if this library does not define it."""
        self._ensure_finalized()
        if not self._has_machine_code and self._defines(name):
            self._make_machine_code()
        return int(super().get_pointer_to_function(name))

    def _defines(self, name: str) -> bool:
        """Return whether this library defines a function of this name."""
        try:
            return not self._get_module_for_linking().get_function(name).is_declaration
        except NameError:
            return False

    def _make_machine_code(self) -> None:
        """Make the machine code of all functions of this library."""
        with global_compiler_lock:
            if self._has_machine_code:
                return
            if self._bitcode is None:
                super()._get_module_for_linking()  # keeps the code for linking, with numba's counts
            else:
                self._final_module = binding.parse_bitcode(self._bitcode)
            self._final_module = with_inlined_counts(self._final_module, self._codegen._pass_builder())
            super()._finalize_final_module()
            self._has_machine_code = True
            self._set_environments()

    def _set_environments(self) -> None:
        """Set the environments of all functions in the machine code, including inlined ones."""
        for variable in self._final_module.global_variables:
            name = variable.name
            if name.startswith(_ENVIRONMENT):
                environment = lookup_environment(name)
                if environment is not None:
                    self._codegen.set_env(name, environment)

    def _get_module_for_linking(self) -> Any:
        if self._codegen._library_class is not CachedLibrary:
            self._make_machine_code()  # numba's own libraries do not set the environments of libraries that they link
        if self._bitcode is not None and self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def serialize_using_object_code(self) -> Any:
        """Return name, machine code (empty if the functions are only inlined) and LLVM code, in numba's format."""
        if self.is_called_by_name is False:
            return self.name, "object", (b"", self._get_module_for_linking().as_bitcode())
        self._make_machine_code()
        return super().serialize_using_object_code()

    def with_names(self, state: Any) -> Any:
        """Return the serialised library: machine code and LLVM code, symbols, and whether it is called by name."""
        (name, _, (machine_code, bitcode)) = state
        module = self._get_module_for_linking()
        every = [*module.functions, *module.global_variables]
        names = [one.name for one in every if not one.is_declaration]
        return name, _WITH_NAMES, (machine_code, bitcode, names, self.is_called_by_name)

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        (name, kind, data) = state
        if kind != _WITH_NAMES:  # a callee that numba itself has cached
            library = super()._unserialize(codegen, state)
            library._make_machine_code()
            return library
        (machine_code, bitcode, names, is_called_by_name) = data
        library = cls(codegen, name)
        library._bitcode = bitcode
        library.is_called_by_name = is_called_by_name
        library.enable_object_caching()
        if not machine_code:
            library._finalized = True
            return library
        library._set_compiled_object(machine_code)
        JITCodeLibrary._finalize_final_module(library)
        library._has_machine_code = True
        codegen._engine._defined_symbols.update(names)
        return library


class _Codegen:
    """numba's code generator, which sets environments only in libraries that have machine code."""

    def __init__(self, library: CachedLibrary) -> None:
        self._library = library

    def set_env(self, name: str, environment: Any) -> None:
        """Set the environment of a function if there is machine code; otherwise `_make_machine_code` sets it."""
        if self._library._has_machine_code:
            self._library._codegen.set_env(name, environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library._codegen, name)
