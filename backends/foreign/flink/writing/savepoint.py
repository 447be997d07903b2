"""Writes a checkpoint as a canonical savepoint of Flink: ``write_savepoint``.

The files with each subtask's state are written first, ``_metadata`` last: a folder without it is
not a savepoint. Rows of a keyed state become entries of a canonical stream, prefixed keys and
values: the inverse of ``layouts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator as OurOperator
from stateformat.keys import key_group_range
from stateformat.model import Mode, State
from stateformat.reading import Checkpoint
from stateformat.schema import segment_schema
from stateformat.storage import Storage, lies_in
from stateformat.ttl import NO_TIME_US

from ...byte_strings import Positions, cut, from_arrow
from ...checkpoint import ForeignCheckpoint
from ..contents import COORDINATOR, OperatorForm, operator_form
from ..headers import StateInfo, describe
from ..key_hash import FLINK_KEY_HASH, USER_KEY_HASH
from ..kryo import WrongValueError
from ..lanes import Serializer
from ..layouts import TIMER_STATES, TTL, Form, Layout, form_of, has_text, is_ambiguous, is_window, prefix_size
from ..metadata import (
    BROADCAST,
    CANONICAL,
    FILE_NAME,
    SPLIT,
    UNION,
    Inline,
    KeyGroups,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Relative,
    Subtask,
    encode_metadata,
)
from ..source import FlinkSource
from .binaries import comma_joined, flags, grouped, joined, of_lengths, of_numbers, present, repeated, scattered
from .template import (
    KEEP,
    TEMPLATE_OPERATOR,
    Template,
    key_and_states,
    keyed_header,
    lists_and_broadcasts,
    operator_header,
    template_in,
    template_of,
    without,
)
from .values import encode, encode_field

_I64 = np.iinfo(np.int64)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Entries of one state, in any order."""

    groups: npt.NDArray[np.int32]
    keys: pa.Array
    values: pa.Array

    def __len__(self) -> int:
        return len(self.groups)


def encode_rows(form: Form, rows: pa.Table, prefix: int) -> Encoded:
    """Encode rows of a state.

    Raises ``InvalidInput`` and ``WrongValueError`` for what Flink cannot hold.
    """
    columns = {name: _whole(rows[name]) for name in rows.column_names}
    groups = columns["_key_group"].to_numpy()
    if form.parts.layout is Layout.TIMERS:
        head = _prefix(groups, prefix)
        return Encoded(groups, joined(head, *_timers(form, columns)), repeated(b"", len(groups)))
    keys = joined(_prefix(groups, prefix), *_key(form, columns))
    if form.parts.layout is Layout.LIST and not form.whole_list and form.parts.namespace is None:
        return _lists(form, groups, keys, columns)
    return Encoded(groups, keys, _values(form, columns))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _prefix(groups: npt.NDArray[np.int32], prefix: int) -> pa.Array:
    return of_numbers(groups, "u1" if prefix == 1 else ">u2")


def _key(form: Form, columns: dict[str, pa.Array]) -> list[pa.Array]:
    """Return the parts that follow the key group's number: key, namespace, map key."""
    parts, key = form.parts, columns["key"]
    if form.whole_key:
        return [key]
    found = key if form.raw_key else encode_field("key", parts.key, key)
    pieces = [found]
    if is_ambiguous(parts):
        pieces.append(_length_of(found))
    if form.raw_rest and parts.namespace is not None:
        return [*pieces, columns["_map_key"]]
    if parts.namespace is None:
        pieces.append(repeated(b"\0", len(key)))
        if form.raw_rest:
            return [*pieces, columns["_map_key"]]
        return (
            [*pieces, encode_field("_map_key", parts.map_key, columns["_map_key"])]
            if parts.map_key is not None
            else pieces
        )
    space = _namespace(form, columns["_map_key"])
    encoded = encode(parts.namespace, space)
    pieces.append(encoded)
    if is_ambiguous(parts):
        pieces.append(_length_of(encoded))
    if parts.map_key is not None:
        pieces.append(encode_field("_map_key", parts.map_key, columns["_map_key"].flatten()[-1]))
    return pieces


def _namespace(form: Form, map_key: pa.Array) -> pa.Array:
    parts = form.parts
    if parts.map_key is None or parts.namespace is None:
        return map_key
    if not is_window(parts.namespace.arrow_type):
        return map_key.flatten()[0]
    return pa.StructArray.from_arrays(map_key.flatten()[:2], fields=list(parts.namespace.arrow_type))


def _length_of(found: pa.Array) -> pa.Array:
    """Return the length of each, low byte first, without its high zero bytes; at least one byte."""
    lengths = from_arrow(found).length
    width = 1 + (lengths >= 1 << 8) + (lengths >= 1 << 16) + (lengths >= 1 << 24)
    octets = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return of_lengths(octets[np.arange(4) < width[:, None]], width)


