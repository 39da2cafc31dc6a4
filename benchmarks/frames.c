#define _GNU_SOURCE
#include "frames.h"

#include <inttypes.h>

/* ---- writing ------------------------------------------------------------------------------------------- */

/* One frame while it is written. JSON and ROCKETMQ name every ext field; MSGPACK holds the values alone, in the
 * order in which the header class declares them, so the callers below list the fields in exactly that order. */
struct writer {
    enum header_type type;
    unsigned char *start, *at, *end;
    bool first;
    size_t opaque_at, ext_at; /* ext_at: ROCKETMQ's length of all ext fields */
};

static void put(struct writer *w, const void *bytes, size_t size)
{
    if ((size_t)(w->end - w->at) < size)
        fail("a request does not fit its buffer");
    memcpy(w->at, bytes, size);
    w->at += size;
}

static void put_text(struct writer *w, const char *text)
{
    put(w, text, strlen(text));
}

static void put_byte(struct writer *w, unsigned char byte)
{
    put(w, &byte, 1);
}

static void pack_text(struct writer *w, const char *text)
{
    size_t size = strlen(text);
    unsigned char head[3] = {0xda};
    put_u16(head + 1, (uint32_t)size);
    put(w, head, sizeof head);
    put(w, text, size);
}

static void pack_u16(struct writer *w, int value)
{
    unsigned char packed[3] = {0xcd};
    put_u16(packed + 1, (uint32_t)value);
    put(w, packed, sizeof packed);
}

static void pack_u64(struct writer *w, uint64_t value)
{
    unsigned char packed[9] = {0xcf};
    put_u64(packed + 1, value);
    put(w, packed, sizeof packed);
}

static void pack_opaque(struct writer *w, uint32_t opaque)
{
    unsigned char packed[5] = {0xce};
    put_u32(packed + 1, opaque);
    w->opaque_at = (size_t)(w->at + 1 - w->start);
    put(w, packed, sizeof packed);
}

/* The quotes stay with the caller. Properties are parted by 1 and 2, which JSON wants escaped. */
static void put_escaped(struct writer *w, const char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20) {
            char escaped[8];
            snprintf(escaped, sizeof escaped, "\\u%04x", *text);
            put_text(w, escaped);
        } else {
            put(w, text, 1);
        }
    }
}

/* ROCKETMQ: the key behind its length, then room for the length of the value. */
static size_t name_binary(struct writer *w, const char *name)
{
    unsigned char length[2];
    put_u16(length, (uint32_t)strlen(name));
    put(w, length, sizeof length);
    put_text(w, name);
    put(w, "\0\0\0\0", 4);
    return (size_t)(w->at - 4 - w->start);
}

static void ext_binary(struct writer *w, const char *name, const char *value)
{
    size_t length_at = name_binary(w, name);
    put_text(w, value);
    put_u32(w->start + length_at, (uint32_t)strlen(value));
}

static void name_field(struct writer *w, const char *name)
{
    put_text(w, w->first ? "\"" : ",\"");
    put_text(w, name);
    put_text(w, "\":\"");
    w->first = false;
}

static void ext_text(struct writer *w, const char *name, const char *value)
{
    if (w->type == HEADER_MSGPACK) {
        pack_text(w, value);
        return;
    }
    if (w->type == HEADER_ROCKETMQ) {
        ext_binary(w, name, value);
        return;
    }
    name_field(w, name);
    put_escaped(w, value);
    put_byte(w, '"');
}

/* Returns where the digits (JSON, ROCKETMQ) or the eight bytes (MSGPACK) of the number start. */
static size_t ext_number(struct writer *w, const char *name, int64_t value)
{
    if (w->type == HEADER_MSGPACK) {
        pack_u64(w, (uint64_t)value);
        return (size_t)(w->at - 8 - w->start);
    }
    char digits[24];
    size_t size = (size_t)snprintf(digits, sizeof digits, "%" PRId64, value);
    ext_text(w, name, digits);
    return (size_t)(w->at - w->start) - size - (w->type == HEADER_JSON); /* JSON closes with a quote */
}

