"""Instances of registered classes and enum members, as bytes and back; records; and the references that close cycles.

Owns both directions, the numbering of instances inside a scope, and the way of stored content into the class that the
program has today: migrations, defaults, classes that have changed their form. Must not know other containers.
Holds always: an instance gets its number when its bytes begin, and exists (without fields) before they are read, so
that what it holds can refer to it; a class's own functions (a migration, ``load``, a default) that fail raise
SchemaMismatch, with their exception as its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import refusals, wire
from holdfast.codec.classes import (
    ENUM,
    FIELDS,
    OPAQUE,
    PYDANTIC,
    TUPLE,
    VALUE,
    NoField,
    Record,
    is_data_class,
    shape_of,
)
from holdfast.codec.types import Registration, default_name
from holdfast.codec.wire import MAX_DEPTH, SCALARS, SIZED_EXTENSIONS, TEXT, check_plain_depth, corrupt, is_ours, pack
from holdfast.errors import SchemaMismatch, Unencodable, UnknownType

if TYPE_CHECKING:
    from holdfast.codec.classes import Shape
    from holdfast.codec.types import Registry
    from holdfast.codec.values import Reading, Writing


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
    form = VALUE if registration.save is not None else PYDANTIC if shape.form == PYDANTIC else FIELDS
    whole = form == VALUE or shape.form == TUPLE  # it will be built only when its content is complete
    if whole:
        writing.unmade.add(id(value))
    data: Any
    if form == VALUE:
        data = writing.lower(_saved(writing, registration, value), depth + 1)
    elif form == PYDANTIC:
        fields, extra, names, private = shape.take_pydantic(value)
        data = [
            writing.attributes(fields, depth),
            writing.attributes(extra, depth) if extra else extra,
            names if writing.plain is SCALARS else [writing.lower(name, depth) for name in names],
            writing.attributes(private, depth) if private else private,
        ]
    else:
        if whole and getattr(value, "__dict__", None):
            raise refusals.extra_attributes(value, value.__dict__)
        fields = shape.take_tuple(value) if whole else shape.take(value)
        absent = shape.missing(fields)
        if absent is not None:
            raise Unencodable(
                f"the field {absent!r} of this {type(value).__qualname__} is not set",
                hint="Set it (None is a value), or declare it with init=False.",
            )
        data = writing.attributes(fields, depth)
    if whole:
        writing.unmade.discard(id(value))
    writing.numbers = outer
    return Ext(wire.INSTANCE, pack([registration.name, registration.version, form, data]))


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
        raise Unencodable(
            f"a {type(value).__qualname__} that contains itself, which a class with save= and load= cannot do",
            hint="Register the class without save= and load=, or refer to the outer object by a key.",
        )
    return Ext(wire.REFERENCE, packb(number))


def _saved(writing: Writing, registration: Registration, value: Any) -> Any:
    try:
        saved = registration.save(value)  # type: ignore[misc] # the caller has looked
    except RecursionError:
        raise
    except Exception as error:
        text = f"the save function of {registration.name} failed: {type(error).__name__}: {error}"
        raise Unencodable(text) from error
    # Instances are told apart by id, so what save() made must live as long as the writing.
    writing.keep.append(saved)
    return saved


def write_outline(writing: Writing, value: Any, depth: int, names: list[str]) -> Ext:
    """An instance of a class that nobody registered, as it would be written if somebody had."""
    kind = type(value)
    shape = shape_of(kind)
    made = Registration(kind, default_name(kind), 1, {}, None, None, shape)
    outer, known = writing.numbers, len(names)
    numbers, unmade = None if outer is None else dict(outer), set(writing.unmade)
    if shape.form != OPAQUE and (is_data_class(kind) or shape.take(value)):
        names.append(made.name)
        try:
            return (write_enum if shape.form == ENUM else write_instance)(writing, value, depth, made)
        except Unencodable:
            writing.numbers, writing.unmade = numbers, unmade
            del names[known:]
    reference = _number(writing, value)
    if outer is None:
        writing.numbers = None
    names.append(f"{made.name} (not saved)")
    return reference or Ext(wire.INSTANCE, pack([names[-1], 1, FIELDS, {}]))


def write_enum(writing: Writing, value: Any, depth: int, registration: Registration) -> Ext:
    """A member by its name and its value; a combination of flags, which has no name, by its value alone."""
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    name = value._name_
    # Not ``__members__``, whose Python code would turn an AttributeError of a signal handler into one of its own.
    if name is not None and type(value)._member_map_.get(name) is not value:
        name = None  # a combination of flags has a text that is no member's name
    try:
        content = writing.lower_apart(value._value_, depth + 1)
    except Unencodable:
        if name is None:
            raise
        content = None  # a named member is found by its name; its value may be a function or the like
    label = None if name is None else writing.lower(name, depth)
    return Ext(wire.ENUM, pack([registration.name, registration.version, label, content]))


def write_record(writing: Writing, value: Record, depth: int) -> Ext:
    """What stands for an instance or a member of an unknown class, as it was read."""
    data = value.data
    if value.code != wire.INSTANCE:
        return Ext(value.code, value.payload)  # nothing in there has to do with what is around it
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    outer = writing.numbers
    reference = _number(writing, value)
    if reference is not None:
        return reference
    if value.form == PYDANTIC and type(data) is list:
        data = [writing.lower(part, depth) for part in data]
    else:
        data = writing.lower(data, depth + 1 if value.form == VALUE else depth)
    writing.numbers = outer
    return Ext(wire.INSTANCE, pack([value.type_name, value.version, value.form, data]))


# --- reading ----------------------------------------------------------------------------------------------------

_head = msgspec.msgpack.Decoder(tuple[str, int, str, msgspec.Raw]).decode
_number_of = msgspec.msgpack.Decoder(int).decode
_UNMADE = object()
_LABELS = (str, type(None))


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
        record = Record(wire.INSTANCE, bytes(data), name, version, form)
        instances.append(record)
        record.data = reading.content(raw)
        return record
    shape = registration.shape
    now = VALUE if registration.save is not None else FIELDS if shape.form == TUPLE else shape.form
    if now == ENUM or (form != now and version == registration.version):
        raise _mismatch(registration, f"was saved in the form {form!r:.80}, but has the form {now!r} now")
    value: Any
    if now == VALUE or shape.form == TUPLE:
        instances.append(_UNMADE)
        content = reading.content(raw)
        reading.check_depth()  # the class's own functions are about to get it
        value = instances[number] = _built(registration, _migrated(registration, version, content))
        return value
    value = object.__new__(shape.cls)
    instances.append(value)
    content = reading.content(raw)
    if version != registration.version:
        reading.check_depth()  # the class's own functions are about to get it
    elif form == PYDANTIC and type(content) is list and len(content) == 4 and shape.put_complete(value, *content):
        return value
    _fill(registration, version, form, value, content)
    return value


def read_enum(reading: Reading, data: memoryview) -> Any:
    """An enum member from its payload."""
    parts = reading.items(data)
    if len(parts) != 4 or type(parts[0]) is not str or type(parts[1]) is not int or type(parts[2]) not in _LABELS:
        raise corrupt("an enum member is type name, version, member name and value")
    type_name, version, name, content = parts
    registration = reading.registry.by_name(type_name)
    if registration is None or (reading.inert and version != registration.version):
        if reading.inert:
            return Record(wire.ENUM, bytes(data), type_name, version, ENUM, [name, content])
        raise unknown_type(type_name, reading.registry)
    if registration.save is not None or registration.shape.form != ENUM:
        raise _mismatch(registration, "was saved as an enum member, but is no enum now")
    if version != registration.version:
        reading.check_depth()
        found = _migrated(registration, version, {"name": name, "value": content})
        if type(found) is not dict or not {"name", "value"} <= found.keys():
            raise _mismatch(registration, "has a migration that did not return name and value")
        name, content = found["name"], found["value"]
    return _member(registration, name, content)


def _member(registration: Registration, name: str | None, content: Any) -> Any:
    """An enum's member, by its name or, for a combination of flags, by its value."""
    cls: Any = registration.cls
    if name is not None:
        found = cls._member_map_.get(name)
        if found is None:
            raise _mismatch(registration, f"has no member {name!r:.80} now")
        return found
    try:
        return cls(content)
    except Exception as error:
        raise _mismatch(registration, f"has no member of the value {content!r:.80} now") from error


