import java.util.Map;

/** Writes the few kinds of values that a line has. */
final class Json {
    private Json() {
    }

    static String object(Map<String, Object> fields) {
        StringBuilder text = new StringBuilder("{");
        for (Map.Entry<String, Object> field : fields.entrySet()) {
            text.append(text.length() > 1 ? "," : "").append(string(field.getKey())).append(':');
            Object value = field.getValue();
            boolean bare = value == null || value instanceof Number || value instanceof Boolean;
            text.append(bare ? String.valueOf(value) : string(String.valueOf(value)));
        }
        return text.append('}').toString();
    }

    private static String string(String value) {
        StringBuilder text = new StringBuilder("\"");
        for (char c : value.toCharArray()) {
            if (c == '"' || c == '\\') {
                text.append('\\').append(c);
            } else if (c < ' ' || c > '~') {
                text.append(String.format("\\u%04x", (int) c));
            } else {
                text.append(c);
            }
        }
        return text.append('"').toString();
    }
}
