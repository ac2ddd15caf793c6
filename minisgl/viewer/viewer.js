"use strict";
// The page: one clock (`now.frame`), one selection (`now.selected`), and panels that draw both.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.onclick = value;
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};
// Formatters are made once: `toLocaleString` makes one for each number, a fifth of a frame's time.
const grouped = new Intl.NumberFormat("en").format;
const hundredths = new Intl.NumberFormat("en", { maximumFractionDigits: 2 }).format;
const plural = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
const milliseconds = (us) => (us < 1e5 ? hundredths(us / 1000) : grouped(Math.round(us / 1000)));

const now = { frame: 0, selected: null, playing: null, speed: 4 };
let run, state;

// ------------------------------------------------------------------------------------- colours

let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  colors = {};
  const names = "panel ink faint line free cached locked prefill decode launch host receive wait accent";
  for (const name of names.split(" ")) colors[name] = style.getPropertyValue(`--${name}`).trim();
  colors.light = style.getPropertyValue("--request-light").trim();
}

// A hue for each request; those of cached pages, which are blue, are left out.
const hue = (uid) => (235 + ((uid * 137.508) % 305)) % 360;
const colorOf = (uid) => `hsl(${hue(uid)} 62% ${colors.light})`;

// ----------------------------------------------------------------------------------- selection

const sameSelection = (a, b) => a && b && a.kind === b.kind && a.id === b.id;

function select(kind, id) {
  const wanted = kind === null ? null : { kind, id };
  now.selected = sameSelection(now.selected, wanted) ? null : wanted;
  draw();
  tell({ selected: now.selected });
  if (now.selected) $("say").textContent = `${describeSelection()} selected`;
}

// What lights up: the requests, pages and nodes that belong to the selection.
function highlighted() {
  const lit = { requests: new Set(), pages: new Set(), nodes: new Set() };
  const { kind, id } = now.selected ?? {};
  const addPath = (page) => {
    for (const node of state.path(page)) {
      lit.nodes.add(node.page);
      for (const each of node.pages) lit.pages.add(each);
    }
  };
  const holding = (page) => [...state.requests.values()].filter((req) => req.pages.includes(page));
  const nodeOf = (page) => [...state.nodes.values()].find((node) => node.pages.includes(page));
  if (kind === "request") {
    const req = state.requests.get(id);
    lit.requests.add(id);
    for (const page of req?.pages ?? []) lit.pages.add(page);
    if (req?.shared) addPath(nodeOf(req.pages[req.shared - 1])?.page ?? -1);
  } else if (kind === "page") {
    lit.pages.add(id);
    for (const req of holding(id)) lit.requests.add(req.uid);
    const node = nodeOf(id);
    if (node) lit.nodes.add(node.page);
  } else if (kind === "node" && state.nodes.has(id)) {
    addPath(id);
    for (const req of holding(state.nodes.get(id).pages.at(-1))) lit.requests.add(req.uid);
  }
  return lit;
}

function describeSelection() {
  const { kind, id } = now.selected ?? {};
  if (kind === "request") return `request ${id}`;
  if (kind === "page") return `page ${id}`;
  if (kind === "node") return `node of page ${id}`;
  return "";
}

// -------------------------------------------------------------------------------------- canvas

// Widths of the boxes around the canvases, read together: a read between writes costs a layout.
const widths = {};

let drawnWidth = 0; // of the page

function measure() {
  drawnWidth = document.body.clientWidth;
  for (const id of ["overview", "lanes", "pages", "table"]) widths[id] = $(id).parentElement.clientWidth;
}

// Size a canvas for its box and the screen's density; its context draws in CSS pixels.
function canvas(id, height) {
  const element = $(id);
  const width = widths[id];
  const ratio = window.devicePixelRatio || 1;
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
    element.style.height = `${height}px`;
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, element };
}

// ------------------------------------------------------------------------------------ timeline

const OVERVIEW = 56;

