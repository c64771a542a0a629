"""Add the pages that are not in docs/ to the documentation site: README, measurements, reference, notebooks.

mkdocs calls the functions whose names begin with `on_`.
"""

import ast
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "specbeam"
sys.path.insert(0, str(ROOT / "tools"))  # mkdocs loads this file by its path

from nouns_and_steps import page as nouns_and_steps  # noqa: E402

# pages outside of docs/: file -> name on the site
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RELEASING.md": "releasing.md",
    "src/specbeam/bundled/README.md": "bundled_pair.md",
    "examples/train_pair/README.md": "training_the_pair.md",
    "examples/text_to_sql/README.md": "text_to_sql.md",
    **{f"measurements/{file.name}": f"measurements/{file.name}" for file in (ROOT / "measurements").iterdir()},
}
PLACE = {name: file for file, name in OUTSIDE.items()}

# pages of the reference: name -> title, first sentence, stub files, and the modules whose names it has (None: all)
REFERENCE: dict[str, tuple[str, str, list[str], tuple[str, ...] | None]] = {
    "api/text.md": (
        "Texts",
        "Load models, decode, and read what comes back.",
        ["__init__.pyi"],
        ("specbeam.models.pair", "specbeam.generation", "specbeam.core.records", "specbeam.core.session"),
    ),
    "api/methods.md": (
        "Methods",
        "Recipes: each returns a method, which `sb.generate` and `sb.stream` take. The law of each is the second paragraph.",
        ["__init__.pyi"],
        ("specbeam.recipes",),
    ),
    "api/parts.md": (
        "Parts",
        "What methods are made of: `sb.draft`, `sb.verify` and `sb.control`.",
        ["draft/__init__.pyi", "verify/__init__.pyi", "control/__init__.pyi"],
        None,
    ),
}
HAND_MADE = {
    "api/hf.md": (
        "Inside transformers",
        "::: specbeam.doors.hf\n    options: {show_root_heading: false, show_root_toc_entry: false, heading_level: 2}\n",
    ),
    "api/records.md": (
        "Records and sessions",
        "What passes between the parts. Shapes and types stand in the signatures.\n\n"
        + "\n".join(
            f"::: {name}\n"
            for name in (
                "specbeam.core.session.Session",
                "specbeam.core.session.Drafter",
                "specbeam.core.session.Rule",
                "specbeam.core.session.Controller",
                "specbeam.core.forest.Forest",
                "specbeam.core.records.Shape",
                "specbeam.core.records.Scored",
                "specbeam.core.records.Ranked",
                "specbeam.core.records.Verdict",
                "specbeam.core.records.Turn",
                "specbeam.core.records.RowCounts",
                "specbeam.core.records.ExtraInputs",
                "specbeam.core.decoder.Decoder",
                "specbeam.doors.plan.CallPlan",
                "specbeam.doors.request.Request",
            )
        ),
    ),
    "api/errors.md": (
        "Errors",
        "All errors that a user can correct are `sb.SpecbeamError`.\n\n"
        "::: specbeam.core.errors\n    options: {show_root_heading: false, show_root_toc_entry: false, heading_level: 2}\n",
    ),
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and fill the folders of the navigation."""
    for file, name in OUTSIDE.items():
        content = (ROOT / file).read_bytes()
        _add(files, config, name, content.decode() if file.endswith(".md") else content)
    for name, (title, sentence, stubs, modules) in REFERENCE.items():
        _add(files, config, name, f"# {title}\n\n{sentence}\n\n{_entries(stubs, modules)}")
    for name, (title, text) in HAND_MADE.items():
        _add(files, config, name, f"# {title}\n\n{text}")
    _add(files, config, "api/command_line.md", command_line_page())
    _add(files, config, "nouns_and_steps.md", nouns_and_steps())
    _add(files, config, "api/options.md", options_page())
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        _add(files, config, f"notebooks/{notebook.stem}.md", as_page(notebook))
    _fill(config.nav, files)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the pages of the site, and replace links to other files of the repository by their text."""
    here = page.file.src_uri
    source = PLACE.get(here, f"docs/{here}")

    def mended(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match.group(0)
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        name = OUTSIDE.get(there) or (there.removeprefix("docs/") if there.startswith("docs/") else None)
        if name is None:
            return text if (ROOT / there).exists() else match.group(0)
        name = re.sub(r"\.ipynb$", ".md", name)
        return f"{picture}[{text}]({posixpath.relpath(name, posixpath.dirname(here) or '.')}{mark}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", mended, markdown)


def _add(files: Files, config: Any, name: str, content: str | bytes) -> None:
    files.append(File.generated(config, name, content=content))


def _entries(stubs: list[str], modules: tuple[str, ...] | None) -> str:
    """Return the entries of all names that stub files import from some modules, under a heading for each module."""
    lines = []
    for stub in stubs:
        last = ""
        for node in ast.parse((SOURCE / stub).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or node.module == "specbeam":
                continue
            if modules is not None and not node.module.startswith(modules):
                continue
            if node.module != last:
                last = node.module
                lines.append(f"## {last.removeprefix('specbeam.')}\n")
            lines += [f"::: {last}.{alias.name}\n" for alias in node.names]
    return "\n".join(lines)


def command_line_page() -> str:
    """Return a page with the arguments and options of each command."""
    import typer.main

    from specbeam.doors.cli.main import app

    root = typer.main.get_command(app)
    lines = ["# The command line", "", "`specbeam COMMAND --help` prints the same.", ""]
    _describe(root, ["specbeam"], lines)
    return "\n".join(lines)


def options_page() -> str:
    """Return a page with the options of generation, and the names that they have at each door."""
    from specbeam.doors.options.table import as_markdown

    return f"""# Options of generation

`sb.generate`, `sb.stream` and `sb.turns_of` take these by name, with the meanings of transformers where it has them. Those
of the third column come from the model's own generation config unless they are given.

{as_markdown()}
"""


def _describe(command: Any, names: list[str], lines: list[str]) -> None:
    if command.hidden:
        return
    if children := getattr(command, "commands", {}):
        for name, child in children.items():
            _describe(child, [*names, name], lines)
        return
    lines += [f"## {' '.join(names)}", "", _plain(command.help or ""), ""]
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        shown = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            shown = f"`{parameter.name.upper()}`"
        default = parameter.default
        said = "" if default in (None, False, (), []) or callable(default) else f"`{_default(default)}`"
        rows.append(f"| {shown} | {_plain(parameter.help or '')} | {said} |")
    lines += ["| option | meaning | default |", "| --- | --- | --- |", *rows, ""]


def _default(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[")  # brackets of a usage are no links


def as_page(notebook: Path) -> str:
    """Return a notebook as a page: its texts, its code, and the outputs that are kept in it."""
    lines = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        lines.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                lines.append("".join(data["image/svg+xml"]))
            elif shown := "".join(output.get("text", data.get("text/plain", []))):
                lines.append(f"```text\n{shown.rstrip()}\n```")
    lines.append(f'<a href="../{notebook.name}" download>This page as a notebook</a>')
    return "\n\n".join(lines)


def _fill(nav: list[Any], files: Files) -> None:
    """Put pages in the place of folders, and pages that stand nowhere into a section at the end."""
    pages = sorted(file.src_uri for file in files.documentation_pages())
    listed = set(_listed(nav))
    _expand(nav, pages, listed)
    left = [page for page in pages if page not in listed]
    if left:
        nav.append({"More": left})


def _listed(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [name for one in inside for name in _listed(one)]


def _expand(entries: list[Any], pages: list[str], listed: set[str]) -> None:
    for place, entry in reversed(list(enumerate(entries))):
        if isinstance(entry, dict):
            for inside in entry.values():
                if isinstance(inside, list):
                    _expand(inside, pages, listed)
        elif entry.endswith("/"):
            found = [page for page in pages if page.startswith(entry) and page not in listed]
            found.sort(key=lambda page: (not page.endswith(("README.md", "index.md")), page))
            listed.update(found)
            entries[place : place + 1] = found
