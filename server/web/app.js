// The page: a chat over /v1/chat/completions and a live view over /engine/state. Whatever a model or a user wrote goes into the
// page as text nodes only.
import { lineChart, HeatMap, color } from "/web/charts.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 500, SECONDS = 120, SAMPLES = SECONDS * 1000 / POLL_MS, RECENT_MS = 10000;

function element(tag, className, text) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined) e.textContent = text;
  return e;
}

function headers() {
  const key = $("key").value;
  return key ? { Authorization: "Bearer " + key } : {};
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answered " + response.status;
  }
}

/* ---- chat ---- */

let model = null, history = [], running = null;

function addMessage(role, text) {
  const box = element("div", "message " + role), body = element("div", "text", text), stats = element("div", "stats");
  $("hint").hidden = true;
  box.append(element("div", "who", role === "user" ? "You" : role === "error" ? "Error" : "Model"), body, stats);
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return { box, body, stats };
}

function numberOf(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function requestBody() {
  const system = $("system").value.trim();
  return {
    model, stream: true, stream_options: { include_usage: true },
    messages: (system ? [{ role: "system", content: system }] : []).concat(history),
    temperature: numberOf("temperature"), top_p: numberOf("top-p"), max_tokens: numberOf("max-tokens"), seed: numberOf("seed"),
  };
}

// Events of a server-sent stream as parsed JSON, up to [DONE].
async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}

function showStats(m, started, first, tokens) {
  const now = performance.now(), parts = [];
  if (tokens) parts.push(tokens + (tokens === 1 ? " token" : " tokens"));
  if (first) parts.push("first after " + (first - started).toFixed(0) + " ms");
  if (tokens > 1 && now > first) parts.push(((tokens - 1) / (now - first) * 1000).toFixed(1) + " tokens/s");
  m.stats.textContent = parts.join(" · ");
}

async function answer() {
  const started = performance.now();
  let m = null, first = 0, tokens = 0, text = "";
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal: running.signal, headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(requestBody()),
  });
  if (!response.ok) throw new Error(await errorText(response));
  m = addMessage("assistant", "");
  m.box.classList.add("busy");
  m.box.setAttribute("aria-busy", "true");
  try {
    for await (const e of events(response)) {
      if (e.error) throw new Error(e.error.message);
      if (e.usage) tokens = e.usage.completion_tokens;
      const piece = e.choices && e.choices[0] && e.choices[0].delta.content;
      if (!piece) continue;
      first = first || performance.now();
      text += piece;
      const log = $("log"), follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      m.body.append(document.createTextNode(piece));
      if (follow) log.scrollTop = log.scrollHeight;
    }
  } finally {
    m.box.classList.remove("busy");
    m.box.removeAttribute("aria-busy");
    showStats(m, started, first, tokens);
    history.push({ role: "assistant", content: text });
  }
}

function setRunning(on) {
  running = on ? new AbortController() : null;
  $("send").disabled = on;
  $("stop").hidden = !on;
}

async function send() {
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  history.push({ role: "user", content: question });
  addMessage("user", question);
  setRunning(true);
  try {
    await answer();
  } catch (e) {
    if (e.name !== "AbortError") addMessage("error", e.message);
    if (history.length && history[history.length - 1].role === "user") history.pop();
  }
  setRunning(false);
  $("question").focus();
}

