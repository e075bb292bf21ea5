"""Nobody gets in who was not let in, whatever his browser sends; and what a store holds stays text."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

import holdfast
from holdfast.errors import BadOption
from holdfast.web import place as asking
from holdfast.web import server
from holdfast.web.app import ACTIONS, House
from holdfast.web.asked import Asked
from holdfast.web.gate import Doors
from holdfast.web.place import Place
from holdfast.web.server import _config
from holdfast.web.words import address as address_of
from holdfast.web.words import environment, shown
from tests import warm
from tests.conftest import from_outside_nothing
from tests.web.conftest import serving

PAGES = ("/", "/?status=failed", "/?q=trip", "/health")
TWINS = ("/api/agents", "/api/health")
EVERYTHING = (*PAGES, *TWINS, "/events", "/nowhere")


@pytest.fixture(scope="module")
def stranger(served):
    with served.stranger() as client:
        yield client


@pytest.mark.parametrize("address", EVERYTHING)
def test_without_a_session_nothing_is_told(served, stranger, address):
    for cookie in (b"", b"holdfast=x", b"holdfast_000000000000=" + b"y" * 43, b"\xff;=;"):
        answer = stranger.get(address, headers={"Cookie": cookie})
        assert answer.status_code == 401
        assert "trip-7" not in answer.text
        assert served.place not in answer.text


@pytest.mark.parametrize("path", ["/static/", "/static/x", "/static/x/y", "/static/page.css/", "/static/page.css/y"])
def test_without_a_session_only_the_static_files_themselves_are_there(served, stranger, path):
    answer = stranger.get(path)
    assert answer.status_code == 401
    assert served.place not in answer.text
    assert stranger.get("/static/page.css").status_code == 200
    changing = stranger.post("/static/page.css", headers={"Origin": served.url})
    assert changing.status_code == 401
    assert served.place not in changing.text


def test_cookies_of_strangers_take_no_time(made):
    before_s = time.process_time()
    gate = House(Place(str(made)), Doors(frozenset({"http://page"})), "me").gate
    for size in (4_000, 60_000):
        answer = asyncio.run(asked(gate, "/", cookie=b'a="' + b"\\" * size))
        assert answer.status_code == (401 if size == 4_000 else 431)
    assert time.process_time() - before_s < 5


def test_our_cookie_is_found_among_others_by_its_whole_name(served):
    with served.browser() as visitor:
        ((name, value),) = visitor.cookies.items()
    with served.stranger() as client:
        for cookies, status in (
            (f'a="b; {name}={value}; c', 200), (f"{name}={value}", 200), (f"x{name}={value}", 401),
            (f"{name}x={value}", 401), (f"{name.upper()}={value}", 401), (f"a={name}={value}", 401), (name, 401),
        ):  # fmt: skip
            assert client.get("/api/agents", headers={"Cookie": cookies}).status_code == status, cookies


async def asked(gate, path, **headers):
    transport = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://page", verify=False) as client:
        return await client.get(path, headers=headers)


def test_a_token_lets_in_once_and_stands_in_a_file_of_its_own_user(served, stranger):
    assert stat.S_IMODE(served.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(served.file.parent.stat().st_mode) == 0o700
    first = served.enter
    with served.browser() as visitor:
        assert visitor.get("/").status_code == 200
    assert served.enter != first  # the file has the next one
    again = stranger.get(first)
    assert again.status_code == 401
    assert "set-cookie" not in again.headers
    many = "/enter?" + "&".join("token=x" for _ in range(9))
    for wrong in ("/enter", "/enter?token=", "/enter?token=" + "A" * 43, "/enter?token=%00%ff", many):
        assert stranger.get(wrong).status_code == 401
    arguments = Path(f"/proc/{served.process.pid}/cmdline").read_bytes()
    assert urlsplit(served.enter).query.split("=")[1].encode() not in arguments


def test_the_cookie_is_strict_and_has_a_name_of_its_own(served, made):
    with served.stranger() as mine, serving(made) as other, other.browser() as theirs:
        entered = mine.get(served.enter)
        assert '<link rel="icon" href="/static/' in entered.text  # else the browser asks for another, and complains
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert cookie.partition("=")[0] not in theirs.cookies
        mine.cookies = theirs.cookies
        assert mine.get("/").status_code == 401


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example"),
        ("Host", "127.0.0.1"),
        ("Host", "127.0.0.1:1"),
        ("Host", "localhost.evil.example"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "http://127.0.0.1:1"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
@pytest.mark.parametrize("address", EVERYTHING)
def test_no_other_page_can_ask_with_the_cookie(visitor, address, header, value):
    answer = visitor.get(address, headers={header: value})
    assert answer.status_code in {403, 421}
    assert "trip-7" not in answer.text


def test_headers_that_decide_may_not_stand_twice(visitor, served):
    twice = [("Origin", served.url), ("Origin", "http://evil.example")]
    assert visitor.get("/", headers=twice).status_code == 400


def test_our_own_pages_can_ask(visitor, served):
    for more in ({"Sec-Fetch-Site": "same-origin", "Origin": served.url}, {"Sec-Fetch-Site": "none"}, {}):
        assert visitor.get("/", headers=more).status_code == 200
    port = urlsplit(served.url).port
    assert visitor.get("/", headers={"Host": f"localhost:{port}"}).status_code == 200


@pytest.mark.parametrize("address", [*EVERYTHING[:-2], "/nowhere", "/static/page.css", "/enter"])
def test_every_answer_has_the_policy(visitor, address):
    headers = visitor.get(address).headers
    policy = dict(one.strip().partition(" ")[::2] for one in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_post_are_answered_and_nothing_changes_by_default(visitor, served, method):
    answer = visitor.request(method, "/", headers={"Origin": served.url})
    assert answer.status_code in {403, 404, 405}


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/",
        "/static/..%5capp.py", "/static/page.css%00", "/static/templates/base.html",
    ],
)  # fmt: skip
def test_only_static_files_are_files(visitor, path):
    answer = visitor.send(visitor.build_request("GET", path))
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_hostile_text_is_shown_as_text(visitor):
    for address in PAGES:
        text = visitor.get(address).text
        assert "<script>window" not in text
        assert "onerror=window" not in text or "&lt;img" in text
        assert not set(text) & set("\u202e\u2066\x00\x1b")
    assert "<" not in visitor.get("/api/agents").text


def test_long_answers_and_odd_questions_have_a_sentence(visitor):
    odd = {
        "/?page=0": 400, "/?page=99999999999999999999": 400, "/?page=x": 400, "/?status=none": 400,
        "/?q=" + "x" * 1_000: 400, "/?" + "&".join(f"a{n}=1" for n in range(500)): 400, "/?q=%ff": 400,
        "/api/agents?sort=size": 400, "/?page=1000000": 200, "/?q=%5B": 200, "/?q=%E2%80%AE": 200,
    }  # fmt: skip
    for address, status in odd.items():
        answer = visitor.get(address)
        assert answer.status_code == status, address
        assert "Traceback" not in answer.text


def test_what_cannot_be_shown_of_an_agent_leads_to_its_timeline(visitor):
    for address, leads in {
        "/state/trip-7?at=never": True, "/run/trip-7?id=none": True, "/why/trip-7?ask=fortune": True,
        "/state/nobody": False, "/state": False,
    }.items():  # fmt: skip
        answer = visitor.get(address)
        assert answer.status_code in {400, 404}
        assert ('href="/timeline/' in answer.text) is leads, address


def test_a_store_that_is_gone_and_comes_back_has_a_sentence(tmp_path):
    place = tmp_path / "store"
    with holdfast.open(place) as store, store.agent("here") as agent:
        agent.checkpoint("once")
    with serving(place) as page, page.browser() as visitor:
        assert "here" in visitor.get("/").text
        place.rename(tmp_path / "elsewhere")
        gone = visitor.get("/")
        assert gone.status_code in {409, 503}
        assert "Traceback" not in gone.text
        assert "look again" in gone.text
        assert visitor.get("/api/agents").json()["schema"] == "holdfast.error/1"
        (tmp_path / "elsewhere").rename(place)
        assert "here" in visitor.get("/").text


def test_a_damaged_store_has_a_sentence(tmp_path):
    place = tmp_path / "store"
    with holdfast.open(place) as store, store.agent("here") as agent:
        agent.state["text"] = "x" * 100_000
        agent.checkpoint("once")
    with serving(place) as page, page.browser() as visitor:
        file = place / "store.db"
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(os.urandom(file.stat().st_size - 4096))
        answers = [visitor.get(address) for address in PAGES]
        assert not [one for one in answers if "Traceback" in one.text]
        assert {one.status_code for one in answers} <= {200, 500, 503}
        said = [unescape(re.sub(r"<[^>]*>", "", one.text)) for one in answers if one.status_code != 200]
        assert said
        assert all("the database is damaged" in one and "holdfast verify says what is affected" in one for one in said)


def test_an_encrypted_store_without_its_key_is_not_served(tmp_path):
    place = tmp_path / "store"
    with holdfast.open(place, key="a long passphrase") as store, store.agent("here") as agent:
        agent.checkpoint("once")
    words = [sys.executable, "-m", "holdfast", "ui", "--store", str(place), "--port", "0"]
    done = warm.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 4
    assert "HOLDFAST_KEY_FILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_behind_a_proxy_on_a_unix_socket_the_name_that_it_sends_counts(made, tmp_path):
    path = tmp_path / "socket"
    url = ("--url", "https://holdfast.example")
    with serving(made, "--socket", str(path), *url, port=None):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), verify=False) as proxy:
            headers = {"Host": "holdfast.example", "X-Forwarded-User": "alice"}
            assert proxy.get("http://any/api/agents", headers=headers).status_code == 200
            assert proxy.get("http://any/api/agents", headers={**headers, "Host": "evil.example"}).status_code == 421
            assert proxy.get("http://any/enter", headers=headers).status_code == 404
    assert not path.exists()


def test_behind_a_proxy_over_tcp_its_secret_counts(made, tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    with pytest.raises(BadOption, match="everybody on this machine can read"):
        server.Listening(secret=str(file), url="https://holdfast.example").bound()
    file.chmod(0o640)
    with serving(made, "--url", "https://holdfast.example", "--secret-file", str(file)) as page:
        headers = {"Host": "holdfast.example", "X-Forwarded-User": "alice"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port_of(page)}", verify=False) as proxy:
            assert proxy.get("/api/agents", headers=headers).status_code == 401
            for secret, status in ((file.read_text().strip(), 200), ("0" * 32, 401), ("", 401)):
                answer = proxy.get("/api/agents", headers={**headers, "X-Holdfast-Secret": secret})
                assert answer.status_code == status


def port_of(page):
    """Which port a process listens on, as the kernel says it."""
    sockets = {str(one.readlink()) for one in Path(f"/proc/{page.process.pid}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in sockets and fields[3] == "0A":
            return int(fields[1].partition(":")[2], 16)
    raise AssertionError(sockets)


ANYTHING = environment().from_string("{{ text }}")


@given(st.text(max_size=300))
def test_whatever_is_written_is_visible_and_escaped(text):
    made = ANYTHING.render(text=text)
    assert not set(made) & set("<>\"'\x00\x1b\u202e\u2066\u2028\x7f\r")
    assert len(shown(text * 200)) < 25_000 * 12


@given(st.text(max_size=40), st.integers(-5, 5), st.integers(-5, 5))
def test_a_number_is_within_its_bounds_or_refused(text, least, most):
    try:
        found = Asked(query={"n": text}).number("n", least, least, most)
    except holdfast.errors.BadOption:
        return
    assert least <= found <= most or not text


# -- changing something -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    """A page that lets people change things, and somebody who was let in."""
    place = tmp_path_factory.mktemp("changing") / "store"
    with holdfast.open(place) as store, store.agent("trip", when=None) as agent:
        agent.checkpoint("first")
    with from_outside_nothing(), serving(place, "--allow-changes") as page, page.browser() as visitor:
        yield page, visitor


def token_of(visitor):
    return re.search(r'name="csrf" value="([0-9a-f]{64})"', visitor.get("/back/trip").text)[1]


def tags(visitor):
    return {tag for one in visitor.get("/api/timeline/trip").json()["checkpoints"] for tag in one["tags"]}


TAG = {"agent": "trip", "name": "chosen", "at": "first"}


def test_a_page_that_only_reads_refuses_every_action(visitor, served):
    for path in ACTIONS:
        answer = visitor.post(path, data=TAG, headers={"Origin": served.url})
        assert answer.status_code == 403, path
        assert "--allow-changes" in answer.text


@pytest.mark.parametrize("path", sorted(ACTIONS))
def test_an_action_needs_its_token_and_comes_from_the_page_itself(changing, path):
    page, visitor = changing
    ours = {"Origin": page.url, "Sec-Fetch-Site": "same-origin"}
    good = token_of(visitor)
    for token in ("", "0" * 64, good[:-1], good[::-1], "é"):
        answer = visitor.post(path, data={**TAG, "csrf": token}, headers=ours)
        assert answer.status_code == 400
        assert "Load the page again" in answer.text
    for theirs in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}):
        assert visitor.post(path, data={**TAG, "csrf": good}, headers=theirs).status_code == 403
    assert visitor.get(path, params={**TAG, "csrf": good}).status_code in {200, 400, 404}  # never by an address
    with page.browser() as other:  # a token is its session's
        assert other.post(path, data={**TAG, "csrf": good}, headers=ours).status_code == 400
    assert visitor.post(path, json={**TAG, "csrf": good}, headers=ours).status_code == 400
    assert not tags(visitor)


def test_what_somebody_writes_is_not_taken_from_him(made, tmp_path):
    """Whatever is posted about a branch with a live holder is refused with a sentence, and he goes on."""
    place = tmp_path / "store"
    shutil.copytree(made, place)
    with holdfast.open(place) as store, store.agent("trip-7", when=None) as agent, from_outside_nothing():
        head = agent.head
        with serving(place, "--allow-changes") as page, page.browser() as visitor:
            told = visitor.get("/api/back/trip-7", params={"to": "asked"}).json()
            plan = told["plan"]
            assert (told["writer"]["pid"], told["writer"]["branch"]) == (os.getpid(), "main")
            (doubt,) = visitor.get("/api/runs/trip-7").json()["in_doubt"]
            nothing_else = {"to": "before the mistake", "accept": doubt["id"]}
            assert "is writing this branch" in visitor.get("/back/trip-7", params=nothing_else).text
            token = re.search(r'name="csrf" value="([0-9a-f]{64})"', visitor.get("/back/trip-7").text)[1]
            mine = {"agent": "trip-7", "csrf": token}
            for path, fields in {
                "/rollback": {"to": "asked", "typed": "trip-7", "head": head.id, "plan": plan["digest"]},
                "/resolve": {"effect": doubt["id"], "decision": "not-done", "why": "it is not there"},
            }.items():
                answer = visitor.post(path, data=mine | fields, headers={"Origin": page.url})
                assert answer.status_code == 409, (path, answer.text)
                assert "Let it finish, or stop it" in answer.text
            agent.state["goes"] = "on"
            assert agent.checkpoint("still mine").parent_id == head.id
            assert visitor.get("/api/runs/trip-7").json()["in_doubt"]


def test_what_is_done_is_recorded_with_who_did_it(changing):
    page, visitor = changing
    answer = visitor.post("/tag", data={**TAG, "csrf": token_of(visitor)}, headers={"Origin": page.url})
    assert answer.status_code == 303
    assert tags(visitor) == {"chosen"}
    (said,) = [one for one in visitor.get("/api/history/trip").json()["events"] if one["what"] == "tag"]
    assert said["by"] == getpass.getuser()


ODD = ("a?b#c%20d", "a/../b", "..", "a//b", "x/", "a\\b", "turned\u202e round", "a b&c=d", "%2e%2e", "<b>", "'\"")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Agents whose names mean something else in an address, or in a page."""
    place = tmp_path_factory.mktemp("odd") / "store"
    with holdfast.open(place) as store:
        for name in ODD:
            with store.agent(name, when=None) as agent:
                agent.state["messages"] = [{"role": "user", "content": name}] * 60
                for label in ("first", "second"):
                    agent.checkpoint(label)
    with from_outside_nothing(), serving(place, "--allow-changes") as page, page.browser() as visitor:
        yield page, visitor


