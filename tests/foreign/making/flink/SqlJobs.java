package fixtures;

import java.math.BigDecimal;
import java.time.LocalDateTime;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.Schema;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;
import org.apache.flink.types.Row;

/** Queries in SQL. */
final class SqlJobs {
  private SqlJobs() {}

  private static final String[] QUERIES = {
    "SELECT word, num, COUNT(*), SUM(big), AVG(price), MAX(word), COUNT(DISTINCT big)"
        + " FROM numbers GROUP BY word, num",
    "SELECT l.word, l.big, r.price, r.flags FROM numbers l JOIN numbers r ON l.big = r.big",
    "SELECT word, big FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY num ORDER BY big DESC)"
        + " AS r FROM numbers) WHERE r <= 2",
    "SELECT word, big, num FROM (SELECT *, ROW_NUMBER() OVER"
        + " (PARTITION BY word ORDER BY proc) AS r FROM numbers) WHERE r = 1",
    "SELECT word, window_start, COUNT(*), SUM(big) FROM TABLE(TUMBLE(TABLE numbers, DESCRIPTOR(rt),"
        + " INTERVAL '2' DAY)) GROUP BY word, window_start, window_end",
    "SELECT num, COLLECT(word), FIRST_VALUE(price), MAX(shape), MAX(born), LISTAGG(word), MAX(ts)"
        + " FROM numbers GROUP BY num",
  };

  static long build(StreamExecutionEnvironment env, DataStream<Long> numbers, long end) {
    TypeInformation<Row> shape =
        Types.ROW_NAMED(
            new String[] {
              "word", "num", "big", "price", "ts", "shape", "flags", "born"
            },
            Types.STRING,
            Types.INT,
            Types.LONG,
            Types.BIG_DEC,
            Types.LOCAL_DATE_TIME,
            Types.DOUBLE,
            Types.OBJECT_ARRAY(Types.BOOLEAN),
            Types.LOCAL_DATE);
    DataStream<Row> rows = numbers.map(SqlJobs::row).returns(shape);
    StreamTableEnvironment tables = StreamTableEnvironment.create(env);
    Schema schema =
        Schema.newBuilder()
            .columnByExpression("proc", "PROCTIME()")
            .columnByExpression("rt", "CAST(ts AS TIMESTAMP(3))")
            .watermark("rt", "rt - INTERVAL '99' DAY")
            .build();
    tables.createTemporaryView("numbers", tables.fromDataStream(rows, schema));
    for (String query : QUERIES) {
      tables.toChangelogStream(tables.sqlQuery(query)).map(row -> 0L).returns(Types.LONG);
    }
    return end;
  }

  private static Row row(Long n) {
    return Row.of(
        n % 7 == 0 ? null : "w" + Jobs.text(n % 6),
        (int) (n % 3),
        n % 5 == 0 ? null : n * 1_000_000_007L,
        new BigDecimal(n).movePointLeft(2),
        LocalDateTime.of(2024, 1, 1 + (int) (n % 20), 3, 4, 5, 678_000_000),
        n / 8.0,
        new Boolean[] {n % 2 == 0, null, true},
        java.time.LocalDate.of(2024, 2, 1 + (int) (n % 20)));
  }
}