static size_t ext_small(struct writer *w, const char *name, int value)
{
    if (w->type != HEADER_MSGPACK)
        return ext_number(w, name, value);
    put_byte(w, (unsigned char)value); /* 0 … 127: the byte is the number */
    return (size_t)(w->at - 1 - w->start);
}

static void ext_bool(struct writer *w, const char *name, bool value)
{
    if (w->type == HEADER_MSGPACK)
        put_byte(w, value ? 0xc3 : 0xc2);
    else
        ext_text(w, name, value ? "true" : "false");
}

/* A field that official clients leave out here; the array form needs its place kept. */
static void ext_absent(struct writer *w)
{
    if (w->type == HEADER_MSGPACK)
        put_byte(w, 0xc0);
}

static struct writer begin_frame(enum header_type type, unsigned char *out, size_t room, int code, uint32_t opaque,
                                 int flag, int ext_fields)
{
    struct writer w = {.type = type, .start = out, .at = out, .end = out + room, .first = true};
    put(&w, "\0\0\0\0\0\0\0\0", FRAME_HEAD);
    if (type == HEADER_MSGPACK) {
        put_byte(&w, 0x97); /* [code, opaque, flag, language, version, remark, ext] */
        pack_u16(&w, code);
        pack_opaque(&w, opaque);
        put_byte(&w, (unsigned char)flag);
        put_byte(&w, 7); /* LanguageCode OTHER */
        pack_u16(&w, 479);
        put_byte(&w, 0xc0);
        put_byte(&w, (unsigned char)(0x90 | ext_fields)); /* an array of up to 15 values */
    } else if (type == HEADER_ROCKETMQ) {
        unsigned char head[21] = {0}; /* code, language, version, opaque, flag, no remark, size of the ext fields */
        put_u16(head, (uint32_t)code);
        head[2] = 7;
        put_u16(head + 3, 479);
        put_u32(head + 5, opaque);
        put_u32(head + 9, (uint32_t)flag);
        put(&w, head, sizeof head);
        w.opaque_at = FRAME_HEAD + 5;
        w.ext_at = FRAME_HEAD + sizeof head - 4;
    } else {
        char text[64];
        snprintf(text, sizeof text, "{\"code\":%d,\"extFields\":{", code);
        put_text(&w, text);
    }
    return w;
}

/* The keys come in the alphabetical order in which the Java client writes them. */
static void end_header(struct writer *w, uint32_t opaque, int flag)
{
    if (w->type == HEADER_JSON) {
        char text[96];
        snprintf(text, sizeof text, "},\"flag\":%d,\"language\":\"OTHER\",\"opaque\":", flag);
        put_text(w, text);
        w->opaque_at = (size_t)(w->at - w->start);
        snprintf(text, sizeof text, "%" PRIu32 ",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":479}", opaque);
        put_text(w, text);
    }
    if (w->type == HEADER_ROCKETMQ)
        put_u32(w->start + w->ext_at, (uint32_t)((size_t)(w->at - w->start) - w->ext_at - 4));
    put_u32(w->start + 4, (uint32_t)w->type << 24 | (uint32_t)(w->at - w->start - FRAME_HEAD));
}

static size_t end_frame(struct writer *w)
{
    size_t size = (size_t)(w->at - w->start);
    put_u32(w->start, (uint32_t)size - 4);
    return size;
}

/* ---- sends --------------------------------------------------------------------------------------------- */

static void put_hex(unsigned char *at, uint64_t value)
{
    static const char digits[] = "0123456789ABCDEF";
    for (int i = KEY_TAIL; i-- > 0; value >>= 4)
        at[i] = (unsigned char)digits[value & 15];
}

static void key_text(const struct dialect *dialect, uint64_t key, char text[KEY_SIZE + 1])
{
    snprintf(text, KEY_SIZE + 1, "%s%016" PRIX64, dialect->key_head, key);
}

