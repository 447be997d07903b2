"""``ckpt watch``: follows a job by its store, a line for each checkpoint.

Job and command share nothing but the store, which is only read: one listing a look, and each new
record once (``history.Follower``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Said, Table, Under

from ...exit_status import FINE
from ...options import Address, SecondsType, Session, Whole, command
from ...output import Document, MakePage

if TYPE_CHECKING:
    from stateformat.history import Came, Seen
    from stateformat.model import Record
    from stateformat.store import CheckpointStore

INTERVAL_SECONDS: Final = 2.0
SILENT_SECONDS: Final = 30.0
"""A job is not called silent sooner, however quickly its checkpoints came before."""
SILENT_DISTANCES: Final = 5
"""A job is silent if nothing has come for so many times the usual distance."""
DISTANCES: Final = 9
"""So many distances between checkpoints say what is usual: their median."""
BATCHES: Final = 3
"""So many of a query's batches that are there are shown at first."""
TRIES: Final = 10
"""The command gives up after so many looks in a row that failed."""


@command("watch", checkpoint="never")
@click.option(
    "--interval",
    type=SecondsType(min=0.05),
    default=INTERVAL_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How often to poll the store.",
)
@click.option("--count", type=Whole(), metavar="N", help="End after N new checkpoints.")
@click.option("--until-end", is_flag=True, help="End when the job has stopped or finished.")
def watch(session: Session, address: Address, *, interval: float, count: int | None, until_end: bool) -> int:
    """Follow a job: a line for each checkpoint.

    It begins with the newest checkpoints, or waits for the first. A line has the time since the
    previous checkpoint and the change in the number of rows. Between the lines it reports when the
    job has stopped, finished or gone on, when another run has taken over, when somebody has rolled
    back, when a record is damaged, and when no checkpoint has appeared for a long time.

    STORE may be the checkpoint location of a Structured Streaming query: a line for each batch,
    with its rows where its state has at most 16 MiB.

    Nothing is written. Each poll is one listing, and a record is read once. Ctrl-C ends it with
    status 130. With --format json each line is an object (docs/json.md).
    """
    from stateformat.backends.foreign.advice import SPARK
    from stateformat.history import Follower

    store = session.store(address)
    is_query = session.system(store) == SPARK
    if not is_query:
        session.refuse_foreign("watch", store)
    follower = QueryFollower(store) if is_query else Follower(store.storage)
    watching = Watching(store.url, follower, session.output.line)
    watching.run(interval, count, until_end=until_end)
    return FINE


