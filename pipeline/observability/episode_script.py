"""The controls and the script of the page's episodes (`episode_section`): plain JavaScript, without any address.

The filters and the page are in the address after `#episodes?`, so that a view can be reloaded and sent to others:
`report.html#episodes?text=error&outcome=failed&page=2`. `open=1` opens every episode of the page.
"""

CONTROLS = """
<div class="filters" id="episode-filters">
<label>Search <input name="text" type="search" placeholder="text of a turn, tool call or failure"></label>
<label>Task <select name="task"><option value="">all</option></select></label>
<label>Origin <select name="set"><option value="">all</option></select></label>
<label>Outcome <select name="outcome"><option value="">all</option><option value="scored">with a reward</option>
<option value="cut">cut off</option><option value="failed">failed</option></select></label>
<label>Reward <span><input name="reward_min" type="number" step="any" placeholder="min">
<input name="reward_max" type="number" step="any" placeholder="max"></span></label>
<label>Tokens <span><input name="length_min" type="number" placeholder="min">
<input name="length_max" type="number" placeholder="max"></span></label>
<label>Turns <span><input name="turns_min" type="number" placeholder="min">
<input name="turns_max" type="number" placeholder="max"></span></label>
<label>Order <select name="order"><option value="">newest first</option><option value="oldest">oldest first</option>
<option value="best">highest reward</option><option value="worst">lowest reward</option>
<option value="longest">most tokens</option><option value="turns">most turns</option>
<option value="slowest">most seconds</option></select></label>
<button type="button" id="episode-clear">Clear</button>
</div>
<p class="legend" id="episode-legend"></p>
<div class="pager"><button type="button" id="episode-back">Back</button><span id="episode-count"></span>
<button type="button" id="episode-next">Next</button><button type="button" id="episode-open">Open all</button></div>
<div id="episode-list"><p class="note">This list needs JavaScript.</p></div>
"""

