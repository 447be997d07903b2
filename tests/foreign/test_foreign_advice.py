"""What a command says of a folder of Flink's or Spark's: each sentence is of one table, and each
command that it names does something with that very folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from stateformat.backends.foreign.advice import _TABLE, FLINK, SPARK, advice_for
from stateformat.tools.ckpt.main import COMMANDS, main

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
FOLDERS = {
    SPARK: FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint",
    FLINK: FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint",
}
ARGUMENTS: dict[str, Sequence[str]] = {
    "copy": ("{url}", "{there}"),
    "pin": ("{url}", "kept"),
    "unpin": ("{url}", "kept"),
    "gc": ("{url}",),
    "rollback": ("{url}@{id}", "--to", "{there}"),
    "repair": ("{url}",),
    "rewrite": ("{url}", "--to", "{there}"),
    "rescale": ("{url}", "--parallelism", "5", "--to", "{there}"),
    "stop": ("{url}", "--timeout", "1"),
    "savepoint": ("{url}", "--timeout", "1"),
    "watch": ("{url}",),
}
GOES_ON = {"copy", "repair", "rescale", "rewrite"}
"""Commands that write a copy from which a query goes on."""
COMMAND = re.compile(r"`(ckpt [^`]*)`")


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main([*arguments])
    told = capsys.readouterr()
    return status, " ".join((told.out + told.err).split())


def tried(capsys: pytest.CaptureFixture[str], told: str, tmp_path: Path) -> list[str]:
    """Run every whole command that a text names, with its placeholders filled in."""
    done = []
    for number, line in enumerate(COMMAND.findall(told)):
        if " " not in line.removeprefix("ckpt ") or " STORE --as" in line:
            continue  # `ckpt rewrite`, of the store that an import makes; and the way back from it.
        fresh = str(tmp_path / f"advised-{number}")
        words = [{"STORE": fresh, "COPY": fresh, "DIR": fresh, "N": "3"}.get(word, word) for word in line.split()[1:]]
        words = [word.replace("@ID", "@2") for word in words]
        status, said = ckpt(capsys, *words)
        # A validation and a dry look may find problems; nothing is refused.
        assert status == 0 or (words[0] == "validate" and status == 1), f"{line}: {said}"
        done.append(words[0])
    return done


@pytest.mark.parametrize(
    ("system", "command"),
    # A query is followed: tests/ckpt/test_ckpt_watch.py.
    [pair for pair in product((SPARK, FLINK), ARGUMENTS) if pair != (SPARK, "watch")],
)
def test_a_command_that_takes_no_such_folder_says_what_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, system: str, command: str
) -> None:
    folder = shutil.copytree(FOLDERS[system], tmp_path / "folder")
    status, page = ckpt(capsys, "history", str(folder), "--format", "json")
    assert status == 0
    number = json.loads(page)["checkpoints"][0]["checkpoint_id"]
    values = {"url": str(folder), "there": str(tmp_path / "there"), "id": str(number)}
    status, told = ckpt(capsys, command, *(one.format(**values) for one in ARGUMENTS[command]))
    if system == SPARK and command in GOES_ON:
        assert status == 0
        return
    assert status in (2, 3), told
    assert system in told
    url = f"file://{folder}"
    assert advice_for(system, command, url) in told
    commands = tried(capsys, told, tmp_path)
    assert command not in commands
    assert "ckpt import" in told or "import" not in commands


@pytest.mark.parametrize("system", [SPARK, FLINK])
def test_every_command_that_takes_stores_alone_has_a_line(system: str) -> None:
    subjects = {subject for subject in _TABLE[system] if subject in COMMANDS}
    missing = {*ARGUMENTS, "run", "validate"} - subjects
    assert missing == ({*GOES_ON, "watch"} if system == SPARK else set())


def test_a_query_without_state_is_told_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    query = tmp_path / "query"
    shutil.copytree(FOLDERS[SPARK], query, ignore=shutil.ignore_patterns("state"))
    to = ["--to", str(tmp_path / "there")]
    status, told = ckpt(capsys, "import", str(query), *to)
    assert (status, "has no state to import" in told, "--source UID=KIND" in told) == (2, True, True)
    assert ckpt(capsys, "import", str(query), *to, "--source", "in=files")[0] == 0
    status, told = ckpt(capsys, "rescale", str(query), "--parallelism", "9", "--to", str(tmp_path / "copy"))
    assert status == 2
    assert "no state to deal anew" in told
    assert "Spark 4.3 takes that of the session at a restart, Spark 3.5 that of the newest offset log" in told


def test_an_older_batch_is_dealt_anew_and_where_it_is_damaged_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = FOLDERS[SPARK]
    ids = [
        one["checkpoint_id"]
        for one in json.loads(ckpt(capsys, "history", str(folder), "--format", "json")[1])["checkpoints"]
    ]
    status, told = ckpt(capsys, "rescale", f"{folder}@{ids[-1]}", "--parallelism", "5", "--to", str(tmp_path / "copy"))
    assert status == 0
    assert f"{ids[-1] - 1}, state version {ids[-1]}" in told
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    newest = max((damaged / "state" / "0" / "0").glob("*.delta"), key=lambda path: int(path.stem))
    newest.write_bytes(newest.read_bytes()[:-1])
    status, told = ckpt(capsys, "validate", str(damaged), "--all", "--level", "full")
    assert status == 1
    assert "damaged` says which is the newest batch that a copy can have whole" in " ".join(told.split())
