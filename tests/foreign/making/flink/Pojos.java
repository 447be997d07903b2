package fixtures;

import java.math.BigDecimal;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/** Classes that users write; their names stand in the savepoints. */
public final class Pojos {
  private Pojos() {}

  public enum Colour {
    RED,
    GREEN,
    BLUE
  }

  /** A flat one, with a nullable field. */
  public static class Inner {
    public int number;
    public String text;
    public Integer boxed;

    public Inner() {}

    Inner(int number, String text, Integer boxed) {
      this.number = number;
      this.text = text;
      this.boxed = boxed;
    }
  }

  /** Another in it, collections, an enum, an array. */
  public static class Outer {
    public long id;
    public Inner inner;
    public List<String> tags;
    public Map<String, Long> counts;
    public Colour colour;
    public double[] points;
    public BigDecimal price;
    public boolean flag;
    private String hidden;

    public Outer() {}

    public String getHidden() {
      return hidden;
    }

    public void setHidden(String hidden) {
      this.hidden = hidden;
    }
  }

  /** With subclasses. */
  public static class Base {
    public int a;

    public Base() {}
  }

  /** A subclass that the configuration does not name. */
  public static class Derived extends Base {
    public String b;

    public Derived() {}
  }

  /** A subclass that the configuration names: it gets a tag. */
  public static class Registered extends Base {
    public double c;

    public Registered() {}
  }

  /** A POJO that holds one which may be a subclass. */
  public static class Holder {
    public Base base;
    public java.util.BitSet opaque;
    public short tail;

    public Holder() {}
  }

  /** As a key. */
  public static class Place {
    public String street;
    public int number;

    public Place() {}

    Place(String street, int number) {
      this.street = street;
      this.number = number;
    }

    @Override
    public int hashCode() {
      return Objects.hash(street, number);
    }

    @Override
    public boolean equals(Object other) {
      return other instanceof Place
          && ((Place) other).number == number
          && Objects.equals(((Place) other).street, street);
    }
  }
}
