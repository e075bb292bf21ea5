"""Tools: functions whose calls are recorded.

Owns the decorator, what is declared about a tool, and the table of tools by name. How a call goes is not its business:
the wrapper asks ``calls``. What always holds: the decorated function keeps its signature, docstring, hints and kind
(plain, async, generator), so that frameworks see what they would see without the decorator.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Collection
from types import CodeType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from holdfast.codec.types import Registry, declared_classes, default_name
from holdfast.errors import BadName, BadOption, FailedBeforeEffect, Unencodable, UnknownTool
from holdfast.run.arguments import Binder
from holdfast.run.outcomes import declared_name
from holdfast.run.resilience import Breaker

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["write", "read", "idempotent", "local", "transaction"]
When = Literal["before", "after"]
RETRIES_MAX = 100
"""More attempts are a loop that nobody watches."""


class Tool:
    """What is known about a tool."""

    def __init__(self, function: Callable[..., Any], name: str | None, kind: str, options: dict[str, Any]) -> None:
        self.function = function
        code = _code_of(function)
        self.name = function.__name__ if name is None else name
        self.kind = kind
        self._check_given(options)
        self.binder = Binder(function)
        self.compensate: Callable[..., Any] | None = options["compensate"]
        self.probe: Callable[..., Any] | None = options["probe"]
        self.raises: tuple[type[BaseException], ...] = tuple(options["raises"])
        self.volatile = frozenset(options["volatile"])
        self.retries: int = options["retries"]
        self.timeout_s: float | None = options["timeout_s"]
        self.limit_us = round((self.timeout_s or 0) * 1e6)
        breaker = options["breaker"]
        self.breaker: Breaker | None = Breaker(failures=breaker) if isinstance(breaker, int) else breaker
        self.fallback: Callable[..., Any] | None = options["fallback"]
        self.checkpoint: str | None = options["checkpoint"]
        self.stream: bool = options["stream"]
        self.waits = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        # The same for two loads of one definition, as by `python x.py` and by importing x.
        self.origin = (code.co_filename, function.__qualname__)
        self._returns: list[type] | None = None  # the classes that its result is declared with
        self._check()

    def _check_given(self, options: dict[str, Any]) -> None:
        """Raise where an option is not what it should be, before somebody needs it."""

        def wrong(option: str, hint: str) -> BadOption:
            return BadOption(f"{self.name}: {option}={options[option]!r}", hint=hint)

        if type(self.name) is not str or not self.name:
            raise BadOption(f"a tool with name={self.name!r}", hint="Use a text that is not empty, or leave it away.")
        if self.kind not in get_args(Kind):
            raise BadOption(f"{self.name}: effect {self.kind!r}", hint=f"Use one of {', '.join(get_args(Kind))}.")
        for option in ("compensate", "probe", "fallback"):
            if options[option] is not None and not callable(options[option]):
                raise wrong(option, "Use a function.")
        raises, volatile = options["raises"], options["volatile"]
        if isinstance(raises, type):
            raise wrong("raises", f"Write raises=({raises.__name__},).")
        if not isinstance(raises, Collection) or not all(map(_is_error, raises)):
            raise wrong("raises", "Use a tuple of exceptions, as in raises=(SoldOut,).")
        if any(issubclass(kind, StopIteration | StopAsyncIteration) for kind in raises):
            raise wrong("raises", "Python takes these for the end of a loop. Raise another one.")
        if any(issubclass(kind, BaseExceptionGroup) for kind in raises):
            raise wrong("raises", "A group is no answer. Raise the one of its exceptions that is.")
        if isinstance(volatile, str):
            raise wrong("volatile", f"Write volatile=({volatile!r},).")
        if not isinstance(volatile, Collection) or not all(isinstance(name, str) for name in volatile):
            raise wrong("volatile", 'Use a tuple of names, as in volatile=("request_id",).')
        retries, timeout_s, breaker = options["retries"], options["timeout_s"], options["breaker"]
        if type(retries) is not int or not 0 <= retries <= RETRIES_MAX:
            raise wrong("retries", f"Use 0 to {RETRIES_MAX}.")
        if timeout_s is not None and (type(timeout_s) not in {int, float} or not timeout_s > 0):
            raise wrong("timeout_s", "Use a number of seconds above 0.")
        if breaker is not None and type(breaker) is not int and not isinstance(breaker, Breaker):
            raise wrong("breaker", "Use a number of failures, or holdfast.Breaker(...).")
        if options["checkpoint"] not in {None, *get_args(When)}:
            raise wrong("checkpoint", "Use before or after.")

    def _check(self) -> None:
        if self.kind in {"read", "local"} and (self.compensate or self.probe):
            raise BadOption(f"{self.name}: a {self.kind} tool changes nothing outside, so it has no probe or undoing")
        if self.kind == "transaction" and (self.probe or self.stream):
            raise BadOption(
                f"{self.name}: a transaction is committed with its record or not at all, so it has no probe or stream"
            )
        self._check_failing()
        known = self.binder.signature.parameters
        odd = [name for name in self.volatile if name.partition(".")[0] not in known and self.binder.variadic is None]
        if odd:
            raise BadOption(f"{self.name}: volatile {odd[0]!r} is no parameter", hint=f"It has {', '.join(known)}.")
        makes_items = inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function)
        if makes_items != self.stream:
            hint = "Add stream=True." if makes_items else "Leave stream=True away, or yield items."
            raise BadOption(f"{self.name}: a generator and stream=True belong together", hint=hint)

    def _check_failing(self) -> None:
        """What is to be done about failures must be possible for this tool, or it would be left out silently."""
        asked = self.retries or self.timeout_s or self.breaker or self.fallback or self.checkpoint
        if self.kind == "local" and asked:
            raise BadOption(
                f"{self.name}: a local tool is part of the program, so it has no retries, timeout_s, breaker, fallback"
                " or checkpoint",
                hint="Handle its failures where it is called.",
            )
        if self.stream and self.fallback is not None:
            raise BadOption(f"{self.name}: what was yielded before a failure cannot be taken back by a fallback")
        if self.stream and self.timeout_s is not None and not self.waits:
            raise BadOption(
                f"{self.name}: nothing can interrupt a plain generator after timeout_s",
                hint="Make it an async generator, or give the client inside it a timeout.",
            )
        if self.fallback is not None and inspect.iscoroutinefunction(self.fallback) and not self.waits:
            raise BadOption(f"{self.name}: the fallback of a plain tool cannot be async")

    def check_result(self, registry: Registry) -> None:
        """Raise where it is declared to return what could not be saved: before the call, not after it."""
        if self._returns is None:
            self._returns = declared_classes(self.function)
        for kind in self._returns:
            if registry.takes(kind):
                continue
            error = Unencodable(
                f"it is declared to be a {default_name(kind)}, which nobody registered; it was not called",
                hint=f"Decorate the class with @holdfast.register, or pass {registry.option}.",
            )
            error.root = f"the result of {self.name}"
            raise error

    def is_answer(self, error: BaseException) -> bool:
        """Whether an exception is what the outside answered, not a failure to answer."""
        return bool(self.declared(error)) and type(error) is not FailedBeforeEffect

    def declared(self, error: BaseException) -> str:
        """The name of the declared class that an exception belongs to, empty when none."""
        kinds = [kind for kind in self.raises if type(error) is kind] or [
            kind for kind in self.raises if isinstance(error, kind)
        ]
        return declared_name(kinds[0], self.raises) if kinds else ""

    def __repr__(self) -> str:
        return f"<Tool {self.name} ({self.kind})>"


def _is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _code_of(function: Any) -> CodeType:
    """The code of what is to be a tool. Anything else that can be called has no name by which it is found again."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if isinstance(code, CodeType) and callable(function):
        return code
    if isinstance(function, classmethod):
        raise BadOption("a class method is no function yet", hint="Put @holdfast.tool below @classmethod.")
    raise BadOption(
        f"a tool is a function, not {type(function).__name__}: {function!r:.100}",
        hint="Write one that calls it: `@holdfast.tool` above `def book(flight): return ...`.",
    )