// All steps: how many tokens each computed, against the budget. It is cached until its size changes.
function drawOverview() {
  const { context, width } = canvas("overview", OVERVIEW);
  const count = run.frames.length;
  const most = Math.max(1, ...run.frames.map((frame) => frame.tokens));
  const columns = Math.min(count, Math.max(1, Math.floor(width)));
  const wide = width / columns;
  for (let column = 0; column < columns; column++) {
    const from = Math.floor((column * count) / columns);
    const to = Math.max(from + 1, Math.floor(((column + 1) * count) / columns));
    let top = run.frames[from];
    for (let frame = from; frame < to; frame++) if (run.frames[frame].tokens > top.tokens) top = run.frames[frame];
    const height = top.tokens ? 2 + Math.sqrt(top.tokens / most) * (OVERVIEW - 4) : 0;
    context.fillStyle = colors[top.phase] ?? colors.faint;
    context.fillRect(column * wide, OVERVIEW - height, Math.max(0.8, wide - (wide > 3 ? 1 : 0)), height);
  }
  $("cursor").style.left = `${((now.frame + 0.5) / count) * 100}%`;
}

// Widths of labels; all digits are equally wide.
const textWidths = new Map();

function textWidth(context, text) {
  const shape = text.replace(/\d/g, "0");
  if (!textWidths.has(shape)) textWidths.set(shape, context.measureText(shape).width);
  return textWidths.get(shape);
}

const LANES = { host: 8, device: 42, height: 26 };
let lanes = []; // what is drawn, to be found by a click: {x, width, y, frame, text}

// The steps around this one on a time axis: what the host did, and when the device computed.
function drawLanes() {
  const { context, width, element } = canvas("lanes", 96);
  const frame = run.frames[now.frame];
  const around = Number($("zoom").value);
  const first = run.frames[Math.max(0, now.frame - around)];
  const last = run.frames[Math.min(run.frames.length - 1, now.frame + Math.ceil(around / 2))];
  const from = Math.max(first.time - 1, 0);
  const to = Math.max(last.time + (last.time - from) * 0.04, from + 1);
  const label = 52;
  const x = (time) => label + ((time - from) / (to - from)) * (width - label - 4);
  lanes = [];
  const box = (start, end, y, fill, text, step, tip) => {
    if (end < from || start > to) return;
    const left = Math.max(label, x(start));
    const wide = Math.max(0.7, Math.min(width - 4, x(end)) - left);
    const isNow = step === frame.step;
    context.fillStyle = fill;
    context.fillRect(left, y, wide, LANES.height);
    context.strokeStyle = isNow ? colors.ink : colors.line;
    context.lineWidth = isNow ? 1.5 : 0.5;
    context.strokeRect(left, y, wide, LANES.height);
    if (wide > textWidth(context, text) + 6) {
      context.fillStyle = [colors.wait, colors.receive].includes(fill) ? colors.ink : "#222";
      context.fillText(text, left + 4, y + LANES.height / 2);
    }
    lanes.push({ x: left, wide, y, step, tip });
  };
  context.fillStyle = colors.ink;
  context.fillText("host", 2, LANES.host + LANES.height / 2);
  context.fillText("device", 2, LANES.device + LANES.height / 2);
  const visible = between(run.stages, from, to);
  for (const { stage, step, start, end } of visible) {
    const fill = { launch: colors.launch, wait: colors.wait, receive: colors.receive }[stage] ?? colors.host;
    box(start, end, LANES.host, fill, `${stage} ${step}`, step, `${stage}, step ${step}: ${milliseconds(end - start)} ms`);
  }
  const steps = new Set(visible.map(({ step }) => step));
  for (const step of steps) {
    const device = run.devices.get(step);
    if (!device) continue;
    const phase = run.frames[run.byStep.get(step)]?.phase;
    const tip = `device, step ${step}: ${milliseconds(device.end - device.start)} ms`;
    box(device.start, device.end, LANES.device, colors[phase] ?? colors.faint, `${phase} ${step}`, step, tip);
  }
  context.fillStyle = colors.faint;
  const ticks = Math.max(2, Math.floor(width / 140));
  for (let tick = 0; tick <= ticks; tick++) {
    const time = from + ((to - from) * tick) / ticks;
    const text = `${milliseconds(time)} ms`;
    const left = Math.min(x(time), width - textWidth(context, text) - 2);
    context.fillText(text, left, 84);
  }
  element.setAttribute("aria-label", `Host and device around step ${frame.step ?? "end"}, ${milliseconds(to - from)} ms`);
}

