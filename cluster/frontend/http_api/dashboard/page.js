// Asks the server once a second what it does, and shows that. Talks to no other host.
"use strict";

const POLL_MS = 1000;
const HISTORY = 120;
const byId = (id) => document.getElementById(id);
const history = [];
let key = sessionStorage.getItem("lockstep-key") || "";
let seen = null;

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const percent = (value) => `${number(100 * value)} %`;
const seconds = (value) => (value === null ? "–" : value < 1 ? `${number(1000 * value)} ms` : `${number(value, 1)} s`);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function meter(value, label, className) {
  const made = element("meter", "", className);
  made.max = 1;
  made.value = value;
  made.setAttribute("aria-label", `${label}: ${percent(value)}`);
  return made;
}

function fill(table, names, rows, empty) {
  const head = document.createElement("tr");
  names.forEach((name) => {
    const cell = element("th", name);
    cell.scope = "col";
    head.append(cell);
  });
  const lines = rows.map((cells) => {
    const line = document.createElement("tr");
    cells.forEach((cell) => {
      const td = document.createElement("td");
      td.append(cell instanceof Node ? cell : String(cell));
      line.append(td);
    });
    return line;
  });
  if (!lines.length) {
    const line = document.createElement("tr");
    const cell = element("td", empty);
    cell.colSpan = names.length;
    line.append(cell);
    lines.push(line);
  }
  table.replaceChildren(head, ...lines);
}

// The value below which this share of a histogram's observations lies; null without any.
function quantile(share, after, before) {
  const counts = after.buckets.map((count, at) => count - (before ? before.buckets[at] : 0));
  const all = counts.reduce((sum, count) => sum + count, 0);
  if (all <= 0) return null;
  let below = 0;
  for (let at = 0; at < counts.length; at += 1) {
    if (below + counts[at] >= share * all) {
      const low = at ? after.bounds[at - 1] : 0;
      const high = at < after.bounds.length ? after.bounds[at] : low;
      return low + ((high - low) * (share * all - below)) / (counts[at] || 1);
    }
    below += counts[at];
  }
  return null;
}

function tiles(now) {
  const before = history[0] === now ? null : history[0];
  const of = (name, share) => quantile(share, now.histograms[name], before && before.histograms[name]);
  const shown = [
    ["tokens/s", number(now.tokens_per_s)],
    ["waiting", number(now.waiting)],
    ["running", number(now.running)],
    ["first token, p50", seconds(of("first_token_s", 0.5))],
    ["first token, p99", seconds(of("first_token_s", 0.99))],
    ["per token, p50", seconds(of("token_s", 0.5))],
    ["acceptance", percent(now.acceptance)],
    ["KV reserved", percent(now.kv_usage)],
    ["replicas", number(now.serving)],
  ];
  const list = document.createElement("dl");
  list.style.display = "contents";
  shown.forEach(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(element("dt", name), element("dd", value));
    list.append(tile);
  });
  byId("tiles").replaceChildren(list);
}

function rate() {
  const rates = history.map((each) => each.tokens_per_s);
  const most = Math.max(1, ...rates);
  const points = rates.map((value, at) => `${((at + HISTORY - rates.length) * 240) / (HISTORY - 1)},${58 - (56 * value) / most}`);
  byId("rate").firstElementChild.setAttribute("points", points.join(" "));
  byId("rate-now").textContent = `now ${number(rates[rates.length - 1])}, most ${number(most)}`;
}

function positions(now) {
  const bars = now.accepted_at.map((accepted, at) => {
    const share = now.drafts ? accepted / now.drafts : 0;
    const bar = element("div", "", "bar");
    bar.append(element("span", `token ${at + 1}`), meter(share, `draft token ${at + 1}`), element("b", percent(share)));
    return bar;
  });
  byId("positions").replaceChildren(...(bars.length ? bars : [element("p", "Nothing was drafted yet.", "soft")]));
}