static void put_body(struct writer *w, size_t size)
{
    uint32_t state = 1; /* not compressible, the same in every run */
    for (size_t i = 0; i < size; i++) {
        state = state * 1664525u + 1013904223u;
        put_byte(w, (unsigned char)(' ' + (state >> 24) % 95));
    }
}

static void put_unit(struct writer *w, size_t body_size, const char *properties)
{
    size_t properties_size = strlen(properties);
    unsigned char head[20] = {0}; /* size, magic, CRC, flag, body size */
    put_u32(head, (uint32_t)(sizeof head + body_size + 2 + properties_size));
    put_u32(head + 16, (uint32_t)body_size);
    put(w, head, sizeof head);
    put_body(w, body_size);
    unsigned char length[2];
    put_u16(length, (uint32_t)properties_size);
    put(w, length, sizeof length);
    put(w, properties, properties_size);
}

/* Note the places of numbers in what was written from `start` on, all of them of one message. */
static void note_marks(struct template *t, const struct writer *w, size_t start, size_t unit)
{
    uint32_t lane = 0;
    const size_t size = (size_t)(w->at - w->start);
    for (size_t at = start; at + KEY_TAIL <= size;) {
        bool is_number = memcmp(w->start + at, NUMBER_PLACE, KEY_TAIL) == 0;
        if (!is_number && memcmp(w->start + at, SCATTERED_PLACE, KEY_TAIL) != 0) {
            at++;
            continue;
        }
        if (t->mark_count == t->mark_room)
            fail("a message has more changing places than a template holds");
        t->marks[t->mark_count++] = (struct mark){(uint32_t)at, (uint16_t)unit, (uint16_t)(is_number ? 0 : ++lane)};
        at += KEY_TAIL;
    }
}

struct template make_send(const struct dialect *dialect, const struct send_plan *plan)
{
    bool is_batch = plan->kind == SEND_BATCH;
    size_t units = is_batch ? plan->units : 1;
    size_t room = 2 * PROPERTIES_MAX + units * (plan->body_size + PROPERTIES_MAX);
    size_t mark_room = units * MARKS_MAX;
    struct template t = {.type = dialect->type, .bytes = allocate(room), .key_count = units, .mark_room = mark_room,
                         .marks = allocate(mark_room * sizeof *t.marks)};
    const char *half_group = plan->kind == SEND_HALF ? dialect->group : NULL;
    int variants = message_variants(dialect->message);
    char properties[PROPERTIES_MAX / 2]; /* JSON writes some characters as six */
    message_properties(dialect->message, plan->variant % variants, dialect->key_head, half_group, properties,
                       sizeof properties);

    int code = is_batch ? CODE_BATCH : CODE_SEND;
    uint32_t opaque = 1000000000; /* ten digits, as every later one */
    struct writer w = begin_frame(dialect->type, t.bytes, room, code, opaque, 0, 14);
    ext_text(&w, "a", dialect->group);
    ext_text(&w, "b", plan->topic);
    ext_text(&w, "c", "TBW102");
    ext_small(&w, "d", plan->topic_queues);
    t.queue_at = ext_small(&w, "e", 0);
    ext_small(&w, "f", plan->kind == SEND_HALF ? 4 : 0); /* 4: TRANSACTION_PREPARED */
    t.time_at = ext_number(&w, "g", 1000000000000);
    ext_small(&w, "h", 0);
    ext_text(&w, "i", is_batch ? "WAIT\001true\002" : properties);
    ext_small(&w, "j", 0);
    ext_bool(&w, "k", false);
    ext_absent(&w); /* l, maxReconsumeTimes */
    ext_bool(&w, "m", is_batch);
    ext_text(&w, "n", dialect->broker_name);
    end_header(&w, opaque, 0);
    t.opaque_at = w.opaque_at;
    if (!is_batch) {
        note_marks(&t, &w, 0, 0);
        put_body(&w, plan->body_size);
    }
    for (size_t unit = 0; is_batch && unit < units; unit++) {
        message_properties(dialect->message, (plan->variant + (int)unit) % variants, dialect->key_head, NULL, properties,
                           sizeof properties);
        put_unit(&w, plan->body_size, properties);
        note_marks(&t, &w, (size_t)(w.at - w.start) - strlen(properties), unit);
    }
    t.size = end_frame(&w);
    return t;
}

