// Command goclient runs one scenario with an unmodified rocketmq-client-go and prints what it saw,
// one JSON object a line.
//
//	goclient NAMESRV SCENARIO [ARGUMENT…]
//
// It signs with HALFMQ_ACCESS_KEY and HALFMQ_SECRET_KEY if they are set.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const (
	patience   = 60 * time.Second // for what is expected to happen; a busy machine is slow
	statusDied = 3                // exit status of a producer that ends undecided
)

type fields map[string]interface{}

var (
	namesrv   string
	output    sync.Mutex
	scenarios = map[string]func(){
		"send":          send,
		"retry":         retry,
		"transactions":  transactions,
		"die_undecided": dieUndecided,
		"take_over":     takeOver,
		"refused":       refused,
		"request_reply": requestReply,
		"sql":           sql,
		"pull":          pull,
		"moved":         moved,
		"queues":        queues,
		"orderly":       orderly,
		"broadcasting":  broadcasting,
		"limits":        limits,
		"namespaces":    namespaces,
		"delay":         delay,
		"sharing":       sharing,
		"allocated":     allocated,
		"positions":     positions,
		"member":        member,
		"flow":          flow,
		"traced":        traced,
		"retrying":      retrying,
	}
)

func main() {
	namesrv = os.Args[1]
	rlog.SetLogLevel("warn")
	rlog.SetOutputPath(os.DevNull)
	scenarios[os.Args[2]]()
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func say(event string, line fields) {
	line["event"] = event
	text, err := json.Marshal(line)
	check(err)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(text))
}

func saw(event string, message *primitive.MessageExt) {
	say(event, fields{
		"topic": message.Topic, "body": string(message.Body), "tags": message.GetTags(),
		"keys": message.GetKeys(), "id": message.MsgId, "queue_offset": message.QueueOffset,
		"times": message.ReconsumeTimes, "transaction_id": message.TransactionId,
		"delayed_ms": message.StoreTimestamp - message.BornTimestamp,
		"unique_key": message.GetProperty(primitive.PropertyUniqueClientMessageIdKeyIndex),
	})
}

func sent(body string, result *primitive.SendResult) {
	say("sent", fields{
		"body": body, "status": int(result.Status), "id": result.MsgID,
		"queue_offset": result.QueueOffset,
	})
}

func message(topic, tag, body string) *primitive.Message {
	made := primitive.NewMessage(topic, []byte(body))
	made.WithTag(tag)
	made.WithKeys([]string{body})
	return made
}

func await(arrived chan string, count int) {
	for i := 0; i < count; i++ {
		next(arrived)
	}
}

func next(arrived chan string) string {
	select {
	case body := <-arrived:
		return body
	case <-time.After(patience):
		panic("no message came")
	}
}

func send() {
	const topic = "go-send"
	p := newProducer("go-send-producer")
	for i := 0; i < 3; i++ {
		body := fmt.Sprintf("sync-%d", i)
		result, err := p.SendSync(context.Background(), message(topic, "ABC"[i:i+1], body))
		check(err)
		sent(body, result)
	}
	answered := make(chan struct{})
	check(p.SendAsync(context.Background(),
		func(_ context.Context, result *primitive.SendResult, err error) {
			check(err)
			sent("async", result)
			close(answered)
		}, message(topic, "A", "async")))
	<-answered
	check(p.SendOneWay(context.Background(), message(topic, "B", "one-way")))
	batch := make([]*primitive.Message, 3)
	for i := range batch {
		batch[i] = message(topic, "A", fmt.Sprintf("batch-%d", i))
	}
	result, err := p.SendSync(context.Background(), batch...)
	check(err)
	sent("batch", result)
	packed := message(topic, "A", strings.Repeat("a", 6000))
	_, err = p.SendSync(context.Background(), packed)
	check(err)
	c, arrived := consume("go-send-consumer", topic, "A || B", nil)
	await(arrived, 8)
	check(c.Shutdown())
	check(p.Shutdown())
}

// refused sends what may be refused, one by one and called back, and says what it is told.
func refused() {
	for _, topic := range []string{"go-send", "go-denied", "not-mine"} {
		p := newProducer("go-refused-producer")
		_, err := p.SendSync(context.Background(), message(topic, "T", "refused"))
		say("sync", fields{"topic": topic, "error": fmt.Sprint(err)})
		answered := make(chan struct{})
		err = p.SendAsync(context.Background(),
			func(_ context.Context, _ *primitive.SendResult, err error) {
				say("async", fields{"topic": topic, "error": fmt.Sprint(err)})
				close(answered)
			}, message(topic, "T", "refused"))
		if err != nil { // it knows no route
			say("async", fields{"topic": topic, "error": fmt.Sprint(err)})
		} else {
			<-answered
		}
		check(p.Shutdown())
	}
}