// The stages that overlap an interval; they are sorted by time.
function between(stages, from, to) {
  let low = 0;
  let high = stages.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stages[middle].end < from) low = middle + 1;
    else high = middle;
  }
  const found = [];
  for (let index = low; index < stages.length && stages[index].start <= to; index++) found.push(stages[index]);
  return found;
}

// -------------------------------------------------------------------------- queue, batch, budget

const SHOWN = 24; // requests of a list that are shown at once

function requestRow(req, lit) {
  const frame = run.frames[now.frame];
  const place = frame.uids.indexOf(req.uid);
  const found = Math.min(req.promptLen, req.found * run.about.page_size);
  const done = req.state === "done";
  const computed = done ? req.promptLen : Math.min(req.promptLen, Math.max(found, req.cached));
  const ends = { found, computed, prompt: req.promptLen, answer: req.promptLen + req.tokens };
  const style = Object.entries(ends).map(([name, end]) => `--${name}-end:${(100 * end) / req.maxLen}%`).join(";");
  const bar = make("span", { class: "bar", "aria-hidden": "true", style });
  const what = place < 0 ? (req.retracted && req.state === "waiting" ? "retracted" : "") : `+${frame.computed[place]}`;
  const title = `request ${req.uid}: ${req.state}, ${req.promptLen} prompt tokens, ${found} cached, ${req.tokens} of the answer`;
  const row = make("button", {
    class: `request${place >= 0 ? " batch" : ""}`, title, "aria-label": title, "data-uid": req.uid,
    "aria-pressed": String(lit.requests.has(req.uid)), onclick: () => select("request", req.uid),
  }, make("span", { class: "dot", style: `background:${colorOf(req.uid)}` }), make("span", { class: "uid" }, String(req.uid)),
    bar, make("span", { class: "what" }, what));
  return row;
}

function drawRequests(lit) {
  const groups = { running: [], waiting: [], done: [] };
  for (const req of state.requests.values()) groups[req.state].push(req);
  groups.running.sort((a, b) => a.row - b.row);
  groups.done.reverse();
  for (const [name, all] of Object.entries(groups)) {
    const most = name === "done" ? 8 : SHOWN;
    const chosen = all.filter((req, index) => index < most || lit.requests.has(req.uid));
    const more = all.length - chosen.length;
    $(name).replaceChildren(...chosen.map((req) => requestRow(req, lit)),
      ...(more ? [make("p", { class: "more" }, `and ${more} more`)] : []));
    $(`${name}-count`).textContent = all.length;
  }
  const frame = run.frames[now.frame];
  const budget = run.about.budget;
  const used = frame.phase === "prefill" ? frame.tokens : 0;
  $("budget-bar").style.width = `${Math.min(100, (100 * used) / budget)}%`;
  $("budget-text").textContent = frame.phase === "prefill"
    ? `${plural(used, "token")} of a prefill budget of ${grouped(budget)}`
    : frame.phase === "decode" ? `decode: one token for each of ${plural(frame.uids.length, "request")}` : "no step";
  const rate = frame.prompts ? Math.round((100 * frame.hits) / frame.prompts) : 0;
  $("hits").textContent = `${rate} % of admitted prompt tokens came from the cache`;
}

// --------------------------------------------------------------------------------------- pages

const grid = { size: 14, columns: 1, page: 0 };

function pageKind(page, locked) {
  const owner = state.owner[page];
  if (owner === FREE) return "free";
  if (owner === CACHED) return locked.has(page) ? "locked" : "cached";
  return "owned";
}

function lockedPages() {
  const locked = new Set();
  for (const node of state.nodes.values()) if (node.locks) for (const page of node.pages) locked.add(page);
  return locked;
}

