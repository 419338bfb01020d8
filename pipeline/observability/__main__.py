"""`python -m pipeline.observability RUN_DIR`."""

import sys

from pipeline.observability.report_command import main

sys.exit(main(sys.argv[1:]))
