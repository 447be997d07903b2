"""How the tests of the data source read, and what they take of Spark's errors."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException


def read(session: Any, url: str, operator: str | None = None, state: str | None = None, **options: Any) -> Any:
    """A DataFrame; an option that is None is not given."""
    named = {"operator": operator, "state": state, **options}
    reader = session.read.format("stateformat")
    return reader.options(**{name: value for name, value in named.items() if value is not None}).load(url)


def table(frame: Any) -> pa.Table:
    """All rows of a DataFrame."""
    return frame.toArrow()


def sentence(call: Any) -> str:
    """What Spark's message leaves of ours: one line of its own, and no traceback."""
    with pytest.raises(PySparkException) as caught:
        call()
    shown = str(caught.value)
    assert "Traceback" not in shown
    assert 'File "' not in shown
    lines = [line for line in shown.splitlines() if line and "SQLSTATE" not in line]
    assert lines[-2].endswith(": "), shown
    return lines[-1]