function drawPages(lit, locked) {
  const count = state.owner.length;
  const width = widths.pages;
  grid.size = count > 4000 ? 7 : count > 1500 ? 9 : count > 500 ? 12 : count > 120 ? 18 : count > 40 ? 26 : 36;
  grid.columns = Math.max(1, Math.floor(width / grid.size));
  const rows = Math.ceil(count / grid.columns);
  const { context, element } = canvas("pages", rows * grid.size + 2);
  const dim = now.selected !== null;
  const counts = { free: 0, cached: 0, locked: 0, owned: 0 };
  for (let page = 0; page < count; page++) {
    const kind = pageKind(page, locked);
    counts[kind] += 1;
    const x = (page % grid.columns) * grid.size;
    const y = Math.floor(page / grid.columns) * grid.size;
    context.globalAlpha = dim && !lit.pages.has(page) ? 0.25 : 1;
    context.fillStyle = kind === "owned" ? colorOf(state.owner[page]) : colors[kind];
    context.fillRect(x + 0.5, y + 0.5, grid.size - 1.5, grid.size - 1.5);
    if (grid.size >= 26) {
      context.fillStyle = kind === "locked" ? "#fff" : kind === "free" ? colors.ink : "#222";
      context.textAlign = "center";
      context.fillText(page, x + grid.size / 2, y + grid.size / 2);
      context.textAlign = "start";
    }
    if (lit.pages.has(page)) {
      context.strokeStyle = colors.accent;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 1, grid.size - 2.5, grid.size - 2.5);
    }
  }
  context.globalAlpha = 1;
  if (document.activeElement === element) {
    context.strokeStyle = colors.ink;
    context.lineWidth = 2;
    context.strokeRect((grid.page % grid.columns) * grid.size, Math.floor(grid.page / grid.columns) * grid.size, grid.size, grid.size);
  }
  for (const [kind, number] of Object.entries(counts)) {
    $(`count-${kind}`).textContent = grouped(number);
    $(`share-${kind}`).style.width = `${(100 * number) / count}%`;
  }
  element.setAttribute("aria-label", `Pool of ${count} pages: ${counts.free} free, ${counts.cached} cached, `
    + `${counts.locked} locked, ${counts.owned} owned by requests. Arrow keys move, Enter selects.`);
}

function pageAt(event) {
  const page = Math.floor(event.offsetY / grid.size) * grid.columns + Math.floor(event.offsetX / grid.size);
  return page >= 0 && page < state.owner.length && event.offsetX < grid.columns * grid.size ? page : null;
}

function pageText(page) {
  const owner = state.owner[page];
  if (owner === FREE) return `page ${page}: free`;
  if (owner !== CACHED) return `page ${page}: request ${owner}`;
  const node = [...state.nodes.values()].find((each) => each.pages.includes(page));
  return `page ${page}: prefix cache, ${node.locks ? plural(node.locks, "lock") : "evictable"}`;
}

// ---------------------------------------------------------------------------------- page table

function drawTable(lit, locked) {
  const live = [...state.requests.values()].filter((req) => req.row >= 0).sort((a, b) => a.row - b.row);
  const shown = live.slice(0, SHOWN);
  const size = 18;
  const label = 58;
  const widest = Math.max(1, ...shown.map((req) => req.pages.length));
  const width = widths.table;
  const cell = Math.max(3, Math.min(30, (width - label) / widest));
  const { context, element } = canvas("table", Math.max(1, shown.length) * size + 4);
  shown.forEach((req, index) => {
    const y = index * size;
    context.globalAlpha = now.selected && !lit.requests.has(req.uid) ? 0.35 : 1;
    context.fillStyle = colorOf(req.uid);
    context.fillRect(2, y + 4, 9, 9);
    context.fillStyle = colors.ink;
    context.fillText(`row ${req.row}`, 15, y + 9);
    req.pages.forEach((page, position) => {
      const own = position >= req.shared;
      context.globalAlpha = now.selected && !lit.requests.has(req.uid) && !lit.pages.has(page) ? 0.25 : 1;
      context.fillStyle = own ? colorOf(req.uid) : colors[locked.has(page) ? "locked" : "cached"];
      context.fillRect(label + position * cell, y + 1, cell - 1, size - 3);
      if (cell >= 22) {
        context.fillStyle = own ? "#222" : "#fff";
        context.textAlign = "center";
        context.fillText(page, label + (position + 0.5) * cell, y + 9);
        context.textAlign = "start";
      }
    });
  });
  context.globalAlpha = 1;
  table = { shown, size, label, cell };
  if (!shown.length) {
    context.fillStyle = colors.faint;
    context.fillText("no request holds a row", 4, 10);
  }
  $("table-more").textContent = live.length > shown.length ? `and ${live.length - shown.length} more rows` : "";
  element.setAttribute("aria-label", `Page table: ${plural(live.length, "row")} in use. `
    + shown.slice(0, 8).map((req) => `row ${req.row}, request ${req.uid}: pages ${req.pages.join(" ")}`).join("; "));
}

