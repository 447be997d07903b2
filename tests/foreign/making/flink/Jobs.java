package fixtures;

import java.util.ArrayList;
import java.util.List;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

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
        return core(env, 26);
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
