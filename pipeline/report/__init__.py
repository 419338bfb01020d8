"""The static report of a run: one HTML file without any reference to a network; and its samples in the terminal.

    python -m pipeline.report RUN_DIR            writes RUN_DIR/report.html

| module | owns |
|---|---|
| `command` | the command |
| `page`, `style` | the layout, and the look |
| `subjects`, `charts` | which numbers are drawn, and how |
| `timeline`, `attempts` | an attempt's roles over time, the attempts of a run |
| `findings` | what the numbers say should be changed |
| `gallery` | the best, worst, cut and failed samples of each phase |
| `drawing`, `words` | small charts as SVG; numbers as people read them |
| `state` | where a run is in its life |
| `history`, `samples` | what a run left on disk; what it sampled |
| `rollouts` | samples in the terminal |
| `conversation` | the turns that tokens are |

Promises that whatever is missing or torn is said in the report and never stops it. Nothing else of the project may need
this package to train.
"""
