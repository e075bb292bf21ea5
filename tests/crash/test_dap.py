"""`holdfast dump dap`: a conversation with a real client's messages, and with whatever else may come."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import random
import subprocess
import sys
from pathlib import Path

import pytest
from debugpy.common.messaging import JsonIOStream, JsonMessageChannel, MessageHandlingError

from holdfast.crash import capture
from holdfast.crash.dap import MAX_BODY_BYTES, Session, Wire
from tests.crash import trip_program

COMMAND = [sys.executable, "-P", "-m", "holdfast", "dump", "dap"]
_WAIT_S = 180


class Editor:
    """A client: debugpy's channel over an adapter's streams, and the events that came."""

    def __init__(self, stream):
        self.events = queue.SimpleQueue()
        self.channel = JsonMessageChannel(stream, self)
        self.channel.start()

    def event(self, event):  # the channel calls this for each
        self.events.put((event.event, event.body))

    def disconnect(self):  # and this at the end of the stream
        self.events.put(("end", None))

    def ask(self, command, **arguments):
        return self.channel.request(command, arguments)

    def refused(self, command, **arguments):
        """The request, which must fail; its kind, its number and its text."""
        request = self.channel.send_request(command, arguments)
        with pytest.raises(MessageHandlingError):
            request.wait_for_response()
        body = request.response.json["body"]["error"]
        return request.response.json["message"], body["id"], body["format"]

    def next_event(self):
        return self.events.get(timeout=_WAIT_S)

    def begin(self, path):
        self.ask("initialize", adapterID="holdfast", linesStartAt1=True, columnsStartAt1=True, pathFormat="path")
        self.ask("attach", dump=str(path))
        assert self.next_event()[0] == "initialized"
        self.ask("configurationDone")
        name, body = self.next_event()
        assert name == "stopped"
        return body

    def frames(self, thread=1):
        return self.ask("stackTrace", threadId=thread)["stackFrames"]

    def locals(self, frame):
        (scope, _dump) = self.ask("scopes", frameId=frame["id"])["scopes"]
        return {row["name"]: row for row in self.below(scope)}

    def below(self, row, **arguments):
        return self.ask("variables", variablesReference=row["variablesReference"], **arguments)["variables"]


@contextlib.contextmanager
def editor(*arguments, cwd=None):
    process = subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd)
    try:
        found = Editor(JsonIOStream.from_process(process))
        yield found
        found.ask("disconnect")
        assert process.wait(_WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        found.channel.close()


def test_a_whole_conversation(path, tmp_path):
    with editor(cwd=tmp_path) as client:
        able = client.ask("initialize", clientID="test", adapterID="holdfast", supportsVariablePaging=True)
        assert able["supportsConfigurationDoneRequest"]
        assert able["supportsExceptionInfoRequest"]
        client.ask("launch", dump=str(path), noDebug=False)
        assert client.next_event() == ("initialized", {})
        source = {"path": "/nowhere/trip.py"}
        answer = client.ask("setBreakpoints", source=source, breakpoints=[{"line": 3}, {"line": 5}])
        assert [item["verified"] for item in answer["breakpoints"]] == [False, False]
        client.ask("setExceptionBreakpoints", filters=[])
        client.ask("configurationDone")
        name, stop = client.next_event()
        assert (name, stop["reason"], stop["threadId"]) == ("stopped", "exception", 1)
        assert stop["text"] == "ExceptionGroup: planning failed (2 members)"

        names = {thread["name"]: thread["id"] for thread in client.ask("threads")["threads"]}
        assert names["MainThread (failing, main)"] == 1
        assert "worker-0 (daemon)" in names
        assert "task price-Oslo (waiting for _asyncio.Future)" in names

        trace = client.ask("stackTrace", threadId=1)
        frames = trace["stackFrames"]
        assert trace["totalFrames"] == len(frames)
        assert (frames[0]["name"], frames[0]["presentationHint"]) == ("plan", "normal")
        assert frames[-1]["name"] == "<module>"
        assert [frame["presentationHint"] for frame in frames if frame["name"] == "run"] == ["subtle"]
        pages = [client.ask("stackTrace", threadId=1, startFrame=at, levels=4)["stackFrames"] for at in (0, 4, 8)]
        assert [*pages[0], *pages[1], *pages[2]] == frames[:12]
        assert client.ask("stackTrace", threadId=1, startFrame=999)["stackFrames"] == []

        where = frames[0]["source"]
        text = client.ask("source", source=where, sourceReference=where["sourceReference"])["content"]
        assert text.splitlines()[frames[0]["line"] - 1].strip() == "raise group from None"
        assert text.splitlines()[frames[0]["line"] - 1][frames[0]["column"] - 1 :] == "raise group from None"
        assert not Path(where["path"]).exists()

        found = client.locals(frames[0])
        assert found["desk"]["type"] == "__main__.Desk"
        desk = {row["name"]: row for row in client.below(found["desk"])}
        assert [row["value"] for row in client.below(desk["offers"])][1].startswith("<__main__.Offer city='Rome'")
        assert {row["name"] for row in client.below(desk["by_city"])} == {"['Lisbon']", "['Rome']", "['Oslo']"}
        assert desk["me"]["variablesReference"] == found["desk"]["variablesReference"]
        assert "\x1b" not in found["messages"]["value"]

        value = client.ask("evaluate", expression="desk.offers[0].city", frameId=frames[0]["id"], context="watch")
        assert (value["result"], value["type"], value["variablesReference"]) == ("'Lisbon'", "str", 0)
        again = client.ask("evaluate", expression=client.below(desk["offers"])[2]["evaluateName"])
        assert again["result"].startswith("<__main__.Offer city='Oslo'")
        whole = client.ask("evaluate", expression="messages[0]['content']")["result"]
        assert whole.count("x") > 300
        targets = client.ask("completions", frameId=frames[0]["id"], text="desk.of", column=8)["targets"]
        assert [(target["text"], target["start"], target["length"]) for target in targets] == [("desk.offers", 0, 7)]

        task = client.frames(names["task price-Oslo (waiting for _asyncio.Future)"])
        assert [frame["name"] for frame in task] == ["Event.wait", "wait_for_price"]
        assert client.locals(task[1])["city"]["value"] == "'Oslo'"

        client.ask("terminate")
        assert client.next_event() == ("terminated", {})
    assert client.next_event()[0] == "end"


def test_pages_of_variables(path):
    with editor(str(path)) as client:
        client.ask("initialize")
        client.ask("launch")
        assert client.next_event()[0] == "initialized"
        numbers = client.locals(client.frames()[0])["numbers"]
        assert (numbers["indexedVariables"], numbers["namedVariables"]) == (5_000, 0)
        page = client.below(numbers, filter="indexed", start=4_990, count=100)
        assert [row["value"] for row in page] == [str(number) for number in range(4_990, 5_000)]
        assert [row["name"] for row in client.below(numbers, start=17, count=2)] == ["[17]", "[18]"]
        assert client.below(numbers, filter="named") == []
        every = client.below(numbers)
        assert every[-1]["name"] == "..."
        assert len(every) == 2_001
        assert client.below(numbers, start=-5, count=-1)[0]["value"] == "0"


def test_the_exception_with_all_that_it_names(path):
    with editor() as client:
        client.begin(path)
        info = client.ask("exceptionInfo", threadId=1)
        assert (info["exceptionId"], info["breakMode"]) == ("ExceptionGroup", "unhandled")
        details = info["details"]
        assert "note: after 2 tries" in details["stackTrace"]
        assert [inner["message"] for inner in details["innerException"]] == ["no offer in Lisbon below 100.0", "hotel"]
        (cause,) = details["innerException"][0]["innerException"]
        assert (cause["typeName"], cause["message"]) == ("KeyError", "'Lisbon!'")
        assert "-> return self.by_city[city + " in cause["stackTrace"]
        assert client.refused("exceptionInfo", threadId=2)[:2] == ("not-in-dump", 2)


def test_the_parts_of_the_dump(path):
    with editor() as client:
        client.begin(path)
        (_locals, scope) = client.ask("scopes", frameId=client.frames()[0]["id"])["scopes"]
        parts = {row["name"]: row for row in client.below(scope)}
        (agent,) = client.below(parts["agent"])
        assert {row["name"]: row["value"] for row in client.below(agent)}["checkpoint"] == "a1b2c3"
        assert {"process and machine", "environment", "native stacks and registers", "log records"} <= set(parts)
        assert parts == {row["name"]: row for row in client.below(scope)}


def test_what_a_dump_cannot_do_is_a_typed_error_and_the_session_goes_on(path, tmp_path):
    with editor() as client:
        client.ask("initialize")
        for command in ("threads", "stackTrace", "scopes", "variables", "evaluate", "source", "configurationDone"):
            assert client.refused(command)[:2] == ("bad-option", 1)
        assert client.refused("launch")[:2] == ("bad-option", 1)
        assert client.refused("launch", dump=str(tmp_path / "none"))[:2] == ("not-a-dump", 4)
        assert client.refused("launch", dump=str(tmp_path))[0] == "not-a-dump"
        assert client.refused("launch", dump="a\0b")[0] == "bad-option"
        assert client.refused("launch", dump=["x"])[0] == "bad-option"
        client.begin(path)
        assert client.refused("launch", dump=str(path))[0] == "bad-option"
        for command in ("continue", "next", "stepIn", "stepOut", "stepBack", "restart"):
            assert client.refused(command, threadId=1) == (
                "read-only", 3, "a dump shows one moment: the program cannot go on from here")  # fmt: skip
        assert client.refused("setVariable", variablesReference=1, name="x", value="2")[0] == "read-only"
        client.ask("pause", threadId=1)
        assert client.next_event()[1]["reason"] == "pause"
        assert client.refused("readMemory")[0] == "bad-option"
        assert client.refused("stackTrace", threadId=10_000)[0] == "not-in-dump"
        assert client.refused("scopes", frameId=10**12)[0] == "not-in-dump"
        assert client.refused("variables", variablesReference="x")[0] == "not-in-dump"
        assert client.refused("source", sourceReference=10_000)[0] == "not-in-dump"
        assert client.refused("evaluate", expression="open('x').read()")[0] == "not-in-dump"
        assert client.refused("evaluate", expression="desk.offers[open('x')]")[0] == "bad-option"
        assert client.refused("evaluate", expression="")[0] == "bad-option"
        assert client.ask("completions", text="no.where[", column=10)["targets"] == []
        assert client.frames()


def test_a_healthy_process_stops_without_an_exception(tmp_path):
    with editor(str(capture("asked by a test", to=tmp_path))) as client:
        client.ask("initialize", linesStartAt1=False, columnsStartAt1=False)
        client.ask("attach")
        assert client.next_event()[0] == "initialized"
        client.ask("configurationDone")
        name, body = client.next_event()
        while name == "output":
            name, body = client.next_event()
        assert (body["reason"], body["description"]) == ("pause", "Dump: asked by a test")
        frame = client.frames()[0]
        assert frame["name"] == "test_a_healthy_process_stops_without_an_exception"
        text = client.ask("source", sourceReference=frame["source"]["sourceReference"])["content"]
        assert "capture(" in text.splitlines()[frame["line"]]
        assert client.refused("exceptionInfo", threadId=1)[0] == "not-in-dump"


def test_a_file_that_is_no_dump_is_refused_at_the_start(tmp_path):
    (tmp_path / "x").write_text("x")
    done = subprocess.run([*COMMAND, tmp_path / "x"], capture_output=True, check=False, timeout=_WAIT_S)
    assert done.returncode == 4
    assert done.stdout == b""


# Messages by hand.


def framed(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def said(output):
    """The messages in what the adapter wrote."""
    found = []
    while output:
        head, _, output = output.partition(b"\r\n\r\n")
        length = int(head.removeprefix(b"Content-Length: "))
        found.append(json.loads(output[:length]))
        output = output[length:]
    return found


def converse(data):
    """Everything at once, then the end of the input; what the adapter said."""
    out = io.BytesIO()
    Session(Wire(io.BytesIO(data), out), None).run()
    return said(out.getvalue())


def request(seq, command, **arguments):
    return {"seq": seq, "type": "request", "command": command, "arguments": arguments}


def test_broken_and_oversized_messages_are_survived():
    huge = MAX_BODY_BYTES + 1
    data = (
        framed(b"{not json") + framed(b"[" * 100_000) + framed(b"[1, 2]") + framed(b"\xff\xfe") + framed(b"")
        + framed({"type": "event", "event": "x"}) + framed({"type": "request"}) + framed({"type": ["request"]})
        + framed({"seq": "x", "type": "request", "command": {"a": 1}, "arguments": 7})
        + framed({"seq": 10**40, "type": "request", "command": "x" * 10_000})
        + b"garbage without end\r\n" * 100 + b"Content-Length: -5\r\n\r\n" + b"Content-Length: 1e3\r\n\r\n"
        + b"x" * 100_000 + b"\r\n\r\n" + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n"
        + b"Content-Length: %d\r\n\r\n" % huge + bytes(huge)
        + b"Content-Type: application/json\r\n" + framed(request(77, "initialize"))
        + framed(request(78, "disconnect"))
    )  # fmt: skip
    done = subprocess.run(COMMAND, input=data, capture_output=True, check=False, timeout=_WAIT_S)
    assert (done.returncode, done.stderr) == (0, b"")
    answers = said(done.stdout)
    by_number = {answer.get("request_seq"): answer for answer in answers if answer["type"] == "response"}
    assert by_number[77]["success"]
    assert by_number[78]["success"]
    skipped = [answer["body"]["output"] for answer in answers if answer["type"] == "event"]
    assert sum("skipped" in text for text in skipped) == 6
    assert [answer["seq"] for answer in answers] == list(range(1, len(answers) + 1))


def test_the_input_may_end_anywhere(path):
    asked = [request(1, "initialize"), request(2, "launch", dump=str(path)), request(3, "threads")]
    whole = b"".join(map(framed, asked))
    for length in (0, 5, 21, len(whole) // 2, len(whole) - 1):
        converse(whole[:length])


@pytest.mark.parametrize("seed", range(2))
def test_any_requests_about_any_file_are_answered_one_by_one(path, tmp_path, seed, rounds):
    """Crafted files and crafted arguments in one conversation each: as many answers as questions, in order."""
    chooser = random.Random(seed)
    honest = trip_program.chunks_of(path)
    crafted = tmp_path / "x.hfdump"
    wild = [None, True, -1, 0, 1, 2, 5, 17, 10**20, 1.5, "", "x", "desk", "#1", "#1.x[0]", "desk.offers[0]", [], {}]
    names = [
        *("threadId", "frameId", "variablesReference", "start", "count", "filter", "expression", "sourceReference"),
        *("source", "startFrame", "levels", "text", "column", "startModule", "moduleCount", "context", "lines"),
    ]
    commands = ("threads", "stackTrace", "scopes", "variables", "evaluate", "completions", "exceptionInfo", "source",
                "setBreakpoints", "pause", "continue")  # fmt: skip
    for _ in range(rounds(15, 2_000)):
        crafted.write_bytes(trip_program.spoiled(honest, chooser, chooser.choice([0.01, 0.05, 0.2])))
        asked = [request(1, "initialize"), request(2, "launch", dump=str(crafted)), request(3, "configurationDone")]
        asked += [request(4 + at, "stackTrace", threadId=1 + at) for at in range(8)]
        for number in range(12, 300):
            arguments = {name: chooser.choice(wild) for name in names if chooser.random() < 0.2}
            if chooser.random() < 0.8:
                arguments |= {name: chooser.randrange(1, 60) for name in ("frameId", "variablesReference", "threadId")}
            asked.append(request(number, chooser.choice(commands), **arguments))
        answers = converse(b"".join(map(framed, asked)))
        responses = [answer for answer in answers if answer["type"] == "response"]
        assert [answer["request_seq"] for answer in responses] == [message["seq"] for message in asked]
        for answer in responses:
            assert answer["success"] or answer["message"] in {
                "bad-option", "not-in-dump", "read-only", "not-a-dump", "newer-format", "corrupt-value"}  # fmt: skip


def test_circles_in_the_chain_and_a_lying_file_are_bounded(tmp_path):
    crafted = tmp_path / "x.hfdump"
    chain = [{"type": "E", "message": "m", "frames": [], "cause": (at + 1) % 64, "group": list(range(64))}
             for at in range(64)]  # fmt: skip
    stack = {"id": 1, "name": "t", "failing": True, "frames": [{"file": "f", "line": -5, "span": [9, -1, -1],
             "locals": ["x", [2**62]] * 5_000}]}  # fmt: skip
    source = {"file": "f", "first": 2**40, "text": "x", "whole": True}
    chunks = [("head", {}), ("excp", {"chain": chain}), ("stck", stack), ("srce", source)]
    crafted.write_bytes(trip_program.sealed(chunks))
    with editor(str(crafted)) as client:
        client.ask("initialize")
        client.ask("launch")
        info = client.ask("exceptionInfo", threadId=1)
        assert len(json.dumps(info)) < 1_000_000
        (frame,) = client.frames()
        assert frame["line"] == 1
        assert client.refused("source", sourceReference=1)[0] == "not-in-dump"
        assert len(client.below({"variablesReference": frame["id"]})) == 2_001
