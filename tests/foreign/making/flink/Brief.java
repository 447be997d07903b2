package fixtures;

import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.StateTtlConfig;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/** A value, a list, a map and a timer, with or without a time to live. */
final class Brief<K> extends KeyedProcessFunction<K, Long, Long> {
  private static final long serialVersionUID = 1;
  private final boolean ttl;

  Brief(boolean ttl) {
    this.ttl = ttl;
  }

  @Override
  public void processElement(Long number, Context context, Collector<Long> out) throws Exception {
    ValueStateDescriptor<String> last = new ValueStateDescriptor<>("last", Types.STRING);
    ListStateDescriptor<Integer> all = new ListStateDescriptor<>("all", Types.INT);
    MapStateDescriptor<Integer, Long> parts =
        new MapStateDescriptor<>("parts", Types.INT, Types.LONG);
    MapStateDescriptor<String, String> texts =
        new MapStateDescriptor<>("texts", Types.STRING, Types.STRING);
    if (ttl) {
      StateTtlConfig config = Compat.ttl(30L * 24 * 3600 * 1000);
      last.enableTimeToLive(config);
      all.enableTimeToLive(config);
      parts.enableTimeToLive(config);
      texts.enableTimeToLive(config);
    }
    ValueState<String> value = getRuntimeContext().getState(last);
    value.update("last " + number);
    getRuntimeContext().getListState(all).add((int) (number * 44));
    getRuntimeContext().getMapState(parts).put((int) (number % 4), number);
    String text = number % 2 == 0 ? null : "odd";
    getRuntimeContext().getMapState(texts).put(Jobs.text(number % 6), text);
    context.timerService().registerEventTimeTimer(number * 1000);
  }
}
