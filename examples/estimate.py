"""What a question about images costs, from their headers alone; ask only within a budget of tokens.

Example: python examples/estimate.py vlm/samples/*.png --budget 500
"""

import argparse
import base64
from pathlib import Path

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--question", default="What is in the image?")
    parser.add_argument("--budget", type=int, default=1000, help="prompt tokens an image may cost")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    headers = {"authorization": f"Bearer {given.key}"}
    with httpx.Client(base_url=given.url, headers=headers, timeout=300) as http:
        for path in given.images:
            data = base64.b64encode(path.read_bytes()).decode()
            content = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": given.question},
            ]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 64}
            cost = http.post("/v1/estimate", json=body).raise_for_status().json()
            print(f"{path.name}: {cost['prompt_tokens']} prompt tokens, {cost['image_tokens']} of the image")
            if cost["prompt_tokens"] > given.budget:
                print("  over the budget, not asked")
                continue
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            assert answer["usage"]["prompt_tokens"] == cost["prompt_tokens"]
            print(f"  {answer['choices'][0]['message']['content']}")


if __name__ == "__main__":
    main()
