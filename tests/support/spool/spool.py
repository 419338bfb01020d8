"""The command of the tests' scheduler: `spool submit FILE`, `list`, `cancel|requeue|notice ID`.

A job is a folder of `$SPOOL_HOME`. Its keeper, `spool keep ID`, waits until an earlier job has ended, runs the batch
file in a session of its own, and runs it again after a requeue.
"""

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["SPOOL_HOME"])
OVER = ("COMPLETED", "FAILED", "CANCELLED")


def read(job: str) -> dict[str, str]:
    record: dict[str, str] = json.loads((HOME / job / "job").read_text())
    return record


def write(job: str, **changed: str) -> None:
    record = (read(job) if (HOME / job / "job").exists() else {}) | changed
    draft = HOME / job / f"draft.{os.getpid()}"
    draft.write_text(json.dumps(record))
    draft.rename(HOME / job / "job")


def submit(file: str) -> None:
    job = str(len(list(HOME.iterdir())) + 1)
    (HOME / job).mkdir()
    text = Path(file).read_text()
    (HOME / job / "script").write_text(text)
    name, comment, after = text.splitlines()[1].removeprefix("#SPOOL ").split("|")
    write(job, state="PENDING", name=name, comment=comment, after=after, restarts="0", user=getpass.getuser())
    with (HOME / job / "output").open("w") as output:
        keeper = subprocess.Popen(
            [sys.executable, __file__, "keep", job],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (HOME / job / "keeper").write_text(str(keeper.pid))
    print(job)


def keep(job: str) -> None:
    after = read(job)["after"]
    while after and read(after)["state"] not in OVER:
        if read(job)["state"] == "COMPLETING":
            write(job, state="CANCELLED")
            return
        time.sleep(0.05)
    while True:
        restarts = read(job)["restarts"]
        variables = os.environ | {"SPOOL_JOB": job, "SPOOL_RESTARTS": restarts}
        child = subprocess.Popen(["bash", HOME / job / "script"], env=variables, start_new_session=True)
        write(job, state="RUNNING", group=str(child.pid))
        code = child.wait()
        if read(job)["restarts"] == restarts:
            break
    cancelled = read(job)["state"] == "COMPLETING"
    write(job, state="CANCELLED" if cancelled else "FAILED" if code else "COMPLETED")


def send(job: str, number: signal.Signals) -> None:
    if "group" in read(job):
        os.killpg(int(read(job)["group"]), number)


def main(command: str, *arguments: str) -> None:
    if command == "list":
        for folder in sorted(HOME.iterdir()):
            record = read(folder.name)
            fields = ("name", "user", "state", "restarts", "comment")
            print("|".join([folder.name, *(record[field] for field in fields)]))
    elif command == "cancel":
        write(arguments[0], state="COMPLETING")
        send(arguments[0], signal.SIGTERM)
    elif command == "requeue":
        write(arguments[0], state="PENDING", restarts=str(int(read(arguments[0])["restarts"]) + 1))
        send(arguments[0], signal.SIGTERM)
    elif command == "notice":
        send(arguments[0], signal.SIGUSR2)
    else:
        {"submit": submit, "keep": keep}[command](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
