"""One question about many images as a batch: it runs when nobody else needs the server.

Example: python examples/batch.py vlm/samples/*.png --question "What is in the image?"
"""

import argparse
import base64
import json
import time
from pathlib import Path

from openai import OpenAI


def line(path: Path, question: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    return json.dumps(
        {
            "custom_id": path.name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": content}], "max_tokens": 200},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--question", default="What is in the image?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.key)
    lines = "\n".join(line(path, given.question) for path in given.images)
    stored = client.files.create(file=("batch.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")
    for name in (batch.output_file_id, batch.error_file_id):
        for row in client.files.content(name).text.splitlines() if name else ():
            found = json.loads(row)
            if found["error"]:
                print(f"{found['custom_id']}: {found['error']['message']}")
            else:
                message = found["response"]["body"]["choices"][0]["message"]["content"]
                print(f"{found['custom_id']}: {message}")


if __name__ == "__main__":
    main()
