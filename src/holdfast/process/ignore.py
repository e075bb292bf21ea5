"""Which paths are left out of a tree: the rules of ``.gitignore`` and ``.holdfastignore``.

Owns reading rules and remembering verdicts. Knows nothing of what becomes of a path.
What always holds: a verdict is that of the rules as they are now; it is remembered only as long as their text, and that
of every file of rules above it, is the same. Inside ``.git`` only ``.holdfastignore`` counts: git's own files are no
subject of its rules, and half of them would be no repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from holdfast.errors import BadOption
from holdfast.store.cipher import digest

try:
    from pathspec import GitIgnoreSpec
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern
except ImportError:  # an extra: who has no workspace does not need it
    GitIgnoreSpec, GitIgnoreSpecPattern = None, object  # type: ignore[assignment,misc]

RULES = (".gitignore", ".holdfastignore")
"""Later ones overrule earlier ones, deeper ones those above, and a later line those before it, as git has it."""

RULES_MAX_BYTES = 2**20

_STAR, _FIRST, _DEEP = "[^/]*", "^(?:.+/)?", "(?:/.+)?"
"""What the library makes of ``*``, and of ``**`` before the first name and between two."""


class _Line(GitIgnoreSpecPattern):
    """A line that is looked for in little time, however many wildcards it has.

    What stands between two wildcards is taken where it comes first, and for good: no later place fits better.
    """

    @classmethod
    def pattern_to_regex(cls, pattern: Any) -> tuple[Any, bool | None]:
        regex, include = super().pattern_to_regex(pattern)
        if regex is None:
            return regex, include
        first, *rest = regex.split(_STAR)
        for number, text in enumerate(rest):
            name = number < len(rest) - 1 and "/" not in text.replace("[^/]", "")  # otherwise a name ends there
            rest[number] = f"(?>[^/]*?{text})" if name else _STAR + text
        first, *rest = "".join([first, *rest]).split(_DEEP)
        if rest and first.startswith(_FIRST):
            first = f"^(?>(?:.+?/)??{first.removeprefix(_FIRST)}(?=/))"
        for number, text in enumerate(rest):
            rest[number] = f"(?>(?:/.+?)??{text}(?=/))" if number < len(rest) - 1 else _DEEP + text
        return "".join([first, *rest]), include


def _spec(text: str) -> GitIgnoreSpec:
    """The rules of a text. A line that says nothing that one could look for is passed over, as git does."""
    lines = []
    for line in text.splitlines():
        with suppress(ValueError, re.error):
            lines.append(_Line(line))
    return GitIgnoreSpec(lines, backend="simple")


class Rules:
    """What counts in one directory, and below it until a directory has rules of its own."""

    __slots__ = ("_above", "_git", "_place", "_specs", "_verdicts", "key")

    def __init__(self, place: str, texts: dict[str, str], above: Rules | None = None, *, git: bool = True) -> None:
        self._place = place
        self._above = above
        self._git = git
        self._specs = {name: _spec(text) for name, text in texts.items()}
        self._verdicts: dict[str, bool] = {}
        over = above.key if above is not None else b""
        self.key: bytes = digest(b"rules", over, repr((place, texts, git)).encode())
        """What names these rules, and all above them."""

    @property
    def git(self) -> bool:
        """Whether git's rules count here."""
        return self._git

    @property
    def empty(self) -> bool:
        """Whether nothing is left out here."""
        return not self._specs and (self._above is None or self._above.empty)

    def ignores(self, path: str) -> bool:
        """Whether a path, relative to the root, is left out. A directory's ends with a slash."""
        verdict = self._verdicts.get(path)
        if verdict is None:
            verdict = self._verdicts[path] = self._judge(path, self._git) or False
        return verdict

    def _judge(self, path: str, git: bool) -> bool | None:
        relative = path[len(self._place) :]
        for name in reversed(RULES):
            if name in self._specs and (git or name != ".gitignore"):
                verdict = self._specs[name].check_file(relative).include
                if verdict is not None:
                    return verdict
        return None if self._above is None else self._above._judge(path, git)


class Ignore:
    """The rules of one tree. ``lines`` count as if they stood in a file above its root."""

    def __init__(self, lines: tuple[str, ...] = ()) -> None:
        if GitIgnoreSpec is None:
            raise BadOption("a workspace needs the package pathspec", hint="pip install 'holdfast[workspace]'")
        self.above = Rules("", {".holdfastignore": "\n".join(lines)} if lines else {})
        self._known: dict[str, tuple[Rules, dict[str, str], Rules]] = {}

    def enter(self, place: str, above: Rules, fd: int, names: Collection[str]) -> Rules:
        """The rules in an open directory, given those above it. Its path ends with a slash; the root's is empty."""
        git = _git(place, above)
        files = [name for name in RULES if name in names and (git or name != ".gitignore")]
        return self._of(place, above, {name: _text(fd, name) for name in files}, git=git)

    def _of(self, place: str, above: Rules, texts: dict[str, str], *, git: bool) -> Rules:
        if not texts and git == above.git:
            self._known.pop(place, None)
            return above
        known = self._known.get(place)
        if known is not None and known[0] is above and known[1] == texts:
            return known[2]
        rules = Rules(place, texts, above, git=git)
        self._known[place] = (above, texts, rules)
        return rules


def left_out(paths: Iterable[tuple[str, bool]], texts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Those of some paths that the rules of a tree leave out, which need not be on a disk.

    With each comes whether it is a directory. ``texts``: what files of rules say, by directory and by name.
    """
    ignore = Ignore()
    for path, folder in paths:
        rules, place = ignore.above, ""
        *above, last = path.split("/")
        for name in (*(one + "/" for one in above), last + "/" * folder):
            git = _git(place, rules)
            here = {one: text for one, text in texts.get(place, {}).items() if git or one != ".gitignore"}
            rules = ignore._of(place, rules, here, git=git)
            place += name
            if rules.ignores(place):
                yield path
                break


def _git(place: str, above: Rules) -> bool:
    """Whether git's rules count in a directory."""
    return above.git and not (place == ".git/" or place.endswith("/.git/"))


def _text(fd: int, name: str) -> str:
    """What a file of rules says. One that cannot be read, or is no file, says nothing: then more is kept."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return ""
    try:
        return os.fsdecode(os.read(file, RULES_MAX_BYTES))
    except OSError:
        return ""
    finally:
        os.close(file)
