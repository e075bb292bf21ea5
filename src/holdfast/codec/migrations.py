"""From what was stored to what the class is now: versions, defaults, and classes that have changed their form.

Owns the way of an instance's content into the class that the program has today, and the words for content that has no
way there. Must not know bytes. Holds always: stored content is never altered in its place in the store; a class's own
functions (a migration, ``load``, a default) that fail raise SchemaMismatch, with their exception as its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.codec.classes import ENUM, FIELDS, PYDANTIC, VALUE, NoField
from holdfast.codec.wire import corrupt
from holdfast.errors import SchemaMismatch

if TYPE_CHECKING:
    from holdfast.codec.types import Registration

_TEXT = frozenset({str})


def mismatch(registration: Registration, text: str) -> SchemaMismatch:
    """The error for content that this class has no way for."""
    return SchemaMismatch(
        f"{registration.name} {text}",
        type_name=registration.name,
        hint="Register the class with a higher version and a migration from the stored one.",
    )


def migrated(registration: Registration, version: int, data: Any) -> Any:
    """Data of a stored version, brought to the registered one step by step."""
    if version > registration.version or version < 1:
        raise SchemaMismatch(
            f"{registration.name} was saved with schema version {version}; "
            f"this program has version {registration.version}",
            type_name=registration.name,
            hint="Run the newer program, or register the newer version of the class.",
        )
    for step in range(version, registration.version):
        function = registration.migrations.get(step)
        if function is None:
            raise SchemaMismatch(
                f"{registration.name} was saved with schema version {version}; "
                f"there is no migration from {step} to {step + 1}",
                type_name=registration.name,
                hint=f"Register it with migrations={{{step}: function}}, which takes and returns the field map.",
            )
        try:
            data = function(data)
        except Exception as error:
            raise SchemaMismatch(
                f"The migration of {registration.name} from version {step} to {step + 1} failed: "
                f"{type(error).__name__}: {error}",
                type_name=registration.name,
            ) from error
    return data


def built(registration: Registration, version: int, form: str, content: Any) -> Any:
    """An instance that can only be made when all of its content is there: by ``load``, or a named tuple."""
    content = migrated(registration, version, content)
    as_stored = version == registration.version
    if registration.load is not None:
        if form != VALUE and as_stored:
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
    if not _is_field_map(content) or (form != FIELDS and as_stored):
        raise mismatch(registration, f"was saved in the form {form!r:.80}, but is a named tuple now")
    try:
        return registration.shape.make_tuple(content)
    except NoField as error:
        raise _other_fields(registration, error) from error


def fill(registration: Registration, version: int, form: str, value: Any, content: Any) -> bool:
    """Give a bare instance its fields. Returns whether they are other ones than were stored."""
    shape = registration.shape
    if version == registration.version:
        if form != shape.form:
            raise mismatch(registration, f"was saved in the form {form!r:.80}, but has the form {shape.form!r} now")
        fields, extra, names, private = _parts(form, content)
    elif form == VALUE:
        # The class had a save function then; its migration makes the field map of what that returned.
        fields, extra, private = _field_map(registration, migrated(registration, version, content)), None, None
        names = list(fields)
    else:
        stored, extra, names, private = _parts(form, content)
        before = set(stored)
        fields = _field_map(registration, migrated(registration, version, stored))
        names = [name for name in fields if name in names or name not in before]
    try:
        if shape.form == PYDANTIC:
            adapted = shape.put_pydantic(value, fields, extra, set(names), private)
        elif extra or private:
            raise mismatch(registration, "was saved with extra or private fields, which it cannot hold now")
        else:
            adapted = shape.put(value, fields)
    except NoField as error:
        raise _other_fields(registration, error) from error
    return adapted or version != registration.version


def member(registration: Registration, version: int, name: str | None, content: Any) -> Any:
    """An enum's member, by its name or, for a combination of flags, by its value."""
    if registration.save is not None or registration.shape.form != ENUM:
        raise mismatch(registration, "was saved as an enum member, but is no enum now")
    if version != registration.version:
        found = migrated(registration, version, {"name": name, "value": content})
        if type(found) is not dict or not {"name", "value"} <= found.keys():
            raise mismatch(registration, "has a migration that did not return name and value")
        name, content = found["name"], found["value"]
    cls: Any = registration.cls
    if name is not None:
        found = cls._member_map_.get(name)
        if found is None:
            raise mismatch(registration, f"has no member {name!r:.80} now")
        return found
    try:
        return cls(content)
    except Exception as error:
        raise mismatch(registration, f"has no member of the value {content!r:.80} now") from error


def _other_fields(registration: Registration, error: NoField) -> SchemaMismatch:
    return mismatch(registration, f"was saved with other fields; see {error.args[0]!r:.80}")


def _field_map(registration: Registration, found: Any) -> dict[str, Any]:
    if not _is_field_map(found):
        raise mismatch(registration, "has a migration that did not return a field map")
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
            and _TEXT.issuperset(map(type, names))
            and (private is None or _is_field_map(private))
        ):
            return fields, extra, names, private
    raise corrupt(f"what is stored of an instance does not have the form {form!r:.80}")


def _is_field_map(part: Any) -> bool:
    return type(part) is dict and _TEXT.issuperset(map(type, part))