// queues sends to chosen queues, and by keys whose hash chooses them.
func queues() {
	const topic = "go-queues"
	p := newProducer("go-queues-producer", producer.WithQueueSelector(producer.NewHashQueueSelector()))
	for i := 0; i < 6; i++ {
		body := fmt.Sprintf("keyed-%d-%d", i%2, i/2)
		one := message(topic, "T", body)
		one.WithShardingKey(fmt.Sprintf("key-%d", i%2))
		result, err := p.SendSync(context.Background(), one)
		check(err)
		say("sent", fields{"body": body, "queue": result.MessageQueue.QueueId,
			"queue_offset": result.QueueOffset})
	}
	check(p.Shutdown())
	chosen := newProducer("go-chosen-producer", producer.WithQueueSelector(producer.NewManualQueueSelector()))
	for i := 0; i < 4; i++ {
		body := fmt.Sprintf("chosen-%d", i)
		one := message(topic, "T", body)
		one.Queue = &primitive.MessageQueue{Topic: topic, BrokerName: "broker-a", QueueId: i}
		result, err := chosen.SendSync(context.Background(), one)
		check(err)
		say("sent", fields{"body": body, "queue": result.MessageQueue.QueueId,
			"queue_offset": result.QueueOffset})
	}
	check(chosen.Shutdown())
}

// orderly consumes one queue in order; "o-2" is refused once, and the others wait for it.
func orderly() {
	const topic = "go-orderly"
	p := newProducer("go-orderly-producer", producer.WithQueueSelector(producer.NewHashQueueSelector()))
	for i := 0; i < 6; i++ {
		one := message(topic, "T", fmt.Sprintf("o-%d", i))
		one.WithShardingKey("key")
		_, err := p.SendSync(context.Background(), one)
		check(err)
	}
	arrived := make(chan string, 100)
	refused := false
	c := must(handling("go-orderly-consumer", topic, everything,
		func(one *primitive.MessageExt) consumer.ConsumeResult {
			saw("consumed", one)
			body := string(one.Body)
			if body == "o-2" && !refused {
				refused = true
				return consumer.SuspendCurrentQueueAMoment
			}
			arrived <- body
			return consumer.ConsumeSuccess
		}, consumer.WithConsumerOrder(true)))
	await(arrived, 6)
	check(c.Shutdown())
	check(p.Shutdown())
}

// broadcasting gives all messages to each of two consumers.
func broadcasting() {
	const topic = "go-broadcasting"
	p := newProducer("go-broadcasting-producer")
	for i := 0; i < 4; i++ {
		_, err := p.SendSync(context.Background(), message(topic, "T", fmt.Sprintf("b-%d", i)))
		check(err)
	}
	arrived := make(chan string, 100)
	for _, name := range []string{"first", "second"} {
		name := name
		must(handling("go-broadcasting-consumer", topic, everything,
			func(one *primitive.MessageExt) consumer.ConsumeResult {
				say("given", fields{"to": name, "body": string(one.Body)})
				arrived <- string(one.Body)
				return consumer.ConsumeSuccess
			}, consumer.WithConsumerModel(consumer.BroadCasting)))
	}
	await(arrived, 8)
	check(p.Shutdown())
}

// delay sends a message with a delay level, and one without.
func delay() {
	p := newProducer("go-delay-producer")
	later := message("go-delay", "T", "later")
	later.WithDelayTimeLevel(3)
	for _, one := range []*primitive.Message{later, message("go-delay", "T", "now")} {
		_, err := p.SendSync(context.Background(), one)
		check(err)
	}
	_, arrived := consume("go-delay-consumer", "go-delay", "*", nil)
	await(arrived, 2)
	check(p.Shutdown())
}

// owners knows which member of a group consumed from a queue last.
type owners struct {
	sync.Mutex
	names map[int]string
}

func (o *owners) member(group, topic, name string, strategy consumer.AllocateStrategy) rocketmq.PushConsumer {
	return must(handling(group, topic, everything, func(one *primitive.MessageExt) consumer.ConsumeResult {
		o.Lock()
		defer o.Unlock()
		o.names[one.Queue.QueueId] = name
		return consumer.ConsumeSuccess
	}, consumer.WithStrategy(strategy)))
}

