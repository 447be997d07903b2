package fixtures;

import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringEncoder;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.functions.KeySelector;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.connector.file.sink.FileSink;
import org.apache.flink.core.fs.Path;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.filesystem.rollingpolicies.OnCheckpointRollingPolicy;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/** The jobs whose state the fixtures hold. */
final class Jobs {
  private static final List<Long> ENDS = new ArrayList<>();

  private Jobs() {}

  /** How many numbers the sources of the job that was built last emit below a limit. */
  static long emitted(long limit) {
    return ENDS.stream().mapToLong(end -> Math.min(end, limit)).sum();
  }

  /** Some of its tasks end before its savepoint is taken, which takes checkpoints. */
  static boolean endsBefore(String name) {
    return name.equals("finished");
  }

  /** A job of this name in the environment; how many numbers its sources emit. */
  static long build(String name, StreamExecutionEnvironment env) throws Exception {
    ENDS.clear();
    env.setParallelism(2);
    env.setMaxParallelism(128);
    switch (name) {
      case "core":
        return core(env, 16);
      case "brief":
        return brief(env, 20);
      case "keys":
        return keys(env, 12);
      case "types":
        return types(env, 8);
      case "generic":
        return generic(env, 6);
      case "windows":
        return windows(env, 18);
      case "namespaces":
        return namespaces(env, 10);
      case "ttl":
        return ttl(env, 16);
      case "shared":
        return shared(env, 20);
      case "wide":
        return wide(env, 10);
      case "sink":
        return sink(env, 10);
      case "finished":
        return finished(env, 16);
      case "sql":
        return SqlJobs.build(env, numbers(env, "numbers", 18, 0), 18);
      default:
        throw new IllegalArgumentException(name);
    }
  }

  private static DataStream<Long> numbers(
      StreamExecutionEnvironment env, String uid, long end, int ending) {
    ENDS.add(end);
    return env.fromSource(
            new Numbers(end, ending),
            WatermarkStrategy.<Long>noWatermarks().withTimestampAssigner((n, t) -> n * 1000),
            uid,
            Types.LONG)
        .uid(uid);
  }

  /** Every kind of keyed state, by a key of fixed and by one of variable length. */
  private static long core(StreamExecutionEnvironment env, long end) {
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    numbers
        .keyBy(n -> (n % 13) * (n % 2 == 0 ? -1L : 1_000_000_007L), Types.LONG)
        .process(new States<>())
        .name("by long")
        .uid("by-long");
    numbers
        .keyBy(n -> Jobs.text(n % 11), Types.STRING)
        .process(new States<>())
        .name("by string")
        .uid("by-string");
    return end;
  }

  /** Few states: for the forms that have a file for each. */
  private static long brief(StreamExecutionEnvironment env, long end) {
    numbers(env, "numbers", end, 0)
        .keyBy(n -> n % 7 - 3, Types.LONG)
        .process(new Brief<>(false))
        .name("brief")
        .uid("brief");
    return end;
  }

  /** Keys of many types. */
  private static long keys(StreamExecutionEnvironment env, long end) {
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    keyed(numbers, "by-int", n -> (int) (n % 5) - 2, Types.INT);
    keyed(numbers, "by-short", n -> (short) (n % 5 - 2), Types.SHORT);
    keyed(numbers, "by-boolean", n -> n % 2 == 0, Types.BOOLEAN);
    keyed(numbers, "by-double", n -> n % 5 == 0 ? Double.NaN : n % 5 / -3.0, Types.DOUBLE);
    keyed(
        numbers,
        "by-tuple",
        n -> Tuple2.of(text(n % 6), (int) (n % 3)),
        Types.TUPLE(Types.STRING, Types.INT));
    keyed(
        numbers,
        "by-pojo",
        n -> new Pojos.Place(n % 4 == 0 ? null : text(n % 4), (int) (n % 3)),
        TypeInformation.of(Pojos.Place.class));
    return end;
  }

  private static <K> void keyed(
      DataStream<Long> numbers, String uid, KeySelector<Long, K> key, TypeInformation<K> type) {
    numbers.keyBy(key, type).process(new Brief<>(false)).name(uid).uid(uid);
  }

  private static long types(StreamExecutionEnvironment env, long end) {
    numbers(env, "numbers", end, 0)
        .keyBy(Long::intValue, Types.INT)
        .process(new Typed())
        .name("types")
        .uid("types");
    return end;
  }

