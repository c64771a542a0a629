"""The rooms stay where they are, and each noun and verb has one place: rules that a reader can rely on."""

import ast
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from specbeam.core.lazy import homes_in

SOURCE = Path(__file__).parent.parent / "src" / "specbeam"
ROOMS_INSIDE = ("core", "engines", "models", "doors", "apps", "lab")  # packages whose parts have floors of their own
FLOORS = [
    {
        "core.constraint",
        "core.errors",
        "core.garbage",
        "core.heap",
        "core.machine",
        "core.names",
        "core.whole_files",
        "doors.energy",
        "doors.plain",
        "engines.arrays",
        "engines.cache_names",
        "engines.blocks",
        "engines.mapped",
        "engines.packed",
        "engines.shared_tokens",
        "lab.words",
        "models.clasp",
        "models.stand_ins",
    },
    {
        "core.arguments",
        "core.caches",
        "core.guard",
        "core.lazy",
        "core.threads",
        "engines.choices",
        "engines.dual_binary",
        "engines.families",
        "engines.source",
        "errors",
        "models.checkpoints",
        "models.sublayers",
    },
    {"core.compiling", "core.measure", "doors.chats", "doors.places", "engines.eligibility"},
    {
        "core.steps",
        "doors.inputs",
        "doors.method_names",
        "doors.model_files",
        "doors.progress",
        "doors.prompts",
        "models.skip_search",
    },
    {"core.callbacks", "core.cycles", "core.dice", "core.early_end", "core.items", "core.noise", "core.ranked"},
    {"core.forest", "core.passes", "core.scored_by_call", "doors.catalogue"},
    {"core.beams", "models.made_up"},
    {"core.laws", "core.limits"},
    {"core.audit", "doors.options"},
    {"core.audits", "core.records", "doors.grammar"},
    {"core.answers", "core.session", "doors.growing_text", "doors.render", "doors.tables"},
    {"core.agenda", "core.control", "core.lm", "doors.trace", "engines.kv"},
    {"core.draft", "engines.torch", "models.table"},
    {"core.verify", "engines.cpu"},
    {
        "core.scoring",
        "core.turn_steps",
        "engines.by_layer",
        "engines.gpu",
        "engines.speeds",
        "models.adapters",
        "models.mapped_files",
        "models.quantised",
    },
    {"core.rows_in_python", "core.run_steps", "models.engines", "models.rounded_files"},
    {"core.together_steps", "models.gguf_files"},
    {"models.huggingface"},
    {
        "core.by_address",
        "models.early_layers",
        "models.encoder_decoder",
        "models.memory",
        "models.skipping",
        "models.spread",
    },
    {"core.runs", "models.heads", "models.live_layers"},
    {"core.turn", "models.loading"},
    {"models.chains"},
    {"core.decoder", "models.pair"},
    {"core.decode", "doors.speech_tokens"},
    {"doors.sources", "recipes"},
    {
        "apps.jobs",
        "apps.search",
        "apps.speech",
        "doors.fastest",
        "doors.method_text",
        "doors.with_memory",
        "lab.evaluate",
        "lab.train",
    },
    {"apps.serve", "doors.usual", "lab.bench", "lab.fuzz"},
    {"apps.ray", "apps.vllm", "doors.plan"},
    {"doors.request"},
    {"doors.best", "generation"},
    {"doors.cli", "doors.hf"},
    {"__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def files():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def room_of(path):
    """The room of a file: a part of one of `ROOMS_INSIDE`, or what stands at the top."""
    return room_of_module(".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"))


def room_of_module(module):
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in ROOMS_INSIDE else 1])


