"""What the processes of a watched program tell the command, through a socket."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
from collections.abc import Iterator
from typing import Any

from .records import Told, parse
from .watch import PAUSES, Step, send


def waited_seconds(told: Told) -> float:
    """Seconds that the program has waited for a loader."""
    if not told.steps:  # the first batch's step has not ended
        return sum(told.starts)
    return sum(Step(*row).inside for row in told.steps)


class Connection:
    """One process of the program, or a keeper."""

    def __init__(self, to: socket.socket) -> None:
        self.socket = to
        self.rest = b""

    def lines(self) -> Iterator[dict[str, Any]] | None:
        """The messages that have come; None at the end."""
        try:
            part = self.socket.recv(1 << 16)
        except BlockingIOError:
            return iter(())
        except OSError:
            return None
        if not part:
            return None
        *whole, self.rest = (self.rest + part).split(b"\n")
        return (json.loads(line) for line in whole)


class Listener:
    """The socket that processes of the program connect to, and what they have told."""

    def __init__(self, pauses: bool = False) -> None:
        self.name = f"minato-analyze{PAUSES if pauses else '-'}{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.socket, selectors.EVENT_READ)
        #: of each process that Python has started in: what it is
        self.processes: dict[int, dict[str, Any]] = {}
        #: (pid, key of the loader) -> the last report on it
        self.loaders: dict[tuple[int, str], Told] = {}
        self.keepers: dict[tuple[int, str], Connection] = {}
        self.watched = False
        self.trouble: list[str] = []

    def pump(self, seconds: float) -> None:
        """Takes what comes within that time."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.socket:
                new, _address = self.socket.accept()
                credentials = new.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
                    new.close()
                    continue
                new.setblocking(False)
                self.selector.register(new, selectors.EVENT_READ, Connection(new))
                continue
            connection: Connection = key.data
            messages = connection.lines()
            if messages is None:
                self.selector.unregister(connection.socket)
                connection.socket.close()
                continue
            for message in messages:
                self._take(connection, message)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        kind, pid = message["kind"], message.get("pid", 0)
        if kind == "keeper":
            self.keepers[message["parent"], message["key"]] = connection
            self.selector.unregister(connection.socket)
            connection.socket.setblocking(True)
        elif kind == "process":
            self.processes[pid] = {**message, "torch": False}
        elif kind == "torch":
            self.processes.setdefault(pid, message)["torch"] = True
        elif kind in ("loader", "watch"):
            self.loaders[pid, message["key"]] = parse(Told, message)
        elif kind == "watched":
            self.watched = True
        elif kind == "trouble":
            self.trouble.append(message["text"])

    def batches(self) -> int:
        return max((told.batches for told in self.loaders.values()), default=0)

    def slowest_loader(self) -> tuple[int, str] | None:
        """The loader that its program has waited for most."""

        known = [which for which, told in self.loaders.items() if told.batches]
        return max(known, key=lambda which: waited_seconds(self.loaders[which]), default=None)

    def end_keepers(self) -> None:
        """They are told that this is the regular end."""
        for connection in self.keepers.values():
            with contextlib.suppress(OSError):
                send(connection.socket, {"do": "bye"})
            connection.socket.close()
        self.keepers.clear()

    def close(self) -> None:
        """Ends the keepers, and hears no more."""
        self.end_keepers()
        for key in list((self.selector.get_map() or {}).values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
