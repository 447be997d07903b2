"""A foreign checkpoint as the first checkpoint of a stateformat store: ``import_checkpoint``.

An import is a rewrite into an empty store: ``backends.rewrite`` plans it, and its engines write it.
This module has what is specific to an import: the key hash, names that users give as text, what is
left out or expires, what a reader must know, kept as properties, and the positions of sources.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.formats import refuse_foreign
from stateformat.graph import Operator
from stateformat.history import record_ids
from stateformat.inspecting import CheckpointDiff, StateDiff
from stateformat.keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT
from stateformat.model import RESERVED_PROPERTIES, CheckpointKind, Mode, Record, State, known_names
from stateformat.segments import WriteOptions
from stateformat.states import labels_of, named
from stateformat.storage import Storage, lies_in, local_path, without_secrets
from stateformat.ttl import TTL_COLUMN, Ttl

from .bootstrap import source_snapshots, source_states
from .connectors.sources.basic import rate_behind
from .connectors.sources.files import files_behind
from .dataflow.api import StartingPoint
from .foreign.checkpoint import ForeignCheckpoint
from .foreign.flink import FlinkSource
from .foreign.flink.writing.template import (
    TEMPLATE_OPERATOR,
    TEMPLATE_STATE,
    Template,
    template_of,
    template_operator,
    template_state,
)
from .foreign.framing import json_value
from .foreign.source import Note, unreadable
from .rewrite import (
    Engine,
    RewritePlan,
    RewriteSpec,
    Rewritten,
    carry_out,
    is_hashable,
    plan_rewrite,
    prove_rewrite,
)

if TYPE_CHECKING:
    from stateformat.reading import Checkpoint
    from stateformat.store import CheckpointStore


KeyHash = Literal["rehash", "keep"]
SPARK_MAX_PARALLELISM: Final = 128
"""The default for a Spark query: its number of partitions is not a number of key groups."""
PROPERTY: Final = "import."
"""Properties of an imported checkpoint that describe its origin begin with this."""
PROPERTY_CHARS: Final = 1000
"""The most that one of stateformat's properties may have. The page and ``Imported.notes`` have
all.
"""

OFFSETS: Final = "spark.offsets."
"""Properties of a Spark checkpoint: its line of the offset log, for each source by its number."""
KINDS: Final = ("files", "rate")
_FORM: Final = re.compile(r"(?P<kind>[a-z]+)(?::(?P<number>[0-9]{1,4}))?(?:@(?P<position>[0-9]{1,18}))?")
LOG_BYTES_MAX: Final = 256 << 20
"""The most bytes of one file of a source's log: some million names."""


@dataclass(frozen=True)
class ImportSpec:
    """What a user may request of an import. Anything not given stays as it is."""

    key_hash: KeyHash = "rehash"
    """``rehash``: keys by stateformat's own hash. ``keep``: key groups as they are."""
    max_parallelism: int | None = None
    """By default that of each operator, for Spark queries :data:`SPARK_MAX_PARALLELISM`."""
    job_id: str | None = None
    job_name: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """New names: ``UID`` → ``NEW_UID``, ``UID/STATE`` → ``UID/NEW_STATE``, ``UID/STATE.COLUMN`` →
    ``NEW_COLUMN``, and ``UID/STATE.COLUMN.FIELD`` → a column of its own. Old uids everywhere."""
    drop: Sequence[str] = ()
    """Operators (``UID``) and states (``UID/STATE``) that are left out. A state that cannot be read
    must be left out explicitly, so that nobody takes the rest for everything.
    """
    ttl: Mapping[str, Ttl] = field(default_factory=dict)
    """How long rows live, by ``UID/STATE``: Flink stores when each was accessed, but not how long
    it lives. A state that is not named keeps the times as a column, until a program declares a ttl.
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    """By uid of a source in the dataflow that continues, where it continues: see :class:`Start`."""
    options: WriteOptions = field(default_factory=WriteOptions)


@dataclass(frozen=True)
class Imported:
    """The published checkpoint, and what users must know about it."""

    rewritten: Rewritten
    notes: tuple[Note, ...]
    positions: tuple[tuple[str, str], ...]
    """By uid of a source, the position after which it continues."""
    left: tuple[tuple[int, str], ...]
    """Offsets of those of the query's sources that no source continues from, by number."""

    @property
    def record(self) -> Record:
        """The record of the new checkpoint."""
        return self.rewritten.record