# --- from what was stored to what the class is now --------------------------------------------------------------


def _mismatch(registration: Registration, text: str, hint: str = "") -> SchemaMismatch:
    """The error for content that this class has no way for."""
    return SchemaMismatch(
        f"{registration.name} {text}",
        type_name=registration.name,
        hint=hint or "Register the class with a higher version and a migration from the stored one.",
    )


def _migrated(registration: Registration, version: int, data: Any) -> Any:
    """Data of a stored version, brought to the registered one step by step."""
    saved = f"was saved with schema version {version};"
    if version > registration.version or version < 1:
        raise _mismatch(
            registration,
            f"{saved} this program has version {registration.version}",
            "Run the newer program, or register the newer version of the class.",
        )
    for step in range(version, registration.version):
        function = registration.migrations.get(step)
        if function is None:
            raise _mismatch(
                registration,
                f"{saved} there is no migration from {step} to {step + 1}",
                f"Register it with migrations={{{step}: function}}, which takes and returns the field map.",
            )
        try:
            data = function(data)
        except Exception as error:
            raise _failed(registration, f"migration from version {step} to {step + 1}", error) from error
    return data


def _failed(registration: Registration, function: str, error: Exception) -> SchemaMismatch:
    text = f"The {function} of {registration.name} failed: {type(error).__name__}: {error}"
    return SchemaMismatch(text, type_name=registration.name)