class Recorded(Protocol[P, R]):
    """A decorated function, as type checkers see it."""

    __name__: str
    tool: Tool
    direct: Callable[P, R]
    """The function itself: what it does is not recorded."""
    acall: Callable[P, Awaitable[R]]
    """For a plain function in async code: the same call, on another thread than the event loop's."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


_LOCAL = "<locals>"


class Tools:
    """Tools by name. A definition that nobody holds any more is forgotten."""

    def __init__(self) -> None:
        self._wrappers: dict[str, list[weakref.ref[Any]]] = {}

    def add(self, name: str, wrapper: Callable[..., Any]) -> None:
        """Put a tool into the table. It takes the place of an earlier load of itself, and of one made in a function."""
        origin = wrapper.tool.origin  # type: ignore[attr-defined]
        alive = [(ref, old.tool.origin) for ref in self._wrappers.get(name, []) if (old := ref()) is not None]
        kept = [ref for ref, other in alive if other != origin and _LOCAL not in other[1]]
        self._wrappers[name] = [*kept, weakref.ref(wrapper)]

    @property
    def declared(self) -> bool:
        """Whether this program has tools of its own."""
        return any(not name.startswith("holdfast.") for name in self._wrappers)

    def get(self, name: str) -> Tool:
        """The tool of that name."""
        found = [wrapper.tool for ref in self._wrappers.get(name, ()) if (wrapper := ref()) is not None]
        if not found:
            raise UnknownTool(f"no tool {name!r} in this program", hint="Import the module that defines it.")
        if len(found) > 1:
            places = " and ".join(f"{file} ({inside})" for file, inside in (tool.origin for tool in found))
            raise BadName(f"two tools are called {name!r}: in {places}", hint="Give one of them another name=.")
        known: Tool = found[0]
        return known

    def check(self, name: str) -> None:
        """Raise when modules define several of that name: after a restart nobody would know which one was called.

        One that was made in a function is whoever's holds it.
        """
        made = self._wrappers.get(name, ())
        if len(made) > 1:
            origins = [wrapper.tool.origin for ref in made if (wrapper := ref()) is not None]
            if sum(_LOCAL not in inside for _, inside in origins) > 1:
                self.get(name)

    def as_called(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Recorded arguments as the tool's function saw them. Records of earlier versions lack the defaults."""
        try:
            return self.get(name).binder.completed(arguments)
        except (UnknownTool, BadName):
            return arguments

    def find(self, name: str) -> Tool | None:
        try:
            return self.get(name)
        except UnknownTool:
            return None


