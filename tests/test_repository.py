"""What the repository says about itself is true: versions agree, pages are complete, nothing private slipped in."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast import errors
from tests import warm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Put together here so that this file does not hold them: folders of build machines, and hosts of package registries.
FOLDERS = ("work", "farm", "root")
HOSTS = (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"), ("debian", "org"))
PRIVATE = [f"/{name}/" for name in FOLDERS] + [".".join(parts) for parts in HOSTS]

VERBS = ("agents", "log", "show", "diff", "branch", "tag", "rollback", "undo", "verify", "doctor", "demo")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def repository_files():
    """What git tracks or would track; without git, everything but what make and the tools leave behind."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = {ROOT / name for name in listed.stdout.split("\0") if name}
    else:
        paths = set()
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [name for name in folders if name == ".ci" or not name.startswith((".", "__pycache__"))]
            paths |= {Path(folder, name) for name in names}
    return sorted(path for path in paths if path.is_file())


def test_the_format_has_one_version_everywhere():
    from holdfast.store.tables import FORMAT_VERSION

    page = read("docs/format.md")
    assert re.findall(r"^# .*\bversion (\d+)$", page, re.MULTILINE) == [str(FORMAT_VERSION)]
    assert re.findall(r"`FORMAT_VERSION` is (\d+)", page) == [str(FORMAT_VERSION)]


def test_the_package_has_one_version_everywhere():
    import holdfast

    newest = re.search(r"^## (\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]
    assert importlib.metadata.version("holdfast") == PROJECT["version"]
    assert holdfast.__version__ == PROJECT["version"]


def test_no_file_tells_where_it_was_made():
    told = []
    for path in repository_files():
        content = path.read_bytes()
        told += [f"{path.relative_to(ROOT)}: {word}" for word in PRIVATE if word.encode() in content]
    assert not told


def test_python_without_asserts_does_the_same():
    """ruff refuses asserts in src (S101); here nobody has made an exception."""
    allowed = [path for path in [*(ROOT / "src").rglob("*.py")] if "S101" in path.read_text(encoding="utf-8")]
    assert not allowed
    assert "S101" not in read("pyproject.toml")


def test_every_verb_has_help_and_a_place_in_the_documentation():
    written = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [verb for verb in VERBS if not re.search(rf"\bholdfast {verb}\b", written)]
    program = Path(sys.executable).with_name("holdfast")
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert not [verb for verb in VERBS if not re.search(rf"\b{verb}\b", shown)]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    assert verb in run_holdfast(verb, "--help")


def run_holdfast(*arguments):
    words = [sys.executable, "-m", "holdfast", *arguments]
    done = warm.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_errors(base=errors.HoldfastError):
    """Those that people are told of. One without a kind of its own is a detail of its room, and known by its base."""
    if "kind" in vars(base):
        yield base
    for child in base.__subclasses__():
        # Tests define some, too, which live until they are collected.
        if child.__module__.startswith("holdfast."):
            yield from all_errors(child)


def test_every_error_stands_in_the_tree_of_the_module_docstring():
    tree = re.findall(r"^ {4,}(\w+)", errors.__doc__, re.MULTILINE)
    assert sorted(tree) == sorted({error.__name__ for error in all_errors() if error.__module__ == errors.__name__})


def test_every_error_has_a_kind_of_its_own():
    kinds = [error.kind for error in all_errors()]
    assert len(kinds) == len(set(kinds))


@pytest.mark.skipif(not (ROOT / "docs" / "errors.md").is_file(), reason="there is no page on errors")
def test_every_error_is_documented():
    words = set(re.findall(r"\w+", read("docs/errors.md")))
    assert not [error.__name__ for error in all_errors() if error.__name__ not in words]


def test_continuous_integration_runs_make_check_and_that_runs_the_readmes_test_command():
    assert read(".ci/run").rstrip().endswith("make check")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (needs,) = re.findall(r"^check:([^#\n]*)", read("Makefile"), re.MULTILINE)
    assert {"static", "test", "versions"} <= set(needs.split())
    (recipe,) = re.findall(r"^static:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    begun = {name for names in re.findall(r"\$\(MAKE\)([a-z ]+)", recipe) for name in names.split()}
    assert begun == {"lint", "types", "rooms", "docs"}


def test_every_target_of_make_is_explained():
    makefile = read("Makefile")
    (phony,) = re.findall(r"^\.PHONY:(.*)", makefile, re.MULTILINE)
    explained = re.findall(r"^([a-z]+):.*## \S", makefile, re.MULTILINE)
    assert sorted(phony.split()) == sorted(explained)


def test_the_wheel_carries_the_examples_that_the_demo_runs():
    build = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {"examples": "holdfast/examples"}
    assert "/examples" in build["sdist"]["include"]
    assert (ROOT / "examples" / "demo.py").is_file()


def test_the_relative_links_of_every_page_lead_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        targets = re.findall(r"\]\((?![a-z]+:)([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        broken += [f"{page.relative_to(ROOT)}: {name}" for name in targets if not (page.parent / name).exists()]
    assert not broken


def test_the_architecture_names_every_room_and_only_modules_that_exist():
    page, source = read("docs/architecture.md"), ROOT / "src" / "holdfast"
    rooms = {one.name for one in source.iterdir() if (one / "__init__.py").is_file()} | {"errors", "text"}
    (table,) = re.findall(r"^## The rooms\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == rooms
    named = {f"{room}/{module}.py" for room, module in re.findall(r"`(\w+)/(\w+)\.py`", page)}
    for title, table in re.findall(r"^### The modules of (?:the )?(\w+)\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL):
        (room,) = {title, title.removesuffix("s")} & rooms
        cells = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        named |= {f"{room}/{module}.py" for cell in cells for module in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 40
    assert sorted(one for one in named if not (source / one).is_file()) == []


def test_the_site_has_every_page_and_the_reference_every_public_name():
    site = set(re.findall(r"^\s*- ([\w/-]+\.md)$", read("mkdocs.yml"), re.MULTILINE))
    assert site == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    shown = re.findall(r"(?:^::: |heading: )holdfast\.(\w+)(?=$|,)", read("docs/reference.md"), re.MULTILINE)
    own = {name for name in holdfast.__all__ if name not in vars(errors)}
    assert own <= set(shown) <= set(holdfast.__all__)
