"""A server under load: throughput and latencies against the number of concurrent requests, or their rate."""
