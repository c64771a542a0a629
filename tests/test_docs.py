"""The docs: their snippets run, their links lead somewhere, and they stay short."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tools import notebooks
from tools.nouns_and_steps import page as nouns_and_steps

import specbeam as sb
from specbeam.core.lazy import homes_in
from specbeam.models.pair import BUNDLED

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / "methods").glob("*.md"))
needs_pair = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)


@needs_pair
def test_write_a_method(capsys):
    code = blocks("write_a_method.md")
    method = [line for line in code[0].splitlines() if line.strip()]
    assert len(method) <= 30
    room: dict = {}
    for block in code:
        exec(compile(block, "docs/write_a_method.md", "exec"), room)
    assert "draft layers accepted" in capsys.readouterr().out
    wrong = code[0].replace("Draws([dice.pick(law)], law,", "Draws([dice.pick(law)], q,")
    assert wrong != code[0]
    exec(compile(wrong, "wrong", "exec"), room)
    with pytest.raises(AssertionError):
        exec(compile(code[2], "docs/write_a_method.md", "exec"), room)


@needs_pair
def test_a_proof_by_itself_enumerates_what_is_drafted():
    """In a fresh process, whose first enumeration imports the steps that it needs."""
    code = blocks("write_a_method.md")
    program = f"{code[0]}\n{code[2]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    accepted = [float(one) for one in re.findall(r"([0-9.]+) of 2 draft layers accepted", done.stdout)]
    assert len(accepted) > 1
    assert min(accepted) > 1


GUIDES = sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / "guides").glob("*.md"))


@needs_pair
@pytest.mark.parametrize("name", ["the_loop.md", "life_of_a_request.md", "constrained.md", *GUIDES, *PAGES])
def test_snippets_run(name, turn_by_turn):
    run_snippets(name)


@needs_pair
@pytest.mark.slow
@pytest.mark.parametrize("name", ["life_of_a_request.md", "constrained.md", *GUIDES, *PAGES])
def test_snippets_run_ahead(name):
    run_snippets(name)


def run_snippets(name):
    room: dict = {}  # a page is read from top to bottom
    for block in blocks(name):
        exec(compile(block, name, "exec"), room)


@pytest.mark.parametrize("name", PAGES)
def test_calls_show_the_true_defaults(name):
    shown = re.findall(r"(?:^    .*\n)+", (DOCS / name).read_text(encoding="utf-8").split("**Law.**")[0], re.MULTILINE)
    for call in (node for block in shown for node in ast.walk(ast.parse(textwrap.dedent(block)))):
        if isinstance(call, ast.Call):
            true = inspect.signature(getattr(sb, call.func.attr)).parameters
            for keyword in call.keywords:
                assert ast.literal_eval(keyword.value) == true[keyword.arg].default, ast.unparse(call)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "measurements"])
def test_links_between_pages_lead_somewhere(name):
    place = DOCS.parent / name
    for file in [place] if place.is_file() else place.rglob("*.md"):
        for link in re.findall(r"\]\((?![a-z]+:)([^)#]+)[^)]*\)", file.read_text(encoding="utf-8")):
            assert (file.parent / link).exists(), f"{file}: {link}"


def test_the_systems_page_names_recipes_and_settings_that_exist():
    text = (DOCS / "systems.md").read_text(encoding="utf-8")
    recipes = {recipe.name: getattr(sb, recipe.name) for recipe in sb.methods()}
    named = re.findall(r"`([a-z_]+)(\([^`]*\))?`", text)
    assert len({name for name, _ in named}) > 25
    for name, settings in named:
        make = sb.load if name == "load" else recipes[name]
        call = ast.parse(f"{name}{settings or '()'}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert {keyword.arg for keyword in call.keywords} <= inspect.signature(make).parameters.keys(), name


PAGES_THAT_NAME_TESTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(
        page.relative_to(DOCS.parent).as_posix()
        for folder in ("docs", "measurements")
        for page in (DOCS.parent / folder).rglob("*.md")
    ),
]


def names_of_tests(file):
    """The names of the tests of a file below tests/."""
    tree = ast.parse((DOCS.parent / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_scripts_of_the_systems_page_are_run_with_the_options_that_they_need():
    page = (DOCS / "systems.md").read_text(encoding="utf-8")
    commands = re.findall(r"`([^`]*examples/[^`]*)`", page)
    assert len(commands) >= 3
    for command in commands:
        program, script, *arguments = command.split()
        assert program == "python", command
        assert set(needed_options(DOCS.parent / script)) <= set(arguments), command


def needed_options(script):
    """The options without which a script ends with an error: `required` ones of argparse, and those of typer without default."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            one.arg == "required" and ast.unparse(one.value) == "True" for one in node.keywords
        ):
            yield node.args[0].value
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            yield from ("--" + one.arg for one in node.args.args[: len(node.args.args) - len(node.args.defaults)])


