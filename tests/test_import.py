"""Importing holdfast is cheap and harmless, and its public names are the documented ones."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import app
from holdfast.run.tools import TOOLS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Packages that only some programs need, and parts of the standard library that are slow to load.
OPTIONAL = {
    "attr", "attrs", "cryptography", "cyclopts", "httpx", "httpx2", "hypothesis", "jinja2", "langgraph", "matplotlib",
    "numpy", "obstore", "opentelemetry", "psycopg", "pydantic", "rich", "starlette", "uvicorn",
}  # fmt: skip
HEAVY = {
    "asyncio", "bz2", "concurrent", "difflib", "doctest", "email", "hashlib", "hmac", "html", "http",
    "importlib.metadata", "lzma", "multiprocessing", "pdb", "shutil", "socket", "sqlite3", "subprocess", "tempfile",
    "unittest",
}  # fmt: skip
# Rooms and modules for what most programs do not do.
SELDOM = {
    "holdfast.agent.arrival", "holdfast.agent.bundle", "holdfast.agent.collection",
    "holdfast.agent.evidence", "holdfast.agent.keys", "holdfast.agent.move", "holdfast.agent.policy",
    "holdfast.agent.recovery",
    "holdfast.agent.removal", "holdfast.agent.repair", "holdfast.agent.retention", "holdfast.agent.tiering",
    "holdfast.agent.transfer", "holdfast.agent.verify", "holdfast.cli", "holdfast.crash",
    "holdfast.store.connection", "holdfast.store.postgres", "holdfast.web",
}  # fmt: skip


@pytest.mark.parametrize("use", ["0", "holdfast.open", "holdfast.open('store').agent('a').checkpoint()"])
def test_importing_and_using_loads_no_optional_package_and_nothing_heavy(tmp_path, use):
    code = f"import holdfast, io, json, sys; sys.stderr = io.StringIO(); {use}; print(json.dumps(list(sys.modules)))"
    loaded = json.loads(run_fresh(code, tmp_path))
    bare = json.loads(run_fresh("import json, sys; print(json.dumps(list(sys.modules)))", tmp_path))
    added = set(loaded) - set(bare)
    assert "holdfast" in added
    assert all(importlib.util.find_spec(name) for name in SELDOM)
    assert not added & (HEAVY | SELDOM)
    assert not {name for name in added if name.partition(".")[0] in OPTIONAL}


def test_a_command_loads_no_other_verb(tmp_path):
    code = (
        "import sys; from holdfast.cli import main\n"
        "assert main(['--store', 'none', 'log', 'a'])\n"
        "print(*(name for name in sys.modules if name.startswith('holdfast.cli.')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = {name.removeprefix("holdfast.cli.") for name in done.stdout.split()}
    verbs = {module for group in app._VERBS.values() for module in group.values()}
    assert loaded & verbs == {"history"}


BARE = """
import importlib.metadata, re, sys

def needed(name, found):
    if name not in found:
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            word, _, mark = line.partition(";")
            if "extra ==" not in mark:
                needed(re.match(r"[\\w.-]+", word)[0].lower().replace("_", "-"), found)
    return found

with_extras = importlib.metadata.packages_distributions()
base = needed("holdfast", set())

class Bare:
    def find_spec(self, name, path=None, target=None):
        of = {one.lower().replace("_", "-") for one in with_extras.get(name, ())}
        if of and not of & base:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
"""
"""Python with only what `pip install holdfast` brings, without any of its extras."""


def test_without_extras_every_verb_is_there_and_what_needs_one_names_it(tmp_path):
    """None of it may depend on what else is installed where it is developed."""
    modules = sorted({module for group in app._VERBS.values() for module in group.values()})
    asking = (
        f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(f'holdfast.cli.{{name}}')\n"
        "print('#', importlib.import_module('holdfast.cli').main(['--help']))"
    )
    assert run_fresh(f"{BARE}\n{asking}", tmp_path).endswith("# 0\n")
    opening = (
        "import holdfast, io; sys.stderr = io.StringIO()\n"
        "try:\n    holdfast.open('store').agent('a', workspace='.')\n"
        "except holdfast.HoldfastError as error:\n    print(error)"
    )
    assert "pip install 'holdfast[workspace]'" in run_fresh(f"{BARE}\n{opening}", tmp_path)


def test_importing_writes_nothing_and_starts_no_thread(tmp_path):
    printed = run_fresh("import holdfast, threading; print(threading.active_count())", tmp_path)
    assert printed.strip() == "1"
    assert not list(tmp_path.iterdir())


def run_fresh(code, folder):
    # -P keeps the current directory out of sys.path: the installed package is what is measured.
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_public_name_exists_once():
    names = list(holdfast.__all__)
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(holdfast, name)]
    assert not missing


def test_nothing_else_looks_public():
    modules = {module.name for module in pkgutil.iter_modules(holdfast.__path__)}
    public = {name for name in vars(holdfast) if not name.startswith("_")} - modules - {"annotations", "TYPE_CHECKING"}
    assert public <= set(holdfast.__all__)


def members():
    """Each public method and property of each public class, with the docstring that the reference shows."""
    rooms = {"": holdfast, "crash.": holdfast.crash, "keys.": holdfast.keys}
    public = {f"{room}{name}": getattr(of, name) for room, of in rooms.items() for name in of.__all__}
    for name, cls in public.items():
        if not inspect.isclass(cls) or issubclass(cls, BaseException):
            continue
        yield name, cls.__doc__
        for member in dir(cls):
            if member.startswith("_"):
                continue
            owner = next(one for one in cls.__mro__ if member in vars(one))
            found = inspect.getattr_static(cls, member)
            if owner.__module__.startswith("holdfast.") and isinstance(
                found, types.FunctionType | property | classmethod | staticmethod
            ):
                yield f"{name}.{member}", found.__doc__


def test_the_reference_says_something_about_everything_public():
    told = dict(members())
    assert len(told) > 200
    assert not [name for name, said in told.items() if not said]
    functions = [getattr(holdfast, name) for name in holdfast.__all__ if not inspect.isclass(getattr(holdfast, name))]
    assert not [one for one in functions if callable(one) and not one.__doc__]


@pytest.mark.parametrize("function", [holdfast.open, holdfast.tool, holdfast.durable, holdfast.queue])
def test_what_has_many_options_explains_each_of_them(function):
    options = {name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert not {name for name in options if f"``{name}" not in function.__doc__}


@pytest.fixture(scope="module")
def written():
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_public_name_is_documented(written):
    words = set(re.findall(r"\w+", written))
    assert not [name for name in holdfast.__all__ if name not in words]


def test_the_documentation_names_nothing_that_does_not_exist(written):
    modules = {module.name for module in pkgutil.iter_modules(holdfast.__path__)}
    named = set(re.findall(r"(?<![\w./-])holdfast\.([A-Za-z]\w*)", written))
    # Digest tags ("holdfast.node") and schemas ("holdfast.log/1") are words of the formats, not of the library.
    tags = set(re.findall(r'"holdfast\.(\w+)(?:/\d+)?"', written))
    # Its own tools, as lists of effects name them: "holdfast.wait_for".
    tools = {name.removeprefix("holdfast.") for name in TOOLS._wrappers if name.startswith("holdfast.")}
    # What spans and instruments of OpenTelemetry are called: "holdfast.run.id".
    told = set(re.findall(r'"holdfast\.(\w+)', (ROOT / "src/holdfast/contrib/otel.py").read_text(encoding="utf-8")))
    known = set(holdfast.__all__) | modules | tags | tools | told | {"toml"}  # a file is called holdfast.toml
    assert not named - known
