"use strict";
// The state of an engine, rebuilt from recorded events: the same rules as minisgl/recording.py.

class Replay {
  constructor(about) {
    this.owner = new Int32Array(about.num_pages).fill(FREE); // FREE, CACHED, or the uid of a request
    this.requests = new Map(); // by uid
    this.nodes = new Map(); // by their first page
    this.uses = 0; // counts uses of nodes: the node with the smallest stamp is evicted first
    this.steps = 0;
  }

  clone() {
    const copy = Object.create(Replay.prototype);
    copy.owner = this.owner.slice();
    copy.requests = new Map();
    for (const [uid, req] of this.requests) {
      // A request that is done changes no more, so all copies share it.
      copy.requests.set(uid, req.state === "done" ? req : { ...req, pages: req.pages.slice() });
    }
    copy.nodes = new Map();
    for (const [page, node] of this.nodes) copy.nodes.set(page, { ...node, pages: node.pages.slice() });
    copy.uses = this.uses;
    copy.steps = this.steps;
    return copy;
  }

  // Nodes from one up to the root.
  *path(page) {
    while (page >= 0) {
      const node = this.nodes.get(page);
      yield node;
      page = node.parent;
    }
  }

  // Unlocked nodes, the next victim first.
  evictionOrder() {
    return [...this.nodes.values()].filter((node) => node.locks === 0).sort((a, b) => a.stamp - b.stamp);
  }

  apply([, [kind, ...fields]]) {
    this[kind]?.(...fields);
  }

  RequestAdded(uid, promptLen, maxLen, prompt) {
    this.requests.set(uid, {
      uid, promptLen, maxLen, prompt, state: "waiting", row: -1, pages: [], shared: 0,
      cached: 0, found: 0, tokens: 0, retracted: false,
    });
  }

  RequestAdmitted(uid, row, pages) {
    const req = this.requests.get(uid);
    Object.assign(req, { state: "running", row, pages: pages.slice(), shared: pages.length });
    if (!req.retracted) req.found = pages.length;
  }

  RequestRetracted(uid) {
    this.leave(uid, "waiting").retracted = true;
  }

  RequestReleased(uid) {
    this.leave(uid, "done");
  }

  leave(uid, state) {
    return Object.assign(this.requests.get(uid), { state, row: -1, pages: [], shared: 0, cached: 0 });
  }

  SchedulerReset() {
    this.owner.fill(FREE);
    this.nodes.clear();
    for (const [uid, req] of this.requests) if (req.state !== "done") this.leave(uid, "done");
  }

  StepLaunched(step, phase, uids, cached) {
    this.steps = step + 1;
    uids.forEach((uid, index) => (this.requests.get(uid).cached = cached[index]));
  }

  StepFinished(step, tokens) {
    for (const [uid, token] of tokens) {
      if (token === null) continue;
      let req = this.requests.get(uid);
      if (req.state === "done") {
        req = { ...req }; // other copies of this state share the object
        this.requests.set(uid, req);
      }
      req.tokens += 1;
    }
  }

  PagesTaken(uid, pages) {
    this.requests.get(uid).pages.push(...pages);
    for (const page of pages) this.owner[page] = uid;
  }

  PagesCached(uid, pages) {
    const req = this.requests.get(uid);
    pages.forEach((page, index) => (req.pages[index] = page));
    req.shared = pages.length;
  }

  PagesFreed(pages) {
    for (const page of pages) this.owner[page] = FREE;
  }

  NodeAdded(parent, pages) {
    this.nodes.set(pages[0], { page: pages[0], pages: pages.slice(), parent, locks: 0, stamp: 0 });
    for (const page of pages) this.owner[page] = CACHED;
  }

  NodeSplit(page, at) {
    const upper = this.nodes.get(page);
    const lower = { ...upper, page: upper.pages[at], pages: upper.pages.slice(at), parent: page };
    for (const node of this.nodes.values()) if (node.parent === page) node.parent = lower.page;
    upper.pages = upper.pages.slice(0, at);
    this.nodes.set(lower.page, lower);
  }

  NodeEvicted(page, count) {
    const node = this.nodes.get(page);
    node.pages.splice(node.pages.length - count, count);
    if (node.pages.length === 0) this.nodes.delete(page);
  }

