"""Figures of the size and shape of a checkout's source: ``python tools/figures.py [CHECKOUT] [--word top_p]``.

Reads files and imports none of them, so that any commit can be measured with one version of this script. Each function
below states its counting rule.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

PACKAGE = "specbeam"
COMPILER = r"specbeam\.(core\.steps|kernels\.compiling|core\.compiling\.compiler)"  # names over time
COMPILES = re.compile(rf"(?m)^\s*(from {COMPILER} |(import|from) (numba|llvmlite)\b)")
COMPILER_PARTS = ("specbeam.core.steps", "specbeam.kernels.", "specbeam.core.compiling.")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.ClassDef, *FUNCTIONS)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Module:
    """A Python file of the package."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def string_statements(self) -> list[ast.Expr]:
        """Statements that are a string: docstrings of modules, classes, functions and attributes."""
        expressions = [node for node in self.nodes if isinstance(node, ast.Expr)]
        return [
            node for node in expressions if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Names that imports anywhere in the file bind to parts of the package: name -> (module, name there)."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and is_inside(node.module):
                for alias in node.names:
                    found[alias.asname or alias.name] = (str(node.module), alias.name)
        return found


def is_inside(module: str | None) -> bool:
    """Return whether a module's name is the package or a part of it."""
    return f"{module}.".startswith(f"{PACKAGE}.")


class Checkout:
    """The Python files of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "src" / PACKAGE
        self.modules = {}
        for path in sorted(self.source.rglob("*.py")):
            parts = [PACKAGE, *path.relative_to(self.source).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            self.modules[name] = Module(path, name)
        self.homes = {}  # of the names that stubs list: (package, name) -> module
        for stub in self.source.rglob("__init__.pyi"):
            package = ".".join([PACKAGE, *stub.parent.relative_to(self.source).parts])
            for name, (home, _) in Module(stub, package).imports.items():
                self.homes[package, name] = home

    def named(self, last: str) -> Module:
        """Return the one module whose file has a name."""
        return next(module for name, module in self.modules.items() if name.endswith(f".{last}"))

    def module_of(self, module: str, name: str) -> Module | None:
        """Return the file that ``from module import name`` reads: a submodule, the name's home by a stub, or `module`."""
        home = self.homes.get((module, name), module)
        return self.modules.get(f"{module}.{name}") or self.modules.get(home)

    # Figures

    def entries_at_the_top(self) -> int:
        """Files and folders of the package, except for its `__init__` files."""
        names = {path.name for path in self.source.iterdir()}
        return len(names - {"__init__.py", "__init__.pyi", "__pycache__"})

    def closure(self, loop: str) -> tuple[int, int]:
        """Modules, and their lines, that a module imports directly or not by statements at the top of files; and itself."""
        known: set[str] = set()
        waiting = [self.named(loop)]
        while waiting:
            module = waiting.pop()
            if module.name in known:
                continue
            known.add(module.name)
            for node in module.tree.body:
                if isinstance(node, ast.ImportFrom) and is_inside(node.module):
                    found = [self.module_of(str(node.module), alias.name) for alias in node.names]
                    waiting += [other for other in found if other is not None]
        return len(known), sum(len(self.modules[name].lines) for name in known)

    def lines(self) -> int:
        """Lines of all Python files of the package."""
        return sum(len(module.lines) for module in self.modules.values())

    def code_lines(self) -> int:
        """Lines that are not blank, a comment or part of a string that is a statement."""
        return sum(len(code_lines_of(module)) for module in self.modules.values())

    def nodes(self) -> int:
        """Nodes of the syntax trees."""
        return sum(len(module.nodes) for module in self.modules.values())

    def code_nodes(self) -> int:
        """Nodes of the syntax trees without strings that are statements (two nodes each)."""
        return self.nodes() - sum(2 * len(module.string_statements) for module in self.modules.values())

    def long_signatures(self, most: int = 8) -> list[str]:
        """Functions with more than eight named parameters, `self` included."""
        return [f"{module.name}:{node.name}" for module, node in self.functions() if parameters_of(node) > most]

    def conditions_in_conditions(self) -> int:
        """Comprehensions that have a condition and stand inside a conditional expression."""
        found = set()
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, ast.IfExp):
                    found |= {id(inner) for inner in ast.walk(node) if has_condition(inner)}
        return len(found)

    def stays(self, word: str) -> list[str]:
        """Functions and classes at the top of files that hold a word: a name, attribute, parameter, keyword or string."""
        found = []
        for module in self.modules.values():
            definitions = [node for node in module.tree.body if isinstance(node, DEFINITIONS)]
            found += [f"{module.name}:{node.name}" for node in definitions if holds(node, word)]
        return found

    def files_of_step(self, step: str) -> list[str]:
        """Files of the functions that a step reaches by name, directly or not, except for those of the compiler."""
        home = next(module for module in self.modules.values() if definitions_of(module, step))
        reached = set()
        waiting = [(home, step)]
        while waiting:
            module, name = waiting.pop()
            if name in module.imports:
                above, name_there = module.imports[name]
                other = self.module_of(above, name_there)
                if other is not None:
                    waiting.append((other, name_there))
            elif (module.name, name) not in reached and definitions_of(module, name):
                reached.add((module.name, name))
                for function in definitions_of(module, name):
                    waiting += [(module, inner.id) for inner in ast.walk(function) if isinstance(inner, ast.Name)]
        return sorted({name for name, _ in reached if not is_of_compiler(name)})

    def files_of_digest(self, step: str) -> list[str]:
        """Files whose change lets the step be compiled anew: the rule of `code_cache.sources`, for the file of the step."""
        home = next(module for module in self.modules.values() if definitions_of(module, step))
        known = {home.name}
        waiting = [home]
        while waiting:
            for above, name in waiting.pop().imports.values():
                other = self.module_of(above, name)
                if other is None or other.name in known:
                    continue
                if COMPILES.search(other.text):
                    waiting.append(other)
                elif not name.isupper():
                    continue
                known.add(other.name)
        return sorted(known)

    def words_in_docs(self) -> int:
        """Words, separated by spaces, of the Markdown files in ``docs/``."""
        return sum(len(path.read_text(encoding="utf-8").split()) for path in (self.root / "docs").rglob("*.md"))

    def functions(self) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Yield all functions and methods."""
        for module in self.modules.values():
            for node in module.nodes:
                if isinstance(node, FUNCTIONS):
                    yield module, node


def code_lines_of(module: Module) -> list[str]:
    """Return the lines of a file that hold code."""
    in_strings: set[int] = set()
    for node in module.string_statements:
        in_strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = []
    for number, line in enumerate(module.lines, start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#") and number not in in_strings:
            found.append(line)
    return found


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of named parameters of a function."""
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def has_condition(node: ast.AST) -> bool:
    """Return whether a node is a comprehension with a condition."""
    return isinstance(node, COMPREHENSIONS) and any(part.ifs for part in node.generators)


