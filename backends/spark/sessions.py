"""Make a Spark session that can run stateformat's code. Spark Classic only, not Connect.

Four things go wrong with a session made by hand:

- Spark starts its Python workers with the ``python3`` on PATH. Here they run the driver's
  interpreter, unless the user has set ``PYSPARK_PYTHON``.
- It puts the working directory first on their ``sys.path``, where a folder could shadow our
  package. ``PYTHONSAFEPATH=1`` in the workers prevents it. Where the driver finds modules of one's
  own (beside its program, in the working directory) comes last instead.
- Workers on unix domain sockets write a stack trace to the terminal when they have been idle for a
  minute (PySpark 4.3), so they use TCP.
- A SQL shuffle whose map task runs again may give different readers different orders, so both
  settings of the order-independent checksum are on.

Under ``spark-submit``, a user or a scheduler ends the JVM. Python is its child and gets no signal.
In other programs the JVM is a child of Python, and gets signals sent to the whole group (systemd).
Spark's own handler would stop Spark at once, during a job's checkpoint. So a handler in the JVM
replaces it and calls Python, which decides what happens to the job.

``docs/spark.md`` says what the executors of a cluster must have.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import stateformat
from stateformat.errors import ErrorKind, InvalidInput

from ..runtime import Options, RuntimeOptions, check_whole
from .worker_process import PATH_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession


_CHECKSUMS: Final[Mapping[str, str]] = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}

EVERYWHERE: Final[Mapping[str, str]] = {
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    "spark.python.unix.domain.socket.enabled": "false",
    **_CHECKSUMS,
}
"""Settings of a session that stateformat makes, for any master."""

JOB: Final[Mapping[str, str]] = {
    **_CHECKSUMS,
    # Rows may be megabytes, so a batch for Python is limited by bytes, not only by the number of
    # rows.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "64m",
    # Our functions return Arrow's small types.
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    # Our stages have the right number of partitions, so planning them again would only cost time.
    "spark.sql.adaptive.enabled": "false",
}
"""SQL settings of stateformat's own jobs, whatever the user's session has."""

_QUIET = Path(__file__).with_name("log4j2-quiet.properties")

LOCAL: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET.as_uri()}",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings for a session on this machine only: quiet, and bound to the loopback address."""


def configure(builder: Any) -> Any:
    """Set what every session needs on a ``SparkSession.builder``, and return the builder.

    Sets ``PYSPARK_PYTHON`` to this interpreter if the user has not set it. The caller sets memory,
    name, and before this the master.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(EVERYWHERE)
    if _daemon_finds_us(builder):
        settings["spark.python.daemon.module"] = "stateformat.backends.spark.worker_process"
        settings[f"spark.executorEnv.{PATH_VARIABLE}"] = _path_of_driver()
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


def _daemon_finds_us(builder: Any) -> bool:
    """Return whether workers find our package before their first task, as this process does.

    What ``--py-files`` carries, they find only within a task: on a cluster, and from an archive.
    """
    from pyspark import SparkConf, SparkContext

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()  # Otherwise the next line does not see what was submitted.
    master = builder._options.get("spark.master") or SparkConf().get("spark.master", "")
    return str(master).startswith("local") and Path(stateformat.__file__).exists()


def _path_of_driver() -> str:
    """Return the directories of the driver's ``sys.path`` that no environment of Python's has."""
    installed = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    places = dict.fromkeys(str(Path(place).absolute()) for place in (*sys.path, ""))
    return os.pathsep.join(
        place for place in places if not any(Path(place).is_relative_to(prefix) for prefix in installed)
    )


def local_session(app_name: str = "stateformat", **conf: str) -> SparkSession:
    """Return the active session, or a new one on all cores of this machine.

    ``conf`` overrides stateformat's settings:
    ``local_session("job", **{"spark.driver.memory": "4g"})``. Raises ``InvalidInput`` (kind
    ``MISSING_DEPENDENCY``) if Java or pyspark is missing.
    """
    active = active_session()
    if active is not None:
        return check(active)
    _check_java()
    builder = configure(_session_class().builder.master("local[*]")).appName(app_name)
    for name, value in {**LOCAL, **conf}.items():
        builder = builder.config(name, value)
    return _start(builder)


def session(app_name: str = "stateformat") -> SparkSession:
    """Return the active session; else, under ``spark-submit``, its session; else a local one."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return local_session(app_name)
    active = active_session()
    if active is not None:
        return check(active)
    builder = configure(_session_class().builder).appName(app_name)
    return _start(builder if _log_is_configured() else builder.config("spark.log.level", "WARN"))


