"""What a store costs on its storage, by folder, checkpoint and state (docs/json.md, ``du``).

Each record and manifest is read once, for the objects that it refers to. *Named* is everything that
something refers to; *own* is what would be freed if only that were deleted: what nothing else in
the store refers to, and no other name on the storage leads to. Bytes that several refer to count
once in sums. Inline segments are in their manifests, whose bytes count; their own bytes are given
separately.

Of other systems' checkpoints, the metadata of a state does not show which files a checkpoint shares
with others, so nothing counts as its own, and nothing as garbage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..documents import Document, fault_document
from ..errors import CheckpointError, ErrorKind, InvalidInput, NotFound, StorageError
from ..history import (
    NO_RECORDS,
    Garbage,
    Uses,
    collect_garbage,
    expire,
    record_and_columns,
    record_ids,
    require_records,
)
from ..manifest import Ints, codes_of, first_uses, integers, state_runs, take_rows
from ..model import CheckpointId, Record
from ..storage import InFront, Leftover, ObjectInfo, Storage

if TYPE_CHECKING:
    from ..history import Survey
    from ..reading import Checkpoint


TRIES = 5
"""How many times a store is read at most, if it changes meanwhile."""
_COLUMNS = ("operator", "state", "path", "size_bytes", "inline")
Key = tuple[str, str]
"""Operator and state."""


@dataclass(frozen=True)
class Named:
    """What one checkpoint refers to: arrays with an entry for each of its segments."""

    record: Record
    at: Ints
    """Its number among the listed segments; -1 if it is in the manifest or gone."""
    state: Ints
    """Its number in ``Naming.states``."""
    size_bytes: Ints
    inline: Any
    """Whether it is in the manifest."""


@dataclass
class Naming:
    """A store as it was at one instant."""

    objects: dict[str, list[ObjectInfo]]
    """By folder."""
    leftovers: list[Leftover]
    shared: dict[str, tuple[str, int]]
    """Objects whose bytes have several names (``Storage.shared``)."""
    named: dict[CheckpointId, Named] = field(default_factory=dict)
    unreadable: dict[CheckpointId, CheckpointError] = field(default_factory=dict)
    states: dict[Key, int] = field(default_factory=dict)
    garbage: Garbage = field(default_factory=Garbage)
    kept: Garbage | None = None


class SeenOnce(InFront):
    """A storage as it was when it was first read, for functions that read several times."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._listed: dict[str, list[ObjectInfo]] = {}
        self._begun: list[Leftover] | None = None
        self._records: dict[str, pa.Buffer] = {}

    # Of the listing that is kept.
    names, names_after = Storage.names, Storage.names_after

    def exists(self) -> bool:
        return bool(self.list(layout.RECORDS)) or self._inner.exists()

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix[: prefix.index("/") + 1]
        if folder not in self._listed:
            self._listed[folder] = self._inner.list(folder)
        found = self._listed[folder]
        return found if prefix == folder else [item for item in found if item.path.startswith(prefix)]

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        if not path.startswith(layout.RECORDS):
            return self._inner.read_range(path, offset, length)
        if path not in self._records:
            self._records[path] = self._inner.read_range(path, offset, length)
        return self._records[path]

    def leftovers(self) -> Any:
        if self._begun is None:
            self._begun = self._inner.leftovers()
        return self._begun

    def discard(self, leftovers: Iterable[Leftover]) -> None:  # noqa: ARG002
        raise AssertionError("nothing is deleted here")


def read_naming(storage: Storage, keep: int | None) -> Naming:
    """Read a store once, and again if its checkpoints have changed meanwhile.

    ``keep``: also find what expiring all but this many would free. Raises ``NotFound``, and
    ``StorageError`` if the store changes each time.
    """
    for _ in range(TRIES):
        found = _Reading(storage).read(keep)
        if found is not None:
            return found
    raise StorageError(
        f"the checkpoints of {storage.url} changed {TRIES} times in a row while they were read; try again",
        kind=ErrorKind.HISTORY_UNSTABLE,
    )