let table = { shown: [] };

// ---------------------------------------------------------------------------------- radix tree

const TREE_NODES = 60; // more would not be read
let drawnTree = "";

function drawTree(lit) {
  const children = new Map();
  for (const node of state.nodes.values()) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const order = new Map(state.evictionOrder().map((node, index) => [node.page, index + 1]));
  const boxes = [];
  let row = 0;
  const place = (parent, depth) => {
    for (const node of (children.get(parent) ?? []).sort((a, b) => a.page - b.page)) {
      const top = row;
      place(node.page, depth + 1);
      if (row === top) row += 1;
      boxes.push({ node, depth, y: (top + row - 1) / 2, parent });
    }
  };
  place(-1, 0);
  const cut = boxes.filter((box, index) => index < TREE_NODES || lit.nodes.has(box.node.page));
  const wide = 104, high = 34, gap = 26;
  const places = new Map(cut.map((box) => [box.node.page, box]));
  const left = (depth) => 44 + depth * (wide + gap);
  const top = (y) => 4 + y * (high + 6);
  const middle = top((row - 1) / 2) + high / 2;
  const lines = cut.map(({ depth, y, parent }) => {
    const up = places.get(parent);
    const from = up ? [left(up.depth) + wide, top(up.y) + high / 2] : [34, middle];
    const to = [left(depth), top(y) + high / 2];
    const half = (from[0] + to[0]) / 2;
    return `M${from} C${half},${from[1]} ${half},${to[1]} ${to}`;
  });
  const dim = now.selected !== null;
  const drawn = cut.map(({ node, depth, y }) => {
    const isLit = lit.nodes.has(node.page);
    const names = ["node", node.locks ? "is-locked" : "is-cached", isLit ? "lit" : dim ? "dim" : ""].join(" ");
    const tokens = node.pages.length * run.about.page_size;
    const use = node.locks ? plural(node.locks, "lock") : `evicted ${ordinal(order.get(node.page))}`;
    const pages = node.pages.length > 3 ? `${node.pages[0]}, ${node.pages[1]} … ${node.pages.at(-1)}` : node.pages.join(", ");
    const text = `node of ${plural(node.pages.length, "page")} (${tokens} tokens): ${use}`;
    return `<div class="${names}" tabindex="0" role="button" aria-pressed="${isLit}" aria-label="${text}" title="${text}" data-node="${node.page}"`
      + ` style="left:${left(depth)}px;top:${top(y)}px">${pages}\n${use}</div>`;
  });
  const width = left(Math.max(0, ...cut.map((box) => box.depth))) + wide + 8;
  const height = Math.max(44, top(Math.max(1, row)) + 4);
  const picture = `<svg width="${width}" height="${height}" aria-hidden="true"><path d="${lines.join("")}"/><text x="2" y="${middle + 4}">root</text></svg>${drawn.join("")}`;
  if (picture !== drawnTree) $("tree").innerHTML = drawnTree = picture; // most steps change no node
  const locked = boxes.filter(({ node }) => node.locks).length;
  $("tree-text").textContent = boxes.length
    ? `${plural(boxes.length, "node")}, ${locked} locked${cut.length < boxes.length ? `; ${cut.length} shown` : ""}` : "empty";
}

const ordinal = (n) => (n === 1 ? "next" : `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`);

// ------------------------------------------------------------------------------ tokens and text

const spell = (token) => data.words[token] ?? `⟨${token}⟩`;

function chip(token, className, title) {
  return make("span", { class: `token ${className}`, title }, spell(token).replace(/\n/g, "⏎"));
}