@contextmanager
def lent_session(app_name: str = "stateformat") -> Iterator[SparkSession]:
    """Provide :func:`session` for a block. Stops it afterwards, unless it was active before."""
    before = active_session()
    spark = session(app_name)
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()


def job_session(spark: SparkSession) -> SparkSession:
    """Return a session on the same context, with the user's views and settings, and :data:`JOB`."""
    ours: SparkSession = type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())
    for name, value in JOB.items():
        ours.conf.set(name, value)
    return ours


def check(active: SparkSession) -> SparkSession:
    """Return the same session if our code can run on it. Raises ``InvalidInput`` if not.

    It must be a session of Spark Classic that has not been stopped, and its workers on this machine
    must run our interpreter and find our package. The machines of a cluster cannot be checked.
    """
    if not isinstance(active, _session_class()):
        raise _unusable(
            f"{active!r} is not a session of Spark Classic. Give one, as of stateformat.backends.spark.local_session()."
        )
    context = active.sparkContext
    if _is_stopped(context):
        raise _unusable(f"The session of {context.appName!r} has been stopped. Make another.")
    if not context.master.startswith("local"):
        return active
    worker, own = Path(shutil.which(context.pythonExec) or context.pythonExec), Path(sys.executable)
    # The same interpreter of the same environment: links may differ in name, not in directory.
    if (worker.parent.resolve(), worker.resolve()) != (own.parent.resolve(), own.resolve()):
        raise _unusable(
            f"The active Spark session starts its Python workers with {worker}, and this program runs on "
            f"{sys.executable}. Set PYSPARK_PYTHON to the latter before the session is created, or make it with "
            "stateformat.backends.spark.session."
        )
    here = Path.cwd()
    is_ours = here.resolve() == Path(stateformat.__file__).resolve().parents[1]
    shadows = (here / "stateformat").is_dir() or (here / "stateformat.py").exists()
    if shadows and not (is_ours or context.environment.get("PYTHONSAFEPATH")):
        raise _unusable(
            f"The active Spark session lets its workers import from {here}, which has a stateformat of its own. Set "
            "spark.executorEnv.PYTHONSAFEPATH=1 when the session is created, or run from another directory."
        )
    return active


def _unusable(message: str) -> InvalidInput:
    return InvalidInput(message, kind=ErrorKind.MISSING_DEPENDENCY)


def _is_stopped(context: Any) -> bool:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except (Py4JError, OSError):
        return True  # Its JVM is gone.


def _session_class() -> Any:
    """Return ``SparkSession``. Raises ``InvalidInput`` without pyspark, and for Spark Connect."""
    try:
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote
    except ImportError as error:
        raise _unusable("Spark is not installed in this environment: pip install 'stateformat[spark]'") from error
    if is_remote():
        raise _unusable(
            "This program is set up for Spark Connect (SPARK_REMOTE), which runs none of our code on the driver. Use "
            "Spark Classic: unset SPARK_REMOTE, or submit the job with spark-submit."
        )
    return SparkSession


def active_session() -> SparkSession | None:
    """Return the session of this thread, or one made by another thread of this process."""
    session_class = _session_class()
    from pyspark.errors import PySparkRuntimeError

    try:
        found: SparkSession = session_class.active()
    except PySparkRuntimeError:
        return None
    return found


