module halfmq/tests/goclient

go 1.13

require github.com/apache/rocketmq-client-go/v2 v2.1.2
