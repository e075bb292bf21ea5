"""Instances of registered classes and enum members, as bytes; records; and the references that close cycles.

Owns both directions, and the numbering of instances inside a scope. Must not know other containers.
Holds always: an instance gets its number when its bytes begin, and exists (without fields) before they are read, so
that what it holds can refer to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import limits, migrations, refusals
from holdfast.codec.classes import ENUM, FIELDS, PYDANTIC, TUPLE, VALUE, Record
from holdfast.codec.limits import MAX_DEPTH, SCALARS
from holdfast.codec.wire import SIZED_EXTENSIONS, check_plain_depth, corrupt, is_ours, is_utf8, pack
from holdfast.errors import Attribute, Unencodable, UnknownType

if TYPE_CHECKING:
    from holdfast.codec.classes import Shape
    from holdfast.codec.decoder import Reading
    from holdfast.codec.encoder import Writing
    from holdfast.codec.types import Registration, Registry

_TEXT = frozenset({str})
_PLAIN_CONTAINERS: frozenset[type] = frozenset({dict, list})
_NONE: frozenset[type] = frozenset()


# --- writing ----------------------------------------------------------------------------------------------------


def write_instance(writing: Writing, value: Any, depth: int, registration: Registration) -> Ext:
    """An instance by its fields, or by what its class's save function makes of it."""
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    outer = writing.numbers
    reference = _number(writing, value)
    if reference is not None:
        return reference
    shape = registration.shape
    data: Any
    if registration.save is not None:
        form = VALUE
        writing.unmade.add(id(value))
        data = writing.lower(_saved(writing, registration, value), depth + 1)
        writing.unmade.discard(id(value))
    elif shape.form == PYDANTIC:
        form = PYDANTIC
        fields, extra, names, private = shape.take_pydantic(value)
        data = [
            _attributes(writing, fields, depth),
            _attributes(writing, extra, depth) if extra else extra,
            names if writing.plain is SCALARS else [writing.lower(name, depth) for name in names],
            _attributes(writing, private, depth) if private else private,
        ]
    else:
        form = FIELDS
        named = shape.form == TUPLE
        fields = shape.take_tuple(value) if named else shape.take(value)
        absent = shape.missing(fields)
        if absent is not None:
            raise refusals.unset_field(value, absent)
        if named:
            writing.unmade.add(id(value))
        data = _attributes(writing, fields, depth)
        if named:
            writing.unmade.discard(id(value))
    writing.numbers = outer
    return Ext(limits.INSTANCE, pack([registration.name, registration.version, form, data]))


def _number(writing: Writing, value: Any) -> Ext | None:
    """Number the instance in its scope, which it may open, or give a reference when it has its number already."""
    numbers = writing.numbers
    if numbers is None:
        writing.numbers = {id(value): 0}
        return None
    number = numbers.get(id(value))
    if number is None:
        numbers[id(value)] = len(numbers)
        return None
    if id(value) in writing.unmade:
        raise refusals.closed_cycle(value)
    return Ext(limits.REFERENCE, packb(number))


def _saved(writing: Writing, registration: Registration, value: Any) -> Any:
    try:
        saved = registration.save(value)  # type: ignore[misc] # the caller has looked
    except RecursionError:
        raise
    except Exception as error:
        raise refusals.save_failed(registration.name, error) from error
    # Instances are told apart by id, so what save() made must live as long as the writing.
    writing.keep.append(saved)
    return saved


