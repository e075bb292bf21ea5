"""Instances of registered classes, enum members, records, and the references that close cycles.

Owns both directions, and the numbering of instances inside a scope. Must not know other containers.
Holds always: an instance gets its number when its bytes begin, and exists (without fields) before they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import codes, refusals
from holdfast.codec.codes import MAX_DEPTH, SCALARS, Record
from holdfast.codec.immutable import is_immutable
from holdfast.codec.shapes import ENUM, FIELDS, PYDANTIC, TUPLE
from holdfast.codec.wire import check_plain_depth, corrupt, is_utf8, pack
from holdfast.errors import Attribute, SchemaMismatch, Unencodable, UnknownType

if TYPE_CHECKING:
    from holdfast.codec.decoding import Reading
    from holdfast.codec.lowering import Walk
    from holdfast.codec.types import Registration, Registry

VALUE = "value"
"""The form of what a class's own save function returned."""

_HEAD = msgspec.msgpack.Decoder(tuple[str, int, str, msgspec.Raw])
_RAW_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_NUMBER = msgspec.msgpack.Decoder(int)
_PENDING = object()
_TEXT = frozenset({str})
_PLAIN_CONTAINERS: frozenset[type] = frozenset({dict, list})
_NONE: frozenset[type] = frozenset()
_KEYED_MAX_REFERENCES = 8
"""A record with more of them inside has no hash: each may double the work of comparing two."""


class NeedsWhole(Exception):
    """A mutable instance turned up in two scopes: the value must be written as a whole (code 23)."""


# --- writing ----------------------------------------------------------------------------------------------------


def lower_instance(walk: Walk, value: Any, depth: int, registration: Registration) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    opened = walk.enter()
    reference = _number(walk, value)
    if reference is not None:
        return reference
    key = id(value)
    shape = registration.shape
    walk.open[key] = registration.save is None and shape.form != TUPLE
    data: Any
    if registration.save is not None:
        form = VALUE
        data = walk.lower(_saved(walk, registration, value), depth + 1)
    elif shape.form == PYDANTIC:
        form = PYDANTIC
        fields, extra, names, private = shape.take_pydantic(value)
        data = [
            _attributes(walk, fields, depth),
            _attributes(walk, extra, depth) if extra else extra,
            names if walk.plain is SCALARS else [walk.lower(name, depth) for name in names],
            _attributes(walk, private, depth) if private else private,
        ]
    else:
        form = FIELDS
        fields = shape.take_tuple(value) if shape.form == TUPLE else shape.take(value)
        absent = shape.missing(fields)
        if absent is not None:
            raise refusals.unset_field(value, absent)
        data = _attributes(walk, fields, depth)
    payload = pack([registration.name, registration.version, form, data])
    del walk.open[key]
    walk.leave(opened)
    return Ext(codes.INSTANCE, payload)


def _number(walk: Walk, value: Any) -> Ext | None:
    """Number the instance in this scope, or give a reference to it when it has its number already."""
    key = id(value)
    numbers = walk.numbers
    number = numbers.get(key)  # type: ignore[union-attr] # called inside a scope
    if number is not None:
        buildable = walk.open.get(key)
        if buildable is False:
            raise refusals.closed_cycle(value)
        if buildable and _hashed_by_fields(value):
            # If the way back leads through a set or a key, its hash is needed before it is complete.
            walk.risky = True
        if key in walk.tied and not walk.set_depth:
            walk.first_references.setdefault(key, len(walk.first_references))
        return Ext(codes.REFERENCE, packb(number))
    if walk.met.setdefault(key, walk.scope) != walk.scope and not is_immutable(value):
        raise NeedsWhole
    numbers[key] = len(numbers)  # type: ignore[index, arg-type]
    return None


def _hashed_by_fields(value: Any) -> bool:
    by_identity: Any = object.__hash__
    return type(value).__hash__ is not by_identity and type(value) is not Record


def _saved(walk: Walk, registration: Registration, value: Any) -> Any:
    try:
        saved = registration.save(value)  # type: ignore[misc] # the caller has looked
    except RecursionError:
        raise
    except Exception as error:
        raise refusals.save_failed(registration.name, error) from error
    # Instances are told apart by id, so what save() made must live as long as the walk.
    walk.keep.append(saved)
    return saved


