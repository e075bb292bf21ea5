"""Invariants: what must hold of a state, at every checkpoint and over a history.

Owns the kinds of invariants, how one is checked, and the walk over a history. Must not know how a checkpoint is taken:
whoever takes one asks ``Guards``. What always holds: a state that breaks an invariant is not saved as a good one: it is
refused, or its checkpoint is marked suspect in the transaction that writes it; what an invariant looks at is what is
saved, however many threads there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.names import check_label
from holdfast.agent.points import UNSAVED
from holdfast.codec.classes import Record
from holdfast.codec.document import Document
from holdfast.codec.values import encode
from holdfast.errors import BadOption, Damaged, HoldfastError, InvariantViolated, format_path
from holdfast.run.host import Judged
from holdfast.travel.expressions import MISSING, Expression, Look, Path, inside, parse_path

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent

log = logging.getLogger("holdfast.travel")

Then = Literal["warn", "refuse", "rollback"]
MOST = 3
"""How often in a row the agent goes back by itself, if nobody says."""
_WHY = 200
_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float), "integer": (int,), "text": (str,), "string": (str,), "boolean": (bool,),
    "list": (list,), "array": (list,), "dict": (dict,), "object": (dict,), "null": (type(None),),
}  # fmt: skip
_OPTIONS = ("type", "range", "monotonic", "unique", "references", "schema")
_ORDERS = {"up": "has gone down", "down": "has gone up"}


class Invariant:
    """Something that must hold. ``then`` says what happens where it does not: ``warn``, ``refuse`` or ``rollback``."""

    def __init__(
        self,
        what: str | Callable[[Any], Any],
        *,
        name: str = "",
        then: Then = "warn",
        most: int = MOST,
        required: bool = False,
        type: Any = None,
        range: Sequence[Any] | None = None,
        monotonic: Literal["up", "down"] | None = None,
        unique: bool | str = False,
        references: str | None = None,
        field: str | None = None,
        schema: Any = None,
    ) -> None:
        """As ``Agent.invariant``."""
        given = (type, range, monotonic, unique or None, references, schema)
        rules = {option: value for option, value in zip(_OPTIONS, given, strict=True) if value is not None}
        if then not in get_args(Then):
            raise BadOption(f"then={then!r}", hint="Use warn, refuse or rollback.")
        if most < 1:
            raise BadOption(f"most={most!r}", hint="Use a number from 1 on.")
        self.then, self.most, self._required = then, most, required
        self._function = what if callable(what) else None
        self._expression: Expression | None = None
        self.path: Path = ()
        if self._function is not None and (rules or required):
            raise BadOption("a function takes no rules", hint="Give a path with rules, or a function alone.")
        if not callable(what):
            if rules or required:
                self.path = parse_path(what)
            else:
                self._expression = Expression(what)
        self._field = parse_path(field) if field is not None else ()
        self._rules = [(option, _rule(option, value)) for option, value in rules.items()]
        self._references = parse_path(references) if references is not None else ()
        said = getattr(what, "__name__", "") if callable(what) else what
        self.name = check_label(name or " ".join([str(said), *rules])[:_WHY])

    @property
    def sections(self) -> set[str] | None:
        """The sections that it looks at; None: all."""
        return None if self._function is not None or () in self.paths else {str(path[0]) for path in self.paths}

    @property
    def paths(self) -> set[Path]:
        """The places that it speaks of; of a function nobody knows."""
        if self._expression is not None:
            return self._expression.paths
        return {self.path, self._references or self.path} if self._function is None else set()

    @property
    def relative(self) -> bool:
        """Whether it compares a state with the one before."""
        return any(option == "monotonic" for option, _ in self._rules)

    def broken(self, document: Document, look: Look, before: Look | None) -> str:
        """Why the state breaks it; empty where it does not. ``before`` is the state that it came from, if any."""
        try:
            if self._function is not None:
                answer = self._function(document)
                return "" if answer is None or answer else f"it returned {answer!r:.80}"
            with document.lock:
                if self._expression is not None:
                    return "it is false" if self._expression.broken(look) else ""
                return self._declared(look, before)
        except (Damaged, KeyboardInterrupt):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a check raises, the state has not passed it
            return reason_of(error)

    def _declared(self, look: Look, before: Look | None) -> str:
        value = look.at(self.path)
        if value is MISSING:
            return f"{format_path(self.path)} is missing" if self._required else ""
        where = format_path(self.path)
        for option, rule in self._rules:
            if option == "monotonic":
                old = before.at(self.path) if before is not None else MISSING
                why = rule(old, value) if old is not MISSING else ""
            elif option in {"unique", "references"}:
                items = _items(value, self._field)
                why = rule(items) if option == "unique" else _dangling(items, look.at(self._references))
            else:
                why = rule(value)
            if why:
                return f"{where} {why}"[:_WHY]
        return ""

    def __repr__(self) -> str:
        return f"<Invariant {self.name!r}, then {self.then}>"


def reason_of(error: BaseException) -> str:
    """Why a check could not answer, on one line."""
    said = error.message if isinstance(error, HoldfastError) else str(error)
    return " ".join(f"{type(error).__name__}: {said}".split()).removesuffix(":")[:_WHY]


def declared(table: Mapping[str, Any], where: str) -> Invariant:
    """An invariant from a table of a file: ``path`` or ``check`` (an expression), and the options of the method."""
    options = dict(table)
    if ("path" in options) == ("check" in options):
        raise BadOption(f"{where}: an invariant has a path or a check", hint='Write path = "budget", range = [0, 100].')
    what = options.pop("path", None) or options.pop("check", None)
    known = {*_OPTIONS, "name", "required", "field"}
    if unknown := set(options) - known:
        raise BadOption(f"{where}: there is no {min(unknown)!r}", hint=f"It may have {', '.join(sorted(known))}.")
    try:
        return Invariant(str(what), **options)
    except (TypeError, HoldfastError) as error:
        said, hint = (error.message, error.hint) if isinstance(error, HoldfastError) else (str(error), "")
        raise BadOption(f"{where}: {said}", hint=hint) from None


# -- rules: each gives what is wrong with a value, or nothing ----------------------------------------------------------


def _rule(option: str, value: Any) -> Callable[..., str]:
    if option == "type":
        return _typed(value)
    if option == "range":
        return _ranged(value)
    if option == "monotonic":
        return _ordered(value)
    if option == "schema":
        return _schema(value)
    return _unique


def _typed(wanted: Any) -> Callable[[Any], str]:
    some = wanted if isinstance(wanted, list | tuple) else (wanted,)
    kinds: list[type] = []
    for one in some:
        if isinstance(one, str) and one in _TYPES:
            kinds += _TYPES[one]
        elif isinstance(one, type):
            kinds.append(one)
        else:
            raise BadOption(f"type={one!r:.80}", hint=f"Use a type, or one of {', '.join(_TYPES)}.")

    def check(value: Any) -> str:
        named = value.type_name if isinstance(value, Record) else type(value).__name__
        if isinstance(value, Record):  # read without its class
            fits = any(named.rpartition(".")[2] == kind.__qualname__.rpartition(".")[2] for kind in kinds)
        else:
            fits = isinstance(value, tuple(kinds)) and (bool in kinds or not isinstance(value, bool))
        return "" if fits else f"is of type {named}"

    return check


def _ranged(bounds: Any) -> Callable[[Any], str]:
    if not isinstance(bounds, list | tuple) or len(bounds) != 2 or bounds == (None, None):
        raise BadOption(f"range={bounds!r:.80}", hint="Use (lowest, highest); None for no limit.")
    low, high = (None if bound in {"", None} else bound for bound in bounds)

    def check(value: Any) -> str:
        if value != value:  # noqa: PLR0124 - NaN is in no order with anything
            return "is not a number"
        if low is not None and value < low:
            return f"is {value!r:.80}, below {low!r}"
        return f"is {value!r:.80}, above {high!r}" if high is not None and value > high else ""

    return check


def _ordered(direction: Any) -> Callable[[Any, Any], str]:
    if direction not in _ORDERS:
        raise BadOption(f"monotonic={direction!r}", hint="Use up or down.")

    def check(old: Any, new: Any) -> str:
        if new != new:  # noqa: PLR0124 - as above; from NaN to a number it is mended
            return f"is not a number, after {old!r:.80}"
        wrong = new < old if direction == "up" else new > old
        return f"{_ORDERS[direction]}, from {old!r:.80} to {new!r:.80}" if wrong else ""

    return check


def _schema(schema: Any) -> Callable[[Any], str]:
    if isinstance(schema, Mapping):
        try:
            from jsonschema import SchemaError  # type: ignore[import-untyped]
            from jsonschema.validators import validator_for  # type: ignore[import-untyped]
        except ImportError:
            raise BadOption(
                "JSON schemas need the package jsonschema", hint="Install it, or give a pydantic model."
            ) from None
        kind = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            where = f"at {format_path(tuple(error.absolute_path), '').lstrip('.')}: " if error.absolute_path else ""
            raise BadOption(f"that is no JSON schema: {where}{error.message:.200}") from None
        validator = kind(schema)

        def check(value: Any) -> str:
            error = next(validator.iter_errors(_plain(value)), None)
            return f"{format_path(tuple(error.absolute_path), '')}: {error.message}" if error is not None else ""

        return check
    try:
        from pydantic import PydanticUserError, TypeAdapter, ValidationError
    except ImportError:
        raise BadOption("such a schema needs the package pydantic", hint="Install it, or give a JSON schema.") from None

    try:
        adapter = TypeAdapter(schema)
    except PydanticUserError as error:
        raise BadOption(f"schema={schema!r:.80} says no type: {error.message:.200}") from None

    def validate(value: Any) -> str:
        try:
            adapter.validate_python(_plain(value))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return f"{format_path(tuple(first['loc']), '')}: {first['msg']}"
        return ""

    return validate


def _unique(items: list[Any]) -> str:
    seen: set[bytes] = set()
    for item in items:
        key = encode(item)
        if key in seen:
            return f"has {item!r:.80} twice"
        seen.add(key)
    return ""


def _dangling(items: list[Any], where: Any) -> str:
    there = {} if where is MISSING or where is None else where
    return next((f"refers to {item!r:.80}, which is not there" for item in items if item not in there), "")


def _items(value: Any, field: Path) -> list[Any]:
    """The items of a container, or what stands at ``field`` in each of them."""
    found = list(value.values()) if isinstance(value, dict) else list(value)
    for part in field:
        found = [item for item in (inside(one, part) for one in found) if item is not MISSING]
    return found


def _plain(value: Any) -> Any:
    """Instances as their fields, for whoever knows only JSON's types."""
    if isinstance(value, Record):
        return _plain(value.fields if value.fields is not None else value.data)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# -- at every checkpoint -----------------------------------------------------------------------------------------------


