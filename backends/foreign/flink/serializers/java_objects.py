"""Java object streams read as data: classes are names, objects are fields. No class is loaded.

Source of the rules: Java Object Serialization Specification, section 6 (protocol version 2).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from stateformat.errors import ErrorKind, UnsupportedFormat

from ...cursor import Cursor

MAGIC: Final = 0xACED
_DEPTH_MAX: Final = 96
_NULL, _REFERENCE, _CLASS_DESC, _OBJECT, _STRING, _ARRAY, _CLASS, _BLOCK, _END = range(0x70, 0x79)
_RESET, _LONG_BLOCK, _EXCEPTION, _LONG_STRING, _PROXY, _ENUM = range(0x79, 0x7F)
_FIRST_HANDLE: Final = 0x7E0000
_WRITES, _SERIALIZABLE, _EXTERNAL, _BLOCKS = 1, 2, 4, 8
_FORMS: Final = {"B": "b", "C": "H", "D": "d", "F": "f", "I": "i", "J": "q", "S": "h", "Z": "?"}

Value: TypeAlias = Any
"""None, a number, a bool, text, bytes (block data), :class:`JavaObject`, or a list (an array)."""


@dataclass(slots=True)
class _Class:
    name: str
    flags: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    parent: _Class | None = None


@dataclass(slots=True)
class JavaObject:
    """An object, an enum constant or a class, by the name of its class."""

    class_name: str
    fields: dict[str, Value] = field(default_factory=dict)
    """Fields of the class and its parents; for an enum constant: ``name``."""
    written: list[Value] = field(default_factory=list)
    """What the class has written in addition to its fields."""


def read_object(at: Cursor) -> Value:
    """Read a stream of one object.

    Raises ``DamagedCheckpoint``, and ``UnsupportedFormat`` for parts of the protocol that no type
    description uses.
    """
    if at.u16() != MAGIC or at.u16() != 5:
        at.position = max(at.position - 4, 0)
        at.damaged("a Java object stream should begin with AC ED 00 05")
    return _Stream(at).content(0)


class _Stream:
    """One stream. A handle is the number of something that was read before."""

    def __init__(self, at: Cursor) -> None:
        self.at = at
        self.handles: list[Any] = []

    def content(self, depth: int) -> Value:
        at = self.at
        at.deeper("Java objects", depth, _DEPTH_MAX)
        code = at.u8()
        if code == _NULL:
            return None
        if code == _REFERENCE:
            return self.reference()
        if code == _OBJECT:
            return self.object(depth)
        if code in (_STRING, _LONG_STRING):
            return self.string(code)
        if code == _ARRAY:
            return self.array(depth)
        if code == _ENUM:
            found = JavaObject(self.class_desc(depth).name)
            self.handles.append(found)
            found.fields["name"] = self.content(depth + 1)
            return found
        if code == _CLASS:
            found = JavaObject("java.lang.Class", {"name": self.class_desc(depth).name})
            self.handles.append(found)
            return found
        if code == _CLASS_DESC:
            at.position -= 1
            return JavaObject("java.io.ObjectStreamClass", {"name": self.class_desc(depth).name})
        if code in (_BLOCK, _LONG_BLOCK):
            return bytes(at.take(at.u8() if code == _BLOCK else at.i32()))
        raise self.unknown(code)

    def unknown(self, code: int) -> UnsupportedFormat:
        return UnsupportedFormat(
            f"{self.at.path}: a Java object stream has the code {code:#x} before byte {self.at.position}, which no "
            "description of a type has: the file is damaged, or the type is not one of Flink's own",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=self.at.path,
        )

    def reference(self) -> Any:
        number = self.at.i32() - _FIRST_HANDLE
        if not 0 <= number < len(self.handles):
            self.at.damaged(f"a Java object stream refers to object {number} of {len(self.handles)}")
        return self.handles[number]

    def string(self, code: int) -> str:
        at = self.at
        if code == _STRING:
            found = at.utf()
        else:
            size = at.i64()
            found = at.text(at.fitting(size, 1, "bytes"))
        self.handles.append(found)
        return found

    def class_desc(self, depth: int) -> _Class:
        """Read the description of a class; there must be one."""
        found = self.class_or_none(depth)
        if found is None:
            self.at.damaged("an object has no class")
        return found

    def class_or_none(self, depth: int) -> _Class | None:
        at = self.at
        at.deeper("classes", depth, _DEPTH_MAX)
        code = at.u8()
        if code == _NULL:
            return None
        if code == _REFERENCE:
            found = self.reference()
            if not isinstance(found, _Class):
                at.damaged("an object's class is no class")
            return found
        if code != _CLASS_DESC:
            raise self.unknown(code)
        made = _Class(at.utf())
        at.take(8)
        self.handles.append(made)
        made.flags = at.u8()
        for _ in range(at.fitting(at.u16(), 3, "fields")):
            kind, name = chr(at.u8()), at.utf()
            if kind in "[L":
                self.content(depth + 1)
            elif kind not in _FORMS:
                at.damaged(f"field {name!r} has type {kind!r}")
            made.fields.append((name, kind))
        self.until_end(depth)
        made.parent = self.class_or_none(depth + 1)
        return made

    def until_end(self, depth: int) -> list[Value]:
        """Read what a class has written, up to its end mark."""
        found: list[Value] = []
        while self.at.u8() != _END:
            self.at.position -= 1
            found.append(self.content(depth + 1))
        return found

    def object(self, depth: int) -> JavaObject:
        made = self.class_desc(depth)
        found = JavaObject(made.name)
        self.handles.append(found)
        line: list[_Class] = []
        parent: _Class | None = made
        while parent is not None:
            line.append(parent)
            self.at.deeper("parents of a class", len(line), _DEPTH_MAX)
            parent = parent.parent
        for each in reversed(line):
            if each.flags & _EXTERNAL:
                if not each.flags & _BLOCKS:
                    raise self.unknown(each.flags)
                found.written += self.until_end(depth)
            elif each.flags & _SERIALIZABLE:
                for name, kind in each.fields:
                    found.fields[name] = self.value(kind, depth)
                if each.flags & _WRITES:
                    found.written += self.until_end(depth)
        return found

    def value(self, kind: str, depth: int) -> Value:
        if kind in "[L":
            return self.content(depth + 1)
        form = ">" + _FORMS[kind]
        return struct.unpack(form, self.at.take(struct.calcsize(form)))[0]

    def array(self, depth: int) -> list[Value]:
        kind = self.class_desc(depth).name[1:2]
        if kind not in _FORMS and kind not in ("[", "L"):
            self.at.damaged(f"an array of {kind!r}")
        found: list[Value] = []
        self.handles.append(found)
        least = 1 if kind in "[L" else struct.calcsize(">" + _FORMS[kind])
        count = self.at.count(least, "items of an array")
        found.extend(self.value(kind, depth) for _ in range(count))
        return found


def items(value: Value, depth: int = 0) -> list[Value] | None:
    """Return the items of a list of Java's collections; None if its class is not known."""
    # A damaged stream may have lists that contain themselves.
    if depth > 4:
        return None
    if isinstance(value, list):
        return value
    if not isinstance(value, JavaObject):
        return None
    name = value.class_name
    if name in ("java.util.ArrayList", "java.util.LinkedList", "java.util.CollSer"):
        # Block data (a capacity or a count) precedes the objects.
        return [item for item in value.written if not isinstance(item, bytes)]
    if name == "java.util.Arrays$ArrayList":
        return items(value.fields.get("a"), depth + 1)
    if name == "java.util.Collections$SingletonList":
        return [value.fields.get("element")]
    if name == "java.util.Collections$EmptyList":
        return []
    if name.startswith("java.util.Collections$Unmodifiable"):
        return items(value.fields.get("list"), depth + 1)
    return None
