"""No secret of a known shape, and no value under a secret name, is in a dump's bytes."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import subprocess
import sys
import textwrap

import pytest

from holdfast.crash import capture, inside, kinds, open_dump
from holdfast.crash.dumpfile import Reader
from holdfast.crash.redaction import Redactor, looks_secret

BODY = "Zk3vQ9xT7LmP2wRb8HnC5dYf4GjA6sEu"
SECRETS = {
    "anthropic": f"sk-ant-api03-{BODY}-{BODY}AA",
    "openai": f"sk-proj-{BODY}{BODY}",
    "openai old": f"sk-{BODY}",
    "stripe": f"sk_live_{BODY}",
    "google": f"AIza{BODY}abc",
    "google oauth": f"ya29.{BODY}",
    "groq": f"gsk_{BODY}",
    "xai": f"xai-{BODY}",
    "hugging face": f"hf_{BODY}",
    "github": f"ghp_{BODY}abcd",
    "github fine": f"github_pat_{BODY}_{BODY}",
    "gitlab": f"glpat-{BODY}",
    "slack": f"xoxb-123456789012-{BODY}",
    "npm": f"npm_{BODY}abcd",
    "pypi": f"pypi-AgEIcHlwaS5vcmc{BODY}{BODY}",
    "sendgrid": f"SG.{BODY[:22]}.{BODY}{BODY[:11]}",
    "langsmith": f"lsv2_pt_{BODY}_0123456789",
    "tavily": f"tvly-{BODY}",
    "aws id": "AKIAQ7WX3TZPL5RMVB2C",
    "aws temporary": "ASIAQ7WX3TZPL5RMVB2C",
    "aws secret": f"aws_secret_access_key = {BODY}{BODY[:8]}",
    "azure": f"DefaultEndpointsProtocol=https;AccountKey={BODY}{BODY}==;",
    "azure sas": f"https://x.blob.core.windows.net/c?sv=1&sig={BODY}%3D",
    "amz": f"https://b.s3.amazonaws.com/k?X-Amz-Signature={BODY}{BODY}",
    "jwt": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{BODY}",
    "bearer": f"Authorization: Bearer {BODY}",
    "bearer lower": f"authorization: bearer {BODY}",
    "basic": "Basic " + base64.b64encode(f"user:{BODY}".encode()).decode(),
    "url": f"postgresql://app:{BODY}@db.internal:5432/app",
    "redis": f"redis://:{BODY}@cache:6379/0",
    "pem": f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n{BODY}\n-----END RSA PRIVATE KEY-----",
    "openssh": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}{BODY}\n-----END OPENSSH PRIVATE KEY-----",
    "pem cut": f"-----BEGIN PRIVATE KEY-----\n{BODY}\n{BODY}",
    "assignment": f"password={BODY}",
    "json": json.dumps({"api_key": BODY}),
    "escaped json": json.dumps(json.dumps({"password": BODY})),
    "telegram": f"110201543:AA{BODY}xyz",
    "slack hook": f"https://hooks.slack.com/services/T00000000/B00000000/{BODY}",
    "cookie": f"Cookie: session={BODY}; theme=dark",
}


def secret_part(text):
    """What must not be in the file: the part with entropy."""
    if BODY[:16] in text:
        return BODY[:16]
    for literal in ("Basic ", "AKIA", "ASIA"):
        if literal in text:
            return text.partition(literal)[2][:16]
    raise AssertionError(text)


def raw_bytes(path):
    """The file, and everything in it uncompressed."""
    import ormsgpack

    reader = Reader(path)
    everything = path.read_bytes() + b"".join(ormsgpack.packb(reader.payload(chunk)) for chunk in reader.chunks)
    reader.close()
    return everything


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("around", ["{}", "a {} b", 'x="{}"', "\n{}\n", "{}" * 2, "ünï {} çödé"])
def test_every_shape_is_found_anywhere_in_a_text(name, around):
    text = around.replace("{}", SECRETS[name])
    cleaned = Redactor().clean(text)
    assert secret_part(SECRETS[name]) not in cleaned
    assert "[redacted" in cleaned
    again = Redactor()
    assert again.clean(cleaned) == cleaned
    assert not again.suspicious(cleaned.encode(), strict=True)


BEFORE = (
    *(bytes([byte]) for byte in range(256)),
    *(rb"\n", rb"\\n", rb"\t", rb"\a", rb"\x3a", rb"\u003a", b"%3D", b"%3A", b"%20", b"&quot;", b"abc", b"prefix_"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_found_behind_any_character_escape_or_byte(name):
    secret, part = SECRETS[name].encode(), secret_part(SECRETS[name]).encode()
    left = [before for before in BEFORE if part in Redactor().clean_bytes(before + secret)]
    assert left == []


@pytest.mark.parametrize("name", [name for name, text in SECRETS.items() if "\n" not in text])
def test_a_secret_is_found_in_what_other_formats_make_of_it(name):
    secret, part = SECRETS[name], secret_part(SECRETS[name])
    redactor = Redactor()
    for text in (json.dumps({"text": f"my key is:\n{secret}"}), repr(f"a\n{secret}"), f"x%3D{secret}", f"abc{secret}"):
        assert part not in redactor.clean(text)
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        assert part.encode() not in redactor.clean_bytes(pickle.dumps({"k": secret}, protocol))


@pytest.mark.parametrize("length", range(14, 140))
def test_a_text_of_any_length_is_searched_when_packed(length):
    """The byte in front of a packed text is its length, which may look like a letter."""
    import ormsgpack

    text = "sk-" + (BODY * 5)[: length - 3]
    if length >= 19:
        assert Redactor().suspicious(ormsgpack.packb([1, text, 2]))


@pytest.mark.parametrize(
    "text",
    [
        "the task-force met at the risk-assessment-board-meeting in Lisbon",
        "passages = ['x'], author='y', max_tokens=4096, tokens: 12, tokenizer=None",
        "see https://example.com/a/b?c=d#e and file:///tmp/x, at 10:30@noon",
        "the password must be long; a secret garden; bearer of news; basic training",
        "b4c0ffee-1234-5678-9abc-def012345678 0xdeadbeefdeadbeefdeadbeef",
        "holdfast.crash.redaction.Redactor.secret_name",
        "task-b4c0ffee12345678b4c0ffee12345678 disk_test_0123456789abcdef0123 task-Planner-step-1-of-the-first-day",
        "network_test_results_of_2024_01 monkeys-and-donkeys-in-the-desk-drawers-of-1999",
    ],
)
def test_ordinary_text_stays(text):
    assert Redactor().clean(text) == text


def test_source_text_keeps_its_names_and_loses_its_literals():
    redactor = Redactor()
    line = "login(user, password=password, api_key=settings.key)"
    assert redactor.clean(line, source=True) == line
    assert BODY not in redactor.clean(f'password = "{BODY}"', source=True)


SECRET_NAMES = (
    *("OPENAI_API_KEY", "dbPassword", "X-Auth-Token", "authorization", "client_secret", "GH_TOKEN", "Set-Cookie"),
    *("aws_secret_access_key", "STRIPE_KEY", "DATABASE_URL", "PGPASSWORD", "session_id"),
)
PLAIN_NAMES = (
    *("max_tokens", "tokens", "passages", "author", "sort_key", "monkey", "PWD", "tokenizer", "keys"),
    *("token_count", "passed", "compass", "key", "secretary"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_that_look_secret(name):
    assert looks_secret(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_names_that_do_not(name):
    assert not looks_secret(name)


def test_a_cut_text_is_cut_in_front_of_a_secret():
    redactor = Redactor(known=["known-value-1234567890"])
    for secret in (f"sk-ant-{BODY}", "known-value-1234567890", f"password={BODY}"):
        for limit in range(100, 100 + len(secret) + 1):
            text = "x" * 95 + " " + secret + " " + "y" * 100
            cut = redactor.safe_cut(text, limit)
            assert redactor.clean(text[:cut]) == text[:cut].replace(secret, "") or secret in text[:cut]
            shown = redactor.clean(text[:cut])
            assert BODY[:4] not in shown
            assert "known-v" not in shown.replace("[redacted known-value]", "")


def canaries(tmp_path, monkeypatch=None):
    """A program with every secret everywhere, in a process of its own, with secret variables."""
    program = textwrap.dedent("""
        import asyncio, json, logging, pickle, sys, threading
        sys.path.insert(0, sys.argv[3])
        from holdfast.crash import Limits, capture, inside
        inside.keep_logs()
        secrets = json.loads(sys.argv[2])
        sys.argv[2:] = []
        del sys.orig_argv[2:]

        def back(text):
            return text[::-1]

        class Holder:
            __slots__ = ("text", "api_key")

        class Client:
            def __init__(self, text):
                self.headers = {"Authorization": text, b"authorization": text.encode()}
                self.nested = [{"deep": (text, {text})}]
                self.pairs = [("authorization", back("eman-a-rednu-eulav-nialp"))]
                self.others = ["cookie", back("eulav-nialp-rehto")]
                self.password = back("yrettab esroh tcerroc")
                self.credentials = {"user": back("terces-enoemos"), "parts": [back("trap-terces-renni")]}
                self.text = f"before {text} after"
                self.behind = [f"{before}{text}" for before in ("\\\\n", "%3D", "abc", "8")]
                self.behind += [json.dumps({"t": "my key is:\\n" + text}), repr("a\\n" + text)]
                self.behind += [b"a\\\\n" + text.encode()]
                self.pickled = pickle.dumps({"k": text})
                self.data = f"in bytes {text}".encode()
                self.array = bytearray(text.encode())
                self.numbers = list(text.encode())
                self.long = "x" * 16000 + " " + text + " " + "y" * 20000
                self.key = {text: 1}
                holder = Holder()
                holder.text = text
                holder.api_key = back("terces-dleh-tols")
                self.holder = holder

        def fail(text, db_password):
            logging.getLogger("app").warning("calling with %s", text)
            client = Client(text)
            connection = f"connect with {db_password} now"
            error = ValueError(f"refused: {text}", text)
            error.add_note(f"note {text}")
            raise error

        async def wait(text):
            await asyncio.sleep(100)

        async def main(folder):
            tasks = [asyncio.create_task(wait(text), name=f"task {text}") for text in secrets]
            ended = threading.Event()
            threads = [threading.Thread(target=lambda text=text: ended.wait(), name=text) for text in secrets]
            for thread in threads:
                thread.start()
            await asyncio.sleep(0)
            try:
                try:
                    fail(secrets[0], back("tnrael-3&rod4bu0rT"))
                except ValueError as first:
                    raise RuntimeError("outer " + secrets[1]) from first
            except RuntimeError as error:
                values = [Client(text) for text in secrets]
                capture("with " + secrets[0], error=error, to=folder, limits=Limits(deadline_s=600, part_s=300))
            ended.set()

        asyncio.run(main(sys.argv[1]))
    """)
    file = tmp_path / "program.py"
    file.write_text(program + f"\nAPI = {SECRETS['anthropic']!r}\n")
    environment = {
        "PATH": "/usr/bin",
        "MY_SERVICE_TOKEN": "environment-token-value",
        "DB_PASSWORD": "environment-password",
        "HOME": "/home/environment-password",
        "OPENAI_API_KEY": SECRETS["openai"],
        "HARMLESS": "value-that-is-not-allowed",
    }
    done = subprocess.run(
        [sys.executable, file, tmp_path / "d", json.dumps(list(SECRETS.values())), "src"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "d").iterdir()
    return path


def test_no_canary_is_in_the_file(tmp_path):
    path = canaries(tmp_path)
    data = raw_bytes(path)
    found = [name for name, text in SECRETS.items() if secret_part(text).encode() in data]
    assert not found
    for text in (
        *(
            "plain-value-under-a-name",
            "other-plain-value",
            "correct horse battery",
            "someone-secret",
            "inner-secret-part",
        ),
        *("slot-held-secret", "Tr0ub4dor&3-learnt", "environment-token-value", "environment-password"),
        *("value-that-is-not-allowed",),
    ):
        assert text.encode() not in data, text
    with open_dump(path) as dump:
        assert dump.index["redacted"]
        assert "HARMLESS" in dump.part(kinds.ENVIRONMENT)["others"]
        assert "MY_SERVICE_TOKEN" not in dump.part(kinds.ENVIRONMENT)["others"]
        assert len(dump.threads) == len(SECRETS) + 1
        assert len(dump.tasks) == len(SECRETS) + 1
        assert dump.logs


def test_log_records_are_in_the_dump(tmp_path):
    ring = inside.keep_logs()
    try:
        logging.getLogger("test.logs").error("answer %d", 42)
        path = capture(to=tmp_path)
    finally:
        inside.stop_logs()
    assert ring.kept
    with open_dump(path) as dump:
        assert dump.logs[-1]["text"] == "answer 42"
        assert dump.logs[-1]["level"] == "ERROR"


@pytest.mark.parametrize("name", ["db_pass", "DB_PASS", "openai_key", "smtpPass", "refresh_tokens"])
def test_more_names_that_look_secret(name):
    assert looks_secret(name)
