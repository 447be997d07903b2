package fixtures;

import java.math.BigDecimal;
import java.time.Duration;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Date;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.MapStateDescriptor;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.typeutils.GenericTypeInfo;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/** State of classes that Flink 1 leaves to Kryo. */
final class Generic extends KeyedProcessFunction<Integer, Long, Long> {
  private static final long serialVersionUID = 1;
  private final boolean known;

  /** With classes of the JDK, or with one that only the job knows. */
  Generic(boolean known) {
    this.known = known;
  }

  /** The everyday case. */
  public static class Tagged {
    public long id;
    public String name;
    public List<String> tags;

    public Tagged() {}
  }

  /** One of everything. */
  public static class Everything {
    public List<String> tags;
    public Map<String, Long> counts;
    public Set<Integer> codes;
    public Pojos.Colour colour;
    public List<Pojos.Colour> colours;
    public List<LocalDate> days;
    public Map<Integer, List<Double>> series;
    public Object mixed;
    public UUID token;
    public Duration pause;
    public List<List<Date>> dates;
    public Map<String, Object> attributes;
    public String last;

    public Everything() {}
  }

  /** No POJO, for it has no constructor without parameters: Kryo writes its fields. */
  public static final class Tag {
    final String name;
    final int weight;

    Tag(String name, int weight) {
      this.name = name;
      this.weight = weight;
    }
  }

  /** With a list of what only the job knows. */
  public static class Weighed {
    public String first;
    public List<Tag> tags;

    public Weighed() {}
  }

  private static Tagged tagged(int n) {
    Tagged found = new Tagged();
    found.id = n;
    found.name = n == 1 ? null : "name " + n;
    found.tags = n == 2 ? null : new ArrayList<>();
    for (int i = 0; i < n && n != 2; i++) {
      found.tags.add(i == 3 ? "\u00e9\u20ac\ud83d\ude00" : "tag " + i);
    }
    return found;
  }

  private static Everything everything(int n) {
    Everything found = new Everything();
    String again = "same";
    found.tags = n % 2 == 0 ? Arrays.asList(again, again, "t" + n) : new ArrayList<>(Arrays.asList("a", null));
    found.counts = n % 3 == 0 ? new HashMap<>() : new LinkedHashMap<>();
    found.counts.put("n", (long) n);
    found.counts.put("none", null);
    found.codes = new LinkedHashSet<>(Arrays.asList(n, -n - 1));
    found.colour = Pojos.Colour.values()[n % 3];
    found.colours = new ArrayList<>(Arrays.asList(found.colour, found.colour, Pojos.Colour.GREEN));
    found.days = new ArrayList<>(Arrays.asList(LocalDate.of(2024, 2, 28 + n % 2), null));
    found.series = new HashMap<>();
    found.series.put(n, new ArrayList<>(Arrays.asList(n / 2.0, -1.5)));
    found.mixed = n % 2 == 0 ? (Object) ("text " + n) : (Object) Long.valueOf(n);
    found.token = new UUID(n, -n);
    found.pause = Duration.ofMillis(1500L * n);
    found.dates = new ArrayList<>(Arrays.asList(new ArrayList<>(Arrays.asList(new Date(1000L * n))), new ArrayList<>()));
    found.attributes = new LinkedHashMap<>();
    found.attributes.put("price", new BigDecimal("1.50"));
    found.attributes.put("count", n);
    found.attributes.put("list", new ArrayList<>(Arrays.asList("x", true)));
    found.last = "end";
    return found;
  }

  @Override
  public void processElement(Long number, Context context, Collector<Long> out) throws Exception {
    int n = number.intValue();
    if (!known) {
      Weighed weighed = new Weighed();
      weighed.first = "first";
      weighed.tags = new ArrayList<>(Arrays.asList(new Tag("t" + n, n)));
      getRuntimeContext()
          .getState(new ValueStateDescriptor<>("weighed", TypeInformation.of(Weighed.class)))
          .update(weighed);
      return;
    }
    getRuntimeContext()
        .getState(new ValueStateDescriptor<>("tagged", TypeInformation.of(Tagged.class)))
        .update(tagged(n));
    getRuntimeContext()
        .getState(new ValueStateDescriptor<>("everything", TypeInformation.of(Everything.class)))
        .update(everything(n));
    getRuntimeContext()
        .getListState(new ListStateDescriptor<>("list", TypeInformation.of(Tagged.class)))
        .addAll(Arrays.asList(tagged(n), tagged(n + 1)));
    getRuntimeContext()
        .getMapState(
            new MapStateDescriptor<>("map", Types.STRING, new GenericTypeInfo<>(ArrayList.class)))
        .put("m" + n, new ArrayList<>(Arrays.asList(n, n + 1)));
  }
}
