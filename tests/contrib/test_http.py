"""Requests of tools have keys by which the other side knows them again: nothing is charged twice."""

from __future__ import annotations

import asyncio
import contextvars
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import httpx2
import pytest

import holdfast
from holdfast.contrib.http import AsyncTransport, Transport
from holdfast.errors import BadOption, InDoubt, NoAgent, ToolFailed
from tests.contrib.http_server import Service
from tests.lives import die, dies


@pytest.fixture
def service():
    with Service() as service:
        yield service


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request):
    return request.param


@pytest.fixture
def client(library, service):
    with library.Client(transport=Transport(library.HTTPTransport()), base_url=service.url) as client:
        yield client


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store, store.agent("payer") as agent:
        yield agent


def acting(function, **options):
    """The function as a tool that may be repeated with the same key."""
    return holdfast.tool(effect="idempotent", name="pay", **options)(function)


# -- what is the same, and what is not ------------------------------------------------------------------------


def test_a_retry_after_a_lost_answer_has_the_same_key_and_is_done_once(agent, client, service):
    pay = acting(lambda euros: client.post("/lost", json={"euros": euros}).json(), retries=2)
    assert pay(10) == {"charge": 1}
    assert len(service.done) == 1
    first, second = service.keys
    assert first == second
    assert len(first) == 32


def test_every_call_has_keys_of_its_own(agent, client, service):
    pay = acting(lambda: client.post("/charge", json={"euros": 10}).json())
    assert [pay(), pay()] == [{"charge": 1}, {"charge": 2}]
    assert len({*service.keys, None}) == 3


def test_other_requests_of_one_call_have_other_keys_and_identical_ones_are_one(agent, client, service):
    def several():
        client.post("/charge", json={"euros": 10})
        client.post("/charge", json={"euros": 11})
        client.post("/charge?twice=1", json={"euros": 10})
        client.post("/charge/2", json={"euros": 10})
        client.put("/charge", json={"euros": 10})
        client.delete("/charge")
        return client.post("/charge", json={"euros": 10}).json()

    assert acting(several)() == {"charge": 1}
    assert len(service.done) == 6
    assert len(set(service.keys)) == 6


def test_the_password_in_an_address_does_not_count(agent, client, service):
    def twice():
        for user in ("me:old", "me:new"):
            client.post(service.url.replace("//", f"//{user}@") + "/charge", json={})

    acting(twice)()
    assert len(service.done) == 1


def test_what_changes_nothing_has_no_key(agent, client, service):
    acting(lambda: client.get("/charge").status_code)()
    holdfast.tool(effect="read", name="search")(lambda: client.post("/charge", json={"query": 1}).status_code)()
    assert service.keys == [None, None]


def test_a_header_that_is_there_is_kept(agent, client, service):
    def own():
        headers = {"idempotency-key": f"{holdfast.effect().key}-mine"}
        client.post("/charge", headers=headers, content=iter([b"read ", b"once"]))
        return holdfast.effect().key

    key = acting(own)()
    assert service.keys == [f"{key}-mine"]
    assert service.done == [b"read once"]


def test_the_header_can_have_another_name(agent, library):
    seen = []

    def answer(request):
        seen.append(dict(request.headers))
        return library.Response(200)

    transport = Transport(library.MockTransport(answer), header="PayPal-Request-Id")
    with library.Client(transport=transport) as client:
        acting(lambda: client.post("http://pay/", json={}).status_code)()
    assert len(seen[0]["paypal-request-id"]) == 32
    assert "idempotency-key" not in seen[0]


def test_a_request_that_is_sent_by_two_calls_is_two(agent, client, service):
    request = client.build_request("POST", "/charge", json={"euros": 10})
    pay = acting(lambda: client.send(request).json())
    assert [pay(), pay()] == [{"charge": 1}, {"charge": 2}]
    assert "idempotency-key" not in request.headers


def test_undoing_has_a_key_of_its_own_that_stays(agent, client, service):
    def refund(effect):
        client.post("/lost/refund", json={"charge": effect.result["charge"]})

    pay = acting(lambda: client.post("/charge", json={"euros": 10}).json(), compensate=refund)
    before = agent.checkpoint("before")
    pay()
    agent.rollback(before)
    assert service.done == [b'{"euros":10}', b'{"charge":1}']
    charged, refunded, again = service.keys
    assert charged != refunded == again


def test_after_a_rollback_the_purpose_is_another(agent, client, service):
    pay = acting(lambda: client.post("/charge", json={"euros": 10}).json(), compensate=lambda effect: None)
    before = agent.checkpoint("before")
    pay()
    agent.rollback(before)
    assert pay() == {"charge": 2}