function setUpChat() {
  const saved = ["system", "temperature", "top-p", "max-tokens", "seed"];
  for (const id of saved) {
    $(id).value = localStorage.getItem("epx-" + id) || "";
    $(id).addEventListener("change", () => localStorage.setItem("epx-" + id, $(id).value));
  }
  $("form").addEventListener("submit", (e) => { e.preventDefault(); send(); });
  $("question").addEventListener("keydown", (e) => {
    if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => running && running.abort());
  $("clear").addEventListener("click", () => {
    if (running) running.abort();
    history = [];
    $("log").querySelectorAll(".message").forEach((m) => m.remove());
    $("hint").hidden = false;
    $("question").focus();
  });
}

/* ---- engine ---- */

const samples = []; // {t, state}, oldest first
const PHASES = ["dispatch", "combine"], PARTS = ["wait", "copy"];
let experts, ranks, lastStatus = "";

const sum = (list) => list.reduce((a, b) => a + b, 0);
const grouped = (v) => Math.round(v).toLocaleString("en");

function short(v) {
  if (v >= 1e6) return (v / 1e6).toFixed(1) + " M";
  if (v >= 1e4) return (v / 1e3).toFixed(1) + " k";
  return v >= 100 || v === 0 ? v.toFixed(0) : v.toFixed(1);
}

function time(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return (seconds * 1e6).toFixed(seconds < 1e-5 ? 1 : 0) + " µs";
  return seconds < 1 ? (seconds * 1e3).toFixed(seconds < 1e-2 ? 1 : 0) + " ms" : seconds.toFixed(2) + " s";
}

function setStatus(text, kind) {
  if (text === lastStatus) return;
  lastStatus = text;
  $("status").textContent = text;
  $("status").className = "status " + kind;
}

// Change of a counter per second between two samples.
const rate = (a, b, get) => (a && b.t > a.t ? Math.max(0, get(b.state) - get(a.state)) / (b.t - a.t) * 1000 : 0);
const generated = (s) => sum(s.ranks.map((r) => r.generated_tokens));
const prompted = (s) => sum(s.ranks.map((r) => r.prompt_tokens));

// Mean seconds of a layer's phase between two samples; null without a layer.
function meanTime(a, b, part, phase) {
  if (!a) return null;
  const total = (s, key) => sum(s.state.ranks.map((r) => r[part][phase][key]));
  const count = total(b, "count") - total(a, "count");
  return count > 0 ? (total(b, "sum_ns") - total(a, "sum_ns")) / count * 1e-9 : null;
}

function legend(list, entries) {
  if (list.children.length !== entries.length)
    list.replaceChildren(...entries.map(() => { const li = element("li"); li.append(element("i"), element("span")); return li; }));
  entries.forEach((e, i) => {
    list.children[i].firstChild.style.background = e.color;
    list.children[i].lastChild.textContent = e.name + " " + e.value;
  });
}

const lastOf = (values) => [...values].reverse().find((v) => v !== null && v !== undefined) || 0;
// What a chart shows: 20 s at first, more as samples come, at most SECONDS.
const shown = () => Math.min(SAMPLES, Math.max(20000 / POLL_MS, samples.length));
const padded = (values) => Array(Math.max(0, shown() - values.length)).fill(null).concat(values);

function drawRates() {
  const pairs = samples.slice(1).map((s, i) => [samples[Math.max(0, i - 1)], s]); // over two polls: smoother
  const series = [
    { name: "generated", color: color("series1"), values: padded(pairs.map(([a, b]) => rate(a, b, generated))) },
    { name: "prompt", color: color("series2"), values: padded(pairs.map(([a, b]) => rate(a, b, prompted))) }];
  lineChart($("rate-chart"), series, short, Math.round(shown() * POLL_MS / 1000));
  legend($("rate-legend"), series.map((s) => ({ ...s, value: short(lastOf(s.values)) })));
  $("tile-rate").textContent = short(lastOf(series[0].values));
  return lastOf(series[0].values);
}

function drawExchange() {
  const pairs = samples.slice(1).map((s, i) => [samples[i], s]);
  const series = PHASES.flatMap((phase) => PARTS.map((part) => ({ name: phase + " " + part, phase, part })));
  series.forEach((s, i) => {
    s.color = color("series" + (i + 1));
    s.values = padded(pairs.map(([a, b]) => meanTime(a, b, s.part, s.phase)));
  });
  lineChart($("exchange-chart"), series, time, Math.round(shown() * POLL_MS / 1000));
  legend($("exchange-legend"), series.map((s) => ({ ...s, value: time(lastOf(s.values)) })));
}

function drawTiles(now) {
  const s = now.state, used = sum(s.ranks.map((r) => r.kv_used)), all = sum(s.ranks.map((r) => r.kv_tokens));
  const mean = (key) => { const n = sum(s.ranks.map((r) => r[key].count)); return n ? time(sum(s.ranks.map((r) => r[key].sum_s)) / n) : "–"; };
  $("tile-running").textContent = sum(s.ranks.map((r) => r.running));
  $("tile-queued").textContent = sum(s.ranks.map((r) => r.waiting));
  $("tile-kv").textContent = all ? (100 * used / all).toFixed(1) + " %" : "–";
  $("tile-first").textContent = mean("first_token");
  $("tile-inter").textContent = mean("inter_token");
}

function rankRow() {
  const tr = element("tr"), meter = element("span", "meter"), kv = element("td");
  meter.append(element("span"));
  kv.append(meter, element("span"));
  tr.append(element("th"), element("td"), element("td"), element("td"), kv, element("td"), element("td"), element("td"));
  tr.firstChild.scope = "row";
  return tr;
}

function drawRanks(before, now) {
  const body = $("ranks"), list = now.state.ranks;
  while (body.children.length < list.length) body.append(rankRow());
  list.forEach((r, i) => {
    const cells = body.children[i].children, share = r.kv_tokens ? r.kv_used / r.kv_tokens : 0;
    const values = [r.rank, r.pid, r.running, r.waiting, null, short(rate(before, now, (s) => s.ranks[i].generated_tokens)), grouped(r.steps),
      grouped(r.generated_tokens)];
    values.forEach((v, k) => { if (v !== null) cells[k].textContent = v; });
    cells[4].firstChild.firstChild.style.width = 100 * share + "%";
    cells[4].lastChild.textContent = (100 * share).toFixed(1) + " %";
  });
}

// The sample that is RECENT_MS old, or the oldest.
function recentBase() {
  const now = samples[samples.length - 1];
  return samples.find((s) => now.t - s.t <= RECENT_MS) || now;
}

const difference = (a, b) => b.map((row, r) => row.map((v, c) => v - (a[r] && a[r][c] !== undefined ? a[r][c] : 0)));

function expertRows() {
  const now = samples[samples.length - 1].state.expert_rows;
  return document.querySelector("input[name=window]:checked").value === "all" ? now : difference(recentBase().state.expert_rows, now);
}

function expertText(cell) {
  const rows = experts.rows;
  if (!rows.length || !sum(rows.map(sum))) return "no rows" + (document.querySelector("input[name=window]:checked").value === "all" ? " yet" : " in the last 10 s");
  if (cell) {
    const v = rows[cell.r][cell.c], all = sum(rows[cell.r]);
    return `layer ${cell.r}, expert ${cell.c}: ${grouped(v)} rows, ${(all ? 100 * v / all : 0).toFixed(1)} % of the layer`;
  }
  const uneven = rows.map((row) => Math.max(...row) * row.length / Math.max(1, sum(row)));
  const layer = uneven.indexOf(Math.max(...uneven));
  return `${grouped(Math.max(...rows.map(sum)))} rows a layer; most uneven is layer ${layer}, where the fullest expert has ${uneven[layer].toFixed(2)} times the mean`;
}

function rankText(cell) {
  const rows = ranks.rows;
  if (!rows.length || !sum(rows.map(sum))) return "no rows in the last 10 s";
  if (cell) return `rank ${cell.r} to rank ${cell.c}: ${grouped(rows[cell.r][cell.c])} rows in the last 10 s`;
  const all = sum(rows.map(sum)), own = sum(rows.map((r, i) => r[i] || 0));
  return `${grouped(all)} rows in the last 10 s, ${(100 * (all - own) / all).toFixed(1)} % of them to another rank`;
}

function drawExpertTable(rows) {
  const body = $("experts-table");
  while (body.children.length < rows.length) { const tr = element("tr"); tr.append(element("td"), element("td"), element("td")); body.append(tr); }
  rows.forEach((row, l) => {
    const all = Math.max(1, sum(row)), top = row.map((v, e) => [v, e]).sort((a, b) => b[0] - a[0]).slice(0, 4);
    const cells = body.children[l].children;
    cells[0].textContent = l;
    cells[1].textContent = top.map(([v, e]) => `${e} (${(100 * v / all).toFixed(1)} %)`).join(", ");
    cells[2].textContent = (top[0][0] * row.length / all).toFixed(2);
  });
}

function drawMaps() {
  const now = samples[samples.length - 1].state, base = recentBase().state, rows = expertRows();
  experts.draw(rows);
  $("experts-least").textContent = grouped(experts.range.least);
  $("experts-most").textContent = grouped(experts.range.most);
  experts.say();
  drawExpertTable(rows);
  ranks.draw(difference(base.ranks.map((r) => r.rows_sent), now.ranks.map((r) => r.rows_sent)));
  ranks.say();
}

function draw() {
  if (!samples.length) return;
  const now = samples[samples.length - 1], before = samples[Math.max(0, samples.length - 3)];
  drawTiles(now);
  drawRanks(before, now);
  drawRates();
  drawExchange();
  drawMaps();
}

function accept(state) {
  const last = samples[samples.length - 1];
  if (last && (state.ranks[0].pid !== last.state.ranks[0].pid || state.ranks.length !== last.state.ranks.length)) samples.length = 0; // another server
  samples.push({ t: performance.now(), state });
  if (samples.length > SAMPLES) samples.shift();
  model = state.model;
  $("model").textContent = state.model;
  document.title = "epx · " + state.model;
  const n = state.ranks.length;
  $("facts").textContent = `${n} ${n === 1 ? "rank" : "ranks"} · ${state.n_layers} layers of ${state.n_experts} experts, ${state.top_k} a token · ` +
    `exchange ${state.backend} over ${state.transport} · ${state.isa} · version ${state.version}`;
  if (state.failed) setStatus(state.failure, "bad");
  else setStatus("serving", "good");
  draw();
}

async function poll() {
  try {
    if (!document.hidden) {
      const response = await fetch("/engine/state", { headers: headers(), cache: "no-store" });
      if (response.ok) accept(await response.json());
      else setStatus(response.status === 401 ? "this server needs an API key: enter it under Settings" : await errorText(response), "bad");
    }
  } catch {
    setStatus("the server does not answer", "bad");
  }
  setTimeout(poll, POLL_MS);
}

function setUpEngine() {
  experts = new HeatMap($("experts-map"), $("experts-readout"), ["layer", ""], expertText);
  ranks = new HeatMap($("ranks-map"), $("ranks-readout"), ["rank", "to rank "], rankText);
  ranks.square = true;
  document.querySelectorAll("input[name=window]").forEach((i) => i.addEventListener("change", draw));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(draw).observe($("engine"));
  poll();
}

setUpChat();
setUpEngine();