@pytest.mark.parametrize("name", ODD)
def test_an_agent_can_be_looked_at_and_changed_whatever_its_name_is(odd, name):
    page, visitor = odd
    for view in ("timeline", "state", "diff", "runs", "history", "why", "back"):
        address = urljoin(page.url, address_of(f"/{view}", agent=name))
        text = visitor.get(address).text
        for form in Forms.of(text):
            if not form["action"]:  # a script answers it
                continue
            if form["method"] == "get":  # browsers put the fields of such a form in the place of the query
                asked = urljoin(address, form["action"]).split("?")[0] + "?" + urlencode(form["fields"])
                assert visitor.get(asked.replace("/timeline", "/api/timeline")).status_code == 200, asked
            elif "agent" in form["fields"]:
                assert form["fields"]["agent"] == name
    talk = urljoin(page.url, address_of("/conversation", agent=name, path="state.messages"))
    (earlier,) = re.findall(r'class="button" href="([^"]+)">Earlier', visitor.get(talk).text)
    assert "state.messages[0]" in visitor.get(urljoin(talk, unescape(earlier))).text
    fields = next(one["fields"] for one in Forms.of(visitor.get(address).text) if one["action"] == "/tag")
    answer = visitor.post("/tag", data={**fields, "name": "kept", "at": "first"}, headers={"Origin": page.url})
    assert answer.status_code == 303
    plan = urljoin(page.url, address_of("/back", agent=name, to="first"))
    fields = next(one["fields"] for one in Forms.of(visitor.get(plan).text) if one["action"] == "/rollback")
    answer = visitor.post("/rollback", data={**fields, "typed": shown(name)}, headers={"Origin": page.url})
    assert answer.status_code == 303


