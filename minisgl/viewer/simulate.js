"use strict";
// The scheduler of chapters 03, 08b, 09 and 09c, plain loop, on a simulated device. It reports the
// same events as the Python one, so a simulated run is a recording like any other.

// The radix tree of chapter 03, over pages: a run of tokens, its pages, and the locks on it.
class RadixTree {
  constructor(pageSize, emit) {
    Object.assign(this, { pageSize, emit, evictable: 0, lru: new Set() }); // the oldest node first
    this.root = { tokens: [], pages: [], parent: null, key: "", children: new Map(), locks: 0 };
  }

  key(tokens, start) {
    return tokens.slice(start, start + this.pageSize).join();
  }

  // Follow whole pages of `tokens` down.
  walk(tokens) {
    let [node, start] = [this.root, 0];
    while (start < tokens.length) {
      const child = node.children.get(this.key(tokens, start));
      if (!child) break;
      let same = 0;
      while (same < child.tokens.length && child.tokens[same] === tokens[start + same]) same++;
      same -= same % this.pageSize;
      if (same < child.tokens.length) return [this.split(child, same), start + same];
      [node, start] = [child, start + same];
    }
    return [node, start];
  }

  // Cut a node after `at` tokens; the upper half has the same locks and enters `lru` when it is used.
  split(node, at) {
    const count = at / this.pageSize;
    const upper = { ...node, tokens: node.tokens.slice(0, at), pages: node.pages.slice(0, count), children: new Map() };
    node.parent.children.set(node.key, upper);
    Object.assign(node, { tokens: node.tokens.slice(at), pages: node.pages.slice(count), parent: upper });
    node.key = this.key(node.tokens, 0);
    upper.children.set(node.key, node);
    this.emit("NodeSplit", upper.pages[0], count);
    return upper;
  }

  name(node) {
    return node === this.root ? -1 : node.pages[0];
  }

  path(node) {
    const found = [];
    for (; node.parent !== null; node = node.parent) found.push(node);
    return found;
  }

  pagesOf(handle) {
    return this.path(handle.node).reverse().flatMap((node) => node.pages);
  }

  // Mark a path as just used, each parent behind its child.
  touch(last) {
    this.emit("NodeUsed", this.name(last));
    for (const node of this.path(last)) {
      if (node.locks > 0) continue;
      this.lru.delete(node);
      this.lru.add(node);
    }
  }

  match(tokens) {
    const [node, length] = this.walk(tokens.slice(0, tokens.length - (tokens.length % this.pageSize)));
    this.touch(node);
    return { node, length };
  }

  // Cache whole pages of tokens; returns a handle and the tokens that were cached before.
  insert(tokens, pages) {
    let [node, cached] = this.walk(tokens);
    if (cached < tokens.length) {
      const fresh = pages.slice(cached / this.pageSize);
      const key = this.key(tokens, cached);
      const leaf = { tokens: tokens.slice(cached), pages: fresh, parent: node, key, children: new Map(), locks: 0 };
      node.children.set(key, leaf);
      this.evictable += fresh.length;
      this.emit("NodeAdded", this.name(node), fresh.slice());
      node = leaf;
    }
    this.touch(node);
    return [{ node, length: tokens.length }, cached];
  }

  evict(missing) {
    const freed = [];
    this.evictable -= missing;
    while (missing > 0) {
      const [leaf] = this.lru;
      const kept = Math.max(0, leaf.pages.length - missing);
      const gone = leaf.pages.splice(kept);
      freed.push(...gone);
      missing -= gone.length;
      this.emit("NodeEvicted", kept ? leaf.pages[0] : gone[0], gone.length);
      leaf.tokens.length = kept * this.pageSize;
      if (kept) continue;
      this.lru.delete(leaf);
      leaf.parent.children.delete(leaf.key);
    }
    return freed;
  }

  unlockedPages({ node }) {
    return this.path(node).reduce((sum, one) => sum + (one.locks ? 0 : one.pages.length), 0);
  }

  lock({ node: last }, change = 1) {
    const path = this.path(last);
    if (!path.length) return;
    this.emit("NodeLocked", this.name(last), change);
    for (const node of path) {
      node.locks += change;
      if (node.locks !== (change > 0 ? 1 : 0)) continue; // neither its first lock nor its last
      this.evictable -= change * node.pages.length;
      if (change > 0) this.lru.delete(node);
    }
    if (change < 0) this.touch(last);
  }
}

