"""A chat with a tool that has to be called, and its result sent back: python examples/tools.py [http://127.0.0.1:8000]

The server: ddtree-trt serve engines/tiny --chat-template examples/tools.jinja
"""

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {"thing": {"enum": ["plates", "cards"]}, "trays": {"type": "integer", "maximum": 99}},
    "required": ["thing", "trays"],
    "additionalProperties": False,
}
count = {
    "type": "function",
    "function": {"name": "count", "description": "How many are in store", "parameters": schema},
}
question = "There are 8 trays on the table, each with 41 plates. What is the total number of plates?"
messages = [{"role": "user", "content": question}]
answer = client.chat.completions.create(
    model="tiny", messages=messages, tools=[count], tool_choice="required", parallel_tool_calls=False
)
call = answer.choices[0].message.tool_calls[0]
print(answer.choices[0].finish_reason, call.function)
messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "328"}]
answer = client.chat.completions.create(model="tiny", messages=messages, tools=[count])
