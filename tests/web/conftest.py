"""A store with something of everything, `holdfast ui` on it as a program, and browsers: one of httpx, and Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests import warm
from tests.conftest import from_outside_nothing

ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 60.0


class Served(NamedTuple):
    """A page that is served: where, the file that leads in, and its process."""

    url: str
    file: Path
    process: subprocess.Popen
    place: str

    @property
    def enter(self) -> str:
        """The address that lets the next browser in."""
        return re.search(r'href="([^"]+)"', self.file.read_text())[1]

    def stranger(self, **options) -> httpx.Client:
        """Somebody who was not let in. Certificates take long to load, and nobody needs them."""
        return httpx.Client(base_url=self.url, timeout=SLOW_S, verify=False, **options)

    @contextmanager
    def browser(self, **options):
        """Somebody who was let in."""
        with self.stranger(**options) as client:
            assert client.get(self.enter).status_code == 200
            yield client


@contextmanager
def serving(place, *words, port="0", env=None):
    where = ["--port", port] if port else []
    command = [sys.executable, "-m", "holdfast", "ui", "--json", *where, "--store", str(place), *words]
    process = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            text += line
        said = json.loads(text)
        assert said["schema"] == "holdfast.ui/1"
        yield Served(said["url"], Path(said["file"] or "/"), process, str(place))
    finally:
        process.terminate()
        process.communicate(timeout=SLOW_S)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The sample. Nobody changes it."""
    place = tmp_path_factory.mktemp("page") / "store"
    with from_outside_nothing():  # in a process of its own: a dump of this one would have all tests in it
        warm.run([sys.executable, "-m", "tests.web.sample", str(place)], cwd=ROOT, capture_output=True, check=True)
    return place


@pytest.fixture(scope="module")
def served(made):
    with from_outside_nothing(), serving(made) as page:
        yield page


@pytest.fixture(scope="module")
def visitor(served):
    with served.browser() as client:
        yield client


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")
