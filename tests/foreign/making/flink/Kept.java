package fixtures;

import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.runtime.state.FunctionInitializationContext;
import org.apache.flink.runtime.state.FunctionSnapshotContext;
import org.apache.flink.streaming.api.checkpoint.CheckpointedFunction;

/** Keeps what it has seen in a list state; chained to its source, it ends with it. */
final class Kept implements MapFunction<Long, Long>, CheckpointedFunction {
  private static final long serialVersionUID = 1;
  private transient ListState<Long> kept;

  @Override
  public void initializeState(FunctionInitializationContext context) throws Exception {
    kept =
        context
            .getOperatorStateStore()
            .getListState(new ListStateDescriptor<>("kept", Types.LONG));
  }

  @Override
  public void snapshotState(FunctionSnapshotContext context) {}

  @Override
  public Long map(Long number) throws Exception {
    kept.add(number);
    return number;
  }
}
