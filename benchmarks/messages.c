#define _GNU_SOURCE
#include "messages.h"

#include <stdio.h>

const char *const MESSAGE_NAMES[MESSAGE_COUNT] = {"lean", "usual", "wide"};

/* As many as tags, so that one number chooses both: values of one to seven characters. */
static const char *const AMOUNTS[TAGS_COUNT] = {"9", "12.50", "149.00", "3", "1025.99", "70", "5.25", "18.40"};

int message_variants(enum message message)
{
    return message == MESSAGE_LEAN ? 1 : TAGS_COUNT;
}

void message_properties(enum message message, int variant, const char *key_head, const char *group, char *text,
                        size_t room)
{
    char half[128] = "";
    if (group != NULL)
        snprintf(half, sizeof half, "TRAN_MSG\001true\002PGROUP\001%s\002", group);
    char tag = (char)('A' + variant);
    const char *amount = AMOUNTS[variant];
    switch (message) {
    case MESSAGE_USUAL:
        snprintf(text, room,
                 "amount\001%s\002KEYS\001order-" SCATTERED_PLACE "\002buyer\001" SCATTERED_PLACE
                 "\002UNIQ_KEY\001%s" NUMBER_PLACE "\002WAIT\001true\002region\001eu-central\002%sTAGS\001Tag%c\002",
                 amount, key_head, half, tag);
        break;
    case MESSAGE_WIDE:
        snprintf(text, room,
                 "amount\001%s\002KEYS\001order-" SCATTERED_PLACE " buyer-" SCATTERED_PLACE " parcel-" SCATTERED_PLACE
                 " invoice-" SCATTERED_PLACE "\002buyer\001" SCATTERED_PLACE "\002UNIQ_KEY\001%s" NUMBER_PLACE
                 "\002city\001Z\303\274rich\002WAIT\001true\002region\001eu-central\002traceparent\00100-" SCATTERED_PLACE
                 SCATTERED_PLACE "-" NUMBER_PLACE "-01\002tenant\001retail\002%sschema\001order.created.v3\002"
                 "currency\001CHF\002items\001%d\002channel\001%s\002TAGS\001Tag%c\002",
                 amount, key_head, half, 1 + variant * 3, variant % 3 ? "web" : "mobile-app", tag);
        break;
    default:
        snprintf(text, room, "UNIQ_KEY\001%s" NUMBER_PLACE "\002WAIT\001true\002TAGS\001TagA\002%s", key_head, half);
    }
}