def _built(registration: Registration, content: Any) -> Any:
    """An instance that can only be made when all of its content is there: by ``load``, or a named tuple."""
    if registration.load is not None:
        try:
            return registration.load(content)
        except RecursionError:
            raise
        except Exception as error:
            raise _failed(registration, "load function", error) from error
    try:
        return registration.shape.make_tuple(_field_map(registration, content))
    except NoField as error:
        raise _other_fields(registration, error) from error


def _fill(registration: Registration, version: int, form: str, value: Any, content: Any) -> None:
    """Give a bare instance its fields."""
    shape = registration.shape
    extra = private = None
    if version == registration.version:
        fields, extra, names, private = _parts(form, content)
    elif form == VALUE:
        # The class had a save function then; its migration makes the field map of what that returned.
        fields = _field_map(registration, _migrated(registration, version, content))
        names = list(fields)
    else:
        stored, extra, names, private = _parts(form, content)
        before = set(stored)
        fields = _field_map(registration, _migrated(registration, version, stored))
        names = [name for name in fields if name in names or name not in before]
    try:
        if shape.form == PYDANTIC:
            shape.put_pydantic(value, fields, extra, set(names), private)
        elif extra or private:
            raise _mismatch(registration, "was saved with extra or private fields, which it cannot hold now")
        else:
            shape.put(value, fields)
    except NoField as error:
        raise _other_fields(registration, error) from error


def _other_fields(registration: Registration, error: NoField) -> SchemaMismatch:
    return _mismatch(registration, f"was saved with other fields; see {error.args[0]!r:.80}")


def _field_map(registration: Registration, found: Any) -> dict[str, Any]:
    if not _is_field_map(found):
        raise _mismatch(registration, "has no field map, or a migration that did not return one")
    return dict(found)  # the instance may keep it, and a migration may return the same one twice


def _parts(form: str, content: Any) -> tuple[dict[str, Any], dict[str, Any] | None, list[str], dict[str, Any] | None]:
    """Fields, extra fields, names of the fields that were set, private attributes."""
    if form == FIELDS and _is_field_map(content):
        return content, None, list(content), None
    if form == PYDANTIC and type(content) is list and len(content) == 4:
        fields, extra, names, private = content
        if (
            _is_field_map(fields)
            and (extra is None or _is_field_map(extra))
            and type(names) is list
            and TEXT.issuperset(map(type, names))
            and (private is None or _is_field_map(private))
        ):
            return fields, extra, names, private
    raise corrupt(f"what is stored of an instance does not have the form {form!r:.80}")


def _is_field_map(part: Any) -> bool:
    return type(part) is dict and TEXT.issuperset(map(type, part))


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
            if extension.code != wire.INSTANCE:
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
