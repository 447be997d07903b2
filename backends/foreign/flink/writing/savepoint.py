"""Writes a checkpoint as a canonical savepoint of Flink: ``write_savepoint``.

The files with each subtask's state are written first, ``_metadata`` last: a folder without it is
not a savepoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator as OurOperator
from stateformat.keys import key_group_range
from stateformat.model import Mode, State
from stateformat.reading import Checkpoint
from stateformat.schema import segment_schema
from stateformat.storage import Storage, lies_in

from ...byte_strings import Positions, from_arrow
from ...checkpoint import ForeignCheckpoint
from ..contents import COORDINATOR
from ..described import describe
from ..handles import (
    BROADCAST,
    CANONICAL,
    SPLIT,
    UNION,
    Inline,
    KeyGroups,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Relative,
    Subtask,
)
from ..header import StateInfo
from ..key_hash import FLINK_KEY_HASH, USER_KEY_HASH
from ..layouts import Form, Layout, form_of, is_ambiguous, prefix_size
from ..metadata import FILE_NAME
from ..metadata_writing import encode_metadata
from ..operator_state import OperatorForm, operator_form
from ..source import FlinkSource
from .binaries import grouped, joined, of_numbers
from .entries import encode_rows, lay_out
from .template import (
    KEEP,
    OPERATOR,
    Template,
    key_and_states,
    keyed_header,
    lists_and_broadcasts,
    operator_header,
    template_in,
    template_of,
    without,
)
from .values import encode

RANGE_BYTES: Final = 32 << 20
"""About how many bytes of rows are encoded at once; a batch is some key groups of one subtask."""
_MODES: Final = {Mode.EVEN_SPLIT: SPLIT, Mode.UNION: UNION, Mode.BROADCAST: BROADCAST}


@dataclass(frozen=True)
class Written:
    """What was written, and what the checkpoint has that Flink's savepoint does not."""

    operators: int
    files: int
    bytes: int
    rows: int
    left_out: tuple[str, ...]
    """Operators and states of the template that the checkpoint does not have."""


