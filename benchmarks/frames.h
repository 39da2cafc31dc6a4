/* The requests the generator sends and the replies it reads, in both header types. */
#ifndef HALFMQ_BENCHMARKS_FRAMES_H
#define HALFMQ_BENCHMARKS_FRAMES_H

#include "wire.h"

enum {
    KEY_SIZE = 32,       /* characters of a UNIQ_KEY */
    KEY_TAIL = 16,       /* of them the part that differs from message to message */
    QUEUES_MAX = 10,     /* queue ids stay one digit, so that a template keeps its size */
    OPAQUE_DIGITS = 10,
    TIME_DIGITS = 13,    /* milliseconds since 1970 */
};

/* What every request of one run has in common. */
struct dialect {
    enum header_type type;
    const char *group;
    const char *topic;
    const char *broker_name;
    char key_head[KEY_SIZE - KEY_TAIL + 1];
};

/* A request built once; sending it means copying it and overwriting the fields that change. */
struct template {
    enum header_type type;
    unsigned char *bytes;
    size_t size;
    size_t opaque_at, queue_at, time_at; /* positions from the start of the frame */
    size_t key_at;                       /* the changing tail of the first UNIQ_KEY */
    size_t key_stride;                   /* to the next unit's */
    size_t key_count;
};

enum send_kind { SEND_SINGLE, SEND_HALF, SEND_BATCH };

struct send_plan {
    enum send_kind kind;
    size_t body_size;
    size_t units;      /* of a batch */
    int topic_queues;  /* asked for when the topic is created by the send */
};

struct template make_send(const struct dialect *dialect, const struct send_plan *plan);
void template_set_time(struct template *template, uint64_t unix_ms);

/* Copy the template to `out` (template->size bytes) as request `opaque`; its units take key, key + 1, … */
void stamp(const struct template *template, unsigned char *out, uint32_t opaque, int queue, uint64_t key);

/* Each of these writes one frame to `out` and returns its size; running out of `room` ends the program. */
size_t make_route(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque);
size_t make_pull(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque, int queue,
                 int64_t offset, int count);
size_t make_commit(const struct dialect *dialect, unsigned char *out, size_t room, uint32_t opaque, bool one_way,
                   int64_t half_queue_offset, int64_t half_log_offset, uint64_t key);

struct reply {
    enum header_type type;
    int code;
    uint32_t opaque;
    int flag;
    const unsigned char *header; /* JSON: the text; MSGPACK: the ext value */
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

/* Stored records in a pull body, or -1 if it is not a row of whole records. */
int64_t count_records(const unsigned char *body, size_t size);

#endif
