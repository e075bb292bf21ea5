"""The ways in which tests end processes end them where they say."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.lives import Troupe, dies, killed, point, say, serve


def test_a_process_dies_before_and_after_each_call_that_is_watched(tmp_path):
    def act():
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            point()

    found = []
    for at in range(1, 8):
        died = dies(act, at, (os, "mkdir"))
        found.append((died, sorted(path.name for path in tmp_path.iterdir())))
        for path in tmp_path.iterdir():
            path.rmdir()
    assert found == [
        (True, []), (True, ["0"]), (True, ["0"]), (True, ["0"]), (True, ["0", "1"]), (True, ["0", "1"]),
        (False, ["0", "1"]),
    ]  # fmt: skip


def test_one_that_fails_instead_of_dying_is_an_error(capfd):
    with pytest.raises(AssertionError, match="ended with 1"):
        dies(lambda: 1 / 0, 1)
    with pytest.raises(AssertionError):
        killed(lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_troupe_says_what_each_life_said_and_how_it_ended():
    with Troupe("tests.test_lives") as troupe:
        whole = troupe.begin(waits=False)
        assert (whole.end(), whole.said) == (0, [("open", "")])
        broken = troupe.begin()
        assert (broken.end(), broken.said) == (1, [("error", "KeyError('waits')")])
        waiting = troupe.begin(waits=True)
        waiting.until("open")
        waiting.kill()
        assert waiting.end() == -signal.SIGKILL
        assert waiting.pid not in {whole.pid, broken.pid}


def live(job):
    waits = job["waits"]
    say("open")
    if waits:
        signal.pause()


if __name__ == "__main__":
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - one of them fails
    serve(live)