  private static long generic(StreamExecutionEnvironment env, long end) {
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    for (String uid : new String[] {"generic", "weighed"}) {
      numbers
          .keyBy(Long::intValue, Types.INT)
          .process(new Generic(uid.equals("generic")))
          .name(uid)
          .uid(uid);
    }
    return end;
  }

  /** Windows never fire: there are no watermarks. */
  private static long windows(StreamExecutionEnvironment env, long end) {
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    numbers
        .keyBy(n -> n % 3, Types.LONG)
        .window(Compat.tumbling(5000))
        .reduce(Long::sum)
        .name("tumbling sum")
        .uid("tumbling-sum");
    numbers
        .keyBy(n -> text(n % 6), Types.STRING)
        .window(Compat.sliding(8000, 4000))
        .process(new Forget<>())
        .name("sliding list")
        .uid("sliding-list");
    numbers
        .keyBy(n -> text(n % 5), Types.STRING)
        .window(Compat.session(6000))
        .aggregate(new States.Mean())
        .name("session mean")
        .uid("session-mean");
    numbers
        .keyBy(n -> n % 4, Types.LONG)
        .countWindow(100)
        .reduce(Long::max)
        .name("count max")
        .uid("count-max");
    return end;
  }

  /** Gives out nothing. */
  private static final class Forget<K>
      extends ProcessWindowFunction<Long, Long, K, TimeWindow> {
    private static final long serialVersionUID = 1;

    @Override
    public void process(K key, Context context, Iterable<Long> elements, Collector<Long> out) {}
  }

  private static long namespaces(StreamExecutionEnvironment env, long end) {
    env.setParallelism(1);
    numbers(env, "numbers", end, 0)
        .keyBy(n -> text(n % 6), Types.STRING)
        .transform("string namespace", Types.LONG, new Namespaced())
        .uid("string-namespace");
    return end;
  }

  private static long ttl(StreamExecutionEnvironment env, long end) {
    env.setParallelism(1);
    numbers(env, "numbers", end, 0)
        .keyBy(n -> text(n % 6), Types.STRING)
        .process(new Brief<>(true))
        .name("ttl")
        .uid("ttl");
    return end;
  }

  private static long shared(StreamExecutionEnvironment env, long end) {
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    numbers
        .connect(numbers(env, "rules", end, 0).broadcast(Shared.RULES))
        .process(new Shared())
        .name("shared")
        .uid("shared")
        .setParallelism(3);
    return end;
  }

  /** Key groups of two bytes, three subtasks. */
  private static long wide(StreamExecutionEnvironment env, long end) {
    env.setParallelism(3);
    env.setMaxParallelism(300);
    DataStream<Long> numbers = numbers(env, "numbers", end, 0);
    keyed(numbers, "by-long", n -> n * 1_000_000_007L, Types.LONG);
    numbers
        .keyBy(n -> text(n % 8), Types.STRING)
        .transform("string namespace", Types.LONG, new Namespaced())
        .uid("string-namespace");
    return end;
  }

  private static long sink(StreamExecutionEnvironment env, long end) throws Exception {
    String directory = java.nio.file.Files.createTempDirectory("sink").toUri().toString();
    numbers(env, "numbers", end, 0)
        .map(n -> "line " + n)
        .returns(Types.STRING)
        .sinkTo(
            FileSink.forRowFormat(new Path(directory), new SimpleStringEncoder<String>())
                .withRollingPolicy(OnCheckpointRollingPolicy.build())
                .build())
        .uid("files");
    return end;
  }

  /** One source has ended, of another one subtask; what follows only the first has ended as well. */
  private static long finished(StreamExecutionEnvironment env, long end) {
    DataStream<Long> going = numbers(env, "going", end, 0);
    DataStream<Long> ended = numbers(env, "ended", end / 2, 2);
    DataStream<Long> half = numbers(env, "half", end / 2, 1);
    keyed(ended, "after-ended", n -> n % 4, Types.LONG);
    keyed(going.union(ended), "after-both", n -> n % 5, Types.LONG);
    half.map(new Kept()).name("after half").uid("after-half");
    return end;
  }

  /** A string of every length class: empty, ASCII, others, above U+FFFF, with NUL, long. */
  static String text(long n) {
    switch ((int) n) {
      case 0:
        return "";
      case 1:
        return "na\u00efve \u20ac";
      case 2:
        return "\ud83d\ude00 smile";
      case 3:
        return "nul \u0000 inside";
      case 4:
        return "long ".repeat(20);
      default:
        return "key-" + n;
    }
  }
}
