"""What failed, and which names of the program have to do with it: read from a dump, nothing executed.

Owns the failing statement, the numbers that were there, and the *names graph* of the program's own source: which names
and keys flow into which, as far as assignments, calls, conditions and loops say. It is walked backwards from the
failing statement, and a name counts the less the more steps it is away. Must not know the agent's history. What always
holds: source is parsed and never executed; all that is taken from a dump is bounded, since nobody vouches for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.crash.records import Failure as Raised
from holdfast.crash.records import Frame, innermost

if TYPE_CHECKING:
    from holdfast.crash.dump import Dump

SOURCE_MAX = 400_000
FILES_MAX = 40
NUMBERS_MAX = 24
UNUSUAL_MAX = 5
ROOT = "state"
"""What programs call the whole state, ours among them."""
REPAIRS_MAX = 20
"""Lines of a file that may be unreadable."""
NEAR = 0.85
"""What a name counts that is one step of the graph away."""
INSIDE = 0.9
"""What a place counts, of what the container counts that it is in."""
LEAST = 0.05
"""A name that counts less is as good as unknown."""
ENVIRONMENT = frozenset(
    {
        "MemoryError", "KeyboardInterrupt", "SystemExit", "OSError", "ConnectionError", "TimeoutError",
        "BrokenPipeError",
        "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BlockingIOError", "gaierror",
        "InterruptedError", "CancelledError", "SSLError", "DiskFull", "StoreUnavailable",
    }
)  # fmt: skip
"""Errors by which the surroundings end a program that may be sound."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")
_REDACTED = re.compile(r"\[redacted [\w -]{1,40}\]")
_MUTATING = frozenset({"append", "add", "extend", "insert", "update", "setdefault", "remove", "discard", "appendleft"})
Token = tuple[str, str]  # ("", key) for keys, attributes and functions; (function, name) for a local name


@dataclass
class Failure:
    """What went wrong. ``weights`` says how much each key of the program has to do with it, from 0 to 1.

    Empty without a dump: then nothing is known but ``error``.
    """

    error: str = ""
    kind: str = ""
    place: str = ""
    source: str = ""
    values: list[tuple[str, str]] = field(default_factory=list)
    """The local names of the failing frame, with their values as text."""
    numbers: list[float] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    """Every key that the program's source speaks of."""
    spelled: frozenset[str] = frozenset()
    """Those that it reads or writes by their name."""
    unusual: list[str] = field(default_factory=list)
    """What the dump shows of memory, descriptors, threads and such."""
    environment: bool = False
    """Whether it looks as if the surroundings ended it, not a fault of its own."""

    def weight(self, path: Sequence[Any]) -> float:
        """How much a place of the state has to do with the failure. Without a source, nobody knows: a half."""
        if not self.known:
            return 0.5
        best, counts = 0.0, 1.0
        for part in reversed(path):
            if isinstance(part, str) and part in self.known:
                best = max(best, counts * self.weights.get(part, 0.0))
                if part in self.spelled:
                    break
            counts *= INSIDE  # a key that is computed is not in the source: what it is in stands for it
        return best


def of_dump(dump: Dump) -> Failure:
    """What a dump says about the failure."""
    from holdfast.crash.display import source_line, text_of
    from holdfast.crash.summary import headline, place, signs

    raised = _first(dump.exceptions)
    found = Failure(error=headline(dump), kind=raised.type_name.rpartition(".")[2] if raised is not None else "")
    names = {found.kind, *(base.rpartition(".")[2] for base in (raised.bases if raised is not None else ()))}
    found.environment = bool(names & ENVIRONMENT) or (raised is None and dump.death is not None)
    found.unusual = signs(dump)[:UNUSUAL_MAX]
    frames = raised.frames if raised is not None else ()
    if not frames:
        return found
    at = innermost(frames)
    frame = frames[at]
    found.place, found.source = (
        f"{place(frame, dump.process.cwd)} in {frame.function}",
        source_line(dump, frame).strip(),
    )
    found.values = [(name, text_of(dump, value, width=120)) for name, value in frame.locals[:NUMBERS_MAX]]
    plain = [value for _, value in frame.locals if isinstance(value, int | float) and not isinstance(value, bool)]
    written = [float(text) for text in _NUMBER.findall((raised.message if raised is not None else "")[:2_000])]
    found.numbers = list(dict.fromkeys([*map(float, plain[:NUMBERS_MAX]), *written[:NUMBERS_MAX]]))
    sources = {
        one.file: "\n".join(source.lines)
        for one in frames
        if one.mine and (source := dump.sources.get(one.file)) is not None and source.whole
    }
    found.weights, found.known, found.spelled = weighed(sources, [one for one in frames if one.mine])
    return found