class _Reading:
    """One reading of a store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seen: Any = SeenOnce(storage)
        self._uses: dict[CheckpointId, Uses | CheckpointError] = {}

    def read(self, keep: int | None) -> Naming | None:
        """Return what is there; None if the checkpoints have changed since the listing."""
        seen = self._seen
        ids = record_ids(seen)
        require_records(self._storage, ids)
        segments = seen.list(layout.SEGMENTS)
        self._listed = pa.array([item.path for item in segments], pa.string())
        folders = (layout.RECORDS, layout.MANIFESTS, layout.SEGMENTS, layout.REQUESTS)
        self._found = Naming(
            {folder: seen.list(folder) for folder in folders}, self._leftovers(), _shared(self._storage)
        )
        for checkpoint_id in reversed(ids):
            # What cannot be read is listed in `unreadable`; the search for garbage explains the
            # consequences.
            if isinstance(error := self._keep(checkpoint_id), CheckpointError):
                self._found.unreadable[checkpoint_id] = error
        self._found.garbage = collect_garbage(seen, delete=False, read=self._again)
        if keep is not None:
            self._found.kept = expire(seen, keep, delete=False, read=self._again)
        return self._found if record_ids(self._storage) == ids else None

    def _leftovers(self) -> list[Leftover]:
        try:
            found: list[Leftover] = self._seen.leftovers()
        except StorageError:
            # Listing uploads needs a permission of its own; the search for garbage warns if it is
            # missing.
            return []
        return found

    def _keep(self, checkpoint_id: CheckpointId) -> CheckpointError | None:
        """Read a checkpoint, and keep what it refers to."""
        try:
            record, handles = record_and_columns(self._seen, checkpoint_id, _COLUMNS)
        except CheckpointError as error:
            self._uses[checkpoint_id] = error
            return error
        if handles is None or not isinstance(record, Record):
            self._uses[checkpoint_id] = Uses(record, None)
            return record if isinstance(record, CheckpointError) else None
        paths, named = self._named(record, handles)
        self._found.named[checkpoint_id] = named
        self._uses[checkpoint_id] = Uses(record, paths)
        return None

    def _again(self, _: Storage, checkpoint_id: CheckpointId) -> Uses:
        found = self._uses[checkpoint_id]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _named(self, record: Record, handles: pa.Table) -> tuple[pa.Array, Named]:
        state_of_row = np.zeros(handles.num_rows, np.int64)
        for key, start, stop in state_runs(handles):
            state_of_row[start:stop] = self._found.states.setdefault(key, len(self._found.states))
        first = first_uses(codes_of(handles["path"])[0])
        rows = pa.array(first)
        chosen = take_rows(handles.select(["path", "size_bytes", "inline"]), rows)
        paths = chosen["path"].combine_chunks()
        inline = chosen["inline"].is_valid().to_numpy().astype(bool)
        at = np.where(inline, -1, integers(pc.index_in(paths, value_set=self._listed)))
        return paths, Named(record, at, state_of_row[first], integers(chosen["size_bytes"]), inline)


def _shared(storage: Storage) -> dict[str, tuple[str, int]]:
    return storage.shared("")


def foreign_sizes(store: Any) -> dict[str, Any]:
    """``sizes_document`` for a folder of another system's checkpoints. Raises ``NotFound``."""
    records = store.survey().checkpoints
    opened = [store.checkpoint_of(record) for record in records]
    checkpoints = [_checkpoint(checkpoint) for checkpoint in opened]
    folder = store.storage.folder()
    files: dict[str, list[int]] = defaultdict(list)
    for item in folder.list("") if folder is not None else ():
        first, slash, _ = item.path.partition("/")
        files[f"{first}/" if slash else ""].append(item.size_bytes)
    states: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in checkpoints[:1]:
        for one in entry["states"]:
            states[one["operator"], one["state"]] = {
                "operator": one["operator"], "state": one["state"], "bytes": None, "own_bytes": None, "objects": None,
                "newest_bytes": one["bytes"], "newest_inline_bytes": one["inline_bytes"],
            }  # fmt: skip
    return {
        "store": store.url,
        "system": opened[0].system if opened else None,
        "newest": records[0].checkpoint_id if records else None,
        "objects": sum(map(len, files.values())),
        "bytes": sum(map(sum, files.values())),
        "shared_bytes": 0,
        "folders": [
            {
                "folder": name, "savepoint": None, "checkpoint_id": None, "objects": len(files[name]),
                "bytes": sum(files[name]), "shared_bytes": 0, "garbage_bytes": None,
            }
            for name in sorted(files)
        ],
        "states": [*states.values()],
        "checkpoints": checkpoints,
        "unreadable": [],
        "unfinished": None,
        "garbage": None,
        "keep": None,
    }  # fmt: skip


