"""The tests' own PostgreSQL server works, is nobody else's, and does not outlive them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests import postgres

ROOT = Path(__file__).resolve().parent.parent

# A run that is killed. It tells the server's folder and process, and waits.
KILLED = """
import select
import sys
from tests import postgres
with postgres.server() as server:
    pid = (server.folder / "data" / "postmaster.pid").read_text().split()[0]
    print(server.folder, pid, flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass  # a signal that comes right before a wait is noticed after it
"""


def test_a_test_gets_a_database_that_answers(postgres_url):
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT 6 * 7, current_user, version()").fetchone()[:2] == (42, "postgres")


@pytest.mark.parametrize("again", [1, 2])
def test_the_database_is_empty_every_time(postgres_url, again):
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
        connection.execute("CREATE TABLE mine (n int)")


def test_the_server_is_not_roots_and_is_not_reached_over_the_network(postgres_server, postgres_url):
    pid = int((postgres_server.folder / "data" / "postmaster.pid").read_text().split()[0])
    assert Path(f"/proc/{pid}").stat().st_uid != 0
    assert postgres_server.folder.stat().st_mode & 0o077 == 0
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_the_server_ends_with_a_run_that_is_interrupted(postgres_server, how):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as run:  # fmt: skip
        folder, pid = run.stdout.readline().split()
        assert Path(f"/proc/{pid}").exists()
        run.send_signal(how)
        run.wait(180)
    deadline = time.monotonic() + 180
    while (Path(folder).exists() or Path(f"/proc/{pid}").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(folder).exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_does_not_start_says_why(postgres_server):
    with pytest.raises(RuntimeError, match="no_such_setting"), postgres.server(no_such_setting="1"):
        pass


def test_without_its_programs_tests_are_told_so(monkeypatch):
    monkeypatch.setattr(postgres.shutil, "which", lambda name: None)
    monkeypatch.setattr(postgres, "PACKAGES", Path("/nonexistent"))
    with pytest.raises(postgres.NoServer, match="not installed"), postgres.server():
        pass
