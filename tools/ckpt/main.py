"""The ``ckpt`` command: a group that imports a subcommand only when it runs.

``ckpt --help`` imports no pyarrow, numpy, pyspark or s3fs. :func:`main` is the one place
where exceptions end: each becomes a sentence and an exit status (``exit_status``).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import keyword
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import click
from click.shell_completion import CompletionItem

from stateformat import __version__

from .exit_status import FINE, PIPE_CLOSED, Failure, failure_of, interrupted, trace_of
from .interrupts import Interrupts, confined, runs_sql
from .output import complain, show_failure
from .watch import Watch

SECTIONS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "Look into a store": (
        "looking",
        {
            "history": "List the checkpoints of a store, newest first.",
            "inspect": "Show what is in a checkpoint: graph, states, skew, rows.",
            "get": "Show the rows of one key, now or along the history.",
            "top": "Show which keys, key groups and subtasks are largest.",
            "diff": "Show what differs between two checkpoints.",
            "du": "Show what a store costs: by folder, checkpoint and state.",
            "validate": "Find everything that is wrong with a checkpoint.",
            "explain-restore": "Show what a restore would do, or why it would be refused.",
            "export": "Write state to files and tables, or a checkpoint as a Flink savepoint.",
            "sql": "Query the states of a checkpoint with SQL.",
            "report": "Write an HTML page about a store, to open in a browser.",
        },
    ),
    "Manage checkpoints": (
        "changing",
        {
            "import": "Make a checkpoint of a Flink savepoint or a Spark query.",
            "rescale": "Change the parallelism, or the partitions of a Spark query.",
            "rewrite": "Correct or delete rows, also of Spark queries; compact.",
            "copy": "Copy a checkpoint; take a Spark query back to a batch.",
            "rollback": "Make an older checkpoint the newest again; metadata only.",
            "repair": "Show what is wrong with the newest checkpoint; repair it.",
            "pin": "Keep a checkpoint under a name, out of reach of retention.",
            "unpin": "Remove a pin, or another savepoint below the store.",
            "gc": "Show, or with --delete remove, what retention would free.",
        },
    ),
    "Jobs": (
        "running",
        {
            "run": "Run a dataflow in this process.",
            "watch": "Follow a job: a line for each checkpoint.",
            "savepoint": "Ask a running job for a savepoint; the job keeps running.",
            "stop": "Ask a running job to stop with a savepoint, and wait.",
        },
    ),
    "Your shell": (
        "looking",
        {
            "completion": "Print the completion script for your shell.",
        },
    ),
}
"""Every command with its line in ``ckpt --help``, under a title, with the room of its module.
Module and function have its name, or, where that is a word of Python's own, its name and ``_``.
"""
_SHARED: Final = {
    **dict.fromkeys(("copy", "pin", "unpin", "rollback"), "keeping"),
    **dict.fromkeys(("stop", "savepoint"), "asking"),
}
"""Commands whose module has another name, which several share."""
COMMANDS: Final[Mapping[str, str]] = {name: text for _, some in SECTIONS.values() for name, text in some.items()}
_ROOMS: Final[Mapping[str, str]] = {name: room for room, some in SECTIONS.values() for name in some}

SUGGESTED: Final = frozenset(SECTIONS["Look into a store"][1])
"""Commands suggested for a misspelled one: only those that change nothing, for the user might run
it unread."""


class LazyGroup(click.Group):
    """A group that imports a command of :data:`COMMANDS` when it is asked for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click says so
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_") + "_" * keyword.iskeyword(cmd_name)
        module = f"stateformat.tools.ckpt.commands.{_ROOMS[cmd_name]}.{_SHARED.get(name, name)}"
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names. An unknown one fails, with a suggestion."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            from .synonyms import MEANT

            meant = MEANT.get(args[0].lower())
            close = [] if meant else get_close_matches(args[0], sorted(SUGGESTED), n=1)
            hint = f" It is `{ctx.command_path} {meant}` here." if meant else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}" + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, none of which is imported for its name."""
        if not incomplete or incomplete[0].isalpha():
            return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        for title, (_, commands) in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="ckpt")
def ckpt() -> None:
    """Inspect, validate, rescale and rewrite checkpoints of stateful dataflows.

    STORE is a path or URL (/data/store, s3://bucket/store). STORE@ID is one of its checkpoints;
    without an id, the newest. STORE@NAME is a pin, or another savepoint below the store. Most
    commands also take the checkpoint folder of a Spark query, and a checkpoint or savepoint of
    Flink; each says so in its --help.

    Exit status: 0 fine; 1 the checkpoint has problems, or a restore, publication or stop was
    refused; 2 misuse; 3 not found, or the storage failed.
    """


def main(arguments: Sequence[str] | None = None, program: str = "ckpt") -> int:
    """Run ``ckpt``, return its exit status. Never raises; a stack trace is for ``--verbose``.

    ``program`` is what a user types for it, as its help says it.
    """
    alone = arguments is None
    if alone:
        # What the imports allocate lives until the end: a garbage collection would take longer than
        # some commands.
        gc.set_threshold(100_000)
        atexit.register(_spare_last_collection)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    if "_CKPT_COMPLETE" in os.environ:
        from .completion import answer

        return answer(ckpt, os.environ["_CKPT_COMPLETE"])
    if alone and runs_sql(arguments):
        ended = confined()
        if isinstance(ended, Failure):
            with contextlib.suppress(OSError):
                show_failure(ended, as_json=_wants_json(arguments))
            return ended.status
        if ended is not None:
            return ended
    with Interrupts() as interrupts:
        return _run(arguments, program, Watch(), interrupts)


def _run(arguments: Sequence[str], program: str, watch: Watch, interrupts: Interrupts) -> int:
    try:
        status = ckpt.main(list(arguments), prog_name=program, standalone_mode=False, obj=watch)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as leaving:
        # click exits so when the reader of standard output is gone, and after printing a shell
        # completion.
        return _reader_left() if leaving.code == 1 else FINE
    except BaseException as error:
        # An interrupted import may raise an ImportError instead.
        failure = interrupted(watch.effect, interrupts.seen) if interrupts.seen else failure_of(error)
        # The reader may be gone, or the disk behind standard output full (which is then what the
        # error says).
        with contextlib.suppress(OSError):
            show_failure(failure, as_json=_wants_json(arguments))
            if watch.level and not interrupts.seen and not isinstance(error, click.ClickException):
                complain(trace_of(error))
        return failure.status
    finally:
        watch.end()
    return FINE if status is None else int(status)


def _spare_last_collection() -> None:
    """Leave what is alive to the end of the process; DuckDB would complain of what is its own."""
    if "_duckdb" not in sys.modules:
        gc.freeze()


def _open_closed_streams() -> None:
    """Point closed streams (``>&-``) at nothing; else the next file opened would become one."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - open as long as the process lives


def _reader_left() -> int:
    """Point standard output at nothing, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether JSON was asked for, even if the command line is otherwise wrong."""
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
