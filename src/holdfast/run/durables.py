"""Durable functions: what is declared about them, how they are to be executed, and the table of them by name.

Owns the decorator and the options. Must not know how a run goes. What always holds: a function is known by its name,
not by its module, so that a program goes on with a run wherever it is started from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from msgspec import Struct
from msgspec.structs import replace

from holdfast.codec.types import REGISTRY as _PLAIN
from holdfast.codec.values import encode
from holdfast.errors import BadOption
from holdfast.run.arguments import Binder, fingerprint

if TYPE_CHECKING:
    from holdfast.run.replanning import Setback

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Options(Struct, frozen=True):
    """How a durable function is executed. ``id`` names the run: once it has finished, its result is returned.

    ``wait=False`` raises ``Waiting`` where the run would sleep. ``strict`` stops at every call that differs from the
    record. ``change`` resumes a run with other arguments than it was begun with. ``again`` begins a run anew whose id
    was cancelled or rolled back. ``replan``: should the run fail, it is rolled back to its beginning, and
    ``replan(setback)`` returns what to execute instead (a durable function, or functools.partial of one), or None to
    give up.
    """

    id: str | None = None
    wait: bool = True
    strict: bool | None = None
    change: bool = False
    again: bool = False
    replan: Callable[[Setback], Any] | None = None


class Given(TypedDict, total=False):
    """The same, as they are given."""

    id: str | None
    wait: bool
    strict: bool | None
    change: bool
    again: bool
    replan: Callable[[Setback], Any] | None


class DurableFunction(Protocol[P, R_co]):
    """A decorated function, as type checkers see it."""

    __name__: str
    durable: Durable

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def options(self, **options: Unpack[Given]) -> DurableFunction[P, R_co]:
        """The same function, to be executed so: ``agent.run(travel.options(id="7"), "Lisbon")``. See ``Options``."""


class Durable:
    """What is known about a durable function."""

    def __init__(self, function: Callable[..., Any], name: str, *, strict: bool) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise BadOption(f"{name} yields, and a run has a result", hint="Return a list, or use a tool: stream=True.")
        self.function = function
        self.name = name
        self.strict = strict
        self.binder = Binder(function)
        self.waits = inspect.iscoroutinefunction(function)

    def given(self, handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, without the agent, which is the first."""
        given = self.binder.bind((handle, *args), kwargs)
        given.pop(next(iter(given)))
        return given

    @property
    def code(self) -> str:
        """A hash of the function's own code, to be compared on resume."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)  # what is called may be no function
        return fingerprint({"code": encode(_parts(code))}, _PLAIN).hex()[:16] if code is not None else ""


def _parts(code: CodeType) -> list[Any]:
    """What a function does, in plain values: the same in every process that runs the same code."""
    constants = [_parts(one) if isinstance(one, CodeType) else _shown(one) for one in code.co_consts]
    return [code.co_code, list(code.co_names), list(code.co_varnames), constants]


def _shown(constant: Any) -> str:
    if isinstance(constant, frozenset):  # of a test such as `x in {...}`: its order differs between processes
        return repr(sorted(map(repr, constant)))
    return repr(constant)


@overload
def durable(function: Callable[P, R_co], /) -> DurableFunction[P, R_co]: ...
@overload
def durable(
    *, name: str | None = None, strict: bool = False
) -> Callable[[Callable[P, R_co]], DurableFunction[P, R_co]]: ...
def durable(function: Any = None, /, *, name: str | None = None, strict: bool = False) -> Any:
    """Let ``agent.run`` execute a function so that it resumes where it stopped. It is called as ``f(agent, ...)``."""

    def decorate(function: Any) -> Any:
        made = Durable(function, _named(function, name), strict=strict)
        DURABLES[made.name] = made
        return configured(made)

    return decorate(function) if function is not None else decorate


DURABLES: dict[str, Durable] = {}
"""Durable functions by name; the newest definition counts."""


def configured(made: Durable, options: Options | None = None, **more: Any) -> Any:
    """A durable function that is to be executed so."""
    chosen = replace(options if options is not None else Options(), **more)

    @functools.wraps(made.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return made.function(*args, **kwargs)

    wrapper.durable = made  # type: ignore[attr-defined] # functions may have attributes
    wrapper.chosen = chosen  # type: ignore[attr-defined]
    wrapper.options = functools.partial(configured, made, chosen)  # type: ignore[attr-defined]
    return wrapper


def options_of(function: Any) -> Options:
    """How a function is to be executed."""
    found = getattr(function, "chosen", None)
    return found if isinstance(found, Options) else Options()


def known(function: Any) -> Durable:
    """What is declared about a function, or what would be if it were."""
    found = function if isinstance(function, Durable) else getattr(function, "durable", None)
    if isinstance(found, Durable):
        if inspect.ismethod(function):  # whose self would be lost, here or after a restart
            raise BadOption(f"{found.name} is a method: a run begins with the agent", hint="Make it a function.")
        return found
    return Durable(function, _named(function), strict=False)


def _named(function: Any, name: str | None = None) -> str:
    """The name by which a run finds its function again."""
    if not callable(function):
        raise BadOption(f"a run needs a function, not {type(function).__name__}")
    found = getattr(function, "__name__", None) if name is None else name
    if not isinstance(found, str) or not found:
        what = f"name={name!r}" if name is not None else f"a {type(function).__name__} has no name"
        raise BadOption(
            f"a run finds its function by its name: {what}", hint='Give it one: holdfast.durable(name="travel")(...).'
        )
    return found
