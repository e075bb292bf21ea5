"""`holdfast dump dap`: a dump behind the Debug Adapter Protocol, so that an editor opens it.

Owns who may talk to it: whoever started it, over its own input and output, or a process of the same user over a port of
this machine. Must not know what requests mean. Holds always: dumps are readable by their owner only, and serving one
does not change that.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import BinaryIO, cast

from holdfast.crash.dap_session import Session
from holdfast.crash.dap_wire import Foreign, Wire
from holdfast.crash.dump import open_dump

_HOST = "127.0.0.1"


def serve(dump: str | os.PathLike[str] | None = None, *, port: int | None = None) -> None:
    """Answer an editor until it leaves: over standard input and output, or one after another at a port of 127.0.0.1.

    With ``dump``, `launch` and `attach` need no argument; a file that is no dump is refused before the first message.
    Port 0 takes a free one; the line `Listening on 127.0.0.1:PORT` goes to standard error.
    """
    if dump is not None:
        open_dump(dump).close()
    if port is None:
        Session(Wire(sys.stdin.buffer, sys.stdout.buffer), dump).run()
        return
    with socket.create_server((_HOST, port)) as listener:
        print(f"Listening on {_HOST}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)  # noqa: T201 (whoever started it needs the number)
        while True:
            connection, peer = listener.accept()
            with connection:
                if _same_user(peer, listener.getsockname()):
                    _talk(connection, dump)


def _talk(connection: socket.socket, dump: str | os.PathLike[str] | None) -> None:
    with connection.makefile("rwb") as stream:
        both = cast("BinaryIO", stream)
        try:
            Session(Wire(both, both, strict=True), dump).run()
        except (Foreign, OSError):
            return  # a browser, or somebody who hung up; the next one is served


def _same_user(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """Whether the other end belongs to this user. The kernel's table of connections says whose each one is."""
    wanted = (_kernel_form(peer), _kernel_form(here))
    with Path("/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if len(fields) > 7 and (fields[1], fields[2]) == wanted:
                return int(fields[7]) == os.getuid()
    return False


def _kernel_form(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