def _log_is_configured() -> bool:
    """Return whether the user has set what Spark logs: a log4j file, or ``spark.log.level``.

    Otherwise Spark writes some hundred lines per job, and our lines would be lost among them. Call
    this only under ``spark-submit``, where a JVM already runs.
    """
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    assert SparkContext._jvm is not None
    log = SparkContext._jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
    return SparkConf().contains("spark.log.level") or "log4j2-defaults" not in str(log.getConfigurationSource())


def _check_java() -> None:
    """Raise ``InvalidInput`` if Java is missing; Spark's own message is a stack trace."""
    home = os.environ.get("JAVA_HOME")
    if home and not (Path(home) / "bin" / "java").exists():
        raise _unusable(f"JAVA_HOME is {home}, which has no bin/java. Point it to a Java 17 or newer, or unset it.")
    if not home and shutil.which("java") is None:
        raise _unusable(
            "Spark needs Java 17 or newer: there is no java on PATH and no JAVA_HOME. Install a JRE (Debian: "
            "openjdk-17-jre-headless)."
        )


def _start(builder: Any) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError

    try:
        made: SparkSession = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise _unusable(
            "Java started and ended before Spark was up (see its output above). Spark 4.3 needs Java 17 or newer."
        ) from error
    return made


@dataclass(frozen=True)
class SparkOptions(Options):
    """:class:`~stateformat.backends.runtime.options.Options` for Spark.

    Every epoch ends in a checkpoint, unless nothing has changed in it. So
    ``checkpoint_interval_us`` limits how long sources read in an epoch, and ``checkpoint_rows``
    limits the rows of all sources together. An epoch ends earlier if there are no more rows. The
    next epoch begins at once if there is work other than rows.
    """

    least_epoch_us: int = 0
    """The least time in µs from the start of one epoch to the next, if only rows are awaited."""
    idle_us: int = 1_000_000
    """How long the job waits after an epoch that found nothing to do, in µs."""
    cache_bytes: int = 2 << 30
    """How many bytes of state a Python worker keeps in memory. The rest is on local disk."""

    def __post_init__(self) -> None:
        """Raise ``InvalidInput`` for invalid numbers, and for options that Spark does not have."""
        super().__post_init__()
        check_whole(self, least_epoch_us=0, idle_us=0, cache_bytes=0)
        if self.unaligned:
            raise InvalidInput(
                "unaligned has no meaning on Spark: no channel holds anything when an epoch ends. Leave it out."
            )


class SparkRuntimeOptions(RuntimeOptions, total=False):
    """The keyword arguments of ``SparkRuntime``: fields of ``SparkOptions`` and ``Schedule``."""

    least_epoch_us: int
    idle_us: int
    cache_bytes: int


logger = logging.getLogger(__name__)


class _Handler:
    """A ``sun.misc.SignalHandler`` in Python."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def handle(self, number: Any) -> None:  # noqa: ARG002 - there is one signal
        self._heard()

    class Java:
        implements = ("sun.misc.SignalHandler",)


def forward_sigterm(spark: SparkSession, heard: Callable[[], None]) -> Callable[[], None]:
    """Call ``heard``, in a thread, for each SIGTERM to the JVM, instead of Spark's handler.

    Returns a function that restores Spark's handler. A JVM that allows no other handler keeps it.
    """
    from pyspark.java_gateway import ensure_callback_server_started

    context = spark.sparkContext
    try:
        ensure_callback_server_started(context._gateway)
        misc = context._jvm.sun.misc
        term = misc.Signal("TERM")
        before = misc.Signal.handle(term, _Handler(heard))
    except Exception as error:
        logger.warning("SIGTERM to the JVM of Spark will end the job without a checkpoint: %s", error)
        return lambda: None

    def undo() -> None:
        try:
            misc.Signal.handle(term, before)
        except Exception as error:  # The session may be gone, and the JVM with it.
            logger.debug("the JVM keeps its handler: %s", error)

    return undo