def _first(chain: Sequence[Raised]) -> Raised | None:
    """The exception that a chain began with."""
    at, seen = 0, set[int]()
    while at < len(chain) and at not in seen:
        seen.add(at)
        before = chain[at].before
        before = next(iter(chain[at].group), None) if before is None else before
        if before is None:
            return chain[at]
        at = before
    return chain[0] if chain else None


# -- the names graph -----------------------------------------------------------------------------------------------


def weighed(
    sources: Mapping[str, str], frames: Sequence[Frame]
) -> tuple[dict[str, float], frozenset[str], frozenset[str]]:
    """How much each key has to do with the innermost frame's statement, all keys, and those that are spelled out."""
    graph = Graph()
    for file in list(sources)[:FILES_MAX]:
        text = sources[file]
        if len(text) > SOURCE_MAX:
            continue
        tree = _parsed(text)
        if tree is not None:
            graph.read(file, tree)
    weights: dict[Token, float] = {}
    for distance, frame in enumerate(reversed(frames)):
        # The frames outside say with what the innermost function was called.
        for token in graph.statement(frame.file, frame.line):
            weights[token] = max(weights.get(token, 0.0), NEAR ** (2 * distance))
    reached = sorted(weights, key=lambda token: -weights[token])
    while reached:
        token = reached.pop(0)
        near = weights[token] * NEAR
        for before in graph.into.get(token, ()) if near >= LEAST else ():
            if weights.get(before, 0.0) < near:
                weights[before] = near
                reached.append(before)
    found = {name: weight for (function, name), weight in weights.items() if not function}
    return found, frozenset(graph.keys), frozenset(graph.spelled)


def _parsed(text: str) -> ast.Module | None:
    """The source of a file; lines that cannot be read, as where something was redacted, count as empty."""
    lines = _REDACTED.sub("redacted", text).split("\n")
    for _ in range(REPAIRS_MAX):
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines):
                return None
            bare = lines[at].lstrip()
            lines[at] = f"{lines[at][: len(lines[at]) - len(bare)]}{'if redacted:' if bare.endswith(':') else 'pass'}"
        except (ValueError, MemoryError, RecursionError):
            return None
    return None


