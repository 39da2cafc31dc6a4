-- Compares a log with an outside ledger. Only messages that consumers see count: finals of
-- transactions, not their halves. A message may have several keys (the words of its KEYS); it is
-- matched when one of them has a row. A key that several messages have is a double only if it has a
-- row, or if those messages are not matched by another key: an order and its customer can both be
-- keys.
-- log: columns reconcile.COLUMNS and those of message_roles.with_roles. ledger: key, at (ms).
-- topics, key: whose messages, and the property with their keys.
-- since, until: the time range whose rows and messages are judged, in ms; what they are compared
-- with may lie grace before and after it. young, old: rows outside prove nothing. A comparison with
-- null is ignored, and an unknown time is in the range.

-- name: damage
select count(*) as ranges, coalesce(sum(bigint(size)), 0) as bytes
from {log} where recordType = 'corrupt'

-- name: messages
-- One row per message and key, null for one without. hidden is the role of a record that consumers
-- do not see (yet): a half, a parked half, or a message that waits for its delivery.
with picked as (
    select
        case :key
            when 'KEYS' then array_remove(array_distinct(split(string(key), ' ')), '')
            when 'UNIQ_KEY' then array_compact(array(uniqKey))
            else array_compact(array(named))
        end as keys,
        physicalOffset, unix_millis(timestamp) as at,
        if(array_contains(:topics, topic), null, role) as hidden
    from {log}
    where (queued and array_contains(:topics, topic))
        or (role in ('half', 'parked', 'delayed') and array_contains(:topics, realTopic))
)
select explode_outer(keys) as key, physicalOffset, at,
    coalesce(at >= :since and at < :until, true) as judged, size(keys) as keys, hidden
from picked
where hidden is not null or coalesce(at >= :since - :grace and at < :until + :grace, true)

-- name: rows
with known as (
    select key, at, coalesce(at >= :since and at < :until, true) as judged,
        case when at >= :young then 'too_young' when at < :old then 'too_old' end as age
    from {ledger} where coalesce(at >= :since - :grace and at < :until + :grace, true)
)
select key, count(*) as rows, count_if(judged) as judged,
    count_if(judged and age is null) as due, count_if(age = 'too_young') as young,
    max(at) as at
from known group by key

-- name: differences
-- Rows without a message that prove nothing: the message waits for its delivery (waiting), may come
-- after the end of the log (too_young), or may have left the log before its first record (too_old).
-- Of several hidden records with a key, the one that says most counts: a delayed message will come.
-- offsets: of the first and the last message, or of the hidden record; at: of the (last) message or
-- row, if it is known.
with seen as (
    select * from {messages} where hidden is null and key is not null
), known as (
    select * from {rows} where key is not null
), matched as (
    select * from seen left semi join known on seen.key = known.key
), by_another_key as (
    select physicalOffset from matched where keys > 1
), unmatched as (
    select * from seen left anti join known on seen.key = known.key
        left anti join by_another_key on seen.physicalOffset = by_another_key.physicalOffset
), hidden as (
    select key, max_by(
        struct(hidden, physicalOffset),
        struct(decode(hidden, 'delayed', 2, 'parked', 1, 0), physicalOffset)
    ) as best
    from {messages} where hidden is not null group by key
), found as (
    select
        case
            when best.hidden = 'delayed' then 'waiting'
            when due > 0 then 'row_without_message'
            when young > 0 then 'too_young'
            else 'too_old'
        end as kind,
        key, rows, 0 as messages, array_compact(array(best.physicalOffset)) as offsets,
        best.hidden as hidden, at
    from (
        select * from known left anti join seen on known.key = seen.key where known.judged > 0
    )
        left join hidden using (key)
    union all
    select 'message_without_row', array_join(sort_array(collect_set(key)), ' '), 0, 1,
        array(physicalOffset), null, max(at)
    from unmatched where judged group by physicalOffset
    union all
    select 'message_twice', key, null, count(*),
        array(min(physicalOffset), max(physicalOffset)), null, max(at)
    from (select * from matched union all select * from unmatched)
    group by key having count(*) > 1 and count_if(judged) > 0
    union all
    select 'row_twice', key, rows, null, null, null, at
    from known where rows > 1 and judged > 0
    union all
    select 'row_without_key', null, rows, null, null, null, at
    from {rows} where key is null and judged > 0
    union all
    select 'message_without_key', null, null, 1, array(physicalOffset), null, at
    from {messages} where hidden is null and key is null and judged
)
select kind, key, rows, messages, offsets, hidden, timestamp_millis(at) as at from found

-- name: counts
select kind, count(*) as count from {differences} group by kind order by kind

-- name: listed
-- So many of each kind, so that one kind does not hide another.
select * except (rank) from (
    select *, row_number() over (partition by kind order by key, at) as rank from {differences}
) where rank <= :listed order by kind, key, at

-- name: matched
select count(*) as keys from (select distinct key from {messages} where hidden is null) as seen
    left semi join {rows} as known on seen.key = known.key