def _attributes(writing: Writing, fields: dict[str, Any], depth: int) -> Any:
    plain = writing.plain
    checked = plain is not SCALARS
    if not checked and plain.issuperset(map(type, fields.values())):
        return fields
    # Messages hold several dicts and lists that are small or empty; a call for each would be most of the cost.
    small = _PLAIN_CONTAINERS if not checked and depth + 1 < MAX_DEPTH else _NONE
    out: dict[Any, Any] | None = None
    name: Any = ""
    try:
        for name, item in fields.items():
            if type(name) is not str:
                raise Unencodable("an attribute whose name is not a plain text")
            kind = type(item)
            if kind in plain:
                continue
            if kind in small and (
                not item
                or (kind is dict and plain.issuperset(map(type, item.values())) and _TEXT.issuperset(map(type, item)))
            ):
                continue
            lowered = writing.lower(item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = fields.copy()
                out[name] = lowered
    except Unencodable as error:
        error.within(Attribute(name))
        raise
    if out is None:
        out = fields
    if checked and not all(map(is_utf8, out)):
        names = [writing.lower(name, depth) for name in out]
        return Ext(limits.DICT, pack([part for pair in zip(names, out.values(), strict=True) for part in pair]))
    return out


def write_enum(writing: Writing, value: Any, depth: int, registration: Registration) -> Ext:
    """A member by its name and its value; a combination of flags, which has no name, by its value alone."""
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    name = value._name_
    # Not ``__members__``, whose Python code would turn an AttributeError of a signal handler into one of its own.
    if name is not None and type(value)._member_map_.get(name) is not value:
        name = None  # a combination of flags has a text that is no member's name
    try:
        content = writing.apart().lower(value._value_, depth + 1)
    except Unencodable:
        if name is None:
            raise
        content = None  # a named member is found by its name; its value may be a function or the like
    label = None if name is None else writing.lower(name, depth)
    return Ext(limits.ENUM, pack([registration.name, registration.version, label, content]))


def write_record(writing: Writing, value: Record, depth: int) -> Ext:
    """What stands for an instance or a member of an unknown class, as it was read."""
    data = value.data
    if value.code == limits.DEFAULTDICT:
        return writing.mapping(limits.DEFAULTDICT, data[1], depth, data[0])
    if value.code != limits.INSTANCE:
        return Ext(value.code, value.payload)  # nothing in there has to do with what is around it
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    outer = writing.numbers
    reference = _number(writing, value)
    if reference is not None:
        return reference
    if value.form == VALUE:
        data = writing.lower(data, depth + 1)
    elif value.form == PYDANTIC and type(data) is list:
        data = [writing.lower(part, depth) for part in data]
    else:
        data = writing.lower(data, depth)
    writing.numbers = outer
    return Ext(limits.INSTANCE, pack([value.type_name, value.version, value.form, data]))


# --- reading ----------------------------------------------------------------------------------------------------

_head = msgspec.msgpack.Decoder(tuple[str, int, str, msgspec.Raw]).decode
_number_of = msgspec.msgpack.Decoder(int).decode
_UNMADE = object()


def unknown_type(name: str, registry: Registry) -> UnknownType:
    """The error for a name that nobody registered."""
    return UnknownType(
        f"The type {name!r:.200} is not registered in this program",
        type_name=name,
        hint=f"Register the class (@holdfast.register, or {registry.option}); inert reading shows it without.",
    )


def read_reference(reading: Reading, data: memoryview) -> Any:
    """An instance of the scope that was met before."""
    number = _number_of(data)
    instances = reading.instances
    if instances is None or not 0 <= number < len(instances):
        raise corrupt("a reference to no instance")
    value = instances[number]
    if value is _UNMADE:
        raise corrupt("a reference to an instance that is built only when its content is complete")
    return value


def read_instance(reading: Reading, data: memoryview) -> Any:
    """An instance from its payload."""
    name, version, form, raw = _head(data)
    instances: list[Any] = reading.instances  # type: ignore[assignment] # code 20 opens a scope
    number = len(instances)
    registration = reading.registry.by_name(name)
    if registration is None or (reading.inert and version != registration.version):
        if not reading.inert:
            raise unknown_type(name, reading.registry)
        record = Record(limits.INSTANCE, bytes(data), name, version, form)
        instances.append(record)
        record.data = reading.content(raw)
        return record
    shape = registration.shape
    value: Any
    if registration.save is not None or shape.form == TUPLE:
        instances.append(_UNMADE)
        content = reading.content(raw)
        reading.check_depth()  # the class's own functions are about to get it
        value = instances[number] = migrations.built(registration, version, form, content)
        if version != registration.version or (shape.form == TUPLE and content.keys() != set(shape.names)):
            reading.adapt()
        return value
    if shape.form == ENUM:
        raise migrations.mismatch(registration, "was saved as an instance, but is an enum now")
    value = object.__new__(shape.cls)
    instances.append(value)
    content = reading.content(raw)
    if version != registration.version:
        reading.check_depth()  # the class's own functions are about to get it
    elif form == PYDANTIC and type(content) is list and len(content) == 4 and shape.put_complete(value, *content):
        return value
    if migrations.fill(registration, version, form, value, content):
        reading.adapt()
    return value


def read_enum(reading: Reading, data: memoryview) -> Any:
    """An enum member from its payload."""
    parts = reading.items(data)
    if len(parts) != 4:
        raise corrupt("an enum member is type name, version, member name and value")
    type_name, version, name, content = parts
    if type(type_name) is not str or type(version) is not int or not (name is None or type(name) is str):
        raise corrupt("an enum member is type name, version, member name and value")
    registration = reading.registry.by_name(type_name)
    if registration is None or (reading.inert and version != registration.version):
        if reading.inert:
            return Record(limits.ENUM, bytes(data), type_name, version, ENUM, [name, content])
        raise unknown_type(type_name, reading.registry)
    if version != registration.version:
        reading.check_depth()
        reading.adapt()
    return migrations.member(registration, version, name, content)


# --- many models at once ----------------------------------------------------------------------------------------


class _Extended(Exception):
    """There is an extension inside an instance."""


def _refuse(code: int, data: memoryview) -> Any:  # noqa: ARG001 - the library's hook
    raise _Extended


_decode_extension = msgspec.msgpack.Decoder(msgspec.msgpack.Ext).decode
_decode_model = msgspec.msgpack.Decoder(
    tuple[str, int, str, tuple[dict[str, Any], dict[str, Any] | None, set[str], None]], ext_hook=_refuse
).decode


_MAX_OTHERS = 8
"""A list with more of other kinds than that is no conversation, and trying each of its items would cost too much."""


def read_models(encodings: list[bytes], registry: Registry) -> dict[int, Any]:
    """By index, those that are models which have not changed since they were saved, with nothing but plain content.

    A conversation is a list of such, and most of its cost is in the steps for each. What is not certain to be such a
    model is left to whoever reads everything, errors included.
    """
    made: dict[int, Any] = {}
    contents: list[Any] = []
    shapes: dict[tuple[str, int, str], Shape | None] = {}
    for index, data in enumerate(encodings):
        if index - len(made) > _MAX_OTHERS:
            break
        if data[:1] not in SIZED_EXTENSIONS:
            continue
        try:
            extension = _decode_extension(data)
            if extension.code != limits.INSTANCE:
                continue
            name, version, form, (fields, extra, names, _) = _decode_model(extension.data)
        except _Extended:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not is_ours(error):
                raise
            continue
        kind = (name, version, form)
        if kind not in shapes:
            shapes[kind] = _unchanged(registry.by_name(name), version, form)
        shape = shapes[kind]
        if shape is not None:
            value: Any = object.__new__(shape.cls)
            if shape.put_complete(value, fields, extra, names, None):
                contents.append(fields)
                made[index] = value
    check_plain_depth(contents, MAX_DEPTH + 1)  # neither this list nor the fields are levels of their own
    return made


def _unchanged(registration: Registration | None, version: int, form: str) -> Shape | None:
    """The shape of a model that is registered as it was saved."""
    if registration is None or registration.save is not None or version != registration.version or form != PYDANTIC:
        return None
    return registration.shape if registration.shape.form == PYDANTIC else None
