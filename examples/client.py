"""A streamed chat with a server that `ddtree-trt serve` started, by OpenAI's client (pip install openai):

python examples/client.py [http://127.0.0.1:8000]
"""

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "There are 6 drawers, each with 32 cards. How many cards are there?"}],
    max_tokens=64,
    stream=True,
    extra_body={"tree_budget": 16},  # what OpenAI's API has no name for
)
for part in stream:
    if part.choices:
        print(part.choices[0].delta.content or "", end="", flush=True)
print()
