"use strict";
// The panel "What if": other requests or another engine, simulated in the page and then shown like a
// recording. Each change is compared with the settings before it.

const BUDGETS = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]; // and that of the recording
// Sliders: group, name, label, smallest and largest value. The engine's values begin as recorded.
const CONTROLS = [
  ["requests", "count", "requests", 1, 120],
  ["requests", "rate", "arrivals per second", 1, 200],
  ["requests", "burst", "arrive together", 1, 32],
  ["requests", "shared", "shared prefix, tokens", 0, 200],
  ["requests", "own", "own prompt, mean tokens", 1, 200],
  ["requests", "answer", "answer, mean tokens", 1, 100],
  ["requests", "seed", "seed", 0, 99],
  ["engine", "pages", "pages in the pool", 8, 400],
  ["engine", "rows", "rows: requests at once", 1, 64],
  ["engine", "budget", "tokens in a prefill step", 0, 0],
  ["engine", "reserve", "promised answer tokens", 1, 65],
];
const CHOICES = [
  ["requests", "source", "source", { recorded: "as recorded", random: "made up" }],
  ["engine", "policy", "policy", { fcfs: "first come, first served", fair: "fair between clients" }],
  ["engine", "cache", "prefix cache", { radix: "radix tree", none: "none" }],
];
const RANDOM = { count: 24, rate: 40, burst: 4, shared: 24, own: 10, answer: 12, seed: 1, reserve: 65 };
const WHOLE_ANSWER = 65; // of the slider `reserve`
const DEVICE = { stepUs: 4000, tokenUs: 100 }; // the simulated device of chapter 09

const whatIf = { recorded: null, before: null, now: null, moved: false };

// Random numbers in [0, 1) from a seed: the mulberry32 generator.
function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

// Requests that arrive in bursts. One in three is of client "a", with prompts four times as long.
function madeUp({ count, rate, burst, shared, own, answer, seed }) {
  const next = random(seed);
  const length = (mean) => 1 + Math.floor(Math.min(3, -Math.log(1 - next())) * (mean - 0.5));
  const tokens = (many) => Array.from({ length: many }, () => 100 + Math.floor(next() * 800));
  const prefix = tokens(shared);
  const arrivals = [];
  let at = 0;
  for (let uid = 0; uid < count; uid++) {
    if (uid && uid % burst === 0) at += Math.round((-Math.log(1 - next()) * 1e6 * burst) / rate);
    const client = "abc"[Math.floor(next() * 3)];
    const prompt = [...prefix, ...tokens(length(client === "a" ? 4 * own : own))];
    arrivals.push({ at, uid, client, prompt, answer: tokens(length(answer)), maxTokens: 3 * answer });
  }
  return arrivals;
}

// The requests of a recording with their answers; null if their prompts were not recorded.
function asRecorded({ events, answers }) {
  const added = events.filter(([, event]) => event[0] === "RequestAdded");
  const first = new Map();
  for (const [at, [, uid, length, maxLen, prompt]] of added) {
    if (prompt?.length !== length || first.has(uid)) continue;
    const answer = answers.get(uid).map(({ token }) => token);
    first.set(uid, { at: at - added[0][0], uid, client: "", prompt, answer: answer.length ? answer : [0], maxTokens: maxLen - length });
  }
  return first.size ? [...first.values()] : null;
}

// What a run came to, in numbers that can be compared.
function outcome({ events, frames }, asked) {
  const [added, last, first, gaps] = [new Map(), new Map(), [], [0]];
  let [evicted, retracted] = [0, 0];
  for (const [time, [kind, ...fields]] of events) {
    if (kind === "RequestAdded") added.set(fields[0], time);
    if (kind === "NodeEvicted") evicted += fields[1];
    if (kind === "RequestRetracted") retracted += 1;
    if (kind !== "StepFinished") continue;
    for (const [uid] of fields[1]) {
      if (last.has(uid)) gaps.push(time - last.get(uid));
      else first.push(time - added.get(uid));
      last.set(uid, time);
    }
  }
  first.sort((a, b) => a - b);
  const { prompts, hits } = frames.at(-1);
  return [
    ["time for all requests", `${milliseconds(events.at(-1)[0])} ms`],
    ["steps", grouped(frames.filter((frame) => frame.step !== null).length)],
    ["first token, median", `${milliseconds(first[first.length >> 1] ?? 0)} ms`],
    ["first token, longest", `${milliseconds(first.at(-1) ?? 0)} ms`],
    ["longest wait between two tokens", `${milliseconds(gaps.reduce((a, b) => Math.max(a, b)))} ms`],
    ["prompt tokens from the cache", `${prompts ? Math.round((100 * hits) / prompts) : 0} %`],
    ["pages evicted", grouped(evicted)],
    ["retracted", grouped(retracted)],
    ["too long for the pool", grouped(asked - added.size)],
  ];
}

