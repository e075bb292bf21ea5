"""Taking secrets out of what a dump will hold, before it is written.

Owns which names look secret, which shapes are secrets, the values that are known to be, and the look through frames,
globals and agents for those, before the first byte is written. Must not know files. Holds always: shapes are searched
for anywhere in a text, and what ``clean`` returned is not ``suspicious`` any more; nothing of the program runs for the
look (see shapes.py), which takes nearer values first and ends at its bounds.
"""

from __future__ import annotations

import gc
import json
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from time import monotonic
from typing import Any
from urllib.parse import quote, quote_plus

from holdfast.crash.shapes import first_items, frame_locals, is_builtin, is_subtype, layout_of, text_of_leaf

MIN_LEARNT = 4  # shorter values are taken out where they stand, and nowhere else
MIN_DIGITS = 5
MIN_LETTERS = 6  # of a value that is one lower-case word: shorter ones are ordinary words
MAX_KNOWN = 10_000  # values; those that come later are taken out where they stand
MAX_KNOWN_CHARS = 16_384
_UNBOUNDED = 8  # characters from which on a value is searched for inside words, too
_SEARCHED_SINGLY = 32  # values that are looked for one by one; more of them by one pattern of their beginnings
_BEGINNING = 6  # bytes
_NAMES_KEPT = 20_000

_WORDS = frozenset(
    """password passwords passwd passphrase passcode pwd secret secrets token apikey apikeys credential credentials
    authorization bearer jwt cookie cookies setcookie dsn authtoken accesstoken refreshtoken sessionid sessionkey
    privatekey secretkey accesskey connstr signature sig otp csrf xsrf sas sessiontoken pgpassword mysqlpwd dbpass
    userpass""".split()  # noqa: SIM905 (a table of words)
)
_PAIRS = frozenset(
    """api_key private_key access_key secret_key signing_key encryption_key session_key session_id account_key auth_key
    shared_key master_key service_key license_key deploy_key ssh_key access_tokens auth_tokens api_keys private_keys
    connection_string conn_string database_url db_url redis_url broker_url auth_header basic_auth set_cookie pass_word
    admin_key client_key storage_key subscription_key webhook_url functions_key project_key openai_key anthropic_key
    stripe_key google_key azure_key aws_key github_key gitlab_key slack_key mistral_key cohere_key groq_key gemini_key
    huggingface_key hf_key llm_key bot_key app_key server_key host_key user_key jwt_key hmac_key crypto_key gpg_key
    refresh_tokens user_tokens session_tokens bot_tokens oauth_tokens id_tokens api_tokens bearer_tokens
    db_pass database_pass user_pass smtp_pass mail_pass email_pass redis_pass pg_pass postgres_pass mysql_pass
    mongo_pass admin_pass root_pass ftp_pass sftp_pass ssh_pass imap_pass ldap_pass http_pass proxy_pass auth_pass
    login_pass account_pass app_pass service_pass api_pass basic_pass server_pass host_pass vpn_pass""".split()  # noqa: SIM905
)
# Names of many other things, too: what stands under them is secret only if it looks like a key itself.
_DOUBTFUL_WORDS = frozenset(("tokens", "key", "keys", "pass", "auth"))
# Values that are placeholders or words of every program, although they stood under a secret name.
_ORDINARY = frozenset(
    """none null true false test user admin root password passwd secret token default changeme example string bearer
    basic empty local public private session cookie unknown missing hidden redacted unset required optional""".split()  # noqa: SIM905
)
_HARMLESS_WORDS = frozenset(("tokenizer", "tokenize", "count", "limit", "type", "len", "length", "max", "min", "usage"))
_KEY = re.compile(r"[A-Za-z0-9_+=~-]{16,1024}")  # no slash and no point: a path is no key
_SPLIT = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