@pytest.mark.parametrize("write", [True, False], ids=["after an error", "after a crash"])
def test_what_a_probe_asks_has_no_key_and_is_asked_anew_each_time(store_path, client, service, write):
    """An answer that is kept by its key would say for ever that nothing is there."""

    def find(effect):
        assert holdfast.effect().key == effect.key
        client.post("/charge", json={"find": effect.key})
        return holdfast.Absent()

    @holdfast.tool(probe=find)
    def pay():
        raise ConnectionResetError if write else KeyboardInterrupt

    @holdfast.durable
    def work(agent):
        pay()

    with holdfast.open(store_path) as store, pytest.raises(ToolFailed if write else KeyboardInterrupt):
        store.agent("payer").run(work)
    if not write:
        with holdfast.open(store_path) as store, pytest.raises(KeyboardInterrupt):
            store.agent("payer").run(work)
    assert service.keys == [None]


# -- bodies ---------------------------------------------------------------------------------------------------


def forms(where):
    (where / "bill.pdf").write_bytes(os.urandom(200_000))
    return (where / "bill.pdf").read_bytes()


def test_a_form_with_files_is_the_same_each_time(agent, client, service, tmp_path):
    bill = forms(tmp_path)

    def send():
        with (tmp_path / "bill.pdf").open("rb") as file:
            return client.post("/lost", data={"to": "me"}, files={"bill": file, "note": b"hello"}).json()

    assert acting(send, retries=1)() == {"charge": 1}
    assert len(service.done) == 1
    (_, _, key, body), again = service.asked
    assert again == ("POST", "/lost", key, body)  # boundary and all
    assert bill in body


def test_a_form_with_a_boundary_of_the_users_keeps_it(agent, client, service):
    headers = {"Content-Type": "multipart/form-data; boundary=mine"}
    acting(lambda: client.post("/charge", headers=headers, files={"a": b"1"}).status_code)()
    assert service.done[0].startswith(b"--mine\r\n")
    assert service.keys[0] is not None


class Pipe(io.RawIOBase):
    def readable(self):
        return True

    def read(self, size=-1):
        return b""


@pytest.mark.parametrize(
    "body",
    [
        {"content": (part for part in [b"a", b"b"])},
        {"content": io.BytesIO(b"at the end when it was read once")},
        {"files": {"a": Pipe()}},
    ],
    ids=["generator", "file", "pipe in a form"],
)
def test_a_body_that_can_be_read_only_once_needs_a_key_of_the_users(agent, client, service, body):
    with pytest.raises(ToolFailed) as caught:
        acting(lambda: client.post("/charge", **body).status_code)()
    assert caught.value.error_type == "BadOption"
    assert "holdfast.effect().key" in str(caught.value.__cause__)
    assert service.asked == []


def test_what_comes_next_can_read_the_body(agent, library):
    """A transport that records or signs looks at it."""
    seen = []

    class Signing(library.BaseTransport):
        def handle_request(self, request):
            seen.append(request.content)
            return library.Response(200)

    with library.Client(transport=Transport(Signing())) as client:
        acting(lambda: client.post("http://pay/", json=[1]).status_code)()
    assert seen == [b"[1]"]


# -- redirects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [None, {"bill": b"10 euros"}], ids=["json", "form"])
def test_a_redirect_that_repeats_the_request_has_the_same_key_each_time(agent, client, service, files):
    def pay():
        body = {"files": files} if files else {"json": {"euros": 10}}
        for _ in range(2):  # as after a crash
            answer = client.post("/moved", follow_redirects=True, **body)
        return answer.json()

    assert acting(pay)() == {"charge": 1}
    first, charged, again, charged_again = service.asked
    assert (first, charged) == (again, charged_again)
    assert first[3] == charged[3] != b""
    assert None not in service.keys


def test_a_redirect_to_the_answer_has_no_key(agent, client, service):
    acting(lambda: client.post("/seen", json={}, follow_redirects=True).status_code)()
    assert [(method, path, key is None) for method, path, key, _ in service.asked] == [
        ("POST", "/seen", False),
        ("GET", "/receipt", True),
    ]


# -- async ----------------------------------------------------------------------------------------------------


