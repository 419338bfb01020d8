"""An agent as a command: calls the policy, retries an answer in a wrong format, reports its reward.

python launchers/submit.py experiment=agent 'task.options.command=[python,docs/examples/agent.py]' model.path=…
"""

import json
import os
import re
from pathlib import Path

from openai import OpenAI

prompt = json.loads(Path(os.environ["ROLLCALL_PROMPT"]).read_text())

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = prompt["messages"]
for _ in range(2):
    reply = client.chat.completions.create(model=prompt["model"], messages=messages).choices[0].message
    answer = re.search(r"-?\d+$", reply.content.strip())
    if answer:
        break
    messages += [reply.model_dump(), {"role": "user", "content": "End with the result, a number."}]

right = answer is not None and answer[0] == str(prompt["columns"]["answer"]).split("####")[-1].strip()
report = {"reward": float(right), "metrics": {"agent/answered": float(answer is not None)}}
Path(os.environ["ROLLCALL_REWARD"]).write_text(json.dumps(report))
