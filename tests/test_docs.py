"""What the docs show runs."""

import re
from pathlib import Path

import pytest

from specbeam.pair import BUNDLED

DOCS = Path(__file__).parent.parent / "docs"
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
@pytest.mark.parametrize("name", ["the_loop.md"])
def test_snippets_run(name):
    for block in blocks(name):
        exec(compile(block, name, "exec"), {})
