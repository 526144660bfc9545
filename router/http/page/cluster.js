// Draws the cluster's picture as it comes, once a second. Data reaches the page as text, never as markup.

const STAGES = [
  ["retry", "retry"], ["router_wait", "router wait"], ["prefill_queue", "prefill queue"],
  ["prefill_compute", "prefill compute"], ["handoff_wait", "hand-off wait"], ["handoff_transfer", "hand-off transfer"],
  ["decode_admission", "decode admission"], ["decode", "decode"],
];
const BLOCKS = ["held", "lent", "quarantined", "cached"];
const SILENCE_MS = 5000, REOPEN_MS = 2000;

const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;
const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

function seconds(value) {
  if (value < 0.0995) return `${(value * 1e3).toFixed(1)} ms`;
  return value < 0.9995 ? `${(value * 1e3).toFixed(0)} ms` : `${value.toFixed(value < 99.95 ? 2 : 0)} s`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${value.toFixed(unit === 0 || value >= 99.95 ? 0 : 1)} ${units[unit]}`;
}

function duration(value) {
  const whole = Math.floor(value), two = (part) => String(part).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole / 60) % 60)} min`;
}

// --- elements: made once, then only what has changed is written ---------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

const children = new WeakMap();

/** Keeps one child of `parent` for each item, in their order; children that stand before the first are left alone. */
function keyed(parent, items, keyOf, make, fill, before = 0) {
  if (!children.has(parent)) children.set(parent, new Map());
  const known = children.get(parent);
  const wanted = new Set(items.map(keyOf));
  for (const [key, row] of known) if (!wanted.has(key)) { row.remove(); known.delete(key); }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const row = known.get(key);
    if (parent.children[before + index] !== row) parent.insertBefore(row, parent.children[before + index] ?? null);
    fill(row, item);
  });
}

function legend(list, names) {
  list.append(...names.map(([kind, name]) => element("li", {}, element("i", { class: kind }), name)));
}

// --- router -------------------------------------------------------------------------------------------------------

function drawRouter(status) {
  const router = status.router, total = (name) => sum(status.routers, (replica) => replica[name]), workers = status.pools.flatMap((pool) => pool.workers);
  const waits = status.recent.map((request) => request.ttft_s).filter((wait) => wait !== null).sort((a, b) => a - b);
  const quantile = (share) => (waits.length ? seconds(waits[Math.ceil(share * waits.length) - 1]) : "–");
  const pace = (name) => count(sum(workers, (worker) => worker.pace?.[name] ?? 0));
  const figures = [
    ["Running", count(total("running")), "requests"],
    ["Queued", count(total("queued")), `${count(total("queued_tokens"))} tokens`],
    ["Output", pace("tokens_per_s"), "tokens/s"],
    ["Prompt", pace("prompt_tokens_per_s"), "tokens/s"],
    ["First token p50", quantile(0.5), `p90 ${quantile(0.9)}`],
    ["Requests", count(total("requests_total")), "in all"],
    ["Failed", count(total("failed_total")), ""],
    ["Refused", count(total("refused_total")), ""],
    ["Retries", count(total("retries_total")), ""],
  ];
  keyed(byId("figures"), figures, (figure) => figure[0],
    ([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("b"), element("span"))),
    (row, [, value, note]) => { write(row.querySelector("b"), value); write(row.querySelector("span"), note); });
  const replicas = status.router_replicas > 1 ? `${status.routers.length} of ${status.router_replicas} routers · this one ` : "";
  write(byId("router-note"), `${replicas}${router.incarnation.slice(0, 8)} · up ${duration(router.uptime_s)} · ${bytes(router.rss_bytes)}`);
  write(byId("model"), status.model);
  write(byId("version"), `Baton ${status.version}`);
}

// --- workers ------------------------------------------------------------------------------------------------------

const LOAD = (name) => (worker) => worker.load?.[name] ?? 0;
const PACE = (name) => (worker) => worker.pace?.[name] ?? 0;
const COUNTER = (name) => (worker) => worker.load?.counters?.[name] ?? 0;

