"""Libraries of compiled functions: LLVM code is read where it is linked, and machine code is made where it is called.

A program that finds all code kept calls a few functions by their machine code, and links nothing. numba reads the LLVM code
of each nonetheless, to know the names in it; here they are kept beside it. And most functions are only compiled into others,
numba's own above all: numba makes machine code of these, too (measurements/first_text.md says what that takes).
"""

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment

_WITH_NAMES = "with names"  # the kind of what is kept, beside numba's own kinds
_ENVIRONMENT = "_ZN08NumbaEnv"  # numba's names of variables that hold the address of a function's environment begin so


class KeptLibrary(JITCodeLibrary):
    """A library that is kept with the names in its machine code, and with whether its callers call it by name.

    While a step is compiled all libraries are of this class, also those of other people's functions that it calls, which
    are then optimised as steps are. numba keeps and loads these in its own way.
    """

    _final_module: Any
    _shared_module: Any

    def __init__(self, codegen: Any, name: str) -> None:
        super().__init__(codegen, name)
        self.is_called_by_name: bool | None = None  # None: nobody has said it yet, see `kernels.linking`
        self._bitcode: bytes | None = None  # LLVM code that was read from disk, for linking
        self._has_machine_code = False

    @property
    def codegen(self) -> Any:
        """What numba hands the environment of a function to, among others."""
        return _Codegen(self)

    def _optimize_functions(self, module: Any) -> None:
        """Leave single functions as they are: the passes of the whole module do what numba has done here twice."""
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Optimise once, all together; numba does it with less before, and so leaves out a few more counts of references."""
        (manager, builder) = self._codegen._module_pass_manager()
        manager.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        """Be ready to be linked. Machine code is made of it when somebody asks for the address of a function in it."""
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of the machine code of a function; 0 if there is none of this name here."""
        self._ensure_finalized()
        if not self._has_machine_code and self._defines(name):
            self._make_machine_code()
        return int(super().get_pointer_to_function(name))

    def _defines(self, name: str) -> bool:
        """Return whether a function of this name is here."""
        try:
            return not self._get_module_for_linking().get_function(name).is_declaration
        except NameError:
            return False

    def _make_machine_code(self) -> None:
        """Make the machine code of all that is here, or take that which was kept."""
        with global_compiler_lock:
            if self._has_machine_code:
                return
            if self._bitcode is not None:
                self._final_module = binding.parse_bitcode(self._bitcode)
            super()._finalize_final_module()
            self._has_machine_code = True
            self._set_environments()

    def _set_environments(self) -> None:
        """Tell machine code where the environments of its functions are, those that were compiled into it included."""
        for variable in self._final_module.global_variables:
            name = variable.name
            if name.startswith(_ENVIRONMENT):
                environment = lookup_environment(name)
                if environment is not None:
                    self._codegen.set_env(name, environment)

    def _get_module_for_linking(self) -> Any:
        if self._codegen._library_class is not KeptLibrary:
            self._make_machine_code()  # a library of numba's own links this one: nobody else tells it the environments here
        if self._bitcode is not None and self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def serialize_using_object_code(self) -> Any:
        """Return what numba keeps: name, machine code, if it is not only compiled into others, and LLVM code."""
        if self.is_called_by_name is False:
            return self.name, "object", (b"", self._get_module_for_linking().as_bitcode())
        self._make_machine_code()
        return super().serialize_using_object_code()

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
    """numba's code generator, as a library shows it: it hears of environments when there is machine code to tell of them."""

    def __init__(self, library: KeptLibrary) -> None:
        self._library = library

    def set_env(self, name: str, environment: Any) -> None:
        """Tell machine code where the environment of a function is; without any it is told later."""
        if self._library._has_machine_code:
            self._library._codegen.set_env(name, environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library._codegen, name)