class Forms(HTMLParser):
    """The forms of a page: where they lead, and what they send when nothing is typed."""

    @classmethod
    def of(cls, text):
        parser = cls()
        parser.found = []
        parser.feed(text)
        return parser.found

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "form":
            self.found.append({"action": given.get("action", ""), "method": given.get("method", "get"), "fields": {}})
        elif tag == "input" and given.get("type") == "hidden":
            self.found[-1]["fields"][given["name"]] = given["value"]


def test_a_connection_over_which_nothing_comes_or_goes_is_dropped(monkeypatch):
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)

    async def answer(scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (1 if scope["path"] == "/" else 32 << 20)})

    async def until(what):
        while not what():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)

    async def talking():
        config = uvicorn.Config(answer, http=server._Connection, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: config.http(config, state, {}), "127.0.0.1", 0)
        ask = b"GET %s HTTP/1.1\r\nHost: page\r\n\r\n"
        for sent in (b"", b"GET / HTTP/1.1\r\nHost:", ask % b"/" + b"GET /", ask % b"/large"):
            with socket.create_connection(listening.sockets[0].getsockname()) as link:
                link.sendall(sent)
                async with asyncio.timeout(60):
                    await until(lambda: state.connections)
                    await until(lambda: not state.connections)
        listening.close()

    asyncio.run(talking())


