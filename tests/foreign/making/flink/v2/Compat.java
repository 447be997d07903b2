package fixtures;

import org.apache.flink.api.common.state.StateTtlConfig;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import java.time.Duration;

/** What is called differently in Flink 2.x. */
final class Compat {
  private Compat() {}

  static TumblingEventTimeWindows tumbling(long ms) {
    return TumblingEventTimeWindows.of(Duration.ofMillis(ms));
  }

  static SlidingEventTimeWindows sliding(long ms, long slide) {
    return SlidingEventTimeWindows.of(Duration.ofMillis(ms), Duration.ofMillis(slide));
  }

  static EventTimeSessionWindows session(long ms) {
    return EventTimeSessionWindows.withGap(Duration.ofMillis(ms));
  }

  static StateTtlConfig ttl(long ms) {
    return StateTtlConfig.newBuilder(Duration.ofMillis(ms)).build();
  }
}