/* Odd, so that different numbers stay different. */
static const uint64_t SCATTER = 0x9E3779B97F4A7C15u;

void stamp(const struct template *template, unsigned char *out, uint32_t opaque, int queue, uint64_t unix_ms,
           uint64_t key)
{
    memcpy(out, template->bytes, template->size);
    if (template->type == HEADER_JSON)
        put_digits(out + template->opaque_at, OPAQUE_DIGITS, opaque);
    else
        put_u32(out + template->opaque_at, opaque);
    if (template->type == HEADER_MSGPACK) {
        out[template->queue_at] = (unsigned char)queue;
        put_u64(out + template->time_at, unix_ms);
    } else {
        out[template->queue_at] = (unsigned char)('0' + queue);
        put_digits(out + template->time_at, TIME_DIGITS, unix_ms);
    }
    for (size_t i = 0; i < template->mark_count; i++) {
        const struct mark *mark = &template->marks[i];
        uint64_t number = key + mark->unit;
        put_hex(out + mark->at, mark->lane == 0 ? number : (number * MARKS_MAX + mark->lane) * SCATTER);
    }
}

/* ---- other requests ------------------------------------------------------------------------------------ */

size_t make_route(const char *topic, unsigned char *out, size_t room, uint32_t opaque)
{
    struct writer w = begin_frame(HEADER_JSON, out, room, CODE_ROUTE, opaque, 0, 0);
    ext_text(&w, "acceptStandardJsonOnly", "true");
    ext_text(&w, "topic", topic);
    end_header(&w, opaque, 0);
    return end_frame(&w);
}

size_t make_max_offset(const char *topic, unsigned char *out, size_t room, uint32_t opaque, int queue)
{
    struct writer w = begin_frame(HEADER_JSON, out, room, CODE_MAX_OFFSET, opaque, 0, 0);
    ext_text(&w, "topic", topic);
    ext_number(&w, "queueId", queue);
    end_header(&w, opaque, 0);
    return end_frame(&w);
}

size_t make_pull(const struct dialect *dialect, const struct pull_plan *plan, unsigned char *out, size_t room,
                 uint32_t opaque)
{
    struct writer w = begin_frame(dialect->type, out, room, CODE_PULL, opaque, 0, 12);
    ext_text(&w, "consumerGroup", dialect->group);
    ext_text(&w, "topic", plan->topic);
    ext_small(&w, "queueId", plan->queue);
    ext_number(&w, "queueOffset", plan->offset);
    ext_small(&w, "maxMsgNums", plan->count);
    ext_small(&w, "sysFlag", 4); /* the subscription is in the request; never held */
    ext_small(&w, "commitOffset", 0);
    ext_number(&w, "suspendTimeoutMillis", 20000);
    ext_small(&w, "subVersion", 0);
    ext_text(&w, "subscription", plan->tag ? plan->tag : "*");
    ext_text(&w, "expressionType", "TAG");
    ext_number(&w, "maxMsgBytes", 262144);
    end_header(&w, opaque, 0);
    return end_frame(&w);
}

size_t make_commit(const struct dialect *dialect, const char *topic, unsigned char *out, size_t room, uint32_t opaque,
                   bool one_way, int64_t half_queue_offset, int64_t half_log_offset, uint64_t key)
{
    char key_and_id[KEY_SIZE + 1];
    key_text(dialect, key, key_and_id);
    int flag = one_way ? FLAG_ONE_WAY : 0;
    struct writer w = begin_frame(dialect->type, out, room, CODE_END_TRANSACTION, opaque, flag, 9);
    ext_text(&w, "producerGroup", dialect->group);
    ext_number(&w, "tranStateTableOffset", half_queue_offset);
    ext_number(&w, "commitLogOffset", half_log_offset);
    ext_small(&w, "commitOrRollback", 8); /* TRANSACTION_COMMIT_TYPE */
    ext_text(&w, "msgId", key_and_id);
    ext_text(&w, "topic", topic);
    ext_bool(&w, "fromTransactionCheck", false);
    ext_text(&w, "transactionId", key_and_id);
    ext_text(&w, "bname", dialect->broker_name);
    end_header(&w, opaque, flag);
    return end_frame(&w);
}

