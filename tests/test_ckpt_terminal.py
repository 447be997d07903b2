"""``ckpt`` before a person: interrupts, strangers' text on the terminal, narrow pages, and what is suggested."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.tools.ckpt import main as program
from stateformat.tools.ckpt.exit_status import interrupted
from stateformat.tools.ckpt.interrupts import Interrupts
from stateformat.tools.ckpt.json_text import pieces, unprintable_escaped
from stateformat.tools.ckpt.output import complain
from stateformat.tools.ckpt.text.render import text_width
from tests import stores
from tests.ckpt_runs import CKPT, page, run

GOLDEN = Path(__file__).parent / "golden/v1"
NASTY = "\x1b[31mred\x07\r\x9b2J\u202etxt.exe"
"""A name that colours, rings, goes back to the line's start, clears the screen (C1), and turns the reading direction."""


# Interrupts --------------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_modules_are_imported_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import sys; print('importing', flush=True); sys.stdin.read()")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from stateformat.tools.ckpt.__main__ import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "history", "somewhere"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, b"ckpt: interrupted; nothing was changed\n")


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="asks Linux in which system call a thread is")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_comes_just_before_a_read_ends_the_read_all_the_same() -> None:
    read_end, write_end = os.pipe()
    reader = Path(f"/proc/self/task/{threading.get_native_id()}/syscall")

    def take() -> None:
        # To the reader this is the same: the signal has been taken by somebody else, and the read goes on.
        while reader.read_text().split()[:2] != ["0", hex(read_end)]:
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    taken_elsewhere = threading.Thread(target=take)
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        taken_elsewhere.start()
        with pytest.raises(KeyboardInterrupt):
            os.read(read_end, 1)
    assert interrupts.seen
    assert signal.getsignal(signal.SIGINT) is before
    taken_elsewhere.join()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.usefixtures("interruptible")
def test_an_import_that_turns_an_interrupt_into_another_error_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_imported(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)
        except KeyboardInterrupt as error:
            raise ImportError("numpy could not be imported") from error

    monkeypatch.setattr(program.ckpt, "main", half_imported)
    assert program.main(["history", "store"]) == 130
    assert capsys.readouterr().err == f"ckpt: {interrupted().message}\n"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_deletion_says_that_something_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stateformat.history import retention

    stores.counts_store(str(tmp_path / "store"))
    monkeypatch.setattr(retention, "_find", lambda *_: signal.raise_signal(signal.SIGINT))
    assert program.main(["gc", str(tmp_path / "store"), "--keep", "1", "--delete"]) == 130
    said = capsys.readouterr().err
    assert "what was deleted before stays deleted" in said
    assert "no effect" not in said


# Strangers' text ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose operator and state have names that a terminal would obey."""
    folder = tmp_path_factory.mktemp("nasty")
    graph = sf.JobGraph((sf.Operator(NASTY, parallelism=1, max_parallelism=8),), ())
    state = sf.value_state(NASTY, NASTY, keys={"k": pa.string()}, values={"n": pa.int64()})
    pending = sf.open(str(folder)).begin(job_id="nasty", graph=graph, states=[state], parent=None)
    writer = pending.context.subtask(NASTY, 0)
    writer.write(NASTY, pa.table({"k": ["a"], "n": [1]}))
    pending.add(writer)
    pending.publish()
    return folder


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--operator", "zz"),
        ("inspect", "--state", "zz"),
        ("export", "--operator", "zz", "--state", "zz", "--to", "x.csv"),
        ("rewrite", "--rename", "zz=yy"),
        ("inspect",),
        ("explain-restore",),
        ("explain-restore", "--parallelism", "9"),
        ("validate",),
        ("history",),
    ],
    ids=lambda command: " ".join(command),
)
def test_no_name_steers_the_terminal(
    nasty: Path, command: tuple[str, ...], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main([command[0], str(nasty), *command[1:], "--format", form])
    found = capsys.readouterr()
    both = (found.out + found.err).replace("\n", "")
    assert both.isprintable(), [char for char in both if not char.isprintable()]
    if form == "json":
        json.loads(found.out)


def test_escaping_json_text_leaves_its_value() -> None:
    value: Any = {NASTY: [NASTY, "\U000e0001", "plain ünïcode", 1.5, None], "n": {"\u2028": "\ufeff"}}
    text = unprintable_escaped("".join(pieces(value)))
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


def test_stack_traces_keep_their_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"Traceback\n  {NASTY}\nend")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


