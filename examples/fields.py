"""Read a document into JSON that follows a schema: decoding allows nothing else.

Example: python examples/fields.py vlm/samples/invoice.png
"""

import argparse
import base64
import json
from pathlib import Path

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "seller": {"type": "string", "maxLength": 40},
        "date": {"type": "string", "maxLength": 20},
        "total": {"type": "string", "maxLength": 16},
    },
    "required": ["seller", "date", "total"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    client = OpenAI(base_url=f"{given.url}/v1", api_key=given.key)
    data = base64.b64encode(given.image.read_bytes()).decode()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                    {"type": "text", "text": "Give the fields of the document as JSON."},
                ],
            }
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "fields", "schema": SCHEMA}},
    )
    print(json.dumps(json.loads(answer.choices[0].message.content), indent=2))


if __name__ == "__main__":
    main()