/* ---- reading ------------------------------------------------------------------------------------------- */

struct reader {
    const unsigned char *at, *end;
};

static bool need(const struct reader *r, size_t size)
{
    return (size_t)(r->end - r->at) >= size;
}

/* The head of a MSGPACK value: its kind and its number (an integer's value, a text's or array's length). */
enum kind { KIND_INT, KIND_TEXT, KIND_ARRAY, KIND_MAP, KIND_OTHER, KIND_BROKEN };

static enum kind sized(struct reader *r, size_t width, enum kind kind, int64_t *number)
{
    if (!need(r, width))
        return KIND_BROKEN;
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++)
        value = value << 8 | *r->at++;
    *number = (int64_t)value;
    return kind;
}

static enum kind read_head(struct reader *r, int64_t *number)
{
    if (!need(r, 1))
        return KIND_BROKEN;
    unsigned char byte = *r->at++;
    *number = byte & 0x0f;
    if (byte < 0x80 || byte >= 0xe0) {
        *number = (int8_t)byte;
        return KIND_INT;
    }
    if (byte < 0xa0)
        return byte < 0x90 ? KIND_MAP : KIND_ARRAY;
    if (byte < 0xc0) {
        *number = byte & 0x1f;
        return KIND_TEXT;
    }
    switch (byte) {
    case 0xc0: case 0xc2: case 0xc3: return KIND_OTHER;
    case 0xcc: case 0xcd: case 0xce: case 0xcf: return sized(r, 1u << (byte - 0xcc), KIND_INT, number);
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: return sized(r, 1u << (byte - 0xd0), KIND_INT, number);
    case 0xd9: case 0xda: case 0xdb: return sized(r, 1u << (byte - 0xd9), KIND_TEXT, number);
    case 0xdc: case 0xdd: return sized(r, 2u << (byte - 0xdc), KIND_ARRAY, number);
    default: return KIND_BROKEN;
    }
}

/* A number, also one written as text; nil and booleans count as 0. */
static bool unpack_number(struct reader *r, int64_t *value)
{
    int64_t number = 0;
    enum kind kind = read_head(r, &number);
    *value = kind == KIND_INT ? number : 0;
    if (kind == KIND_TEXT) {
        if (!need(r, (size_t)number))
            return false;
        read_decimal(r->at, r->at + number, value);
        r->at += number;
    }
    return kind == KIND_INT || kind == KIND_TEXT || kind == KIND_OTHER;
}

static bool unpack_text(struct reader *r, const unsigned char **text, size_t *size)
{
    int64_t number = 0;
    if (read_head(r, &number) != KIND_TEXT || !need(r, (size_t)number))
        return false;
    *text = r->at;
    *size = (size_t)number;
    r->at += number;
    return true;
}

static bool unpack_reply(struct reader r, struct reply *reply)
{
    int64_t length = 0, code = 0, opaque = 0, flag = 0, skipped = 0;
    if (read_head(&r, &length) != KIND_ARRAY || length != 7)
        return false;
    if (!unpack_number(&r, &code) || !unpack_number(&r, &opaque) || !unpack_number(&r, &flag))
        return false;
    for (int i = 0; i < 3; i++) /* language, version, remark */
        if (!unpack_number(&r, &skipped))
            return false;
    reply->code = (int)code;
    reply->opaque = (uint32_t)opaque;
    reply->flag = (int)flag;
    reply->header = r.at;
    reply->header_size = (size_t)(r.end - r.at);
    return true;
}

