// The object table: searched, filtered, sorted, one page of rows at a time; and one object in detail.

const PAGE_ROWS = 100;

const COLUMNS = [
  { id: "name", label: "Object", text: true, value: (row) => row.position, show: (row) => make("button", { class: "plain name", onclick: () => openDetail(row) }, row.name) },
  { id: "format", label: "Format", text: true, value: (row) => formatOf(row) ?? "", show: (row) => formatCell(row) },
  { id: "shape", label: "Shape", value: (row) => row.elements, show: (row) => (row.shape ? shapeText(row.shape) : "") },
  { id: "bytes", label: "Size", value: (row) => row.bytes ?? row.other?.bytes, show: (row) => (row.kind ? sizeText(row.bytes) : "") },
  { id: "bits", label: "Bits", hint: "bits", value: (row) => row.bits_per_weight, show: (row) => row.bits_per_weight?.toFixed(2) ?? "" },
];
if (own.some((row) => row.stats?.relative_l2 != null)) {
  COLUMNS.push({ id: "error", label: "Rel. error", hint: "error", value: MEASURES.relative_l2.value, show: errorCell });
  if (!second) COLUMNS.push({ id: "sqnr", label: "SQNR", hint: "SQNR", value: MEASURES.sqnr_db.value, show: (row) => (row.stats?.sqnr_db != null ? MEASURES.sqnr_db.text(row.stats.sqnr_db) : "") });
}
if (!second && own.some((row) => row.scales)) {
  COLUMNS.push({ id: "zero", label: "Zero groups", hint: "zero", value: MEASURES.zero.value, show: (row) => (row.scales ? percent(MEASURES.zero.value(row)) : "") });
}
if (second) {
  const delta = (row) => (row.kind && row.other ? row.other.bytes - row.bytes : null);
  const errors = (row) => (row.stats?.relative_l2 != null && row.other?.stats?.relative_l2 != null ? row.other.stats.relative_l2 - row.stats.relative_l2 : null);
  COLUMNS.push({ id: "status", label: "Second", text: true, value: (row) => row.status, show: (row) => row.status });
  COLUMNS.push({ id: "delta", label: "\u0394 size", hint: "\u0394 size", value: delta, show: (row) => (delta(row) ? `${delta(row) > 0 ? "+" : ""}${sizeText(delta(row))}` : "") });
  if (rows.some((row) => errors(row) != null)) {
    COLUMNS.push({ id: "errors", label: "\u0394 error", hint: "\u0394 error", value: errors, show: (row) => (errors(row) ? make("span", { class: errors(row) > 0 ? "worse" : "better" }, `${errors(row) > 0 ? "+" : "\u2212"}${number(100 * Math.abs(errors(row)))}\u00a0%`) : "") });
  }
}

function errorCell(row) {
  const error = row.stats?.relative_l2;
  if (error == null) return "";
  return error ? MEASURES.relative_l2.text(error) : make("span", { class: "quiet" }, "exact");
}

function formatCell(row) {
  const name = formatOf(row);
  const texts = name ? [make("span", { class: "swatch", style: { background: formatColor(name) } }), name] : [];
  const theirs = row.other && (row.other.format ?? row.other.kind);
  if (theirs && theirs !== name) texts.push(` \u2192 ${theirs}`);
  return make("span", { class: "mono" }, ...texts);
}

const table = { sort: "name", descending: false, page: 0, found: rows, filters: new Map() };

rows.forEach((row, position) => {
  row.position = position;
  row.sought = row.name.toLowerCase();
});

/** Makes every word of a search a condition; a word with a star must match the whole name. */
function matcher(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    if (!word.includes("*") && !word.includes("?")) return (name) => name.includes(word);
    const pattern = word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
    const whole = new RegExp(`^${pattern}$`, "s");
    return (name) => whole.test(name);
  });
  return (row) => tests.every((test) => test(row.sought));
}

function setUpTable() {
  const search = make("input", { type: "search", id: "search", placeholder: "mlp/down  or  text/layers/1?/*", autocomplete: "off", spellcheck: "false",
    oninput: () => refresh() });
  const kinds = [["format", "Format", formatOf], ["component", "Component", (row) => row.component]];
  if (second) kinds.push(["status", "Second", (row) => row.status]);
  byId("filters").append(make("label", { class: "search" }, make("span", {}, "Search"), search));
  for (const [id, label, keyOf] of kinds) {
    const counts = [...groupBy(rows.filter((row) => keyOf(row)), keyOf)].sort((a, b) => b[1].length - a[1].length);
    const select = make("select", { id: `filter-${id}`, onchange: () => refresh() }, make("option", { value: "" }, "all"),
      ...counts.map(([name, members]) => make("option", { value: name }, `${name} (${whole.format(members.length)})`)));
    table.filters.set(id, { select, keyOf });
    byId("filters").append(make("label", {}, label, select));
  }
  const head = COLUMNS.map((column) => make("th", { scope: "col", role: "columnheader", id: `column-${column.id}`, class: column.text ? "text" : null },
    make("button", { class: "plain", onclick: () => sortBy(column) }, column.label)));
  byId("table").append(
    make("table", { class: "objects", role: "table", "aria-labelledby": "objects-title" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)), make("tbody", { id: "rows", role: "rowgroup" })),
    make("nav", { class: "pager", id: "pager", "aria-label": "Pages of the table" }));
  refresh();
}