def test_a_form_is_bounded(changing):
    page, visitor = changing
    large = {**TAG, "csrf": token_of(visitor), "why": "x" * 2_000_000}
    assert visitor.post("/tag", data=large, headers={"Origin": page.url}).status_code == 400


@pytest.mark.parametrize(
    ("slots", "agents"), [(1, ("one", "other")), (6, ("one", "one"))], ids=["a slot", "one agent for two people"]
)
def test_an_action_that_takes_long_is_waited_for(made, monkeypatch, slots, agents):
    """Its slot is held until it has ended; and two people who decide about one agent do so one after another."""
    monkeypatch.setattr(asking, "QUESTION_S", 0.05)
    monkeypatch.setattr(asking, "AT_ONCE", slots)
    at_it = []

    def slow(_store, _asked, _who):
        at_it.append("begun")
        time.sleep(0.3)
        at_it.append("done")
        return "/health"

    monkeypatch.setitem(ACTIONS, "/tag", slow)

    async def twice(gate):
        transport = httpx.ASGITransport(gate)
        ours = {"Origin": "http://page"}
        async with httpx.AsyncClient(transport=transport, base_url="http://page", headers=ours, verify=False) as client:
            await client.get(f"/enter?token={gate.token}")
            (visitor,) = gate._sessions.values()
            form = {"csrf": visitor.csrf}
            return await asyncio.gather(*(client.post("/tag", data={**form, "agent": name}) for name in agents))

    place = Place(str(made), changes=True)
    try:
        answers = asyncio.run(twice(House(place, Doors(frozenset({"http://page"})), "me").gate))
    finally:
        place.close()
    assert [one.status_code for one in answers] == [303, 303]
    assert at_it == ["begun", "done"] * 2


def test_the_parser_with_a_bound_for_headers_is_used_whatever_is_installed(made):
    assert issubclass(_config(House(Place(str(made)), Doors(frozenset({"http://page"})), "me")).http, H11Protocol)
