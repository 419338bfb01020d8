"""The style sheet of the report, for light and dark screens and for print."""

LIGHT = """
:root {
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  --page: #ffffff; --card: #f7f7f5; --ink: #1d1d1b; --quiet: #6b6b66; --line: #e2e1dc; --faint: #efeeea;
  --series-1: #2f6fcf; --series-2: #d07c1f; --series-3: #2a9270;
  --series-4: #8a55c4; --series-5: #c2456f; --series-6: #7a7a35;
  --good: #4c9f70; --busy: #c9d8cd; --bad: #c8402f; --bad-back: #fbeeec;
}
"""
"""The variables of a light page."""

STYLE = (
    LIGHT
    + """@media (prefers-color-scheme: dark) { :root {
  --page: #161615; --card: #1f1f1d; --ink: #ececea; --quiet: #a1a19b; --line: #34342f; --faint: #272724;
  --series-1: #6ea1f0; --series-2: #e6a257; --series-3: #57c09b;
  --series-4: #b891ea; --series-5: #ea86a8; --series-6: #b9b96a;
  --good: #5bb384; --busy: #38503f; --bad: #ee7766; --bad-back: #2d1c19;
} }
@media print { :root {
  --page: #ffffff; --card: #ffffff; --ink: #000000; --quiet: #444444; --line: #dddddd; --faint: #eeeeee;
  --series-1: #2f6fcf; --series-2: #d07c1f; --series-3: #2a9270;
  --series-4: #8a55c4; --series-5: #c2456f; --series-6: #7a7a35;
  --good: #4c9f70; --busy: #c9d8cd; --bad: #c8402f; --bad-back: #ffffff;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 48px 32px 80px; }
h1 { font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0; }
h2 { font-size: 18px; font-weight: 600; margin: 48px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 0; }
p { margin: 0; }
a { color: var(--series-1); text-decoration: none; }
a:hover { text-decoration: underline; }
.quiet, figcaption, .note { color: var(--quiet); }
.note, figcaption { font-size: 13px; }
.head { display: flex; align-items: baseline; gap: 14px; flex-wrap: wrap; }
.state { font-weight: 600; color: var(--quiet); }
.state.finished { color: var(--good); } .state.failed { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 12px; margin-top: 28px; }
.tile { background: var(--card); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
.tile b, td.value { font-variant-numeric: tabular-nums; }
.tile span { font-size: 13px; color: var(--quiet); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 32px 36px; }
figure { margin: 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; display: block; margin-top: 8px; }
figure.wide + figure.wide { margin-top: 28px; }
.missing { background: var(--card); border-radius: 10px; padding: 26px; margin-top: 8px; }
.missing { color: var(--quiet); text-align: center; }
.failure { background: var(--bad-back); border-left: 3px solid var(--bad); border-radius: 6px; }
.failure { padding: 18px 22px; margin-top: 28px; }
.failure h2 { margin: 0 0 6px; color: var(--bad); }
.findings { background: var(--card); border-radius: 10px; padding: 14px 22px; margin-top: 28px; }
.findings h2 { margin: 0 0 6px; } .findings ul { margin: 0; padding-left: 18px; } .findings li { margin: 6px 0; }
.findings b { font-weight: 600; } .findings span { color: var(--quiet); font-size: 13px; }
pre, code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
pre { margin: 12px 0 0; } code { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; width: 50%; }
th { color: var(--quiet); font-weight: 500; }
.attempts td { width: auto; font-variant-numeric: tabular-nums; } .attempts td:nth-child(-n+5) { white-space: nowrap; }
.outages td { width: auto; white-space: nowrap; font-variant-numeric: tabular-nums; }
.outages td:first-child { min-width: 180px; white-space: normal; } .outages :is(td, th) { padding-right: 8px; }
.columns { columns: 2 440px; column-gap: 36px; }
.columns table { break-inside: avoid; margin-bottom: 22px; }
.phase { margin: 26px 0 10px; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 12px; align-items: start; }
details { background: var(--card); border-radius: 10px; padding: 10px 14px; font-size: 13px; break-inside: avoid; }
summary { cursor: pointer; } .turn { display: grid; grid-template-columns: 76px 1fr; margin-top: 8px; }
.turn span { color: var(--quiet); } .turn pre, .reason { margin: 0; overflow-wrap: anywhere; }
.turn.sampled pre { color: var(--series-3); font-weight: 600; } .reason { color: var(--bad); margin-top: 8px; }
details .note { margin-top: 8px; }
.filters { display: flex; flex-wrap: wrap; gap: 10px 14px; align-items: end; margin: 14px 0; }
.filters label { display: grid; gap: 3px; font-size: 12px; color: var(--quiet); }
.filters span { display: flex; gap: 4px; }
input, select, button { font: 13px/1.4 var(--font); color: var(--ink); background: var(--page); padding: 5px 8px; }
input, select, button { border: 1px solid var(--line); border-radius: 6px; } button { cursor: pointer; }
button:disabled { opacity: 0.4; cursor: default; }
input[type=number] { width: 74px; } input[type=search] { width: 250px; }
.pager { display: flex; gap: 10px; align-items: center; margin: 10px 0; font-size: 13px; }
.legend { font-size: 12px; color: var(--quiet); } .legend b { font-weight: 600; color: var(--ink); }
.legend span { margin-right: 12px; } .legend .bar { position: static; margin-right: 5px; }
.legend .bar { display: inline-block; width: 10px; height: 10px; border-radius: 2px; }
.episode { margin-bottom: 6px; } .episode summary span { color: var(--quiet); margin-left: 14px; }
.episode summary b { display: inline-block; min-width: 96px; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); } .episode .turn { grid-template-columns: 92px minmax(0, 1fr); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; font-variant-numeric: tabular-nums; }
.facts span { color: var(--ink); } .facts i { font-style: normal; color: var(--quiet); }
.episode > .facts { margin-top: 12px; padding-top: 8px; border-top: 1px solid var(--line); }
.turn.tool pre, .turn pre.call { color: var(--series-2); } .turn.sampled pre.call { font-weight: 400; }
.track { position: relative; height: 12px; margin-top: 10px; background: var(--faint); border-radius: 3px; }
.track { overflow: hidden; } .bar { position: absolute; top: 0; height: 100%; background: var(--line); }
.bar.queue { background: var(--series-5); } .bar.prefill { background: var(--series-4); }
.bar.decode { background: var(--series-1); } .bar.tools { background: var(--series-2); }
.turn pre { unicode-bidi: isolate; max-height: 360px; overflow-y: auto; }
@media print { .filters, .pager { display: none; } .turn pre { max-height: none; } }
footer { margin-top: 56px; font-size: 13px; color: var(--quiet); }
@media (max-width: 560px) { .charts { grid-template-columns: 1fr; } main { padding: 28px 16px; } }
"""
)
