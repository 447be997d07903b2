"""How a Spark session is made so that our code runs on it.

Theory of operation. Four things go wrong with a session made by hand, and each costs an afternoon:

- Spark starts its Python workers with the ``python3`` on PATH, which knows neither us nor pyarrow. Here they are the
  driver's own interpreter, unless the user has chosen (``PYSPARK_PYTHON``).
- It starts them with ``python -m``, which puts the working directory first on ``sys.path``: a directory with a
  ``tools/`` or ``backends/`` of its own would take the place of ours. ``PYTHONSAFEPATH=1`` in the workers prevents it
  (Python 3.11+). Modules that a job imports on workers come from installed packages or from ``addPyFile``.
- Workers that talk to the JVM over unix domain sockets write a stack trace to the user's terminal when they have idled for
  a minute (a broken pipe that nobody handles; PySpark 4.3). A rewrite gains nothing from them, so it is TCP, said so.
- A shuffle whose map task runs again may give some readers another order than others. Both settings of the
  order-independent checksum are stated, so that a cluster's defaults cannot take them away.

On a cluster the package must be importable on the executors: installed in their environment, in the archive given by
``--archives``, or as the wheel, renamed to .zip, given by ``--py-files``; and the store must have an address that they all reach.
A session that is active already is used as it is, after its Python has been checked. Spark Classic only, not Connect.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

EVERYWHERE: Final[Mapping[str, str]] = {
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    "spark.python.unix.domain.socket.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}
"""Settings of a session that we make, for any master."""

_QUIET = Path(__file__).with_name("log4j2-quiet.properties")

JOB: Final[Mapping[str, str]] = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
    # Rows may be megabytes: a batch for Python is bounded by bytes, never by the number of rows alone.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "64m",
    # The columns of an exchange have the types of ``mail.ROWS``.
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    # Our stages have as many partitions as they should; planning them again between stages only takes time.
    "spark.sql.adaptive.enabled": "false",
}
"""SQL settings of our own jobs, whatever the user's session says."""

LOCAL: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_QUIET.as_uri()}",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings for a session on this machine only: quiet, and bound to the loopback address."""

OUR_PACKAGES: Final = ("stateformat", "redistribution", "backends", "tools")


def configure(builder: Any) -> Any:
    """Set on a ``SparkSession.builder`` what every session needs; the caller sets master, memory and name.

    Also sets ``PYSPARK_PYTHON`` to this interpreter where the user has not set it. Returns the builder.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in EVERYWHERE.items():
        builder = builder.config(name, value)
    return builder


def local_session(app_name: str = "stateformat", **conf: str) -> SparkSession:
    """A session on all cores of this machine, or the active one where there is one.

    ``conf`` goes before our settings: ``local_session("job", **{"spark.driver.memory": "4g"})``. Raises
    ``InvalidInput`` (kind ``MISSING_DEPENDENCY``) where Java or pyspark is missing.
    """
    session_class = _session_class()
    active = _active(session_class)
    if active is not None:
        return check(active)
    _check_java()
    builder = configure(session_class.builder).appName(app_name).master("local[*]")
    for name, value in {**LOCAL, **conf}.items():
        builder = builder.config(name, value)
    return _start(builder)


def session(app_name: str = "stateformat") -> SparkSession:
    """The session to run a job on: the active one; under ``spark-submit`` one as submitted; else a local one."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return local_session(app_name)
    session_class = _session_class()
    active = _active(session_class)
    if active is not None:
        return check(active)
    builder = configure(session_class.builder).appName(app_name)
    return _start(builder if _log_is_configured() else builder.config("spark.log.level", "WARN"))


@contextmanager
def lent_session(app_name: str = "stateformat") -> Iterator[SparkSession]:
    """:func:`session` for a block; stopped behind it, unless it was there before."""
    before = _active(_session_class())
    spark = session(app_name)
    try:
        yield spark
    finally:
        if before is None:
            spark.stop()


def job_session(spark: SparkSession) -> SparkSession:
    """A session beside the user's, on the same context, with their views and settings but for those of :data:`JOB`; theirs stays
    as it is.
    """
    ours: SparkSession = type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())
    for name, value in JOB.items():
        ours.conf.set(name, value)
    return ours