static bool json_number(const struct reply *reply, const char *key, int64_t *value)
{
    const unsigned char *at = find_behind(reply->header, reply->header_size, key);
    return at != NULL && read_decimal(at, reply->header + reply->header_size, value);
}

/* The text of a ROCKETMQ ext field. */
static bool binary_field(const struct reply *reply, const char *name, const unsigned char **text, size_t *size)
{
    const unsigned char *at = reply->header, *end = reply->header + reply->header_size;
    while (end - at >= 6) {
        size_t key_size = get_u16(at);
        const unsigned char *key = at + 2;
        if ((size_t)(end - key) < key_size + 4)
            return false;
        *size = get_u32(key + key_size);
        *text = key + key_size + 4;
        if ((size_t)(end - *text) < *size)
            return false;
        if (key_size == strlen(name) && memcmp(key, name, key_size) == 0)
            return true;
        at = *text + *size;
    }
    return false;
}

/* The text of an ext field that has a name on the wire. */
static bool named_text(const struct reply *reply, const char *name, const unsigned char **text, size_t *size)
{
    if (reply->type == HEADER_ROCKETMQ)
        return binary_field(reply, name, text, size);
    char key[32];
    snprintf(key, sizeof key, "\"%s\":\"", name);
    *text = find_behind(reply->header, reply->header_size, key);
    if (*text == NULL)
        return false;
    const unsigned char *end = reply->header + reply->header_size;
    const unsigned char *quote = memchr(*text, '"', (size_t)(end - *text));
    *size = quote ? (size_t)(quote - *text) : 0;
    return quote != NULL;
}

static bool named_number(const struct reply *reply, const char *name, int64_t *value)
{
    const unsigned char *text;
    size_t size;
    return named_text(reply, name, &text, &size) && read_decimal(text, text + size, value);
}

/* The fixed part of a ROCKETMQ header; the ext fields stay as the header. */
static bool open_binary(struct reply *reply)
{
    const unsigned char *at = reply->header;
    if (reply->header_size < 21)
        return false;
    size_t remark_size = get_u32(at + 13);
    if (remark_size > reply->header_size - 21)
        return false;
    reply->code = (int16_t)get_u16(at);
    reply->opaque = get_u32(at + 5);
    reply->flag = (int)get_u32(at + 9);
    reply->header = at + 21 + remark_size;
    reply->header_size -= 21 + remark_size;
    return true;
}

static bool parse_reply(struct reply *reply)
{
    int64_t code = 0, opaque = 0, flag = 0;
    if (!json_number(reply, "\"code\":", &code) || !json_number(reply, "\"opaque\":", &opaque))
        return false;
    json_number(reply, "\"flag\":", &flag);
    reply->code = (int)code;
    reply->opaque = (uint32_t)opaque;
    reply->flag = (int)flag;
    return true;
}

bool read_reply(const unsigned char *frame, size_t size, struct reply *reply)
{
    uint32_t word = get_u32(frame + 4);
    size_t header_size = word & 0xffffff;
    if (header_size > size - FRAME_HEAD)
        return false;
    *reply = (struct reply){
        .type = (enum header_type)(word >> 24),
        .header = frame + FRAME_HEAD,
        .header_size = header_size,
        .body = frame + FRAME_HEAD + header_size,
        .body_size = size - FRAME_HEAD - header_size,
    };
    if (reply->type == HEADER_MSGPACK)
        return unpack_reply((struct reader){reply->header, reply->body}, reply);
    if (reply->type == HEADER_ROCKETMQ)
        return open_binary(reply);
    return reply->type == HEADER_JSON && parse_reply(reply);
}

