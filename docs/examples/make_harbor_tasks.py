"""Writes small tasks in the format of Harbor: write a number to a file.

python make_harbor_tasks.py FOLDER
"""

import sys
from pathlib import Path
from random import Random

TEST = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/n)" = "{number}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def main(folder: Path) -> None:
    numbers = Random(0).sample(range(100, 1000), 232)
    for number in numbers:
        task = folder / f"write-{number}"
        for name, text in {
            "task.toml": 'version = "1.0"\n\n[verifier]\ntimeout_sec = 10\n',
            "instruction.md": f"{number} to n\n",
            "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
            "tests/test.sh": TEST.format(number=number),
            "solution/solve.sh": f"#!/bin/bash\necho {number} >n\n",
        }.items():
            path = task / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