function show(now) {
  history.push(now);
  if (history.length > HISTORY) history.shift();
  seen = now;
  byId("door").hidden = true;
  byId("model").textContent = now.model;
  const state = byId("state");
  const silent = now.silent.length ? `; no answer from ${now.silent.join(", ")}` : "";
  const said = now.stopping ? "The server is stopping" : now.serving ? "Ready" : "No replica is ready";
  const line = `${said}, up for ${seconds(now.uptime_s)}${silent}.`;
  if (state.dataset.said !== said + silent) {
    state.textContent = line;
    state.dataset.said = said + silent;
  }
  state.className = now.serving && !now.stopping ? "" : "bad";
  tiles(now);
  rate();
  positions(now);
  fill(byId("replicas"), ["replica", "state", "device", "drafter", "rows", "batches", "KV", "acceptance", "tokens/s"],
    now.replicas.map((r) => [r.id, r.draining ? "drains" : "serves", r.device, r.drafter || "none", r.residents, r.batches_in_flight,
      meter(r.kv_blocks ? r.kv_blocks_used / r.kv_blocks : 0, `KV blocks of ${r.id}`, "kv"), percent(r.acceptance), number(r.tokens_per_s)]),
    "No replica has joined.");
  fill(byId("batches"), ["batch", "replica", "kind", "rows", "steps", "lengths", "spread", "k", "drafted", "accepted", "committed", "time"],
    now.batches.slice(0, 12).map((b) => [b.id, b.replica_id, b.kind, b.rows, b.steps, `${b.shortest} to ${b.longest}`, b.longest - b.shortest,
      b.draft_len, b.draft_tokens, b.accepted_tokens, b.committed_tokens, seconds(b.seconds)]),
    "None yet.");
  fill(byId("requests"), ["request", "state", "replica", "prompt", "new", "limit", "drafted", "accepted", "age"],
    now.requests.map((r) => [r.id, r.state, r.replica_id || "–", r.prompt_tokens, r.new_tokens, r.new_tokens_max, r.draft_tokens, r.accepted_tokens, seconds(r.age_s)]),
    "None.");
}

function silence(text) {
  const state = byId("state");
  state.textContent = text;
  state.dataset.said = text;
  state.className = "bad";
}

async function poll() {
  try {
    const answer = await fetch("dashboard/data", { headers: headers() });
    if (answer.ok) {
      show(await answer.json());
    } else {
      const error = await answer.json().catch(() => null);
      silence(error && error.error ? error.error.message : `The server answers ${answer.status}.`);
      byId("door").hidden = answer.status !== 401 && answer.status !== 403;
    }
  } catch {
    silence("The server does not answer.");
  }
  setTimeout(poll, POLL_MS);
}

byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("lockstep-key", key);
});

// ------------------------------------------------------------------ ask

let asking = null;

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// A token's own text where the answer tells it, so that each has its colour.
function pieces(choice) {
  const drafted = choice.drafted || [];
  const told = choice.logprobs && (choice.logprobs.content ? choice.logprobs.content.map((c) => c.bytes) : choice.logprobs.tokens);
  return (told || []).map((token, at) => [token, drafted[at] === true]);
}

async function ask(question) {
  const chat = seen && seen.chat;
  const limit = Number(byId("limit").value) || 128;
  const body = {
    model: seen ? seen.model : "",
    stream: true,
    stream_options: { include_usage: true },
    speculative_decoding_stats: true,
    temperature: byId("greedy").checked ? 0 : 1,
    max_tokens: limit,
    ...(chat ? { messages: [{ role: "user", content: question }], logprobs: true } : { prompt: question, logprobs: 0 }),
  };
  const answer = byId("answer");
  const figures = byId("figures");
  answer.replaceChildren();
  figures.textContent = "";
  asking = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  const decoder = new TextDecoder();
  let tokens = 0;
  let accepted = 0;
  const began = performance.now();
  try {
    const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: asking.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        for (const [token, drafted] of pieces(choice)) {
          const text = Array.isArray(token) ? decoder.decode(new Uint8Array(token), { stream: true }) : token;
          const span = element("span", text, `token ${drafted ? "drafted" : "own"}`);
          answer.append(span);
          tokens += 1;
          accepted += drafted;
        }
      }
    }
    const took = (performance.now() - began) / 1000;
    figures.textContent = `${tokens} tokens in ${seconds(took)}, ${number(tokens / took)} tokens/s; ${accepted} of them were drafted.`;
  } catch (error) {
    figures.textContent = error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}`;
  }
  byId("stop").disabled = true;
  byId("send").disabled = false;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("send").disabled) ask(byId("question").value);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => asking && asking.abort());

poll();