function drawTokens(lit) {
  const frame = run.frames[now.frame];
  const uids = lit.requests.size ? [...lit.requests].slice(0, 6) : frame.uids.slice(0, 6);
  const parts = [];
  for (const uid of uids) {
    const req = state.requests.get(uid);
    if (!req) continue;
    const answer = run.answers.get(uid).slice(0, req.tokens);
    const found = req.found * run.about.page_size;
    const line = make("p", { class: "tokens" });
    if (req.prompt?.length) {
      const from = lit.requests.size === 1 ? 0 : Math.max(0, req.prompt.length - 12);
      if (from) line.append("… ");
      req.prompt.slice(from).forEach((token, index) =>
        line.append(chip(token, index + from < found ? "found" : "prompt", `prompt token ${index + from}, id ${token}`)));
    } else {
      line.append(make("span", { class: "hidden" }, `${plural(req.promptLen, "prompt token")}, not recorded`));
    }
    const start = Math.max(0, answer.length - (lit.requests.size === 1 ? 200 : 24));
    if (start) line.append(" … ");
    answer.slice(start).forEach(({ token, frame: at }) =>
      line.append(chip(token, at === now.frame ? "answer fresh" : "answer", `answer, id ${token}`)));
    parts.push(make("h3", {}, make("span", { class: "dot", style: `background:${colorOf(uid)}` }), `request ${uid}`), line);
  }
  $("text").replaceChildren(...(parts.length ? parts : [make("p", { class: "hidden" }, "no request in this step")]));
}

// -------------------------------------------------------------------------------------- events

function describe([kind, ...fields]) {
  const few = (pages) => (pages.length > 6 ? `${pages.slice(0, 5).join(", ")} … (${pages.length})` : pages.join(", "));
  const name = (page) => (page < 0 ? "the root" : `node ${page}`);
  switch (kind) {
    case "RequestAdded": return [`request ${fields[0]} joins the queue with ${plural(fields[1], "token")}`, "request", fields[0]];
    case "RequestAdmitted": return [`request ${fields[0]} gets row ${fields[1]} and ${plural(fields[2].length, "cached page")}`, "request", fields[0]];
    case "RequestRetracted": return [`request ${fields[0]} is retracted`, "request", fields[0]];
    case "RequestReleased": return [`request ${fields[0]} is released`, "request", fields[0]];
    case "SchedulerReset": return ["all requests and cached prefixes are forgotten"];
    case "StepLaunched": return [`step ${fields[0]} is launched: ${fields[1]} of ${plural(fields[2].length, "request")}`];
    case "StepFinished": return [`step ${fields[0]} gives ${plural(fields[1].length, "token")}`];
    case "StageEnded": return [`${fields[0]} ends, step ${fields[1]}`];
    case "PagesTaken": return [`request ${fields[0]} takes ${few(fields[1])}`, "request", fields[0]];
    case "PagesCached": return [`request ${fields[0]} shares ${few(fields[1])}`, "request", fields[0]];
    case "PagesFreed": return [`free again: ${few(fields[0])}`, "page", fields[0][0]];
    case "NodeAdded": return [`${few(fields[1])} become a leaf under ${name(fields[0])}`, "node", fields[1][0]];
    case "NodeSplit": return [`${name(fields[0])} is split after ${plural(fields[1], "page")}`, "node", fields[0]];
    case "NodeEvicted": return [`${name(fields[0])} loses ${plural(fields[1], "page")}`, "node", fields[0]];
    case "NodeLocked": return [`the path to ${name(fields[0])} is ${fields[1] > 0 ? "locked" : "unlocked"}`, "node", fields[0]];
    case "NodeUsed": return [`the path to ${name(fields[0])} is used`, "node", fields[0]];
    default: return [kind];
  }
}

function drawEvents(lit) {
  const frame = run.frames[now.frame];
  const inFrame = run.events.slice(frame.start, frame.end);
  const rows = inFrame.slice(0, 60).map(([, event]) => {
    const [text, kind, id] = describe(event);
    const [source, chapter] = data.sources[event[0] === "StageEnded" ? event[1] : event[0]];
    const isLit = (kind === "request" && lit.requests.has(id)) || (kind === "node" && lit.nodes.has(id)) || (kind === "page" && lit.pages.has(id));
    const link = book === null ? make("span", {}, chapter.split("_")[0])
      : make("a", { href: `${book}${chapter}.html`, target: "_top" }, `chapter ${chapter.split("_")[0]}`);
    return make("li", { class: isLit ? "lit" : "" },
      kind ? make("button", { class: "plain", onclick: () => select(kind, id) }, text) : make("span", {}, text),
      make("span", { class: "source" }, make("code", {}, source), " ", link));
  });
  if (inFrame.length > 60) rows.push(make("li", {}, `and ${inFrame.length - 60} more`));
  $("events").replaceChildren(...rows);
  $("events-count").textContent = inFrame.length;
}