// No prefix cache: matches are empty, pages stay with their request.
class NoTree {
  evictable = 0;
  match() { return { length: 0 }; }
  insert() { return [{ length: 0 }, 0]; }
  pagesOf() { return []; }
  unlockedPages() { return 0; }
  lock() {}
  evict() { return []; }
}

// First come, first served.
class ArrivalOrder {
  requests = [];
  get size() { return this.requests.length; }
  add(req) { this.requests.push(req); }
  resume(req) { this.requests.unshift(req); }
  first() { return this.requests[0] ?? null; }
  remove(req) { this.requests.splice(this.requests.indexOf(req), 1); }
  chunkComesFirst() { return true; }
  retractionOrder(reqs) { return [...reqs].reverse(); }
  displaceable() { return []; }
  charge() {}
  leave() {}
}

const ANSWER_WEIGHT = 2;
const MOST_GONE = 1024; // clients

// Fair in tokens between clients; within a client, in the order of fair queueing (chapter 08b).
class FairQueue {
  constructor(stepTokens, turn) {
    Object.assign(this, { stepTokens, turn, shares: new Map(), gone: new Map(), waiting: new Set(), count: 0, total: 0, clock: 0 });
  }

  get size() {
    return this.waiting.size;
  }

  add(req) {
    const number = this.count++;
    if (!this.shares.has(req.client)) {
      const served = this.gone.get(req.client) ?? 0;
      this.gone.delete(req.client);
      this.shares.set(req.client, { served, clock: 0, live: 0, waiting: 0, since: number, yielded: -1, start: 0 });
    }
    const share = this.shares.get(req.client);
    if (!share.waiting) share.served = Math.max(share.served, Math.trunc(this.clock), this.least(share));
    share.live += 1;
    this.push(req, [share.clock + req.promptLen, number, this.total]);
  }

  // What the least served other client has: of those that wait, if any do.
  least(share) {
    const others = [...this.shares.values()].filter((other) => other !== share);
    const waiting = others.filter((other) => other.waiting);
    const served = (waiting.length ? waiting : others).map((other) => other.served);
    return served.length ? Math.min(...served) : 0;
  }

  resume(req) {
    const [share, number, over] = [this.shares.get(req.client), this.count++, this.turnIsOver(req)];
    if (over) share.served = Math.max(share.served, this.least(share));
    this.push(req, [-Infinity, -number, req.cachedLen]);
    if (over && !this.rows(req)) share.since = share.yielded = number;
  }

  turnIsOver({ deviceLen, prefillLen }) {
    return deviceLen - prefillLen >= this.turn + Math.floor(prefillLen / 32);
  }

  push(req, tag) {
    req.tag = tag;
    const share = this.shares.get(req.client);
    if (!share.waiting) share.start = Math.max(share.start, this.clock);
    share.waiting += 1;
    this.waiting.add(req);
  }

  remove(req) {
    this.waiting.delete(req);
    const share = this.shares.get(req.client);
    share.waiting -= 1;
  }

  // Negative if `a` comes before `b`: of one client by their tags, of equal clients by what is left.
  static byTag(a, b) {
    return a.tag[0] - b.tag[0] || a.tag[1] - b.tag[1];
  }

  byRest(a, b) {
    const fresh = (a.tag[0] > -Infinity) - (b.tag[0] > -Infinity); // a retracted request first
    const end = (req) => this.shares.get(req.client).start + (req.prefillLen - req.cachedLen);
    return fresh || end(a) - end(b) || a.tag[1] - b.tag[1];
  }

  rows({ client }) {
    const { live, waiting } = this.shares.get(client);
    return live - waiting;
  }

  first() {
    const heads = new Map();
    for (const req of this.waiting) {
      const head = heads.get(req.client);
      if (!head || FairQueue.byTag(req, head) < 0) heads.set(req.client, req);
    }
    const least = Math.min(...[...heads.values()].map((head) => this.due(head)));
    const found = [...heads.values()].filter((head) => this.due(head) < least + this.stepTokens);
    const since = (req) => this.shares.get(req.client).since;
    const yielded = found.map(since).filter((number, at) => number === this.shares.get(found[at].client).yielded);
    const line = Math.min(...yielded); // nobody who came later passes this client
    const place = (req) => Math.sign(since(req) - line);
    const few = (req) => 32 - Math.clz32(this.rows(req)); // rows in powers of two
    return found.sort((a, b) => few(a) - few(b) || place(a) - place(b) || this.byRest(a, b))[0] ?? null;
  }