# Pages -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 72])
@pytest.mark.parametrize(
    "command",
    [
        "inspect",
        "inspect --operator delays",
        "history",
        "validate",
        "explain-restore --parallelism 3",
        "explain-restore --parallelism 128",
        "gc --keep 1",
    ],
)
@pytest.mark.parametrize("store", ["flights", "stopped"])
def test_pages_fit_narrow_terminals(
    store: str, command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = command.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    assert program.main([name, str(GOLDEN / store), *options]) == 0
    text = capsys.readouterr().out
    wide = [line for line in text.splitlines() if text_width(line) > columns]
    assert not wide
    assert max(map(text_width, text.splitlines())) > columns - 20


def test_what_lies_inline_is_not_counted_beside_the_manifest(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path))
    assert "of the segments inline, compressed" in " ".join(page("inspect", tmp_path).split())
    document = run("inspect", tmp_path, "--format", "json").document
    assert document["inline_bytes"] == document["totals"]["bytes"] > 0


# What is suggested -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("top", None), ("rolback", None), ("coppy", None), ("gcc", None), ("inspct", "inspect"), ("exprt", "export")],
)
def test_a_command_that_changes_something_is_never_suggested(typed: str, meant: str | None) -> None:
    found = run(typed, "store")
    assert found.status == 2
    assert ("Did you mean" in found.err) == (meant is not None)
    assert meant is None or f"'{meant}'" in found.err


@pytest.mark.parametrize("command", [("inspect",), ("export", "--operator", "counter", "--to", "x.csv")])
def test_a_state_that_is_not_there_gets_the_one_that_was_meant(tmp_path: Path, command: tuple[str, ...]) -> None:
    stores.counts_store(str(tmp_path))
    found = run(command[0], tmp_path, *command[1:], "--state", "cuonts")
    assert found.status == 2
    assert "did you mean 'counts'?" in found.err


def test_a_folder_of_something_else_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    found = run("inspect", tmp_path)
    assert found.status == 3
    assert "is no store of checkpoints" in found.err
    assert "Check the address" in found.err


@pytest.mark.parametrize("number", [9_999_999, 10**8, 10**20])
@pytest.mark.parametrize("way", ["option", "operator", "topology"])
def test_a_parallelism_beyond_all_bounds_is_refused_before_anything_is_planned(
    tmp_path: Path, number: int, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.counts_store(str(tmp_path / "store"))
    assert program.main(["inspect", str(tmp_path / "store"), "--format", "json"]) == 0
    topology = json.loads(capsys.readouterr().out)
    for operator in topology["operators"]:
        operator["parallelism"] = number
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    options = {
        "option": ("--parallelism", str(number)),
        "operator": ("--operator-parallelism", f"counter={number}"),
        "topology": ("--topology", str(tmp_path / "topology.json")),
    }[way]
    begun = time.process_time()
    plan = sf.open(str(tmp_path / "store")).open().plan_restore(sf.JobGraph((sf.Operator("counter", number),), ()))
    assert plan.refused
    assert time.process_time() - begun < 1
    assert program.main(["explain-restore", str(tmp_path / "store"), *options]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"is asked for parallelism {number}, which is not within 1 to 32768" in told


def test_standard_output_needs_a_format(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path))
    found = run("export", tmp_path, "--operator", "counter", "--state", "counts", "--to", "-")
    assert found.status == 2
    assert "add --as csv or --as jsonl" in found.err


def test_a_rollback_to_another_store_leaves_this_one(tmp_path: Path) -> None:
    store = stores.counts_store(str(tmp_path / "store"))
    before = [record.ref for record in store.history()]
    text = page("rollback", f"{tmp_path / 'store'}@1", "--to", tmp_path / "there")
    assert text.startswith("Published checkpoint 2\n")
    assert [record.ref for record in store.history()] == before
    there = sf.open(str(tmp_path / "there")).open()
    assert there.read("counter", "counts").table().num_rows == 20
    assert CKPT.exists()
