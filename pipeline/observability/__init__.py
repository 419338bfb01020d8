"""The static report of a run: one HTML file without any reference to a network; and its samples in the terminal.

    python -m pipeline.observability RUN_DIR            writes RUN_DIR/report.html

| module | owns |
|---|---|
| `report_command` | the command |
| `report_page`, `report_style` | the layout, and the look |
| `chart_subjects`, `metric_charts` | which numbers are drawn, and how |
| `timeline`, `attempts_table` | an attempt's roles over time, the attempts of a run |
| `findings` | what the numbers say should be changed |
| `sample_gallery` | the best, worst, cut and failed samples of each phase |
| `svg_drawing`, `number_format` | small charts as SVG; numbers as people read them |
| `run_status` | where a run is in its life |
| `run_history`, `sample_reader` | what a run left on disk; what it sampled |
| `samples_command` | samples in the terminal |
| `conversation_view` | the turns that tokens are |

Promises that whatever is missing or torn is said in the report and never stops it. Nothing else of the project may need
this package to train.
"""