def imported_rooms(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("specbeam."):
            module = node.module.removeprefix("specbeam").removeprefix(".")
            whole = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (room_of_module(name) for name in whole)


@cache
def tree_of(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def test_imports_go_down_or_stay_in_their_room():
    for path in files():
        here = room_of(path)
        for there in imported_rooms(tree_of(path)):
            if here in FLOOR_OF and there in FLOOR_OF and there != here:
                assert FLOOR_OF[there] < FLOOR_OF[here], f"{path}: {here} -> {there}"


IN_CORE = {"numpy", "numba", "llvmlite", "torch", "jaxtyping", "platformdirs", "specbeam"}  # besides Python's own


def test_the_core_is_closed():
    """It imports nothing of specbeam outside itself."""
    for path in (SOURCE / "core").rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom) and node.module != "specbeam":
                inside = node.module.startswith("specbeam.core.")
                assert inside or node.module.split(".")[0] in {*IN_CORE, *sys.stdlib_module_names} - {"specbeam"}, path


@pytest.fixture(scope="module")
def figures():
    """What `python tools/figures.py` prints, by name."""
    root = SOURCE.parent.parent
    printed = subprocess.run(
        [sys.executable, root / "tools" / "figures.py", root], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.rsplit(maxsplit=1) for line in printed.splitlines()]
    return {name.strip(): float(number.replace(",", "")) for name, number in rows}


@pytest.mark.parametrize(
    ("figure", "most"),
    [
        ("entries at the top", 12),
        ("closure of decode.py, lines", 14_150),  # what the loop needs; at most 18,000
        ("lines", 105_560),
        ("syntax nodes", 743_800),
        ("syntax nodes per line of code", 10.5),
        ("functions with more than 8 parameters", 30),
        ("conditions inside conditions", 0),
        ("stays of top_p", 8),
        ("files in one compiled step", 15),
        ("words in docs", 45_000),
    ],
)
def test_the_source_stays_within_its_figures(figures, figure, most):
    """Who needs more of one figure takes it from elsewhere, or says in the commit why it grew."""
    assert figures[figure] <= most


def test_kinds_register_their_steps_beside_their_records():
    """No table of types says in another file what is done for each kind."""
    for path in (SOURCE / "core").rglob("*.py"):
        tables = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.AnnAssign)]
        stated = [ast.unparse(node.annotation) for node in tables]
        assert path.name in ("steps.py", "registered.py") or not any("dict[type" in one for one in stated), path


def test_there_are_at_most_twelve_entries_at_the_top():
    entries = {path.stem for path in SOURCE.iterdir() if path.suffix in ("", ".py")} - {"__pycache__"}
    assert len(entries) <= 12


def test_every_file_has_a_floor():
    assert {room_of(path) for path in files()} <= {*FLOOR_OF, *ROOMS_INSIDE}


def test_applications_and_the_lab_import_public_names_only():
    """Names of packages that list them in a stub, errors, and what is their own."""
    for path in [*SOURCE.glob("apps/**/*.py"), *SOURCE.glob("lab/**/*.py")]:
        own = f"specbeam.{path.relative_to(SOURCE).parts[0]}."
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("specbeam."):
                is_allowed = node.module == "specbeam.errors" or node.module.startswith(own)
                names = {alias.name for alias in node.names}
                assert is_allowed or names <= public_names(node.module), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("specbeam.") for alias in node.names), f"{path}:{node.lineno}"


@cache
def public_names(package):
    """The names that the stub of a package lists; none without a stub."""
    stub = SOURCE.joinpath(*package.split(".")[1:], "__init__.pyi")
    return {*homes_in(stub), "__version__"} if stub.exists() else set()


NOT_DECIDING = {
    "core.compiling",
    "core.threads",
    "core.caches",
    "core.measure",
    "core.runs",
    "core.turn",
    "core.decode",
    "core.decoder",
}
MOST_NODES = 1500  # of the syntax tree of a function: it may be as long as its thought
STEPS = {"step", "open_step", "compiled", "compiled_loosely", "compiled_without_counts"}
TURN = tuple(room for room in FLOOR_OF if room.startswith("core.") and room not in NOT_DECIDING)
CHANCE = {"default_rng", "randbits", "token_bytes", "randn", "rand", "multinomial"}


def trees(*rooms):
    """The syntax tree of each file, of some rooms or of all."""
    for path in files():
        if not rooms or room_of(path) in rooms:
            yield path, tree_of(path)


