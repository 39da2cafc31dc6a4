#define _GNU_SOURCE
#include "frames.h"

#include <assert.h>
#include <inttypes.h>

/* ---- writing ------------------------------------------------------------------------------------------- */

/* One frame while it is written. JSON names every ext field; MSGPACK holds the values alone, in the order in
 * which the header class declares them, so the callers below list the fields in exactly that order. */
struct writer {
    enum header_type type;
    unsigned char *start, *at, *end;
    bool first;
    size_t opaque_at;
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
    name_field(w, name);
    put_escaped(w, value);
    put_byte(w, '"');
}

/* Returns where the digits (JSON) or the eight bytes (MSGPACK) of the number start. */
static size_t ext_number(struct writer *w, const char *name, int64_t value)
{
    if (w->type == HEADER_MSGPACK) {
        pack_u64(w, (uint64_t)value);
        return (size_t)(w->at - 8 - w->start);
    }
    name_field(w, name);
    size_t at = (size_t)(w->at - w->start);
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRId64, value);
    put_text(w, digits);
    put_byte(w, '"');
    return at;
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

/* No digits: behind a head that ends in 0, the first sixteen zeros would begin too early. */
static const char PLACEHOLDER[] = "????????????????";

static void message_properties(const struct dialect *dialect, const struct send_plan *plan, char *text, size_t room)
{
    const char *mark = plan->kind == SEND_HALF ? "TRAN_MSG\001true\002PGROUP\001" : "";
    const char *group = plan->kind == SEND_HALF ? dialect->group : "";
    snprintf(text, room, "UNIQ_KEY\001%s%s\002WAIT\001true\002TAGS\001TagA\002%s%s%s", dialect->key_head, PLACEHOLDER,
             mark, group, *mark ? "\002" : "");
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

static void find_keys(struct template *t, size_t key_count, size_t stride)
{
    const unsigned char *behind = find_behind(t->bytes, t->size, PLACEHOLDER);
    assert(behind != NULL);
    t->key_at = (size_t)(behind - t->bytes) - KEY_TAIL;
    t->key_count = key_count;
    t->key_stride = stride;
}

struct template make_send(const struct dialect *dialect, const struct send_plan *plan)
{
    bool is_batch = plan->kind == SEND_BATCH;
    size_t units = is_batch ? plan->units : 1;
    size_t room = 2048 + units * (plan->body_size + 512);
    struct template t = {.type = dialect->type, .bytes = allocate(room)};
    char properties[512];
    message_properties(dialect, plan, properties, sizeof properties);

    int code = is_batch ? CODE_BATCH : CODE_SEND;
    uint32_t opaque = 1000000000; /* ten digits, as every later one */
    struct writer w = begin_frame(dialect->type, t.bytes, room, code, opaque, 0, 14);
    ext_text(&w, "a", dialect->group);
    ext_text(&w, "b", dialect->topic);
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
    size_t header_end = (size_t)(w.at - w.start);
    for (size_t i = 0; is_batch && i < units; i++)
        put_unit(&w, plan->body_size, properties);
    if (!is_batch)
        put_body(&w, plan->body_size);
    t.size = end_frame(&w);
    find_keys(&t, units, (t.size - header_end) / units);
    return t;
}

void template_set_time(struct template *template, uint64_t unix_ms)
{
    unsigned char *at = template->bytes + template->time_at;
    if (template->type == HEADER_MSGPACK)
        put_u64(at, unix_ms);
    else
        put_digits(at, TIME_DIGITS, unix_ms);
}

void stamp(const struct template *template, unsigned char *out, uint32_t opaque, int queue, uint64_t key)
{
    memcpy(out, template->bytes, template->size);
    if (template->type == HEADER_MSGPACK) {
        put_u32(out + template->opaque_at, opaque);
        out[template->queue_at] = (unsigned char)queue;
    } else {
        put_digits(out + template->opaque_at, OPAQUE_DIGITS, opaque);
        out[template->queue_at] = (unsigned char)('0' + queue);
    }
    unsigned char *at = out + template->key_at;
    for (size_t i = 0; i < template->key_count; i++, at += template->key_stride)
        put_hex(at, key + i);
}

/* ---- other requests ------------------------------------------------------------------------------------ */

size_t make_route(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque)
{
    struct writer w = begin_frame(HEADER_JSON, out, room, CODE_ROUTE, opaque, 0, 0);
    ext_text(&w, "acceptStandardJsonOnly", "true");
    ext_text(&w, "topic", dialect->topic);
    end_header(&w, opaque, 0);
    return end_frame(&w);
}

size_t make_pull(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque, int queue,
                 int64_t offset, int count)
{
    struct writer w = begin_frame(dialect->type, out, room, CODE_PULL, opaque, 0, 12);
    ext_text(&w, "consumerGroup", dialect->group);
    ext_text(&w, "topic", dialect->topic);
    ext_small(&w, "queueId", queue);
    ext_number(&w, "queueOffset", offset);
    ext_small(&w, "maxMsgNums", count);
    ext_small(&w, "sysFlag", 4); /* the subscription is in the request; never held */
    ext_small(&w, "commitOffset", 0);
    ext_number(&w, "suspendTimeoutMillis", 20000);
    ext_small(&w, "subVersion", 0);
    ext_text(&w, "subscription", "*");
    ext_text(&w, "expressionType", "TAG");
    ext_number(&w, "maxMsgBytes", 262144);
    end_header(&w, opaque, 0);
    return end_frame(&w);
}

size_t make_commit(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque, bool one_way,
                   int64_t half_queue_offset, int64_t half_log_offset, uint64_t key)
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
    ext_text(&w, "topic", dialect->topic);
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
    const unsigned char *id = find_behind(reply->header, reply->header_size, "\"msgId\":\"");
    if (id == NULL)
        return false;
    const unsigned char *quote = memchr(id, '"', (size_t)(end - id));
    return quote != NULL && log_offset_of(id, (size_t)(quote - id), log_offset) &&
           json_number(reply, "\"queueOffset\":\"", queue_offset);
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
    return json_number(request, "\"queueOffset\":\"", offset) && json_number(request, "\"maxMsgNums\":\"", count);
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
    return json_number(reply, "\"nextBeginOffset\":\"", &answer->next_offset) &&
           json_number(reply, "\"minOffset\":\"", &answer->min_offset) &&
           json_number(reply, "\"maxOffset\":\"", &answer->max_offset);
}

int64_t count_records(const unsigned char *body, size_t size)
{
    int64_t count = 0;
    size_t at = 0;
    for (; at < size; count++) {
        if (size - at < RECORD_FIXED || get_u32(body + at + 4) != RECORD_MAGIC)
            return -1;
        uint32_t record_size = get_u32(body + at);
        if (record_size < RECORD_FIXED || record_size > size - at)
            return -1;
        at += record_size;
    }
    return count;
}
