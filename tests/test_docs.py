"""What the docs show runs."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import specbeam as sb
from specbeam.pair import BUNDLED
from tests.support.nouns_and_steps import PAGE, page

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
@pytest.mark.parametrize("name", ["the_loop.md", "constrained.md", *PAGES])
def test_snippets_run(name, turn_by_turn):
    run_snippets(name)


@needs_pair
@pytest.mark.slow
@pytest.mark.parametrize("name", ["constrained.md", *PAGES])
def test_snippets_run_ahead(name):
    run_snippets(name)


def run_snippets(name):
    for block in blocks(name):
        exec(compile(block, name, "exec"), {})


@pytest.mark.parametrize("name", PAGES)
def test_calls_show_the_true_defaults(name):
    shown = re.findall(r"(?:^    .*\n)+", (DOCS / name).read_text(encoding="utf-8").split("**Law.**")[0], re.MULTILINE)
    for call in (node for block in shown for node in ast.walk(ast.parse(textwrap.dedent(block)))):
        if isinstance(call, ast.Call):
            true = inspect.signature(getattr(sb, call.func.attr)).parameters
            for keyword in call.keywords:
                assert ast.literal_eval(keyword.value) == true[keyword.arg].default, ast.unparse(call)


def test_links_between_pages_lead_somewhere():
    for name in PAGES:
        page = DOCS / name
        for link in re.findall(r"\]\(([^)#]+\.md)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{name}: {link}"


PAGES_THAT_NAME_TESTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(page.relative_to(DOCS.parent).as_posix() for page in DOCS.rglob("*.md")),
]


def names_of_tests(file):
    """The names of the tests of a file below tests/."""
    tree = ast.parse((DOCS.parent / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


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


def test_the_page_of_nouns_and_steps_is_that_of_the_source():
    assert PAGE.read_text() == page(), "write it anew: python -m tests.support.nouns_and_steps"
