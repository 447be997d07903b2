"""Long lists in a document that stay columns: a million subtasks never become a million objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

_AT_ONCE: Final = 16_384


class JsonRows:
    """A list of flat objects with the same members, as one numpy array of integers per member.

    The arrays have equal length; a negative value is null. Iterating gives the objects.
    """

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __iter__(self) -> Iterator[dict[str, int | None]]:
        for values in self._tuples():
            yield dict(zip(self.arrays, values, strict=True))

    def greatest(self, count: int, name: str) -> list[dict[str, int | None]]:
        """Return the objects with the greatest values of a member; of equal ones the first."""
        order = (-self.arrays[name]).argsort(kind="stable")[:count]
        return list(JsonRows(**{member: array[order] for member, array in self.arrays.items()}))

    def lines(self) -> Iterator[str]:
        """Yield each object as JSON."""
        template = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in self.arrays) + "}"
        return (template % values for values in self._tuples(null="null"))

    def _tuples(self, null: str | None = None) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(self), _AT_ONCE):
            columns = []
            for array in self.arrays.values():
                part = array[start : start + _AT_ONCE]
                values = part.tolist()
                columns.append([null if value < 0 else value for value in values] if (part < 0).any() else values)
            yield from zip(*columns, strict=True)


class JsonColumn:
    """A list of scalars that stays an Arrow array until it is written."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield from part.to_pylist()

    def pieces(self, **options: Any) -> Iterator[str]:
        """Yield the entries as JSON, many in a piece."""
        for part in self._parts():
            if part.null_count == 0 and str(part.type).startswith("int"):
                yield ", ".join(map(str, part.to_numpy().tolist()))
            else:
                yield json.dumps(part.to_pylist(), **options)[1:-1]

    def _parts(self) -> Iterator[Any]:
        return (self.array.slice(start, _AT_ONCE) for start in range(0, len(self.array), _AT_ONCE))