# Each shape: its kind, the literal with which it begins, what follows. The literal is what is searched for, which is
# many times faster than a pattern. A leading "|" means that ordinary words end like this: with a letter or digit in
# front, it must look more like a key (see `_glued`). In packed bytes that is not asked, because the byte in front of a
# text is its length, which may look like a letter.
_SHAPES: tuple[tuple[str, str, str], ...] = (
    ("private-key", "-----BEGIN", r" [A-Z0-9 ]*(?:PRIVATE|SECRET)[A-Z ]*-----(?s:.*?)(?:-----END [A-Z0-9 ]+-----|\Z)"),
    ("private-key", "PuTTY-User-Key", r"-File-(?s:.*)"),
    ("private-key", "AGE-SECRET-KEY-", r"1[0-9A-Za-z]{20,}"),
    ("jwt", "eyJ", r"[A-Za-z0-9_-]{12,}(?:\.[A-Za-z0-9_-]*){0,4}"),
    ("provider-key", "|sk-", r"[A-Za-z0-9_-]{16,}"),
    ("provider-key", "|sk_", r"(?:live|test|prod)?_?[A-Za-z0-9]{16,}"),
    ("provider-key", "|rk_", r"(?:live|test)_[A-Za-z0-9]{16,}"),
    ("provider-key", "whsec_", r"[A-Za-z0-9+/=_-]{16,}"),
    ("provider-key", "|sess-", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "AIza", r"[0-9A-Za-z_-]{30,}"),
    ("provider-key", "ya29.", r"[0-9A-Za-z_-]{16,}"),
    ("provider-key", "GOCSPX-", r"[0-9A-Za-z_-]{16,}"),
    ("provider-key", "1//0", r"[0-9A-Za-z_-]{30,}"),
    ("provider-key", "gsk_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "xai-", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "pplx-", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "hf_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "|r8_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "nvapi-", r"[A-Za-z0-9_-]{20,}"),
    ("provider-key", "lsv2_", r"[A-Za-z0-9]{2}_[A-Za-z0-9_]{20,}"),
    ("provider-key", "tvly-", r"[A-Za-z0-9_-]{16,}"),
    ("provider-key", "pcsk_", r"[A-Za-z0-9_]{16,}"),
    ("provider-key", "|fw_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "jina_", r"[A-Za-z0-9_-]{20,}"),
    ("provider-key", "esecret_", r"[A-Za-z0-9]{16,}"),
    ("provider-key", "|fc-", r"[a-f0-9]{32}"),
    ("provider-key", "ghp_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "gho_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "ghu_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "ghs_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "ghr_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "github_pat_", r"[A-Za-z0-9_]{20,}"),
    ("provider-key", "glpat-", r"[A-Za-z0-9_-]{16,}"),
    ("provider-key", "npm_", r"[A-Za-z0-9]{30,}"),
    ("provider-key", "pypi-", r"[A-Za-z0-9_-]{40,}"),
    ("provider-key", "xox", r"[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("provider-key", "xapp-", r"[0-9]-[A-Za-z0-9-]{10,}"),
    ("provider-key", "hooks.slack.com/", r"(?:services|workflows)/[A-Za-z0-9/_-]{16,}"),
    ("provider-key", "SG.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    ("provider-key", "|key-", r"[0-9a-f]{32}"),
    ("provider-key", "dop_v1_", r"[a-f0-9]{32,}"),
    ("provider-key", "shp", r"(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}"),
    ("provider-key", "dapi", r"[a-f0-9]{32}"),
    ("provider-key", "hvs.", r"[A-Za-z0-9_-]{20,}"),
    ("provider-key", "ATATT3", r"[A-Za-z0-9_=-]{20,}"),
    ("provider-key", "lin_api_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "ntn_", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "|secret_", r"[A-Za-z0-9]{32,}"),
    ("provider-key", "|EAAC", r"[A-Za-z0-9]{20,}"),
    ("provider-key", "|SK", r"[0-9a-f]{32}"),
    ("telegram-key", ":AA", r"[A-Za-z0-9_-]{30,}"),
    ("cloud-key", "AKIA", r"[0-9A-Z]{16}"),
    ("cloud-key", "ASIA", r"[0-9A-Z]{16}"),
    ("cloud-key", "ABSK", r"[A-Za-z0-9+/=]{40,}"),
    ("cloud-key", "AccountKey=", r"[A-Za-z0-9+/=]{16,}"),
    ("cloud-key", "SharedAccess", r"(?:Key|Signature)[= ][A-Za-z0-9+/=%&. -]{16,}"),
    ("signed-url", "|sig=", r"[A-Za-z0-9%+/_-]{16,}={0,2}"),
    ("signed-url", "X-Amz-", r"(?:Signature|Security-Token|Credential)=[A-Za-z0-9%/+_.-]{8,}"),
)  # fmt: skip

# Found in any case, as headers and options are written.
_JOIN = r"""[\\"']{0,4}\s{0,3}(?::|=>?|%3[Dd])\s{0,3}"""
_WORD = r"""[^\s"'&,;(){}\[\]\\]"""
_SET = _JOIN + r"""(?:[rbfu]{0,2}\\{0,3}["'][^"'\\\r\n]{3,}|(?=%s{0,80}[0-9])%s{6,})""" % (_WORD, _WORD)  # noqa: UP031
_ANY_CASE: tuple[tuple[str, str, str], ...] = (
    ("bearer", "bearer", r"""(?:\s|%20|[+:="'])+[A-Za-z0-9._~+/=:-]{6,}"""),
    ("basic", "basic ", r" *(?=[A-Za-z0-9+/_-]+[A-Z0-9=])[A-Za-z0-9+/_-]{8,}={0,2}"),
    ("url-password", "://", r"""[^\s/@:"'<>\\]{0,1024}:[^\s/@"'<>\\]{1,1024}(?=@)"""),
    ("cookie", "cookie:", r"[^\r\n]{4,}"),
    ("cloud-key", "aws", r"""[A-Za-z_.\s"']{0,24}["']?\s{0,3}[:=]\s{0,3}["']?[A-Za-z0-9/+]{40}"""),
    ("assignment", "password", _SET),
    ("assignment", "passwd", _SET),
    ("assignment", "passphrase", _SET),
    ("assignment", "api", "[_-]?[Kk][Ee][Yy]" + _SET),
    ("assignment", "secret", "(?:[_-]?[Aa][Cc][Cc][Ee][Ss][Ss])?(?:[_-]?[Kk][Ee][Yy])?" + _SET),
    ("assignment", "token", _JOIN + r"""["']?(?=[A-Za-z0-9/+_.~-]{0,80}[0-9])[A-Za-z0-9/+_.~-]{16,}={0,2}"""),
)
# Not in source text, where ``login(password=password)`` is no secret.
_NOT_IN_SOURCE: tuple[tuple[str, str, str], ...] = (
    ("assignment", "password", _JOIN + _WORD + "{3,}"),
    ("assignment", "passwd", _JOIN + _WORD + "{3,}"),
    ("assignment", "|pwd=", r"(?!/)" + _WORD + "{3,}"),
)


class Redactor:
    """One capture's idea of what is secret. Grows while the capture learns values; never shrinks."""

    def __init__(self, environment: Mapping[str, str] | None = None, known: Iterable[str] = ()) -> None:
        self._known = _Known()
        self._names: dict[str, bool] = {}
        self.hits: dict[str, int] = {}
        for value in known:
            self.learn(value)
        for name, value in (environment or {}).items():
            if self.secret_name(name):
                self.learn(value)

    # Names.

    @property
    def names(self) -> dict[str, bool]:
        """What was asked so far, for loops that cannot afford a call."""
        return self._names

    def secret_name(self, name: str) -> bool:
        """Whether a text under this key, attribute, local or header is to be left out."""
        known = self._names.get(name)
        if known is None:
            known = looks_secret(name)
            if len(self._names) < _NAMES_KEPT:
                self._names[name] = known
        return known

    def doubtful(self, name: Any, value: Any) -> bool:
        """Whether a text is as keys are, and stands under a name that may be a key's: ``tokens``, ``cache_key``."""
        return isinstance(name, str) and isinstance(value, str) and may_be_secret(name) and looks_random(value)

    def learn(self, value: str) -> None:
        """A value that stood under a secret name: it goes wherever else it appears, in whatever spelling.

        Not where it is so short or ordinary that it would take out half of the dump: that is hidden in its place.
        """
        value = value.strip()
        lowered = value.lower()
        if not MIN_LEARNT <= len(value) <= MAX_KNOWN_CHARS or lowered in _ORDINARY:
            return
        if len(value) < (MIN_DIGITS if value.isdigit() else MIN_LETTERS if value.isalpha() else MIN_LEARNT):
            return
        bounded = len(value) < _UNBOUNDED or (value.isalpha() and value.islower()) or value.isdigit()
        self._known.add(value, bounded=bounded)

    def learn_arguments(self, arguments: Sequence[str]) -> None:
        """Values of a command line's options whose name looks secret: ``--password VALUE``, ``--token=VALUE``."""
        for option, following in pairwise([*arguments, ""]):
            name, sign, value = option.partition("=")
            if option.startswith("-") and self.secret_name(name.lstrip("-")):
                self.learn(value if sign else following)

    # The gate.

    def suspicious(self, packed: bytes, *, source: bool = False, strict: bool = False) -> bool:
        """Whether packed bytes hold something that looks secret.

        Fast, because it searches a whole chunk at once. It may take something harmless for a secret; with ``strict``
        it looks at what stands in front, as ``clean`` does.
        """
        return next(self._spans(packed, source=source, strict=strict), None) is not None

    def clean(self, text: str, *, source: bool = False) -> str:
        """The text with every secret replaced by a mark that names its kind."""
        data = text.encode("utf-8", "backslashreplace")
        cleaned = self.clean_bytes(data, source=source)
        return text if cleaned is data else cleaned.decode("utf-8", "replace")

    def clean_bytes(self, data: bytes, *, source: bool = False) -> bytes:
        """As ``clean``, for bytes that may hold text. The same object when nothing was found."""
        spans = sorted(self._spans(data, source=source, strict=True))
        if not spans:
            return data
        pieces: list[bytes] = []
        done = 0
        for start, end, kind in spans:
            if end <= done:
                continue
            if start >= done:
                pieces += (data[done:start], f"[redacted {kind}]".encode())
                self.hits[kind] = self.hits.get(kind, 0) + 1
            done = end
        return b"".join((*pieces, data[done:]))

    def safe_cut(self, text: str, limit: int) -> int:
        """Where to cut a text that is longer than the limit: at it, or in front of a secret that spans it."""
        start = max(0, limit - MAX_KNOWN_CHARS)
        window = text[start : limit + MAX_KNOWN_CHARS].encode("utf-8", "surrogatepass")
        cut = length = len(text[start:limit].encode("utf-8", "surrogatepass"))
        for first, last, _kind in sorted(self._spans(window, strict=True), reverse=True):
            if first < cut < last:  # in this order, because a cut that moved may now be inside an earlier one
                cut = first
        return limit if cut == length else start + len(window[:cut].decode("utf-8", "surrogatepass"))

    def _spans(self, data: bytes, *, source: bool = False, strict: bool) -> Iterator[tuple[int, int, str]]:
        for at, end in self._known.found(data, strict=strict):
            yield at, end, "known-value"
        for at, rule in _candidates(data):
            match = rule.rest.match(data, at + len(rule.literal))
            if match and not (strict and rule.bounded and _glued(data, at, match.end())):
                yield at, match.end(), rule.kind
        folded = data.lower()
        for rule in _FOLDED if source else _FOLDED_TEXT:
            at = folded.find(rule.literal)
            while at >= 0:
                match = rule.rest.match(data, at + len(rule.literal))
                if match and not (strict and rule.bounded and _glued(data, at, match.end())):
                    yield at + rule.keep, match.end(), rule.kind
                    at = match.end() - 1
                at = folded.find(rule.literal, at + 1)

    def scrub(self, value: Any, *, source: bool = False) -> Any:
        """A payload (plain values only) with every text cleaned, also those that MessagePack cannot hold."""
        kind = type(value)
        if kind is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                value = value.encode("utf-8", "backslashreplace").decode()
            return self.clean(value, source=source) if len(value) >= MIN_LEARNT else value
        if kind is bytes:
            return self.clean_bytes(value) if len(value) >= MIN_LEARNT else value
        if kind is list or kind is tuple:
            return [self.scrub(item, source=source) for item in value]
        if kind is dict:
            return {self.scrub(key): self.scrub(item, source=source) for key, item in value.items()}
        if kind is int and not -(2**63) <= value < 2**64:
            return f"an integer of {value.bit_length()} bits"
        return value


class _Known:
    """Values that are known to be secret, each in the spellings that other formats make of it."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._bounded: dict[bytes, bool] = {}  # spelling -> whether it counts only where it is a word of its own
        self._single: list[bytes] = []  # those that no pattern finds yet
        self._by_beginning: dict[bytes, list[bytes]] = {}
        self._pattern: re.Pattern[bytes] | None = None

    def add(self, value: str, *, bounded: bool) -> None:
        if value in self._values or len(self._values) >= MAX_KNOWN:
            return
        self._values.add(value)
        for spelling in _spellings(value):
            if spelling not in self._bounded:
                self._bounded[spelling] = bounded
                self._single.append(spelling)
        if len(self._single) > _SEARCHED_SINGLY:
            self._gather()

    def found(self, data: bytes, *, strict: bool) -> Iterator[tuple[int, int]]:
        for spelling in self._single:
            at = data.find(spelling)
            while at >= 0:
                end = at + len(spelling)
                if not (strict and self._bounded[spelling] and _inside_word(data, at, end)):
                    yield at, end
                at = data.find(spelling, end)
        match = self._pattern.search(data) if self._pattern is not None else None
        while match is not None and self._pattern is not None:
            at = match.start()
            for spelling in self._by_beginning[match[0]]:
                end = at + len(spelling)
                if data.startswith(spelling, at) and not (
                    strict and self._bounded[spelling] and _inside_word(data, at, end)
                ):
                    yield at, end
                    break
            match = self._pattern.search(data, at + 1)

    def _gather(self) -> None:
        """From now on, all that are known by one pattern: its time does not grow with their number."""
        for spelling in self._single:
            self._by_beginning.setdefault(spelling[:_BEGINNING], []).append(spelling)
        # A beginning that another one begins with would hide it: both are looked for by the shorter one.
        for short in [beginning for beginning in self._by_beginning if len(beginning) < _BEGINNING]:
            for other in [long for long in self._by_beginning if long != short and long.startswith(short)]:
                self._by_beginning[short] += self._by_beginning.pop(other)
        for spellings in self._by_beginning.values():
            spellings.sort(key=len, reverse=True)
        self._pattern = re.compile(_any_of(list(self._by_beginning)))
        self._single.clear()


def _spellings(value: str) -> set[bytes]:
    """The value as it stands, as `repr` and JSON write it (twice, where one is inside of another), and in a URL."""
    plain = value.encode("utf-8", "surrogatepass")
    found = {plain, repr(plain)[2:-1].encode()}
    if not value.isalnum() or not value.isascii():
        once = {repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        twice = {text for form in once for text in (repr(form)[1:-1], json.dumps(form)[1:-1])}
        urls = {form(plain) for form in (quote, quote_plus)} | {quote(plain, safe="")}
        found |= {text.encode("utf-8", "surrogatepass") for text in once | twice | urls}
    return found


def _inside_word(data: bytes, at: int, end: int) -> bool:
    """Whether what stands there is a piece of a longer word or number."""
    return data[at - 1 : at].isalnum() or data[end : end + 1].isalnum()


BY_NAME = "[redacted by name]"  # instead of a value whose name says that it is secret


def looks_secret(name: str) -> bool:
    """``OPENAI_API_KEY``, ``dbPassword``, ``X-Auth-Token``; not ``max_tokens``, ``passages``, ``author``."""
    if len(name) > 200 or name in ("PWD", "OLDPWD"):
        return False
    words = [word.lower() for word in _SPLIT.findall(name)]
    lowered = "".join(words)
    if any(part in lowered for part in ("password", "passwd", "passphrase", "apikey", "credential", "secretkey")):
        return True
    if _HARMLESS_WORDS.intersection(words):
        return any(word in ("password", "secret") for word in words)
    if _WORDS.intersection(words) or lowered in _WORDS:
        return True
    if words and words[-1] == "key" and len(words) > 1 and name.isupper():
        return True  # OPENAI_KEY, STRIPE_KEY: variables, not a dictionary's sort_key
    if words and words[-1] == "pass" and len(words) > 1 and name.isupper():
        return True  # DB_PASS
    return any(f"{first}_{second}" in _PAIRS for first, second in pairwise(words))


def may_be_secret(name: str) -> bool:
    """Whether a name is that of many other things, too: ``tokens``, ``cache_key``."""
    return len(name) <= 200 and not _DOUBTFUL_WORDS.isdisjoint(word.lower() for word in _SPLIT.findall(name))


def looks_random(text: str) -> bool:
    """Whether a text is as a machine makes keys: long, without spaces, letters and digits mixed."""
    return len(text) >= 16 and _KEY.fullmatch(text) is not None and any(map(str.isdigit, text)) and not text.isdigit()


class _Rule:
    """One shape, ready to search."""

    __slots__ = ("bounded", "keep", "kind", "literal", "rest")

    def __init__(self, kind: str, literal: str, rest: str) -> None:
        self.kind = kind
        self.bounded = literal.startswith("|")
        self.literal = literal.removeprefix("|").encode()
        if kind == "provider-key":  # whatever follows without a break belongs to it
            rest = rest.replace("[A-Za-z0-9]{", "[A-Za-z0-9_-]{")
        self.rest = re.compile(rest.encode())
        self.keep = len(self.literal) if literal == "://" else 0


# Keys that nothing else looks like, whatever stands in front; and what is random enough to be one.
_DISTINCT = re.compile(rb"sk-(?:proj|ant|svcacct|or-v1)-")
_RANDOM = re.compile(rb"(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{20,}")
_DIGIT = re.compile(rb"[0-9]")


def _glued(data: bytes, at: int, end: int) -> bool:
    """Whether a shape is the end of a word: ``task-...``, ``disk_...``. A key may stand behind anything, too.

    Behind an escape (a backslash and n, %3D), a length or another text. Of words, a vowel stands before these endings.
    """
    before = data[at - 1 : at]
    if not at or not before.isalnum() or data[max(0, at - 3) : at].startswith(b"%") or _DISTINCT.match(data, at):
        return False
    if before not in b"aeiouyAEIOUY" and _DIGIT.search(data, at, end):
        return False
    return data[at:end].islower() or _RANDOM.search(data, at, end) is None


def _any_of(literals: list[bytes]) -> bytes:
    """A pattern for any of them that shares their beginnings, which the search needs to be fast."""
    if b"" in literals:
        return b""
    firsts = sorted({literal[:1] for literal in literals})
    ways = [re.escape(first) + _any_of([word[1:] for word in literals if word[:1] == first]) for first in firsts]
    return ways[0] if len(ways) == 1 else b"(?:" + b"|".join(ways) + b")"


_RULES = {rule.literal: rule for rule in (_Rule(*shape) for shape in _SHAPES)}
_FOLDED = tuple(_Rule(*shape) for shape in _ANY_CASE)
_FOLDED_TEXT = (*_FOLDED, *(_Rule(*shape) for shape in _NOT_IN_SOURCE))

# Every shape but the block of a private key lies in a run of these characters, and prose has few long runs of them.
# Mapping bytes to classes and searching for a run is many times faster than searching for sixty literals.
_RUN_CHARS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+/=%.:~"
_CLASSES = bytes(ord("x") if byte in _RUN_CHARS else ord(" ") for byte in range(256))
_RUN = b"x" * 14
_BLOCK = b"-----BEGIN"
_LITERALS = re.compile(_any_of(list(_RULES)))


def _candidates(data: bytes) -> Iterator[tuple[int, _Rule]]:
    """Where a literal of a shape stands, and the shape."""
    at = data.find(_BLOCK)
    while at >= 0:
        yield at, _RULES[_BLOCK]
        at = data.find(_BLOCK, at + 1)
    classes = data.translate(_CLASSES)
    at = classes.find(_RUN)
    while at >= 0:
        end = classes.find(b" ", at)
        end = len(data) if end < 0 else end
        found = _LITERALS.search(data, at, end)
        while found:
            yield found.start(), _RULES[found[0]]
            found = _LITERALS.search(data, found.start() + 1, end)
        at = classes.find(_RUN, end)


# -- looking for secrets ----------------------------------------------------------------------------------------------


# What the names above a value say of it. Below a secret name so many levels of containers are secret.
_PLAIN, _DOUBTFUL, _LAST, _SECRET = 0, 1, 2, 5
_HERE = __file__.rpartition("/")[0] + "/"
_ITEMS = 100_000  # of one container
_SHAPED = 64  # keys of a dictionary whose keys are remembered
_LEAVES = frozenset(map(id, (str, bytes, bytearray, int, float, complex, bool, type(None))))
_SKIPPED = frozenset(map(id, (types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, type)))
_PASSED = _LEAVES | _SKIPPED
_FIELD = 40  # characters of a key that is a field's name
_SUSPENDED = (
    (types.CoroutineType, "cr_frame"),
    (types.GeneratorType, "gi_frame"),
    (types.AsyncGeneratorType, "ag_frame"),
)


class Look:
    """One look. ``whole`` says whether it saw everything that the roots lead to."""

    def __init__(self, redactor: Redactor, most: int, until: float) -> None:
        self.whole = True
        self._redactor = redactor
        self._left = most
        self._until = until
        self._waiting: deque[tuple[Any, int]] = deque()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that an identity stays its object's
        self._doubtful: dict[str, bool] = {}
        self._shapes: dict[tuple[int, ...], bool] = {}

    def frame(self, frame: types.FrameType, *, with_globals: bool) -> None:
        """Names of a frame, and of its module where that is the program's own. Our own frames hold nothing of it."""
        if frame.f_code.co_filename.startswith(_HERE):
            return
        named = frame_locals(frame, _ITEMS)
        self.named(named[0] if named else ())
        own = frame.f_globals
        if with_globals and type(own) is dict and id(own) not in self._seen:
            self._seen[id(own)] = _SECRET  # once
            self.named(first_items(own, _ITEMS))

    def named(self, items: Iterable[tuple[Any, Any]]) -> None:
        self._held.append(items)
        for name, value in items:
            self._met(value, self._level(name, _PLAIN))

    def run(self) -> None:
        """Follow everything that is waiting, the nearest first. Most of it is plain, and costs no call."""
        waiting, seen, harmless = self._waiting, self._seen, self._harmless
        while waiting:
            self._left -= 1
            if self._left < 0 or (not self._left % 64 and monotonic() > self._until):
                self.whole = False
                break
            value, level = waiting.popleft()
            kind = type(value)
            try:
                if level or not (
                    (kind is dict and harmless(value)) or ((kind is list or kind is tuple) and len(value) != 2)
                ):
                    self._below(value, level)
                    continue
                for item in list(value.values()) if kind is dict else value[:_ITEMS]:
                    if id(type(item)) not in _PASSED and id(item) not in seen:
                        seen[id(item)] = _PLAIN
                        waiting.append((item, _PLAIN))
            except Exception:  # noqa: BLE001, S112 (an object in any state may be met; the look goes on)
                continue
        waiting.clear()
        seen.clear()
        self._held.clear()

    def _level(self, name: Any, above: int) -> int:
        if above >= _LAST:
            return above
        if type(name) is bytes and len(name) < 100:
            name = name.decode("latin-1")
        if type(name) is not str:
            return above
        if self._redactor.secret_name(name):
            return _SECRET
        doubtful = self._doubtful.get(name)
        if doubtful is None:
            doubtful = self._doubtful[name] = may_be_secret(name)
        return _DOUBTFUL if doubtful else above

    def _met(self, value: Any, level: int) -> None:
        kind = type(value)
        if id(kind) in _LEAVES:
            if level:
                self._learn(value, level)
        elif id(kind) not in _SKIPPED and self._seen.get(id(value), -1) < level:
            self._seen[id(value)] = level
            self._waiting.append((value, level))

    def _learn(self, value: Any, level: int) -> None:
        """A value without parts, under a name that says something of it."""
        text = text_of_leaf(value)
        if text and (level >= _LAST or looks_random(text)):
            self._redactor.learn(text)

    def _below(self, value: Any, level: int) -> None:
        kind = type(value)
        layout = layout_of(kind)
        base: Any = layout.base
        level = level - 1 if level > _LAST else level if level < _LAST else _PLAIN
        if level == _PLAIN and base is object and layout.dictionary is not None and not layout.slots:
            self._waiting.append((layout.dictionary.__get__(value), level))
            return
        if base is dict:
            for key, item in first_items(value, _ITEMS):
                self._met(item, self._level(key, level))
                if level >= _LAST and not is_field(key):
                    self._learn(key, level)
        elif base is list or base is tuple:
            items = base.__getitem__(value, slice(0, _ITEMS))
            if layout.fields and len(layout.fields) == len(items):
                self._pairs(zip(layout.fields, items, strict=True), level)
            elif len(items) == 2:  # a header: ("authorization", "...")
                self._met(items[0], level)
                self._met(items[1], self._level(items[0], level))
            else:
                for item in items:
                    self._met(item, level)
        elif base is set or base is frozenset or base is deque:
            for item in list(islice(base.__iter__(value), _ITEMS)):
                self._met(item, level)
        elif text := text_of_leaf(value):
            if level:
                self._learn(text, level)
        elif kind is types.FunctionType:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                for inside in gc.get_referents(cell):  # none when it is empty
                    self._met(inside, self._level(name, _PLAIN))
            return
        elif kind is types.MethodType:
            self._met(value.__self__, _PLAIN)
            return
        elif kind is partial:
            self._met(value.args, _PLAIN)
            self._met(value.keywords, _PLAIN)
            return
        elif is_subtype(kind, BaseException):
            self._met(BaseException.__dict__["args"].__get__(value), level)
        elif any(kind is suspended for suspended, _name in _SUSPENDED):
            frame = next(getattr(value, name) for suspended, name in _SUSPENDED if kind is suspended)
            named = frame_locals(frame, _ITEMS) if frame is not None else None
            self._pairs(named[0] if named else (), level)
            return
        if not is_builtin(kind):
            self._attributes(layout.attributes(value, _ITEMS)[0], level)

    def _harmless(self, own: dict[Any, Any]) -> bool:
        """Whether the keys are names that say nothing. Of most dictionaries there are many with the same keys."""
        if len(own) > _SHAPED:
            return False
        shape = tuple(map(id, own))
        known = self._shapes.get(shape)
        if known is None:
            names = [*own]
            self._held.append(names)
            known = self._shapes[shape] = all(
                type(name) is str and self._level(name, _PLAIN) == _PLAIN for name in names
            )
        return known

    def _attributes(self, named: list[tuple[str, Any]], level: int) -> None:
        """Of an object under a secret name, texts and numbers are secret; what else it refers to may be anything."""
        for name, item in named:
            self._met(item, self._level(name, level if id(type(item)) in _LEAVES else _PLAIN))

    def _pairs(self, named: Iterable[tuple[Any, Any]], level: int) -> None:
        named = list(named)
        self._held.append(named)
        for name, item in named:
            self._met(item, self._level(name, level))


def is_field(key: Any) -> bool:
    """Whether a key is the name of a field, as ``user`` in ``credentials``; what else is a key may be secret itself."""
    return type(key) is str and len(key) <= _FIELD and key.replace("-", "_").isidentifier() and not any(
        map(str.isdigit, key)
    )  # fmt: skip