  // A client's service; a long new prompt adds its length, less what all had since.
  due(head) {
    const rest = head.prefillLen - this.stepTokens - (this.total - head.tag[2]);
    return this.shares.get(head.client).served + (head.tag[0] > -Infinity ? Math.max(0, rest) : 0);
  }

  chunkComesFirst(chunked) {
    const first = this.first();
    if (first === null) return true;
    if (first.client === chunked.client) return FairQueue.byTag(chunked, first) <= 0;
    const ahead = this.shares.get(chunked.client).served - this.shares.get(first.client).served;
    if (Math.abs(ahead) >= this.stepTokens) return ahead < 0;
    return this.byRest(chunked, first) <= 0;
  }

  // Number each client's requests from 1, and all from 0; the highest first.
  static numbered(reqs) {
    const counts = new Map();
    const found = reqs.map((req, index) => {
      counts.set(req.client, (counts.get(req.client) ?? 0) + 1);
      return [counts.get(req.client), index, req];
    });
    return found.sort((a, b) => b[0] - a[0] || b[1] - a[1]);
  }

  retractionOrder(reqs) {
    return FairQueue.numbered(reqs).map(([, , req]) => req);
  }

  // A half-done prompt is a step ahead and computed enough since it yielded.
  chunkYields(req, first) {
    const ahead = this.shares.get(req.client).served - this.due(first);
    const matched = req.handle.length;
    const begin = req.tag[0] > -Infinity ? matched : Math.max(matched, req.tag[2]);
    const enough = Math.max(begin - matched, 2 * first.prefillLen);
    return ahead >= this.stepTokens && begin + enough <= req.cachedLen && req.cachedLen < req.prefillLen;
  }

  displaceable(reqs) {
    const first = this.first();
    if (first === null) return [];
    const rows = this.rows(first);
    const [due, served] = [this.due(first), (req) => this.shares.get(req.client).served];
    const isOver = ([, , req]) => this.turnIsOver(req) || this.chunkYields(req, first);
    const isAhead = ([, , req]) => served(req) > due - this.stepTokens;
    const all = FairQueue.numbered(reqs);
    const further = all.filter(([number]) => number > 2 * rows + 1).filter((one) => isOver(one) || (isAhead(one) && !one[2].retracted));
    const only = rows ? [] : all.filter(([number]) => number === 1).filter((one) => isOver(one) && (isAhead(one) || due === served(first))).reverse();
    return [...further, ...only].map(([, , req]) => req);
  }

  charge({ phase, reqs }) {
    const number = this.count++;
    for (const req of reqs) this.shares.get(req.client).since = number;
    if (phase === "decode") {
      for (const req of reqs) this.shares.get(req.client).served += ANSWER_WEIGHT;
      this.total += ANSWER_WEIGHT * reqs.length;
      return;
    }
    const computed = new Map();
    for (const req of reqs) computed.set(req.client, (computed.get(req.client) ?? 0) + 1);
    const total = reqs.reduce((sum, req) => sum + req.deviceLen - req.cachedLen, 0);
    const least = Math.max(total, Math.floor(this.stepTokens / 32)); // a step is never free
    for (const req of reqs) {
      const share = this.shares.get(req.client);
      const tokens = req.deviceLen - req.cachedLen;
      const cost = Math.floor((tokens * least) / total);
      share.served += cost;
      share.start += cost;
      share.clock += tokens / (share.waiting + computed.get(req.client));
    }
    this.total += least;
    this.clock += least / [...this.shares].filter(([name, share]) => computed.has(name) || share.waiting).length;
  }

  leave(req) {
    const share = this.shares.get(req.client);
    share.live -= 1;
    if (share.live) return;
    this.shares.delete(req.client);
    this.gone.set(req.client, share.served);
    if (!this.shares.size) this.gone.clear();
    else if (this.gone.size > MOST_GONE) this.gone.delete(this.gone.keys().next().value); // the one that left first
  }
}

// Pages that an admitted request may still need.
function pagesToCome(req, pageSize, reserve) {
  let end = req.maxLen - 1;
  if (reserve !== null) end = Math.min(end, Math.max(req.cachedLen, req.prefillLen) + reserve);
  return Math.ceil(end / pageSize) - Math.ceil(req.cachedLen / pageSize);
}

// One prefill step (chapter 09): counts down the tokens of the step and the pages of the pool.
class PrefillAdder {
  constructor(engine, promised, yielding) {
    Object.assign(this, { engine, promised, yielding, reqs: [], shortest: Infinity, prefixes: new Set() });
    this.budget = engine.settings.budget;
  }