static int hex_digit(unsigned char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    unsigned char lower = c | 0x20;
    return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* An offset message id ends in the commit-log offset, 16 hexadecimal digits. */
static bool log_offset_of(const unsigned char *id, size_t size, int64_t *log_offset)
{
    if (size != 32 && size != 56)
        return false;
    uint64_t value = 0;
    for (const unsigned char *at = id + size - 16; at < id + size; at++) {
        int digit = hex_digit(*at);
        if (digit < 0)
            return false;
        value = value << 4 | (unsigned)digit;
    }
    *log_offset = (int64_t)value;
    return true;
}

bool read_half_position(const struct reply *reply, int64_t *queue_offset, int64_t *log_offset)
{
    const unsigned char *end = reply->header + reply->header_size;
    if (reply->type == HEADER_MSGPACK) { /* [msg_id, queue_id, queue_offset, …] */
        struct reader r = {reply->header, end};
        int64_t fields = 0, queue = 0;
        const unsigned char *id = NULL;
        size_t size = 0;
        return read_head(&r, &fields) == KIND_ARRAY && fields >= 3 && unpack_text(&r, &id, &size) &&
               unpack_number(&r, &queue) && unpack_number(&r, queue_offset) && log_offset_of(id, size, log_offset);
    }
    const unsigned char *id;
    size_t size;
    return named_text(reply, "msgId", &id, &size) && log_offset_of(id, size, log_offset) &&
           named_number(reply, "queueOffset", queue_offset);
}

bool read_pull_request(const struct reply *request, int64_t *offset, int64_t *count)
{
    if (request->type == HEADER_MSGPACK) { /* [group, topic, queue_id, queue_offset, max_msg_nums, …] */
        struct reader r = {request->header, request->header + request->header_size};
        int64_t fields = 0, skipped = 0;
        return read_head(&r, &fields) == KIND_ARRAY && fields >= 5 && unpack_number(&r, &skipped) &&
               unpack_number(&r, &skipped) && unpack_number(&r, &skipped) && unpack_number(&r, offset) &&
               unpack_number(&r, count);
    }
    return named_number(request, "queueOffset", offset) && named_number(request, "maxMsgNums", count);
}

bool read_pull_answer(const struct reply *reply, struct pull_answer *answer)
{
    if (reply->type == HEADER_MSGPACK) { /* [suggest_which_broker_id, next, min, max, …] */
        struct reader r = {reply->header, reply->header + reply->header_size};
        int64_t fields = 0, suggested = 0;
        return read_head(&r, &fields) == KIND_ARRAY && fields >= 4 && unpack_number(&r, &suggested) &&
               unpack_number(&r, &answer->next_offset) && unpack_number(&r, &answer->min_offset) &&
               unpack_number(&r, &answer->max_offset);
    }
    return named_number(reply, "nextBeginOffset", &answer->next_offset) &&
           named_number(reply, "minOffset", &answer->min_offset) &&
           named_number(reply, "maxOffset", &answer->max_offset);
}

bool read_max_offset(const struct reply *reply, int64_t *offset)
{
    return reply->code == 0 && named_number(reply, "offset", offset);
}

/* Whether the properties of a record, which stand behind its body and topic, have this tag. */
static bool has_tag(const unsigned char *record, size_t size, const char *tag)
{
    size_t topic_at = RECORD_BODY_SIZE_AT + 4 + (size_t)get_u32(record + RECORD_BODY_SIZE_AT);
    if (topic_at >= size)
        return false;
    size_t properties_at = topic_at + 1 + record[topic_at] + 2;
    char property[80];
    int length = snprintf(property, sizeof property, "TAGS\001%s\002", tag);
    return properties_at < size && memmem(record + properties_at, size - properties_at, property, (size_t)length) != NULL;
}

int64_t count_records(const unsigned char *body, size_t size, const char *tag)
{
    int64_t count = 0;
    size_t at = 0;
    for (; at < size; count++) {
        if (size - at < RECORD_FIXED || get_u32(body + at + 4) != RECORD_MAGIC)
            return -1;
        uint32_t record_size = get_u32(body + at);
        if (record_size < RECORD_FIXED || record_size > size - at || (tag && !has_tag(body + at, record_size, tag)))
            return -1;
        at += record_size;
    }
    return count;
}