def write_savepoint(checkpoint: Checkpoint, target: Storage) -> Written:
    """Write a canonical savepoint into an empty folder.

    The checkpoint must be Flink's own, or imported from Flink with its key groups kept. Raises
    ``InvalidInput`` for what Flink would not restore, before anything is written. Values that
    Flink's serializers cannot hold are found only while writing: the folder then has no
    ``_metadata``.
    """
    _check_target(target, checkpoint)
    foreign = checkpoint.source if isinstance(checkpoint, ForeignCheckpoint) else None
    refused = [note for note in checkpoint.notes if note.kind == "refused"]
    if refused:
        raise InvalidInput(
            f"{refused[0].subject} cannot be read, and a savepoint without it would lose it: {refused[0].message}; or "
            f"{without(refused[0].subject)}",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    template = template_of(foreign) if isinstance(foreign, FlinkSource) else template_in(checkpoint)
    return _Writer(checkpoint, template, target).write()


def _check_target(target: Storage, checkpoint: Checkpoint) -> None:
    if checkpoint.system is not None and lies_in(target.url, checkpoint.storage.url):
        raise InvalidInput(
            f"{target.url} lies in {checkpoint.storage.url}, which is {checkpoint.system} and stays as it is; give a "
            "folder elsewhere",
            kind=ErrorKind.INVALID_URL,
        )
    found = target.list("")
    if found:
        raise InvalidInput(
            f"{target.url} holds {found[0].path}; a savepoint goes to an empty folder: give another",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )


@dataclass(frozen=True)
class _Keyed:
    """The keyed states of one operator, in the order of their numbers."""

    header: bytes
    forms: tuple[Form, ...]


@dataclass(frozen=True)
class _Lists:
    """The operator states of one operator, in the order of the header."""

    header: bytes
    forms: tuple[tuple[int, OperatorForm], ...]


class _Writer:
    """One call of :func:`write_savepoint`."""

    def __init__(self, checkpoint: Checkpoint, template: Template, target: Storage) -> None:
        # Rows that have expired are written too: Flink drops them by its own clock.
        self.checkpoint, self.template, self.target = checkpoint.with_expired(), template, target
        self.states = {(state.operator, state.name): state for state in checkpoint.states}
        self.left_out: list[str] = []
        self.files = self.bytes = self.rows = 0

    def write(self) -> Written:
        plans = [self._plan(operator) for operator in self.template.metadata.operators]
        self._check_all_known()
        operators = tuple(self._operator(*plan) for plan in plans if plan is not None)
        metadata = encode_metadata(replace(self.template.metadata, operators=operators))
        self._create(FILE_NAME, metadata)
        return Written(len(operators), self.files, self.bytes, self.rows, tuple(self.left_out))

    def _check_all_known(self) -> None:
        known = {_uid(operator) for operator in self.template.metadata.operators} | {OPERATOR}
        unknown = [operator.uid for operator in self.checkpoint.graph.operators if operator.uid not in known]
        if unknown:
            missing = sorted(known - {OPERATOR} - set(self.checkpoint.graph.by_uid))
            raise InvalidInput(
                f"operator {unknown[0]!r} is none of Flink's in the template; of those, the checkpoint lacks "
                f"{', '.join(missing) or 'none'}. Give it its name back (`ckpt rewrite --rename {unknown[0]}=NAME`)",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )

    def _plan(self, saved: Operator) -> tuple[Operator, OurOperator, _Keyed | None, _Lists | None] | None:
        uid = _uid(saved)
        operator = self.checkpoint.graph.by_uid.get(uid)
        if operator is None:
            self.left_out.append(uid)
            return None
        mine = {name: state for (owner, name), state in self.states.items() if owner == uid}
        keyed = self._keyed_plan(saved, operator, mine)
        lists = self._lists_plan(saved, mine)
        known = {form.parts.name for form in keyed.forms} if keyed else set()
        known |= {form.state.name for _, form in lists.forms} if lists else set()
        unknown = sorted(set(mine) - known - {COORDINATOR})
        if unknown:
            missing = [name.removeprefix(f"{uid}/") for name in self.left_out if name.startswith(f"{uid}/")]
            renamed = f"if it is {' or '.join(missing)} under another name, {KEEP}; if not, " if missing else ""
            raise InvalidInput(
                f"state {unknown[0]!r} of operator {uid!r} cannot be written, for Flink has no serializer by that "
                f"name; {renamed}{without(f'{uid}/{unknown[0]}')}",
                kind=ErrorKind.UNKNOWN_STATE,
            )
        return saved, operator, keyed, lists

    def _keyed_plan(self, saved: Operator, operator: OurOperator, mine: Mapping[str, State]) -> _Keyed | None:
        header = self.template.keyed.get(saved.id)
        if header is None or not any(state.mode is Mode.KEYED for state in mine.values()):
            return None
        if operator.key_hash not in (FLINK_KEY_HASH, USER_KEY_HASH):
            raise InvalidInput(
                f"keys of operator {operator.uid!r} are dealt by {operator.key_hash}, and Flink looks for them by its "
                f"own hash; {KEEP}",
                kind=ErrorKind.UNSUPPORTED_TYPE,
            )
        key, read, described = key_and_states(header)
        parts = describe(read).parts
        forms = {name: form_of(operator.uid, parts[name])[0] for name in described}
        chosen = {name: text for name, text in described.items() if name in mine}
        self.left_out += [f"{operator.uid}/{name}" for name in described if name not in mine]
        for name in chosen:
            _check_columns(mine[name], forms[name].state)
            if saved.id in self.template.heaps:
                check_bytes(operator.uid, forms[name])
        hides = read.stopped is not None and read.states[-1].name in chosen
        behind = read.declared - len(read.states) if hides else 0
        return _Keyed(keyed_header(key, chosen.values(), behind), tuple(forms[name] for name in chosen))

    def _lists_plan(self, saved: Operator, mine: Mapping[str, State]) -> _Lists | None:
        header = self.template.lists.get(saved.id)
        if header is None:
            return None
        uid = _uid(saved)
        read, lists, broadcasts = lists_and_broadcasts(header)
        hidden = self.template.hidden.get(saved.id, ())
        self.left_out += [f"{uid}/{name}" for name in (*lists, *broadcasts, *hidden) if name not in mine]
        lists = {name: text for name, text in lists.items() if name in mine}
        broadcasts = {name: text for name, text in broadcasts.items() if name in mine}
        hidden = tuple(name for name in hidden if name in mine)
        infos: dict[str, StateInfo] = {info.name: info for info in (*read.lists, *read.broadcasts)}
        forms = []
        for name in (*lists, *broadcasts, *hidden):
            mode = _MODES.get(mine[name].mode, SPLIT)
            info = None if name in hidden else infos[name]
            form, _ = operator_form(uid, name, mode, info.value if info else None, info.key if info else None)
            _check_columns(mine[name], form.state)
            forms.append((mode, form))
        if not forms:
            return None
        return _Lists(operator_header(read.version, lists, broadcasts, read if hidden else None), tuple(forms))

    def _operator(self, saved: Operator, operator: OurOperator, keyed: _Keyed | None, lists: _Lists | None) -> Operator:
        finished = [index for index in range(operator.parallelism) if index in operator.finished]
        limit = operator.max_parallelism or saved.max_parallelism
        found = replace(saved, parallelism=operator.parallelism, max_parallelism=limit)
        if len(finished) == operator.parallelism:
            return replace(found, fully_finished=True, coordinator=None, subtasks=())
        subtasks = []
        for index in range(operator.parallelism):
            if index in operator.finished:
                subtasks.append(Subtask(index, finished=True))
                continue
            groups = self._keyed(saved, operator, keyed, index) if keyed else None
            partitions = self._lists(saved, lists, index) if lists else None
            if groups is not None or partitions is not None:
                subtasks.append(Subtask(index, managed_operator=partitions, managed_keyed=groups))
        coordinator = self._coordinator(saved)
        return replace(found, fully_finished=False, coordinator=coordinator, subtasks=tuple(subtasks))

    def _coordinator(self, saved: Operator) -> Inline | None:
        uid = _uid(saved)
        if (uid, COORDINATOR) not in self.states:
            return None
        data = self.checkpoint.read(uid, COORDINATOR).table()["value"].to_pylist()
        return Inline(f"coordinator-{saved.id.hex()}", b"".join(data)) if data else None

    # Keyed state

    def _keyed(self, saved: Operator, operator: OurOperator, keyed: _Keyed, index: int) -> KeyGroups:
        limit = operator.max_parallelism or saved.max_parallelism
        first, last = key_group_range(index, parallelism=operator.parallelism, max_parallelism=limit)
        tables = [self._rows_by_group(operator.uid, form, index) for form in keyed.forms]
        offsets = np.zeros(last - first + 1, np.int64)
        name = f"keyed-{saved.id.hex()}-{index}"
        prefix = prefix_size(limit)
        with self.target.open_output(name) as out:
            size = out.write(keyed.header)
            for low, high in _ranges(tables, first, last):
                some = [_between(table, low, high) for table in tables]
                encoded = [encode_rows(form, rows, prefix) for form, rows in zip(keyed.forms, some, strict=True)]
                data, groups, begin = lay_out(encoded)
                offsets[groups - first] = size + begin
                size += out.write(data.tobytes())
        self._count(size)
        return KeyGroups(CANONICAL, first, offsets, Relative(name, size))

    def _rows_by_group(self, uid: str, form: Form, index: int) -> pa.Table:
        table = self.checkpoint.read(uid, form.parts.name, index).table()
        self.rows += table.num_rows
        groups = table["_key_group"].to_numpy()
        if (np.diff(groups) < 0).any():
            table = table.take(pa.array(np.argsort(groups, kind="stable")))
        return table

    # Operator state

    def _lists(self, saved: Operator, lists: _Lists, index: int) -> OperatorStates | None:
        data = bytearray(lists.header)
        states = []
        for mode, form in lists.forms:
            table = self.checkpoint.read(_uid(saved), form.state.name, index).table()
            self.rows += table.num_rows
            entries, lengths = _entries(form, mode, table)
            begin = len(data) + np.cumsum(lengths) - lengths
            if len(lengths) or mode != BROADCAST:
                states.append(OperatorPartitions(form.state.name, mode, begin))
            data += entries
        if not states:
            return None
        name = f"operator-{saved.id.hex()}-{index}"
        self._create(name, bytes(data))
        return OperatorStates(tuple(states), Relative(name, len(data)))

    def _create(self, name: str, data: bytes) -> None:
        with self.target.open_output(name) as out:
            out.write(data)
        self._count(len(data))

    def _count(self, size: int) -> None:
        self.files += 1
        self.bytes += size


def _uid(operator: Operator) -> str:
    return operator.uid or operator.id.hex()


def check_bytes(uid: str, form: Form) -> None:
    """Raise ``InvalidInput`` for bytes of a heap's layout that differ in a canonical stream."""
    lists = form.parts.layout is Layout.LIST and (form.raw_value or form.whole_list)
    if lists or (form.raw_rest and is_ambiguous(form.parts)):
        raise InvalidInput(
            f"state {form.parts.name!r} of operator {uid!r} was kept as bytes of the hash-map backend's own layout, "
            "which are others in a canonical savepoint; import a canonical savepoint of the job, or "
            f"{without(f'{uid}/{form.parts.name}')}",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )


def _check_columns(found: State, wanted: State) -> None:
    """Raise ``InvalidInput`` if a state has other columns than Flink's serializers write."""
    if found.mode is not wanted.mode or found.kind != wanted.kind:
        raise InvalidInput(
            f"state {found.name!r} of operator {found.operator!r} is {found.kind or found.mode}, and Flink's is "
            f"{wanted.kind or wanted.mode}; name them otherwise, or leave it out",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    shown = [
        {item.name: str(item.type) for item in segment_schema(state).remove_metadata()} for state in (found, wanted)
    ]
    if shown[0] != shown[1]:
        odd = sorted(name for name in shown[0].keys() | shown[1].keys() if shown[0].get(name) != shown[1].get(name))
        raise InvalidInput(
            f"column {odd[0]!r} of state {found.name!r} of operator {found.operator!r} is "
            f"{shown[0].get(odd[0], 'missing')}, and Flink's serializers write {shown[1].get(odd[0], 'none')}; rewrite "
            "the state with the columns that it was imported with",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )


def _ranges(tables: Sequence[pa.Table], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut key groups into ranges of about ``RANGE_BYTES`` of rows, at least one key group each."""
    share = np.zeros(last - first + 2, np.float64)
    for table in tables:
        if table.num_rows:
            counts = np.bincount(table["_key_group"].to_numpy() - first, minlength=last - first + 1)
            share[1:] += np.cumsum(counts) * (table.nbytes / table.num_rows)
    low = first
    while low <= last:
        reached = int(np.searchsorted(share, share[low - first] + RANGE_BYTES, "right")) - 1
        high = min(last, max(low, first + reached - 1))
        yield low, high
        low = high + 1


def _between(table: pa.Table, low: int, high: int) -> pa.Table:
    groups = table["_key_group"].to_numpy()
    begin, end = np.searchsorted(groups, [low, high + 1])
    return table.slice(int(begin), int(end - begin))


def _entries(form: OperatorForm, mode: int, table: pa.Table) -> tuple[bytes, Positions]:
    """Return the bytes of a state of one subtask, and the length of each entry."""
    columns = {name: _whole(table[name]) for name in table.column_names}
    if form.raw:
        found = columns["value"]
    elif mode == BROADCAST and form.key is not None:
        pairs = joined(encode(form.key, columns["key"]), encode(form.value, columns["value"]))
        count = np.array([table.num_rows])
        found = joined(of_numbers(count, ">i4"), grouped(pairs, count))
    else:
        found = encode(form.value, columns["value"])
    strings = from_arrow(found)
    if not len(strings):
        return b"", np.zeros(0, np.int64)
    first = int(strings.start[0])
    whole: npt.NDArray[np.uint8] = strings.data[first : first + int(strings.length.sum())]
    return whole.tobytes(), strings.length


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
