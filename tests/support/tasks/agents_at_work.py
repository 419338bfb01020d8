"""An agent that does as the prompt says: for tests of what one may do wrong. Mostly the standard library."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def post(route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{route}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def ask(text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return post("chat/completions", {"model": "policy", "messages": messages})["choices"][0]["message"]["content"]


def ask_with_anthropic_s_client(text: str) -> str:
    from anthropic import Anthropic  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY

    with Anthropic() as client:
        messages: Any = [{"role": "user", "content": text}]
        return client.messages.create(model="policy", max_tokens=16, messages=messages).content[0].text  # type: ignore


def tell(value: Any) -> None:
    Path(os.environ["ROLLCALL_REWARD"]).write_text(json.dumps(value))


def main(how: str, notes: Path) -> None:
    columns = json.loads(Path(os.environ["ROLLCALL_PROMPT"]).read_text())["columns"]
    if how == "silent":
        return
    said = (ask_with_anthropic_s_client if how == "messages" else ask)("2+2")
    match how:
        case "hangs":
            (notes / str(os.getpid())).touch()
            time.sleep(3600)
        case "fails":
            sys.exit("there is no such town")
        case "prints":
            for _ in range(200):
                print("." * (1 << 16))
            tell(0.25)
        case "leaves":
            left = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            (notes / str(left.pid)).touch()
            tell(1)
        case "mumbles":
            tell({"score": 1})
        case "posts":
            post("reward", {"reward": 0.75})
        case "scores" | "messages":
            tell({"reward": float(said == columns["answer"]), "metrics": {"agent/steps": 3}})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