@pytest.mark.parametrize("name", PAGES_THAT_NAME_TESTS)
def test_each_test_that_is_named_exists(name):
    text = (DOCS.parent / name).read_text(encoding="utf-8")
    for file, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", text):
        assert test in names_of_tests(file), f"{name}: {file} has no {test}"
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (DOCS.parent / file).is_file(), f"{name}: there is no {file}"


def test_each_law_of_the_table_of_proofs_names_a_test():
    table = (
        (DOCS / "exactness.md").read_text(encoding="utf-8").split("## Which proof each law has")[1].split("\n## ")[0]
    )
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for row in rows:
        assert "::test_" in row, row


def test_each_method_stands_in_the_table_of_proofs_or_changes_the_law():
    table = (
        (DOCS / "exactness.md").read_text(encoding="utf-8").split("## Which proof each law has")[1].split("\n## ")[0]
    )
    for one in sb.methods():
        assert f"`{one.name}" in table or not one.exact, one.name


@needs_pair
def test_the_snippet_of_the_readme_prints_what_it_says(packed, capsys):
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*?)(?:\.\.\.)?$", code, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(said) == len(printed) == 2
    assert all(line.startswith(start) for line, start in zip(printed, said, strict=True))


@needs_pair
def test_the_start_page_works_as_it_stands():
    """With the bundled pair in the place of the reader's own, and a prompt as transformers takes it."""
    pair = sb.load("bundled")
    room = {
        "model": pair.target_model,
        "draft": pair.draft_model,
        "inputs": pair.tokenizer("Ein Hund läuft.", return_tensors="pt"),
    }
    for block in blocks("start.md"):
        code = block.replace("path/or/hub-id-of-target", str(BUNDLED / "target"))
        exec(compile(code.replace("path/or/hub-id-of-draft", str(BUNDLED / "draft")), "start.md", "exec"), room)
    assert room["out"][0].beams[0].text == room["out"][0].text


@needs_pair
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one.name, marks=[] if one.stem == "dsbd_in_ten_minutes" else pytest.mark.slow)
        for one in notebooks.notebooks()
    ],
)
def test_notebooks_print_what_they_keep(name):
    content, outputs = notebooks.run(notebooks.FOLDER / name)
    kept = [cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code"]
    for before, after in zip(kept, outputs, strict=True):
        assert [one.get("text") for one in before] == [one.get("text") for one in after]
        assert [one.get("data", {}).keys() for one in before] == [one.get("data", {}).keys() for one in after]


def test_each_public_name_has_a_docstring_and_each_recipe_states_its_law():
    for stub in ("__init__.pyi", "core/draft/__init__.pyi", "core/verify/__init__.pyi", "core/control/__init__.pyi"):
        for name, (module, there) in homes_in(Path(sb.__file__).parent / stub).items():
            home = importlib.import_module(module)
            value = getattr(home, there) if hasattr(home, there) else importlib.import_module(f"{module}.{there}")
            assert inspect.getdoc(value), name
            if module.startswith("specbeam.recipes.") and inspect.isfunction(value) and name != "methods":
                assert "Law: " in value.__doc__, name


def test_the_page_of_nouns_and_steps_lists_what_decides_a_turn():
    text = nouns_and_steps()
    assert text.count("\n- **") > 20
    assert text.count("\n- `") > 100
    assert not re.findall(r"^- .*: $", text, re.MULTILINE)


FIGURE = re.compile(r"\d ?(×|x|m?s|tokens/s)?( \(.* to .*\))?\**$")  # the end of a cell of a table of measurements


def test_the_docs_are_short_and_guides_hold_no_tables_of_measurements():
    pages = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    assert sum(len(text.split()) for text in pages.values()) <= 45_000
    for name, text in pages.items():
        if name in ("start.md", "which_method.md") or name.startswith("guides/"):
            cells = [cell.strip() for row in text.splitlines() if row.startswith("| ") for cell in row.split("|")]
            assert not [cell for cell in cells if FIGURE.search(cell)], name
    assert (DOCS.parent / "measurements" / "README.md").is_file()
