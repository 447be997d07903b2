package fixtures;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.lang.reflect.Array;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.java.tuple.Tuple;
import org.apache.flink.api.java.typeutils.runtime.PojoSerializer;
import org.apache.flink.core.memory.DataOutputViewStreamWrapper;
import org.apache.flink.runtime.state.VoidNamespace;
import org.apache.flink.runtime.state.ttl.TtlValue;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.types.Either;
import org.apache.flink.types.Row;
import org.apache.flink.types.RowKind;
import org.apache.flink.types.Value;

/** Values as JSON, by the rules of tests/foreign/fixtures/README.md. */
final class Json {
  private Json() {}

  static String text(String value) {
    StringBuilder out = new StringBuilder("\"");
    for (int i = 0; i < value.length(); i++) {
      char c = value.charAt(i);
      if (c == '"' || c == '\\') {
        out.append('\\').append(c);
      } else if (c < 0x20 || c > 0x7e) {
        out.append(String.format("\\u%04x", (int) c));
      } else {
        out.append(c);
      }
    }
    return out.append('"').toString();
  }

  static String hex(byte[] bytes) {
    StringBuilder out = new StringBuilder();
    for (byte b : bytes) {
      out.append(String.format("%02x", b));
    }
    return text(out.toString());
  }

  /** The bytes that the serializer makes of a value. */
  @SuppressWarnings("unchecked")
  static byte[] bytes(TypeSerializer<?> serializer, Object value) throws IOException {
    ByteArrayOutputStream out = new ByteArrayOutputStream();
    ((TypeSerializer<Object>) serializer).serialize(value, new DataOutputViewStreamWrapper(out));
    return out.toByteArray();
  }

  static String of(TypeSerializer<?> serializer, Object value) throws Exception {
    String kind = serializer == null ? "" : serializer.getClass().getSimpleName();
    if (value == null) {
      return "null";
    }
    if (kind.equals("KryoSerializer")) {
      return "{\"$opaque\": " + hex(bytes(serializer, value)) + "}";
    }
    if (kind.equals("NullableSerializer")) {
      return of((TypeSerializer<?>) get(serializer, "originalSerializer"), value);
    }
    if (kind.startsWith("TtlAware")) {
      return of((TypeSerializer<?>) get(serializer, "typeSerializer"), value);
    }
    if (value instanceof TtlValue) {
      TtlValue<?> held = (TtlValue<?>) value;
      TypeSerializer<?> inner = (TypeSerializer<?>) call(serializer, "getValueSerializer");
      return "{\"ttl_last_access\": "
          + held.getLastAccessTimestamp()
          + ", \"value\": "
          + of(inner, held.getUserValue())
          + "}";
    }
    if (serializer instanceof PojoSerializer) {
      return pojo((PojoSerializer<?>) serializer, value);
    }
    if (kind.equals("RowDataSerializer")) {
      return SqlJson.row(
          (org.apache.flink.table.data.RowData) value,
          (org.apache.flink.table.types.logical.LogicalType[]) get(serializer, "types"));
    }
    if (value instanceof Tuple) {
      TypeSerializer<?>[] fields = (TypeSerializer<?>[]) call(serializer, "getFieldSerializers");
      List<String> found = new ArrayList<>();
      for (int i = 0; i < fields.length; i++) {
        found.add("\"f" + i + "\": " + of(fields[i], ((Tuple) value).getField(i)));
      }
      return "{" + String.join(", ", found) + "}";
    }
    if (value instanceof Row) {
      TypeSerializer<?>[] fields = (TypeSerializer<?>[]) get(serializer, "fieldSerializers");
      Row row = (Row) value;
      List<String> found = new ArrayList<>();
      for (int i = 0; i < fields.length; i++) {
        found.add("\"f" + i + "\": " + of(fields[i], row.getField(i)));
      }
      if (row.getKind() != RowKind.INSERT) {
        found.add("\"$kind\": " + text(row.getKind().shortString()));
      }
      return "{" + String.join(", ", found) + "}";
    }
    if (value instanceof Either) {
      Either<?, ?> either = (Either<?, ?>) value;
      return either.isLeft()
          ? "{\"left\": " + of(child(serializer, "getLeftSerializer"), either.left()) + "}"
          : "{\"right\": " + of(child(serializer, "getRightSerializer"), either.right()) + "}";
    }
    if (value instanceof Map) {
      return map(serializer, (Map<?, ?>) value);
    }
    if (value instanceof Collection) {
      List<String> found = new ArrayList<>();
      for (Object item : (Collection<?>) value) {
        found.add(of(child(serializer, "getElementSerializer"), item));
      }
      if (value instanceof Set) {
        found.sort(null);
      }
      return "[" + String.join(", ", found) + "]";
    }
    if (value.getClass().isArray() && !(value instanceof byte[])) {
      TypeSerializer<?> item =
          kind.equals("GenericArraySerializer") ? child(serializer, "getComponentSerializer") : null;
      List<String> found = new ArrayList<>();
      for (int i = 0; i < Array.getLength(value); i++) {
        found.add(of(item, Array.get(value, i)));
      }
      return "[" + String.join(", ", found) + "]";
    }
    return plain(serializer, value);
  }

