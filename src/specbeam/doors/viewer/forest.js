// The forest of a whole text: one column per token, one band per turn (a pass of the target), with play and scrubber.
// The server's page and notebooks (doors/trace.py) share it; the records of turns are those of `turn_record`.

const MARKS = { root: "", accepted: "", rejected: "", resampled: "↻", unused: "" };
const RANKS = { root: 0, accepted: 0, resampled: 1, rejected: 2, unused: 3 };
const MEANINGS = {
  accepted: "draft accepted by the target",
  resampled: "the target's own choice, not drafted",
  rejected: "draft rejected by the target",
  unused: "draft that was not reached",
};
const ROW = 32; // pixels from row to row
const HEAD = 30; // pixels of the names of the turns
const GAP = 34; // pixels between columns, for edges
const PACES = { "1 turn/s": 1000, "2 turns/s": 500, "5 turns/s": 200, "10 turns/s": 100 };
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, text = null) {
  const isSvg = ["svg", "g", "path", "rect", "text", "title"].includes(tag);
  const node = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥"));
const number = (value, digits = 2) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "13px system-ui, sans-serif";
const widthOf = (text) => ruler.measureText(text).width;

// Adds the nodes of a turn to those of the text. `live` names the nodes of the beams that the turn begins with; a draft that
// an earlier turn proposed is the same node. Roots that it does not name stand in `column`. Returns the nodes of the turn, in the order of its record.
function addTurn(nodes, live, turn, column) {
  const at = [];
  turn.nodes.forEach(([parent, text, fate, p, q]) => {
    if (parent < 0) {
      const known = live[at.length];
      at.push(known ?? addNode(nodes, null, column, text, turn.n, ["root", null, null]));
      return;
    }
    const above = at[parent];
    const twin = nodes[above].children.find((one) => nodes[one].text === text && nodes[one].seen !== turn.n);
    const here = twin ?? addNode(nodes, above, nodes[above].column + 1, text, turn.n, [fate, p, q]);
    if (twin !== undefined) nodes[here].fates.push([turn.n, fate, p, q]);
    nodes[here].seen = turn.n;
    if (fate === "accepted" || fate === "resampled") reach(nodes, here);
    at.push(here);
  });
  return at;
}

function addNode(nodes, parent, column, text, turn, fate) {
  const id = nodes.length;
  nodes.push({ id, parent, text, column, born: turn, seen: turn, fates: [[turn, ...fate]], children: [], reach: -1 });
  if (parent !== null) nodes[parent].children.push(id);
  return id;
}

// Notes how far the beams go that begin with the nodes above one of them.
function reach(nodes, id) {
  const column = nodes[id].column;
  for (let above = id; above !== null && nodes[above].reach < column; above = nodes[above].parent) nodes[above].reach = column;
}

// The fate of a node, and its probabilities, as known after a turn.
function fateAt(node, turn) {
  let found = node.fates[0];
  for (const one of node.fates) if (one[0] <= turn) found = one;
  return found;
}

// Places nodes in rows, column by column. Children stand in the order of their parents, so no edges cross; beams that
// go far come first, and a child stands at most one row above its parent.
function placeRows(nodes, isShown) {
  const roots = nodes.filter((node) => node.parent === null);
  const columns = [];
  let below = [];
  for (let column = 0; below.length > 0 || roots.some((node) => node.column >= column); column++) {
    const here = [...below, ...roots.filter((node) => node.column === column).map((node) => node.id)];
    let free = 0;
    for (const id of here) {
      const node = nodes[id];
      const wanted = node.parent === null ? 0 : Math.max(0, nodes[node.parent].row - 1);
      node.row = Math.max(free, wanted);
      free = node.row + 1;
    }
    columns.push(here);
    below = here.flatMap((id) => nodes[id].children.filter((child) => isShown(nodes[child])).sort((one, other) => before(nodes[one], nodes[other])));
  }
  return columns;
}

function before(one, other) {
  const rank = (node) => RANKS[node.fates.at(-1)[1]];
  return other.reach - one.reach || rank(one) - rank(other) || one.id - other.id;
}

class Forest {
  // `name` is said to screen readers; `onshow`, if given, is called with each turn that is shown.
  constructor(name, onshow = null) {
    this.name = name;
    this.onshow = onshow;
    this.turns = [];
    this.nodes = [];
    this.live = [];
    this.columns = [];
    this.left = [];
    this.width = 0;
    this.rows = 1;
    this.at = -1; // index of the turn that is shown
    this.follows = true; // whether new turns are shown as they come
    this.timer = null;
    this.build();
  }

  build() {
    this.play = make("button", { type: "button", "data-testid": "play" }, "Play");
    this.back = make("button", { type: "button", "aria-label": "Previous turn" }, "◀");
    this.next = make("button", { type: "button", "aria-label": "Next turn" }, "▶");
    this.scrubber = make("input", { type: "range", min: 1, max: 1, value: 1, "aria-label": `Turn of ${this.name}`, "data-testid": "scrubber" });
    this.pace = make("select");
    for (const [text, pause] of Object.entries(PACES)) this.pace.append(make("option", { value: pause }, text));
    this.pace.value = "500";
    const pace = make("label", {}, "Pace");
    pace.append(this.pace);
    this.unreached = make("input", { type: "checkbox", checked: "" });
    const unreached = make("label", {});
    unreached.append(this.unreached, "Drafts not reached");
    const bar = make("div", { class: "bar" });
    bar.append(this.play, this.back, this.next, this.scrubber, pace, unreached);
    this.where = make("p", { class: "faint", "data-testid": "turn" });
    this.scroller = make("div", { class: "forest", role: "group", tabindex: 0, "aria-label": `The forest of ${this.name}`, "data-testid": "forest" });
    this.svg = make("svg", { role: "img" });
    this.scroller.append(this.svg);
    const more = make("details");
    this.table = make("table", { "data-testid": "table" });
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Nodes of this turn" });
    scroll.append(this.table);
    const svg = make("button", { type: "button" }, "Save SVG");
    const json = make("button", { type: "button" }, "Save JSON");
    const files = make("div", { class: "bar" });
    files.append(svg, json);
    more.append(make("summary", {}, "The nodes of this turn as a table, and files"), files, scroll);
    this.node = make("div");
    this.node.append(bar, this.where, this.scroller, more);
    this.play.addEventListener("click", () => (this.timer === null ? this.start() : this.pause()));
    this.back.addEventListener("click", () => this.choose(this.at - 1));
    this.next.addEventListener("click", () => this.choose(this.at + 1));
    this.unreached.addEventListener("change", () => {
      this.place();
      this.show(this.at);
    });
    this.scrubber.addEventListener("input", () => this.choose(Number(this.scrubber.value) - 1));
    this.scroller.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    more.addEventListener("toggle", () => this.showTable());
    this.more = more;
    svg.addEventListener("click", () => save("forest.svg", "image/svg+xml", this.asFile()));
    json.addEventListener("click", () => save("turns.json", "application/json", JSON.stringify(this.turns)));
  }

  add(turn) {
    const last = this.turns.at(-1);
    const isNext = turn.n === (last?.n ?? 0) + 1; // a slow reader misses turns
    const at = addTurn(this.nodes, isNext ? this.live : [], turn, last?.stop ?? 0);
    const roots = turn.nodes.filter((node) => node[0] < 0).length;
    const start = roots ? this.nodes[at[0]].column : 0;
    this.live = turn.live.map((place) => at[place]);
    const ends = turn.ends.map(([place, score]) => [at[place], score]);
    const beams = turn.beams.map(([, score], place) => [this.live[place], score]);
    this.turns.push({ ...turn, at, start, stop: start + turn.widths.length, heads: beams, tails: ends });
    this.place();
    if (this.follows) this.show(this.turns.length - 1);
    else this.draw(true);
  }

  // Places the nodes; with the box unchecked, without drafts that were never reached.
  place() {
    this.columns = placeRows(this.nodes, (node) => this.unreached.checked || node.fates.at(-1)[1] !== "unused");
    this.measure();
  }

  // Sets the left edge and the width of each column, and the size of the picture.
  measure() {
    this.widths = this.columns.map((column) => Math.max(...column.map((id) => this.nodes[id].size ??= Math.max(18, widthOf(label(this.nodes[id]))) + 14)));
    let x = 12;
    this.left = this.widths.map((width) => { const here = x; x += width + GAP; return here; });
    this.width = x;
    this.rows = 1 + Math.max(...this.columns.map((column) => this.nodes[column.at(-1)]?.row ?? 0));
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", HEAD + ROW * this.rows + 6);
    this.scrubber.max = this.turns.length;
  }

  choose(at) {
    this.follows = at >= this.turns.length - 1;
    this.show(at);
  }

  start() {
    if (this.at >= this.turns.length - 1) this.choose(0);
    this.play.textContent = "Pause";
    const step = () => {
      this.choose(this.at + 1);
      if (this.at >= this.turns.length - 1) this.pause();
      else this.timer = setTimeout(step, Number(this.pace.value));
    };
    this.timer = setTimeout(step, Number(this.pace.value));
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  show(at) {
    if (at < 0 || at >= this.turns.length) return;
    this.at = at;
    const turn = this.turns[at];
    const layers = turn.widths.length;
    const drafted = turn.depth ? `, ${turn.accepted} of ${turn.depth} draft layers passed` : ", without drafts";
    this.where.textContent = `turn ${turn.n} of ${this.turns.length}: ${layers} ${layers === 1 ? "token" : "tokens"} in one pass of the target${drafted}`;
    this.scrubber.value = at + 1;
    this.scrubber.setAttribute("aria-valuetext", `turn ${turn.n} of ${this.turns.length}`);
    this.back.disabled = at === 0;
    this.next.disabled = at === this.turns.length - 1;
    this.best = this.pathOfBest(at);
    this.reveal(turn);
    this.draw(true);
    this.showTable();
    if (this.onshow) this.onshow(turn);
  }

  // The nodes of the likeliest text after a turn.
  pathOfBest(at) {
    const known = [...this.turns[at].heads, ...this.turns.slice(0, at + 1).flatMap((turn) => turn.tails)];
    const path = new Set();
    if (known.length === 0) return path;
    let node = known.reduce((one, other) => (other[1] > one[1] ? other : one))[0];
    for (; node !== null && node !== undefined; node = this.nodes[node].parent) path.add(node);
    return path;
  }

  // Scrolls as little as shows a turn.
  reveal(turn) {
    const left = this.left[turn.start];
    const right = (this.left[turn.stop] ?? this.width) + (this.widths[turn.stop] ?? 0) + GAP;
    const view = this.scroller;
    if (right > view.scrollLeft + view.clientWidth) view.scrollLeft = Math.min(right - view.clientWidth, left - 12);
    if (left < view.scrollLeft) view.scrollLeft = Math.max(0, left - 12);
  }

  // Draws the columns in view, and some beside them; `always`, even if they are drawn already.
  draw(always = false) {
    if (this.at < 0) return;
    const from = this.scroller.scrollLeft - 600;
    const to = this.scroller.scrollLeft + this.scroller.clientWidth + 600;
    const inside = this.left.map((x, column) => column).filter((column) => this.left[column] + this.widths[column] >= from && this.left[column] <= to);
    const range = `${inside[0]} ${inside.at(-1)}`;
    if (!always && range === this.drawn) return;
    this.drawn = range;
    this.svg.replaceChildren(...this.parts(inside[0] ?? 0, inside.at(-1) ?? 0));
    const turn = this.turns[this.at];
    this.svg.setAttribute("aria-label", `${this.name} after turn ${turn.n} of ${this.turns.length}: ${turn.settled}${turn.beams[0]?.[0] ?? ""}`);
  }

  parts(first, last) {
    const turn = this.turns[this.at];
    const found = [];
    for (const [place, one] of this.turns.entries()) {
      if (place > this.at || one.stop < first || one.start > last) continue;
      found.push(...this.band(one, place));
    }
    const shown = this.columns.slice(first, last + 1).flat().map((id) => this.nodes[id]).filter((node) => node.born <= turn.n);
    for (const node of shown) if (node.parent !== null) found.push(this.edge(node, turn.n));
    for (const node of shown) found.push(this.pill(node, turn.n));
    return found;
  }

  band(turn, place) {
    const left = (this.left[turn.start + 1] ?? this.width) - GAP / 2;
    const right = (this.left[turn.stop] ?? 0) + (this.widths[turn.stop] ?? 0) + GAP / 2;
    const kind = place === this.at ? "chosen" : place % 2 ? "even" : "";
    const height = HEAD + ROW * this.rows + 6;
    const rect = make("rect", { class: `band ${kind}`, x: left, y: 0, width: Math.max(right - left, 0), height });
    return [rect, make("text", { class: "turn-name", x: left + 6, y: 18 }, right - left > 80 ? `turn ${turn.n}` : `${turn.n}`)];
  }

  edge(node, turn) {
    const above = this.nodes[node.parent];
    const x0 = this.left[above.column] + above.size;
    const x1 = this.left[node.column];
    const y0 = HEAD + ROW * above.row + ROW / 2;
    const y1 = HEAD + ROW * node.row + ROW / 2;
    const middle = x1 - GAP / 2;
    const d = `M${x0} ${y0} H${middle - GAP / 2} C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
    const isBest = this.best.has(node.id);
    return make("path", { class: `edge ${fateAt(node, turn)[1]}${isBest ? " best" : ""}`, d });
  }

  pill(node, turn) {
    const [since, fate, p, q] = fateAt(node, turn);
    const x = this.left[node.column];
    const y = HEAD + ROW * node.row;
    const group = make("g", { class: `node ${fate}${since === turn ? " fresh" : ""}`, transform: `translate(${x} ${y})` });
    const odds = p === null ? "" : `, p ${number(p, 3)}${q ? ` q ${number(q, 3)}` : ""}`;
    group.append(make("title", {}, `turn ${since}, ${fate}: ${visible(node.text)}${odds}`));
    group.append(make("rect", { x: 0, y: 4, width: node.size, height: ROW - 8, rx: 6 }));
    group.append(make("text", { x: 7, y: ROW / 2 + 5 }, MARKS[fate] + visible(node.text)));
    return group;
  }

  showTable() {
    if (!this.more.open || this.at < 0) return;
    const head = make("tr");
    for (const title of ["node", "under", "text", "fate", "p", "q"]) head.append(make("th", { scope: "col" }, title));
    const rows = this.turns[this.at].nodes.map(([parent, text, fate, p, q], index) => {
      const row = make("tr");
      for (const value of [index, parent < 0 ? "" : parent, visible(text), fate, number(p, 3), number(q, 3)]) row.append(make("td", {}, String(value)));
      return row;
    });
    this.table.replaceChildren(head, ...rows);
  }

  // The whole picture as a file, with its colours.
  asFile() {
    const copy = make("svg", { xmlns: SVG, width: this.width, height: this.svg.getAttribute("height") });
    const own = getComputedStyle(document.documentElement);
    const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText);
    const used = rules.filter((rule) => /^\.(node|edge|band|turn-name|accepted|rejected|resampled|unused|root)/.test(rule)).join("\n");
    const style = make("title");
    const sheet = document.createElementNS(SVG, "style");
    sheet.textContent = used.replace(/var\((--(?!own)\w+)\)/g, (_, name) => own.getPropertyValue(name));
    style.textContent = this.name;
    copy.append(style, sheet, ...this.parts(0, this.columns.length - 1));
    return new XMLSerializer().serializeToString(copy);
  }
}

const label = (node) => (node.fates.some((one) => one[1] === "resampled") ? MARKS.resampled : "") + visible(node.text);

function save(name, type, text) {
  const link = make("a", { download: name, href: `data:${type};charset=utf-8,${encodeURIComponent(text)}` });
  link.click();
}

function legend() {
  const list = make("ul", { class: "legend", "aria-label": "Marks" });
  for (const [fate, meaning] of Object.entries(MEANINGS)) {
    const item = make("li", { class: fate });
    item.append(make("span", {}, `${MARKS[fate]}token`), meaning);
    list.append(item);
  }
  return list;
}

// The likeliest text after a turn: the settled part, and the rest, which may still change.
function textAt(turn) {
  const live = turn.beams.map(([text, score]) => [turn.settled, text, score]);
  const texts = [...live, ...turn.ended.map(([text, score]) => [text, "", score])];
  if (texts.length === 0) return [turn.settled, ""];
  return texts.reduce((one, other) => (other[2] > one[2] ? other : one)).slice(0, 2);
}

function writeText(element, settled, open = "") {
  element.replaceChildren(document.createTextNode(settled), make("span", { class: "open" }, open));
}

// The beams after a turn, live and ended, best first.
function writeBeams(list, turn) {
  const live = turn.beams.map(([text, score]) => [turn.settled + text, score, ""]);
  const ended = turn.ended.map(([text, score]) => [text, score, " (ended)"]);
  const all = [...live, ...ended].sort((one, other) => other[1] - one[1]).slice(0, 16);
  list.replaceChildren(...all.map(([text, score, end]) => {
    const item = make("li");
    item.append(make("b", {}, number(score, 3)), visible(text) + end);
    return item;
  }));
}

// The forest by itself, as a page: what notebooks show.
function alone(turns) {
  const text = make("div", { class: "text" });
  const beams = make("ol", { class: "beams" });
  const forest = new Forest("the text", (turn) => {
    writeText(text, ...textAt(turn));
    writeBeams(beams, turn);
  });
  const page = make("main");
  page.append(make("h1", {}, "The forest of a text"), text, forest.node, legend(), beams);
  document.body.append(page);
  for (const turn of turns) forest.add(turn);
}
