"""Footers and page headers are read alike whether a pattern matches them or they are walked field
by field.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.parquet import footer, page_checks as page_headers, read_footer
from stateformat.parquet.footer import LazyPattern
from stateformat.parquet.page_checks import pages

ROWS = 5_000


def written(path: Path, **options: object) -> bytes:
    numbers = np.arange(ROWS)
    texts = pa.array([f"key {n % 97}" if n % 5 else None for n in range(ROWS)])
    table = pa.table({"n": numbers, "x": numbers / 3, "s": texts, "l": pa.array([[n] * (n % 3) for n in range(ROWS)])})
    pq.write_table(table, path, write_page_checksum=True, data_page_size=4096, row_group_size=1_700, **options)
    return path.read_bytes()


def looked_at(data: bytes) -> tuple[object, list[object]]:
    """Everything that is known of a file from its footer and page headers."""
    length = int.from_bytes(data[-8:-4], "little")
    known = read_footer(pa.py_buffer(data[-8 - length :]))
    found = [
        page
        for group in known.row_groups
        for chunk in group.chunks
        for page in pages(data, chunk.start, chunk.start + chunk.size_bytes)
    ]
    return known, found


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "lz4"},
        {"compression": "zstd", "use_dictionary": True},
        {"use_dictionary": False, "use_byte_stream_split": ["x"]},
        {"write_statistics": False},
        {"data_page_version": "2.0"},
    ],
    ids=str,
)
def test_a_pattern_and_a_walk_see_the_same(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "file.parquet", **options)
    seen = []
    for after in (0, 10**9):
        monkeypatch.setattr(footer, "_USUAL_CHUNK", LazyPattern(footer._usual_chunk, after))
        monkeypatch.setattr(page_headers, "_USUAL_PAGE", LazyPattern(page_headers._usual_page, after))
        seen.append(looked_at(data))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) > 12


def test_a_pattern_is_compiled_when_it_pays() -> None:
    compiled = count()

    def source() -> bytes:
        next(compiled)
        return b"ab"

    pattern = LazyPattern(source, after=2)
    assert [bool(pattern.match(b"ab", 0, 2)) for _ in range(4)] == [False, False, True, True]
    assert next(compiled) == 1