def _checkpoint(checkpoint: Any) -> dict[str, Any]:
    record, parts = checkpoint.record, checkpoint.outline
    sizes = integers(parts["size_bytes"], null=0)
    paths = pc.fill_null(parts["path"], "")
    inline = pc.starts_with(paths, "inline#").to_numpy().astype(bool)
    # Parts of one file are told apart by what follows its name.
    files = pc.replace_substring_regex(paths, r"(?s)#[^#]*$", "").filter(pa.array(~inline & (sizes > 0)))
    return {
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "created_at_us": record.created_at_us,
        "bytes": int(sizes.sum()),
        "own_bytes": None,
        "manifest_bytes": None,
        "inline_bytes": int(sizes[inline].sum()),
        "objects": pc.count_distinct(files).as_py(),
        "missing": None,
        "states": [
            {
                "operator": operator,
                "state": state,
                "bytes": int(sizes[start:stop][~inline[start:stop]].sum()),
                "inline_bytes": int(sizes[start:stop][inline[start:stop]].sum()),
                "own_bytes": None,
            }
            for (operator, state), start, stop in state_runs(parts)
        ],
    }


GIGABYTE = 10**9
"""Prices are per decimal gigabyte, as clouds state them."""


class Store(Protocol):
    """What is needed of a ``CheckpointStore``."""

    storage: Storage
    format: str | None

    @property
    def url(self) -> str: ...

    def survey(self) -> Survey: ...

    def checkpoint_of(self, record: Record) -> Checkpoint: ...


def sizes_document(store: Store, *, keep: int | None = None, price: float | None = None) -> Document:
    """Return how much storage a store uses, by folder, checkpoint and state.

    ``keep``: also what expiring all but this many of the newest would free, as ``history.expire``
    finds it. ``price``: of a gigabyte (10⁹ bytes) per month. For another system's checkpoints only
    their files and what these refer to are known. Raises ``NotFound``, ``InvalidInput`` and
    ``StorageError``.
    """
    if keep is not None and keep < 1:
        raise InvalidInput(f"cannot keep {keep} checkpoints: at least 1, the newest, is always kept")
    try:
        found = read_naming(store.storage, keep) if store.format is None else None
    except NotFound as error:
        if error.kind not in NO_RECORDS:
            raise
        found = None
    document = foreign_sizes(store) if found is None else _Sums(store, found).document(keep)
    return document | {"price": None if price is None else _price(document, price)}


def shared_bytes(objects: Iterable[ObjectInfo], shared: Mapping[str, tuple[str, int]]) -> int:
    """Return the bytes of objects that share them with other names on the storage: deleting frees
    none.
    """
    return sum(item.size_bytes for item in objects if item.path in shared)


def _price(document: Document, price: float) -> Document:
    def month(size_bytes: int | None) -> float | None:
        return None if size_bytes is None else size_bytes / GIGABYTE * price

    def freed(found: Document | None) -> float | None:
        return None if found is None or found["stopped"] else month(found["bytes"] - found["shared_bytes"])

    return {
        "per_gb_month": price,
        "month": month(document["bytes"]),
        "garbage_month": freed(document["garbage"]),
        "keep_month": freed(document["keep"]),
    }


