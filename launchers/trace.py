"""Write the trace of a run for Perfetto, or send it to an OpenTelemetry collector:

python launchers/trace.py run=<name or directory> [trace=OUT.json] [otlp=http://HOST:4318]
"""

import sys
from pathlib import Path

MODULE = "pipeline.observability.trace_command"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH
    from entry import run

    sys.exit(run("trace"))
