"""Benchmarks: `vlm bench NAME`, each in the module `NAME_bench`, with a function `run`."""

BENCHMARKS = {
    "engine": "slots in use, stalls, first tokens, batching, speculation; beside transformers",
    "encoder": "share of the machine's arithmetic, ragged batches; beside transformers",
    "preprocess": "a 12-megapixel JPEG to tiles, beside transformers; workers",
    "serve": "requests over HTTP at a fixed rate: latencies, goodput, hits",
    "caption": "pages per second, and what a run survives",
    "cluster": "two replicas: routing, and what the queue costs; needs redis-server",
    "plan": "the planner's predictions against measurements",
    "decode": "decode steps by storage and batch; beside transformers",
    "accuracy": "the default model on documents it never saw",
    "peers": "this project's column of the README's table",
    "gpu": "tower, prefill, decode and first tokens on a CUDA device, beside transformers",
    "quantise": "accuracy, bytes and speed of smaller weights and KV caches",
}
PARTS = {
    "accuracy": ("domain", "plausible", "hand"),
    "engine": ("scheduling", "span", "restart"),
    "decode": ("small", "gemma3"),
    "caption": ("pages", "orders", "reading", "beside", "kills", "memory"),
    "serve": ("load", "sweep", "soak"),
}