SCRIPT = """
"use strict";
(() => {
  const PAGE = 20;
  const TIMES = [
    ["queue", "in the server's queue"], ["prefill", "from there to the first token"],
    ["decode", "from the first token to the last"], ["tools", "tool calls after the turn"],
    ["request", "the whole request: also the network, retries, and samples that share it"]];
  const byId = (id) => document.getElementById("episode-" + id);
  const episodes = JSON.parse(byId("data").textContent);
  const controls = [...byId("filters").querySelectorAll("[name]")];
  const state = new Map();

  // Texts of samples reach the page here only, as text nodes.
  function element(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function searchable(episode) {
    const parts = [episode.failure || ""];
    for (const turn of episode.body) parts.push(turn.text, ...(turn.calls || []));
    return parts.join("\\n").toLowerCase();
  }
  for (const episode of episodes) {
    episode.origin = episode.set || "training";
    episode.search = searchable(episode);
  }

  function addChoices(name, key) {
    const select = controls.find((control) => control.name === name);
    for (const value of new Set(episodes.map((episode) => episode[key]))) {
      const option = element("option", "", value);
      option.value = value;
      select.append(option);
    }
  }
  addChoices("task", "task");
  addChoices("set", "origin");

  function within(value, name) {
    const low = state.get(name + "_min"), high = state.get(name + "_max");
    if (!low && !high) return true;
    if (value === null) return false;
    return (!low || value >= Number(low)) && (!high || value <= Number(high));
  }

  function matches(episode) {
    const text = (state.get("text") || "").toLowerCase(), outcome = state.get("outcome");
    if (text && !episode.search.includes(text)) return false;
    if (state.get("task") && episode.task !== state.get("task")) return false;
    if (state.get("set") && episode.origin !== state.get("set")) return false;
    if (outcome === "failed" && episode.failure === null) return false;
    if (outcome === "scored" && episode.reward === null) return false;
    if (outcome === "cut" && !episode.cut) return false;
    return ["reward", "length", "turns"].every((name) => within(episode[name], name));
  }

  const ORDERS = {oldest: ["time", 1], best: ["reward", -1], worst: ["reward", 1], longest: ["length", -1],
    turns: ["turns", -1], slowest: ["seconds", -1]};
  function ordered(list) {
    const [key, sign] = ORDERS[state.get("order")] || ["time", -1];
    const missing = (episode) => episode[key] === null;  // failed episodes come last
    return list.sort((a, b) => missing(a) - missing(b) || sign * (a[key] - b[key]));
  }

  function duration(seconds) {
    if (seconds >= 1) return seconds.toFixed(seconds < 60 ? 2 : 0) + " s";
    return (seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0) + " ms";
  }

  function facts(pairs) {
    const line = element("div", "facts");
    for (const [name, value] of pairs) {
      const pair = element("span");
      pair.append(element("i", "", name + " "), value);
      line.append(pair);
    }
    return line;
  }

  function bar(kind, begin, seconds, total) {
    const node = element("div", "bar " + kind);
    node.style.left = 100 * begin / total + "%";
    node.style.width = 100 * seconds / total + "%";
    node.title = kind + " " + duration(seconds);
    return node;
  }

  function timeline(turns) {
    const timed = turns.filter((turn) => turn.times);
    const end = (turn) => turn.times.begin + turn.times.request + (turn.times.tools || 0);
    const total = Math.max(...timed.map(end));
    const track = element("div", "track");
    if (!(total > 0)) return track;
    for (const {times} of timed) {
      track.append(bar("request", times.begin, times.request, total));
      let begin = times.begin;
      for (const kind of ["queue", "prefill", "decode"]) {
        track.append(bar(kind, begin, times[kind] || 0, total));
        begin += times[kind] || 0;
      }
      if (times.tools) track.append(bar("tools", times.begin + times.request, times.tools, total));
    }
    return track;
  }

  function turnNode(turn) {
    const node = element("div", "turn" + (turn.facts ? " sampled" : "") + (turn.role === "tool" ? " tool" : ""));
    const body = element("div");
    node.append(element("span", "", turn.number ? turn.role + " " + turn.number : turn.role), body);
    if (turn.facts && turn.facts.length) body.append(facts(turn.facts));
    body.append(element("pre", "", turn.text));
    for (const call of turn.calls || []) body.append(element("pre", "call", "\\u2192 " + call));
    return node;
  }

  function fill(node, episode) {
    if (node.dataset.filled) return;
    node.dataset.filled = "yes";
    if (episode.failure !== null) node.append(element("pre", "reason", episode.failure));
    const rows = [...new Set(episode.body.map((turn) => turn.row))];
    for (const row of rows) {
      const turns = episode.body.filter((turn) => turn.row === row);
      if (rows.length > 1) node.append(element("p", "note", "row " + (row + 1) + " of " + rows.length));
      if (turns.some((turn) => turn.times)) node.append(timeline(turns));
      node.append(...turns.map(turnNode));
    }
    node.append(facts(episode.facts));
  }

  function card(episode) {
    const node = element("details", "episode"), head = element("summary");
    const score = episode.reward === null ? "unknown" : Number(episode.reward.toPrecision(4));
    const reward = episode.failure !== null ? "failed" : "reward " + score;
    head.append(element("b", episode.failure !== null ? "bad" : "", reward));
    const where = (episode.set ? "prompt " : "position ") + episode.position + " \\u00b7 sample " + episode.sample;
    const words = [episode.task, episode.origin, where];
    if (episode.turns !== null) words.push(episode.turns + (episode.turns === 1 ? " turn" : " turns"));
    if (episode.length !== null) words.push(episode.length + " tokens");
    if (episode.seconds !== null) words.push(duration(episode.seconds));
    if (episode.cut) words.push("cut off");
    head.append(...words.map((word) => element("span", "", word)));
    node.append(head);
    node.addEventListener("toggle", () => { if (node.open) fill(node, episode); });
    if (state.get("open")) { node.open = true; fill(node, episode); }
    return node;
  }

  function show() {
    const list = ordered(episodes.filter(matches)), pages = Math.max(1, Math.ceil(list.length / PAGE));
    const page = Math.min(pages, Math.max(1, Number(state.get("page")) || 1)), first = (page - 1) * PAGE;
    state.set("page", String(page));
    byId("list").replaceChildren(...list.slice(first, first + PAGE).map(card));
    byId("count").textContent = list.length + " of " + episodes.length + " episodes, page " + page + " of " + pages;
    byId("back").disabled = page === 1;
    byId("next").disabled = page === pages;
    byId("open").textContent = state.get("open") ? "Close all" : "Open all";
    for (const control of controls) {
      if (control.value !== (state.get(control.name) || "")) control.value = state.get(control.name) || "";
    }
  }

  function remember() {
    const stored = new URLSearchParams();
    for (const [name, value] of state) if (value && !(name === "page" && value === "1")) stored.set(name, value);
    try {
      history.replaceState(null, "", "#episodes" + (String(stored) ? "?" + stored : ""));
    } catch (error) { /* a browser that limits changes of the address shows the same list */ }
  }

  function change(name, value) {
    state.set(name, value);
    if (name !== "page" && name !== "open") state.set("page", "1");
    show();
    remember();
  }

  function read() {
    const [anchor, query] = location.hash.split("?");
    if (anchor !== "#episodes") return;
    state.clear();
    for (const [name, value] of new URLSearchParams(query || "")) state.set(name, value);
    show();
    byId("filters").parentNode.scrollIntoView();
  }

  for (const control of controls) control.addEventListener("input", () => change(control.name, control.value));
  byId("clear").addEventListener("click", () => { state.clear(); show(); remember(); });
  byId("back").addEventListener("click", () => change("page", String(Number(state.get("page")) - 1)));
  byId("next").addEventListener("click", () => change("page", String(Number(state.get("page")) + 1)));
  byId("open").addEventListener("click", () => change("open", state.get("open") ? "" : "1"));
  for (const [kind, meaning] of TIMES) {
    byId("legend").append(element("i", "bar " + kind), element("b", "", kind + " "), element("span", "", meaning));
  }
  window.addEventListener("hashchange", read);
  show();
  read();
})();
"""
