"""The rooms stay where they are: imports go down, the loop fits a screen, functions stay small."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "specbeam"
FLOORS = [
    {"errors", "kernels", "measured"},
    {"dice", "energy", "clock", "option_checks", "generation_config", "truncation", "forest", "constraint"},
    {"laws"},
    {"probs", "limits"},
    {"records"},
    {"choice"},
    {"session"},
    {"lm", "settings", "drawing"},
    {"control", "grammar"},
    {"draft", "verify"},
    {"ahead"},
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
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def files():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specbeam"):
            parts = node.module.split(".")
            yield from parts[1:2] or [alias.name for alias in node.names]


def test_imports_go_down_or_stay_in_their_room():
    for path in files():
        here = room_of(path)
        for there in imported_rooms(ast.parse(path.read_text())):
            if there in FLOOR_OF and there != here:
                assert FLOOR_OF[there] < FLOOR_OF[here], f"{path}: {here} -> {there}"


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
