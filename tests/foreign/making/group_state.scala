// A query with flatMapGroupsWithState, which Python has not. Run by spark-shell with the properties
// that spark_fixtures.py gives: the folder of input and the checkpoint.
import org.apache.spark.sql.Dataset
import org.apache.spark.sql.streaming.{GroupState, GroupStateTimeout, OutputMode, Trigger}

case class Event(k: String, n: Option[Int], v: Long, at: java.sql.Timestamp, note: String)
case class Seen(rows: Long, last: String, numbers: Seq[Int])
case class Told(k: String, rows: Long)

def step(key: (String, Option[Int]), events: Iterator[Event], state: GroupState[Seen]): Iterator[Told] =
  if (state.hasTimedOut) {
    val rows = state.get.rows
    state.remove()
    Iterator(Told(key._1, -rows))
  } else {
    val found = events.toSeq.sortBy(event => (event.at.getTime, event.v))
    val before = state.getOption.getOrElse(Seen(0, null, Seq()))
    val now = Seen(before.rows + found.size, found.last.note, before.numbers ++ found.flatMap(_.n))
    state.update(now)
    val newest = math.max(found.last.at.getTime, state.getCurrentWatermarkMs())
    state.setTimeoutTimestamp(newest + 240000)
    Iterator(Told(key._1, now.rows))
  }

// Each line below is an object of its own for the shell: who waits must not be the one that defines, and what
// stands beside a closure is serialized with it.
val folder = sys.props("fixture.input")
val schema = "k string, n int, v bigint, at timestamp, price double, note string"
@transient val rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)
@transient val events = rows.select("k", "n", "v", "at", "note").as[Event].withWatermark("at", "2 minutes")
@transient val groups = events.groupByKey(event => (event.k, event.n))
@transient val told = groups.flatMapGroupsWithState(OutputMode.Update, GroupStateTimeout.EventTimeTimeout)(step _)
@transient val writer = told.writeStream.outputMode("update").format("noop").trigger(Trigger.AvailableNow())
@transient val query = writer.option("checkpointLocation", sys.props("fixture.checkpoint")).start()
query.awaitTermination()
System.exit(0)