def steps_of(tree):
    """The steps in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
            if names & STEPS:
                yield node


def test_each_noun_has_one_type():
    """No class has a twin of the same name; no file is another one made fast."""
    places = {}
    for path, tree in trees():
        assert not path.stem.endswith("_fast")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.name)
    twins = {name: found for name, found in places.items() if len(found) > 1}
    assert twins == {}


def test_each_verb_has_one_body():
    """No step has a twin of the same name, in Python or compiled; nothing is asked for by what loops can do."""
    places = {}
    for path, tree in trees(*TURN, "core.runs"):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    for path in files():
        assert "for_loops" not in path.read_text(), path


def test_a_step_is_a_function_of_arrays_and_shows_its_source():
    for path, tree in trees(*TURN, "core.runs"):
        for node in steps_of(tree):
            given = " ".join(ast.unparse(one.annotation) for one in node.args.args if one.annotation)
            assert "Session" not in given, f"{path.name}: {node.name}"
            assert "Tensor" not in given, f"{path.name}: {node.name}"
    from specbeam.core.verify.beams import judge

    assert getattr(judge, "py_func", judge).__name__ == "judge"


def test_chance_comes_from_the_dice_alone():
    """Where turns are decided; the noise of `control.races` is a constant, and Thompson sampling chooses lengths only."""
    for path, tree in trees(*TURN, "core.runs", "core.decode"):
        if path.name in ("dice.py", "races.py", "thompson.py"):
            continue
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Attribute) and node.attr in CHANCE), f"{path.name}:{node.lineno}"


def test_python_does_not_choose_how_to_draw():
    """What accepts, refuses or draws in its stead is a step: outside of steps nobody tosses a coin."""
    for path, tree in trees("core.verify", "core.runs"):
        inside = {id(node) for step in steps_of(tree) for node in ast.walk(step)}
        for node in ast.walk(tree):
            tosses = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("flip", "pick")
            assert not tosses or id(node) in inside, f"{path.name}:{node.lineno}"


def test_what_compiles_stays_in_its_rooms():
    for path in files():
        named = {"numba", "llvmlite", "triton"} & set(imported_packages(path))
        at_home = room_of(path) == "core.compiling" or path.parts[-3:-1] in (("engines", "cpu"), ("engines", "gpu"))
        assert not named or at_home or path.parts[-2:] in (("core", "steps.py"), ("core", "cycles.py")), path


def imported_packages(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_what_changes_its_arguments_is_named_like_an_order():
    """`sort` changes, `sorted` returns: what returns nothing is no participle."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(0)) == "None":
                last = node.name.split("_")[0]
                assert not last.endswith("ed") or last in ("speed", "need", "feed"), f"{path.name}: {node.name}"


def test_functions_hold_one_thought():
    """Counted in nodes of the syntax tree: lines are free."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                size = sum(1 for _ in ast.walk(node))
                assert size <= MOST_NODES, f"{path.name}: {node.name} has {size} nodes"
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                is_one = not isinstance(node.targets[0], ast.Tuple)
                assert is_one or _swaps(node), f"{path.name}:{node.lineno}: one assignment sets several values"


def _swaps(node):
    """Whether an assignment of several values reads one that it sets, or spreads one over several names."""
    if any(isinstance(value, ast.Starred) for value in node.value.elts):
        return True
    read = {ast.unparse(one) for value in node.value.elts for one in ast.walk(value)}
    return any(ast.unparse(target) in read for target in node.targets[0].elts)


def test_public_names_exist():
    import specbeam

    for name in specbeam.__all__:
        assert getattr(specbeam, name) is not None
    for stub in SOURCE.glob("*/**/__init__.pyi"):
        package = importlib.import_module(".".join(("specbeam", *stub.parent.relative_to(SOURCE).parts)))
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert not (stub.parent / f"{name}.py").exists(), f"{package.__name__}.{name} is a module, too"
    with pytest.raises(AttributeError, match="has no attribute 'Magic'"):
        specbeam.core.draft.Magic  # noqa: B018


def test_a_recipe_of_the_catalogue_is_a_public_name():
    import specbeam
    from specbeam.recipes.catalogue import RECIPES

    assert {recipe.__name__ for recipe in RECIPES} <= set(specbeam.__all__)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_do_not_spin_for_long_unless_you_say_so(given, expected):
    """The number is set before torch is imported, which reads it."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    code = "import specbeam, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=others | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, "False"]
