"""Ask a question about one or more images; the answer is printed as it is written.

Example: python examples/ask.py vlm/samples/invoice.png "What is the total?"
"""

import argparse
import base64
import mimetypes
from pathlib import Path

from openai import OpenAI


def image_part(path: Path) -> dict:
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.key)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    *map(image_part, given.images),
                    {"type": "text", "text": given.question},
                ],
            }
        ],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