TOOLS = Tools()


@overload
def tool(function: Callable[P, R], /) -> Recorded[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    effect: Kind = "write",
    compensate: Callable[..., Any] | None = None,
    probe: Callable[..., Any] | None = None,
    raises: Collection[type[BaseException]] = (),
    volatile: Collection[str] = (),
    retries: int = 0,
    timeout_s: float | None = None,
    breaker: Breaker | int | None = None,
    fallback: Callable[..., Any] | None = None,
    checkpoint: When | None = None,
    stream: bool = False,
) -> Callable[[Callable[P, R]], Recorded[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    effect: Kind = "write",
    compensate: Callable[..., Any] | None = None,
    probe: Callable[..., Any] | None = None,
    raises: Collection[type[BaseException]] = (),
    volatile: Collection[str] = (),
    retries: int = 0,
    timeout_s: float | None = None,
    breaker: Breaker | int | None = None,
    fallback: Callable[..., Any] | None = None,
    checkpoint: When | None = None,
    stream: bool = False,
) -> Any:
    """Record the calls of a function inside a run or ``with agent:``; elsewhere it is an ordinary function.

    - ``name``: how records name it, also when the function is renamed or moved; without it the function's own name.
    - ``effect``: ``"write"`` changes something outside, and must not be done twice. ``"idempotent"`` may be repeated
      with the same ``effect().key``. ``"read"`` may be repeated. ``"local"`` changes only the agent's own state, and
      is executed again instead of being answered from the record: not for files, which stay as they are when a run is
      resumed. ``"transaction"`` changes tables beside a store on PostgreSQL through ``effect().connection``, and is
      committed with its record.
    - ``compensate(effect)`` undoes a call; a rollback calls it.
    - ``probe(effect)`` finds out whether a call happened: ``Found(result)``, ``Absent()`` or ``Unknown(why)``.
    - ``raises``: exceptions that are answers. They come back from the record as themselves, with their attributes,
      others as ``ToolFailed``.
    - ``volatile``: arguments, or ``"argument.key"``, that differ each time without meaning another call.
    - ``retries``: how often a call is made again when it fails; a write only when it is known that nothing happened.
    - ``timeout_s``: give up after so long. A write is in doubt then, a transaction rolled back. It is your word that a
      call takes no longer, and other machines rely on it.
    - ``breaker``: a ``Breaker``, or a number of failures after which the tool is not called for a while.
    - ``fallback``: called with the same arguments instead of raising, where it is known that nothing happened.
    - ``checkpoint``: ``"before"`` or ``"after"``: in a run, take one at each call.
    - ``stream``: the function is a generator. Its items are passed on and kept as they come, and recorded as one result
      at its end. It is tried again only before its first item.

    The function keeps its signature, docstring and hints. ``function.direct(...)`` calls it unrecorded, ``await
    function.acall(...)`` calls a plain one off the event loop.
    """
    options = {
        "compensate": compensate, "probe": probe, "raises": raises, "volatile": volatile, "retries": retries,
        "timeout_s": timeout_s, "breaker": breaker, "fallback": fallback, "checkpoint": checkpoint, "stream": stream,
    }  # fmt: skip

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        made = Tool(function, name, effect, options)
        wrapper = _wrapper(made)
        wrapper.tool = made  # type: ignore[attr-defined] # functions may have attributes
        wrapper.direct = function  # type: ignore[attr-defined]
        TOOLS.add(made.name, wrapper)
        return wrapper

    return decorate(function) if function is not None else decorate


def _wrapper(made: Tool) -> Callable[..., Any]:
    """A function of the same kind as the tool's own."""
    import holdfast.run.calls as calls  # noqa: PLR0402 - calls imports this module; mypy finds it only by this form

    function = made.function
    if made.stream and made.waits:

        @functools.wraps(function)
        async def flowing_later(*args: Any, **kwargs: Any) -> Any:
            async for item in calls.flow_later(made, args, kwargs):
                yield item

        return flowing_later
    if made.stream:

        @functools.wraps(function)
        def flowing(*args: Any, **kwargs: Any) -> Any:
            yield from calls.flow(made, args, kwargs)

        return flowing

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        return await calls.later(made, args, kwargs)

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        return calls.now(made, args, kwargs)

    wrapper: Any = later if made.waits else now
    wrapper.acall = later
    return wrapper  # type: ignore[no-any-return] # functions may have attributes