function sortBy(column) {
  const descendsFirst = !column.text;
  table.descending = table.sort === column.id ? !table.descending : descendsFirst;
  table.sort = column.id;
  refresh();
}

function filterBy(id, value) {
  byId("search").value = "";
  for (const [name, { select }] of table.filters) select.value = name === id ? value : "";
  refresh();
}

function refresh() {
  const matches = matcher(byId("search").value);
  const chosen = [...table.filters.values()].filter(({ select }) => select.value);
  const column = COLUMNS.find(({ id }) => id === table.sort);
  const sign = table.descending ? -1 : 1;
  table.found = rows.filter((row) => matches(row) && chosen.every(({ select, keyOf }) => keyOf(row) === select.value));
  table.found.sort((a, b) => {
    const [left, right] = [column.value(a), column.value(b)];
    // What is not known stands last, whichever way the rest is sorted.
    if (left == null || right == null) return (left == null) - (right == null) || a.position - b.position;
    return sign * (left < right ? -1 : left > right ? 1 : 0) || a.position - b.position;
  });
  for (const { id } of COLUMNS) {
    byId(`column-${id}`).setAttribute("aria-sort", id === table.sort ? (table.descending ? "descending" : "ascending") : "none");
  }
  turnTo(0);
}

function turnTo(page) {
  const { found } = table;
  const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
  table.page = Math.min(Math.max(0, page), pages - 1);
  const begin = table.page * PAGE_ROWS, end = Math.min(begin + PAGE_ROWS, found.length);
  byId("rows").replaceChildren(...found.slice(begin, end).map((row) => make("tr", { role: "row" },
    ...COLUMNS.map((column) => make("td", { role: "cell", class: [column.text && "text", column.id === "name" && "object", column.id === "shape" && "shape"].filter(Boolean).join(" ") || null,
      "data-label": column.hint ?? null }, column.show(row))))));
  for (const cell of byId("rows").querySelectorAll("td")) if (!cell.textContent) cell.replaceChildren();
  if (!found.length) byId("rows").append(make("tr", { role: "row" }, make("td", { role: "cell", class: "empty text", colspan: COLUMNS.length }, "No object matches.")));
  const nbytes = sum(found, (row) => row.bytes);
  byId("count").textContent = found.length === rows.length ? `${whole.format(rows.length)}, ${sizeText(nbytes)}` : `${whole.format(found.length)} of ${whole.format(rows.length)}, ${sizeText(nbytes)}`;
  const turn = (label, to, text) => make("button", { "aria-label": label, disabled: to < 0 || to >= pages, onclick: () => { turnTo(to); byId("objects").scrollIntoView(); } }, text);
  byId("pager").replaceChildren(...(pages > 1 ? [turn("Previous page", table.page - 1, "\u2190"),
    make("span", { class: "quiet" }, `${whole.format(begin + 1)}\u2013${whole.format(end)} of ${whole.format(found.length)}`),
    turn("Next page", table.page + 1, "\u2192")] : []));
}

// One object

function openDetail(row) {
  hideTip();
  const dialog = byId("detail");
  const order = table.found.includes(row) ? table.found : rows;
  const at = order.indexOf(row);
  const step = (to) => {
    const focused = document.activeElement?.getAttribute("aria-label");
    openDetail(order[to]);
    (dialog.querySelector(`button[aria-label="${focused}"]:enabled`) ?? dialog.querySelector("button:enabled")).focus();
  };
  const go = (label, to, text) => make("button", { "aria-label": label, disabled: !order[to], onclick: () => step(to) }, text);
  dialog.onkeydown = (event) => {
    const to = at + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0);
    if (to !== at && order[to]) step(to);
  };
  const sheet = make("div", { class: "sheet" },
    make("div", { class: "bar-top" }, make("div", { class: "controls" }, go("Previous object", at - 1, "\u2190"), go("Next object", at + 1, "\u2192")),
      make("button", { onclick: () => dialog.close() }, "Close")),
    make("h2", { id: "detail-title" }, row.name), second ? pairTable(row) : factList(objectFacts(row)));
  dialog.replaceChildren(sheet);
  if (!dialog.open) dialog.showModal();
  const width = sheet.clientWidth - 70;
  if (row.scales) sheet.append(...histogram(row, "Scales", width));
  if (row.other?.scales) sheet.append(...histogram(row.other, "Scales of the second", width));
  const origin = originFacts(row);
  if (origin.length) sheet.append(make("h3", {}, "Origin"), factList(origin));
  dialog.scrollTop = 0;
}

