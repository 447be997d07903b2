import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.functions;
import org.apache.spark.sql.streaming.Trigger;

/** Queries of Spark 3.0.3, the last that writes no schemas: {@code OldQueries FOLDER}. Three batches each. */
public class OldQueries {
  public static void main(String[] arguments) throws Exception {
    SparkSession spark =
        SparkSession.builder().master("local[1]").config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "3").getOrCreate();
    for (String name : new String[] {"totals", "whole", "join"}) {
      Path folder = Path.of(arguments[0], name);
      Path input = Files.createDirectories(folder.resolve("input"));
      for (int batch = 0; batch < 3; batch++) {
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < 6; i++) {
          text.append("{\"k\":\"key-" + (i * (batch + 1)) % 7 + "\",\"n\":" + (i + batch) + "}\n");
        }
        Files.write(input.resolve("batch-" + batch + ".json"), text.toString().getBytes(StandardCharsets.UTF_8));
        Dataset<Row> rows = spark.readStream().schema("k string, n int").json(input.toString());
        Dataset<Row> others = spark.readStream().schema("k string, n int").json(input.toString())
            .withColumnRenamed("k", "other").withColumnRenamed("n", "m");
        Dataset<Row> query =
            name.equals("join") ? rows.join(others, functions.expr("k = other"))
                : name.equals("whole") ? rows.groupBy().sum("n") : rows.groupBy("k").sum("n");
        query.writeStream().outputMode(name.equals("join") ? "append" : "update").format("console")
            .option("checkpointLocation", folder.resolve("checkpoint").toString())
            .trigger(Trigger.Once()).start().awaitTermination();
      }
    }
    spark.stop();
  }
}
