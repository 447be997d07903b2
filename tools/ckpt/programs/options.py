"""Options of programs that run a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ..options import Address, AddressType, AgeType, SecondsType, Whole, is_local, options_for

F = TypeVar("F", bound=Callable[..., Any])


class Microseconds(SecondsType):
    """Parses a number of seconds to µs."""

    def __init__(self, least_seconds: float) -> None:
        super().__init__(min=least_seconds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return int(1e6 * super().convert(value, param, ctx))


class KeepType(click.ParamType["int | None"]):
    """Parses a number of checkpoints, and ``all``, which is None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "all":
            return None
        if not str(value).isdecimal() or not 1 <= len(str(value).lstrip("0")) < 16:
            self.fail(f"{str(value)!r:.60} is not a number of checkpoints; give one from 1 on, or all", param, ctx)
        return int(value)


def run_options(*others: Callable[[Any], Any]) -> Callable[[F], F]:
    """Adds the options that both programs have to a command; ``others`` come behind the epoch's."""
    options: tuple[Callable[[Any], Any], ...] = (
        click.option("--parallelism", type=Whole(), help="For every operator without one of its own."),
        click.option("--rows-per-epoch", "checkpoint_rows", type=Whole(), help="The most rows in an epoch."),
        click.option(
            "--seconds-per-epoch",
            "checkpoint_interval_us",
            type=Microseconds(1e-3),
            help="The longest epoch. [default: 10]",
        ),
        *others,
        click.option("--keep", type=KeepType(), help="Checkpoints to keep. [default: 10 in a new store]"),
        click.option(
            "--keep-for", "keep_for_us", type=AgeType(), help="Also keep what is younger than AGE: 7d, 12h, 30m."
        ),
        click.option("--max-restarts", type=Whole(0), help="Failures allowed in ten checkpoints. [default: 3]"),
        click.option(
            "--from", "start_from", type=AddressType(), help="Begin an empty STORE with this checkpoint's content."
        ),
        click.option(
            "--grace-seconds",
            "grace",
            type=SecondsType(min=0),
            default=25,
            show_default=True,
            help="Time for the checkpoint that SIGTERM asks for.",
        ),
        click.option("--claim", is_flag=True, help="STORE is a savepoint: run in it, and let it expire in time."),
        click.option("--resume", is_flag=True, help="Go on after a stop without drain."),
        click.option(
            "--drop", multiple=True, metavar="OPERATOR[/STATE[.COLUMN]]", help="State or a column to give up."
        ),
        click.option("--record-origin", "origin", is_flag=True, help="Also record the host and user of this program."),
        click.option(
            "--progress", type=click.Choice(["text", "json", "none"]), default="text", show_default=True, help=_PROGRESS
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_PROGRESS = "How each checkpoint is shown; json also reports the end."


def runtime_options(
    store: str, job: object, storage: Mapping[str, Any], chosen: Mapping[str, Any], start_from: Address | None
) -> dict[str, Any]:
    """What a runtime takes, by the values of :func:`run_options`; ``keep`` must be among them.

    Args:
        store: the URL of the job's store.
        job: what records say ran the job.
        storage: the storage options of the command line.
        chosen: the values of the options; None where the user chose nothing.
        start_from: the value of ``--from``.
    """
    options = {name: value for name, value in chosen.items() if value is not None}
    # By default savepoints lie below the store.
    options |= {"savepoint_options": {} if is_local(store) else storage, "program": str(job)}
    if _is_given("keep"):
        options["keep"] = chosen["keep"]
    if start_from is not None:
        options["start_from"] = str(start_from)
        options["start_from_options"] = options_for(start_from.url, storage, (store,))
    return options


def _is_given(name: str) -> bool:
    """Whether the user gave an option of the command that runs."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT)
