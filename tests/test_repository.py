"""What the repository shows to people: versions that agree, files that can be read, extras that are used."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import specbeam
from specbeam.core.lazy import homes_in

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
in_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone of the repository")
TOOLS = {  # packages of extras that are run and not imported
    "ruff", "mypy", "pre-commit", "pre-commit-hooks", "pytest-xdist", "pytest-cov", "mkdocs-material", "mkdocstrings"
}  # fmt: skip
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "llama-cpp-python": "llama_cpp"}


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert specbeam.__version__ == citation["version"] == changes[0]
    assert citation["license"] == PROJECT["license"]


@in_clone
def test_files_are_clean(tmp_path):
    """The hooks of .pre-commit-config.yaml for files of all kinds; formatting, lint and types are left to `make lint`."""
    tools = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path),
        "SKIP": "ruff-format,ruff,mypy",
    }
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") >= 7


def test_pages_have_no_place_that_waits_for_a_figure():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "measurements").rglob("*.md")]
    assert len(pages) > 50
    for page in pages:
        waiting = re.findall(r"^[A-Z0-9]+(?:_[A-Z0-9]+)+$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert waiting == [], page


def test_each_package_of_an_extra_is_imported_somewhere():
    imported: set[str] = set()
    for folder in ("src", "tests", "tools", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            imported.update(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
            imported.update(re.findall(r'importorskip\("(\w+)', source))
    for extra, packages in PROJECT["optional-dependencies"].items():
        for package in packages:
            name = re.match(r"[\w-]+", package).group()
            assert name in TOOLS or IMPORTED_AS.get(name, name.replace("-", "_")) in imported, f"{extra}: {name}"


@in_clone
def test_errors_name_the_extra_of_a_missing_package():
    """So that its limits of versions hold, in a clone and with a wheel."""
    extras = PROJECT["optional-dependencies"]
    packages = {re.match(r"[\w-]+", one)[0] for name, many in extras.items() if name != "dev" for one in many}
    for path in (ROOT / "src").rglob("*.py"):
        for command in re.findall(r"pip install ('[^']+'|[\w -]+)", path.read_text(encoding="utf-8")):
            extra = re.fullmatch(r"'specbeam\[([\w,]+)\]'", command)
            names = {*extra[1].split(",")} - extras.keys() if extra else packages & {*re.findall(r"[\w-]+", command)}
            assert not names, f"{path}: {command}"


def test_workflows_and_forms_can_be_read():
    found = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(found) >= 6
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for file in found:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for job in content.get("jobs", {}).values():
            for step in job["steps"]:
                for target in re.findall(r"^make ([\w-]+)", step.get("run", "")):
                    assert target in targets, f"{file.name}: make {target}"


@in_clone
def test_workflows_run_actions_at_fixed_commits():
    """A tag can be moved to other code."""
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for used in re.findall(r"uses: (.+)", file.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", used), f"{file.name}: {used}"


def test_stubs_say_each_name_once_and_lead_to_it():
    for stub in (ROOT / "src" / "specbeam").rglob("*.pyi"):
        names = [alias.asname for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
                 for alias in node.names]  # fmt: skip
        assert names == list(homes_in(stub)), stub


def test_packages_are_installed_by_a_name_that_pip_knows():
    """specbeam is on no index. Pages name extras of a checkout, and errors those of the installed package."""
    found = [file for folder in ("src", "docs", "examples") for file in (ROOT / folder).rglob("*")]
    files = [file for file in found if file.is_file() and file.suffix != ".pyc"]
    texts = {file: file.read_bytes().decode("utf-8", errors="ignore") for file in (*files, ROOT / "README.md")}
    named = []
    for file, text in texts.items():
        is_source = file.suffix == ".py" and "src" in file.parts
        own, other = (r"specbeam", r"\.") if is_source else (r"\.", r"specbeam")
        assert not re.search(rf"pip install ['\"]?{other}(\[|\b)(?!-\*)", text), file
        named += re.findall(rf"pip install '{own}\[([a-z,]+)\]'", text)
    assert len(named) > 20
    assert {extra for one in named for extra in one.split(",")} <= set(PROJECT["optional-dependencies"])


def test_measurements_cite_files_by_their_whole_paths():
    for page in (ROOT / "measurements").glob("*.md"):
        for path in re.findall(r"`([\w./]+/\w+\.py)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).is_file() or path.startswith("lm_eval/"), f"{page.name}: {path}"
