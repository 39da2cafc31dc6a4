package main

import (
	"context"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
)

func puller(group, topic string, selector consumer.MessageSelector) rocketmq.PullConsumer {
	made, err := rocketmq.NewPullConsumer(consumerOptions(group, nil)...)
	check(err)
	check(made.Subscribe(topic, selector))
	check(made.Start())
	return made
}

// poll takes so many messages and acknowledges them.
func poll(c rocketmq.PullConsumer, event string, count int) {
	for deadline := time.Now().Add(patience); count > 0 && time.Now().Before(deadline); {
		request, err := c.Poll(context.Background(), time.Second)
		if err != nil { // nothing came
			continue
		}
		for _, one := range request.GetMsgList() {
			saw(event, one)
			count--
		}
		c.ACK(context.Background(), request, consumer.ConsumeSuccess)
	}
}

// moved polls everything, sets each queue back to its last message, and says what comes then.
func moved() {
	const topic, group = "go-moved", "go-moved-consumer"
	p := newProducer("go-moved-producer")
	queues := numbered(p, topic, 0, 8)
	first := puller(group, topic, everything)
	poll(first, "polled", 8)
	for id, queue := range queues {
		check(first.UpdateOffset(queue, 1))
		offset, err := first.CurrentOffset(queue)
		check(err)
		say("offset", fields{"queue": id, "offset": offset})
	}
	check(first.PersistOffset(context.Background(), topic))
	check(first.Shutdown())
	second := puller(group, topic, everything)
	poll(second, "again", 4)
	check(second.Shutdown())
	check(p.Shutdown())
}

// pull reads a topic with the pull consumer, from chosen offsets and by an expression. Only PullFrom
// sends the expression's type: Poll takes it for tags.
func pull() {
	const topic = "go-pull"
	p := newProducer("go-pull-producer")
	queues := numbered(p, topic, 0, 8)
	every := puller("go-pull-every", topic, everything)
	poll(every, "polled", 8)
	result, err := p.SendSync(context.Background(), message(topic, "T", "last"))
	check(err)
	found, err := every.PullFrom(
		context.Background(), result.MessageQueue, result.QueueOffset, 32)
	check(err)
	for _, one := range found.GetMessageExts() {
		saw("pulled", one)
	}
	check(every.Shutdown())
	some := puller("go-pull-some", topic, consumer.MessageSelector{
		Type: consumer.SQL92, Expression: "number IN ('3', '7')",
	})
	for _, queue := range queues {
		for offset, end := int64(0), int64(1); offset < end; {
			found, err := some.PullFrom(context.Background(), queue, offset, 32)
			check(err)
			for _, one := range found.GetMessageExts() {
				saw("selected", one)
			}
			offset, end = found.NextBeginOffset, found.MaxOffset
		}
	}
	check(some.Shutdown())
	check(p.Shutdown())
}