// Links lead to chapters where the book is: given, or around us on its site.
const book = (() => {
  if (data.book) return data.book.replace(/\/?$/, "/");
  try {
    return window.parent !== window && /\.html$/.test(window.parent.location.pathname) ? "" : null;
  } catch {
    return null;
  }
})();

// --------------------------------------------------------------------------------------- clock

function draw() {
  state = run.seek(now.frame);
  const lit = highlighted();
  const locked = lockedPages();
  const frame = run.frames[now.frame];
  $("cursor").style.left = `${((now.frame + 0.5) / run.frames.length) * 100}%`;
  $("step").value = now.frame;
  const name = frame.step === null ? "the end" : `step ${frame.step}: ${frame.phase} of ${plural(frame.uids.length, "request")}`;
  $("step").setAttribute("aria-valuetext", name);
  $("where").textContent = `${name}, ${milliseconds(frame.time)} ms`;
  $("selection").textContent = now.selected ? `${describeSelection()} ✕` : "";
  $("selection").hidden = now.selected === null;
  drawLanes();
  drawRequests(lit);
  drawPages(lit, locked);
  drawTable(lit, locked);
  drawTree(lit);
  drawTokens(lit);
  drawEvents(lit);
}

function seek(frame) {
  now.frame = Math.max(0, Math.min(run.frames.length - 1, frame));
  draw();
  tell({ frame: now.frame });
}

// Of two runs in one page each follows the other's clock and selection.
function tell(change) {
  if (!data.pair) return;
  for (let index = 0; index < window.parent.length; index++) {
    if (window.parent[index] !== window) window.parent[index].postMessage(change, "*");
  }
}

function follow({ data: change }) {
  if (!data.pair || !run || typeof change !== "object") return;
  if (Number.isInteger(change.frame)) now.frame = Math.max(0, Math.min(run.frames.length - 1, change.frame));
  if ("selected" in change) now.selected = change.selected;
  draw();
}

const LOOP = location.hash === "#loop"; // the page begins to play by itself, again and again
document.body.classList.toggle("brief", LOOP || data.pair);

function play(wanted = now.playing === null) {
  clearInterval(now.playing);
  now.playing = null;
  if (wanted) {
    if (now.frame >= run.frames.length - 1) seek(0);
    now.playing = setInterval(() => {
      if (now.frame < run.frames.length - 1) seek(now.frame + 1);
      else if (LOOP) seek(0);
      else play(false);
    }, 1000 / now.speed);
  }
  $("play").textContent = wanted ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", wanted ? "Pause" : "Play");
}

function nextRequest(by) {
  const uids = [...state.requests.values()].filter((req) => req.state !== "done").map((req) => req.uid);
  if (!uids.length) return;
  const at = now.selected?.kind === "request" ? uids.indexOf(now.selected.id) : by > 0 ? -1 : 0;
  now.selected = null;
  select("request", uids[(at + by + uids.length) % uids.length]);
}

const KEYS = {
  ArrowRight: (event) => seek(now.frame + (event.shiftKey ? 10 : 1)),
  ArrowLeft: (event) => seek(now.frame - (event.shiftKey ? 10 : 1)),
  Home: () => seek(0),
  End: () => seek(run.frames.length - 1),
  " ": () => play(),
  "]": () => nextRequest(1),
  "[": () => nextRequest(-1),
  Escape: () => select(null),
};

function onKey(event) {
  const target = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(target.tagName)) return;
  if (event.key === " " && ["BUTTON", "A"].includes(target.tagName)) return;
  if (target.dataset?.node !== undefined && ["Enter", " "].includes(event.key)) {
    event.preventDefault();
    select("node", Number(target.dataset.node));
    $("tree").querySelector(`[data-node="${target.dataset.node}"]`)?.focus();
    return;
  }
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
  if (target.id === "pages" && (event.key in moves || event.key === "Enter")) {
    event.preventDefault();
    if (event.key === "Enter") select("page", grid.page);
    else grid.page = Math.max(0, Math.min(state.owner.length - 1, grid.page + moves[event.key]));
    $("say").textContent = pageText(grid.page);
    draw();
    return;
  }
  if (event.key in KEYS) {
    event.preventDefault();
    KEYS[event.key](event);
  }
}

// --------------------------------------------------------------------------------------- start