def import_checkpoint(
    checkpoint: Checkpoint,
    target: CheckpointStore,
    spec: ImportSpec | None = None,
    *,
    engine: Engine | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Publish a foreign checkpoint as checkpoint 1 of an empty store.

    Raises ``InvalidInput``, naming the cause, for a request that is impossible;
    ``DamagedCheckpoint`` (also for the first key that is in another key group than its hash gives,
    if the hash is known); ``RestoreRefused`` if stateformat's rules refuse something in it; and
    what publishing raises. A failure leaves the store empty, except for segments that nothing
    refers to.
    """
    spec = spec or ImportSpec()
    whole = check_places(checkpoint, target)
    found = chosen_of(whole, spec.drop, spec.ttl)
    starts = [parse_start(uid, text) for uid, text in spec.sources.items()]
    plan = plan_import(found, spec)
    sources = _sources(found, starts, plan)
    template = _template(whole, spec)
    added = [*(one.operator for one in sources), *([template_operator()] if template else [])]
    if not (plan.graph.operators or added):
        raise InvalidInput(
            f"{checkpoint.storage.url} has no state to import: no operator of the query keeps any. With --source "
            "UID=KIND a source of a program goes on where the query stopped in its input",
            kind=ErrorKind.INVALID_GRAPH,
        )
    declared = [*(state for one in sources for state in one.states), *([template_state()] if template else [])]
    pending = target.begin(
        job_id=spec.job_id or found.record.job_id,
        job_name=found.record.job_name if spec.job_name is None else spec.job_name,
        graph=replace(plan.graph, operators=(*plan.graph.operators, *added)),
        states=[*plan.states, *declared],
        parent=None,
        kind=CheckpointKind.CHECKPOINT,
        rescaled_from=plan.rescaled_from,
        properties=_properties(found, spec, starts),
        options=spec.options,
    )
    for one in sources:
        for snapshot in source_snapshots(pending.context, one.operator.uid, one.start):
            pending.add(snapshot)
    if template is not None:
        with pending.context.coordinator(TEMPLATE_OPERATOR) as writer:
            writer.write(TEMPLATE_STATE, template.table())
        pending.add(writer)
    notes = (*found.notes, _NO_WAY_BACK) if isinstance(whole.source, FlinkSource) and template is None else found.notes
    return Imported(
        carry_out(pending, plan, engine, progress),
        notes,
        tuple((one.operator.uid, one.start.description) for one in sources),
        tuple(_left(found.record, starts).items()),
    )


def plan_import(checkpoint: ForeignCheckpoint, spec: ImportSpec) -> RewritePlan:
    """Return the tasks of an import. Counts rows, so it may read data files; writes nothing."""
    record = checkpoint.record
    rewrite = _rewrite_of(record, spec)
    if spec.key_hash == "rehash":
        _check_keys_known(record)
    else:
        _check_keys_stay(record, rewrite)
    return plan_rewrite(checkpoint, rewrite)


def _rewrite_of(record: Record, spec: ImportSpec) -> RewriteSpec:
    """Return the rewrite that an import is."""
    ceiling = _max_parallelism(record, spec)
    renames, states, columns = resolve_names(record, spec.names)
    return RewriteSpec(
        per_operator={
            operator.uid: ceiling
            for operator in record.graph.operators
            if ceiling is not None and operator.parallelism > ceiling
        },
        max_parallelism=ceiling,
        key_hash=DEFAULT_KEY_HASH if spec.key_hash == "rehash" else None,
        renames=renames,
        states=states,
        columns=columns,
        verify_keys=True,
        options=spec.options,
    )


def prove_import(
    checkpoint: Checkpoint,
    result: Checkpoint,
    spec: ImportSpec | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointDiff:
    """Compare a foreign checkpoint with its import; ``same`` if the import lost nothing.

    What the spec renames or leaves out is not a difference, nor are the sources that it adds. Reads
    all data of the foreign checkpoint once more. Raises as ``diff_checkpoints``.
    """
    spec = spec or ImportSpec()
    if not isinstance(checkpoint, ForeignCheckpoint):
        raise InvalidInput(f"{checkpoint!r} is a stateformat checkpoint, which needs no import; use diff_checkpoints")
    found = chosen_of(checkpoint, spec.drop, spec.ttl)
    apart = frozenset({*spec.sources, *({TEMPLATE_OPERATOR} - {*found.record.graph.by_uid})})
    diff = prove_rewrite(found, result, _rewrite_of(found.record, spec), apart=apart, progress=progress)
    template = _template(checkpoint, spec)
    if template is None:
        return diff
    state = result.record.by_state.get((TEMPLATE_OPERATOR, TEMPLATE_STATE))
    if state is not None and result.read(TEMPLATE_OPERATOR, TEMPLATE_STATE).table() == template.table():
        return diff
    lost = StateDiff(TEMPLATE_OPERATOR, TEMPLATE_STATE, "replaced", template_state(), state)
    return replace(diff, states=(*diff.states, lost))


def _template(whole: ForeignCheckpoint, spec: ImportSpec) -> Template | None:
    """Return what a savepoint needs and only Flink has, if the state is to go back."""
    source = whole.source
    return template_of(source) if spec.key_hash == "keep" and isinstance(source, FlinkSource) else None


def check_places(checkpoint: Checkpoint, target: CheckpointStore) -> ForeignCheckpoint:
    """Return the checkpoint if it is foreign, and the target is an empty store outside its folder.

    Raises ``InvalidInput``.
    """
    if not isinstance(checkpoint, ForeignCheckpoint):
        raise InvalidInput(
            f"{checkpoint!r} is already a stateformat checkpoint; `ckpt copy` copies it and `ckpt rewrite` changes it"
        )
    folder = checkpoint.storage.url.rstrip("/")
    if lies_in(target.url, folder):
        raise InvalidInput(
            f"{target.url} lies in {folder}, which is another system's and stays as it is; give a store elsewhere",
            kind=ErrorKind.INVALID_URL,
        )
    ids = record_ids(target.storage)
    if ids:
        raise InvalidInput(
            f"{target.url} holds checkpoint {ids[-1]}; an import goes to an empty store",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )
    refuse_foreign(target.storage, target.format)
    return checkpoint


def _is_spark(record: Record) -> bool:
    return any(name.startswith("spark.") for name in record.properties)


def _max_parallelism(record: Record, spec: ImportSpec) -> int | None:
    """Return the max parallelism of every operator; None: each keeps its own."""
    wanted = spec.max_parallelism
    if wanted is not None and not 1 <= wanted <= MAX_PARALLELISM_LIMIT:
        raise InvalidInput(
            f"max parallelism {wanted} is not within 1 to {MAX_PARALLELISM_LIMIT}; choose another",
            kind=ErrorKind.INVALID_PARALLELISM,
        )
    if spec.key_hash == "rehash":
        return SPARK_MAX_PARALLELISM if wanted is None and _is_spark(record) else wanted
    for operator in record.graph.operators:
        if wanted not in (None, operator.max_parallelism):
            raise InvalidInput(
                f"key groups are kept, and operator {operator.uid!r} has {operator.max_parallelism} of them, not "
                f"{wanted}; leave the max parallelism out, or let the keys be hashed anew (--key-hash rehash)",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
    return None


def _check_keys_known(record: Record) -> None:
    """Raise ``InvalidInput`` for keys that are opaque: a hash of their bytes would mean nothing."""
    opaque = [
        state
        for state in record.states
        if state.mode is Mode.KEYED
        and any(item.type == "binary" for item in state.current.fields if item.name in state.key_columns)
        and not is_hashable(state, record.graph.operator(state.operator))
    ]
    if opaque:
        named = ", ".join(f"{state.name!r} of {state.operator!r}" for state in opaque[:20])
        raise InvalidInput(
            f"the keys of state {named}{' and more' if len(opaque) > 20 else ''} are kept as bytes, of types that our "
            "hash does not take, so no record's key would find them. Keep their key groups with --key-hash keep, or "
            "leave the states out with --drop",
            kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
            states=[f"{state.operator}/{state.name}" for state in opaque],
        )


def _check_keys_stay(record: Record, rewrite: RewriteSpec) -> None:
    """Raise ``InvalidInput`` if a key would be split into columns: its hash would change."""
    for (uid, name), columns in rewrite.columns.items():
        keys = record.state(uid, name).key_columns
        split = [given for given in columns if given not in keys and given.startswith(tuple(f"{key}." for key in keys))]
        if split:
            raise InvalidInput(
                f"{split[0]!r} is part of a key of state {name!r} of operator {uid!r}, and key groups are kept: "
                "columns hash otherwise than the key as a whole. Keep the struct, or let the keys be hashed anew "
                "(--key-hash rehash)"
            )


_NO_WAY_BACK: Final = Note(
    "omitted",
    "",
    "keys are hashed anew, so what Flink needs to take this state back is not kept; an import with `--key-hash keep` "
    "keeps it",
)

Names = tuple[dict[str, str], dict[tuple[str, str], str], dict[tuple[str, str], dict[str, str]]]


def resolve_names(record: Record, names: Mapping[str, str]) -> Names:
    """Return the new names of operators, of states and of columns, from a user's text.

    Raises ``InvalidInput`` for a name that does not exist, with those that do.
    """
    states: dict[tuple[str, str], str] = {}
    columns: dict[tuple[str, str], dict[str, str]] = {}
    labels = labels_of(record.graph.operators)
    found = {old: named(old, record.states, labels) for old in names}
    uids = {one.operator: names[old] for old, one in found.items() if one is not None and one.state is None}
    for old, one in found.items():
        if one is None:
            raise _unknown(record, old)
        if one.state is None:
            continue
        state, new = record.state(one.operator, one.state), names[old]
        if one.column is None:
            states[state.operator, state.name] = _new_state_name(state, new, uids)
        else:
            columns.setdefault((state.operator, state.name), {})[one.column] = new
    return uids, states, columns


def _new_state_name(state: State, new: str, uids: Mapping[str, str]) -> str:
    for uid in (state.operator, uids.get(state.operator, state.operator)):
        if new.startswith(f"{uid}/"):
            return new[len(uid) + 1 :]
    if "/" in new:
        raise InvalidInput(
            f"state {state.name!r} of operator {state.operator!r} cannot become {new!r}: a state stays with its "
            f"operator. Write {state.operator}/{state.name}={state.operator}/NEW"
        )
    return new


def _unknown(record: Record, given: str) -> InvalidInput:
    inside = [f"{state.operator}/{state.name}" for state in record.states if given.startswith(f"{state.operator}/")]
    names = inside or [operator.uid for operator in record.graph.operators]
    what = "state" if inside else "operator"
    return InvalidInput(
        f"checkpoint {record.checkpoint_id} has no {what} {given!r} to rename; {known_names(names, given)}",
        kind=ErrorKind.UNKNOWN_STATE if inside else ErrorKind.UNKNOWN_OPERATOR,
    )


def _sources(checkpoint: ForeignCheckpoint, starts: Sequence[Start], plan: RewritePlan) -> list[SourceState]:
    for start in starts:
        if start.uid in plan.graph.by_uid:
            raise InvalidInput(
                f"source {start.uid!r} has the uid of an operator of the checkpoint; give each a uid of its own",
                kind=ErrorKind.INVALID_GRAPH,
            )
    return [source_state(start, checkpoint.record.properties, checkpoint.storage) for start in starts]


def _left(record: Record, starts: Sequence[Start]) -> dict[int, str]:
    taken = {start.number for start in starts if start.position is None or start.kind == "rate"}
    return {number: text for number, text in known_offsets(record.properties).items() if number not in taken}


def _properties(checkpoint: ForeignCheckpoint, spec: ImportSpec, starts: Sequence[Start]) -> dict[str, str]:
    """Return what the source says of itself, and what happened to it."""
    record = checkpoint.record
    kept = {name: text for name, text in record.properties.items() if not name.startswith(RESERVED_PROPERTIES)}
    found: dict[str, Any] = {
        "from": without_secrets(checkpoint.storage.url),
        "system": checkpoint.system,
        "checkpoint_id": str(record.checkpoint_id),
        "job_id": record.job_id,
        "key_hash": spec.key_hash,
    }
    for kind in ("renamed", "opaque", "refused", "omitted", "elsewhere"):
        said = [f"{note.subject}: {note.message}" if note.subject else note.message for note in checkpoint.notes
                if note.kind == kind]  # fmt: skip
        if said:
            found[kind] = bounded(said)
    done = [f"{one.uid}: subtasks {one.done} of {one.parallelism}" for one in record.graph.operators if one.done]
    if done:
        found["finished"] = bounded(done)
    if spec.drop:
        found["dropped"] = bounded(spec.drop)
    if spec.names:
        found["names"] = bounded([f"{old}={new}" for old, new in spec.names.items()])
    for start in starts:
        found[f"source.{start.uid}"] = f"{OFFSETS}{start.number} as {start.kind}"
    return {**kept, **{f"{PROPERTY}{name}": str(text) for name, text in found.items()}}


def bounded(said: Sequence[str]) -> str:
    """Return sentences as one text of at most :data:`PROPERTY_CHARS`, and how many are left out."""
    kept: list[str] = []
    for text in said:
        more = f"{len(said) - len(kept)} more"
        if len("; ".join([*kept, text, more])) > PROPERTY_CHARS:
            return "; ".join([*kept, more])
        kept.append(text)
    return "; ".join(kept)


def chosen_of(checkpoint: ForeignCheckpoint, drop: Sequence[str], ttl: Mapping[str, Ttl]) -> ForeignCheckpoint:
    """Return the checkpoint without some operators and states, of which nothing is then read.

    Rows of the states that ``ttl`` names expire, by the time that Flink kept. Raises
    ``InvalidInput`` for a name that matches nothing, for a state that cannot be read and is not
    named in ``drop``, and for a state with a ttl that has no such times.
    """
    record = checkpoint.record
    subjects = [note.subject for note in checkpoint.notes if note.kind == "refused"]
    labels = {uid: uid for uid in record.graph.by_uid}
    for note in checkpoint.notes:
        if note.kind == "refused" and not _dropped(note, labels, drop):
            raise InvalidInput(unreadable(note.subject, note.message), kind=ErrorKind.UNSUPPORTED_TYPE)
    known = [*record.graph.by_uid, *(f"{state.operator}/{state.name}" for state in record.states), *subjects]
    for name in drop:
        found = named(name, record.states, labels)
        if found is not None and found.state is not None and found.column is None and name in subjects:
            raise InvalidInput(f"{name!r} may be {found} or a state that cannot be read; leave out all of its operator")
        if name not in known:
            raise InvalidInput(
                f"nothing to drop under {name!r}; {known_names(known, name)}", kind=ErrorKind.UNKNOWN_OPERATOR
            )
    for name in ttl:
        _check_times(record, name)
    if not drop and not ttl:
        return checkpoint
    graph = replace(record.graph, operators=tuple(one for one in record.graph.operators if one.uid not in drop))
    now_us, states = time.time_ns() // 1000, list[State]()
    for state in record.states:
        name = f"{state.operator}/{state.name}"
        if {state.operator, name}.isdisjoint(drop):
            states.append(replace(state, ttl=ttl[name], ttl_now_us=now_us) if name in ttl else state)
    # What is left out is not told of, except why it could not be read.
    notes = [note for note in checkpoint.notes if note.kind == "refused" or not _dropped(note, labels, drop)]
    record = replace(record, graph=graph, states=tuple(states))
    return ForeignCheckpoint(checkpoint.storage, checkpoint.source, checkpoint.system, record, notes)


def _dropped(note: Note, uids: Iterable[str], drop: Collection[str]) -> bool:
    # A uid may have slashes, so that several operators may be meant: each must be named.
    owners = {uid for uid in uids if note.subject == uid or note.subject.startswith(f"{uid}/")}
    return note.subject in drop or (bool(owners) and owners <= {*drop})


def _check_times(record: Record, name: str) -> None:
    found = named(name, record.states)
    if found is None or found.state is None or found.column is not None:
        states = [f"{state.operator}/{state.name}" for state in record.states]
        raise InvalidInput(
            f"no state {name!r} whose rows could expire; {known_names(states, name)}", kind=ErrorKind.UNKNOWN_STATE
        )
    fields = record.state(found.operator, found.state).current.fields
    if not any(item.name == TTL_COLUMN and item.type == "timestamp_us" for item in fields):
        raise InvalidInput(
            f"state {name} does not say when its rows were accessed, as a state of Flink with a TTL does; import it "
            "without, and let the program declare the ttl: its rows then count from the restore",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )


class Start(NamedTuple):
    """Where a source of the dataflow continues, in place of one of the foreign query.

    A user gives it as ``UID=KIND[:NUMBER][@POSITION]``: the uid of the source in the dataflow, how
    it reads, and the number of the source in the foreign query (0 by default). Kinds:

    - ``files``: ``ParquetSource`` or ``CsvSource`` over a directory that ``grows``. It has seen the
      files that the query has read, according to the log of Spark's file source.
    - ``rate``: ``RateSource`` with one shard. ``rate-micro-batch`` gives the row; for ``rate`` only
      the user knows the rows per second, and gives the position.
    """

    uid: str
    kind: str
    number: int
    """The number of the source in the foreign query."""
    position: int | None
    """Given by the user; None: taken from the foreign query."""


class SourceState(NamedTuple):
    """The state of a source in the new checkpoint: one reader, and the enumerator."""

    operator: Operator
    states: tuple[State, State]
    start: StartingPoint


def parse_start(uid: str, text: str) -> Start:
    """Parse ``KIND[:NUMBER][@POSITION]`` of a source. Raises ``InvalidInput`` for anything else."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in KINDS:
        raise InvalidInput(
            f"source {uid!r} is to go on as {text!r}; give {' or '.join(KINDS)}, with :NUMBER for another source of "
            "the query than 0, and @POSITION if you know it"
        )
    position = None if match["position"] is None else int(match["position"])
    if match["kind"] == "files" and position is not None:
        raise InvalidInput(f"source {uid!r} reads files, which have no number as position; leave @{position} out")
    return Start(uid, match["kind"], int(match["number"] or 0), position)


def source_state(start: Start, properties: Mapping[str, str], folder: Storage) -> SourceState:
    """Return the state with which a source continues.

    Raises ``InvalidInput`` if the foreign query has no such source or it reads differently, and
    ``DamagedCheckpoint`` for a log that is incomplete.
    """
    begins = _files(start, properties, folder) if start.kind == "files" else _rate(start, properties)
    return SourceState(Operator(start.uid, 1, 128, coordinator=True), source_states(start.uid, begins), begins)


def known_offsets(properties: Mapping[str, str]) -> dict[int, str]:
    """Return the offsets of the foreign query, as text, by the number of its source."""
    found = {name.removeprefix(OFFSETS): text for name, text in properties.items() if name.startswith(OFFSETS)}
    return {int(number): text for number, text in sorted(found.items()) if number.isdigit()}


def _offset(start: Start, properties: Mapping[str, str]) -> Any:
    offsets = known_offsets(properties)
    if start.number not in offsets:
        raise InvalidInput(
            f"source {start.uid!r} is to go on as source {start.number} of the query, which has "
            f"{', '.join(map(str, offsets)) or 'none that says where it is'}"
        )
    try:
        return json_value(offsets[start.number])
    except ValueError:
        return None


def _unfit(start: Start, properties: Mapping[str, str], wanted: str, advice: str) -> InvalidInput:
    text = known_offsets(properties)[start.number]
    return InvalidInput(
        f"source {start.number} of the query is at {text[:200]!r}, and {start.uid!r} is to read {start.kind}, whose "
        f"position there is {wanted}. {advice}"
    )


def _rate(start: Start, properties: Mapping[str, str]) -> StartingPoint:
    row = start.position
    if row is None:
        offset = _offset(start, properties)
        row = offset.get("offset") if isinstance(offset, dict) else None
        if type(row) is not int or row < 0:
            advice = f"Rows a second × seconds is the row: {start.uid}=rate@ROW"
            raise _unfit(start, properties, 'that of rate-micro-batch, {"offset":ROW,…}', advice)
    return rate_behind([row])


def _files(start: Start, properties: Mapping[str, str], folder: Storage) -> StartingPoint:
    offset = _offset(start, properties)
    newest = offset.get("logOffset") if isinstance(offset, dict) else None
    if type(newest) is not int:
        advice = f"Begin {start.uid!r} where the query is, with a position of its own"
        raise _unfit(start, properties, '{"logOffset":N}', advice)
    return files_behind([_local(path, start) for path in files_read(folder, start.number, newest)])


def _local(path: str, start: Start) -> str:
    # The log of Spark's file source percent-encodes.
    found = local_path(path)
    if found is None:
        raise InvalidInput(
            f"source {start.number} of the query has read {path!r}, which is not on a local disk; sources over files "
            f"read local disks. Begin {start.uid!r} where the query is, with a position of its own"
        )
    return found


def files_read(folder: Storage, number: int, newest: int) -> list[str]:
    """Return the paths that Spark's file source had read up to batch ``newest`` of its own log, in
    order.

    The log has a file for each batch; ``N.compact`` has all up to N. Raises ``DamagedCheckpoint``
    if one is missing or is not as Spark writes it.
    """
    place = f"sources/{number}/"
    names = {item.path.removeprefix(place) for item in folder.list(place)}
    compact = [int(name.removesuffix(".compact")) for name in names if re.fullmatch(r"[0-9]{1,18}\.compact", name)]
    base = max((batch for batch in compact if batch <= newest), default=-1)
    wanted = [f"{base}.compact"] if base >= 0 else []
    found: list[str] = []
    for name in chain(wanted, map(str, range(base + 1, newest + 1))):
        if name not in names:
            raise _damaged(
                f"{place}{name}", f"is missing, and the query had come to {newest}", ErrorKind.OBJECT_MISSING
            )
        found += _paths_of(folder, f"{place}{name}")
    return found


def _paths_of(folder: Storage, path: str) -> list[str]:
    size = folder.size(path)
    if size > LOG_BYTES_MAX:
        raise _damaged(path, f"has {size} bytes, more than {LOG_BYTES_MAX} for names of files")
    try:
        version, *lines = folder.read(path).to_pybytes().decode().split("\n")
        entries = [json_value(line) for line in lines if line]
        if version != "v1" or not all(isinstance(entry["path"], str) for entry in entries):
            raise ValueError(version)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "is no log of files: v1, then a JSON object with a path in each line") from error
    return [entry["path"] for entry in entries]


def _damaged(path: str, what: str, kind: ErrorKind = ErrorKind.DAMAGED_SEGMENT) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}, of the log of files that the query has read, {what}", kind=kind, path=path)