// await sends to all queues until so many members have at least so many each, and says which.
func (o *owners) await(p rocketmq.Producer, topic, strategy string, members, least int) {
	for end := time.Now().Add(patience); time.Now().Before(end); {
		o.Lock()
		o.names = map[int]string{}
		o.Unlock()
		for i := 0; i < 4; i++ {
			_, err := p.SendSync(context.Background(), message(topic, "T", "any"))
			check(err)
		}
		time.Sleep(300 * time.Millisecond)
		o.Lock()
		queues := map[string][]int{}
		for queue := 0; queue < 4; queue++ {
			queues[o.names[queue]] = append(queues[o.names[queue]], queue)
		}
		o.Unlock()
		_, missing := queues[""]
		shared := !missing && len(queues) == members
		for _, own := range queues {
			shared = shared && len(own) >= least
		}
		if shared {
			for name, own := range queues {
				say("owns", fields{"strategy": strategy, "member": name, "queues": own})
			}
			return
		}
	}
	panic("the queues are not shared out")
}

// sharing has two members share the queues by a strategy; then one leaves.
func sharing() {
	for name, strategy := range map[string]consumer.AllocateStrategy{
		"averagely": consumer.AllocateByAveragely, "circle": consumer.AllocateByAveragelyCircle,
	} {
		topic := "go-sharing-" + name
		p := newProducer(topic + "-producer")
		_, err := p.SendSync(context.Background(), message(topic, "T", "founding"))
		check(err)
		shared := &owners{names: map[int]string{}}
		leaver := shared.member(topic, topic, "leaves", strategy)
		shared.member(topic, topic, "stays", strategy)
		shared.await(p, topic, name, 2, 2)
		check(leaver.Shutdown())
		shared.await(p, topic, name+", left", 1, 4)
		check(p.Shutdown())
	}
}

// limits sends what is too large, and goes on.
func limits() {
	const topic = "go-limits"
	p := newProducer("go-limits-producer", producer.WithRetry(0), producer.WithCompressMsgBodyOverHowmuch(100<<20))
	for _, size := range []int{4 << 20, 4<<20 + 1, 10} {
		_, err := p.SendSync(context.Background(),
			primitive.NewMessage(topic, []byte(strings.Repeat("a", size))))
		say("size", fields{"size": size, "error": fmt.Sprint(err)})
	}
	check(p.Shutdown())
}

// namespaces sends and consumes under one name in two of them.
func namespaces() {
	const topic = "go-namespaces"
	for _, space := range []string{"red", "blue"} {
		p := newProducer("go-namespaces-producer", producer.WithNamespace(space))
		_, err := p.SendSync(context.Background(), message(topic, "T", space))
		check(err)
		c, arrived := consume("go-namespaces-consumer", topic, "*", nil, consumer.WithNamespace(space))
		await(arrived, 1)
		check(c.Shutdown())
		check(p.Shutdown())
	}
}

// requestReply sends requests, waiting and called back, which a consumer of the same process answers.
func requestReply() {
	const topic = "go-request-reply"
	replier := newProducer("go-reply-producer")
	_, err := replier.SendSync(context.Background(), message(topic, "T", "founding"))
	check(err)
	p := newProducer("go-request-producer")
	// The broker finds it by its heartbeats. The first comes after half a minute, or with a request
	// to a topic that does not exist yet.
	_, err = p.Request(context.Background(), time.Second, message("go-nobody", "T", "lost"))
	say("lost", fields{"error": fmt.Sprint(err)})
	c := must(handling("go-request-consumer", topic, everything,
		func(one *primitive.MessageExt) consumer.ConsumeResult {
			if consumer.GetReplyToClient(one) == "" {
				return consumer.ConsumeSuccess
			}
			reply, err := consumer.CreateReplyMessage(one, nil)
			check(err)
			if string(one.Body) != "empty" { // CreateReplyMessage loses the body
				reply.Body = []byte("reply to " + string(one.Body))
			}
			result, err := replier.SendSync(context.Background(), reply)
			say("replied", fields{"body": string(one.Body), "error": fmt.Sprint(err),
				"queue_offset": result.QueueOffset})
			return consumer.ConsumeSuccess
		}))
	for _, body := range []string{"waited", "empty"} {
		reply, err := p.Request(context.Background(), patience, message(topic, "T", body))
		check(err)
		say("answered", fields{"to": body, "body": string(reply.Body)})
	}
	answered := make(chan string, 10) // it may be called back twice
	check(p.RequestAsync(context.Background(), patience,
		func(_ context.Context, reply *primitive.Message, err error) {
			check(err)
			answered <- string(reply.Body)
		}, message(topic, "T", "called-back")))
	say("answered", fields{"to": "called-back", "body": <-answered})
	check(c.Shutdown())
	check(replier.Shutdown())
	check(p.Shutdown())
}