class QueryFollower:
    """Follows the batches of a Spark query, as ``history.Follower`` does a store: one listing of
    its commits at a look, and each new batch is read once.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._folder = store.open().storage
        self._known = 0
        self._looked = False
        self.newest: Record | None = None

    def look(self) -> list[Seen]:
        """Return what is new since the last look, oldest first. Raises as opening a batch does."""
        from stateformat.backends.foreign.spark.logs import batches
        from stateformat.history import Came, Passed
        from stateformat.model import CheckpointId

        numbers = [batch + 1 for batch in batches(self._folder, "commits") if batch >= self._known]
        seen: list[Seen] = []
        for number in numbers if self._looked else numbers[-BATCHES:]:
            if self._looked and number > self._known + 1:
                seen.append(Passed(CheckpointId(self._known + 1), CheckpointId(number - 1)))
            record = self._record(number)
            seen.append(Came(record, self.newest, self._looked))
            self._known, self.newest = number, record
        self._looked = True
        return seen

    def _record(self, number: int) -> Record:
        from stateformat.documents import Holdings

        checkpoint = self._store.open(number)
        rows = Holdings(checkpoint.record, checkpoint.counted).rows
        return replace(checkpoint.record, totals=replace(checkpoint.record.totals, rows=rows))


class Watching:
    """Follows one store. ``show`` takes each document with what makes a page of it.

    ``wait``, ``clock`` (seconds, monotonic) and ``now_us`` (µs since 1970) replace time.
    """

    def __init__(
        self,
        url: str,
        follower: Any,
        show: Callable[[Document, MakePage], None],
        *,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._url, self._follower, self._show = url, follower, show
        self._wait, self._clock, self._now_us = wait, clock, now_us
        self._distances: deque[float] = deque(maxlen=DISTANCES)
        """Seconds between checkpoints, by the clocks of their writers."""
        self._last = clock()
        """When the newest came."""
        self._said_silent = 0.0
        """For how long nothing had come when that was said last."""
        self._failures_told = 0
        """So many failures of the job the last record told of."""
        self._ended: str | None = None
        """How the job has ended: an event."""
        self._titled = False
        self._day = ""
        """Of the checkpoint that was shown last."""
        self._new = 0
        self._failures = 0

    def run(self, interval: float, count: int | None = None, *, until_end: bool = False) -> None:
        """Look until ``count`` new checkpoints have come, or the job has ended, or an interrupt.

        Raises what a look raises, after :data:`TRIES` looks in a row.
        """
        self._look(first=True)
        while not (count is not None and self._new >= count) and not (until_end and self._ended):
            self._wait(interval)
            self._look()

    def _look(self, *, first: bool = False) -> None:
        from stateformat.errors import CheckpointError

        try:
            seen = self._follower.look()
        except (CheckpointError, OSError) as error:
            self._failures += 1
            if first or self._failures >= TRIES:
                raise
            if self._failures == 1:
                self._event("unreachable", None, f"the store cannot be read, trying again: {error}")
            return
        if self._failures:
            self._failures = 0
            self._event("reachable", None, "the store can be read again")
        for one in seen:
            self._tell(one)
        if first and self._follower.newest is None and not seen:
            self._event("waiting", None, f"waiting for the first checkpoint of {self._url}")
        elif not seen:
            self._tell_silence()

    def _tell(self, seen: Seen) -> None:
        from stateformat.history import Came, Passed, Unreadable

        if isinstance(seen, Came):
            self._tell_checkpoint(seen)
        elif isinstance(seen, Unreadable):
            advice = f"`ckpt repair {self._url}` says what to do"
            self._event("damaged", seen.checkpoint_id, f"{str(seen.error).rstrip('.')}. {advice}")
        elif isinstance(seen, Passed):
            what = (
                f"checkpoint {seen.first} has"
                if seen.first == seen.last
                else f"checkpoints {seen.first} to {seen.last} have"
            )
            self._event("passed", seen.last, f"{what} come and gone between two polls")
        else:
            number = seen.ref.checkpoint_id
            self._event(
                "overtaken", number, f"the run that published checkpoint {number} was overtaken: it is no checkpoint"
            )

    def _tell_checkpoint(self, came: Came) -> None:
        from stateformat.documents import history_document

        record, before = came.record, came.before
        after_us = None if before is None else record.created_at_us - before.created_at_us
        if self._ended and before is not None:
            self._event("goes_on", record.checkpoint_id, "the job goes on")
        if not self._titled:
            self._titled = True
            job = {"event": "job", "store": self._url, "job_id": record.job_id, "job_name": record.job_name}
            self._show(job, _head)
        document = {
            "event": "checkpoint",
            "store": self._url,
            **history_document(record),
            "after_us": after_us,
            "rows_change": _change(record, before, "rows"),
            "bytes_change": _change(record, before, "bytes"),
        }
        day = words.clock(record.created_at_us)[:10]
        self._show(document, partial(_line, day=day if day != self._day else ""))
        self._day = day
        self._new += came.is_new
        if after_us is not None and after_us > 0:
            self._distances.append(after_us / 1e6)
        # Of what was there before the age is all that is known.
        age = 0.0 if came.is_new else max(0.0, (self._now_us() - record.created_at_us) / 1e6)
        self._last, self._said_silent = self._clock() - age, 0.0
        self._tell_kind(record)

    def _tell_kind(self, record: Record) -> None:
        """What else a record says of its job."""
        from stateformat.model import CheckpointKind
        from stateformat.rescaling import lasting_stop, rescale_of

        number, self._ended = record.checkpoint_id, None
        self._tell_cost(record)
        if record.content_of is not None:
            text = f"repaired: history goes on from checkpoint {record.content_of.checkpoint_id}"
            self._event("repaired", number, text)
        elif record.kind is CheckpointKind.ROLLBACK:
            text = "an older checkpoint was made the newest again; a running job stops at its next checkpoint"
            self._event("rolled_back", number, text)
        elif record.kind in (CheckpointKind.RESCALE, CheckpointKind.REWRITE):
            text = f"published by a {record.kind}; a running job stops at its next checkpoint"
            self._event("replaced", number, text)
        wanted, stop = rescale_of(record), lasting_stop(record)
        if wanted is not None:
            self._event("rescaling", number, f"the job stops here to go on at {wanted.describe()}")
        elif stop is not None:
            self._ended = "stopped"
            mode = stop.mode.replace("_", " ")
            self._event("stopped", number, f"the job has stopped here ({mode})")
        elif record.graph.is_finished:
            self._ended = "finished"
            self._event("finished", number, "the job has finished: every operator has ended")

    def _tell_cost(self, record: Record) -> None:
        """What failures have cost the job, if there is one more."""
        from stateformat.model import FAILURES_PROPERTY

        if FAILURES_PROPERTY not in record.properties:
            self._failures_told = 0
            return
        from stateformat.backends.runtime import cost_in

        cost = cost_in(dict(record.properties))
        if cost.failures > self._failures_told:
            text = f"the job went on after a failure; since it was started, {cost.words}"
            self._event("failed", record.checkpoint_id, text)
        self._failures_told = cost.failures

    def _tell_silence(self) -> None:
        silence = self._clock() - self._last
        usual = sorted(self._distances)[len(self._distances) // 2] if self._distances else None
        if self._ended or self._follower.newest is None or usual is None:
            return
        if silence < max(SILENT_SECONDS, SILENT_DISTANCES * usual, 2 * self._said_silent):
            return
        self._said_silent = silence
        number = self._follower.newest.checkpoint_id
        text = (
            f"no checkpoint for {words.elapsed(silence)}, though they came every {words.elapsed(usual)}: nothing has "
            "changed, or the job does not run"
        )
        self._event("silent", number, text)

    def _event(self, event: str, checkpoint_id: int | None, message: str) -> None:
        self._show({"event": event, "store": self._url, "checkpoint_id": checkpoint_id, "message": message}, _sentence)


def _change(record: Record, before: Record | None, name: str) -> int | None:
    now, past = (None if one is None else getattr(one.totals, name) for one in (record, before))
    return None if now is None or past is None else now - past


# ---- lines


def _table(rows: Sequence[Sequence[str]], *, titled: bool = False) -> Table:
    """A part of the table; its columns never move, since the lines before are written already."""
    figures = [
        Column(title, right=True, least=least, narrow=Column(title, right=True, least=min(least, 9)))
        for title, least in (("id", 5), ("UTC", 8), ("after", 6), ("rows", 11), ("change", 11), ("bytes", 9))
    ]
    finished = Column("finished", flexible=True, narrow=Column("finished", optional=1))
    return Table([*figures, finished], rows, titled=titled)


def _head(document: Document) -> Iterator[Block]:
    yield Heading("Watching")
    job = words.named(document["job_id"], document["job_name"])
    yield Facts([("store", document["store"]), ("job", job)])
    yield _table([], titled=True)


def _line(document: Document, *, day: str) -> Iterator[Block]:
    """The line of a checkpoint, below the ``day``, if that is another than before."""
    after, change, totals = document["after_us"], document["rows_change"], document["totals"]
    ended = words.operators_finished(document)
    other = "" if document["kind"] == "checkpoint" else f", {document['kind']}"
    row = (
        str(document["checkpoint_id"]),
        words.clock(document["created_at_us"])[11:],
        "" if after is None else words.elapsed(max(after, 0) / 1e6),
        words.count(totals["rows"]),
        "" if change is None else f"{change:+,}",
        words.size(totals["bytes"]),
        ended + other,
    )
    yield Under("", [*([Note(Said(day, "dim"))] if day else []), _table([row])])


def _sentence(document: Document) -> Iterator[Block]:
    is_problem = document["event"] in ("damaged", "overtaken", "silent", "unreachable")
    yield Note(words.sentence(document["message"]), "✗" if is_problem else "·", "bad" if is_problem else "")
