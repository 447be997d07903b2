import java.io.Serializable;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.api.java.function.FlatMapGroupsWithStateFunction;
import org.apache.spark.api.java.function.MapFunction;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoder;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.streaming.GroupStateTimeout;
import org.apache.spark.sql.streaming.OutputMode;
import org.apache.spark.sql.streaming.Trigger;
import scala.Tuple2;

/** A query with flatMapGroupsWithState, which Python has not: INPUT CHECKPOINT. */
public class GroupStateQuery {
    private static final String SCHEMA = "k string, n int, v bigint, at timestamp, price double, note string";

    /** What is kept of a key. */
    public static class Seen implements Serializable {
        private long rows;
        private String last;
        private List<Long> values = new ArrayList<>();

        public long getRows() { return rows; }
        public void setRows(long rows) { this.rows = rows; }
        public String getLast() { return last; }
        public void setLast(String last) { this.last = last; }
        public List<Long> getValues() { return values; }
        public void setValues(List<Long> values) { this.values = values; }
    }

    private static Iterator<Long> step(Tuple2<String, Integer> key, Iterator<Row> rows,
            org.apache.spark.sql.streaming.GroupState<Seen> state) {
        if (state.hasTimedOut()) {
            long count = state.get().getRows();
            state.remove();
            return Collections.singletonList(-count).iterator();
        }
        List<Row> found = new ArrayList<>();
        rows.forEachRemaining(found::add);
        found.sort(Comparator.comparing((Row row) -> row.getTimestamp(3)).thenComparing(row -> row.getLong(2)));
        Seen seen = state.exists() ? state.get() : new Seen();
        Row newest = found.get(found.size() - 1);
        List<Long> values = new ArrayList<>(seen.getValues());
        found.forEach(row -> values.add(row.getLong(2)));
        seen.setRows(seen.getRows() + found.size());
        seen.setLast(newest.getString(5));
        seen.setValues(values);
        state.update(seen);
        state.setTimeoutTimestamp(Math.max(newest.getTimestamp(3).getTime(), state.getCurrentWatermarkMs()) + 240000);
        return Collections.singletonList(seen.getRows()).iterator();
    }

    public static void main(String[] arguments) throws Exception {
        SparkSession spark = SparkSession.builder().getOrCreate();
        Dataset<Row> rows = spark.readStream().schema(SCHEMA).option("maxFilesPerTrigger", 1).json(arguments[0]);
        Encoder<Tuple2<String, Integer>> keys = Encoders.tuple(Encoders.STRING(), Encoders.INT());
        MapFunction<Row, Tuple2<String, Integer>> key = row -> new Tuple2<>(row.getString(0), (Integer) row.get(1));
        FlatMapGroupsWithStateFunction<Tuple2<String, Integer>, Row, Seen, Long> step = GroupStateQuery::step;
        rows.withWatermark("at", "2 minutes")
            .groupByKey(key, keys)
            .flatMapGroupsWithState(step, OutputMode.Update(), Encoders.bean(Seen.class), Encoders.LONG(),
                GroupStateTimeout.EventTimeTimeout())
            .writeStream().outputMode("update").format("noop").trigger(Trigger.AvailableNow())
            .option("checkpointLocation", arguments[1]).start().awaitTermination();
        spark.stop();
    }
}
