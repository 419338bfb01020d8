"""The static report of a run: one HTML file without any reference to a network.

    python -m pipeline.report RUN_DIR            writes RUN_DIR/report.html

`history` reads what a run left on disk and `samples` what it sampled; `charts`, `timeline` and `gallery` draw them,
`page` lays them out. `rollouts` shows samples in the terminal, with `conversation`, which makes turns of tokens.
Promises that whatever is missing or torn is said in the report and never stops it. Nothing else of the project may need
this package to train.
"""
