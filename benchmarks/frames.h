/* The requests the generator sends and the replies it reads, in both header types. */
#ifndef HALFMQ_BENCHMARKS_FRAMES_H
#define HALFMQ_BENCHMARKS_FRAMES_H

#include "messages.h"
#include "wire.h"

enum {
    QUEUES_MAX = 10,       /* queue ids stay one digit, so that a template keeps its size */
    MARKS_MAX = 16,        /* places of a message that differ from one to the next */
    PROPERTIES_MAX = 2048, /* bytes, as JSON writes them */
    OPAQUE_DIGITS = 10,
    TIME_DIGITS = 13,      /* milliseconds since 1970 */
};

/* What every request of one run has in common. */
struct dialect {
    enum header_type type;
    const char *group;
    const char *broker_name;
    enum message message;
    char key_head[KEY_SIZE - KEY_TAIL + 1];
};

/* Sixteen digits that differ from message to message. */
struct mark {
    uint32_t at;   /* from the start of the frame */
    uint16_t unit; /* of a batch */
    uint16_t lane; /* 0: the message's number; else which scattering of it */
};

/* A request built once; sending it means copying it and overwriting the fields that change. */
struct template {
    enum header_type type;
    unsigned char *bytes;
    size_t size;
    size_t opaque_at, queue_at, time_at; /* positions from the start of the frame */
    size_t key_count;                    /* messages in it */
    struct mark *marks;
    size_t mark_count, mark_room;
};

enum send_kind { SEND_SINGLE, SEND_HALF, SEND_BATCH };

struct send_plan {
    enum send_kind kind;
    const char *topic;
    int variant;       /* of the message; of a batch, its first unit's, from which the others count on */
    size_t body_size;
    size_t units;      /* of a batch */
    int topic_queues;  /* asked for when the topic is created by the send */
};

struct pull_plan {
    const char *topic;
    const char *tag;   /* NULL: all messages */
    int queue;
    int64_t offset;
    int count;
};

struct template make_send(const struct dialect *dialect, const struct send_plan *plan);

/* Copy the template to `out` (template->size bytes) as request `opaque`; its units take key, key + 1, … */
void stamp(const struct template *template, unsigned char *out, uint32_t opaque, int queue, uint64_t unix_ms,
           uint64_t key);

/* Each of these writes one frame to `out` and returns its size; running out of `room` ends the program. */
size_t make_route(const char *topic, unsigned char *out, size_t room, uint32_t opaque);
size_t make_max_offset(const char *topic, unsigned char *out, size_t room, uint32_t opaque, int queue);
size_t make_pull(const struct dialect *dialect, const struct pull_plan *plan, unsigned char *out, size_t room,
                 uint32_t opaque);
size_t make_commit(const struct dialect *dialect, const char *topic, unsigned char *out, size_t room, uint32_t opaque,
                   bool one_way, int64_t half_queue_offset, int64_t half_log_offset, uint64_t key);

struct reply {
    enum header_type type;
    int code;
    uint32_t opaque;
    int flag;
    const unsigned char *header; /* JSON: the text; MSGPACK: the ext value; ROCKETMQ: the ext fields */
    size_t header_size;
    const unsigned char *body;
    size_t body_size;
};

/* Read one whole frame; false if its header is not one we can read. */
bool read_reply(const unsigned char *frame, size_t size, struct reply *reply);

/* From the answer to a half message: where END_TRANSACTION finds it. */
bool read_half_position(const struct reply *reply, int64_t *queue_offset, int64_t *log_offset);

struct pull_answer {
    int64_t next_offset, min_offset, max_offset;
};

/* For the echo server: what a pull asks for. */
bool read_pull_request(const struct reply *request, int64_t *offset, int64_t *count);

bool read_pull_answer(const struct reply *reply, struct pull_answer *answer);

/* How many messages a queue has had, from the answer to GET_MAX_OFFSET. */
bool read_max_offset(const struct reply *reply, int64_t *offset);

/* Stored records in a pull body, or -1 if it is not a row of whole records, all with `tag` unless it is NULL. */
int64_t count_records(const unsigned char *body, size_t size, const char *tag);

#endif