class _Sums:
    """Sums over the objects referred to."""

    def __init__(self, store: Store, found: Naming) -> None:
        self._store, self._found = store, found
        segments = found.objects[layout.SEGMENTS]
        self._sizes = np.array([item.size_bytes for item in segments], np.int64)
        own = (*found.objects[layout.RECORDS], *found.objects[layout.MANIFESTS])
        self._listed = {item.path: item.size_bytes for item in own}
        # Objects with other names on the storage are not freed with this one.
        self._freed = self._sizes.copy()
        if found.shared:
            self._freed[np.array([item.path in found.shared for item in segments], bool)] = 0
        self._users = np.zeros(len(segments), np.int64)
        for named in found.named.values():
            self._users[named.at[named.at >= 0]] += 1

    def document(self, keep: int | None) -> Document:
        found = self._found
        folders, shared_once = self._folders()
        return {
            "store": self._store.url,
            "system": None,
            "newest": found.garbage.newest,
            "objects": sum(folder["objects"] for folder in folders),
            "bytes": sum(folder["bytes"] for folder in folders) - shared_once,
            "shared_bytes": shared_once,
            "folders": folders,
            "states": self._states(),
            "checkpoints": [self._checkpoint(number) for number in sorted(found.named, reverse=True)],
            "unreadable": [
                {"checkpoint_id": number, **fault_document(error)}
                for number, error in sorted(found.unreadable.items(), reverse=True)
            ],
            "unfinished": {
                "objects": len(found.garbage.unfinished),
                "bytes": sum(item.size_bytes for item in found.garbage.unfinished),
            },
            "garbage": self._garbage(found.garbage),
            "keep": None if found.kept is None else {"keep": keep, **self._garbage(found.kept)},
        }

    def _garbage(self, garbage: Garbage) -> Document:
        return {
            "records": len(garbage.records),
            "objects": len(garbage.objects) + len(garbage.leftovers),
            "bytes": garbage.size_bytes,
            "shared_bytes": shared_bytes(garbage.objects, self._found.shared),
            "stopped": garbage.stopped,
        }

    def _folders(self) -> tuple[list[Document], int]:
        """Return the folders, and the bytes in them that are counted though another name has
        them.
        """
        found, storage = self._found, self._store.storage
        garbage = {item.path for item in found.garbage.objects}
        seen = {identity for identity, _ in found.shared.values()}
        folders = [
            _folder(folder, items, found.shared, sum(item.size_bytes for item in items if item.path in garbage))
            for folder, items in found.objects.items()
        ]
        # Several names in the store itself: a copy that was linked back.
        twice = _twice(found.objects.values(), found.shared)
        begun = [*found.leftovers]
        folders.append(
            {
                "folder": "",
                "savepoint": None,
                "checkpoint_id": None,
                "objects": len(begun),
                "bytes": sum(item.size_bytes for item in begun),
                "shared_bytes": 0,
                "garbage_bytes": sum(item.size_bytes for item in found.garbage.leftovers),
            }
        )
        below = {name: storage.savepoint(name) for name in storage.savepoints()}
        for name, there in below.items():
            items = there.list("")
            shared = there.shared("")
            ids = [number for item in items if (number := layout.record_id(item.path)) is not None]
            entry = _folder(f"{layout.SAVEPOINTS}{name}/", items, shared, 0)
            folders.append(entry | {"savepoint": name, "checkpoint_id": max(ids, default=None)})
            sizes = {item.path: item.size_bytes for item in items}
            for path, (identity, _) in shared.items():
                twice += sizes.get(path, 0) if identity in seen else 0
                seen.add(identity)
        return folders, twice

    def _states(self) -> list[Document]:
        """Return each state: what all checkpoints refer to, and what the newest does."""
        found = self._found
        count = len(found.states)
        of_state = np.full(len(self._sizes), -1, np.int64)
        several = np.zeros(len(self._sizes), bool)
        for named in found.named.values():
            at, state = named.at[named.at >= 0], named.state[named.at >= 0]
            several[at] |= (of_state[at] >= 0) & (of_state[at] != state)
            of_state[at] = state
        used = of_state >= 0
        mine = np.flatnonzero(used & ~several)
        newest = found.named.get(found.garbage.newest) if found.garbage.newest is not None else None
        sums = {
            "bytes": _by(of_state[used], self._sizes[used], count),
            "own_bytes": _by(of_state[mine], self._freed[mine], count),
            "objects": _by(of_state[used], np.ones(int(used.sum()), np.int64), count),
            "newest_bytes": self._of_states(newest, count),
            "newest_inline_bytes": _inline(newest, count),
        }
        return [
            {"operator": operator, "state": state, **{name: int(column[number]) for name, column in sums.items()}}
            for (operator, state), number in found.states.items()
        ]

    def _of_states(self, named: Named | None, count: int) -> Ints:
        if named is None:
            return np.zeros(count, np.int64)
        there = named.at >= 0
        return _by(named.state[there], self._sizes[named.at[there]], count)

    def _checkpoint(self, checkpoint_id: CheckpointId) -> Document:
        found = self._found
        named = found.named[checkpoint_id]
        record = named.record
        there = named.at[named.at >= 0]
        alone = there[self._users[there] == 1]
        own = (layout.record_path(checkpoint_id), record.manifest.path)
        paths = {path: self._listed.get(path, 0) for path in own}
        count = len(found.states)
        per_state = {
            "bytes": self._of_states(named, count),
            "inline_bytes": _inline(named, count),
            "own_bytes": self._own_of_states(named, count),
        }
        has = np.bincount(named.state, minlength=count) > 0
        return {
            "checkpoint_id": checkpoint_id,
            "attempt_id": record.attempt_id,
            "kind": record.kind.value,
            "created_at_us": record.created_at_us,
            "bytes": sum(paths.values()) + int(self._sizes[there].sum()),
            "own_bytes": sum(size for path, size in paths.items() if path not in found.shared)
            + int(self._freed[alone].sum()),
            "manifest_bytes": paths[record.manifest.path],
            "inline_bytes": int(named.size_bytes[named.inline].sum()),
            "objects": len(there),
            "missing": int(((named.at < 0) & ~named.inline).sum()),
            "states": [
                {"operator": operator, "state": state, **{name: int(column[at]) for name, column in per_state.items()}}
                for (operator, state), at in found.states.items()
                if has[at]
            ],
        }

    def _own_of_states(self, named: Named, count: int) -> Ints:
        there = np.flatnonzero(named.at >= 0)
        alone = there[self._users[named.at[there]] == 1]
        return _by(named.state[alone], self._freed[named.at[alone]], count)


def _folder(folder: str, items: list[ObjectInfo], shared: Mapping[str, tuple[str, int]], garbage: int) -> Document:
    return {
        "folder": folder,
        "savepoint": None,
        "checkpoint_id": None,
        "objects": len(items),
        "bytes": sum(item.size_bytes for item in items),
        "shared_bytes": shared_bytes(items, shared),
        "garbage_bytes": garbage,
    }


def _twice(folders: Iterable[list[ObjectInfo]], shared: Mapping[str, tuple[str, int]]) -> int:
    """Return the bytes of objects that are other names of an object before them."""
    seen: set[str] = set()
    twice = 0
    for items in folders if shared else ():
        for item in items:
            identity = shared.get(item.path, ("", 0))[0]
            twice += item.size_bytes if identity in seen else 0
            seen |= {identity} if identity else set()
    return twice


def _by(numbers: Ints, values: Ints, count: int) -> Ints:
    """Return exact sums of values by number; a bincount with weights is not exact above 2⁵³."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, numbers, values)
    return sums


def _inline(named: Named | None, count: int) -> Ints:
    if named is None:
        return np.zeros(count, np.int64)
    return _by(named.state[named.inline], named.size_bytes[named.inline], count)
