"""Foreign files that would take the machine's memory or its day are refused, or read at once."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from foreign import hostile_flink as hostile

from stateformat.backends.foreign import formats
from stateformat.backends.foreign.spark import schemas
from stateformat.errors import ErrorKind, UnsupportedFormat
from stateformat.schema import segment_schema
from tests.fuzz.foreign_targets import DictFolder, read_all

SECONDS_MAX = 60.0
"""Of processor time. A quiet machine takes one or two; what is wrong takes for ever."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    begin = time.process_time()
    yield
    assert time.process_time() - begin < SECONDS_MAX


def flink(files: dict[str, bytes]) -> Any:
    folder: Any = DictFolder(files)
    opened = formats.flink(folder, None)
    assert opened is not None
    return opened


def savepoint(*snapshots: bytes) -> Any:
    """A canonical savepoint of value states without rows."""
    header = hostile.header([(f"s{at}", one) for at, one in enumerate(snapshots)])
    return flink(hostile.files(header, [0]))


@pytest.mark.parametrize("levels", [2, 6, 12, 30, 60, 200])
@pytest.mark.parametrize("shape", sorted(hostile.SHAPES))
def test_types_that_name_one_another_many_times_are_kept_as_bytes_or_refused(shape: str, levels: int) -> None:
    opened = savepoint(hostile.SHAPES[shape](levels))
    report = opened.validate(None, "full", None)
    assert {problem.kind for problem in report.problems} <= {ErrorKind.LIMIT_EXCEEDED}
    if not report.problems:
        checkpoint = opened.open()
        (state,) = checkpoint.states
        # Whatever prints, compares or hashes a type must be able to.
        assert len(str(segment_schema(state))) < 1 << 20
        read_all(checkpoint)


def test_types_that_share_a_little_are_columns_as_ever() -> None:
    checkpoint = savepoint(hostile.shared_rows(3, 3), hostile.shared_records(4, 3)).open()
    rows, records = (leaves(segment_schema(state).field("value").type) for state in checkpoint.states)
    assert rows == 27 + 1  # With the kind of the row.
    assert records == 1 + 3 + 9 + 27


def leaves(kind: pa.DataType) -> int:
    """How many columns a type has that have no fields."""
    return sum(leaves(kind.field(at).type) for at in range(kind.num_fields)) if kind.num_fields else 1


def test_many_small_types_of_one_header_share_one_limit() -> None:
    checkpoint = savepoint(*[hostile.shared_rows(12, 2)] * 60).open()
    assert len(checkpoint.states) == 60
    assert sum(len(str(segment_schema(state))) for state in checkpoint.states) < 60 * (1 << 15)


def test_the_time_that_a_header_takes_grows_with_its_states_and_not_with_their_square() -> None:
    few, many = savepoint(*[hostile.LONG] * 2_000), savepoint(*[hostile.LONG] * 20_000)
    least = min(opening(few) for _ in range(3))
    assert opening(many) < 25 * least or opening(many) < 25 * least


def opening(opened: Any) -> float:
    begin = time.process_time()
    assert len(opened.open().states) >= 2_000
    return time.process_time() - begin


def spark_schema(text: str) -> bytes:
    raw = text.encode()
    pieces = [raw[at : at + 60_000] for at in range(0, len(raw), 60_000)]
    chunks = struct.pack(">i", len(pieces)) + b"".join(struct.pack(">H", len(piece)) + piece for piece in pieces)
    return struct.pack(">H", 2) + b"v2" + 2 * chunks


def test_a_schema_of_too_many_columns_is_refused_by_the_limit() -> None:
    column = json.dumps({"name": "c", "type": "long", "nullable": True, "metadata": {}})
    text = f'{{"type":"struct","fields":[{",".join([column] * 70_000)}]}}'
    with pytest.raises(
        UnsupportedFormat, match=r"state/0: its types would take 65,537 columns.*at most 65,536"
    ) as caught:
        schemas.parse_schema_file(spark_schema(text), "state/0")
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED


def test_columns_of_one_name_are_told_apart_in_time() -> None:
    column = json.dumps({"name": "c", "type": "long", "nullable": True, "metadata": {}})
    text = f'{{"type":"struct","fields":[{",".join([column] * 30_000)}]}}'
    (schema,) = schemas.parse_schema_file(spark_schema(text), "state/0")
    names = [field.name for field in schemas.arrow_fields(schema.key)]
    assert names[:3] == ["c", "c_2", "c_3"]
    assert len(set(names)) == 30_000
