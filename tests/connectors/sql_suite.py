"""What every database must do for a SQL sink.

A subclass says which, and reads it with another program.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import SqlSink
from stateformat.backends.dataflow import Dataflow
from stateformat.errors import ErrorKind, InvalidInput, InvalidState, PublishConflict, StorageError
from tests.connectors.sink_steps import (
    ATTEMPTS,
    PERMIT,
    SCHEMA,
    Crash,
    batch_of,
    check_every_crash,
    prepared,
    prepared_of,
    rows_until,
    run_to_the_end,
    snapshot,
    subtask_of,
)
from tests.worlds.local import Bench, Tap, Told, rows


class Steps:
    """Counts calls of a database and a staging place; dies once before one of them, or after."""

    def __init__(self, crash_at: int) -> None:
        self.crash_at = crash_at
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.crash_at:
            raise Crash


class Stepping:
    """A connection, or a staging place, whose calls are steps."""

    calls = ("execute", "executemany", "put", "rename")

    def __init__(self, real: Any, step: Callable[[], None]) -> None:
        self._real = real
        self._step = step

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in self.calls:
            return found

        def call(*arguments: Any) -> Any:
            self._step()
            result = found(*arguments)
            self._step()
            return result

        return call

    def remove(self, names: Any) -> None:
        for name in names:
            self._step()
            self._real.remove([name])
        self._step()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with self._real.transaction():
            yield
            self._step()
        self._step()

    def __enter__(self) -> Stepping:
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._real.__exit__(*error)


EVERY_TYPE: Sequence[tuple[str, pa.DataType, list[Any]]] = [
    ("flag", pa.bool_(), [True, False]),
    ("tiny", pa.int8(), [-128, 127]),
    ("small", pa.int16(), [-(2**15), 2**15 - 1]),
    ("whole", pa.int32(), [-(2**31), 2**31 - 1]),
    ("big", pa.int64(), [-(2**63), 2**63 - 1]),
    ("single", pa.float32(), [0.5, float("-inf")]),
    ("double", pa.float64(), [5e-324, float("inf")]),
    ("third", pa.float64(), [1 / 3, -1.7976931348623157e308]),
    ("word", pa.string(), ["", 'a "b",\n\\.\t\\N 日\U0001f600']),
    ("long", pa.large_string(), ["null", "\\."]),
    ("bytes", pa.binary(), [b"", bytes(range(256))]),
    ("more", pa.large_binary(), [b"\\x", b"\0"]),
    ("day", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    ("at", pa.timestamp("us"), [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)]),  # noqa: DTZ001 - no zone is meant
    (
        "instant",
        pa.timestamp("us", "UTC"),
        [dt.datetime(1969, 12, 31, 23, 59, 59, 1, dt.UTC), dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)],
    ),
    ("price", pa.decimal128(12, 10), [decimal.Decimal("0.0000000001"), decimal.Decimal("-12.3400000000")]),
    ("count", pa.decimal128(38, 0), [decimal.Decimal(10**38 - 1), decimal.Decimal(-5)]),
    ("part", pa.decimal128(3, 3), [decimal.Decimal("-0.001"), decimal.Decimal("0.999")]),
]


class SqlSuite(ABC):
    """The tests. ``url`` is a fixture of the subclass, a database without tables."""

    @pytest.fixture(autouse=True)
    def _place(self, url: str, tmp_path: Path) -> None:
        self.url, self.tmp_path = url, tmp_path

    @abstractmethod
    def execute(self, *statements: str) -> list[Any]:
        """Run statements; the rows of the last."""

    @abstractmethod
    def as_read(self, type_: pa.DataType, value: Any) -> Any:
        """What this database's reader gives for a value."""

    def make(self, table: str = "t", schema: pa.Schema = SCHEMA, **options: Any) -> SqlSink:
        sink = SqlSink(self.url, table, **{"staging": self.tmp_path / "staging", "durable": False, **options})
        sink.output_schema(schema)
        return sink

    def seen(self) -> list[int]:
        """The numbers in the table, sorted."""
        return [row[0] for row in self.execute("SELECT n FROM t ORDER BY n")]

    def staged(self) -> list[str]:
        return sorted(path.name for path in (self.tmp_path / "staging").rglob("*") if path.is_file())

    def quick(self, connection: Any) -> Any:
        """A connection that need not outlive the machine."""
        return connection

    # What is in the table

    def test_every_type_of_the_format_comes_back_as_it_went_in(self) -> None:
        schema = pa.schema([(name, type_) for name, type_, _ in EVERY_TYPE])
        columns = [pa.array([None, *values], type_) for _, type_, values in EVERY_TYPE]
        # A slice: its offsets do not begin at 0.
        batch = pa.record_batch(
            [pa.concat_arrays([column.slice(1), column]) for column in columns], schema=schema
        ).slice(1)
        sink = self.make(schema=schema)
        sink.clean("out", 0)
        sink.commit(PERMIT, prepared_of(sink, batch, batch.slice(1, 1)))
        names = ", ".join(f'"{name}"' for name in schema.names)
        found = self.execute(f"SELECT {names} FROM t")
        wanted = [
            tuple(None if choice is None else self.as_read(type_, values[choice]) for _, type_, values in EVERY_TYPE)
            for choice in (1, None, 0, 1, None)
        ]
        assert sorted(map(repr, found)) == sorted(map(repr, map(tuple, wanted)))

    def test_rows_appear_with_their_commit_and_once_however_often_it_is_repeated(self) -> None:
        sink = self.make()
        sink.clean("out", 0)
        tables = [prepared_of(sink, n, n + 10, subtask=n) for n in range(3)]
        assert self.seen() == []
        assert len(self.staged()) == 3
        for _ in range(3):
            sink.commit(PERMIT, pa.concat_tables(tables))
            assert self.seen() == [0, 1, 2, 10, 11, 12]
            assert self.staged() == []
        sink.commit(PERMIT, tables[0].slice(0, 0))
        assert snapshot(subtask_of(sink), 2) is None
        texts = dict(self.execute("SELECT n, text FROM t"))
        assert texts == {0: None, 1: "日 1", 2: "日 2", 10: "日 10", 11: "日 11", 12: None}

    def test_a_commit_holds_what_several_checkpoints_and_attempts_prepared_and_takes_what_is_new(self) -> None:
        sink = self.make()
        first = prepared_of(sink, 1, checkpoint_id=3)
        again = prepared_of(sink, 2, checkpoint_id=3, attempt=ATTEMPTS[1])
        other = prepared_of(sink, 3, checkpoint_id=3, attempt=ATTEMPTS[1], uid="elsewhere")
        sink.commit(PERMIT, first)
        # Another attempt at the same checkpoint, and the same attempt in another sink, are not it.
        sink.commit(PERMIT, pa.concat_tables([first, again, other]))
        later = prepared_of(sink, 4, checkpoint_id=4)
        sink.commit(PERMIT, pa.concat_tables([again, later, first]))
        assert self.seen() == [1, 2, 3, 4]
        marks = self.execute("SELECT sink, checkpoint_id, attempt_id, rows FROM stateformat_commits ORDER BY 2, 1, 3")
        assert marks == [
            ("elsewhere", 3, ATTEMPTS[1], 1),
            ("out", 3, ATTEMPTS[0], 1),
            ("out", 3, ATTEMPTS[1], 1),
            ("out", 4, ATTEMPTS[0], 1),
        ]

    @pytest.mark.parametrize("object_bytes", [1, 1 << 20])
    def test_with_a_key_the_last_row_of_each_stays(self, object_bytes: int) -> None:
        sink = self.make(key="n", object_bytes=object_bytes)
        opened = subtask_of(sink)
        for word in "abc":
            opened.process(batch_of(1, 2, 2, 4, word=word), 0)
        opened.process(pa.concat_batches([batch_of(5, word="old"), batch_of(5, word="new")]), 0)
        one = prepared(opened, 1)
        assert one.num_rows == (4 if object_bytes == 1 else 1)
        two = prepared_of(sink, 2, 7, word="d", checkpoint_id=2)
        three = prepared_of(sink, 7, word="e", checkpoint_id=2, attempt=ATTEMPTS[1])
        # In whatever order checkpoints stand in the table, they are committed in theirs.
        sink.commit(PERMIT, pa.concat_tables([two, three, one]))
        wanted = {1: "c 1", 2: "d 2", 4: "c 4", 5: "new 5", 7: "e 7"}
        assert dict(self.execute("SELECT n, text FROM t")) == wanted
        # What is committed again does not put an old row over a newer one.
        sink.commit(PERMIT, prepared_of(sink, 1, word="z", checkpoint_id=3))
        sink.commit(PERMIT, pa.concat_tables([one, two, three]))
        assert dict(self.execute("SELECT n, text FROM t")) == {**wanted, 1: "z 1"}

    def test_a_table_that_is_all_key_is_a_set(self) -> None:
        sink = self.make(key=["n", "text"])
        batch = pa.record_batch([pa.array([1, 1, 2], pa.int64()), pa.array(["a", "a", ""])], schema=SCHEMA)
        sink.commit(PERMIT, prepared_of(sink, batch))
        sink.commit(PERMIT, prepared_of(sink, batch, checkpoint_id=2))
        assert self.execute("SELECT n, text FROM t ORDER BY n") == [(1, "a"), (2, "")]

    def test_names_are_names_whatever_is_in_them(self) -> None:
        table, columns = 'select "%s"; --', ['a"b', "100%", "order", "ä ö"]
        schema = pa.schema([(name, pa.int32()) for name in columns])
        sink = self.make(table, schema, key=columns[:1])
        sink.clean("out", 0)
        for number in (1, 2):
            batch = pa.record_batch([[1], [number], [3], [4]], schema=schema)
            sink.commit(PERMIT, prepared_of(sink, batch, checkpoint_id=number))
        assert self.execute('SELECT * FROM "select ""%s""; --"') == [(1, 2, 3, 4)]

    # Crashes and races

    def test_a_crash_between_any_two_steps_loses_nothing_and_repeats_nothing(self) -> None:
        counts = (3, 1)

        def run(crash_at: int) -> int:
            steps, done = Steps(crash_at), []
            sink = self.make(object_bytes=20)
            self.execute("DROP TABLE IF EXISTS t", "DROP TABLE IF EXISTS stateformat_commits")
            connect = sink._database.connect  # type: ignore[attr-defined]
            sink._database.connect = lambda: Stepping(self.quick(connect()), steps)  # type: ignore[attr-defined]
            sink._staging = Stepping(sink._staging, steps)  # type: ignore[assignment]

            def look(published: Sequence[pa.Table]) -> None:
                assert self.seen() == rows_until(len(published), counts)

            def ended() -> None:
                done.append(steps.count)
                steps.crash_at = -1

            crashes = run_to_the_end(sink, look, Crash, counts=counts, subtasks=2, ended=ended)
            assert crashes == (crash_at > 0)
            assert self.staged() == []
            return done[0]

        check_every_crash(run, 40)

    @pytest.mark.parametrize("key", [(), "n"])
    def test_drivers_that_commit_at_once_commit_once(self, key: Any) -> None:
        tables = [
            prepared_of(self.make(key=key), batch_of(*range(100 * n, 100 * n + 50)), checkpoint_id=n % 3 + 1)
            for n in range(6)
        ]
        drivers = 4
        barrier = threading.Barrier(drivers)

        def drive(number: int) -> None:
            sink = self.make(key=key)
            mixed = random.Random(number).sample(tables, len(tables))
            barrier.wait(30)
            # All at once, or one after the other.
            for table in [pa.concat_tables(mixed)] if number % 2 else mixed:
                sink.commit(PERMIT, table)

        with ThreadPoolExecutor(drivers) as pool:
            for future in [pool.submit(drive, number) for number in range(drivers)]:
                future.result(timeout=60)
        assert self.seen() == [n for first in range(0, 600, 100) for n in range(first, first + 50)]
        assert self.staged() == []

    def test_a_job_that_is_killed_at_random_and_rescaled_has_every_row_once(self) -> None:
        bench = Bench(str(self.tmp_path / "store"), checkpoint_interval_us=40_000)
        tap = Tap([rows(n) for n in range(0, 60, 2)], [rows(n) for n in range(1, 60, 2)])
        chosen = random.Random(7)

        def flow(parallelism: int) -> Dataflow:
            made = Dataflow("job", parallelism=parallelism)
            told = made.source(tap, uid="in").key_by("key").apply(Told(bench.log), uid="op")
            sink = SqlSink(self.url, "t", staging=self.tmp_path / "staging", durable=False, object_bytes=100)
            newest = SqlSink(self.url, "newest", key="key", staging=self.tmp_path / "staging", durable=False)
            told.apply(sink, uid="all")
            told.apply(newest, uid="newest")
            return made

        shown: list[int] = []
        for kill in range(4):
            run = bench.begin(flow(1 + kill % 3), seed=kill)
            for _ in range(chosen.randrange(20, 120)):
                assert run.step()
                if chosen.random() < 0.1:
                    now = self.values()
                    assert set(shown) <= set(now)
                    assert len(now) == len(set(now))
                    shown = now
        bench.run(flow(2))
        assert shown
        assert self.values() == list(range(60))
        newest = dict(self.execute("SELECT key, value FROM newest"))
        last = {key: max(n for n in range(60) if n % 4 == key) for key in range(4)}
        assert newest == last
        # What the last kill left under the id that followed goes at the next start.
        bench.run(flow(2))
        assert self.staged() == []

    def values(self) -> list[int]:
        return [row[0] for row in self.execute("SELECT value FROM t ORDER BY value")]

    # What is lost, forgotten, or another

    def test_an_object_that_is_lost_or_another_is_told_and_nothing_is_committed(self) -> None:
        sink = self.make()
        sink.clean("out", 0)
        table = pa.concat_tables([prepared_of(sink, n, subtask=n) for n in (1, 2)])
        path = self.tmp_path / "staging" / table["object"][1].as_py()
        body = path.read_bytes()
        for broken in (body[:-1], b"x" * len(body)):
            path.write_bytes(broken)
            with pytest.raises(
                StorageError, match=f"has {len(broken)} bytes with digest .* prepared with {len(body)}"
            ) as other:
                sink.commit(PERMIT, table)
            assert other.value.kind is ErrorKind.OBJECT_DIGEST_DIFFERS
        path.unlink()
        with pytest.raises(StorageError, match="with 1 rows and is not there") as lost:
            sink.commit(PERMIT, table)
        assert lost.value.kind is ErrorKind.OBJECT_MISSING
        assert self.seen() == []
        assert self.execute("SELECT * FROM stateformat_commits") == []
        path.write_bytes(body)
        sink.commit(PERMIT, table)
        assert self.seen() == [1, 2]

    def test_marks_go_when_they_are_old_and_what_they_marked_is_refused_then_and_never_repeated(self) -> None:
        sink, forever = self.make(marks_days=2), self.make(marks_days=None)
        old = prepared_of(sink, 1)
        other = prepared_of(sink, 2, uid="other")
        path = self.tmp_path / "staging" / old["object"][0].as_py()
        body = path.read_bytes()
        sink.commit(PERMIT, pa.concat_tables([old, other]))
        self.execute(self.make_older("sink = 'out'", 2.1), self.make_older("sink = 'other'", 1.9))
        # An object that could not be removed when it was committed.
        path.write_bytes(body)
        forever.commit(PERMIT, prepared_of(sink, 3, checkpoint_id=2))
        assert self.marked() == [("other", 1), ("out", 1), ("out", 2)]
        sink.commit(PERMIT, prepared_of(sink, 4, uid="other", checkpoint_id=3))
        assert self.marked() == [("other", 1), ("other", 3), ("out", 1), ("out", 2)]
        sink.commit(PERMIT, prepared_of(sink, 5, checkpoint_id=4))
        assert self.marked() == [("other", 1), ("other", 3), ("out", 2), ("out", 4)]
        assert self.staged() == []
        with pytest.raises(StorageError, match="no mark that it was committed"):
            sink.commit(PERMIT, old)
        assert self.seen() == [1, 2, 3, 4, 5]

    def marked(self) -> list[Any]:
        return self.execute("SELECT sink, checkpoint_id FROM stateformat_commits ORDER BY 1, 2")

    @abstractmethod
    def make_older(self, condition: str, days: float) -> str:
        """The statement that makes marks older."""

    def test_cleaning_removes_what_no_checkpoint_holds_and_never_what_the_next_one_may(self) -> None:
        sink = self.make(object_bytes=1)
        tables = {
            (id_, attempt): prepared_of(sink, id_, checkpoint_id=id_, attempt=attempt)
            for id_ in (3, 4, 5)
            for attempt in ATTEMPTS[:2]
        }
        held = prepared_of(sink, 9, uid="other")
        living = subtask_of(sink)
        living.process(batch_of(8), 0)
        carried = pa.concat_tables([tables[3, ATTEMPTS[1]], tables[4, ATTEMPTS[0]]])
        removed = sink.clean("out", 4, carried)
        gone = [tables[3, ATTEMPTS[0]]["object"][0].as_py(), tables[4, ATTEMPTS[1]]["object"][0].as_py()]
        assert [name for name in removed if not name.endswith(".open")] == sorted(gone)
        assert len(removed) == 3
        assert self.seen() == []
        # Its object went, and it had promised nothing yet.
        with pytest.raises(PublishConflict, match="another run of the job has begun"):
            prepared(living, 6)
        living.close()
        sink.commit(PERMIT, pa.concat_tables([carried, tables[5, ATTEMPTS[0]], tables[5, ATTEMPTS[1]], held]))
        assert self.seen() == [3, 4, 5, 5, 9]

    # Tables that are there

    def test_a_table_of_somebody_elses_is_filled_where_it_fits(self) -> None:
        self.execute("CREATE TABLE t (made text DEFAULT 'by hand', text text, n bigint UNIQUE)")
        sink = self.make(key="n")
        sink.clean("out", 0)
        sink.commit(PERMIT, prepared_of(sink, 1, 3))
        self.execute("UPDATE t SET made = 'later' WHERE n = 1")
        sink.commit(PERMIT, prepared_of(sink, 1, 2, word="new", checkpoint_id=2))
        assert sorted(self.execute("SELECT n, text, made FROM t")) == [
            (1, "new 1", "later"),
            (2, "new 2", "by hand"),
            (3, None, "by hand"),
        ]

    @pytest.mark.parametrize(
        ("columns", "key", "told"),
        [
            ("n bigint", (), r"has columns \['n'\], and the sink's rows have \['n', 'text'\]: it lacks 'text'"),
            ("n bigint, text bigint", (), "column 'text' of table 't' .* is bigint, and the sink's rows have string"),
            ("n bigint, text text", "n", r"no unique constraint on the sink's key \['n'\]"),
        ],
    )
    def test_a_table_that_does_not_fit_is_told_before_anything_runs(self, columns: str, key: Any, told: str) -> None:
        self.execute(f"CREATE TABLE t ({columns})")
        with pytest.raises(InvalidInput, match=told) as error:
            self.make(key=key).clean("out", 0)
        assert error.value.kind is ErrorKind.SCHEMA_MISMATCH

    def test_a_constraint_that_refuses_rows_is_told_and_they_come_when_it_is_gone(self) -> None:
        self.execute("CREATE TABLE t (n bigint, text text)", "CREATE UNIQUE INDEX one ON t (text)")
        sink = self.make()
        sink.commit(PERMIT, prepared_of(sink, 1))
        table = prepared_of(sink, 2, 1, checkpoint_id=2)
        with pytest.raises(InvalidState, match=r"refuses rows that were prepared: .*Drop the constraint"):
            sink.commit(PERMIT, table)
        assert self.seen() == [1]
        self.execute("DROP INDEX one")
        sink.commit(PERMIT, table)
        assert self.seen() == [1, 1, 2]

    def test_a_view_is_told_when_the_job_begins_and_a_sink_of_a_key_of_none_adds_rows(self) -> None:
        sink = self.make(key=None)
        sink.clean("out", 0)
        sink.commit(PERMIT, prepared_of(sink, 1))
        sink.commit(PERMIT, prepared_of(sink, 1, checkpoint_id=2))
        assert self.seen() == [1, 1]
        self.execute("CREATE VIEW seen AS SELECT DISTINCT * FROM t")
        for key in (None, "n"):
            with pytest.raises(InvalidInput, match=r"table 'seen' in .* is a view that takes no such rows. Name the"):
                self.make("seen", key=key).clean("out", 0)

    # What is refused before it is promised

    @pytest.mark.parametrize(
        ("type_", "value", "told"),
        [
            (pa.date32(), pa.scalar(-719_163, pa.int32()), "has -719163 .*years 1 to 9999"),
            (pa.date32(), pa.scalar(2_932_897, pa.int32()), "has 2932897 .*years 1 to 9999"),
            (pa.timestamp("us", "UTC"), pa.scalar(2**62, pa.int64()), "years 1 to 9999"),
            (pa.timestamp("us"), pa.scalar(-(2**62), pa.int64()), "years 1 to 9999"),
        ],
    )
    def test_a_value_that_the_database_does_not_hold_fails_the_snapshot(
        self, type_: pa.DataType, value: pa.Scalar, told: str
    ) -> None:
        opened = subtask_of(self.make())
        opened.process(pa.record_batch([pa.array([None, value.as_py()], value.type).cast(type_)], names=["c"]), 0)
        with pytest.raises(InvalidState, match=f"column 'c' of table 't' .*{told}"):
            prepared(opened)
        assert self.staged() == []

    def test_nulls_in_a_key_or_where_none_are_declared_and_text_that_is_none_are_refused(self) -> None:
        opened = subtask_of(self.make(key="text"))
        opened.process(batch_of(1, 3), 0)
        with pytest.raises(InvalidState, match=r"'text' .* is a key column and has 1 nulls in 2 rows"):
            prepared(opened)
        strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
        opened = subtask_of(self.make())
        opened.process(pa.record_batch([pa.array([None], pa.int64())], schema=strict), 0)
        with pytest.raises(InvalidState, match="declared without nulls and has 1 nulls"):
            prepared(opened)
        opened = subtask_of(self.make())
        opened.process(pa.record_batch([pa.array([b"\xff"]).view(pa.string())], names=["c"]), 0)
        with pytest.raises(InvalidState, match="no valid Arrow data"):
            prepared(opened)

    @pytest.mark.parametrize(
        ("type_", "key", "told"),
        [
            (pa.list_(pa.int32()), (), "column 'c' of table 't' .* is list.*Cast it before"),
            (pa.uint64(), (), "is uint64, for which there is no"),
            (pa.timestamp("ns"), (), "is timestamp.ns., for which there is no"),
            (pa.timestamp("us", "Europe/Berlin"), (), "Europe/Berlin.*for which there is no"),
            (pa.int32(), "k", r"has the key \['k'\] and is given columns \['c'\], which lack 'k'"),
            (pa.float64(), "c", "key column 'c' .* rounding errors"),
        ],
    )
    def test_columns_that_can_be_no_table_are_refused_when_the_job_is_put_together(
        self, type_: pa.DataType, key: Any, told: str
    ) -> None:
        sink = self.make()
        sink._keys = (key,) if key else ()
        with pytest.raises(InvalidInput, match=told):
            sink.output_schema(pa.schema([("c", type_)]))
        for names in ([], ["c", "c"], [""], ["a\0b"]):
            with pytest.raises(InvalidInput):
                sink.output_schema(pa.schema([(name, pa.int32()) for name in names]))
