"""Upload an image once and ask several questions; the later ones read its tokens from the cache.

Example: python examples/many_questions.py vlm/samples/invoice.png "Who is the seller?" "What is the total?"
"""

import argparse
from pathlib import Path

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    headers = {"authorization": f"Bearer {given.key}"}
    with httpx.Client(base_url=given.url, headers=headers, timeout=300) as http:
        stored = http.post("/v1/images", files={"file": given.image.read_bytes()}).raise_for_status().json()
        for question in given.questions:
            content = [
                {"type": "image_url", "image_url": {"url": stored["id"]}},
                {"type": "text", "text": question},
            ]
            body = {"messages": [{"role": "user", "content": content}]}
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"{question} {answer['choices'][0]['message']['content']}")
            print(f"  {cached} of {usage['prompt_tokens']} prompt tokens from the cache")


if __name__ == "__main__":
    main()
