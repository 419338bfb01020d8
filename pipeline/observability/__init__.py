"""The static report of a run, one HTML file that opens offline; its samples in the terminal; and its check.

    python -m pipeline.observability RUN_DIR            writes RUN_DIR/report.html

| module | owns |
|---|---|
| `report_command` | the command |
| `report_page`, `report_style` | the page's layout; its style sheet |
| `chart_subjects`, `metric_charts` | the choice of charts; the drawing of metrics over steps |
| `timeline`, `attempts_table` | an attempt's roles over time; the attempts of a run |
| `run_trace`, `trace_command` | the trace of a run for Perfetto; its command |
| `otlp_export` | the same spans, for an OpenTelemetry collector |
| `goodput_section`, `goodput_comparison` | goodput and outages of a run; a disturbed run compared with another |
| `findings` | tuning hints from the metrics |
| `episode_section`, `episode_script` | the list of episodes with search and filters; its script |
| `sample_gallery` | the best, worst, cut and failed samples of each phase |
| `svg_drawing`, `number_format` | small charts as SVG; formats of numbers |
| `postmortem_archive`, `postmortem_command` | the archive of a failed attempt for a bug report; its command |
| `failure_verdict`, `installed_versions` | the kind of an attempt's end and what to do; versions of the software |
| `run_status` | the state of a run |
| `run_history`, `sample_reader` | reading a run directory; reading stored samples |
| `samples_command`, `sample_panel` | samples in the terminal; one sample there |
| `run_check`, `check_command` | proof that a run trained each position once, in order and in time; its command |
| `conversation_view` | tokens as the turns of a conversation |
| `episode_view` | the turns of an episode with tool calls, results, servers and times |

The report names missing or damaged files, and no such file stops it. Training needs nothing of this package.
"""