class Graph:
    """What flows into what, in the source of a program; the same for every execution of it."""

    def __init__(self) -> None:
        self.into: dict[Token, set[Token]] = {}
        self.keys: set[str] = set()
        self.spelled: set[str] = set()  # keys that are read or written by their name
        self._paths: dict[Token, Token] = {}  # names for a place of something larger, and the key of that place
        self._statements: dict[str, list[tuple[int, int, set[Token]]]] = {}
        self._functions: dict[str, list[str]] = {}

    def read(self, file: str, tree: ast.Module) -> None:
        """Take in a file."""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                self._functions[node.name] = [
                    one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.keys.add(node.value)
            elif isinstance(node, ast.Attribute):
                self.keys.add(node.attr)
                self.spelled.add(node.attr)
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
            ):
                self.spelled.add(node.slice.value)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._name_places(node)
        self._lines = self._statements.setdefault(file, [])
        self._block(tree.body, "<module>", set())

    def statement(self, file: str, line: int) -> set[Token]:
        """The names in the statement at a line, and in the conditions that it is under."""
        around = [one for one in self._statements.get(file, ()) if one[0] <= line <= one[1]]
        return set().union(*(tokens for _, _, tokens in around)) if around else set()

    def _name_places(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Names that stand for a place: assigned from one, or handed one by a call."""
        for node in ast.walk(function):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    pairs += zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]  # type: ignore[attr-defined]
            for target, value in pairs:
                if isinstance(target, ast.Name) and (key := self._place_of(value, function.name)):
                    self._paths[function.name, target.id] = ("", key)
            if isinstance(node, ast.Call) and (name := _called(node.func)) in self._functions:
                for parameter, argument in zip(self._functions[name], node.args, strict=False):
                    if key := self._place_of(argument, function.name):
                        self._paths[name, parameter] = ("", key)

    def _place_of(self, node: ast.expr, function: str) -> str:
        """The key of the place that an expression stands for; empty for what is no place."""
        if isinstance(node, ast.Name):
            return ROOT if node.id == ROOT else self._paths.get((function, node.id), ("", ""))[1]
        return _key_of(node)

    def _flow(self, source: set[Token], target: Token) -> None:
        self.into.setdefault(target, set()).update(source - {target})

    def _block(self, body: Sequence[ast.stmt], function: str, under: set[Token]) -> None:
        for node in body:
            self._statement(node, function, under)

    def _statement(self, node: ast.stmt, function: str, under: set[Token]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._block(node.body, node.name, {("", f"{node.name}()called")})
            return
        if isinstance(node, ast.ClassDef):
            self._block(node.body, function, under)
            return
        inner = [
            part for name in ("body", "orelse", "finalbody", "handlers", "cases") for part in getattr(node, name, ())
        ]
        if not inner:
            end = node.end_lineno or node.lineno
            self._lines.append((node.lineno, end, self._tokens(node, function) | under))
        test = getattr(node, "test", None) or getattr(node, "iter", None) or getattr(node, "subject", None)
        below = under | self._tokens(test, function) if test is not None else under
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            source = self._tokens(node.value, function) | under
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for token in self._targets(target, function):
                    self._flow(source | ({token} if isinstance(node, ast.AugAssign) else set()), token)
                    if isinstance(target, ast.Subscript):  # whoever reads all of the container reads this, too
                        key = self._place_of(target.value, function)
                        name = target.value.id if isinstance(target.value, ast.Name) else ""
                        if key != ROOT:  # nobody reads the whole state
                            self._flow({token}, ("", key) if key else (function, name))
        elif isinstance(node, ast.For | ast.AsyncFor):
            for token in self._targets(node.target, function):
                self._flow(self._tokens(node.iter, function), token)
        elif isinstance(node, ast.Return) and node.value is not None:
            self._flow(self._tokens(node.value, function) | under, ("", f"{function}()"))
        for expression in ast.iter_child_nodes(node):
            if isinstance(expression, ast.expr):
                self._calls(expression, function, under)
        for part in inner:
            if isinstance(part, ast.ExceptHandler | ast.match_case):
                self._block(part.body, function, below)
            elif isinstance(part, ast.stmt):
                self._statement(part, function, below)

    def _calls(self, node: ast.expr, function: str, under: set[Token]) -> None:
        """What calls hand over, and what mutating methods and dict literals put where."""
        for part in ast.walk(node):
            if isinstance(part, ast.Dict):
                for key, value in zip(part.keys, part.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        self._flow(self._tokens(value, function) | under, ("", key.value))
            if isinstance(part, ast.comprehension):
                for token in self._targets(part.target, function):
                    self._flow(self._tokens(part.iter, function), token)
            if not isinstance(part, ast.Call):
                continue
            if isinstance(part.func, ast.Attribute) and part.func.attr in _MUTATING:
                given = set().union(*(self._tokens(one, function) for one in part.args), under)
                for token in self._targets(part.func.value, function):
                    self._flow(given | {token}, token)
            name = _called(part.func)
            if name in self._functions:
                self._flow(under, ("", f"{name}()called"))
                for parameter, argument in zip(self._functions[name], part.args, strict=False):
                    self._flow(self._tokens(argument, function), (name, parameter))
                for keyword in part.keywords:
                    self._flow(self._tokens(keyword.value, function), (name, keyword.arg or ""))

    def _targets(self, node: ast.expr, function: str) -> Iterator[Token]:
        """What an assignment to this changes: the innermost key that is spelled out, else the name."""
        if isinstance(node, ast.Tuple | ast.List):
            for one in node.elts:
                yield from self._targets(one, function)
        elif isinstance(node, ast.Name):
            yield function, node.id
        elif isinstance(node, ast.Attribute):
            yield "", node.attr
        elif isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                yield "", node.slice.value
            else:
                yield from self._targets(node.value, function)
        elif isinstance(node, ast.Starred):
            yield from self._targets(node.value, function)

    def _tokens(self, node: ast.AST | None, function: str) -> set[Token]:
        """The names and keys that a piece of code reads. Of ``state["a"]["b"]`` only ``b`` is read."""
        found: set[Token] = set()
        todo: list[ast.AST] = [node] if node is not None else []
        while todo:
            part = todo.pop()
            if isinstance(part, ast.Name):
                found.add((function, part.id))
            elif isinstance(part, ast.Attribute):
                found.add(("", part.attr))
                if not isinstance(part.value, ast.Name | ast.Attribute):
                    todo.append(part.value)
            elif isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
                key = part.slice.value
                found |= {("", key)} if isinstance(key, str) else set()
                if not isinstance(key, str) or isinstance(part.value, ast.Call):
                    todo.append(part.value)
                elif isinstance(part.value, ast.Name) and not self._place_of(part.value, function):
                    found.add((function, part.value.id))  # an answer, of which this is a part
            elif isinstance(part, ast.Call):
                name = _called(part.func)
                todo += [*part.args, *(keyword.value for keyword in part.keywords)]
                if isinstance(part.func, ast.Attribute):
                    todo.append(part.func.value)
                    if name in {"get", "pop", "setdefault"} and part.args and isinstance(part.args[0], ast.Constant):
                        found.add(("", str(part.args[0].value)))
                if name in self._functions:
                    found |= {("", f"{name}()"), ("", name)}
            elif isinstance(part, ast.Constant):
                continue
            else:
                todo += ast.iter_child_nodes(part)
        return found


def _key_of(node: ast.expr) -> str:
    """The innermost key of a place; empty for what is no place."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    if isinstance(node, ast.Subscript):
        return _key_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else ""


def _called(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
