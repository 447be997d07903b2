package fixtures;

import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.state.AggregatingState;
import org.apache.flink.api.common.state.AggregatingStateDescriptor;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapState;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.ReducingState;
import org.apache.flink.api.common.state.ReducingStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/**
 * One state of every kind and both kinds of timers. Number 7 alone has a state {@code rare}: other
 * subtasks do not know it.
 */
final class States<K> extends KeyedProcessFunction<K, Long, Long> {
  private static final long serialVersionUID = 1;
  private static final long YEAR_2100 = 4102444800000L;

  @Override
  public void processElement(Long number, Context context, Collector<Long> out) throws Exception {
    value("count", number);
    ListState<String> seen =
        getRuntimeContext().getListState(new ListStateDescriptor<>("seen", Types.STRING));
    seen.add(number % 5 == 0 ? "" : "n" + number + "," + "x".repeat((int) (number % 4) * 40));
    MapState<String, String> words =
        getRuntimeContext()
            .getMapState(new MapStateDescriptor<>("words", Types.STRING, Types.STRING));
    words.put("even-" + number % 2, "v" + number);
    words.put("word " + number, number % 3 == 0 ? null : "-" + number);
    ReducingState<Long> sum =
        getRuntimeContext()
            .getReducingState(new ReducingStateDescriptor<>("sum", Long::sum, Types.LONG));
    sum.add(number);
    AggregatingState<Long, Double> mean =
        getRuntimeContext()
            .getAggregatingState(
                new AggregatingStateDescriptor<>(
                    "mean", new Mean(), Types.TUPLE(Types.LONG, Types.DOUBLE)));
    mean.add(number);
    if (number == 7) {
      ValueState<String> rare =
          getRuntimeContext().getState(new ValueStateDescriptor<>("rare", Types.STRING));
      rare.update("only here \u20ac \ud83d\ude00 \u0000");
    }
    context.timerService().registerEventTimeTimer(number * 1000 - 5000);
    context.timerService().registerProcessingTimeTimer(YEAR_2100 + number);
  }

  private void value(String name, long number) throws Exception {
    ValueState<Long> count =
        getRuntimeContext().getState(new ValueStateDescriptor<>(name, Types.LONG));
    Long before = count.value();
    count.update((before == null ? 0 : before) + 1 + number * number * number * 1_000_003);
  }

  /** Holds a count and a sum. */
  static final class Mean implements AggregateFunction<Long, Tuple2<Long, Double>, Double> {
    private static final long serialVersionUID = 1;

    @Override
    public Tuple2<Long, Double> createAccumulator() {
      return Tuple2.of(0L, 0.0);
    }

    @Override
    public Tuple2<Long, Double> add(Long number, Tuple2<Long, Double> held) {
      return Tuple2.of(held.f0 + 1, held.f1 + number / 4.0);
    }

    @Override
    public Double getResult(Tuple2<Long, Double> held) {
      return held.f1 / held.f0;
    }

    @Override
    public Tuple2<Long, Double> merge(Tuple2<Long, Double> one, Tuple2<Long, Double> other) {
      return Tuple2.of(one.f0 + other.f0, one.f1 + other.f1);
    }
  }
}