def check(active: SparkSession) -> SparkSession:
    """The same session, if it is one, and goes, and its workers on this machine run our interpreter and find our packages; else
    ``InvalidInput``.

    Sessions on a cluster are believed: what its machines have installed cannot be seen from here.
    """
    if not isinstance(active, _session_class()):
        raise InvalidInput(
            f"{active!r} is no session of Spark Classic; give one, as of backends.spark.session.local_session()",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    context = active.sparkContext
    if _is_stopped(context):
        raise InvalidInput(
            f"the session of {context.appName!r} has been stopped; make another", kind=ErrorKind.MISSING_DEPENDENCY
        )
    if not context.master.startswith("local"):
        return active
    worker = shutil.which(context.pythonExec) or context.pythonExec
    if not _same_interpreter(worker, sys.executable):
        raise InvalidInput(
            f"the active Spark session starts its Python workers with {worker}, this program runs on {sys.executable}; "
            "set PYSPARK_PYTHON to the latter before the session is created, or make it with backends.spark.session",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    shadows = [] if context.environment.get("PYTHONSAFEPATH") else _shadows(Path.cwd())
    if shadows:
        raise InvalidInput(
            f"the active Spark session lets its workers import from {Path.cwd()}, which has {', '.join(shadows)} of its "
            "own; set spark.executorEnv.PYTHONSAFEPATH=1 when the session is created, or run from another directory",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return active


def _is_stopped(context: Any) -> bool:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except (Py4JError, OSError):
        return True  # Its JVM is gone.


def _same_interpreter(one: str, other: str) -> bool:
    """Whether two paths are one interpreter of one environment: its links may differ in name, not in directory."""
    first, second = Path(one), Path(other)
    return first.parent.resolve() == second.parent.resolve() and first.resolve() == second.resolve()


def _shadows(directory: Path) -> list[str]:
    """Entries of a directory that would be imported in place of our packages."""
    ours = Path(__file__).resolve().parents[2]
    if directory.resolve() == ours:
        return []
    return [name for name in OUR_PACKAGES if (directory / name).is_dir() or (directory / f"{name}.py").exists()]


def _session_class() -> Any:
    """``SparkSession``, imported where it is needed, or a sentence that says how to get it."""
    try:
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote
    except ImportError as error:
        raise InvalidInput(
            "Spark is not installed in this environment; pip install 'stateformat[spark]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    if is_remote():
        raise InvalidInput(
            "this program is set up for Spark Connect (SPARK_REMOTE), which runs no code of ours on the driver; use Spark "
            "Classic: unset SPARK_REMOTE, or submit the job with spark-submit",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return SparkSession


def _active(session_class: Any) -> SparkSession | None:
    """The session of this thread, or the one that another thread of this process has made."""
    from pyspark.errors import PySparkRuntimeError

    try:
        found: SparkSession = session_class.active()
    except PySparkRuntimeError:
        return None
    return found


def _log_is_configured() -> bool:
    """Whether somebody has said what Spark logs: a log4j file of their own, or ``spark.log.level``. Else it writes some hundred
    lines for each job, among which those of ours would be lost. Only under ``spark-submit``, where there is a JVM already.
    """
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    assert SparkContext._jvm is not None
    log = SparkContext._jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
    return SparkConf().contains("spark.log.level") or "log4j2-defaults" not in str(log.getConfigurationSource())


def _check_java() -> None:
    """Spark's own message for a missing Java is a stack trace; ours is a sentence."""
    home = os.environ.get("JAVA_HOME")
    if home and not (Path(home) / "bin" / "java").exists():
        message = f"JAVA_HOME is {home}, which has no bin/java; point it to a Java 17 or newer, or unset it"
    elif not home and shutil.which("java") is None:
        message = (
            "Spark needs Java 17 or newer: no java on PATH and no JAVA_HOME; install a JRE (Debian: "
            "openjdk-17-jre-headless)"
        )
    else:
        return
    raise InvalidInput(message, kind=ErrorKind.MISSING_DEPENDENCY)


def _start(builder: Any) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError

    try:
        made: SparkSession = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise InvalidInput(
            "Java started and ended before Spark was up (its own words stand above); Spark 4.3 needs Java 17 or newer",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    return made


__all__ = ["check", "configure", "job_session", "lent_session", "local_session", "session"]