def holds(tree: ast.AST, word: str) -> bool:
    """Return whether a word occurs in a tree."""
    fields = ("id", "attr", "arg", "value")
    return any(getattr(node, field, None) == word for node in ast.walk(tree) for field in fields)


def definitions_of(module: Module, name: str) -> list[ast.FunctionDef]:
    """Return the functions at the top of a file that have a name, or are registered as a form of it by a decorator."""
    found = []
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef):
            calls = [one for one in node.decorator_list if isinstance(one, ast.Call) and one.args]
            registered = [ast.unparse(one.args[0]) for one in calls]
            if node.name == name or name in registered:
                found.append(node)
    return found


def is_of_compiler(name: str) -> bool:
    """Return whether a module belongs to what compiles steps."""
    return name.startswith(COMPILER_PARTS)


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", default=".", type=Path, help="folder that holds src/specbeam")
    parser.add_argument("--word", default="top_p", help="the option whose stays are counted")
    parser.add_argument("--loop", default="decode", help="name of the loop's module")
    parser.add_argument("--step", default="run_turns", help="the compiled step of a run")
    parser.add_argument("--names", action="store_true", help="list functions and files that are counted")
    given = parser.parse_args()

    checkout = Checkout(given.checkout)
    modules, closure = checkout.closure(given.loop)
    long_signatures = checkout.long_signatures()
    stays = checkout.stays(given.word)
    files_of_step = checkout.files_of_step(given.step)
    digest = checkout.files_of_digest(given.step)
    code_nodes = checkout.code_nodes()
    code_lines = checkout.code_lines()

    print(f"entries at the top                    {checkout.entries_at_the_top():8,}")
    print(f"closure of {given.loop}.py, modules          {modules:8,}")
    print(f"closure of {given.loop}.py, lines            {closure:8,}")
    print(f"lines                                 {checkout.lines():8,}")
    print(f"  without docstrings, comments, blank {code_lines:8,}")
    print(f"syntax nodes                          {checkout.nodes():8,}")
    print(f"  without docstrings                  {code_nodes:8,}")
    print(f"syntax nodes per line of code         {checkout.nodes() / code_lines:8.1f}")
    print(f"functions with more than 8 parameters {len(long_signatures):8,}")
    print(f"conditions inside conditions          {checkout.conditions_in_conditions():8,}")
    print(f"stays of {given.word:28} {len(stays):8,}")
    print(f"files in one compiled step            {len(files_of_step):8,}")
    print(f"files whose change compiles it anew   {len(digest):8,}")
    print(f"words in docs                         {checkout.words_in_docs():8,}")
    if given.names:
        groups = {"more than 8 parameters": long_signatures, f"stays of {given.word}": stays, "files": files_of_step}
        for title, names in groups.items():
            print(f"\n{title}:")
            print("\n".join(f"  {name}" for name in names))


if __name__ == "__main__":
    main()