def _values(form: Form, columns: dict[str, pa.Array]) -> pa.Array:
    parts, value = form.parts, columns["value"]
    if form.whole_list or form.raw_value:
        return value
    if parts.value is None:
        return repeated(b"", len(value))
    if parts.layout is Layout.LIST:
        counts = pc.list_value_length(value).to_numpy(zero_copy_only=False).astype(np.int64)
        return comma_joined(encode_field("value", parts.value, value.flatten()), counts)
    value = _with_ttl(parts.value, columns)
    if parts.layout is Layout.MAP:
        chosen = present(value.field(TTL) if TTL in columns else value)
        return joined(flags(~chosen), encode_field("value", parts.value, value, chosen))
    return encode_field("value", parts.value, value)


def _with_ttl(serializer: Serializer, columns: dict[str, pa.Array]) -> pa.Array:
    if TTL not in columns:
        return columns["value"]
    kind = serializer.arrow_type
    times = columns[TTL]
    if pa.types.is_timestamp(times.type):
        # Flink has milliseconds. Imports of earlier releases have them already.
        micros = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
        times = pa.array(micros // 1000, pa.int64(), mask=micros == NO_TIME_US)
    columns = {**columns, TTL: times}
    return pa.StructArray.from_arrays([columns[field.name] for field in kind], fields=list(kind))


def _lists(form: Form, groups: npt.NDArray[np.int32], keys: pa.Array, columns: dict[str, pa.Array]) -> Encoded:
    """Join the elements of each key, which have a row each, in the order of their index."""
    codes = keys.dictionary_encode().indices.to_numpy()
    order = np.lexsort((columns["_index"].to_numpy(), codes, groups))
    rows = pa.array(order)
    columns = {name: column.take(rows) for name, column in columns.items()}
    groups, codes = groups[order], codes[order]
    first = np.flatnonzero(np.append(True, codes[1:] != codes[:-1])) if len(codes) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(codes)))
    assert form.parts.value is not None
    elements = encode_field("value", form.parts.value, _with_ttl(form.parts.value, columns))
    return Encoded(groups[first], keys.take(rows).take(pa.array(first)), comma_joined(elements, counts))


