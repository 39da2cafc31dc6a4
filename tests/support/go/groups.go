package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// These scenarios take arguments: what follows the name of the scenario.
func argument(place int) string {
	return os.Args[3+place]
}

// positions starts groups that begin first, last and at a time, given as yyyyMMddHHmmss.
func positions() {
	topic, moment := argument(0), argument(1)
	for name, where := range map[string]consumer.ConsumeFromWhere{
		"first": consumer.ConsumeFromFirstOffset, "last": consumer.ConsumeFromLastOffset,
		"timestamp": consumer.ConsumeFromTimestamp,
	} {
		listen(topic+"-"+name, topic, consumer.WithConsumeFromWhere(where), consumer.WithConsumeTimestamp(moment))
	}
	say("started", fields{})
	select {}
}

// member is one of a group until it is killed: orderly, broadcasting or concurrent; perhaps one that
// takes queues of one room only.
func member() {
	topic, kind := argument(0), argument(1)
	var options []consumer.Option
	switch kind {
	case "orderly":
		options = append(options, consumer.WithConsumerOrder(true))
	case "broadcasting":
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	if len(os.Args) > 5 {
		options = append(options, consumer.WithStrategy(consumer.AllocateByMachineRoom([]string{argument(2)})))
	}
	listen(topic, topic, options...)
	say("started", fields{})
	select {}
}

// flow sends numbers, each until it is acknowledged, while a second member comes and goes. When all
// are sent the first one has all queues: members that change too soon may never get to consume.
func flow() {
	topic, kind := argument(0), argument(1)
	order := consumer.WithConsumerOrder(kind == "orderly")
	p := newProducer(topic+"-producer", producer.WithQueueSelector(producer.NewHashQueueSelector()))
	acknowledged := func(body, key string) {
		for {
			one := message(topic, "T", body)
			one.WithShardingKey(key)
			if _, err := p.SendSync(context.Background(), one); err == nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	acknowledged("founding", "0")
	listen(topic, topic, order)
	ended := make(chan struct{})
	go func() {
		for {
			select {
			case <-ended:
				return
			default:
			}
			guest, err := join(topic, topic, order)
			if err != nil { // the broker is away
				time.Sleep(50 * time.Millisecond)
				continue
			}
			time.Sleep(2 * time.Second)
			check(guest.Shutdown())
			time.Sleep(time.Second)
		}
	}()
	for number := 0; number < 200; number++ {
		acknowledged(fmt.Sprintf("n-%d", number), fmt.Sprint(number%4))
		time.Sleep(20 * time.Millisecond)
		if number%50 == 49 {
			say("sent", fields{"count": number + 1})
		}
	}
	close(ended)
	select {}
}

// traced sends and consumes with traces in the usual topic.
func traced() {
	const topic = "go-traced"
	traces := func(group string) *primitive.TraceConfig {
		return &primitive.TraceConfig{
			GroupName: group, Access: primitive.Local, Resolver: resolver(),
			NamesrvAddrs: []string{namesrv},
		}
	}
	p := newProducer("go-traced-producer", producer.WithTrace(traces("go-traced-producer")))
	result, err := p.SendSync(context.Background(), message(topic, "T", "seen"))
	check(err)
	sent("seen", result)
	listen("go-traced-consumer", topic, consumer.WithTrace(traces("go-traced-consumer")))
	select {}
}

// retrying sends one message after the other; one that fails ends it.
func retrying() {
	retries, err := strconv.Atoi(argument(1))
	check(err)
	p := newProducer("go-retrying", producer.WithRetry(retries))
	for number := 0; ; number++ {
		result, err := p.SendSync(context.Background(), message(argument(0), "T", fmt.Sprint(number)))
		check(err)
		say("sent", fields{"body": fmt.Sprint(number), "queue": result.MessageQueue.QueueId})
		time.Sleep(5 * time.Millisecond)
	}
}

// allocated has two members share the queues by a hash, and by configuration.
func allocated() {
	for _, name := range []string{"hash", "config"} {
		topic := "go-allocated-" + name
		p := newProducer(topic + "-producer")
		result, err := p.SendSync(context.Background(), message(topic, "T", "founding"))
		check(err)
		half := func(first int) consumer.AllocateStrategy {
			if name == "hash" {
				return consumer.AllocateByConsistentHash(10)
			}
			queues := make([]*primitive.MessageQueue, 2)
			for i := range queues {
				queues[i] = &primitive.MessageQueue{
					Topic: topic, BrokerName: result.MessageQueue.BrokerName, QueueId: first + i}
			}
			return consumer.AllocateByConfig(queues)
		}
		shared := &owners{Mutex: sync.Mutex{}, names: map[int]string{}}
		shared.member(topic, topic, "one", half(0))
		shared.member(topic, topic, "two", half(2))
		shared.await(p, topic, name, 2, 1)
		check(p.Shutdown())
	}
}