// numbered sends messages whose property says which one it is; it returns their queues.
func numbered(p rocketmq.Producer, topic string, from, to int) map[int]*primitive.MessageQueue {
	queues := map[int]*primitive.MessageQueue{}
	for i := from; i < to; i++ {
		one := message(topic, "T", fmt.Sprintf("n-%d", i))
		one.WithProperty("number", fmt.Sprint(i))
		result, err := p.SendSync(context.Background(), one)
		check(err)
		sent(string(one.Body), result)
		queues[result.MessageQueue.QueueId] = result.MessageQueue
	}
	return queues
}

// sql consumes by an expression on the properties; a wrong expression shows in pulls only.
func sql() {
	const topic = "go-sql"
	p := newProducer("go-sql-producer")
	numbered(p, topic, 0, 4)
	wanted := consumer.MessageSelector{
		Type: consumer.SQL92, Expression: "number BETWEEN 2 AND 5 AND TAGS STARTSWITH 'T'",
	}
	c, arrived := selecting("go-sql-consumer", topic, wanted, nil)
	await(arrived, 2)
	numbered(p, topic, 4, 8)
	await(arrived, 2)
	check(c.Shutdown())
	check(p.Shutdown())
}

func retry() {
	const topic, group = "go-retry", "go-retry-consumer"
	p := newProducer("go-retry-producer")
	// The retry topic comes with the group. The consumer that made the group would look for it
	// again after some time only. What that consumer skips by its tag counts as consumed, so the
	// message is sent after its end.
	_, err := p.SendSync(context.Background(), message(topic, "F", "makes the topic"))
	check(err)
	founder, _ := consume(group, topic, "nothing", nil)
	check(founder.Shutdown())
	result, err := p.SendSync(context.Background(), message(topic, "T", "again"))
	check(err)
	sent("again", result)
	c, arrived := consume(group, topic, "T", func(one *primitive.MessageExt) bool {
		return one.ReconsumeTimes == 0
	})
	await(arrived, 2)
	check(c.Shutdown())
	check(p.Shutdown())
}

// listener decides by the words of the body: LOCAL or LOCAL-CHECK, such as "unknown-commit".
type listener struct {
	decided chan struct{}
}

func (l *listener) ExecuteLocalTransaction(one *primitive.Message) primitive.LocalTransactionState {
	switch body := string(one.Body); {
	case strings.HasPrefix(body, "commit"):
		return primitive.CommitMessageState
	case strings.HasPrefix(body, "rollback"):
		return primitive.RollbackMessageState
	case strings.HasPrefix(body, "dying"):
		say("dying", fields{"body": body, "id": one.TransactionId})
		os.Exit(statusDied)
	}
	return primitive.UnknowState
}

func (l *listener) CheckLocalTransaction(one *primitive.MessageExt) primitive.LocalTransactionState {
	saw("checked", one)
	defer func() { l.decided <- struct{}{} }()
	if strings.HasSuffix(string(one.Body), "rollback") {
		return primitive.RollbackMessageState
	}
	return primitive.CommitMessageState
}

func transact(p rocketmq.TransactionProducer, topic, body string) {
	result, err := p.SendMessageInTransaction(context.Background(), message(topic, "T", body))
	check(err)
	say("decided", fields{"body": body, "state": int(result.State), "id": result.MsgID})
}

func transactions() {
	const topic, group = "go-transactions", "go-transactions-producer"
	decisions := &listener{decided: make(chan struct{}, 100)}
	p := newTransactionProducer(group, decisions)
	for _, body := range []string{"commit", "rollback", "unknown-commit", "unknown-rollback"} {
		transact(p, topic, body)
	}
	c, arrived := consume("go-transactions-consumer", topic, "*", nil)
	await(arrived, 2)
	for i := 0; i < 2; i++ {
		select {
		case <-decisions.decided:
		case <-time.After(patience):
			panic("a transaction was not asked about")
		}
	}
	// Whoever sees all of these has seen what lies before them in every queue.
	marking := newProducer("go-marking-producer")
	for i := 0; i < 8; i++ {
		_, err := marking.SendSync(context.Background(), message(topic, "T", "marker"))
		check(err)
	}
	for markers := 0; markers < 8; {
		if next(arrived) == "marker" {
			markers++
		}
	}
	check(c.Shutdown())
	check(p.Shutdown())
}

func dieUndecided() {
	p := newTransactionProducer("go-take-over-producer", &listener{})
	transact(p, "go-take-over", "dying-commit")
}

func takeOver() {
	const topic = "go-take-over"
	decisions := &listener{decided: make(chan struct{}, 100)}
	p := newTransactionProducer("go-take-over-producer", decisions)
	transact(p, topic, "commit") // it knows no broker, and none knows it, before it sends
	_, arrived := consume("go-take-over-consumer", topic, "*", nil)
	await(arrived, 2)
}
