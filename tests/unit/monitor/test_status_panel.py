"""The panel of a run, as a terminal shows it: one whole text. What its parts say is held where they are made."""

from dataclasses import replace

from pipeline.run.notices import Notice
from slurm.monitor.log_lines import LogLines
from slurm.monitor.run_snapshot import JobLine, PastAttempt, Progress, RoleLine, Snapshot
from slurm.monitor.status_panel import MAX_NOTICES, servers_text
from tests.fakes.terminal import shown

RUN = Snapshot(
    name="demo",
    time=1000.0,
    attempt="7-1",
    state="training",
    job=JobLine("7", "slurm", restart=1, most_restarts=100, live=True, word="RUNNING"),
    began=400.0,
    roles=(
        RoleLine("trainer.0", 0, "10.0.0.1", "ready", since=460.0, detail=""),
        RoleLine("inference.0", 1, "10.0.0.2", "ready", since=490.0, detail="", silent=905.0),
    ),
    silent={1: 905.0},
    past=(
        PastAttempt(
            "7-0", 100.0, 250.0, "requeued", "told to end (SIGTERM, agent.0): it goes on from its newest commit"
        ),
    ),
    progress=Progress("rl", 30, 60, 60.0),
    upcoming_phases=None,
    numbers={"staleness/mean": 0.5, "staleness/max": 2.0, "tokens_per_second": 1234.0, "idle/trainer": 0.25},
    has_rollouts=True,
    losses=(),
    rewards=(0.1, 0.2, 0.4),
    accuracies=((0, 0.2), (30, 0.5)),
    max_lag=2,
    events=(),
    failure=None,
    reason="",
)
PANEL = """\
╭─  demo training  ────────────────────────────────────────────────────────────────────────────────╮
│                                                                                                  │
│  role         rank  address   state    since                                                     │
│  trainer.0    0     10.0.0.1  ● ready  9:00                                                      │
│  inference.0  1     10.0.0.2  ○ ready  8:30   silent for 1:35                                    │
│                                                                                                  │
│  training      ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                               30 / 60 · 1:00 left  │
│                                                                                                  │
│  reward        0.400               ▁▃█                                                           │
│  held-out      0.200 → 0.500       ▁█                                                            │
│  lag           0.5 / 2             mean / largest, limit 2                                       │
│  tokens/s      1234                idle: trainer 25%                                             │
│                                                                                                  │
│  no sign of life from rank 1 (1:35): the node or its filesystem hangs                            │
│                                                                                                  │
│  attempt   ran  then                                                                             │
│  7-0      4:10  requeued  told to end (SIGTERM, agent.0): it goes on from its newest commit      │
│                                                                                                  │
╰─  attempt 7-1 · restart 1 of 100 · 10:00  ───────────────────────────────────────────────────────╯
"""


def test_a_run_with_a_silent_rank_and_an_earlier_attempt() -> None:
    assert shown(RUN) == PANEL


def test_the_panel_says_how_many_servers_are_ready_until_all_are() -> None:
    servers = tuple(
        RoleLine(f"inference.{n}", n, "", "ready" if n else "restarting", since=460.0, detail="") for n in range(4)
    )
    assert "3 of 4 servers ready" in shown(replace(RUN, roles=servers))
    assert servers_text(servers[1:]) == ""
    assert servers_text(servers[:1]) == "", "its line says the same"
    assert "servers ready" not in shown(replace(RUN, roles=servers, state="failed"))


def test_a_notice_at_a_time_without_a_date_is_shown() -> None:
    panel = shown(replace(RUN, notices=(Notice(time=1e300, by="trainer.0", text="odd"),)))
    assert "—  trainer.0: odd" in panel


def test_the_panel_and_the_lines_show_the_notices() -> None:
    notices = tuple(Notice(time=500.0 + n, by="trainer.0", text=f"notice {n}") for n in range(MAX_NOTICES + 1))
    panel = shown(replace(RUN, notices=notices))
    assert f"trainer.0: notice {MAX_NOTICES}" in panel
    assert "notice 0" not in panel, "only the last ones"
    lines = LogLines()
    assert "  trainer.0: notice 0" in lines.lines(replace(RUN, notices=notices[:1]), 0.0)
    assert [line for line in lines.lines(replace(RUN, notices=notices[:2]), 0.0) if "notice" in line] == [
        "  trainer.0: notice 1"
    ]
