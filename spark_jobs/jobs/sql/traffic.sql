-- Only what consumers of an application see counts as a message: copies, halves and the broker's
-- own records have other roles. Blanks are left out; a damaged range has the role "corrupt".
-- log: columns traffic.COLUMNS and those of message_roles.with_roles.
-- every: the length of an interval in milliseconds; one in which nothing was stored has no row.
-- keys: how many keys are listed. Bytes are those of whole records.

-- name: records
select
    role, topic, partition, timestamp, bigint(size) as bytes, bodySize, messages, bornHost,
    regexp_replace(bornHost, ':[0-9]+$', '') as producerHost, producerGroup, tags,
    string(key) as keys, if(role in ('retry', 'dead_letter'), originTopic, null) as originTopic
from {log} where role is not null

-- name: topics
-- Ranks of sizes are off by a ten-thousandth of the count at most.
select
    role, topic, sum(messages) as messages, count(*) as records, sum(bytes) as bytes,
    sum(bodySize) as bodyBytes, min(timestamp) as first, max(timestamp) as last,
    percentile_approx(bodySize, array(0.5, 0.9, 0.99, 1.0), 10000) as bodySizes
from {records} group by role, topic order by role, topic

-- name: queues
select
    role, topic, partition, sum(messages) as messages, count(*) as records, sum(bytes) as bytes,
    sum(bodySize) as bodyBytes, min(timestamp) as first, max(timestamp) as last,
    percentile_approx(bodySize, array(0.5, 0.9, 0.99, 1.0), 10000) as bodySizes
from {records} group by role, topic, partition order by topic, partition

-- name: rates
select
    *, messages / (:every / 1000) as messagesPerSecond, bytes / (:every / 1000) as bytesPerSecond
from (
    select
        role, topic, partition,
        timestamp_millis(floor(unix_millis(timestamp) / :every) * :every) as start,
        sum(messages) as messages, count(*) as records, sum(bytes) as bytes,
        sum(bodySize) as bodyBytes
    from {records} where role <> 'corrupt' group by all
) order by start, topic, partition

-- name: topic_rates
select
    *, messages / (:every / 1000) as messagesPerSecond, bytes / (:every / 1000) as bytesPerSecond
from (
    select
        role, topic, start, sum(messages) as messages, sum(records) as records,
        sum(bytes) as bytes, sum(bodyBytes) as bodyBytes
    from {rates} group by all
) order by start, topic

-- name: highest
-- The interval in which a topic got most messages, the first of several.
select topic, best.* from (
    select topic, max_by(
        struct(start, messages, messagesPerSecond), struct(messages, -unix_millis(start))
    ) as best
    from {topic_rates} where role = 'message' group by topic
) order by topic

-- name: totals
select role, sum(messages) as messages, count(*) as records, sum(bytes) as bytes
from {records} where role <> 'corrupt' group by role order by role

-- name: producers
-- Only transactional messages name their group. Each port of a host is a connection.
select
    topic, producerHost, producerGroup, sum(messages) as messages, count(*) as records,
    sum(bytes) as bytes, sum(bodySize) as bodyBytes,
    approx_count_distinct(bornHost) as connections, min(timestamp) as first, max(timestamp) as last
from {records} where role = 'message'
group by topic, producerHost, producerGroup order by messages desc, topic, producerHost

-- name: tags
select
    topic, tags, sum(messages) as messages, count(*) as records, sum(bytes) as bytes,
    sum(bodySize) as bodyBytes
from {records} where role = 'message'
group by topic, tags order by messages desc, topic, tags

-- name: keys
-- Exact counts: Spark spills to disk what does not fit in memory.
select topic, key, sum(messages) as messages
from (
    select topic, explode(array_distinct(split(keys, ' '))) as key, messages
    from {records} where role = 'message'
) where key <> ''
group by topic, key order by messages desc, topic, key limit :keys

-- name: failures
-- The group follows the prefix; for pop consumers RocketMQ appends the topic to it. A retry that
-- waits for its time is not counted yet. topic is null if the copies do not say their origin.
with failed as (
    select regexp_replace(topic, '^(%RETRY%|%DLQ%)', '') as consumerGroup, originTopic,
        sum(if(role = 'retry', messages, 0)) as retries,
        sum(if(role = 'dead_letter', messages, 0)) as deadLetters
    from {records} where role in ('retry', 'dead_letter') group by all
), sent as (
    select topic, sum(messages) as messages
    from {records} where role = 'message' group by topic
)
select consumerGroup, originTopic as topic, retries, deadLetters, messages,
    retries / messages as retryRate, deadLetters / messages as deadLetterRate
from failed left join sent on originTopic = sent.topic order by consumerGroup, originTopic
