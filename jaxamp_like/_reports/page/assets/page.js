const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = {
  float64: "#666666", float32: "#0072b2", bfloat16: "#009e73", float16: "#e69f00", int8: "#cc79a7",
};
const FIRST = 25; // rows that a table shows before it is asked for more

function element(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}

function human(n, base, prefixes, unit) {
  let i = 0;
  for (; Math.abs(n) >= base && i < prefixes.length - 1; i++) n /= base;
  return `${+n.toPrecision(4)} ${prefixes[i]}${unit}`;
}
const flops = (n) => (n ? human(n, 1000, ["", "k", "M", "G", "T", "P"], "FLOP") : "");
const bytes = (n) => (n ? human(n, 1024, ["", "Ki", "Mi", "Gi", "Ti"], "B") : "");
const share = (x) => (x ? `${+(100 * x).toPrecision(3)} %` : "");
const short = (x) => (typeof x === "number" ? (x ? String(+x.toPrecision(3)) : "0") : x);
const total = (count) => Object.values(count).reduce((a, b) => a + b, 0);

// Moves the keyboard focus to a place when the element that had it is gone.
function focusOn(place) {
  place.tabIndex = -1;
  place.focus();
}

// ------------------------------------------------------------------- sorted tables

// How each kind of column is written, and whether it is a number.
const KINDS = {
  text: { show: String },
  line: { show: (source) => source.split("/").pop(), whole: true },
  number: { show: (n) => (n ? String(n) : "0"), number: true },
  flops: { show: flops, number: true },
  bytes: { show: bytes, number: true },
  share: { show: share, number: true },
  short: { show: short, number: true },
  flag: { show: (is) => (is ? "yes" : "") },
};
const WRAPPED = ["scope", "why", "rule", "key"];
const known = (column) => ({ ...column, ...KINDS[column.kind], wrap: WRAPPED.includes(column.title) });

const order = (x) => (x === "inf" ? Infinity : x);
function compare(a, b) {
  return typeof a === "string" && typeof b === "string" ? a.localeCompare(b) : order(a) - order(b);
}

function sortedTable(place, columns, rows) {
  const body = element("tbody");
  const note = element("span", { className: "muted", role: "status" });
  const more = element("button", { className: "more", textContent: "Show all" });
  const filter = element("input", { type: "search", placeholder: "Filter", ariaLabel: "Filter rows" });
  let by = null, falling = false, limit = FIRST;

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = rows.filter((row) => {
      const all = row.join(" ").toLowerCase();
      return words.every((word) => all.includes(word));
    });
    if (by !== null) found = found.toSorted((a, b) => (falling ? -1 : 1) * compare(a[by], b[by]));
    body.replaceChildren(...found.slice(0, limit).map((row) => element("tr", {}, ...columns.map((column, i) =>
      element("td", { className: column.number ? "number" : column.wrap ? "wrap" : "", title: column.whole ? row[i] : "" },
        column.show(row[i]))))));
    note.textContent = `${found.length} of ${rows.length}`;
    more.hidden = found.length <= limit;
  }

  const heads = columns.map((column, i) => {
    const button = element("button", { textContent: column.title });
    const head = element("th", { className: column.number ? "number" : "", scope: "col" }, button);
    button.onclick = () => {
      falling = by === i ? !falling : Boolean(column.number);
      by = i;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      show();
    };
    return head;
  });
  filter.oninput = show;
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  const scroll = element("div", { className: "scroll" }, table);
  more.onclick = () => {
    const first = body.rows.length;
    limit = Infinity;
    show();
    focusOn(body.rows[first]);
  };
  place.append(element("div", { className: "tools" }, filter, note), scroll, more);
  show();
}

for (const place of document.querySelectorAll("[data-table]")) {
  const { columns, rows } = data.tables[place.dataset.table];
  sortedTable(place, columns.map(known), rows);
}

// ------------------------------------------------------------------- tree of scopes

function bar(count, whole) {
  const told = (dtype, n) => `${dtype} ${share(n / Math.max(total(count), 1))}`;
  const parts = Object.entries(count).map(([dtype, n]) => {
    const part = element("i", { title: told(dtype, n) });
    part.style.width = `${(100 * n) / Math.max(whole, 1)}%`;
    part.style.background = COLOURS[dtype] ?? "#d55e00";
    return part;
  });
  const ariaLabel = Object.entries(count).map((pair) => told(...pair)).join(", ") || "none";
  return element("div", { className: "bar", role: "img", ariaLabel }, ...parts);
}

function scopeTree(place, root) {
  // A count by dtype is shown as what it adds up to, with a bar of its parts.
  const columns = data.treeColumns.map(known);
  const value = (node, i) => (typeof node.values[i] === "object" ? total(node.values[i]) : node.values[i]);
  const whole = columns.map((column, i) => value(root, i));
  const open = new Set([root]), names = new Map(); // of nodes; their buttons
  const body = element("tbody");
  let by = null, falling = true;

  function row(node, level) {
    const inner = node.children.length + node.hidden > 0;
    const name = element("button", { className: "name", disabled: !inner,
      textContent: `${inner ? (open.has(node) ? "▾ " : "▸ ") : "\u2003"}${node.values[0]}` });
    name.style.paddingLeft = `${14 * level}px`;
    if (inner) name.ariaExpanded = open.has(node);
    name.onclick = () => {
      open.has(node) ? open.delete(node) : open.add(node);
      show();
      names.get(node).focus();
    };
    names.set(node, name);
    const cells = columns.slice(1).map((column, j) => {
      const i = j + 1, parts = node.values[i];
      const cell = element("td", {}, column.show(value(node, i)));
      if (typeof parts !== "object") cell.className = "number";
      else cell.append(bar(parts, whole[i]), ...(node.other ? [bar(node.other[i], whole[i])] : []));
      return cell;
    });
    return element("tr", {}, element("td", {}, name), ...cells);
  }

  function rows(node, level) {
    let children = open.has(node) ? node.children : [];
    if (by !== null) {
      children = children.toSorted((a, b) => (falling ? -1 : 1) * compare(value(a, by), value(b, by)));
    }
    const found = [row(node, level), ...children.flatMap((child) => rows(child, level + 1))];
    if (open.has(node) && node.hidden) {
      found.push(element("tr", {}, element("td", { className: "muted", colSpan: columns.length, textContent: `… and ${node.hidden} more` })));
    }
    return found;
  }

  const show = () => body.replaceChildren(...rows(root, 0));
  const heads = columns.map((column, i) => {
    const button = element("button", { textContent: column.title });
    const head = element("th", { className: typeof root.values[i] === "number" ? "number" : "", scope: "col" }, button);
    button.onclick = () => {
      falling = by === i ? !falling : i > 0;
      by = i;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      show();
    };
    return head;
  });
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  place.append(element("div", { className: "scroll" }, table));
  show();
}

const treePlace = document.querySelector("[data-tree]");
if (treePlace) scopeTree(treePlace, data.tree);

// ------------------------------------------------------------------- diagrams, menu

const dark = matchMedia("(prefers-color-scheme: dark)").matches;
for (const place of document.querySelectorAll("[data-chart]")) {
  const spec = data.charts[place.dataset.chart];
  if (spec) window.vegaEmbed(place, spec, { actions: false, renderer: "svg", theme: dark ? "dark" : undefined });
}
document.querySelector("nav").append(...[...document.querySelectorAll("section[id]")].map((section) =>
  element("a", { href: `#${section.id}`, textContent: section.querySelector("h2").textContent })));
document.body.dataset.ready = "yes";