  NodeLocked(page, change) {
    for (const node of this.path(page)) node.locks += change;
  }

  NodeUsed(page) {
    for (const node of this.path(page)) node.stamp = ++this.uses;
  }
}

const FREE = -1;
const CACHED = -2;
const KEYFRAME = 32; // frames between two stored states

// A recording as frames: the state after each launched step, and the end.
class Run {
  static parse(text) {
    const [about, ...events] = text.split("\n").filter((line) => line).map((line) => JSON.parse(line));
    return new Run(about, events);
  }

  constructor(about, events) {
    Object.assign(this, { about, events });
    this.answers = new Map(); // uid to tokens, each with the frame in which it was handed out
    this.frames = []; // what happened up to the end of each frame
    this.stages = []; // what the host did: {stage, step, start, end}, in µs
    this.keyframes = [];
    this.build();
  }

  build() {
    const state = new Replay(this.about);
    let frame = this.newFrame(0);
    let last = 0; // end of the last stage
    const stage = (name, step, end) => {
      this.stages.push({ stage: name, step, start: last, end });
      last = end;
    };
    this.events.forEach((event, index) => {
      const [time, [kind, ...fields]] = event;
      if (kind === "RequestAdded") this.answers.set(fields[0], []);
      if (kind === "RequestAdmitted") {
        frame.prompt += state.requests.get(fields[0]).promptLen;
        frame.hit += fields[2].length * this.about.page_size;
      }
      if (kind === "StageEnded") stage(fields[0], fields[1], time);
      if (kind === "StepFinished") {
        stage("process", fields[0], time);
        for (const [uid, token] of fields[1]) {
          if (token !== null) this.answers.get(uid).push({ token, frame: this.frames.length });
        }
      }
      if (kind === "StepLaunched") {
        const [step, phase, uids, cached] = fields;
        stage("launch", step, time);
        const before = uids.map((uid) => {
          const req = state.requests.get(uid);
          return Math.max(req.cached, req.cached === 0 ? req.shared * this.about.page_size : 0);
        });
        Object.assign(frame, { step, phase, uids, computed: cached.map((n, i) => n - before[i]) });
      }
      state.apply(event);
      if (kind === "StepLaunched") {
        frame.end = index + 1;
        this.close(frame, state, time);
        frame = this.newFrame(index + 1);
      }
    });
    frame.end = this.events.length;
    if (frame.end > frame.start || this.frames.length === 0) this.close(frame, state, last);
    this.devices = this.deviceTimes();
    this.byStep = new Map(this.frames.map((each, index) => [each.step, index]));
  }

  newFrame(start) {
    return { start, end: start, step: null, phase: "", uids: [], computed: [], prompt: 0, hit: 0 };
  }

  close(frame, state, time) {
    const counts = { waiting: 0, running: 0 };
    for (const req of state.requests.values()) if (req.state in counts) counts[req.state] += 1;
    const before = this.frames.at(-1) ?? { prompts: 0, hits: 0 };
    frame.prompts = before.prompts + frame.prompt;
    frame.hits = before.hits + frame.hit;
    Object.assign(frame, counts, { time, tokens: frame.computed.reduce((a, b) => a + b, 0) });
    if (this.frames.length % KEYFRAME === 0) this.keyframes.push(state.clone());
    this.frames.push(frame);
  }

  // When the device computed each step. On a CPU that is while the host launches it. A GPU's step
  // begins when it is launched and the one before is done, and is done when the host's wait ends.
  deviceTimes() {
    const devices = new Map();
    const launches = new Map();
    let free = 0;
    for (const { stage, step, start, end } of this.stages) {
      if (stage === "launch") launches.set(step, { start, end });
      if (stage === "launch" && this.about.device === "cpu") devices.set(step, { step, start, end });
      if (stage === "wait" && this.about.device !== "cpu" && launches.has(step)) {
        devices.set(step, { step, start: Math.max(free, launches.get(step).start), end });
        free = end;
      }
    }
    return devices;
  }

  // The state at the end of a frame.
  seek(frame) {
    const key = Math.floor(frame / KEYFRAME);
    const state = this.keyframes[key].clone();
    const from = this.frames[key * KEYFRAME].end;
    for (let index = from; index < this.frames[frame].end; index++) state.apply(this.events[index]);
    return state;
  }
}