def _attributes(walk: Walk, fields: dict[str, Any], depth: int) -> Any:
    plain = walk.plain
    checked = plain is not SCALARS
    if not checked and plain.issuperset(map(type, fields.values())):
        return fields
    # Messages hold several dicts and lists that are small or empty; a walk for each would be most of the cost.
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
            lowered = walk.lower(item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = fields.copy()
                out[name] = lowered
    except Unencodable as error:
        raise error.within(Attribute(name)) from None
    if out is None:
        out = fields
    if checked and not all(map(is_utf8, out)):
        return Ext(codes.DICT, pack([part for name, item in out.items() for part in (walk.lower(name, depth), item)]))
    return out


def lower_enum(walk: Walk, value: Any, depth: int, registration: Registration) -> Ext:
    name = value._name_
    if name is not None and type(value).__members__.get(name) is not value:
        name = None  # a combination of flags has a text that is no member's name
    numbers = walk.numbers
    count = len(numbers or ())
    still_open = walk.open.copy()
    set_depth = walk.set_depth
    try:
        content = walk.lower(value._value_, depth + 1)
    except Unencodable:
        if name is None:
            raise
        # A named member is found by its name; its value may be a function or the like. Numbers given on the way
        # to the refusal are in no bytes, so they go.
        content = None
        walk.numbers = numbers
        walk.open = still_open
        walk.set_depth = set_depth
        while numbers and len(numbers) > count:
            numbers.popitem()
    label = None if name is None else walk.lower(name, depth)
    return Ext(codes.ENUM, pack([registration.name, registration.version, label, content]))


def lower_record(walk: Walk, value: Record, depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    code = value.code
    opened = walk.enter() if code in codes.SCOPES else False
    data = value.data
    if code == codes.INSTANCE:
        reference = _number(walk, value)
        if reference is not None:
            return reference
        if value.form == VALUE:
            data = walk.lower(data, depth + 1)
        elif value.form == PYDANTIC and type(data) is list:
            data = [walk.lower(part, depth) for part in data]
        else:
            data = walk.lower(data, depth)
        payload = pack([value.type_name, value.version, value.form, data])
    elif code == codes.WHOLE:
        lowered = walk.lower(data[0], depth)
        if not opened:
            return lowered  # type: ignore[no-any-return]
        payload = pack(lowered)
    elif code == codes.ENUM:
        name, content = data
        payload = pack([value.type_name, value.version, walk.lower(name, depth), walk.lower(content, depth + 1)])
    else:
        payload = pack([walk.lower(item, depth + 1) for item in data])
    walk.leave(opened)
    return Ext(code, payload)


# --- reading ----------------------------------------------------------------------------------------------------


def read_reference(reading: Reading, data: memoryview) -> Any:
    number = _NUMBER.decode(data)
    instances = reading.instances
    if instances is None or not 0 <= number < len(instances):
        raise corrupt("a reference to no instance")
    value = instances[number]
    if value is _PENDING:
        reading.risk_seen = True  # reading in order makes the instance before its content
        raise corrupt("a reference to an instance that is built only when its content is complete")
    reading.references += 1 if number not in reading.unfinished else _KEYED_MAX_REFERENCES + 1
    if number in reading.unfinished and _hashed_by_fields(value):
        reading.hash_risks += 1
        reading.risk_seen = True
    return value


def unknown_type(name: str, registry: Registry) -> UnknownType:
    return UnknownType(
        f"The type {name!r:.200} is not registered in this program",
        type_name=name,
        hint=f"Register the class (@holdfast.register, or {registry.option}); inert reading shows it without.",
    )


def read_instance(reading: Reading, data: memoryview) -> Any:
    """An instance from its payload, which is decoded at once. One that is referred to from inside is read in order."""
    if reading.stepwise or reading.inert:
        return _read_in_order(reading, data)
    instances: list[Any] = reading.instances  # type: ignore[assignment] # code 20 opens a scope
    number = len(instances)
    instances.append(_PENDING)
    reading.extended = False
    parts = reading.decoder.decode(data)
    plain, reading.extended = not reading.extended, True
    if type(parts) is not list or len(parts) != 4:
        raise corrupt("an instance has a name, a version, a form and content")
    name, version, form, content = parts
    if type(name) is not str or type(version) is not int or type(form) is not str:
        raise corrupt("an instance has a name, a version, a form and content")
    if plain and reading.depth == 1 and form == PYDANTIC:
        value = _model(reading, name, version, content)
        if value is not None:
            instances[number] = value
            return value
    if len(data) > MAX_DEPTH - reading.depth and (type(content) is list or type(content) is dict):
        # Instances keep their fields in a map, models in an array of maps, which are not levels of their own.
        (check_plain_depth if plain else reading.check_depth)(content, MAX_DEPTH - reading.depth + 2)
    registration = reading.registry.by_name(name)
    if registration is None:
        raise unknown_type(name, reading.registry)
    shape = registration.shape
    if registration.save is not None or shape.form == TUPLE:
        value = _build(registration, version, form, registration.migrate(version, content))
    elif shape.form == ENUM:
        raise mismatch(registration, "was saved as an instance, but is an enum now")
    else:
        value = shape.make()
        _put(registration, version, form, value, content)
    instances[number] = value
    return value


def _model(reading: Reading, name: str, version: int, content: Any) -> Any:
    """The common case, a model that has not changed since it was saved, in a hurry; None when it is another one."""
    registration = reading.registry.by_name(name)
    if registration is None or registration.save is not None or version != registration.version:
        return None
    value = registration.shape.model_of(content)
    if value is not None:
        reading.shallow.append(content)  # how deep it is will be looked at for all of them at once
    return value


def _read_in_order(reading: Reading, data: memoryview) -> Any:
    name, version, form, raw = _HEAD.decode(data)
    instances: list[Any] = reading.instances  # type: ignore[assignment] # code 20 opens a scope
    number = len(instances)
    instances.append(_PENDING)
    registration = reading.registry.by_name(name)
    if registration is None or (reading.inert and version != registration.version):
        if not reading.inert:
            raise unknown_type(name, reading.registry)
        record = instances[number] = Record(name, version, form, None)
        record.keyed = False
        reading.unfinished.add(number)
        references = reading.references
        record.data = reading.part(raw)
        reading.unfinished.discard(number)
        record.keyed = reading.references - references <= _KEYED_MAX_REFERENCES
        return record
    shape = registration.shape
    if registration.save is not None or shape.form == TUPLE:
        deferred = len(reading.deferred)
        content = reading.part(raw)
        if len(reading.deferred) != deferred and registration.save is not None:
            raise corrupt(f"{name} holds a set or dict whose keys are instances around it")
        value = instances[number] = _build(registration, version, form, registration.migrate(version, content))
        return value
    if shape.form == ENUM:
        raise mismatch(registration, "was saved as an instance, but is an enum now")
    value = instances[number] = shape.make()
    reading.unfinished.add(number)
    if reading.stepwise and form == FIELDS == shape.form and version == registration.version:
        content = {}
        for field, part in _RAW_FIELDS.decode(raw).items():
            content[field] = reading.part(part)
            shape.put_one(value, field, content[field])
    else:
        content = reading.part(raw)
    _put(registration, version, form, value, content)
    reading.unfinished.discard(number)
    return value


def mismatch(registration: Registration, text: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{registration.name} {text}",
        type_name=registration.name,
        hint="Register the class with a higher version and a migration from the stored one.",
    )


def _build(registration: Registration, version: int, form: str, content: Any) -> Any:
    """An instance that can only be made when all of its content is there."""
    if registration.load is not None:
        if form != VALUE and version == registration.version:
            raise mismatch(registration, f"was saved in the form {form!r:.80}, but has a load function now")
        try:
            return registration.load(content)
        except RecursionError:
            raise
        except Exception as error:
            raise SchemaMismatch(
                f"The load function of {registration.name} failed: {type(error).__name__}: {error}",
                type_name=registration.name,
            ) from error
    if type(content) is not dict or (form != FIELDS and version == registration.version):
        raise mismatch(registration, f"was saved in the form {form!r:.80}, but is a named tuple now")
    try:
        return registration.shape.make_tuple(content)
    except KeyError as error:
        raise other_fields(registration, error) from error


def _put(registration: Registration, version: int, form: str, value: Any, content: Any) -> None:
    """Give a bare instance its fields, by way of the migrations."""
    shape = registration.shape
    if version == registration.version:
        if form != shape.form:
            raise mismatch(registration, f"was saved in the form {form!r:.80}, but has the form {shape.form!r} now")
        fields, extra, names, private = _parts(form, content)
    elif form == VALUE:
        # The class had a save function then; its migration makes the field map of what that returned.
        fields, extra, private = _field_map(registration, registration.migrate(version, content)), None, None
        names = list(fields)
    else:
        stored, extra, names, private = _parts(form, content)
        before = set(stored)
        fields = _field_map(registration, registration.migrate(version, stored))
        names = [name for name in fields if name in names or name not in before]
    try:
        if shape.form == PYDANTIC:
            shape.put_pydantic(value, fields, extra, names, private)
        elif extra or private:
            raise mismatch(registration, "was saved with extra or private fields, which it cannot hold now")
        else:
            shape.put(value, fields)
    except KeyError as error:
        raise other_fields(registration, error) from error


def other_fields(registration: Registration, error: KeyError) -> SchemaMismatch:
    return mismatch(registration, f"was saved with other fields; see {error.args[0]!r:.80}")


def _field_map(registration: Registration, migrated: Any) -> dict[str, Any]:
    if type(migrated) is not dict or not all(type(name) is str for name in migrated):
        raise mismatch(registration, "has a migration that did not return a field map")
    return migrated.copy()  # the instance may keep it, and a migration may return the same one twice


def _parts(form: str, content: Any) -> tuple[dict[str, Any], dict[str, Any] | None, list[str], dict[str, Any] | None]:
    """Fields, extra fields, names of the fields that were set, private attributes."""
    extra = private = None
    if form == PYDANTIC:
        if type(content) is not list or len(content) != 4:
            raise corrupt("a pydantic model has four parts")
        fields, extra, names, private = content
        if type(names) is not list or not _TEXT.issuperset(map(type, names)):
            raise corrupt("the names of a model's fields are texts")
    elif form == FIELDS:
        fields = content
        names = list(content) if type(content) is dict else []
    else:
        raise corrupt(f"an instance of the unknown form {form!r:.80}")
    if not _is_field_map(fields) or not (
        (extra is None or _is_field_map(extra)) and (private is None or _is_field_map(private))
    ):
        raise corrupt("an instance's fields are a map of names")
    return fields, extra, names, private


def _is_field_map(part: Any) -> bool:
    return type(part) is dict and _TEXT.issuperset(map(type, part))


def read_enum(reading: Reading, data: memoryview) -> Any:
    type_name, version, name, content = reading.items(data)
    if type(type_name) is not str or type(version) is not int or not (name is None or type(name) is str):
        raise corrupt("an enum member is type name, version, member name and value")
    registration = reading.registry.by_name(type_name)
    if registration is None or (reading.inert and version != registration.version):
        if reading.inert:
            return Record(type_name, version, "enum", [name, content], code=codes.ENUM)
        raise unknown_type(type_name, reading.registry)
    if registration.save is not None or registration.shape.form != ENUM:
        raise mismatch(registration, "was saved as an enum member, but is no enum now")
    if version != registration.version:
        migrated = registration.migrate(version, {"name": name, "value": content})
        if type(migrated) is not dict or not {"name", "value"} <= migrated.keys():
            raise mismatch(registration, "has a migration that did not return name and value")
        name, content = migrated["name"], migrated["value"]
    cls: Any = registration.cls
    if name is not None:
        member = cls.__members__.get(name)
        if member is None:
            raise mismatch(registration, f"has no member {name!r:.80} now")
        return member
    try:
        return cls(content)
    except Exception as error:
        raise mismatch(registration, f"has no member of the value {content!r:.80} now") from error
