"""What users write: dataflows of sources, operators and sinks.

A job reads like its description::

    flow = Dataflow("flights")
    planes = flow.source(ParquetSource("planes/"), uid="planes")
    flights = flow.source(ParquetSource("flights/"), uid="flights", event_time="departed_at")
    delays = flights.key_by("tailnum").aggregate({"delay": ("dep_delay", "mean")}, uid="delays")
    delays.apply(FileSink("out/"), uid="out")

Operators process Arrow record batches. An object given to a dataflow is a prototype: every subtask
works on its own shallow copy, made before :meth:`Operator.open`, so create what changes in
``open``. ``docs/dataflow.md`` says what may be lost of a finished subtask, and where to keep what
must not be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Required, TypedDict, Unpack

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Partitioner, brief, shortened
from stateformat.model import TimerClock
from stateformat.record import graph_members
from stateformat.states import Columns, as_schema

from .api import Descriptor, Duration, EventTime, Operator, Source, TwoPhaseCommitSink, microseconds
from .casting import check_columns
from .compile import Job, compile_job, described
from .graph import graph_of
from .operators.aggregate import Aggregate
from .operators.deduplicate import Deduplicate
from .operators.per_key.operator import ApplyPerKey
from .operators.row_steps import Filter, Map, Predicate, Select
from .operators.window import TumblingWindow
from .steps import Feedback, Input, Step, Steps


class StepOptions(TypedDict, total=False):
    """The options of every step; see :meth:`Dataflow.apply`."""

    uid: Required[str]
    name: str
    parallelism: int | None
    max_parallelism: int | None
    chain: bool


class _Parallelism(TypedDict, total=False):
    parallelism: int | None
    per_operator: Mapping[str, int]


class GraphOptions(_Parallelism, total=False):
    """What of a runtime's options the graph depends on: ``parallelism``, ``per_operator`` (by uid),
    ``unaligned``.
    """

    unaligned: bool


class Loop(Feedback):
    """A feedback edge. It is the last input of its head; :meth:`close` sets where it begins.

    It carries no watermarks and no end of input.
    """

    def __init__(self, flow: Dataflow, schema: pa.Schema) -> None:
        super().__init__(schema)
        self._flow = flow

    def __repr__(self) -> str:
        return brief(self, self._flow.job_id)

    def stream(self) -> Stream:
        """Return the records that are fed back, as an input of the head."""
        return Stream(self._flow, Input(self, self.schema))

    def key_by(self, *columns: str) -> Stream:
        """Return the records that are fed back, partitioned by key; see :meth:`Stream.key_by`."""
        return self.stream().key_by(*columns)

    def rebalance(self) -> Stream:
        """Return the records that are fed back, to all subtasks in turn."""
        return self.stream().rebalance()

    def close(self, tail: Stream) -> None:
        """Feed back what ``tail`` emits.

        Raises ``InvalidInput`` if the loop is already closed, if ``tail`` is the output of a loop,
        or if its columns are not the loop's.
        """
        if self.tail is not None:
            raise InvalidInput(f"the loop is closed by {self.tail!r} already. Make a loop of its own for each tail.")
        if isinstance(tail.input.source, Feedback):
            raise InvalidInput("a loop cannot be closed by a loop. Give the output of an operator.")
        if tail.input.schema != self.schema:
            raise InvalidInput(
                f"the loop was opened with columns {self.schema.names} and {tail.input.source!r} emits "
                f"{tail.input.schema.names}, or of other types. They must be the same.",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        self.tail = tail.input.source


class Dataflow(Steps):
    """A job: its steps and their connections.

    ``parallelism``: the default for steps without their own. None: that of the checkpoint that the
    job resumes from, and 1 in its first run.
    """

    def __init__(self, job_id: str, *, parallelism: int | None = None, name: str = "") -> None:
        if not job_id:
            raise InvalidInput("the job id is empty. A store belongs to one job, by its id.")
        _check_text("the job id", job_id)
        _check_text(f"the name of job {job_id!r}", name)
        super().__init__(job_id, name, parallelism)

    def __repr__(self) -> str:
        parallelism = "" if self.parallelism is None else f", parallelism {self.parallelism}"
        return f"Dataflow({shortened(self.job_id)}, {len(self.steps)} steps{parallelism})"

    def _repr_html_(self) -> str:
        """The graph of a first run, and its states, for notebooks."""
        from stateformat.pages.checkpoint import dataflow_page
        from stateformat.pages.html import notebook

        return notebook(f"Dataflow {self.name or self.job_id}", lambda: dataflow_page(self.document()))

    def graph(self, **options: Unpack[GraphOptions]) -> JobGraph:
        """Return the job graph that a first run with these options starts with.

        Raises ``InvalidInput`` for anything wrong with the dataflow, its states included.
        """
        return self._compiled(**options).graph

    def document(self, **options: Unpack[GraphOptions]) -> dict[str, Any]:
        """Return the graph of :meth:`graph` and the states as JSON, named as in a record (SPEC.md
        section 3.2).

        Members: ``job_id``, ``job_name``, ``operators``, ``edges``, ``states``, ``warnings`` (a
        sentence for each operator that waits for an event time that never comes). Raises as
        :meth:`graph` does.
        """
        job = self._compiled(**options)
        members = graph_members(job.graph, job.states)
        return {"job_id": self.job_id, "job_name": self.name, **members, "warnings": [*job.warnings]}

    def describe(self, **options: Unpack[GraphOptions]) -> str:
        """Return :meth:`document` as text: operators in order with their inputs, states with their
        columns, and warnings.
        """
        return described(self.document(**options))

    def _compiled(self, *, unaligned: bool = False, **options: Unpack[_Parallelism]) -> Job:
        return compile_job(self, graph_of(self, unaligned=unaligned, **options), unaligned=unaligned)

    def source(
        self,
        source: Source,
        *,
        uid: str,
        name: str = "",
        parallelism: int | None = None,
        event_time: EventTime | str | None = None,
        idle_after: Duration | None = None,
    ) -> Stream:
        """Read a source. With ``event_time``, its readers emit watermarks.

        ``idle_after``: a split or reader without rows for this much processing time (µs, or a
        timedelta) no longer holds back event time. From its next row on it does again; rows older
        than the event time reached by then are late. By default event time waits for every split.

        Raises ``InvalidInput`` for ``event_time`` that is not a column of the source, and for
        ``idle_after`` without ``event_time``.
        """
        if not isinstance(source, Source):
            raise InvalidInput(f"source {uid!r} is {source!r}. Give an instance of a Source.")
        _check_schema(f"the schema of source {uid!r}", source.schema)
        timed = EventTime(event_time) if isinstance(event_time, str) else event_time
        if timed is not None and not isinstance(timed, EventTime):
            raise InvalidInput(
                f"the event time of source {uid!r} is {timed!r}. Give the name of a column, or an EventTime."
            )
        if timed is not None and timed.column not in source.schema.names:
            raise InvalidInput(
                f"source {uid!r} has no column {timed.column!r}. It has {', '.join(source.schema.names)}."
            )
        if idle_after is not None and timed is None:
            raise InvalidInput(f"source {uid!r} has idle_after but no event time. Give event_time too.")
        step = Step(
            uid,
            source,
            (),
            source.schema,
            name=name,
            parallelism=parallelism,
            event_time=timed,
            idle_after=None if idle_after is None else microseconds(f"idle_after of source {uid!r}", idle_after),
        )
        return self._add(step)

    def apply(
        self,
        operator: Operator,
        *inputs: Stream,
        uid: str,
        name: str = "",
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        chain: bool = True,
    ) -> Stream:
        """Apply an operator to its inputs, in order.

        - ``uid``: identifies its state permanently, so choose it with care.
        - ``name``: for pages and logs; need not be unique.
        - ``parallelism``, ``max_parallelism``: how many subtasks and key groups; derived if not
          given.
        - ``chain`` False: it runs in a task of its own, or as the first operator of one.

        Raises ``InvalidInput`` for a uid that is taken, and for inputs that do not fit.
        """
        if not isinstance(operator, Operator):
            raise InvalidInput(f"operator {uid!r} is {operator!r}. Give an instance of an Operator.")
        if not inputs:
            raise InvalidInput(f"operator {uid!r} has no input. Give at least one stream.")
        for stream in inputs:
            if not isinstance(stream, Stream):
                raise InvalidInput(
                    f"an input of {uid!r} is {stream!r}. Give a stream, which source() and apply() return."
                )
            if stream.flow is not self:
                raise InvalidInput(
                    f"an input of {uid!r} belongs to dataflow {stream.flow.job_id!r}, not to {self.job_id!r}"
                )
        if any(step.logic is operator for step in self.steps.values()) and not isinstance(operator, TwoPhaseCommitSink):
            # It keeps what it learns of its inputs. A sink stays the one that the user asks.
            operator = copy(operator)
        schema = operator.output_schema(*(stream.schema for stream in inputs))
        _check_schema(f"output_schema() of operator {uid!r}", schema)
        edges = tuple(stream.input for stream in inputs)
        return self._add(Step(uid, operator, edges, schema, name, parallelism, max_parallelism, chain))

    def loop(self, schema: Columns) -> Loop:
        """Open a loop that feeds back records of this schema."""
        return Loop(self, as_schema(schema))

    def _add(self, step: Step) -> Stream:
        if not step.uid:
            raise InvalidInput("the uid of a step is empty. It names its state for ever, so choose it with care.")
        _check_text("the uid of a step", step.uid)
        _check_text(f"the name of step {step.uid!r}", step.name)
        if step.uid in self.steps:
            raise InvalidInput(f"two steps have the uid {step.uid!r}. Each needs its own: its state is found by it.")
        self.steps[step.uid] = step
        return Stream(self, Input(step.uid, step.schema))


@dataclass(frozen=True)
class Stream:
    """What a step emits, and how it reaches the next one. Immutable: methods return new streams.

    The methods named after ready-made operators take the options of :meth:`Dataflow.apply`. Keyed
    operators use the columns of :meth:`key_by`.
    """

    flow: Dataflow = field(repr=False)
    input: Input

    @property
    def schema(self) -> pa.Schema:
        """The columns of the records."""
        return self.input.schema

    def key_by(self, *columns: str) -> Stream:
        """Send records of the same key to the same subtask: the owner of its key group."""
        missing = [column for column in columns if column not in self.schema.names]
        if missing or not columns:
            raise InvalidInput(
                f"cannot key {self.input.source!r} by {list(columns)}. Its columns are {', '.join(self.schema.names)}."
            )
        return self._with(Partitioner.HASH, columns)

    def rebalance(self) -> Stream:
        """Send batches to all subtasks in turn."""
        return self._with(Partitioner.REBALANCE)

    def rescale(self) -> Stream:
        """Send batches in turn to a few nearby subtasks."""
        return self._with(Partitioner.RESCALE)

    def forward(self) -> Stream:
        """Keep records in their subtask; both sides must have the same parallelism."""
        return self._with(Partitioner.FORWARD)

    def broadcast(self) -> Stream:
        """Send every record to every subtask."""
        return self._with(Partitioner.BROADCAST)

    def apply(self, operator: Operator, *others: Stream, **step: Unpack[StepOptions]) -> Stream:
        """Apply an operator to this stream (input 0) and others. See :meth:`Dataflow.apply`."""
        return self.flow.apply(operator, self, *others, **step)

    def map(
        self, fn: Callable[[pa.RecordBatch], pa.RecordBatch], schema: Columns | None = None, **step: Unpack[StepOptions]
    ) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.row_steps.Map`."""
        return self.apply(Map(fn, schema), **step)

    def filter(self, predicate: Predicate, **step: Unpack[StepOptions]) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.row_steps.Filter`."""
        return self.apply(Filter(predicate), **step)

    def select(self, *columns: str | Mapping[str, str], **step: Unpack[StepOptions]) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.row_steps.Select`."""
        return self.apply(Select(*columns), **step)

    def aggregate(
        self, aggregates: Mapping[str, tuple[str, str]], *, emit: str = "updates", **step: Unpack[StepOptions]
    ) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.aggregate.Aggregate`."""
        return self.apply(Aggregate(self.input.key_columns, aggregates, emit=emit), **step)

    def window(
        self,
        size_us: int,
        time: str,
        aggregates: Mapping[str, tuple[str, str]],
        *,
        lateness_us: int = 0,
        **step: Unpack[StepOptions],
    ) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.window.TumblingWindow`."""
        keys = self.input.key_columns
        return self.apply(TumblingWindow(keys, size_us, time, aggregates, lateness_us=lateness_us), **step)

    def deduplicate(
        self, *, within: Duration | None = None, time: str | None = None, **step: Unpack[StepOptions]
    ) -> Stream:
        """See :class:`~stateformat.backends.dataflow.operators.deduplicate.Deduplicate`."""
        return self.apply(Deduplicate(self.input.key_columns, within=within, time=time), **step)

    def apply_per_key(
        self,
        fn: Callable[..., Any],
        *,
        output: Columns = (),
        state: Columns | Descriptor | Sequence[Descriptor] | None = None,
        timers: TimerClock | None = None,
        on_timer: Callable[..., Any] | None = None,
        **step: Unpack[StepOptions],
    ) -> Stream:
        """Call a plain Python function for each key.

        See :class:`~stateformat.backends.dataflow.operators.per_key.operator.ApplyPerKey`, also for
        the cost per key.
        """
        keys = self.input.key_columns
        if not keys:
            raise InvalidInput("apply_per_key needs a keyed stream. Call key_by() with the key's columns first.")
        per_key = ApplyPerKey(keys, fn, output=output, state=state, timers=timers, on_timer=on_timer)
        return self.apply(per_key, **step)

    def _with(self, partitioner: Partitioner, key_columns: tuple[str, ...] = ()) -> Stream:
        return Stream(self.flow, replace(self.input, partitioner=partitioner, key_columns=key_columns))


def _check_text(what: str, text: object) -> None:
    """Refuse now what the record of a checkpoint would refuse when the job has run for long."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} is {text!r}. It must be a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} is {text!r}, which is not valid text: {error}. Name it otherwise.") from error


def _check_schema(what: str, schema: object) -> None:
    if not isinstance(schema, pa.Schema):
        raise InvalidInput(f"{what} is {schema!r}. It must be a pa.Schema.", kind=ErrorKind.SCHEMA_MISMATCH)
    check_columns(what, schema)