def _timers(form: Form, columns: dict[str, pa.Array]) -> list[pa.Array]:
    parts = form.parts
    micros = columns["_timestamp"].to_numpy()
    moments = np.where(micros == _I64.max, _I64.max, np.where(micros == _I64.min, _I64.min, micros // 1000))
    pieces = [of_numbers(moments.view(np.uint64) ^ np.uint64(1 << 63), ">u8")]
    if form.whole_key:
        return [*pieces, columns["key"]]
    pieces.append(columns["key"] if form.raw_key else encode_field("key", parts.key, columns["key"]))
    label = parts.name.removeprefix(TIMER_STATES).replace("_", "/", 1)
    tag = columns["_tag"]
    fits = pc.equal(tag, label) if parts.namespace is None else pc.starts_with(tag, f"{label}/")
    if not pc.all(fits).as_py() and len(tag):
        odd = tag.filter(pc.invert(fits))[0].as_py()
        wanted = label if parts.namespace is None else f"{label}/<namespace>"
        raise InvalidInput(
            f"a timer of state {parts.name!r} has the tag {odd!r}, and Flink's have {wanted!r}; mend the tag, or "
            f"{without(f'UID/{parts.name}')}",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    if parts.namespace is None:
        return [*pieces, repeated(b"\0", len(tag))]
    return [*pieces, _tagged(parts.namespace, pc.utf8_slice_codeunits(tag, len(label) + 1))]


def _tagged(namespace: Serializer, text: pa.Array) -> pa.Array:
    """Return the bytes of namespaces from their text in the tags of timers."""
    if namespace.takes_rest or not has_text(namespace.arrow_type):
        return _unhexed(text)
    if is_window(namespace.arrow_type):
        ends = pc.extract_regex(text, r"^(?P<start>-?[0-9]+)-(?P<end>-?[0-9]+)$")
        if ends.null_count:
            odd = text.filter(ends.is_null())[0].as_py()
            raise InvalidInput(f"a timer's tag ends with {odd!r}, which is no window START-END; mend it")
        windows = [column.cast(pa.int64()) for column in ends.flatten()]
        return encode(namespace, pa.StructArray.from_arrays(windows, fields=list(namespace.arrow_type)))
    return encode(namespace, text.cast(namespace.arrow_type))


def _unhexed(text: pa.Array) -> pa.Array:
    """Decode hexadecimal digits."""
    strings = from_arrow(text.cast(pa.binary()))
    digits = strings.tight()
    values = np.full(256, 255, np.uint8)
    values[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
    nibbles = values[digits]
    if (strings.length % 2).any() or (nibbles == 255).any():
        raise InvalidInput("a timer's tag should end with hexadecimal digits, two for each byte; mend it")
    octets = (nibbles[0::2] << 4 | nibbles[1::2]).astype(np.uint8)
    return of_lengths(octets, strings.length // 2)


def lay_out(states: list[Encoded]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], Positions]:
    """Lay out entries by key group; return the bytes, the key groups, and where each begins.

    ``states`` are in the order of their numbers. Key groups without entries are left out.
    """
    number = np.repeat(np.arange(len(states)), [len(state) for state in states])
    groups = np.concatenate([state.groups for state in states])
    if not len(groups):
        return np.zeros(0, np.uint8), groups, np.zeros(0, np.int64)
    order = np.lexsort((number, groups))
    rows = pa.array(order)
    keys = pa.concat_arrays([state.keys for state in states]).take(rows)
    values = pa.concat_arrays([state.values for state in states]).take(rows)
    number, groups = number[order], groups[order]
    new_group = np.append(True, groups[1:] != groups[:-1])
    ends_state = np.append(new_group[1:] | (number[1:] != number[:-1]), True)
    following = np.where(np.append(new_group[1:], True), -1, np.append(number[1:], -1))
    head = scattered(of_numbers(number[new_group], ">i2"), new_group)
    tail = scattered(of_numbers(following[ends_state], ">i2"), ends_state)
    key_length, value_length = (of_numbers(from_arrow(one).length, ">i4") for one in (keys, values))
    whole = joined(head, key_length, _marked(keys, ends_state), value_length, values, tail)
    strings = from_arrow(whole)
    begin = strings.start[new_group] - strings.start[0]
    return strings.tight(), groups[new_group], begin


def _marked(keys: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Set the top bit of the first byte of the chosen keys."""
    strings = from_arrow(keys)
    data = strings.tight().copy()
    data[strings.start[chosen] - int(strings.start[0])] |= 0x80
    return of_lengths(data, strings.length)


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
    if isinstance(checkpoint, ForeignCheckpoint) and lies_in(target.url, checkpoint.storage.url):
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
        known = {_uid(operator) for operator in self.template.metadata.operators} | {TEMPLATE_OPERATOR}
        unknown = [operator.uid for operator in self.checkpoint.graph.operators if operator.uid not in known]
        if unknown:
            missing = sorted(known - {TEMPLATE_OPERATOR} - set(self.checkpoint.graph.by_uid))
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
        key, read, described = key_and_states(header, self.template.kryo.get((saved.id, True)))
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
        read, lists, broadcasts = lists_and_broadcasts(header, self.template.kryo.get((saved.id, False)))
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
                encoded = [
                    _naming(operator.uid, form.parts.name, rows, partial(encode_rows, form, prefix=prefix))
                    for form, rows in zip(keyed.forms, some, strict=True)
                ]
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
            entries, lengths = _naming(_uid(saved), form.state.name, table, partial(_entries, form, mode))
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


def _naming(uid: str, state: str, rows: pa.Table, encoded: Callable[[pa.Table], T]) -> T:
    """Return what rows are encoded as.

    Raises ``InvalidInput`` with the place of the first wrong value.
    """
    try:
        return encoded(rows)
    except WrongValueError as error:
        wrong, low, high = error, 0, rows.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        try:
            encoded(rows.slice(low, middle - low))
            low = middle
        except WrongValueError as error:
            wrong, high = error, middle
    try:
        encoded(rows.slice(low, 1))
    except WrongValueError as error:
        wrong = error
    places = [name for name in ("key", "_map_key", "_index") if name in rows.column_names]
    where = ", ".join(f"{name.strip('_').replace('_', ' ')} {rows[name][low].as_py()!r:.80}" for name in places)
    raise InvalidInput(
        f"`{'.'.join(filter(None, wrong.columns))}` of {where or f'row {low}'} in state {state!r} of operator {uid!r} "
        f"{wrong}",
        kind=ErrorKind.UNSUPPORTED_TYPE,
    ) from wrong


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
    sizes = np.zeros(last - first + 1, np.float64)
    for table in tables:
        if table.num_rows:
            counts = np.bincount(table["_key_group"].to_numpy() - first, minlength=last - first + 1)
            sizes += counts * (table.nbytes / table.num_rows)
    for low, stop in cut(sizes, RANGE_BYTES):
        yield first + low, first + stop - 1


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
        pairs = joined(
            encode_field("key", form.key, columns["key"]), encode_field("value", form.value, columns["value"])
        )
        count = np.array([table.num_rows])
        found = joined(of_numbers(count, ">i4"), grouped(pairs, count))
    else:
        found = encode_field("value", form.value, columns["value"])
    strings = from_arrow(found)
    return strings.tight().tobytes(), strings.length
