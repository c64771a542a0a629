"""The rooms stay where they are: imports go down, the loop fits a screen, functions stay small."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "specbeam"
FLOORS = [
    {"errors", "kernels", "clock", "constraint", "energy", "audit"},
    {"core", "measured", "option_checks", "generation_config"},
    {"laws"},
    {"records"},
    {"session"},
    {"lm", "settings", "drawing"},
    {"control", "grammar"},
    {"draft"},
    {"verify"},
    {"runs"},
    {"decode"},
    {"tune"},
    {"recipes"},
    {"pair"},
    {"fastest", "request"},
    {"generation"},
    {"hf", "evaluate"},
    {"bench"},
    {"hf_repository"},
    {"cli"},
    {"__main__"},
]
INSIDE_LM = [
    {"kv", "llama", "base"},
    {"padded", "idle", "own", "table"},
    {"compiled", "gpu"},
    {"any_lane"},
    {"huggingface"},
    {"context", "early_layers"},
]


def floor_of(floors):
    return {room: number for number, rooms in enumerate(floors) for room in rooms}


FLOOR_OF, FLOOR_IN_LM = floor_of(FLOORS), floor_of(INSIDE_LM)


def files():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def room_of(path, above=SOURCE):
    return path.relative_to(above).parts[0].removesuffix(".py")


def imported_rooms(tree, above="specbeam"):
    depth = above.count(".") + 1
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{above}."):
            parts = node.module.split(".")
            yield from parts[depth : depth + 1] or [alias.name for alias in node.names]


def check_imports_go_down(paths, floors, above, module):
    for path in paths:
        here = room_of(path, above)
        for there in imported_rooms(ast.parse(path.read_text()), module):
            if there in floors and there != here:
                assert floors[there] < floors[here], f"{path}: {here} -> {there}"


def test_imports_go_down_or_stay_in_their_room():
    check_imports_go_down(files(), FLOOR_OF, SOURCE, "specbeam")


def test_imports_go_down_inside_lm():
    inside = [path for path in (SOURCE / "lm").rglob("*.py") if path.parent != SOURCE / "lm" or path.stem != "__init__"]
    assert {room_of(path, SOURCE / "lm") for path in inside} == set(FLOOR_IN_LM)
    check_imports_go_down(inside, FLOOR_IN_LM, SOURCE / "lm", "specbeam.lm")


def test_every_file_has_a_floor():
    assert {room_of(path) for path in files()} <= set(FLOOR_OF)


def test_the_loop_fits_a_screen():
    assert len((SOURCE / "decode.py").read_text().splitlines()) <= 70


def test_functions_are_short():
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                documented = len((ast.get_docstring(node) or "").splitlines())
                lines = node.end_lineno - node.lineno + 1 - documented
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_public_names_exist():
    import specbeam

    for name in specbeam.__all__:
        assert getattr(specbeam, name) is not None
