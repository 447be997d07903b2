package fixtures;

import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeutils.TypeSerializer;

/** A type whose serializer is the one that a savepoint describes. */
final class Restored<T> extends TypeInformation<T> {
  private static final long serialVersionUID = 1;
  private final TypeSerializer<T> serializer;

  Restored(TypeSerializer<T> serializer) {
    this.serializer = serializer;
  }

  @Override
  public TypeSerializer<T> createSerializer(org.apache.flink.api.common.serialization.SerializerConfig config) {
    return serializer;
  }

  @Override
  public boolean isBasicType() {
    return false;
  }

  @Override
  public boolean isTupleType() {
    return false;
  }

  @Override
  public int getArity() {
    return 1;
  }

  @Override
  public int getTotalFields() {
    return 1;
  }

  @Override
  @SuppressWarnings("unchecked")
  public Class<T> getTypeClass() {
    return (Class<T>) Object.class;
  }

  @Override
  public boolean isKeyType() {
    return true;
  }

  @Override
  public String toString() {
    return "Restored(" + serializer + ")";
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof Restored && serializer.equals(((Restored<?>) other).serializer);
  }

  @Override
  public int hashCode() {
    return serializer.hashCode();
  }

  @Override
  public boolean canEqual(Object other) {
    return other instanceof Restored;
  }
}
