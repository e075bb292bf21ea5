"""How a run is executed is said with its function: no keyword of the function itself is taken for an option."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import errors

KEYWORDS = {"id": "mine", "wait": 7, "strict": "very", "change": "small", "replan": [1], "again": 2, "name": "me"}


@holdfast.durable
def given(agent, *args, **kwargs):
    return [list(args), kwargs]


@holdfast.durable
async def given_later(agent, **kwargs):
    return kwargs


def test_every_keyword_goes_to_the_function(opened):
    agent = opened()
    assert agent.run(given, 1, **KEYWORDS) == [[1], KEYWORDS]
    assert asyncio.run(agent.arun(given_later, **KEYWORDS)) == KEYWORDS

    @holdfast.durable
    def outer(agent):
        other = agent._store.agent("other")
        return [agent.spawn(given, "c", **KEYWORDS).join(), other.run(given.options(id="o"), **KEYWORDS)]

    assert agent.run(outer) == [[[], KEYWORDS], [[], KEYWORDS]]


def test_a_run_with_its_id_is_resumed_with_the_functions_own_keywords(opened):
    @holdfast.durable
    def work(agent, *, id, wait):
        agent.wait_for("go")
        return [id, wait]

    agent = opened()
    with pytest.raises(errors.Waiting):
        agent.run(work.options(id="7", wait=False), id="mine", wait=3)
    agent._store.signal("trip-7", "go")
    assert agent.resume("7") == ["mine", 3]
    assert agent.run(work.options(id="7"), id="mine", wait=3) == ["mine", 3]


def test_options_add_up_and_the_function_itself_has_none(opened):
    both = given.options(id="7").options(strict=True)
    assert (both.chosen.id, both.chosen.strict, both.chosen.wait) == ("7", True, True)
    assert given.chosen.id is None
    assert both(None, 1) == [[1], {}]
    with pytest.raises(TypeError, match="ids"):
        given.options(ids=7)


def test_options_that_mean_nothing_are_refused_before_anything_is_done(opened):
    agent = opened()

    @holdfast.durable
    def outer(agent):
        with pytest.raises(errors.BadOption, match="strict, replan and limit_s"):
            agent.spawn(given.options(id="c"), "c")
        return agent.spawn(given.options(strict=True), "c").join()

    assert agent.run(outer) == [[], {}]
    with pytest.raises(errors.BadOption, match="strict"):
        agent._store.map(given.options(wait=False), [1], name="batch")

    @holdfast.durable
    def fails(agent):
        raise RuntimeError("no")

    with pytest.raises(errors.BadOption, match="without options"):
        agent.run(fails.options(replan=lambda setback: given.options(id="8")))