function connect() {
  const overview = $("overview");
  const scrub = (event) => {
    const box = overview.getBoundingClientRect();
    seek(Math.floor(((event.clientX - box.left) / box.width) * run.frames.length));
  };
  overview.onpointerdown = (event) => {
    overview.setPointerCapture(event.pointerId);
    scrub(event);
  };
  overview.onpointermove = (event) => event.buttons && scrub(event);
  $("step").oninput = () => seek(Number($("step").value));
  $("play").onclick = () => play();
  $("back").onclick = () => seek(now.frame - 1);
  $("next").onclick = () => seek(now.frame + 1);
  $("start").onclick = () => seek(0);
  $("end").onclick = () => seek(run.frames.length - 1);
  $("zoom").oninput = () => drawLanes();
  $("selection").onclick = () => select(null);
  $("speed").onchange = () => {
    now.speed = Number($("speed").value);
    if (now.playing !== null) play(true);
  };
  $("theme").onclick = () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    repaint();
  };
  $("pages").onclick = (event) => {
    const page = pageAt(event);
    if (page !== null) select("page", page);
  };
  $("pages").onpointermove = (event) => {
    const page = pageAt(event);
    $("pages").title = page === null ? "" : pageText(page);
  };
  $("table").onclick = (event) => {
    const req = table.shown[Math.floor(event.offsetY / table.size)];
    if (!req) return;
    const page = req.pages[Math.floor((event.offsetX - table.label) / table.cell)];
    if (event.offsetX < table.label || page === undefined) select("request", req.uid);
    else select("page", page);
  };
  $("lanes").onclick = (event) => {
    const hit = lanes.find((lane) => event.offsetX >= lane.x && event.offsetX <= lane.x + lane.wide && Math.abs(event.offsetY - lane.y - 13) <= 13);
    const frame = hit && run.byStep.get(hit.step);
    if (frame !== undefined) seek(frame);
  };
  $("lanes").onpointermove = (event) => {
    const hit = lanes.find((lane) => event.offsetX >= lane.x && event.offsetX <= lane.x + lane.wide && Math.abs(event.offsetY - lane.y - 13) <= 13);
    $("lanes").title = hit?.tip ?? "";
  };
  $("tree").onclick = (event) => {
    const node = event.target.closest("[data-node]");
    if (node) select("node", Number(node.dataset.node));
  };
  document.addEventListener("keydown", onKey);
  window.addEventListener("message", follow);
  new ResizeObserver(() => document.body.clientWidth !== drawnWidth && repaint()).observe(document.body); // panels of another height change no canvas
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}

const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function repaint() {
  readColors();
  measure();
  drawOverview();
  draw();
}

// Show a run from one of its frames on: the recording, or a simulated one.
function show(wanted, frame) {
  run = wanted;
  const { about } = run;
  $("about").textContent = `${plural(run.frames.filter((each) => each.step !== null).length, "step")}, ${plural(run.answers.size, "request")}, `
    + `${plural(about.num_pages, "page")} of ${plural(about.page_size, "token")}, `
    + (about.device === "simulated" ? "simulated in this page" : `${about.overlap ? "overlapped loop" : "plain loop"} on ${about.device}`);
  $("step").max = run.frames.length - 1;
  now.frame = frame;
  now.selected = null;
  repaint();
}

// Inside a page of the book the theme is that of the page.
function followParent() {
  try {
    const parent = window.parent.document;
    if (parent === document) return;
    const root = parent.documentElement;
    const follow = () => {
      const theme = root.dataset.theme ?? parent.body.dataset.jpThemeLight;
      if (theme) document.documentElement.dataset.theme = { true: "light", false: "dark" }[theme] ?? theme;
      if (run) repaint();
    };
    follow();
    new MutationObserver(follow).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  } catch {
    // another origin: the system's setting counts
  }
}

async function decompress(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  followParent();
  run = Run.parse(await decompress(data.recording));
  connect();
  prepareWhatIf();
  show(run, Math.min(data.frame ?? 0, run.frames.length - 1));
  document.body.classList.add("ready");
  if (LOOP && !matchMedia("(prefers-reduced-motion: reduce)").matches) play(true);
}

start().catch((error) => {
  $("about").textContent = `This recording cannot be shown: ${error.message}`;
});
