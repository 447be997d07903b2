package fixtures;

import org.apache.flink.api.common.state.StateTtlConfig;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.time.Time;

/** What is called differently in Flink 1.x. */
final class Compat {
  private Compat() {}

  static TumblingEventTimeWindows tumbling(long ms) {
    return TumblingEventTimeWindows.of(Time.milliseconds(ms));
  }

  static SlidingEventTimeWindows sliding(long ms, long slide) {
    return SlidingEventTimeWindows.of(Time.milliseconds(ms), Time.milliseconds(slide));
  }

  static EventTimeSessionWindows session(long ms) {
    return EventTimeSessionWindows.withGap(Time.milliseconds(ms));
  }

  static StateTtlConfig ttl(long ms) {
    return StateTtlConfig.newBuilder(org.apache.flink.api.common.time.Time.milliseconds(ms)).build();
  }
}
