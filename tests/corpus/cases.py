"""The broken stores of the corpus: which clause of SPEC.md each breaks, how, and what must be told
of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.model import Handle
from tests.forgery import Forger, get, put, seal

OPEN, READ, REPORT = "refuse the checkpoint", "refuse the state", "report"


class Case(NamedTuple):
    name: str
    """The section that is broken, and how."""
    base: str
    """The sound store that it was made of."""
    told: str
    """The clause of the first finding of ``ckpt validate --level full``."""
    kind: str
    """The kind of that finding."""
    what: str
    reader: str
    """What a reader must do at least."""
    change: Callable[[Store], object]
    state: str = ""
    """The state that is not to be read, as ``operator/state``."""
    severity: str = "error"

    @property
    def section(self) -> str:
        return self.name.partition("-")[0]


class Store:
    """A sound store to break: objects by path, and its newest checkpoint in parts."""

    def __init__(self, storage: MemoryStorage, checkpoint_id: int) -> None:
        self.storage = storage
        self.parts = Forger(storage, checkpoint_id)

    # The record -----------------------------------------------------------------------------------

    @property
    def record(self) -> str:
        return get(self.storage, self.parts.path).decode()

    def write_record(self, data: bytes | str) -> None:
        put(self.storage, self.parts.path, data.encode() if isinstance(data, str) else data)

    def sealed(self, text: str) -> None:
        body = text.rstrip("\n")[:-1]
        self.write_record(f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n')

    def undigested(self) -> str:
        return self.record[:-46] + "}"

    def members(self, change: Callable[[dict[str, Any]], Any]) -> None:
        found = json.loads(self.record)
        del found["digest"]
        change(found)
        self.write_record(seal(found))

    # The manifest ---------------------------------------------------------------------------------

    def seal(self) -> None:
        self.parts.seal()

    def handle(self, at: int, **columns: Any) -> None:
        self.parts.change(at, **columns)
        self.seal()

    def manifest(self, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
        path = self.parts.record.manifest.path
        table = change(pq.read_table(pa.BufferReader(get(self.storage, path))))
        sink = pa.BufferOutputStream()
        options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False, **options}
        pq.write_table(table, sink, **options)
        data = sink.getvalue().to_pybytes()
        put(self.storage, path, data)
        found = pq.read_metadata(pa.BufferReader(data))
        uncompressed = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
        self.members(
            lambda m: m["manifest"].update(
                size_bytes=len(data), digest=xxhash.xxh3_128_hexdigest(data), uncompressed_bytes=uncompressed
            )
        )

    # Segments -------------------------------------------------------------------------------------

    def find(self, name: str, subtask: int | None = 0, layer: int = 0) -> int:
        operator, state = name.split("/")
        return self.parts.find(operator, state, subtask, layer)

    def rows(
        self, name: str, change: Callable[[pa.Table], pa.Table], *, regroup: str = "", layer: int = 0, **how: Any
    ) -> None:
        at = self.find(name, None if name == "read/todo" else 0, layer)
        self.parts.set_rows(at, change(self.parts.table_of(at)), **how)
        if regroup:
            self.parts.regroup(at, regroup)
        self.seal()

    def segment(self, change: Callable[[bytes], bytes | None]) -> None:
        path = min(item.path for item in self.storage.list("segments/"))
        data = change(get(self.storage, path))
        self.storage.delete([path])
        if data is not None:
            put(self.storage, path, data)


def value(name: str, at: int, new: Any) -> Callable[[pa.Table], pa.Table]:

    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        values = table[name].to_pylist()
        values[at] = new
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    return change


def again(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 1), table])


def turned(table: pa.Table) -> pa.Table:
    return table.take(pa.array(range(len(table))[::-1]))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def operator(uid: str, **members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: next(op for op in record["operators"] if op["uid"] == uid).update(members)


def edge(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["edges"][0].update(members)


def state(name: str, **members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: next(s for s in record["states"] if s["name"] == name).update(members)


def ttl(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["states"][0]["ttl"].update(members)


def field(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["states"][0]["schemas"][-1]["fields"][1].update(members)


def _moved(store: Store) -> None:
    data = get(store.storage, store.parts.path)
    store.storage.delete([store.parts.path])
    put(store.storage, "checkpoints/00000000000000000007.json", data)


def _deep(store: Store) -> None:
    store.sealed(store.undigested()[:-1] + ',"odd":' + "[" * 40 + "]" * 40 + "}")


def _statuses(uid: str, ranges: list[list[int]], status: str, name: str = "finished") -> Callable[[Store], None]:
    """An operator of these statuses, without the handles that it then may not have."""

    def change(store: Store) -> None:
        ended = {i for first, last in ranges for i in range(first, last + 1)}
        store.parts.handles = [
            handle for handle in store.parts.handles if handle.operator != uid or handle.subtask not in ended
        ]
        store.seal()

        def members(record: dict[str, Any]) -> None:
            operator(uid, **{name: ranges, "status": status})(record)
            record["required_features"] = sorted({*record["required_features"], "finished_operators"})

        store.members(members)

    return change


def _handles(change: Callable[[list[Handle]], list[Handle]]) -> Callable[[Store], None]:
    def apply(store: Store) -> None:
        store.parts.handles = change(store.parts.handles)
        store.seal()

    return apply


def _stray(store: Store) -> None:
    store.members(lambda m: m["parent"].update(attempt_id="f" * 32))


def _ref(store: Store, checkpoint_id: int) -> dict[str, Any]:
    """A checkpoint as a child names it."""
    found = json.loads(get(store.storage, f"checkpoints/{checkpoint_id:020}.json"))
    return {"checkpoint_id": checkpoint_id, "attempt_id": found["attempt_id"]}


def _other_attempt(store: Store) -> None:
    store.members(lambda m: m["parent"].update(attempt_id="f" * 32))


def _null_rows(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("rows")
    nullable = table.set_column(at, table.schema.field("rows").with_nullable(True), table["rows"])
    return value("rows", 0, None)(nullable)


def _large(store: Store) -> None:
    at = store.find("count/sums")
    store.handle(at, uncompressed_bytes=1 << 40)


def _second_group(store: Store) -> None:
    """Two handles of one layer that both name the subtask's groups: its rows would be read
    twice.
    """
    at = store.find("count/sums")
    store.parts.handles.insert(at, store.parts.handles[at])
    store.seal()


def _former(store: Store) -> None:
    former = [{"uid": "nobody", "parallelism": 2, "finished": [[0, 0]], "finishing": []}]
    store.members(lambda m: m["rescaled_from"].update(operators=former))


def _no_checksums(store: Store) -> None:
    store.rows("count/sums", lambda table: table, write_page_checksum=False)


RECORD: list[Case] = [
    Case("2.2-record-under-another-id", "small", "SPEC 3.2", "damaged_record", "the record of checkpoint 1 lies under the name of 7", OPEN, _moved),
    Case("2.2-manifest-outside-the-store", "small", "SPEC 2.2", "invalid_path", "the record names a manifest outside of the store", OPEN, lambda s: s.members(lambda m: m["manifest"].update(path="manifests/../../etc/passwd"))),
    Case("2.3-manifest-missing", "small", "SPEC 2.3", "object_missing", "the manifest that the record names is not there", OPEN, lambda s: s.storage.delete([s.parts.record.manifest.path])),
    Case("2.3-segment-missing", "objects", "SPEC 2.3", "object_missing", "a segment that the manifest names is not there", READ, lambda s: s.segment(lambda _: None), "count/sums"),
    Case("3.1-not-json", "small", "SPEC 3.2", "damaged_record", "the record is no JSON", OPEN, lambda s: s.write_record("{\n")),
    Case("3.1-byte-order-mark", "small", "SPEC 3.2", "damaged_record", "the record begins with a byte order mark", OPEN, lambda s: s.write_record(b"\xef\xbb\xbf" + s.record.encode())),
    Case("3.1-white-space", "small", "SPEC 3.2", "damaged_record", "white space between tokens", OPEN, lambda s: s.sealed(s.undigested().replace('"kind":', '"kind": '))),
    Case("3.1-no-final-newline", "small", "SPEC 3.2", "damaged_record", "the record does not end in a newline", OPEN, lambda s: s.write_record(s.record[:-1])),
    Case("3.1-digest-differs", "small", "SPEC 3.1", "object_digest_differs", "a byte of the record was changed, its digest was not", OPEN, lambda s: s.write_record(s.record.replace('"writer":"the', '"writer":"The'))),
    Case("3.1-digest-not-last", "small", "SPEC 3.2", "damaged_record", "members stand behind the digest", OPEN, lambda s: s.write_record(s.record[:-2] + ',"behind":1}\n')),
    Case("3.1-member-twice", "small", "SPEC 3.2", "damaged_record", "a member stands twice", OPEN, lambda s: s.sealed(s.undigested()[:-1] + ',"job_id":"other"}')),
    Case("3.1-null", "small", "SPEC 3.2", "damaged_record", "a member is null", OPEN, lambda s: s.sealed(s.undigested()[:-1] + ',"odd":null}')),
    Case("3.1-fraction", "small", "SPEC 3.2", "damaged_record", "a number has a fraction", OPEN, lambda s: s.sealed(s.undigested()[:-1] + ',"odd":1.5}')),
    Case("3.1-large-integer", "small", "SPEC 3.2", "damaged_record", "an integer of 2^53", OPEN, lambda s: s.sealed(s.undigested()[:-1] + ',"odd":9007199254740992}')),
    Case("3.1-lone-surrogate", "small", "SPEC 3.2", "damaged_record", "a string holds half of a surrogate pair", OPEN, lambda s: s.sealed(s.undigested()[:-1] + ',"odd":"\\ud800"}')),
    Case("3.1-too-deep", "small", "SPEC 3.1", "limit_exceeded", "more than 32 levels of arrays", OPEN, _deep),
    Case("3.2-newer-version", "small", "SPEC 3.2", "unsupported_version", "version 2", OPEN, lambda s: s.members(lambda m: m.update(version=2, shape="unknown"))),
    Case("3.2-member-missing", "small", "SPEC 3.2", "damaged_record", "the member totals is not there", OPEN, lambda s: s.members(lambda m: m.pop("totals"))),
    Case("3.2-wrong-type", "small", "SPEC 3.2", "damaged_record", "created_at_us is text", OPEN, lambda s: s.members(lambda m: m.update(created_at_us="today"))),
    Case("3.2-unknown-kind", "small", "SPEC 3.2", "damaged_record", "a kind that is not on the list", OPEN, lambda s: s.members(lambda m: m.update(kind="import"))),
    Case("3.2-parent-not-before", "layers", "SPEC 3.2", "damaged_record", "the parent's id is not less than the checkpoint's", OPEN, lambda s: s.members(lambda m: m["parent"].update(checkpoint_id=2))),
    Case("3.2-totals-differ", "small", "SPEC 3.2", "damaged_record", "totals are not the sums of the manifest", REPORT, lambda s: s.members(lambda m: m["totals"].update(rows=7))),
    Case("3.2-manifest-of-another-size", "small", "SPEC 3.2", "object_size_differs", "the manifest has not the size that the record says", OPEN, lambda s: s.members(lambda m: m["manifest"].update(size_bytes=9))),
    Case("3.2-manifest-digest-differs", "small", "SPEC 3.2", "object_digest_differs", "a bit of the manifest is flipped", OPEN, lambda s: put(s.storage, s.parts.record.manifest.path, flipped(get(s.storage, s.parts.record.manifest.path), 40))),
    Case("3.2-state-twice", "small", "SPEC 3.2", "invalid_argument", "a state is declared twice", REPORT, lambda s: s.members(lambda m: m["states"].append(m["states"][0]))),
    Case("3.3-unknown-feature", "small", "SPEC 3.3", "unsupported_feature", "a required feature of another version", OPEN, lambda s: s.members(lambda m: m.update(required_features=["compressed_keys"]))),
    Case("3.3-feature-not-named", "layers", "SPEC 3.3", "damaged_record", "a layer above 0, and layers is not required", REPORT, lambda s: s.members(lambda m: m.update(required_features=[]))),
    Case("3.3-feature-not-used", "small", "SPEC 3.3", "damaged_record", "committables are required, and there are none", REPORT, lambda s: s.members(lambda m: m.update(required_features=["committables"]))),
    Case("3.3-optional-feature-not-named", "expiring", "SPEC 3.3", "damaged_record", "a state has a ttl, and the feature is not listed", REPORT, lambda s: s.members(lambda m: m.update(optional_features=[]))),
    Case("3.4-parallelism-above-max", "small", "SPEC 3.2", "damaged_record", "parallelism 2, max parallelism 1", OPEN, lambda s: s.members(operator("lines", max_parallelism=1))),
    Case("3.4-status-contradicts-ranges", "small", "SPEC 3.4", "status_contradiction", "running, and a subtask is finished", OPEN, lambda s: s.members(operator("lines", finished=[[0, 0]]))),
    Case("3.4-ranges-touch", "small", "SPEC 3.2", "damaged_record", "finished subtasks as two adjacent ranges", OPEN, _statuses("lines", [[0, 0], [1, 1]], "fully_finished")),
    Case("3.4-range-beyond-parallelism", "small", "SPEC 3.2", "damaged_record", "subtask 2 of 2 is finished", OPEN, _statuses("lines", [[1, 2]], "fully_finished")),
    Case("3.4-empty-uid", "small", "SPEC 3.2", "damaged_record", "an operator with an empty uid", OPEN, lambda s: s.members(lambda m: m["operators"].append({**m["operators"][0], "uid": ""}))),
    Case("3.4-chain-of-two-parallelisms", "wide", "SPEC 3.4", "invalid_graph", "operators of one chain have parallelism 2 and 3", REPORT, lambda s: s.members(lambda m: [operator("count", chain="c")(m), m["operators"].append({**m["operators"][0], "uid": "map", "parallelism": 3, "chain": "c", "coordinator": False})])),
    Case("3.5-edge-to-nobody", "small", "SPEC 3.5", "unknown_operator", "an edge to an operator that is not there", REPORT, lambda s: s.members(edge(to="nobody"))),
    Case("3.5-unknown-partitioner", "small", "SPEC 3.2", "damaged_record", "a partitioner that is not on the list", OPEN, lambda s: s.members(edge(partitioner="random"))),
    Case("3.5-keys-on-a-rebalance-edge", "small", "SPEC 3.5", "invalid_graph", "a rebalance edge with key columns", REPORT, lambda s: s.members(edge(partitioner="rebalance"))),
    Case("3.5-cycle", "small", "SPEC 3.5", "invalid_graph", "a cycle without a feedback edge", REPORT, lambda s: s.members(lambda m: m["edges"].append({**m["edges"][0], "id": "back", "from": "count", "to": "lines"}))),
    Case("3.5-forward-of-two-parallelisms", "small", "SPEC 3.5", "invalid_graph", "a forward edge from parallelism 1 to 2", REPORT, lambda s: s.members(lambda m: [operator("lines", parallelism=1)(m), edge(partitioner="forward", key_columns=[])(m)])),
    Case("3.5-finished-behind-running", "small", "SPEC 3.5", "status_contradiction", "a fully finished operator behind a running one", REPORT, _statuses("count", [[0, 1]], "fully_finished")),
    Case("3.5-partly-finished-behind-running", "small", "SPEC 3.5", "status_contradiction", "a partially finished operator behind a running one over a hash edge", REPORT, _statuses("count", [[1, 1]], "partially_finished")),
    Case("3.6-state-of-nobody", "small", "SPEC 3.6", "unknown_operator", "a state of an operator that is not there", REPORT, lambda s: s.members(lambda m: m["states"].append({**m["states"][0], "operator": "nobody"}))),
    Case("3.6-keyed-without-keys", "small", "SPEC 3.6", "schema_mismatch", "a keyed state without key columns", REPORT, lambda s: s.members(state("sums", key_columns=[])), "count/sums"),
    Case("3.6-kind-of-a-union", "wide", "SPEC 3.6", "schema_mismatch", "a union state with a kind", REPORT, lambda s: s.members(state("limits", kind="value")), "read/limits"),
    Case("3.6-two-coordinator-states", "wide", "SPEC 3.6", "state_not_allowed", "two states of mode coordinator in an operator", REPORT, lambda s: s.members(lambda m: m["states"].append({**next(x for x in m["states"] if x["name"] == "todo"), "name": "more"}))),
    Case("3.6-coordinator-state-without-one", "wide", "SPEC 3.6", "state_not_allowed", "coordinator state of an operator without a coordinator", REPORT, lambda s: s.members(operator("read", coordinator=False))),
    Case("3.6-in-flight-on-another-operators-edge", "wide", "SPEC 3.6", "invalid_graph", "records in flight on an edge into another operator", REPORT, lambda s: s.members(state("mail", edge="count-write"))),
    Case("3.6-field-named-twice", "small", "SPEC 3.6", "schema_mismatch", "two fields of one name", REPORT, lambda s: s.members(field(name="word")), "count/sums"),
    Case("3.6-field-of-the-format", "small", "SPEC 3.6", "schema_mismatch", "a field whose name begins with _", REPORT, lambda s: s.members(field(name="_n")), "count/sums"),
    Case("3.6-field-id-above-the-last", "small", "SPEC 3.6", "schema_mismatch", "a field id above last_field_id", REPORT, lambda s: s.members(state("sums", last_field_id=1))),
    Case("3.6-records-on-a-forward-edge", "wide", "SPEC 3.6", "state_not_allowed", "records in flight on a forward edge", REPORT, lambda s: s.members(lambda m: [m["edges"][2].update(feedback=False, partitioner="forward"), m["edges"][2].update({"from": "read"})])),
    Case("6.5-ttl-by-another-column", "expiring", "SPEC 3.2", "damaged_record", "the ttl names the id of another column", OPEN, lambda s: s.members(ttl(field=2))),
    Case("6.5-ttl-by-no-column", "expiring", "SPEC 3.2", "damaged_record", "the ttl names an id that no column has", OPEN, lambda s: s.members(ttl(field=9))),
    Case("6.5-ttl-of-no-length", "expiring", "SPEC 3.2", "damaged_record", "rows live for no time", OPEN, lambda s: s.members(ttl(duration_us=0))),
    Case("6.5-ttl-of-less-than-nothing", "expiring", "SPEC 3.2", "damaged_record", "rows live for less than no time", OPEN, lambda s: s.members(ttl(duration_us=-3600000000))),
    Case("6.5-ttl-by-an-unknown-clock", "expiring", "SPEC 3.2", "damaged_record", "a clock that is not on the list", OPEN, lambda s: s.members(ttl(clock="sundial"))),
    Case("6.5-ttl-refreshed-by-something-else", "expiring", "SPEC 3.2", "damaged_record", "an access that is not on the list", OPEN, lambda s: s.members(ttl(refresh="look"))),
    Case("6.6-unknown-clock", "waking", "SPEC 3.2", "damaged_record", "timers of a clock that is not on the list", OPEN, lambda s: s.members(state("wake", clock="sundial"))),
    Case("6.6-clock-not-required", "waking", "SPEC 3.3", "damaged_record", "timers of processing time, and the record does not require them", REPORT, lambda s: s.members(lambda m: m.update(required_features=[]))),
    Case("6.6-clock-of-a-value", "small", "SPEC 6.6", "schema_mismatch", "a value state with a clock", REPORT, lambda s: s.members(lambda m: [m.update(required_features=["processing_time_timers"]), state("sums", clock="processing_time")(m)]), "count/sums"),
    Case("6.6-time-that-is-text", "waking", "SPEC 3.2", "damaged_record", "the time of the checkpoint is text", OPEN, lambda s: s.members(state("wake", now_us="noon"))),
    Case("6.5-ttl-at-a-time-that-is-text", "expiring", "SPEC 3.2", "damaged_record", "the time of the checkpoint is text", OPEN, lambda s: s.members(ttl(now_us="noon"))),
    Case("3.7-unknown-type", "small", "SPEC 3.7", "unsupported_type", "a type that is not on the list", OPEN, lambda s: s.members(field(type="tensor"))),
    Case("3.7-default-of-another-type", "small", "SPEC 3.7", "schema_mismatch", "a default that is no value of its type", REPORT, lambda s: s.members(field(default="many"))),
]  # fmt: skip

MANIFEST: list[Case] = [
    Case("4.1-column-missing", "small", "SPEC 4", "damaged_manifest", "the manifest has no column layer", OPEN, lambda s: s.manifest(lambda t: t.drop_columns(["layer"]))),
    Case("4.1-null-in-a-column-without-nulls", "small", "SPEC 4.1", "damaged_manifest", "rows is null in a handle", OPEN, lambda s: s.manifest(_null_rows)),
    Case("4.1-no-path-where-rows-are", "small", "SPEC 4.1", "damaged_manifest", "a handle with rows and without a path", OPEN, lambda s: s.handle(0, path=None)),
    Case("4.1-row-range-beyond-the-segment", "small", "SPEC 4.1", "damaged_manifest", "the rows of a handle end beyond its segment", OPEN, lambda s: s.handle(0, row_start=1)),
    Case("4.1-unknown-state", "small", "SPEC 4.1", "unknown_state", "a handle of a state that is not declared", REPORT, _handles(lambda hs: [*hs, hs[1]._replace(state="zzz", path=f"{hs[1].path}")._replace(path="segments/00000000000000000001/zzz")])),
    Case("4.1-subtask-beyond-parallelism", "small", "SPEC 4.1", "invalid_parallelism", "a handle of subtask 2 of 2", REPORT, _handles(lambda hs: [*hs, Handle("count", "sums", "keyed", 2, 0, None, 1)])),
    Case("4.1-mode-differs", "small", "SPEC 4.1", "damaged_manifest", "a handle of another mode than its state's", REPORT, _handles(lambda hs: [*hs, Handle("count", "sums", "union", 1, 1, None, 1)])),
    Case("4.1-unknown-schema", "small", "SPEC 4.1", "schema_mismatch", "a handle of a schema that the state has not", READ, lambda s: s.handle(0, schema_id=3), "count/sums"),
    Case("4.2-not-sorted", "small", "SPEC 4.2", "damaged_manifest", "the handles are not in order", OPEN, _handles(lambda hs: hs[::-1])),
    Case("4.3-counts-do-not-add-up", "small", "SPEC 4.3", "damaged_manifest", "rows_per_group does not add up to rows", OPEN, lambda s: s.handle(0, rows_per_group=[9] * len(s.parts.handles[0].rows_per_group or []))),
    Case("4.3-groups-differ-from-the-rows", "small", "SPEC 4.3", "damaged_segment", "rows_per_group says other groups than the rows have", READ, lambda s: s.handle(0, first_group=0, last_group=0, rows_per_group=[s.parts.handles[0].rows]), "count/sums"),
    Case("4.3-key-group-in-two-handles", "small", "SPEC 4.3", "state_not_allowed", "two handles of a layer have the same key groups", READ, _second_group, "count/sums"),
    Case("4.4-inline-bytes-missing", "small", "SPEC 2.3", "object_missing", "a segment that was inline is neither in the manifest nor in the store", READ, lambda s: s.handle(0, inline=None), "count/sums"),
    Case("4.5-codec-of-the-manifest", "small", "SPEC 4", "damaged_manifest", "the manifest is compressed with gzip", OPEN, lambda s: s.manifest(lambda t: t, compression="gzip")),
    Case("4.6-no-handle-of-a-running-subtask", "small", "SPEC 4.6", "state_missing", "a running subtask without a handle of a keyed state", REPORT, _handles(lambda hs: hs[:1])),
    Case("4.6-delta-without-a-base", "layers", "SPEC 4.6", "state_missing", "a running subtask with a delta and without a handle of layer 0", REPORT, _handles(lambda hs: [h for h in hs if (h.subtask, h.layer) != (0, 0)])),
    Case("4.6-handle-of-a-finishing-subtask", "finished", "SPEC 4.6", "state_not_allowed", "a finishing subtask with keyed state", REPORT, _handles(lambda hs: [*hs, Handle("count", "sums", "keyed", 1, 0, None, 1)])),
    Case("4.6-no-coordinator-handle", "wide", "SPEC 4.6", "state_missing", "a coordinator's state without its handle", REPORT, _handles(lambda hs: [h for h in hs if h.state != "todo"])),
    Case("4.6-two-coordinator-handles", "wide", "SPEC 4.6", "state_not_allowed", "a coordinator's state with two handles", REPORT, _handles(lambda hs: [x for h in hs for x in ([h, h] if h.state == "todo" else [h])])),
    Case("4.6-union-partly-finished", "wide", "SPEC 4.6", "union_partially_finished", "union state in a partially finished operator: what its finished subtasks kept is gone", REPORT, _statuses("read", [[1, 1]], "partially_finished")),
]  # fmt: skip

SEGMENT: list[Case] = [
    Case("5.1-other-columns", "small", "SPEC 5.1", "damaged_segment", "the segment has a column that its schema has not", READ, lambda s: s.rows("count/sums", lambda t: t.append_column("extra", pa.array([1] * len(t)))), "count/sums"),
    Case("5.1-null-in-a-field-without-nulls", "small", "SPEC 5.1", "null_not_allowed", "null in a field that is not nullable", REPORT, lambda s: s.rows("count/sums", value("n", 0, None)), "count/sums"),
    Case("5.1-attempt-id-is-none", "wide", "SPEC 5.1", "schema_mismatch", "a committable under an attempt id that is a path", REPORT, lambda s: s.rows("write/prepared", value("_attempt_id", 0, "../../etc/cron.d/x")), "write/prepared"),
    Case("5.1-committable-of-the-future", "wide", "SPEC 5.1", "damaged_segment", "a committable prepared under a greater id than the checkpoint's", REPORT, lambda s: s.rows("write/prepared", value("_checkpoint_id", 0, 9)), "write/prepared"),
    Case("5.1-receiver-is-no-subtask", "wide", "SPEC 5.1", "schema_mismatch", "a record in flight to subtask 32768", REPORT, lambda s: s.rows("count/loop", value("_receiver", 0, 32768)), "count/loop"),
    Case("5.1-record-twice-in-a-channel", "wide", "SPEC 5.1", "damaged_segment", "two records of a channel have one _seq", REPORT, lambda s: s.rows("count/loop", again, regroup="_sender"), "count/loop"),
    Case("5.2-keyed-not-sorted", "small", "SPEC 5.2", "damaged_segment", "keyed rows are not in order of _key_group", READ, lambda s: s.rows("count/sums", turned), "count/sums"),
    Case("5.2-in-flight-not-sorted", "wide", "SPEC 5.2", "damaged_segment", "records in flight are not in order of _seq", REPORT, lambda s: s.rows("count/loop", lambda t: t.take(pa.array([1, 0, 2]))), "count/loop"),
    Case("5.3-key-group-is-another-keys", "small", "SPEC 5.3", "damaged_segment", "a key that does not hash to its key group", REPORT, lambda s: s.rows("count/sums", value("word", 0, "zoe")), "count/sums"),
    Case("5.3-row-key-twice", "small", "SPEC 5.3", "duplicate_row_key", "a key stands twice in a layer", REPORT, lambda s: s.rows("count/sums", again, regroup="_key_group"), "count/sums"),
    Case("5.3-groups-of-another-subtask", "small", "SPEC 5.3", "state_not_allowed", "a handle with key groups that another subtask owns", REPORT, _handles(lambda hs: [hs[1]._replace(subtask=0), hs[1]._replace(rows=0, row_start=0, segment_rows=0, size_bytes=0, uncompressed_bytes=0, footer_bytes=0, path=None, digest=None, footer_digest=None, first_group=None, last_group=None, rows_per_group=None, inline=None)])),
    Case("5.4-unknown-operation", "layers", "SPEC 5.4", "schema_mismatch", "_op 3 in a delta", REPORT, lambda s: s.rows("count/sums", value("_op", 0, 3), layer=1), "count/sums"),
    Case("5.4-clear-with-a-value", "layers", "SPEC 5.4", "schema_mismatch", "a clear that holds a value", REPORT, lambda s: s.rows("count/sums", lambda t: value("n", 0, 5)(value("_op", 0, 2)(t)), layer=1), "count/sums"),
    Case("5.5-codec", "small", "SPEC 5.5", "damaged_segment", "a segment compressed with gzip", READ, lambda s: s.rows("count/sums", lambda t: t, compression="gzip"), "count/sums"),
    Case("5.5-encoding", "small", "SPEC 5.5", "damaged_segment", "a column in DELTA_BYTE_ARRAY", READ, lambda s: s.rows("count/sums", lambda t: t, use_dictionary=False, column_encoding={"word": "DELTA_BYTE_ARRAY"}), "count/sums"),
    Case("5.5-no-page-checksums", "small", "SPEC 5.5", "damaged_segment", "pages without checksums", REPORT, _no_checksums, "count/sums"),
    Case("5.6-segment-of-another-job", "small", "SPEC 5.6", "damaged_segment", "the footer names another job", READ, lambda s: s.rows("count/sums", lambda t: t, said={"job_id": "other"}), "count/sums"),
    Case("5.6-segment-of-another-state", "small", "SPEC 5.6", "damaged_segment", "the footer names another state", READ, lambda s: s.rows("count/sums", lambda t: t, said={"state": "other"}), "count/sums"),
    Case("5.6-segment-of-the-future", "small", "SPEC 5.6", "damaged_segment", "the footer names a greater checkpoint id", READ, lambda s: s.rows("count/sums", lambda t: t, said={"checkpoint_id": "9"}), "count/sums"),
    Case("5.6-arrow-schema", "small", "SPEC 3.7", "damaged_segment", "the footer carries an ARROW:schema, on which Arrow acts as soon as it opens a file", READ, lambda s: s.rows("count/sums", lambda t: t, store_schema=True), "count/sums"),
    Case("5.7-narrowed", "evolved", "SPEC 5.7", "schema_cannot_evolve", "a later schema in which int32 became int8", REPORT, lambda s: s.members(lambda m: m["states"][0]["schemas"][1]["fields"][1].update(type="int8")), "count/sums"),
    Case("6.2-edge-twice", "wide", "SPEC 6.2", "damaged_segment", "the progress of an edge stands twice", REPORT, lambda s: s.rows("count/progress", again), "count/progress"),
    Case("6.4-rescaled-from-nobody", "rescaled", "SPEC 6.4", "unknown_operator", "rescaled_from names an operator that is not there", REPORT, _former),
    Case("7.2-flipped-data", "objects", "SPEC 7.2", "object_digest_differs", "a bit of the rows of a segment is flipped", READ, lambda s: s.segment(lambda data: flipped(data, 30)), "count/sums"),
    Case("7.2-flipped-footer", "objects", "SPEC 7.2", "object_digest_differs", "a bit of the footer of a segment is flipped", READ, lambda s: s.segment(lambda data: flipped(data, len(data) - 30)), "count/sums"),
    Case("7.2-cut-short", "objects", "SPEC 4.1", "object_size_differs", "the last bytes of a segment are gone", READ, lambda s: s.segment(lambda data: data[:-8]), "count/sums"),
    Case("7.2-flipped-inline", "small", "SPEC 7.2", "object_digest_differs", "a bit of an inline segment is flipped", READ, lambda s: s.parts.set_bytes(0, flipped(s.parts.bytes_of(0), 30), vouched=False) or s.seal(), "count/sums"),
    Case("7.4-decodes-to-too-much", "small", "SPEC 4.1", "damaged_segment", "a manifest that says a segment decodes to a tebibyte", READ, _large, "count/sums"),
    Case("8.1-stray", "layers", "SPEC 8.1", "checkpoint_not_found", "checkpoint 2 names another attempt as its parent, so record 1 is a stray", REPORT, _stray, "", "warning"),
]  # fmt: skip

HISTORY: list[Case] = [
    Case("8.2-id-after-a-gap", "history", "SPEC 8.2", "damaged_record", "checkpoint 4 names checkpoint 2 as its parent, which is not the id before", REPORT, lambda s: s.members(lambda m: m.update(parent=_ref(s, 2)))),
    Case("8.2-first-is-not-1", "layers", "SPEC 8.2", "damaged_record", "checkpoint 2 has no parent, and only checkpoint 1 may have none", REPORT, lambda s: s.members(lambda m: m.pop("parent"))),
    Case("8.4-lost-record", "history", "SPEC 8.4", "record_lost", "record 3 is gone, which 4 names as its parent, and records 1 and 2, of which 2 names 1, are there: retention takes the lowest first, so 3 was lost", REPORT, lambda s: s.storage.delete(["checkpoints/00000000000000000003.json"])),
    Case("8.4-lost-record-of-another-attempt", "history", "SPEC 8.4", "record_lost", "the record under id 3 is of another attempt than 4 names as its parent, and records 1 and 2 stand below it: 3 was lost", REPORT, _other_attempt),
]  # fmt: skip

CASES = [*RECORD, *MANIFEST, *SEGMENT, *HISTORY]