  room(tokens) {
    const { threshold, settings } = this.engine;
    if (threshold === null || tokens <= 2 * this.shortest) return this.budget;
    return Math.max(0, Math.min(this.budget, threshold - (settings.budget - this.budget)));
  }

  addChunk(req) {
    const rest = req.prefillLen - req.cachedLen;
    const length = Math.min(this.room(rest), rest);
    if (length === 0) return false;
    this.shortest = Math.min(this.shortest, req.retracted ? rest : req.prefillLen - req.matchedLen);
    req.deviceLen = req.cachedLen + length;
    this.budget = length === rest ? this.budget - length : 0;
    this.reqs.push(req);
    if (this.engine.minShared) this.prefixes.add(this.prefixKey(req, req.matchedLen));
    return true;
  }

  prefixKey(req, matched) {
    return req.ids.slice(0, Math.min(matched + this.engine.minShared, req.promptLen - 1)).join();
  }

  // True if a request of this step computes a prefix that `req` could soon match.
  isInBatchPrefix(req, matched) {
    const rest = req.promptLen - 1 - matched;
    return this.engine.minShared > 0 && rest >= this.engine.minShared && this.prefixes.has(this.prefixKey(req, matched));
  }

  // The prefix that a request may start from (if `whole`, to its end), or null. Changes nothing.
  check(req, whole) {
    const { engine } = this;
    const { pageSize, reserve } = engine.settings;
    if (this.budget <= 0 || engine.freeRows.length === 0) return null;
    const handle = engine.tree.match(req.ids.slice(0, -1));
    const tokens = req.prefillLen - handle.length;
    const room = this.room(tokens);
    if (room <= 0 || (whole && tokens > room) || this.isInBatchPrefix(req, handle.length)) return null;
    const usable = engine.available - engine.tree.unlockedPages(handle) + handle.length / pageSize;
    return this.promised - this.yielding + pagesToCome(req, pageSize, reserve) <= usable ? handle : null;
  }

  admit(req, handle) {
    const { engine } = this;
    req.cachedLen = handle.length;
    engine.tree.lock(handle);
    engine.admit(req, handle);
    this.promised += pagesToCome(req, engine.settings.pageSize, engine.settings.reserve);
    this.yielding = 0;
    this.addChunk(req);
  }
}

const GROUP = { share: 32, most: 16 }; // of the rows one is free before a group starts; steps to wait
const HOST_US = { schedule: 100, launch: 200, process: 100 };

// The engine: pool, cache, queue and loop. `settings`: pages, pageSize, rows, budget, fair, radix,
// reserve (null: whole answers), window, minShared, threshold, turn, stepUs, tokenUs. An arrival:
// {at (µs), uid, client, prompt, answer, maxTokens}; `answer` has the tokens that the model gives.
class Simulation {
  constructor(settings, arrivals) {
    Object.assign(this, { settings, now: 0, events: [], steps: 0, running: new Map(), chunked: null, delay: 0 });
    const { pages, pageSize, rows, budget, turn, fair, radix } = settings;
    this.arrivals = [...arrivals].sort((a, b) => a.at - b.at);
    const emit = (...event) => this.events.push([this.now, event]);
    this.emit = emit;
    this.tree = radix ? new RadixTree(pageSize, emit) : new NoTree();
    this.freePages = Array.from({ length: pages }, (_, index) => pages - 1 - index); // a stack
    this.freeRows = Array.from({ length: rows }, (_, index) => rows - 1 - index);
    this.queue = fair ? new FairQueue(budget, turn) : new ArrivalOrder();
    this.live = new Set();
    this.lastPhase = "decode";
    this.minShared = radix ? Math.ceil(settings.minShared / pageSize) * pageSize : 0;
    this.threshold = fair ? settings.threshold : null;
  }

  get available() {
    return this.freePages.length + this.tree.evictable;
  }

  get about() {
    const { pages, pageSize, rows, budget } = this.settings;
    return { minisgl: 1, text: true, model: null, device: "simulated", overlap: false, page_size: pageSize, num_pages: pages, rows, budget };
  }

  // -------------------------------------------------------------------- pages

  free(pages) {
    if (!pages.length) return;
    this.freePages.push(...pages.slice().reverse());
    this.emit("PagesFreed", pages);
  }

