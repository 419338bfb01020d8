"""The static report of a run: one HTML file without any reference to a network.

    python -m pipeline.report RUN_DIR            writes RUN_DIR/report.html

`history` reads what a run left on disk and `samples` what it sampled, `state` tells where the run is; `charts`,
`timeline`, `attempts` and `gallery` draw it with `drawing`, `words` and `style`, `page` lays it out, and `command`
writes it. `rollouts` shows samples in the terminal, with `conversation`, which makes turns of tokens. Promises that
whatever is missing or torn is said in the report and never stops it. Nothing else of the project may need this package
to train.
"""