const field = (name) => $(`what-if-${name}`);

function chosen() {
  const found = {};
  for (const [, name] of CONTROLS) found[name] = Number(field(name).value);
  for (const [, name] of CHOICES) found[name] = field(name).value;
  return { ...found, budget: BUDGETS[found.budget], reserve: found.reserve < WHOLE_ANSWER ? found.reserve : null };
}

// Run the scheduler with the chosen settings; returns the run and how many requests arrived.
function simulate(want) {
  const arrivals = want.source === "recorded" ? asRecorded(whatIf.recorded) : madeUp(want);
  const { page_size: pageSize } = whatIf.recorded.about;
  const settings = {
    pages: want.pages, pageSize, rows: want.rows, budget: want.budget, fair: want.policy === "fair", radix: want.cache === "radix",
    reserve: want.reserve, window: Infinity, minShared: 32,
    threshold: Math.floor(want.budget / 32), turn: 128, ...DEVICE,
  };
  const simulation = new Simulation(settings, arrivals);
  return [new Run(simulation.about, simulation.run()), arrivals.length];
}

function showOutcome() {
  const rows = whatIf.now.map(([name, value], index) => {
    const before = whatIf.before?.[index][1] ?? "";
    return make("tr", { class: before && before !== value ? "changed" : "" },
      make("th", { scope: "row" }, name), make("td", {}, before), make("td", {}, value));
  });
  $("outcome").tBodies[0].replaceChildren(...rows);
}

// After a control moved. While one slider is dragged, the comparison stays with where it started.
function change() {
  if (!whatIf.moved) whatIf.before = whatIf.now;
  whatIf.moved = true;
  const want = chosen();
  for (const [group, name] of CONTROLS) {
    const text = want[name] === null ? "whole answer" : grouped(want[name]);
    field(name).setAttribute("aria-valuetext", text);
    field(name).previousElementSibling.textContent = text;
    field(name).disabled = group === "requests" && want.source === "recorded";
  }
  const [simulated, asked] = simulate(want);
  whatIf.now = outcome(simulated, asked);
  show(simulated, Math.min(now.frame, simulated.frames.length - 1));
  showOutcome();
}

function settle() {
  whatIf.moved = false;
  $("say").textContent = whatIf.now.map(([name, value]) => `${name}: ${value}`).join("; ");
}

function slider([, name, label, min, max], value) {
  const largest = name === "budget" ? BUDGETS.length - 1 : Math.max(max, value);
  const input = make("input", { type: "range", id: `what-if-${name}`, min, max: largest, value });
  input.oninput = change;
  input.onchange = settle;
  return make("label", { for: input.id }, make("span", {}, label), make("span", { class: "value", "aria-hidden": "true" }), input);
}

function choice([, name, label, options], hidden) {
  const shown = Object.entries(options).filter(([key]) => key !== hidden);
  const select = make("select", { id: `what-if-${name}` }, ...shown.map(([value, text]) => make("option", { value }, text)));
  select.onchange = () => {
    change();
    settle();
  };
  return make("label", {}, make("span", {}, label), select);
}

// Fill the panel for a recording; its run is shown again when the panel is closed.
function prepareWhatIf() {
  whatIf.recorded = run;
  const { num_pages: pages, rows, budget } = run.about;
  if (!BUDGETS.includes(budget)) BUDGETS.push(budget);
  BUDGETS.sort((a, b) => a - b);
  const values = { ...RANDOM, pages, rows: rows ?? 8, budget: BUDGETS.indexOf(budget) };
  const hidden = asRecorded(run) ? null : "recorded";
  for (const group of ["requests", "engine"]) {
    $(`what-if-group-${group}`).append(
      ...CHOICES.filter(([of]) => of === group).map((each) => choice(each, hidden)),
      ...CONTROLS.filter(([of]) => of === group).map((each) => slider(each, values[each[1]])));
  }
  $("what-if").ontoggle = () => {
    whatIf.moved = whatIf.now !== null; // opened again: the comparison stays
    if ($("what-if").open) change();
    else show(whatIf.recorded, 0);
    whatIf.moved = false;
  };
  if (location.hash === "#what-if") $("what-if").open = true;
}
