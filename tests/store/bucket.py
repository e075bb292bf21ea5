"""S3 on loopback: moto's server, and a proxy in front of it that fails in every way a server can."""

from __future__ import annotations

import atexit
import http.client
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "sw0rdfish"
BUCKET = "bucket-of-packs"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@cache
def s3_port():
    """The port of a server that runs until this process ends, with one empty bucket."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    atexit.register(process.kill)
    port = int(process.stdout.readline())
    process.stdout.close()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().read() is not None
    connection.close()
    return port


class Handler(BaseHTTPRequestHandler):
    """Passes a request on, unless ``server.how`` says: a status, cut, hang, short or wrong; ``done``: afterwards."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # answers go out in one piece

    def do(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path))
        *done, how = (self.server.how(self.command, self.path) or "pass").split(" ")
        if done or how in {"pass", "short", "wrong"}:
            status, headers, data = self.passed_on(body)
        if how == "hang":
            self.server.over.wait()
        if how in {"hang", "cut"}:
            self.close_connection = True
            return
        if how.isdigit():
            code = f"<Error><Code>SlowDown</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
            status, headers, data = int(how), [], code.encode()
        if how == "wrong":
            data = bytes(byte ^ 1 for byte in data)
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in {"content-length", "connection", "transfer-encoding", "server", "date"}:
                self.send_header(name, value)
        size = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", size or str(len(data)))
        self.end_headers()
        if how == "short":
            data, self.close_connection = data[: len(data) // 2], True
        self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do  # noqa: N815

    def passed_on(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", s3_port())
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        found = answer.status, answer.getheaders(), answer.read()
        connection.close()
        return found

    def log_message(self, *args):
        pass


class Proxy(ThreadingHTTPServer):
    """``how(method, path)`` says what goes wrong; ``asked`` are all requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.well()

    def well(self):
        self.how = lambda _method, _path: ""
        self.asked = []
        self.over = threading.Event()

    def handle_error(self, request, client_address):
        """A client that went away."""

    def always(self, how, *methods):
        self.how = lambda method, path: how if method in methods and not path.endswith("holdfast-packs") else ""

    def once(self, how, *methods):
        left = [how]
        self.how = lambda method, _path: left.pop() if left and method in methods else ""


@contextmanager
def proxied(monkeypatch):
    """A proxy to which obstore's settings lead, with short patience."""
    from holdfast.store import objects

    s3_port()
    with Proxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
                    "AWS_ENDPOINT": f"http://127.0.0.1:{proxy.server_port}", "AWS_ALLOW_HTTP": "true"}  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        for name, value in {"REQUEST_S": 20, "RETRY_S": 20, "RETRIES": 1, "SINGLE_BYTES": 2**20}.items():
            monkeypatch.setattr(objects, name, value)
        monkeypatch.setattr(objects, "PART_BYTES", 5 * 2**20)  # S3 takes no smaller ones
        try:
            yield proxy
        finally:
            proxy.over.set()
            proxy.shutdown()
            thread.join()
