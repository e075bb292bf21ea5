"""Which classes a LangGraph thread may hold.

Owns the list of the classes that LangGraph and LangChain themselves put into a thread, and the standard library's that
their own serializer carries. Must not know bytes, threads or stores.
Holds always: a class is found because this page or the program names it, never because the data does; what is not
known is refused by name, on the way in and on the way out.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

from holdfast.codec.shapes import is_data_class
from holdfast.codec.types import Registration, Registry
from holdfast.contrib.langgraph import failures
from holdfast.contrib.langgraph.current import as_it_is_now
from holdfast.contrib.langgraph.failures import Failure, Unsaved
from holdfast.errors import BadOption

Conversion = tuple[Callable[[Any], Any], Callable[[Any], Any]]

__all__ = ["Failure", "Unsaved", "allow", "registry_for"]

# (module that the stored name says, module it is imported from, names). Stored names are for ever; where a library
# moves a class, only the second column changes.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    ("langchain_core.messages.human", "langchain_core.messages", "HumanMessage HumanMessageChunk"),
    ("langchain_core.messages.ai", "langchain_core.messages", "AIMessage AIMessageChunk"),
    ("langchain_core.messages.system", "langchain_core.messages", "SystemMessage SystemMessageChunk"),
    ("langchain_core.messages.tool", "langchain_core.messages", "ToolMessage ToolMessageChunk"),
    ("langchain_core.messages.function", "langchain_core.messages", "FunctionMessage FunctionMessageChunk"),
    ("langchain_core.messages.chat", "langchain_core.messages", "ChatMessage ChatMessageChunk"),
    ("langchain_core.messages.modifier", "langchain_core.messages", "RemoveMessage"),
    ("langchain_core.messages.base", "langchain_core.messages", "BaseMessage BaseMessageChunk"),
    ("langchain_core.messages.base", "langchain_core.messages.base", "TextAccessor"),
    ("langchain_core.documents.base", "langchain_core.documents", "Document"),
    ("langchain_core.documents.base", "langchain_core.documents.base", "Blob"),
    (
        "langchain_core.prompt_values",
        "langchain_core.prompt_values",
        "StringPromptValue ChatPromptValue ChatPromptValueConcrete ImagePromptValue",
    ),
    ("langchain_core.agents", "langchain_core.agents", "AgentAction AgentActionMessageLog AgentStep AgentFinish"),
    ("langchain_core.outputs.generation", "langchain_core.outputs", "Generation GenerationChunk"),
    ("langchain_core.outputs.chat_generation", "langchain_core.outputs", "ChatGeneration ChatGenerationChunk"),
    ("langchain_core.outputs.chat_result", "langchain_core.outputs", "ChatResult"),
    ("langchain_core.outputs.llm_result", "langchain_core.outputs", "LLMResult"),
    ("langchain_core.outputs.run_info", "langchain_core.outputs", "RunInfo"),
    ("langchain_core.runnables.utils", "langchain_core.runnables", "AddableDict"),
    (
        "langchain_core.exceptions",
        "langchain_core.exceptions",
        "LangChainException TracerException OutputParserException ContextOverflowError",
    ),
    (
        "langchain_core.exceptions",
        "langchain_core.exceptions",
        "ModelError ModelAuthenticationError ModelPermissionDeniedError ModelInvalidRequestError ModelNotFoundError",
    ),
    (
        "langchain_core.exceptions",
        "langchain_core.exceptions",
        "ModelRateLimitError ModelAPIError ModelConnectionError ModelTimeoutError",
    ),
    ("langchain_core.tools.base", "langchain_core.tools", "ToolException"),
    (
        "langgraph.types",
        "langgraph.types",
        "Command Send Interrupt Overwrite TimeoutPolicy PregelTask StateSnapshot StateUpdate CacheKey GraphOutput",
    ),
    (
        "langgraph.errors",
        "langgraph.errors",
        "GraphBubbleUp GraphDrained GraphRecursionError InvalidUpdateError GraphInterrupt NodeInterrupt ParentCommand",
    ),
    (
        "langgraph.errors",
        "langgraph.errors",
        "EmptyInputError TaskNotFound UnknownInterruptError NodeError NodeCancelledError NodeTimeoutError",
    ),
    ("langgraph.func", "langgraph.func", "entrypoint.final"),
    ("langgraph._internal._config", "langgraph._internal._config", "_DefaultRecursionLimit"),
    ("langgraph.checkpoint.serde.types", "langgraph.checkpoint.serde.types", "_DeltaSnapshot"),
    (
        "langgraph.store.base",
        "langgraph.store.base",
        "Item SearchItem GetOp SearchOp MatchCondition ListNamespacesOp PutOp InvalidNamespaceError",
    ),
    ("pydantic.types", "pydantic", "SecretStr SecretBytes"),
    (
        "pydantic.networks",
        "pydantic",
        "AnyUrl AnyHttpUrl HttpUrl AnyWebsocketUrl WebsocketUrl FileUrl FtpUrl PostgresDsn",
    ),
    ("pydantic_core._pydantic_core", "pydantic_core", "Url MultiHostUrl"),
    (
        "ipaddress",
        "ipaddress",
        "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
    ),
    ("re", "re", "Pattern"),
    ("asyncio.exceptions", "asyncio", "CancelledError InvalidStateError IncompleteReadError LimitOverrunError"),
    ("concurrent.futures._base", "concurrent.futures", "CancelledError InvalidStateError BrokenExecutor"),
    ("json.decoder", "json", "JSONDecodeError"),
    ("subprocess", "subprocess", "CalledProcessError TimeoutExpired"),
)

_PLACES: dict[str, tuple[str, str]] = {
    f"{stored}.{name}": (module, name) for stored, module, names in _KNOWN for name in names.split()
}
_ERRORS: dict[str, type[BaseException]] = {
    f"builtins.{kind.__name__}": kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_CALLED: dict[str, list[str]] = {}
for _name, (_, _attribute) in _PLACES.items():
    _CALLED.setdefault(_attribute, []).append(_name)


def registry_for(parent: Registry, types: Sequence[Any] = ()) -> Registry:
    """A registry that knows LangGraph's own types besides those of ``parent``, and ``types``.

    ``types`` are classes, modules and names of modules, as in ``holdfast.open(types=...)``; exceptions count too.
    """
    registry = _Types(parent)
    for item in types:
        if not isinstance(item, type):
            registry.register_module(item)
        elif not _knows(registry, item):
            registry.register(item)
    return registry


def allow(registry: Registry, names: Collection[tuple[str, ...]]) -> Registry:
    """Let the registry know the classes of these modules and names, as far as the program has imported them.

    A class whose content is not in its attributes is left out; the refusal to save one says what to do.
    """
    for *module, name in names:
        cls: Any = getattr(sys.modules.get(".".join(module)), name, None)
        if isinstance(cls, type) and not _knows(registry, cls):
            with suppress(BadOption):
                registry.register(cls)
    return registry


def _knows(registry: Registry, cls: type) -> bool:
    known = registry.by_type(cls)
    return known is not None and known.cls is cls


class _Types(Registry):
    """Classes are registered when they are first met, so that a thread without them pays for no import."""

    def __init__(self, parent: Registry) -> None:
        super().__init__(parent)
        self._current: dict[Registration, Registration] = {}
        self.option = "HoldfastSaver(types=[...])"
        self.register(Failure, name="holdfast.langgraph.Failure")
        self.register(Unsaved, name="holdfast.langgraph.Unsaved")

    def by_type(self, cls: type) -> Registration | None:
        found = super().by_type(cls)
        return self._met(cls) if found is None else found

    def by_name(self, name: str) -> Registration | None:
        """For reading: a class of the program's as it is now, whatever fields it had when it was saved.

        LangGraph's own are what a graph is run by; nothing of theirs may be left out.
        """
        found = self._named(name)
        if found is None or name in _PLACES:
            return found
        current = self._current.get(found)
        if current is None:
            current = self._current[found] = as_it_is_now(found)
        return current

    def _named(self, name: str) -> Registration | None:
        found = super().by_name(name)
        if found is not None:
            return found
        cls = _ERRORS.get(name)
        if cls is None and name in _PLACES:
            cls = _found(name)
        return None if cls is None else self._entered(cls, name)

    def conversion(self, cls: type) -> Conversion | tuple[None, None]:
        return failures.conversion(cls, self) if issubclass(cls, BaseException) else (None, None)

    def wants(self, cls: type) -> bool:
        return is_data_class(cls) or _is_error(cls)

    def _met(self, cls: type) -> Registration | None:
        """A class that is known here, if this is it and not one that is only called the same."""
        for name in _CALLED.get(cls.__qualname__, ()):
            if _PLACES[name][0] in sys.modules and _found(name) is cls:
                return self._entered(cls, name)
        if not issubclass(cls, BaseException):
            return None
        name = f"builtins.{cls.__name__}"
        if _ERRORS.get(name) is cls:
            return self._entered(cls, name)
        return super().by_type(Failure)  # any other exception is saved as its type name and text

    def _entered(self, cls: type, name: str) -> Registration | None:
        make = _CONVERSIONS.get(name)
        save, load = (None, None) if make is None else make(cls)
        self.register(cls, name=name, save=save, load=load)
        return super().by_name(name)


def _found(name: str) -> type | None:
    """The class of a name in ``_PLACES``, or None where its package is not installed, or is of another age."""
    module, attribute = _PLACES[name]
    try:
        cls = attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError):
        return None
    return cls if isinstance(cls, type) else None


def _is_error(cls: type) -> bool:
    if not issubclass(cls, BaseException):
        return False
    try:
        failures.native_base(cls)
    except BadOption:
        return False
    return True


# --- classes whose content is not in attributes -------------------------------------------------------------------


def _as_text(cls: type) -> Conversion:
    return str, cls


def _pattern(cls: type) -> Conversion:  # noqa: ARG001
    import re

    return lambda pattern: [pattern.pattern, pattern.flags], lambda saved: re.compile(*saved)


def _plain(kind: Any) -> Callable[[type], Conversion]:
    """For a subclass of a built-in type that adds nothing to its content."""

    def conversion(cls: type) -> Conversion:
        def load(saved: Any) -> Any:
            if type(saved) is not kind:
                raise TypeError(f"{kind.__name__} expected, not {type(saved).__name__}")
            made: Any = kind.__new__(cls, saved)
            if kind is dict:
                made.update(saved)
            return made

        # str() would ask the subclass, which may give itself.
        return str.__str__ if kind is str else kind, load

    return conversion


_CONVERSIONS: dict[str, Callable[[type], Conversion]] = {
    "langchain_core.messages.base.TextAccessor": _plain(str),
    "langchain_core.runnables.utils.AddableDict": _plain(dict),
    "langgraph._internal._config._DefaultRecursionLimit": _plain(int),
    "pydantic_core._pydantic_core.Url": _as_text,
    "pydantic_core._pydantic_core.MultiHostUrl": _as_text,
    "re.Pattern": _pattern,
    **{name: _as_text for name in _PLACES if name.startswith("ipaddress.")},
}
