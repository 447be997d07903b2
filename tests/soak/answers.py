"""What a soak's job must have written, computed by SQL over the files that it was fed."""

from __future__ import annotations

from pathlib import Path

import duckdb

from tests.soak.feeding import CUSTOMERS_FILE
from tests.soak.job import LAPS, WINDOW_US

NAMED = """
    CREATE TABLE named AS
    SELECT DISTINCT orders."order", customer, amount, epoch_us("at") AS at_us, segment
    FROM read_parquet('{folder}/orders/*.parquet') AS orders
    JOIN read_parquet('{folder}/{customers}') AS customers USING (customer)
    WHERE amount > 0
"""
TOTALS = "sum(amount) AS amount, count(*) AS orders"
EXPECTED = {
    "totals": f"SELECT segment, {TOTALS} FROM named GROUP BY segment",
    "running": f"SELECT customer, {TOTALS} FROM named GROUP BY customer",
    "windows": f"""
        SELECT segment, make_timestamp(at_us // {WINDOW_US} * {WINDOW_US}) AS window_start,
            make_timestamp((at_us // {WINDOW_US} + 1) * {WINDOW_US}) AS window_end, {TOTALS}
        FROM named GROUP BY ALL""",
    "bought": f"""
        SELECT customer, (at_us // {WINDOW_US} + 1) * {WINDOW_US} AS until_us, count(*) AS orders
        FROM named GROUP BY ALL""",
    "later": 'SELECT "order", customer FROM named',
    # A record that begins without laps still passes the head once.
    "laps": f"""
        SELECT customer, sum(greatest("order" % {LAPS}, 1))::BIGINT AS laps FROM named GROUP BY customer""",
}
WRITTEN = {
    # Only the last running total of each customer.
    "running": "SELECT customer, max(amount) AS amount, max(orders) AS orders FROM written GROUP BY customer",
}


def database(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return a database of what a job was fed: each paid order once, with its segment."""
    connection = duckdb.connect()
    connection.execute(NAMED.format(folder=folder, customers=CUSTOMERS_FILE))
    return connection


def differences(folder: Path) -> dict[str, int]:
    """Return for each output how many rows are missing, surplus or different."""
    with database(folder) as connection:
        return {name: _differing(connection, folder / "out" / name, name) for name in EXPECTED}


def _differing(connection: duckdb.DuckDBPyConnection, out: Path, name: str) -> int:
    connection.execute(f"CREATE OR REPLACE VIEW written AS SELECT * FROM read_parquet('{out}/*.parquet')")
    written, expected = WRITTEN.get(name, "SELECT * FROM written"), EXPECTED[name]
    columns = ", ".join(f'"{row[0]}"' for row in connection.execute(f"DESCRIBE {expected}").fetchall())
    sides = [f"(SELECT {columns} FROM ({side}))" for side in (written, expected)]
    both = " UNION ALL ".join(f"({a} EXCEPT ALL {b})" for a, b in (sides, reversed(sides)))
    [(count,)] = connection.execute(f"SELECT count(*) FROM ({both})").fetchall()
    return int(count)
