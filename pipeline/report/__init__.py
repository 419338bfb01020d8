"""The static report of a run: one HTML file without any reference to a network.

    python -m pipeline.report RUN_DIR            writes RUN_DIR/report.html

| module | owns |
|---|---|
| `command` | the command |
| `page`, `style` | the layout, and the look |
| `charts`, `timeline`, `attempts` | the numbers over the steps, an attempt's roles over time, the attempts of a run |
| `drawing`, `words` | small charts as SVG; numbers as people read them |
| `state` | where a run is in its life |
| `history` | what a run left on disk |

Promises that whatever is missing or torn is said in the report and never stops it. Nothing else of the project may need
this package to train.
"""
