"""A model of a disk: what a crash may leave of a sequence of system calls.

Theory of operation. A file has bytes that everybody sees, and how many of them were synced. A directory has entries that
everybody sees, and those that were synced; what has changed since stands in a list. When the process dies, everything
stays. When the power fails, what was synced stays, and of the rest *anything* may: every unsynced change of a directory
is kept or lost by itself, whatever came before or after it, and the unsynced part of a file is there, is not there, is
zeros, or is there by half. That is less than any file system promises; what survives it survives on all of them.

Files here are only ever appended to, and nothing is renamed; :meth:`Disk.apply` refuses what it does not know.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Tree = dict[str, bytes | None]
"""What stands after a crash: bytes of a file, or None for a directory, by path below the base."""

SUBSETS_MAX = 4
"""Up to so many unsynced changes all their subsets are tried, beyond that some."""
DRAWS = 12


class Call(NamedTuple):
    """One system call below the base directory. ``path`` is relative to it."""

    verb: str
    """mkdir, create, write, sync, link, unlink, rmdir; or mark, which is what the program said of itself."""
    path: str
    data: bytes = b""
    target: str = ""
    covers: int = 0
    """Of a sync: how many calls had returned when it began."""


@dataclass(eq=False)
class File:
    """Bytes, and how many of them a power failure leaves."""

    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0
    writes: list[tuple[int, int]] = field(default_factory=list)
    """Number of the call, and the size after it."""


@dataclass(eq=False)
class Directory:
    """Entries as they are seen, and as they are on the disk."""

    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


Node = File | Directory


class Change(NamedTuple):
    """An unsynced change of a directory: the name leads to ``node`` now, or to nothing."""

    number: int
    name: str
    node: Node | None


Content = Callable[[File], bytes]


def _whole(file: File) -> bytes:
    return bytes(file.data)


def _cut(file: File) -> bytes:
    return bytes(file.data[: file.synced_bytes])


def _zeros(file: File) -> bytes:
    return _cut(file) + bytes(len(file.data) - file.synced_bytes)


def _first_half(file: File) -> bytes:
    return bytes(file.data[: (file.synced_bytes + len(file.data) + 1) // 2])


def _second_half(file: File) -> bytes:
    middle = (file.synced_bytes + len(file.data) + 1) // 2
    return _cut(file) + bytes(middle - file.synced_bytes) + bytes(file.data[middle:])


CONTENTS: tuple[Content, ...] = (_cut, _zeros, _first_half, _second_half, _whole)


class Disk:
    """The disk below a base directory. Everything that stands at the beginning is durable."""

    def __init__(self, base: Path) -> None:
        self.root = Directory()
        self.number = 0
        self._read(base, self.root)

    def _read(self, place: Path, directory: Directory) -> None:
        for path in sorted(place.iterdir()):
            if path.is_dir():
                node: Node = Directory()
                self._read(path, node)
            else:
                data = bytearray(path.read_bytes())
                node = File(data, len(data))
            directory.entries[path.name] = directory.synced[path.name] = node

    def apply(self, call: Call) -> bool:
        """Carry out the next call. Of a sync: whether it made anything durable that was not."""
        self.number += 1
        if call.verb == "write":
            file = self._file(call.path)
            file.data += call.data
            file.writes.append((self.number, len(file.data)))
        elif call.verb == "create":
            self._change(call.path, File())
        elif call.verb == "mkdir":
            self._change(call.path, Directory())
        elif call.verb == "link":
            self._change(call.target, self._node(call.path))
        elif call.verb in ("unlink", "rmdir"):
            self._change(call.path, None)
        elif call.verb == "sync":
            return self._sync(self._node(call.path), call.covers)
        else:
            assert call.verb == "mark", f"the model does not know {call.verb} {call.path}"
        return False

    def look(self) -> Tree:
        """What everybody sees."""
        return self._tree({change.number for change in self._changes()}, _whole)

    def crashes(self, draw: random.Random) -> Iterator[tuple[str, Tree]]:
        """What a crash at this moment may leave, with the kind of crash. Many are the same."""
        numbers = sorted(change.number for change in self._changes())
        everything = set(numbers)
        yield "process death", self.look()
        if len(numbers) <= SUBSETS_MAX:
            chosen = [set(some) for size in range(len(numbers) + 1) for some in itertools.combinations(numbers, size)]
        else:
            chosen = [set(), everything, *({number} for number in numbers), *(everything - {n} for n in numbers)]
        for kept, content in itertools.product(chosen, CONTENTS):
            yield "power failure", self._tree(kept, content)
        if len(numbers) > SUBSETS_MAX:
            for _ in range(DRAWS):
                kept = {number for number in numbers if draw.random() < 0.5}
                yield "power failure", self._tree(kept, lambda file: draw.choice(CONTENTS)(file))

    def _changes(self) -> Iterator[Change]:
        waiting = [self.root]
        while waiting:
            directory = waiting.pop()
            yield from directory.changes
            waiting += [node for node in directory.entries.values() if isinstance(node, Directory)]

    def _tree(self, kept: set[int], content: Content) -> Tree:
        tree: Tree = {}
        contents: dict[int, bytes] = {}

        def walk(directory: Directory, prefix: str) -> None:
            entries: dict[str, Node | None] = dict(directory.synced)
            entries.update((name, node) for number, name, node in directory.changes if number in kept)
            for name, node in entries.items():
                if isinstance(node, Directory):
                    tree[prefix + name] = None
                    walk(node, f"{prefix}{name}/")
                elif node is not None:
                    # A file has one content, under however many names.
                    if id(node) not in contents:
                        contents[id(node)] = content(node)
                    tree[prefix + name] = contents[id(node)]

        walk(self.root, "")
        return tree

    def _sync(self, node: Node, covers: int) -> bool:
        if isinstance(node, File):
            before = node.synced_bytes
            node.synced_bytes = max([before, *(size for number, size in node.writes if number <= covers)])
            return node.synced_bytes > before
        done = [change for change in node.changes if change.number <= covers]
        for change in done:
            if change.node is None:
                node.synced.pop(change.name, None)
            else:
                node.synced[change.name] = change.node
            node.changes.remove(change)
        return bool(done)

    def _change(self, path: str, node: Node | None) -> None:
        parent, _, name = path.rpartition("/")
        directory = self._directory(parent)
        assert (name in directory.entries) is (node is None), (
            f"{path}: the recording is no sequence of calls that worked"
        )
        if node is None:
            del directory.entries[name]
        else:
            directory.entries[name] = node
        directory.changes.append(Change(self.number, name, node))

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for name in path.split("/") if path else ():
            assert isinstance(node, Directory)
            node = node.entries[name]
        return node

    def _file(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File)
        return node

    def _directory(self, path: str) -> Directory:
        node = self._node(path)
        assert isinstance(node, Directory)
        return node


def put(tree: Tree, base: Path) -> None:
    """Make a tree stand in an empty directory."""
    for path, data in tree.items():
        if data is None:
            (base / path).mkdir(parents=True, exist_ok=True)
        else:
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_bytes(data)
