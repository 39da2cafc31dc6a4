/* The messages that are sent: what their properties hold, and which of it differs from one to the next. */
#ifndef HALFMQ_BENCHMARKS_MESSAGES_H
#define HALFMQ_BENCHMARKS_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>

enum {
    KEY_SIZE = 32,  /* characters of a UNIQ_KEY */
    KEY_TAIL = 16,  /* of them the part that differs from message to message */
    TAGS_COUNT = 8, /* TagA … TagH */
};

/* Lean: one tag, nothing but what a client adds itself. Usual: KEYS, one of eight tags, three properties of
 * which two vary. Wide: four keys, ten properties, one of them not ASCII. */
enum message { MESSAGE_LEAN, MESSAGE_USUAL, MESSAGE_WIDE, MESSAGE_COUNT };
extern const char *const MESSAGE_NAMES[MESSAGE_COUNT];

/* Stand where sixteen hexadecimal digits are written into each message: its number, or that number scattered
 * over all of them, so that neighbours have neither a beginning nor an end in common. */
#define NUMBER_PLACE "????????????????"
#define SCATTERED_PLACE "################"

/* How many kinds of messages differ in more than the digits: a tag, or the length of a value. */
int message_variants(enum message message);

/* Write the properties of one message, in the order of a Java client's map. `group` makes it a half message
 * of that group; NULL makes it a plain one. */
void message_properties(enum message message, int variant, const char *key_head, const char *group, char *text,
                        size_t room);

#endif