  private static String plain(TypeSerializer<?> serializer, Object value) throws Exception {
    if (value instanceof Boolean || value instanceof Byte || value instanceof Short) {
      return value.toString();
    }
    if (value instanceof Integer || value instanceof Long) {
      return value.toString();
    }
    if (value instanceof Float || value instanceof Double) {
      double number = ((Number) value).doubleValue();
      return Double.isFinite(number) ? value.toString() : text(value.toString());
    }
    if (value instanceof String || value instanceof Character) {
      return text(value.toString());
    }
    if (value instanceof byte[]) {
      return hex((byte[]) value);
    }
    if (value instanceof BigDecimal) {
      return text(((BigDecimal) value).unscaledValue() + "E" + -((BigDecimal) value).scale());
    }
    if (value instanceof BigInteger) {
      return text(value.toString());
    }
    if (value instanceof java.sql.Timestamp) {
      java.sql.Timestamp at = (java.sql.Timestamp) value;
      return "{\"ms\": " + at.getTime() + ", \"nanos\": " + at.getNanos() + "}";
    }
    if (value instanceof java.util.Date) {
      return Long.toString(((java.util.Date) value).getTime());
    }
    if (value instanceof java.time.temporal.Temporal || value instanceof Enum) {
      return text(value instanceof Enum ? ((Enum<?>) value).name() : value.toString());
    }
    if (value instanceof TimeWindow) {
      TimeWindow window = (TimeWindow) value;
      return "{\"window_start\": " + window.getStart() + ", \"window_end\": " + window.getEnd() + "}";
    }
    if (value instanceof VoidNamespace) {
      return "null";
    }
    if (value instanceof Value) {
      return text(value.toString());
    }
    if (value.getClass().getName().startsWith("org.apache.flink.table.data.")) {
      return SqlJson.plain(serializer, value);
    }
    if (value.getClass().getName().startsWith("org.apache.flink.streaming.api.windowing")) {
      return text(value.toString());
    }
    return "{\"$opaque\": " + hex(bytes(serializer, value)) + "}";
  }

  private static String map(TypeSerializer<?> serializer, Map<?, ?> value) throws Exception {
    TreeMap<String, String> found = new TreeMap<>();
    for (Map.Entry<?, ?> entry : value.entrySet()) {
      found.put(
          of(child(serializer, "getKeySerializer"), entry.getKey()),
          of(child(serializer, "getValueSerializer"), entry.getValue()));
    }
    List<String> pairs = new ArrayList<>();
    found.forEach((key, held) -> pairs.add("[" + key + ", " + held + "]"));
    return "[" + String.join(", ", pairs) + "]";
  }

  private static String pojo(PojoSerializer<?> serializer, Object value) throws Exception {
    Class<?> declared = (Class<?>) get(serializer, "clazz");
    List<String> found = new ArrayList<>();
    if (declared != value.getClass()) {
      found.add("\"$class\": " + text(value.getClass().getName()));
      Method method =
          PojoSerializer.class.getDeclaredMethod("getSubclassSerializer", Class.class);
      method.setAccessible(true);
      serializer = (PojoSerializer<?>) method.invoke(serializer, value.getClass());
    }
    Field[] fields = (Field[]) get(serializer, "fields");
    TypeSerializer<?>[] serializers = (TypeSerializer<?>[]) get(serializer, "fieldSerializers");
    for (int i = 0; i < fields.length; i++) {
      if (fields[i] != null && !Modifier.isStatic(fields[i].getModifiers())) {
        fields[i].setAccessible(true);
        String name = text(fields[i].getName());
        found.add(name + ": " + of(serializers[i], fields[i].get(value)));
      }
    }
    return "{" + String.join(", ", found) + "}";
  }

  static TypeSerializer<?> child(TypeSerializer<?> serializer, String getter) {
    return (TypeSerializer<?>) call(serializer, getter);
  }

  /** What a private field holds. */
  static Object get(Object from, String name) {
    for (Class<?> type = from.getClass(); type != null; type = type.getSuperclass()) {
      try {
        Field field = type.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(from);
      } catch (NoSuchFieldException error) {
        continue;
      } catch (ReflectiveOperationException error) {
        throw new IllegalStateException(error);
      }
    }
    throw new IllegalStateException(from.getClass() + " has no field " + name);
  }

  /** What a method without parameters returns; null if nobody has it. */
  static Object call(Object from, String name) {
    for (Class<?> type = from == null ? null : from.getClass();
        type != null;
        type = type.getSuperclass()) {
      try {
        Method method = type.getDeclaredMethod(name);
        method.setAccessible(true);
        return method.invoke(from);
      } catch (NoSuchMethodException error) {
        continue;
      } catch (ReflectiveOperationException error) {
        throw new IllegalStateException(error);
      }
    }
    return null;
  }
}
