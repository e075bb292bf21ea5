"""explain, drift, reconcile and logs on the command line."""

from __future__ import annotations

import json
import logging

import pytest

import holdfast


@pytest.fixture
def store_with_history(tmp_path):
    store_path = tmp_path / "other"
    with holdfast.open(store_path) as store:
        agent = store.agent("trip-7", when=None)
        agent.state["settings"] = {"limit": 10}
        agent.checkpoint("good")
        agent.tag("baseline")
        handler = agent.log_handler()
        for number in range(12):
            agent.state["settings"]["limit"] = 10 if number < 8 else -5
            agent.state["n"] = number
            if number == 8:
                handler.handle(
                    logging.makeLogRecord({"name": "app", "levelno": 40, "levelname": "ERROR", "msg": "odd"})
                )
            agent.checkpoint(f"step {number}")
        agent.close()
    return store_path


def test_explain_drift_and_logs(store_with_history, cli):
    found = cli("explain", "trip-7", "--invariant", "settings.limit > 0", "--json", store=store_with_history)
    told = found.json
    assert told["schema"] == "holdfast.explain/1"
    assert told["claims"][0]["label"] == "step 8"
    assert found.code == (0 if told["found"] else 1)
    found = cli("drift", "trip-7", "--baseline", "baseline", "--path", "settings", store=store_with_history)
    assert found.code == 1
    assert "state.settings.limit: 10 -> -5" in found.out
    found = cli(
        "drift",
        "trip-7",
        "--baseline",
        "baseline",
        "--path",
        "settings",
        "--may",
        "state.*",
        "--json",
        store=store_with_history,
    )
    assert found.code == 0
    assert found.json["differences"][0]["allowed"] == "state.*"
    found = cli("logs", "trip-7", "--at", "step 7", store=store_with_history)
    assert "ERROR app: odd" in found.out
    assert "asked for a checkpoint" in found.out
    assert (cli("logs", "trip-7", "--at", "step 8", "--json", store=store_with_history).json)["lines"] == []


def test_reconcile(store_with_history, cli, tmp_path):
    program = tmp_path / "configuring.py"
    program.write_text("import holdfast\n@holdfast.tool\ndef configure(path, have, want):\n    print(path)\n")
    file = tmp_path / "wanted.json"
    tools = {"settings.*": f"{program}:configure"}
    file.write_text(json.dumps({"desired": {"settings.limit": 10}, "tools": tools}))
    found = cli("reconcile", "trip-7", str(file), "--plan", store=store_with_history)
    assert found.code == 0
    assert "state.settings.limit: -5 -> 10  by configure (write)" in found.out
    found = cli("reconcile", "trip-7", str(file), "--json", store=store_with_history)
    assert found.code == 9
    found = cli("reconcile", "trip-7", str(file), "--yes", "--json", store=store_with_history)
    assert found.code == 0
    assert found.json["converged"] is True
    assert found.err == "settings.limit\n"  # what tools print is no JSON
    found = cli("reconcile", "trip-7", str(file), "--yes", store=store_with_history)
    assert "converged in 0 rounds" in found.out
    file.write_text(json.dumps({"desired": {"settings.limit": 11}, "tools": {"*": f"{program}:konfigure"}}))
    found = cli("reconcile", "trip-7", str(file), store=store_with_history)
    assert found.code == 2
    assert "has no 'konfigure'\nTools in it: configure." in found.err
    file.write_text("[]")
    assert cli("reconcile", "trip-7", str(file), "--yes", store=store_with_history).code == 2