/** What is summed up over the workers of a row, one or a pool's; the note below it is shown unless it is zero. */
const COLUMNS = [
  { name: "Running", of: LOAD("running") },
  { name: "Waiting", of: LOAD("waiting") },
  { name: "Receiving", of: LOAD("receiving"), note: PACE("pulled_bytes_per_s"), noted: (value) => `${bytes(value)}/s` },
  { name: "Exported", of: LOAD("exported") },
  { name: "Pulled", of: COUNTER("bytes_pulled"), text: bytes, note: COUNTER("chunks_pulled"), noted: (value) => (value === 1 ? "1 chunk" : `${count(value)} chunks`) },
  { name: "Tokens/s", of: PACE("tokens_per_s"), note: PACE("prompt_tokens_per_s"), noted: (value) => `${count(value)} prompt` },
  { name: "Step ms", of: (worker) => (worker.load?.step_s ?? 0) * 1e3, text: (value) => value.toFixed(1), single: true },
  { name: "Memory", of: (worker) => worker.rss_bytes, text: bytes },
  { name: "Restarts", of: (worker) => worker.restarts },
];

function workerHead() {
  const names = ["Worker", "State", "KV cache", "Queued prompt tokens", ...COLUMNS.map((column) => column.name)];
  const kinds = ["left", "left", "left wide", "left half"];
  return names.map((name, index) => element("th", { role: "columnheader", scope: "col", class: kinds[index] ?? "" }, name));
}

function workerRow(isPool) {
  const name = element("th", { role: "rowheader", scope: isPool ? "rowgroup" : "row", class: "left" }, element("div"), element("small", { class: "code quiet" }));
  const kv = element("td", { role: "cell", class: "left wide", "data-label": "KV cache" },
    element("div", { class: "bar", role: "img" }, ...BLOCKS.map((kind) => element("i", { class: kind }))), element("div", {}, element("span"), element("span")));
  const queue = element("td", { role: "cell", class: "left half", "data-label": "Queued prompt tokens" },
    element("div", { class: "bar", role: "img" }, element("i", { class: "queue" })), element("div", {}, element("span"), element("span")));
  const cells = COLUMNS.map((column) => element("td", { role: "cell", "data-label": column.name }, element("span"), element("small")));
  return element("tr", { role: "row" }, name, element("td", { role: "cell", class: "left" }), kv, queue, ...cells);
}

function fillRow(row, workers, name, code, state, stateName) {
  const [head, stateCell, kv, queue, ...cells] = row.children;
  write(head.children[0], name);
  write(head.children[1], code);
  write(stateCell, stateName);
  mark(stateCell, "class", `left ${state}`);
  const loaded = workers.filter((worker) => worker.load !== null);
  const total = sum(loaded, LOAD("total_blocks"));
  const blocks = BLOCKS.map((kind) => sum(loaded, LOAD(`${kind}_blocks`)));
  const used = total - sum(loaded, LOAD("free_blocks"));
  const parts = BLOCKS.map((kind, index) => [kind, blocks[index]]).filter(([, number]) => number > 0);
  const spoken = parts.map(([kind, number]) => `${kind} ${count(number)}`).join(" · ");
  fillBar(kv, blocks.map((number) => (total ? number / total : 0)), total ? `${percent(used / total)} of ${count(total)} blocks` : "–", spoken);
  const queued = sum(loaded, LOAD("queued_tokens")), budget = sum(loaded, (worker) => worker.queue_budget_tokens);
  fillBar(queue, [budget ? Math.min(1, queued / budget) : 0], loaded.length ? count(queued) : "–", budget ? `of ${count(budget)}` : "");
  COLUMNS.forEach((column, index) => {
    const value = sum(workers, column.of), shown = !(column.single && workers.length !== 1);
    write(cells[index].children[0], shown ? (column.text ?? count)(value) : "");
    const noted = column.note ? sum(workers, column.note) : 0;
    write(cells[index].children[1], noted > 0 ? column.noted(noted) : "");
    cells[index].classList.toggle("zero", value === 0);
  });
}

function fillBar(cell, shares, first, second) {
  const [bar, words] = cell.children;
  shares.forEach((share, index) => { bar.children[index].style.width = `${share * 100}%`; });
  mark(bar, "aria-label", `${cell.dataset.label}: ${first} ${second}`);
  write(words.children[0], first);
  write(words.children[1], second);
}