function objectFacts(row) {
  if (!row?.kind) return [];
  const facts = [["format", row.format ? `${row.format}${row.layout ? ` in ${row.layout}` : ""}` : row.kind]];
  if (row.shape) facts.push(["shape", shapeText(row.shape)]);
  facts.push(["size", `${whole.format(row.bytes)} bytes${row.offset != null ? ` at ${whole.format(row.offset)}` : ""}`]);
  if (row.bits_per_weight) facts.push(["bits per weight", row.bits_per_weight.toFixed(3)]);
  for (const id of ["relative_l2", "sqnr_db", "max_error"]) {
    if (row.stats?.[id] != null) {
      const place = id === "max_error" && row.stats.max_error_at ? ` at [${row.stats.max_error_at.join(", ")}]` : "";
      facts.push([MEASURES[id].label, row.stats[id] || id === "sqnr_db" ? MEASURES[id].text(row.stats[id]) + place : "none"]);
    }
  }
  if (row.stats?.clipped_groups != null) facts.push(["clipped groups", whole.format(row.stats.clipped_groups)]);
  const zero = row.scales?.zero ?? row.stats?.zero_groups;
  if (zero != null) facts.push(["zero groups", whole.format(zero) + (row.scales ? ` of ${whole.format(row.scales.groups)}` : "")]);
  if (row.scales?.invalid) facts.push(["invalid scales", whole.format(row.scales.invalid)]);
  if (row.divisor != null) facts.push(["divisor", number(row.divisor)]);
  if (row.sha256) facts.push(["SHA-256", row.sha256]);
  return facts;
}

function pairTable(row) {
  const [mine, theirs] = [row, row.other].map((one) => new Map(objectFacts(one)));
  const labels = [...new Set([...mine.keys(), ...theirs.keys()])].sort((a, b) => (a === "SHA-256") - (b === "SHA-256"));
  return make("table", { class: "pairs" }, make("colgroup", {}, make("col"), make("col"), make("col")),
    make("thead", {}, make("tr", {}, make("td"), make("th", { scope: "col" }, "first"), make("th", { scope: "col" }, `second: ${row.status}`))),
    make("tbody", {}, ...labels.map((label) => make("tr", {}, make("th", { scope: "row" }, label),
      ...[mine, theirs].map((facts) => make("td", { class: label === "SHA-256" ? "mono" : null }, facts.get(label) ?? "\u2013"))))));
}

function originFacts(row) {
  const facts = [];
  if (row.word_copy) facts.push(["words", "copied one by one, nothing was encoded"]);
  else if (row.encoder) facts.push(["encoder", row.encoder]);
  if (row.transform) facts.push(["transform", row.transform]);
  for (const origin of row.sources ?? []) {
    const place = [origin.source ?? origin.input, origin.file, origin.tensor ?? origin.member].filter(Boolean).join(" \u203a ");
    facts.push(["file", `${place}${origin.dtype ? `, ${origin.dtype}` : ""}${origin.shape ? ` [${origin.shape.join(", ")}]` : ""}`]);
  }
  if (row.more_sources) facts.push(["", `and ${whole.format(row.more_sources)} more tensors`]);
  return facts;
}

function histogram(item, title, width) {
  const { scales } = item;
  const divisor = item.divisor ?? 1;
  const what = item.divisor ? "E4M3FN scale \u00f7 divisor" : `${scales.word} multiplier`;
  const heading = make("h3", {}, `${title}: ${what}, ${whole.format(scales.groups)} groups`);
  if (!scales.counts.length) return [heading, make("p", { class: "quiet" }, "No scale is positive.")];
  const most = scales.counts.reduce((a, b) => Math.max(a, b)), height = 150, top = 8, bottom = 22;
  const step = width / scales.counts.length;
  const edge = (index) => wordValue(scales.word, (scales.first + index) << scales.shift) / divisor;
  const svg = draw("svg", { width, height, role: "img",
    "aria-label": `Histogram of ${scales.counts.length} bins from ${number(edge(0))} to ${number(edge(scales.counts.length))}` });
  scales.counts.forEach((count, index) => {
    const tall = count ? Math.max(1.5, ((height - top - bottom) * count) / most) : 0;
    const place = { x: index * step, width: Math.max(0.5, step - Math.min(1, step / 6)) };
    const range = scales.shift ? `${number(edge(index))} to ${number(edge(index + 1))}` : number(edge(index));
    svg.append(draw("rect", { ...place, y: height - bottom - tall, height: tall, fill: formatColor(formatOf(item)) }),
      draw("rect", { x: index * step, width: step, y: 0, height: height - bottom, fill: "transparent",
        onpointermove: (event) => showTip(event.clientX, event.clientY, range, `${whole.format(count)} groups, ${percent(count / scales.groups)}`), onpointerleave: hideTip }));
  });
  svg.append(draw("line", { class: "grid", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
  const labels = Math.max(2, Math.min(7, Math.floor(width / 95)));
  for (let label = 0; label < labels; label += 1) {
    const index = Math.round((label * scales.counts.length) / (labels - 1));
    svg.append(draw("text", { x: index * step, y: height - 6, "text-anchor": label === 0 ? "start" : label === labels - 1 ? "end" : "middle" }, number(edge(index))));
  }
  return [heading, make("div", { class: "plot" }, svg)];
}