class Guards:
    """The invariants of one agent, asked before each of its checkpoints."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.all: list[Invariant] = []

    def judge(self, *, sparing: bool) -> Judged:
        """The state that may be saved, and why it is suspect; raises where it is refused.

        ``sparing``: it is saved in any case, before a rollback for example, and nothing is refused.
        """
        document = self._agent._document
        with document.lock:
            sections = document.digests()
            look, before = Look(document.told), Look(self._agent._saved_state())
        broken = [(one, why) for one in self.all if (why := one.broken(document, look, before))]
        for one, why in broken:
            if one.then != "warn" and not sparing:
                raise InvariantViolated(
                    f"{self._agent.name} breaks the invariant {one.name!r}: {why}{UNSAVED}",
                    invariant=one,
                    hint="The live state is as it was. Mend it, or go back: agent.rollback(...).",
                )
        reason = "; ".join(f"{one.name}: {why}" for one, why in broken)
        if reason:
            log.warning("%s breaks an invariant, and its checkpoint is suspect: %s", self._agent.name, reason)
        return Judged(sections, reason[:_WHY])


# -- over a history ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Violation:
    """A checkpoint that breaks an invariant. ``first``: the one before it does not."""

    checkpoint: Checkpoint
    invariant: str
    why: str
    first: bool

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        one = self.checkpoint
        return {
            "checkpoint": one.id, "depth": one.depth, "label": one.label, "invariant": self.invariant, "why": self.why,
            "first": self.first,
        }  # fmt: skip


class Violations(list[Violation]):
    """What breaks invariants. ``nowhere``: places that these speak of and that no checkpoint has."""

    nowhere: Sequence[str] = ()


def check_history(line: Iterable[Checkpoint], invariants: Sequence[Invariant]) -> Violations:
    """Ask invariants about checkpoints, oldest first. Where what one looks at is the same, so is the answer."""
    before: Look | None = None
    known: dict[int, tuple[object, str]] = {}
    found, missing = Violations(), {path for one in invariants for path in one.paths}
    for checkpoint in line:
        try:
            state = checkpoint.state
            look = Look.of(state)
            for at, one in enumerate(invariants):
                sections = checkpoint.sections
                named = one.sections
                sees = tuple(sections.items()) if named is None else tuple(map(sections.get, sorted(named)))
                was = known.get(at, (None, ""))
                why = was[1] if was[0] == sees and not one.relative else _broken(one, state, look, before)
                known[at] = sees, why
                if why:
                    found.append(Violation(checkpoint, one.name, why, first=not was[1]))
            missing = {path for path in missing if look.at(path) is MISSING}
            before = look
        except Damaged as error:
            found.append(Violation(checkpoint, "", f"it cannot be read: {error.message}", first=True))
    found.nowhere = sorted(map(format_path, missing))
    return found


def _broken(one: Invariant, state: Document, look: Look, before: Look | None) -> str:
    try:
        return one.broken(state, look, before)
    except SystemExit as error:  # of a live agent's function somebody may want it: that is not caught
        if one.paths:
            raise
        return reason_of(error)
