"""Whoever can write a store's rows, with sums that fit, harms neither its readers nor whoever repairs it."""

from __future__ import annotations

import pytest

import holdfast
from tests.agent import damage


@pytest.fixture
def path(store_path):
    damage.build(store_path)
    return store_path


@pytest.mark.parametrize("body", [-(2**63), 2**62, "text", 1.5], ids=repr)
def test_a_record_whose_body_is_of_another_type_costs_that_record_alone(path, body):
    ((r,),) = damage.rows(path, "SELECT min(r) FROM record")
    damage.spoil(path, "UPDATE record SET body = ? WHERE r = ?", body, r)
    with damage.opened(path) as store:
        assert not store.verify().ok
    report = holdfast.repair(path)
    assert not report.whole
    assert not [text for text in report.problems if text.startswith("in the new store")]