  admit(req, handle) {
    Object.assign(req, { handle, row: this.freeRows.pop(), pages: this.tree.pagesOf(handle) });
    if (!req.retracted) req.matchedLen = handle.length;
    this.emit("RequestAdmitted", req.uid, req.row, req.pages.slice());
  }

  allocate(reqs) {
    const { pageSize } = this.settings;
    const plan = reqs.map((req) => [req, Math.ceil(req.deviceLen / pageSize) - req.pages.length]).filter(([, count]) => count > 0);
    const total = plan.reduce((sum, [, count]) => sum + count, 0);
    if (total > this.available) throw new Error(`pages: ${total} wanted, ${this.available} free or evictable`);
    if (total > this.freePages.length) this.free(this.tree.evict(total - this.freePages.length));
    for (const [req, count] of plan) {
      const fresh = this.freePages.splice(this.freePages.length - count).reverse();
      req.pages.push(...fresh);
      this.emit("PagesTaken", req.uid, fresh);
    }
  }

  // Insert a request's computed pages into the tree; if it is finished, free its others.
  cache(req, finished) {
    const { pageSize } = this.settings;
    const known = Math.floor(Math.min(req.cachedLen, req.ids.length) / pageSize);
    const old = req.handle;
    const [handle, already] = this.tree.insert(req.ids.slice(0, known * pageSize), req.pages.slice(0, known));
    const duplicates = req.pages.slice(old.length / pageSize, already / pageSize);
    if (finished) {
      this.free(req.pages.slice(Math.max(old.length, handle.length) / pageSize));
      this.tree.lock(old, -1);
      this.freeRows.push(req.row);
      Object.assign(req, { handle: null, pages: [], row: -1 });
    } else {
      this.tree.lock(handle);
      this.tree.lock(old, -1);
      const pages = this.tree.pagesOf(handle); // a row that named duplicates is rewritten
      req.pages.splice(0, pages.length, ...pages);
      req.handle = handle;
      this.emit("PagesCached", req.uid, pages);
    }
    this.free(duplicates);
  }

  // ----------------------------------------------------------------- decisions

  promised(reqs) {
    const { pageSize, reserve } = this.settings;
    return reqs.reduce((sum, req) => sum + pagesToCome(req, pageSize, reserve), 0);
  }

  // Promises to running requests that the first waiting one may displace do not bind it.
  adder() {
    const yielding = this.queue.displaceable(this.admitted).filter((req) => req !== this.chunked);
    return new PrefillAdder(this, this.promised(this.admitted), this.promised(yielding));
  }

  prefillStep() {
    this.delay -= 1;
    const group = Math.min(this.queue.size, Math.floor(this.settings.rows / GROUP.share));
    if (!this.settings.fair && this.delay > 0 && !this.chunked && this.freeRows.length < group) return null;
    if (!this.chunked && !this.queue.size) return null;
    const adder = this.adder();
    let chunked = this.chunked;
    while (adder.budget > 0) {
      const first = this.queue.first();
      if (chunked && (!first || this.queue.chunkComesFirst(chunked))) {
        if (!adder.addChunk(chunked)) break;
        chunked = null;
        continue;
      }
      const handle = first && adder.check(first, chunked !== null);
      if (!handle) break;
      adder.admit(first, handle);
      this.queue.remove(first);
    }
    if (chunked && adder.addChunk(chunked)) chunked = null;
    if (!adder.reqs.length) return null;
    const last = adder.reqs.at(-1);
    this.chunked = last.deviceLen < last.prefillLen ? last : chunked;
    this.delay = this.freeRows.length ? 0 : GROUP.most;
    return { phase: "prefill", reqs: adder.reqs };
  }

  decodeStep() {
    this.makeRoom();
    return this.running.size ? { phase: "decode", reqs: [...this.running.values()] } : null;
  }

  // Retract requests until the next token of all others has a page, then displace some (09c).
  makeRoom() {
    const { pageSize } = this.settings;
    while (this.running.size) {
      const reqs = [...this.running.values()];
      const available = this.available - (this.chunked ? pagesToCome(this.chunked, pageSize, 0) : 0);
      const short = reqs.filter((req) => req.pages.length * pageSize < req.deviceLen).length;
      if (reqs.length <= available || short <= available) break;
      this.retract(this.queue.retractionOrder(this.admitted)[0]);
    }
    if (this.queue.size) this.displace();
  }

  get admitted() {
    return [...this.running.values(), ...(this.chunked ? [this.chunked] : [])];
  }