def test_async_clients_do_the_same(store_path, library, service, tmp_path):
    forms(tmp_path)

    async def chunks():
        yield b"once"

    async def main():
        transport = AsyncTransport(library.AsyncHTTPTransport())
        with holdfast.open(store_path) as store, store.agent("payer") as agent:
            async with library.AsyncClient(transport=transport, base_url=service.url) as client:

                @holdfast.tool(effect="idempotent", retries=1)
                async def pay(how):
                    if how == "json":
                        return (await client.post("/lost", json={"euros": 10})).json()
                    if how == "form":
                        with (tmp_path / "bill.pdf").open("rb") as file:
                            return (await client.post("/lost/form", files={"bill": file})).json()
                    return (await client.post("/charge", content=chunks())).json()

                found = [await pay("json"), await pay("form")]
                with pytest.raises(ToolFailed, match="can be read only once"):
                    await pay("stream")
                with pytest.raises(NoAgent):
                    await client.post("/charge", json={})
                assert agent.name == "payer"
                return found

    assert asyncio.run(main()) == [{"charge": 1}, {"charge": 2}]
    assert len(service.asked) == 4
    assert len(set(service.keys)) == 2


def test_requests_in_a_stream_of_items_have_keys(agent, client, service):
    @holdfast.tool(effect="idempotent", stream=True)
    def pay(count):
        for euros in range(count):
            yield client.post("/charge", json={"euros": euros}).json()["charge"]

    assert list(pay(3)) == [1, 2, 3]
    assert len({*service.keys, None}) == 4


# -- outside of tools -----------------------------------------------------------------------------------------


def test_where_no_agent_works_a_request_goes_out_as_it_is(client, service):
    assert client.post("/charge", content=iter([b"x"])).json() == {"charge": 1}
    assert service.keys == [None]


def test_beside_a_tool_of_an_active_agent_it_is_refused(agent, client, service):
    with pytest.raises(NoAgent, match="was not sent"):
        client.post("/charge?token=secret", json={})
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(client.post, "/charge?token=secret", json={})
        with pytest.raises(NoAgent) as caught:
            lost.result()
    assert "secret" not in str(caught.value)
    assert client.get("/charge").status_code == 200
    assert client.post("/charge", json={}, headers={"Idempotency-Key": "mine"}).json() == {"charge": 1}
    assert service.keys == [None, "mine"]


def test_in_a_run_beside_its_tools_it_is_refused(store_path, client, service):
    @holdfast.durable
    def work(agent):
        client.post("/charge", json={})

    with holdfast.open(store_path) as store, pytest.raises(NoAgent):
        store.agent("payer").run(work)
    assert service.asked == []


def test_threads_of_a_tool_have_its_keys_with_its_context(agent, client, service):
    def pay():
        with ThreadPoolExecutor(2) as pool:
            for euros in range(2):
                pool.submit(contextvars.copy_context().run, client.post, "/charge", json={"euros": euros})

    acting(pay)()
    assert len({*service.keys, None}) == 3


def test_a_write_that_was_refused_is_in_doubt_since_others_may_have_gone_out(agent, client, service):
    @holdfast.tool
    def pay():
        client.post("/charge", json={"euros": 10})
        client.post("/charge", content=iter([b"x"]))

    with pytest.raises(InDoubt) as caught:
        pay()
    assert isinstance(caught.value.__cause__, BadOption)
    assert len(service.done) == 1


# -- crashes --------------------------------------------------------------------------------------------------


def test_a_tool_that_is_killed_before_its_record_is_made_again_with_the_same_keys(service, store_path, tmp_path):
    forms(tmp_path)

    def live(fatal=0):
        client = httpx.Client(transport=Transport(httpx.HTTPTransport()), base_url=service.url)

        @holdfast.tool(name="http.pay", effect="idempotent")
        def pay(euros: int) -> int:
            with (tmp_path / "bill.pdf").open("rb") as file:
                client.post("/bill", files={"bill": file}).raise_for_status()
            charge = client.post("/charge", json={"euros": euros}).raise_for_status().json()["charge"]
            return die() if euros == fatal else charge

        @holdfast.durable(name="http.work")
        def work(agent):
            return [pay(euros) for euros in (10, 11, 12)]

        with client, holdfast.open(store_path) as store:
            return store.agent("payer").run(work)

    for fatal in (10, 11, 12):
        assert dies(lambda fatal=fatal: live(fatal), 0)
    assert live() == [2, 4, 6]
    assert len(service.done) == 6
    assert len(service.asked) == 12  # each of the three was made twice
    assert len(set(service.keys)) == 6


def test_nothing_of_httpx_is_loaded_by_the_module():
    code = "import sys, holdfast.contrib.http; sys.exit(any(name.partition('.')[0] == 'httpx' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_threads_share_a_transport(agent, client, service):
    barrier = threading.Barrier(4)

    def pay():
        def one(euros):
            barrier.wait()
            return client.post("/charge", json={"euros": euros}).status_code

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(contextvars.copy_context().run, one, euros % 2) for euros in range(4)]
            return [job.result() for job in jobs]

    assert acting(pay)() == [200] * 4
    assert len(service.done) == 2
