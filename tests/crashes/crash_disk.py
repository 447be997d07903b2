"""A model of a disk: what a crash may leave of a sequence of system calls.

Theory of operation. A file has its visible bytes, its synced bytes, and the writes since the sync.
A directory has its visible entries, its synced entries, and the changes since the sync. When the
process dies, everything stays. When the power fails, what was synced stays, and *any* part of the
rest may stay too. Every unsynced change of a directory is kept or lost independently of those
before and after it (a rename is one change). The unsynced writes to a file are kept, lost, replaced
by zeros, or kept in part. Every file system promises more than that, so what survives here survives
on all of them.

:meth:`Disk.apply` refuses calls that it does not know.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Tree = dict[str, bytes | None]
"""What exists after a crash: bytes of a file, or None for a directory, by path below the base."""

SUBSETS_MAX = 4
"""Up to this many unsynced changes, all their subsets are tried; beyond that only some."""
DRAWS = 12


class Call(NamedTuple):
    """One system call below the base directory. ``path`` is relative to it."""

    verb: str
    """mkdir, create, ensure (create unless it exists), write, truncate, sync, link, rename, unlink,
    rmdir; or mark, by which the program reports something.
    """
    path: str
    data: bytes = b""
    target: str = ""
    covers: int = 0
    """For a sync: how many calls had returned when it began."""
    offset: int | None = None
    """For a write: where, None for the end of the file. For a truncation: the size."""


class Write(NamedTuple):
    """An unsynced write; without ``data``, a truncation to ``offset``."""

    number: int
    offset: int
    data: bytes | None


@dataclass(eq=False)
class File:
    """The visible bytes, those that a power failure leaves, and the writes between the two."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    writes: list[Write] = field(default_factory=list)

    def write(self, write: Write) -> None:
        """Apply a write, unsynced."""
        _apply(self.data, write)
        self.writes.append(write)

    def sync(self, covers: int) -> bool:
        """Make the writes up to a call durable; return whether there were any."""
        done = [write for write in self.writes if write.number <= covers]
        for write in done:
            _apply(self.synced, write)
            self.writes.remove(write)
        return bool(done)


def _apply(data: bytearray, write: Write) -> None:
    if write.data is None:
        del data[write.offset :]
        data.extend(bytes(write.offset - len(data)))
        return
    data.extend(bytes(max(0, write.offset - len(data))))
    data[write.offset : write.offset + len(write.data)] = write.data


@dataclass(eq=False)
class Directory:
    """The visible entries, those that are durable, and the changes between the two."""

    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


Node = File | Directory


class Change(NamedTuple):
    """An unsynced change of a directory: the name now refers to ``node``, or to nothing."""

    number: int
    name: str
    node: Node | None


Content = Callable[[File], bytes]


def _whole(file: File) -> bytes:
    return bytes(file.data)


def _kept(file: File, keep: Callable[[int, int, int], tuple[int, int]]) -> bytes:
    """Return the synced bytes, with a range of each unsynced write applied.

    ``keep`` gets the number of the write, and where it begins and ends among all unsynced bytes. It
    returns where the range begins and ends, in the same count.
    """
    data, begin = bytearray(file.synced), 0
    for number, write in enumerate(file.writes):
        end = begin + len(write.data or b"")
        first, last = (min(max(place, begin), end) - begin for place in keep(number, begin, end))
        if write.data is None:
            _apply(data, write)
        elif first < last:
            _apply(data, Write(write.number, write.offset + first, write.data[first:last]))
        begin = end
    return bytes(data)


def _unsynced_bytes(file: File) -> int:
    return sum(len(write.data or b"") for write in file.writes)


def _cut(file: File) -> bytes:
    return bytes(file.synced)


def _zeros(file: File) -> bytes:
    data = bytearray(file.synced)
    for write in file.writes:
        _apply(data, write if write.data is None else write._replace(data=bytes(len(write.data))))
    return bytes(data)


def _first_half(file: File) -> bytes:
    middle = (_unsynced_bytes(file) + 1) // 2
    return _kept(file, lambda number, begin, end: (0, middle))


def _second_half(file: File) -> bytes:
    middle, end_of_all = (_unsynced_bytes(file) + 1) // 2, _unsynced_bytes(file)
    # Missing bytes of a file that has grown are zeros.
    return _kept(file, lambda number, begin, end: (middle, end_of_all)).ljust(len(file.data), b"\0")


def _every_other(file: File) -> bytes:
    return _kept(file, lambda number, begin, end: (begin, end) if number % 2 else (begin, begin))


CONTENTS: tuple[Content, ...] = (_cut, _zeros, _first_half, _second_half, _every_other, _whole)


class Disk:
    """The disk below a base directory. Everything that exists at the beginning is durable."""

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
                node = File(data, bytearray(data))
            directory.entries[path.name] = directory.synced[path.name] = node

    def apply(self, call: Call) -> bool:
        """Apply the next call. For a sync, return whether it made anything durable that was not."""
        self.number += 1
        if call.verb == "write":
            file = self._file(call.path)
            file.write(Write(self.number, len(file.data) if call.offset is None else call.offset, call.data))
        elif call.verb == "truncate":
            assert call.offset is not None
            self._file(call.path).write(Write(self.number, call.offset, None))
        elif call.verb == "create":
            self._change(call.path, File())
        elif call.verb == "ensure":
            parent, _, name = call.path.rpartition("/")
            if name not in self._directory(parent).entries:
                self._change(call.path, File())
        elif call.verb == "rename":
            node = self._node(call.path)
            self._change(call.path, None)
            self._change(call.target, node)
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
        """Return what is visible now."""
        return self._tree({change.number for change in self._changes()}, _whole)

    def crashes(self, draw: random.Random) -> Iterator[tuple[str, Tree]]:
        """Yield what a crash now may leave, with the kind of crash. Many trees are equal."""
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
                    # A file has the same content under all of its names.
                    if id(node) not in contents:
                        contents[id(node)] = content(node)
                    tree[prefix + name] = contents[id(node)]

        walk(self.root, "")
        return tree

    def _sync(self, node: Node, covers: int) -> bool:
        if isinstance(node, File):
            return node.sync(covers)
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
    """Create a tree in an empty directory."""
    for path, data in tree.items():
        if data is None:
            (base / path).mkdir(parents=True, exist_ok=True)
        else:
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_bytes(data)