  // Retract requests for the first waiting one until it fits; none if it still would not.
  displace() {
    for (;;) {
      const reqs = this.queue.displaceable(this.admitted);
      if (!reqs.length) return;
      const first = this.queue.first();
      if (this.adder().check(first, false)) return;
      const kept = this.admitted.filter((req) => !reqs.includes(req));
      const held = new Set(kept.flatMap((req) => req.pages));
      for (const page of this.tree.pagesOf(this.tree.match(first.ids.slice(0, -1)))) held.delete(page);
      if (held.size + this.promised([...kept, first]) > this.settings.pages) return;
      this.retract(reqs[0]);
    }
  }

  retract(req) {
    if (req === this.chunked) this.chunked = null;
    this.running.delete(req.uid);
    this.cache(req, true);
    this.queue.resume(req);
    this.emit("RequestRetracted", req.uid);
    Object.assign(req, { retracted: true, cachedLen: 0, prefillLen: req.ids.length, deviceLen: req.ids.length });
  }

  // ---------------------------------------------------------------------- loop

  receive() {
    const { window, pages, pageSize } = this.settings;
    const most = Math.min(window, pages * pageSize);
    while (this.arrivals.length && this.arrivals[0].at <= this.now) {
      const { uid, client, prompt, answer, maxTokens } = this.arrivals.shift();
      if (prompt.length >= most) continue; // it can never be answered
      const maxLen = prompt.length + Math.max(1, Math.min(most - prompt.length, maxTokens));
      const req = {
        uid, client, answer, maxLen, ids: prompt.slice(), promptLen: prompt.length, prefillLen: prompt.length,
        deviceLen: prompt.length, cachedLen: 0, matchedLen: 0, retracted: false, row: -1, pages: [], handle: null,
      };
      this.live.add(req);
      this.queue.add(req);
      this.emit("RequestAdded", uid, req.promptLen, maxLen, prompt);
    }
    this.emit("StageEnded", "receive", this.steps);
  }

  // One step of the plain loop; without work, the clock goes to the next arrival.
  step() {
    if (!this.live.size && this.arrivals.length) this.now = Math.max(this.now, this.arrivals[0].at);
    this.receive();
    const decodeFirst = this.settings.fair && this.lastPhase === "prefill";
    const batch = decodeFirst ? this.decodeStep() ?? this.prefillStep() : this.prefillStep() ?? this.decodeStep();
    this.lastPhase = batch ? batch.phase : "decode";
    this.now += HOST_US.schedule;
    this.emit("StageEnded", "schedule", this.steps);
    if (batch) this.compute(batch);
  }

  compute(batch) {
    this.allocate(batch.reqs);
    const tokens = batch.reqs.reduce((sum, req) => sum + req.deviceLen - req.cachedLen, 0);
    const sampled = batch.reqs.filter((req) => req.deviceLen >= req.prefillLen);
    this.queue.charge(batch);
    for (const req of batch.reqs) {
      req.cachedLen = req.deviceLen;
      if (req.deviceLen >= req.prefillLen) req.deviceLen += 1;
    }
    if (batch.phase === "prefill") for (const req of sampled) this.cache(req, false);
    for (const req of batch.reqs) {
      if (req.deviceLen < req.maxLen && req.deviceLen >= req.prefillLen) this.running.set(req.uid, req);
      else this.running.delete(req.uid);
    }
    this.now += HOST_US.launch;
    const { reqs, phase } = batch;
    this.emit("StepLaunched", this.steps, phase, reqs.map((req) => req.uid), reqs.map((req) => req.cachedLen));
    this.now += this.settings.stepUs + this.settings.tokenUs * tokens;
    this.emit("StageEnded", "wait", this.steps);
    this.finish(sampled);
    this.steps += 1;
  }

  finish(sampled) {
    const given = [];
    for (const req of sampled) {
      const index = req.ids.length - req.promptLen;
      req.ids.push(req.answer[index]);
      given.push([req.uid, req.answer[index]]);
      if (index + 1 < req.answer.length && req.ids.length < req.maxLen) continue;
      this.live.delete(req);
      this.running.delete(req.uid);
      this.queue.leave(req);
      this.cache(req, true);
      this.emit("RequestReleased", req.uid);
    }
    this.now += HOST_US.process;
    this.emit("StepFinished", this.steps, given);
  }

  // Serve all requests; returns the events. `limit` ends a run that cannot go on.
  run(limit = 20_000) {
    while ((this.live.size || this.arrivals.length) && this.steps < limit) this.step();
    return this.events;
  }
}
