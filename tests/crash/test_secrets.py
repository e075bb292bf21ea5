"""What stands under a secret name is nowhere in a dump, wherever the name is, whatever the value, however it is told.

Each shape is a program's way to hold a secret and to repeat it in the message of its failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from urllib.parse import quote, quote_plus

import pytest

from holdfast.crash.redaction import MAX_KNOWN, Redactor
from tests.crash.processes import SOURCE
from tests.crash.test_redaction import raw_bytes

# How the value is made, so that no source has it; how it is held; how it is told. `S` is the secret.
SHAPES = {
    "attribute": ("'Tr0ub4dor-3x'", "self = Box(); self.password = S", "S"),
    "nested dict": ("'Tr0ub4dor-3x'", "conf = {'db': {'main': {'password': S}}}", "S"),
    "deep object": ("'Tr0ub4dor-3x'", "app = Box(); app.db = [{1: Box()}]; app.db[0][1].api_key = S", "S"),
    "SecretStr": ("'Tr0ub4dor-3x'", "class SecretStr: pass\n    a = SecretStr(); a._secret_value = S", "S"),
    "slots": ("'Tr0ub4dor-3x'", "class Slim: __slots__ = ('password',)\n    slim = Slim(); slim.password = S", "S"),
    "global": ("'Tr0ub4dor-3x'", "global PASSWORD\n    PASSWORD = S", "S"),
    "closure": ("'Tr0ub4dor-3x'", "call = (lambda password: lambda: password)(S)", "S"),
    "default of a bound method": ("'Tr0ub4dor-3x'", "box = Box(); box.token = S\n    call = box.go\n    del box", "S"),
    "with spaces": ("'correct horse battery staple 7!'", "password = S", "S"),
    "lower case": ("'swordfishes'", "password = S", "S"),
    "short": ("'hunt3r'", "password = S", "S"),
    "four characters": ("'a1b2'", "pin = {'password': S}", "S"),
    "bytes": ("b'raw-s3cret-bytes'", "secret = S", "S.decode()"),
    "bytes told as bytes": ("b'raw-s3cret-bytes'", "secret = S", "repr(S)"),
    "bytearray": ("bytearray(b'raw-s3cret-bytes')", "secret = S", "S.decode()"),
    "str subclass": ("type('Text', (str,), {})('sub-s3cret-text')", "token = S", "str.__str__(S)"),
    "bytes subclass": ("type('Raw', (bytes,), {})(b'sub-s3cret-raw')", "token = S", "S.decode()"),
    "int": ("9182736450", "password = S", "str(S)"),
    "float": ("91827.36450", "password = S", "repr(S)"),
    "Decimal": ("__import__('decimal').Decimal('918273.6455')", "secret = S", "str(S)"),
    "UUID": ("__import__('uuid').UUID(int=0xabcdef0123456789abcdef0123456789)", "token = S", "str(S)"),
    "Path": ("__import__('pathlib').Path('/run/hidden-place')", "secret = S", "str(S)"),
    "keys": ("'k3y-as-a-secret'", "secrets = {S: 1}", "S"),
    "items": ("'it3m-as-a-secret'", "secrets = [('a', S), 'b']", "S"),
    "set": ("'it3m-as-a-secret'", "passwords = {S}", "S"),
    "repr": (r"'qu\'o\"te\\d\n-s3cret'", "password = S", "repr(S)"),
    "repr of repr": (r"'qu\'o\"te\\d-s3cret'", "password = S", "repr(repr(S))"),
    "json": (r"'qu\"ote-\u00e9-s3cret'", "password = S", "json.dumps(S)"),
    "json without escapes": (r"'qu\"ote-\u00e9-s3cret'", "password = S", "json.dumps(S, ensure_ascii=False)"),
    "url": ("'p@ss/word 7!'", "password = S", "quote(S, safe='')"),
    "url plus": ("'p@ss/word 7!'", "password = S", "quote_plus(S)"),
    "db_pass": ("'Tr0ub4dor-3x'", "db_pass = S", "S"),
    "openai_key": ("'Tr0ub4dor-3x'", "openai_key = S", "S"),
    "tokens": ("'a81bc81bdead4e5dabff90865d1e13b1'", "tokens = [S]", "S"),
    "other_key": ("'a81bc81bdead4e5dabff90865d1e13b1'", "cache_key = S", "S"),
    "header pair": ("'Tr0ub4dor-3x'", "headers = [('authorization', S)]", "S"),
    "header in bytes": ("b'Tr0ub4dor-3x'", "headers = [(b'authorization', S)]", "S.decode()"),
    "keyword": ("'Tr0ub4dor-3x'", "call = __import__('functools').partial(print, password=S)", "S"),
    "coroutine": ("'Tr0ub4dor-3x'", "async def wait(password): pass\n    waiting = wait(S)", "S"),
}  # fmt: skip

PROGRAM = textwrap.dedent("""
    import json, logging, sys
    from urllib.parse import quote, quote_plus
    sys.path.insert(0, {source!r})
    import holdfast.crash as crash

    class Box:
        def go(self): pass

    def fail(S):
        logging.getLogger("app").error("refused %s", {told})
        other = "elsewhere: " + {told}
        {held}
        told = {told}
        del S
        raise ValueError("refused " + told, told)

    with crash.install(to={folder!r}, sidecar=False, limits=crash.Limits(deadline_s=600, part_s=300)):
        made = json.loads({made!r})
        try:
            fail(eval(made))
        except ValueError as error:
            del made
            crash.capture(error=error, to={folder!r})
""")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_is_not_in_the_dump_of_a_failure_that_repeats_it(tmp_path, shape):
    made, held, told = SHAPES[shape]
    coded = "".join(f"\\u{ord(char):04x}" for char in made)
    program = tmp_path / "program.py"
    folder = tmp_path / "dumps"
    program.write_text(PROGRAM.format(source=str(SOURCE), told=told, held=held, folder=str(folder), made=f'"{coded}"'))
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.hfdump")
    secret = eval(told, {"S": eval(made), "json": json, "quote": quote, "quote_plus": quote_plus})
    assert secret.encode() not in raw_bytes(path)


def test_thousands_of_values_are_known():
    values = [f"value-{number * 7919:08d}-of-many" for number in range(MAX_KNOWN)]
    redactor = Redactor()
    for value in values:
        redactor.learn(value)
    for value in values[::97]:
        assert value not in redactor.clean(f"before {value} after")
    assert redactor.clean("value-99999999-of-none") == "value-99999999-of-none"


def test_values_that_begin_alike_and_inside_of_each_other_are_all_found():
    redactor = Redactor()
    values = [f"a1-{'x' * length}" for length in range(1, 60)]
    for value in values:
        redactor.learn(value)
    for value in values:
        assert redactor.clean(f"<{value}>") == "<[redacted known-value]>"


@pytest.mark.parametrize("word", ["test", "none", "admin", "abc", "1", "4711", "words"])
def test_ordinary_words_do_not_take_out_half_of_a_dump(word):
    redactor = Redactor()
    redactor.learn(word)
    assert redactor.clean(f"a {word} b") == f"a {word} b"


def test_a_short_value_goes_where_it_is_a_word_and_stays_inside_of_others():
    redactor = Redactor()
    redactor.learn("hunter")
    assert redactor.clean("the hunter and the hunters") == "the [redacted known-value] and the hunters"