function drawWorkers(pools) {
  keyed(byId("workers"), pools, (pool) => pool.name,
    () => element("tbody", { role: "rowgroup" }, workerRow(true)),
    (body, pool) => {
      const ready = pool.workers.filter((worker) => worker.state === "ready").length;
      const state = ready === pool.size ? "ready" : ready ? "draining" : "lost";
      const role = pool.role === pool.name ? "" : pool.role;
      fillRow(body.firstChild, pool.workers, pool.name, role, state, `${ready}/${pool.size} ready`);
      keyed(body, pool.workers, (worker) => worker.worker_id, () => workerRow(false),
        (row, worker) => {
          const changed = worker.role === pool.role ? "" : `${worker.role} `;
          fillRow(row, [worker], worker.worker_id, changed + worker.incarnation.slice(0, 8), worker.state, worker.state);
        }, 1);
    }, 1);
  write(byId("workers-note"), pools.flatMap((pool) => pool.workers).flatMap(laneFaults).join(" · "));
}

/** What is wrong with the ways by which KV comes to a worker. */
function laneFaults(worker) {
  const wrong = (worker.lanes ?? []).filter((lane) => lane.is_slow || lane.reason);
  return wrong.map((lane) => {
    const speed = `${lane.gb_per_s.toPrecision(2)} GB/s, ${lane.expected_gb_per_s} expected`;
    return `KV ${lane.source} → ${worker.worker_id} ${lane.state}: ${lane.reason || speed}`;
  });
}

// --- last requests ------------------------------------------------------------------------------------------------

const RECENT = [["Request", "left"], ["Face", "left"], ["Outcome", "left"], ["Workers", "left"], ["Prompt", ""], ["Output", ""], ["First token", ""], ["Total", ""]];
let status = null, looked = null;

function recentHead() {
  const axis = element("div", { class: "axis", "aria-hidden": "true" }, ...Array.from({ length: 5 }, () => element("span")));
  const heads = RECENT.map(([name, kind]) => element("th", { role: "columnheader", scope: "col", class: kind }, name));
  return [...heads, element("th", { role: "columnheader", scope: "col", class: "bars" }, element("span", { class: "unseen" }, "Stages"), axis)];
}

function workersOf(request) {
  const { prefill_worker: prefill, decode_worker: decode } = request;
  return prefill === decode ? decode || "–" : `${prefill || "–"} → ${decode || "–"}`;
}

const isWell = (request) => ["stop", "length", "aborted"].includes(request.outcome);
const stagesOf = (request) => STAGES.filter(([field]) => request.timeline[field] > 0);

function recentRow(request) {
  const cell = (text, kind = "", note = "") => element("td", { role: "cell", class: kind }, text, note && element("small", {}, note));
  const spoken = stagesOf(request).map(([field, name]) => `${name} ${seconds(request.timeline[field])}`).join(", ");
  const segments = stagesOf(request).map(([field]) => {
    const segment = element("i", { class: field });
    segment.style.flexGrow = 1000 * (request.timeline[field] / request.timeline.total); // below 1 in sum, flex leaves room
    return segment;
  });
  const bar = element("div", { class: "bar", role: "img", "aria-label": spoken }, ...segments);
  const row = element("tr", { role: "row", tabindex: "-1", "aria-describedby": "detail" },
    cell(request.request_id, "left code"), cell(request.face, "left quiet"),
    cell(request.outcome, `left ${isWell(request) ? request.outcome : "trouble"}`), cell(workersOf(request), "left quiet"),
    cell(count(request.prompt_tokens), "", request.cached_tokens ? `${count(request.cached_tokens)} cached` : ""),
    cell(count(request.completion_tokens)), cell(request.ttft_s === null ? "–" : seconds(request.ttft_s)),
    cell(seconds(request.timeline.total)), element("td", { role: "cell", class: "bars" }, bar));
  row.request = request;
  return row;
}

const tickText = (value) => (value > 0 && value < 1 ? `${+(value * 1e3).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`);

/** The end of the time axis: four steps of 1, 2, 2.5 or 5 times a power of ten. */
function axisEnd(longest) {
  const power = 10 ** Math.floor(Math.log10(Math.max(longest, 1e-4) / 4));
  return 4 * power * [1, 2, 2.5, 5, 10].find((step) => 4 * power * step >= longest);
}

