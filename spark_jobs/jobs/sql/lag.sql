-- log: columns lag.COLUMNS and those of message_roles.with_roles. offsets: offset_table.DDL.
-- system: whether the broker's own topics count. asOf: ms up to which seconds count; null: to the
-- last of the records. maxMessages, maxSeconds: what is a finding; null: nothing.

-- name: records
select topic, partition, offset as first, offset + messages as next, timestamp, physicalOffset
from {log} where queued and (:system or role not in ('half', 'op', 'system'))

-- name: lags
-- States of a group in a queue:
--   caught_up, behind
--   never_consumed  the group consumes the topic, and has no offset for this queue
--   beyond_end      the group will skip what is stored next
--   below_start     what the group would consume next is no longer in the log
--   not_in_log      the log has no message of the queue, so start, end and lag are null
-- messagesBehind counts messages in the log that are not consumed, messagesLost those that left it
-- before. greatest() ignores nulls: without an offset, all messages wait. A topic that was created
-- again can have an offset twice; the later record is the current one.
with queues as (
    select topic, partition, min(first) as start, max_by(next, physicalOffset) as `end`
    from {records} group by topic, partition
), theirs as (
    select consumerGroup, topic, partition, start, `end`
    from queues join (select distinct consumerGroup, topic from {offsets}) using (topic)
), positions as (
    select * from theirs full join {offsets} using (consumerGroup, topic, partition)
), waiting as (
    select /*+ broadcast(positions) */ consumerGroup, topic, partition,
        min_by(timestamp, struct(first, -physicalOffset)) as oldestWaiting
    from {records} join positions using (topic, partition)
    where next > coalesce(nextOffset, 0) and first < `end`
        and `end` > coalesce(nextOffset, start)
    group by consumerGroup, topic, partition
), until as (
    select coalesce(:asOf, unix_millis(max(timestamp))) as asOf from {records}
)
select consumerGroup, topic, partition,
    case
        when `end` is null then 'not_in_log'
        when nextOffset is null then 'never_consumed'
        when nextOffset > `end` then 'beyond_end'
        when nextOffset < start then 'below_start'
        when nextOffset < `end` then 'behind'
        else 'caught_up'
    end as state,
    nextOffset, start, `end`,
    if(`end` is null, null, greatest(`end` - greatest(nextOffset, start), 0)) as messagesBehind,
    if(`end` is null, null, greatest(start - nextOffset, 0)) as messagesLost,
    oldestWaiting,
    if(`end` is null, null, greatest((asOf - unix_millis(oldestWaiting)) / 1000, 0D))
        as secondsBehind
from positions left join waiting using (consumerGroup, topic, partition) cross join until
order by consumerGroup, topic, partition

-- name: groups
select consumerGroup, topic, coalesce(sum(messagesBehind), 0) as messagesBehind,
    coalesce(sum(messagesLost), 0) as messagesLost,
    coalesce(max(secondsBehind), 0D) as secondsBehind,
    array_sort(collect_list(struct(
        partition, state, nextOffset, start, `end`, messagesBehind, messagesLost,
        oldestWaiting, secondsBehind
    ))) as queues
from {lags} group by consumerGroup, topic order by consumerGroup, topic

-- name: findings
with judged as (
    select *, inline(array(
        if(state = 'beyond_end', named_struct('kind', state, 'detail',
            'the group continues at ' || nextOffset || ', and the log ends at ' || `end`), null),
        if(state = 'below_start', named_struct('kind', state, 'detail',
            format_number(messagesLost, 0) || ' messages left the log before the group consumed them'
        ), null),
        if(messagesBehind > :maxMessages, named_struct('kind', 'too_many', 'detail',
            format_number(messagesBehind, 0) || ' messages behind'), null),
        if(secondsBehind > :maxSeconds, named_struct('kind', 'too_old', 'detail',
            format_number(secondsBehind, 0) || ' seconds behind'), null)
    )) from {lags}
)
select kind, consumerGroup, topic, partition, detail
from judged where kind is not null order by consumerGroup, topic, partition, kind
