// Asks the server every second what happened, and draws it. Texts are set as text, never as markup.
const svg = "http://www.w3.org/2000/svg";
const [width, height, left, right, top_, bottom] = [560, 180, 52, 10, 8, 22];
const element = (id) => document.getElementById(id);

function shape(kind, attributes, text) {
  const node = document.createElementNS(svg, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

function size(bytes) {
  return bytes < 2 ** 20 ? `${number(bytes / 2 ** 10)} KiB` : `${number(bytes / 2 ** 20)} MiB`;
}

// The least 1, 2 or 5 times a power of ten that is not below the value.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((size) => size * power).find((size) => size >= value) ?? 10 * power;
}

function draw(id, series) {
  const most = round(Math.max(...series.flat().filter((value) => value !== null), 0));
  const x = (i, points) => left + (i * (width - left - right)) / Math.max(1, points.length - 1);
  const y = (value) => height - bottom - (value * (height - top_ - bottom)) / most;
  const nodes = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    nodes.push(shape("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    nodes.push(shape("text", { x: left - 6, y: at + 5, "text-anchor": "end" }, number(share * most)));
  }
  nodes.push(shape("text", { x: left, y: height - 4 }, `${series[0].length} s ago`));
  nodes.push(shape("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "now"));
  series.forEach((points, style) => {
    let path = "";
    points.forEach((value, i) => {
      if (value === null) return;
      const [before, after] = [points[i - 1] ?? null, points[i + 1] ?? null];
      const [cx, cy] = [x(i, points).toFixed(1), y(value).toFixed(1)];
      path += `${before !== null ? "L" : "M"}${cx} ${cy}`;
      if (before === null && after === null) nodes.push(shape("circle", { class: `c${style}`, cx, cy, r: 2.5 }));
    });
    nodes.push(shape("path", { class: `c${style}`, d: path || "M0 0" }));
  });
  element(id).replaceChildren(...nodes);
}

function terms(id, rows) {
  element(id).replaceChildren(...rows.map(([name, value]) => {
    const [row, term, text] = ["div", "dt", "dd"].map((kind) => document.createElement(kind));
    [term.textContent, text.textContent] = [name, value];
    row.append(term, text);
    return row;
  }));
}

function facts(stats) {
  const queued = Object.values(stats.queued).reduce((sum, one) => sum + one, 0);
  const rows = [
    ["model", stats.model], ["up for", `${Math.round(stats.uptime).toLocaleString("en")} s`],
    ["running", number(stats.running)], ["waiting", number(queued)],
    ["tokens read", stats.prompt_tokens.toLocaleString("en")],
    ["from the cache", stats.cached_tokens.toLocaleString("en")],
    ["tokens generated", stats.generated_tokens.toLocaleString("en")],
    ["loads of deltas", stats.loads.toLocaleString("en")], ["dropped again", stats.evictions.toLocaleString("en")],
    ["deltune", stats.version],
  ];
  terms("now", rows);
}

function refusals(stats) {
  const refused = stats.deltas.filter((delta) => delta.error).map((delta) => [
    delta.name, delta.loaded ? `The newest files are refused, and the old version goes on: ${delta.error}` : delta.error,
  ]);
  const rows = [...refused, ...stats.ignored.map((one) => [one.folder, one.error])];
  element("refusals").toggleAttribute("hidden", !rows.length);
  terms("reasons", rows);
}

function table(stats) {
  const milliseconds = (value) => (value === null ? "" : number(1000 * value));
  const body = document.querySelector("#deltas tbody");
  const rows = stats.deltas.map((delta, i) => {
    const row = document.createElement("tr");
    const memory = delta.bytes ? size(delta.bytes) : delta.loaded ? "yes" : "";
    const name = document.createElement("th");
    name.textContent = delta.name + (!delta.error ? "" : delta.loaded ? " (newest files refused)" : " (refused)");
    row.append(name);
    for (const value of [delta.method, memory, delta.requests, delta.errors, milliseconds(delta.p50),
      milliseconds(delta.p95), delta.running]) {
      const cell = document.createElement("td");
      cell.textContent = value;
      row.append(cell);
    }
    row.cells[1].className = "left";
    row.first = i;
    return row;
  });
  body.replaceChildren(...rows);
  order();
}

// Sorts the table by the column that was asked for: up, down, and as the rows came. What has no value stays last.
const heads = [...document.querySelectorAll("#deltas thead th")];

function order() {
  const column = heads.findIndex((head) => head.getAttribute("aria-sort") !== "none");
  const sign = heads[column]?.getAttribute("aria-sort") === "descending" ? -1 : 1;
  const value = (row) => row.cells[column].textContent.trim();
  const body = document.querySelector("#deltas tbody");
  body.append(...[...body.rows].sort((a, b) => {
    if (column < 0) return a.first - b.first;
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "") || a.first - b.first;
    const difference = x - y || (isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : 0);
    return sign * difference || a.first - b.first;
  }));
}

heads.forEach((head) => head.querySelector("button").addEventListener("click", () => {
  const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
  for (const other of heads) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", next);
  order();
}));

async function update() {
  const key = sessionStorage.getItem("key");
  const state = element("state");
  try {
    const answer = await fetch("stats", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    const stats = await answer.json();
    element("ask")?.toggleAttribute("hidden", answer.ok);
    if (!answer.ok) {
      state.textContent = stats.error.message;
      return;
    }
    state.textContent = stats.draining ? "ending: running requests are finished" : "serving";
    draw("requests", [stats.history.map((s) => s.requests), stats.history.map((s) => s.errors)]);
    draw("tokens", [stats.history.map((s) => s.tokens)]);
    draw("latency", [stats.history.map((s) => (s.latency === null ? null : 1000 * s.latency))]);
    facts(stats);
    refusals(stats);
    table(stats);
  } catch {
    state.textContent = "the server does not answer";
  }
}

element("form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", element("key").value.trim());
  update();
});
update();
setInterval(update, 1000);
