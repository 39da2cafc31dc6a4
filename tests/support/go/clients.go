package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

var instances int

// instance returns a new name: clients of one name share a connection and their callbacks.
func instance() string {
	instances++
	return fmt.Sprintf("go-%d-%d", os.Getpid(), instances)
}

func resolver() primitive.NsResolver {
	return primitive.NewPassthroughResolver(strings.Split(namesrv, ";"))
}

// credentials are empty, and nothing is signed, unless the environment has them.
func credentials() primitive.Credentials {
	return primitive.Credentials{
		AccessKey: os.Getenv("HALFMQ_ACCESS_KEY"), SecretKey: os.Getenv("HALFMQ_SECRET_KEY"),
	}
}

func producerOptions(group string, more []producer.Option) []producer.Option {
	return append([]producer.Option{
		producer.WithNsResolver(resolver()), producer.WithGroupName(group),
		producer.WithInstanceName(instance()), producer.WithSendMsgTimeout(10 * time.Second),
		producer.WithCredentials(credentials()),
	}, more...)
}

func newProducer(group string, options ...producer.Option) rocketmq.Producer {
	made, err := rocketmq.NewProducer(producerOptions(group, options)...)
	check(err)
	check(made.Start())
	return made
}

func newTransactionProducer(
	group string, listener primitive.TransactionListener,
) rocketmq.TransactionProducer {
	made, err := rocketmq.NewTransactionProducer(listener, producerOptions(group, nil)...)
	check(err)
	check(made.Start())
	return made
}

// consumerOptions are those of a new group that begins with the first message, and more.
func consumerOptions(group string, more []consumer.Option) []consumer.Option {
	return append([]consumer.Option{
		consumer.WithNsResolver(resolver()), consumer.WithGroupName(group),
		consumer.WithInstance(instance()), consumer.WithCredentials(credentials()),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	}, more...)
}

// everything selects all messages.
var everything = consumer.MessageSelector{Type: consumer.TAG, Expression: "*"}

// handling starts a push consumer that hands on each message; what is returned becomes of it.
func handling(
	group, topic string, selector consumer.MessageSelector,
	handle func(*primitive.MessageExt) consumer.ConsumeResult, options ...consumer.Option,
) (rocketmq.PushConsumer, error) {
	made, err := rocketmq.NewPushConsumer(consumerOptions(group, options)...)
	check(err)
	check(made.Subscribe(topic, selector, func(
		_ context.Context, messages ...*primitive.MessageExt,
	) (consumer.ConsumeResult, error) {
		return handle(messages[0]), nil // it is given one at a time
	}))
	return made, made.Start()
}

func must(made rocketmq.PushConsumer, err error) rocketmq.PushConsumer {
	check(err)
	return made
}

// consume starts a push consumer; refuse says which messages shall come again.
func consume(
	group, topic, tags string, refuse func(*primitive.MessageExt) bool, options ...consumer.Option,
) (rocketmq.PushConsumer, chan string) {
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: tags}
	return selecting(group, topic, selector, refuse, options...)
}

func selecting(
	group, topic string, selector consumer.MessageSelector,
	refuse func(*primitive.MessageExt) bool, options ...consumer.Option,
) (rocketmq.PushConsumer, chan string) {
	arrived := make(chan string, 100)
	made := must(handling(group, topic, selector, func(one *primitive.MessageExt) consumer.ConsumeResult {
		saw("consumed", one)
		result := consumer.ConsumeSuccess
		if refuse != nil && refuse(one) {
			result = consumer.ConsumeRetryLater
		}
		arrived <- string(one.Body)
		return result
	}, options...))
	return made, arrived
}

// listen starts a consumer that says what it consumes, and from where.
func listen(group, topic string, options ...consumer.Option) rocketmq.PushConsumer {
	return must(join(group, topic, options...))
}

// join is listen; it fails while there is no broker.
func join(group, topic string, options ...consumer.Option) (rocketmq.PushConsumer, error) {
	return handling(group, topic, everything, func(one *primitive.MessageExt) consumer.ConsumeResult {
		say("consumed", fields{
			"group": group, "body": string(one.Body), "broker": one.Queue.BrokerName,
			"queue": one.Queue.QueueId, "queue_offset": one.QueueOffset, "id": one.MsgId,
		})
		return consumer.ConsumeSuccess
	}, options...)
}
