"""Libraries of compiled functions whose machine code is made, and whose LLVM code is read, only when somebody asks for it.

numba makes machine code of each function that it compiles. But a short function is compiled into its callers as LLVM code,
and most of them are called by nobody else. And a program that finds all code kept calls a few functions, and links nothing.
"""

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary

_WAITING: dict[
    str, Any
] = {}  # environments of functions, by name, that no machine code of this process has room for yet


class LateLibrary(JITCodeLibrary):
    """A library that makes machine code when a pointer to one of its functions is asked for, or the code itself."""

    _shared_module: Any

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.was_kept = False  # whether it was read from disk
        self._is_made = False
        self._bitcode: bytes | None = None  # of a library that was kept, for linking

    @property
    def codegen(self) -> Any:
        """What numba sets the environments of functions by."""
        return _Environments(self._codegen)

    @property
    def is_made(self) -> bool:
        """Whether there is machine code."""
        return self._is_made

    def make(self) -> None:
        """Make the machine code, if there is none yet."""
        self._ensure_finalized()
        if not self._is_made:
            self._is_made = True
            super()._finalize_final_module()
            self._found_environments(one.name for one in self._final_module.global_variables)

    def _found_environments(self, names: Any) -> None:
        for name in names:
            if name in _WAITING:
                self._codegen.set_env(name, _WAITING.pop(name))

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function, for which machine code is made; 0 where this library has none of this name."""
        self._ensure_finalized()
        if not self._is_made:
            try:
                self._final_module.get_function(name)
            except NameError:
                return 0
        self.make()
        return int(super().get_pointer_to_function(name))

    def _get_module_for_linking(self) -> Any:
        if self._bitcode is not None and self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def serialize_using_object_code(self) -> tuple[str, str, Any]:
        """Return what is kept: machine code, if there is any, with the names in it, and LLVM code for callers."""
        self._ensure_finalized()
        if not self._is_made:
            return self.name, "llvm", self._final_module.as_bitcode()
        module = self._get_module_for_linking()
        every = [*module.functions, *module.global_variables]
        names = [one.name for one in every if not one.is_declaration]
        return self.name, "machine", (self._get_compiled_object(), module.as_bitcode(), names)

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        (name, kind, data) = state
        library = cls(codegen, name)
        library.was_kept = True
        if kind == "llvm":
            library._final_module = binding.parse_bitcode(data)
            library._finalize_final_module()
            return library
        (machine_code, library._bitcode, names) = data
        library.enable_object_caching()
        library._set_compiled_object(machine_code)
        library._finalized = True
        library.make()
        codegen._engine._defined_symbols.update(names)
        library._found_environments(names)
        return library


class _Environments:
    """What sets the environment of a function where there is machine code for it, and later where there is none yet."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def set_env(self, name: str, environment: Any) -> None:
        if self._codegen._engine.is_symbol_defined(name):
            self._codegen.set_env(name, environment)
        else:
            _WAITING[name] = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)