function drawRecent() {
  if (looked !== null) return; // what somebody looks at does not move away
  const recent = status.recent, body = byId("recent").tBodies[0];
  const isTime = document.querySelector("#scale input:checked").value === "time";
  const end = axisEnd(Math.max(0, ...recent.map((request) => request.timeline.total)));
  [...document.querySelectorAll(".axis span")].forEach((tick, index) => write(tick, isTime ? tickText((end * index) / 4) : `${index * 25} %`));
  keyed(body, recent, (request) => `${status.router.incarnation} ${request.number}`, recentRow, (row, request) => {
    row.querySelector(".bar").style.width = isTime ? `${(request.timeline.total / end) * 100}%` : "100%";
  });
  if (!body.querySelector("[tabindex='0']") && body.firstChild) body.firstChild.tabIndex = 0;
  write(byId("recent-note"), recent.length ? `${recent.length}, the newest first` : "none has ended yet");
}

function look(row) {
  const detail = byId("detail");
  looked = row;
  detail.hidden = row === null;
  if (row === null) return drawRecent();
  const request = row.request, timeline = request.timeline;
  const stages = stagesOf(request).map(([field, name]) => element("tr", {},
    element("td", { class: "left" }, element("i", { class: field }), name), element("td", {}, seconds(timeline[field])),
    element("td", { class: "quiet" }, percent(timeline[field] / (timeline.total || 1)))));
  const facts = [
    request.message, `${request.face}, ${workersOf(request)}`,
    `${count(request.prompt_tokens)} prompt tokens, ${count(request.cached_tokens)} of them cached`,
    `${count(request.transferred_tokens)} tokens handed over${request.connector && ` by ${request.connector}`}`,
    request.num_outputs > 1 && `${request.num_outputs} outputs, the last one drawn`,
    request.recomputed_tokens && `${count(request.recomputed_tokens)} tokens recomputed`, request.retries && `${request.retries} retries`,
  ].filter(Boolean);
  detail.replaceChildren(element("div", { class: "code" }, request.request_id), element("table", {}, ...stages),
    ...facts.map((fact) => element("div", { class: "quiet" }, fact)));
  const bar = row.lastChild.getBoundingClientRect(), box = detail.getBoundingClientRect();
  const below = bar.bottom + 4 + box.height < innerHeight;
  detail.style.top = `${Math.max(4, below ? bar.bottom + 4 : bar.top - 4 - box.height)}px`;
  detail.style.left = `${Math.max(4, Math.min(bar.left, innerWidth - box.width - 4))}px`;
  write(byId("recent-note"), "held still while you look");
}

function watchRecent() {
  const body = byId("recent").tBodies[0], rowOf = (event) => event.target.closest("tr");
  body.addEventListener("pointerover", (event) => look(rowOf(event)));
  body.addEventListener("pointerleave", () => look(null));
  body.addEventListener("focusin", (event) => look(rowOf(event)));
  body.addEventListener("focusout", () => look(null));
  body.addEventListener("keydown", (event) => {
    const next = { ArrowDown: "nextSibling", ArrowUp: "previousSibling" }[event.key], row = rowOf(event);
    if (event.key === "Escape") row.blur();
    if (!next || !row[next]) return;
    event.preventDefault();
    [row.tabIndex, row[next].tabIndex] = [-1, 0];
    row[next].focus();
  });
  byId("scale").addEventListener("change", drawRecent);
}

// --- connection ---------------------------------------------------------------------------------------------------

let source = null, heard = performance.now(), reopen = 0;

function open() {
  source?.close();
  clearTimeout(reopen);
  heard = performance.now();
  source = new EventSource("cluster/events");
  source.onmessage = (event) => {
    heard = performance.now();
    status = JSON.parse(event.data);
    setLink(status.router.draining ? "draining" : "live");
    drawRouter(status);
    drawWorkers(status.pools);
    drawRecent();
  };
  source.onerror = () => {
    // A draining router ends the stream after each picture, so that nobody who looks holds it up.
    if (!status?.router.draining) setLink("lost");
    if (source.readyState === EventSource.CLOSED) { clearTimeout(reopen); reopen = setTimeout(open, REOPEN_MS); }
  };
}

function setLink(link) {
  mark(document.body, "data-link", link);
  write(byId("link"), link === "lost" ? "connection lost, trying again" : link);
}

byId("workers").tHead.rows[0].append(...workerHead());
byId("recent").tHead.rows[0].append(...recentHead());
legend(byId("kv-legend"), [...BLOCKS, "free"].map((kind) => [kind, kind]));
legend(byId("stage-legend"), STAGES);
watchRecent();
open();
setInterval(() => {
  if (document.hidden || performance.now() - heard < SILENCE_MS) return;
  setLink("lost");
  open();
}, 1000);
document.addEventListener("visibilitychange", () => (document.hidden ? source.close() : open()));
