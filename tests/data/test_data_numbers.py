"""The numbers on docs/data.md are those of plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.worlds import recipes as data_recipes
from tests.worlds.data import NEWEST, PARALLELISMS, expected_changes, expected_rows

SPENT = ("totals", "spent")
ROWS = expected_rows(*SPENT)


def shown(heading: str, number: int) -> str:
    """What the n-th recipe of a section prints."""
    return data_recipes.PAGE.sections()[heading][number].shown


def cells(text: str, bar: str = "│") -> list[tuple[str, ...]]:
    """The rows of a table in a frame, without its head."""
    lines = [line for line in text.splitlines() if line.startswith(bar)]
    types = 2 if bar == "│" else 1
    return [tuple(cell.strip() for cell in line.strip(bar).split(bar)) for line in lines[types:]]


def counted(changes: Sequence[dict[str, object]]) -> list[tuple[str, ...]]:
    """Changes by checkpoint and kind."""
    found = Counter((str(row["_checkpoint_id"]), str(row["_change"])) for row in changes)
    return [(*key, str(count)) for key, count in sorted(found.items())]


def test_twice_as_many_rows_lie_in_the_segments_as_are_true() -> None:
    assert shown("Never read the segments", 0) == f"[(11840,)]\n[({len(ROWS)},)]\n"


def test_users_of_each_city() -> None:
    users = Counter(row["city"] for row in ROWS)
    vips = Counter(row["city"] for row in ROWS if row["vip"])
    by_city = [(city or "NULL", str(users[city]), str(vips[city])) for city in sorted(users, key=lambda c: c or "~")]
    assert cells(shown("DuckDB", 0)) == by_city
    assert [tuple(line.split()) for line in shown("SQL at the terminal", 0).splitlines()[1:9]] == [
        (city.replace("NULL", "null"), *rest) for city, *rest in by_city
    ]
    pandas = [line.rsplit(None, 1) for line in shown("pandas", 0).splitlines()[1:-1]]
    assert [(city.strip().replace("NaN", "NULL"), count) for city, count in pandas] == [one[:2] for one in by_city]
    assert shown("pyarrow", 0) == f"{users['Oslo']}\n"
    assert cells(shown("Spark", 0), "|") == [by_city[-1][:2], *(one[:2] for one in by_city[:2])]


def test_changes_and_all_checkpoints() -> None:
    every = [row for at in range(3, NEWEST) for row in expected_changes(*SPENT, at, at + 1)]
    assert cells(shown("What changed between two checkpoints", 1)) == counted(every)
    changes = [
        (str(row["user"]), str(row["orders"]), str(row["_change"])) for row in expected_changes(*SPENT, 5, NEWEST)
    ]
    pandas = [line.split() for line in shown("What changed between two checkpoints", 0).splitlines()[1:]]
    assert sorted((line[1], line[2], line[-1]) for line in pandas) == sorted(changes)
    spark = shown("Spark", 2).split("\n\n")[0]
    assert sorted(cells(spark, "|")) == sorted(changes)
    first = {
        at: [row for row in expected_rows(*SPENT, at) if "u" < (row["user"] or "") < "u0009"] for at in PARALLELISMS
    }
    assert cells(shown("All checkpoints at once", 0)) == [
        (str(at), str(len(rows)), str(sum(row["orders"] for row in rows))) for at, rows in first.items()
    ]


def test_a_few_keys() -> None:
    [someone, nobody] = (next(row for row in ROWS if row["user"] == user) for user in ("u0018", None))
    assert (
        shown("One key, or a few", 0)
        == f"{[{name: row[name] for name in ('user', 'euros', 'city')} for row in (someone, nobody)]}\n"
    )
    assert (
        shown("Spark", 1) == f"[Row(user='u0018', city='{someone['city']}'), Row(user=None, city='{nobody['city']}')]\n"
    )


def test_files_and_tables() -> None:
    oslo = [row for row in ROWS if row["city"] == "Oslo"]
    vips = [row for row in oslo if row["vip"]]
    baskets = expected_rows("totals", "baskets")
    rows = {at: len(expected_rows(*SPENT, at)) for at in PARALLELISMS}
    assert shown("Files", 1).splitlines() == [
        f"[({len(ROWS)},)]",
        f"[({len(vips)}, True, 'Oslo')]",
        f"[({len(oslo)},)]",
        f"[({rows[5]},)]",
        f"[({len(baskets)},)]",
    ]
    assert shown("Iceberg", 1) == f"{len(vips)}\n"
    assert shown("Delta", 1) == f"{list(rows.items())}\n"
    assert f"{rows[NEWEST]:,} → {rows[NEWEST] - 1:,} rows" in shown("Correct the state of a job", 0)


def test_a_join_of_two_states_in_all_checkpoints() -> None:
    found = []
    for at in PARALLELISMS:
        oslo = {row["user"] for row in expected_rows(*SPENT, at, columns_of=NEWEST) if row["city"] == "Oslo"}
        baskets = [row for row in expected_rows("totals", "baskets", at) if row["user"] in oslo - {None}]
        found.append((at, len(baskets), len({row["user"] for row in baskets}), sum(row["pieces"] for row in baskets)))
    lines = shown("SQL at the terminal", 1).splitlines()
    assert [tuple(map(int, line.split(","))) for line in lines[1:]] == found
