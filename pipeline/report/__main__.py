"""`python -m pipeline.report RUN_DIR`."""

import sys

from pipeline.report.command import main

sys.exit(main(sys.argv[1:]))
