// One measure by layer and role: lines, a map of cells, and the worst objects.

const share = (part) => (row) => (row.scales?.groups && part(row) != null ? part(row) / row.scales.groups : null);

/** What can be measured of an object. `bad` is 1 when more is worse, -1 when less is, 0 when neither. */
const MEASURES = {
  relative_l2: { label: "relative error", value: (row) => row.stats?.relative_l2, log: true, bad: 1, text: (v) => `${number(100 * v)}\u00a0%`,
    about: "Euclidean norm of the error of all elements, relative to that of the elements." },
  sqnr_db: { label: "SQNR", value: (row) => row.stats?.sqnr_db, bad: -1, text: (v) => `${v.toFixed(1)}\u00a0dB`,
    about: "Signal to quantization noise, in decibels; 6 dB are about one bit." },
  max_error: { label: "largest error", value: (row) => row.stats?.max_error, log: true, bad: 1, text: number,
    about: "Largest absolute error of any element." },
  clipped: { label: "clipped groups", value: share((row) => row.stats?.clipped_groups), bad: 1, text: percent,
    about: "Share of groups in which the code interval cut a value off." },
  zero: { label: "zero groups", value: share((row) => row.scales?.zero), bad: 1, text: percent,
    about: "Share of groups whose scale is zero: all their elements are." },
  median: { label: "median scale", value: (row) => row.scales?.median, log: true, bad: 0, text: number,
    about: "Median of the positive scales; for NVFP4 divided by the divisor of the matrix." },
  bits: { label: "bits per weight", value: (row) => row.bits_per_weight, bad: 0, text: (v) => v.toFixed(2),
    about: "Stored bits per element, scales and padding included." },
};
for (const [id, measure] of Object.entries(MEASURES)) measure.id = id;

const usable = (measure, row) => {
  const value = measure.value(row);
  return value != null && Number.isFinite(value) && (!measure.log || value > 0);
};
const measured = Object.values(MEASURES).filter((measure) => own.some((row) => usable(measure, row)));
const layered = own.filter((row) => row.layer != null);

function setUpLoss() {
  const hasStats = own.some((row) => row.stats);
  if (!measured.length) {
    byId("loss").hidden = byId("worst").hidden = true;
    return;
  }
  byId("measure").append(...measured.map((measure) => make("option", { value: measure.id }, measure.label)));
  const components = [...groupBy(layered, (row) => row.component)].sort((a, b) => sum(b[1], (row) => row.bytes) - sum(a[1], (row) => row.bytes));
  byId("component").append(...components.map(([name]) => make("option", { value: name }, name)));
  if (components.length !== 1) byId("component").append(make("option", { value: "" }, "all"));
  byId("measure").addEventListener("change", showLoss);
  byId("component").addEventListener("change", showLoss);
  if (!hasStats) {
    if (measured.includes(MEASURES.median)) byId("measure").value = "median";
    byId("loss-body").before(make("p", { class: "notice" },
      "Errors are not known: the conversion report has no statistics. What the artifact itself tells is shown instead."));
  }
  let width = 0;
  new ResizeObserver(() => {
    const now = byId("loss-body").clientWidth;
    if (now && now !== width) {
      width = now;
      showLoss();
    }
  }).observe(byId("loss-body"));
}

function showLoss() {
  const measure = MEASURES[byId("measure").value];
  const component = byId("component").value;
  const shown = layered.filter((row) => (!component || row.component === component) && usable(measure, row));
  byId("measure-text").textContent = measure.about;
  hideTip();
  const body = byId("loss-body");
  if (shown.length) {
    const view = { measure, shown, scale: valueScale(measure, shown), roles: rolesOf(shown), width: body.clientWidth };
    const lines = linePlot(view);
    body.replaceChildren(make("div", { class: "plot" }, lines.element), make("div", { class: "plot" }, ...cellMap(view, lines.light)));
  } else {
    body.replaceChildren(make("p", { class: "empty" }, "No object of this component has a layer and this measure."));
  }
  showWorst(measure);
}

/** Maps values to 0..1 and gives ticks, in powers of ten or evenly. */
function valueScale(measure, shown) {
  const values = shown.map(measure.value);
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (measure.log) {
    const ticks = [];
    let [begin, end] = [Math.log10(low), Math.log10(high)];
    if (end - begin < 0.02) [begin, end] = [begin - 0.05, end + 0.05];
    const pad = (end - begin) * 0.04;
    [begin, end] = [begin - pad, end + pad];
    if (end - begin < 0.7) ticks.push(...evenTicks(10 ** begin, 10 ** end, 6));
    else {
      const steps = end - begin > 3 ? [1] : [1, 2, 5];
      const stride = Math.ceil((end - begin) / 8);
      for (let power = Math.floor(begin); power <= end; power += 1) {
        if (power % stride === 0) ticks.push(...steps.map((step) => step * 10 ** power).filter((tick) => tick >= 10 ** begin && tick <= 10 ** end));
      }
    }
    return { low, high, ticks, place: (value) => (Math.log10(value) - begin) / (end - begin) };
  }
  const [least, most] = [low, high];
  if (high - low < 1e-9) [low, high] = low > 0 ? [0.9 * low, 1.1 * low] : [low, low + 0.01];
  const ticks = evenTicks(low, high, 5);
  const pad = (high - low) * 0.04;
  return { low: least, high: most, ticks, place: (value) => (value - low + pad) / (high - low + 2 * pad) };
}

function evenTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(index * step);
  return ticks;
}

function rolesOf(shown) {
  const roles = groupBy(shown, (row) => row.role);
  let prefix = [...roles.keys()].reduce((common, role) => {
    while (!role.startsWith(common)) common = common.slice(0, -1);
    return common;
  });
  prefix = prefix.slice(0, prefix.lastIndexOf("/") + 1);
  return [...roles].map(([role, members]) => ({ role, members, label: role.slice(prefix.length) || role }));
}

function layerRange(shown) {
  const layers = shown.map((row) => row.layer);
  const low = layers.reduce((a, b) => Math.min(a, b));
  const count = layers.reduce((a, b) => Math.max(a, b)) - low + 1;
  // A name may hold any number: layers far apart get places by rank.
  const order = count > 4096 ? [...new Set(layers)].sort((a, b) => a - b) : null;
  const places = order && new Map(order.map((layer, place) => [layer, place]));
  return {
    count: order ? order.length : count,
    place: (layer) => (places ? places.get(layer) : layer - low),
    layer: (place) => (order ? order[place] : low + place),
  };
}

const tipLines = (measure, row) => [
  { name: true, text: row.name },
  `${measure.label} ${measure.text(measure.value(row))}`,
  `${formatOf(row)}${row.shape ? `, ${shapeText(row.shape)}` : ""}`,
];

function linePlot({ measure, shown, scale, roles, width }) {
  const left = 58, bottom = 34, height = width < 600 ? 240 : 300, inner = Math.max(100, width - 26 - left);
  const range = layerRange(shown);
  const x = (row) => left + (range.count < 2 ? inner / 2 : 6 + ((inner - 12) * range.place(row.layer)) / (range.count - 1));
  const y = (value) => 8 + (height - bottom - 8) * (1 - scale.place(value));
  const svg = draw("svg", { width: left + inner, height, role: "img",
    "aria-label": `${measure.label} by layer, one line for each of ${roles.length} roles; the map below has the same values for the keyboard` });
  for (const tick of scale.ticks) {
    svg.append(draw("line", { class: "grid", x1: left, x2: left + inner, y1: y(tick), y2: y(tick) }),
      draw("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, measure.text(tick)));
  }
  layerTicks(svg, range, (place) => left + (range.count < 2 ? inner / 2 : 6 + ((inner - 12) * place) / (range.count - 1)), height - bottom + 16, inner);
  svg.append(draw("text", { x: left + inner / 2, y: height - 2, "text-anchor": "middle" }, "layer"));
  const lines = new Map(), points = [];
  for (const { role, members } of roles) {
    const sorted = [...members].sort((a, b) => a.layer - b.layer);
    const line = draw("path", { class: "line", d: sorted.map((row, i) => `${i ? "L" : "M"}${x(row).toFixed(1)} ${y(measure.value(row)).toFixed(1)}`).join("") });
    lines.set(role, line);
    svg.append(line);
  }
  for (const row of shown) {
    const point = draw("circle", { class: "point", cx: x(row).toFixed(1), cy: y(measure.value(row)).toFixed(1), r: width < 600 ? 2.6 : 3.6, fill: formatColor(formatOf(row)) });
    points.push({ row, point, x: x(row), y: y(measure.value(row)) });
    svg.append(point);
  }
  let lit = null;
  const light = (row) => {
    if (row === lit) return;
    lit = row;
    for (const [role, line] of lines) {
      line.classList.toggle("lit", row?.role === role);
      if (row?.role === role) line.parentNode.insertBefore(line, points[0].point);
    }
    for (const item of points) {
      item.point.classList.toggle("dim", row != null && item.row.role !== row.role);
      item.point.classList.toggle("lit", item.row === row);
    }
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null, distance = 30 ** 2;
    for (const item of points) {
      const now = (item.x - px) ** 2 + (item.y - py) ** 2;
      if (now < distance) [best, distance] = [item, now];
    }
    return best;
  };
  const hover = (event) => {
    const found = nearest(event);
    light(found?.row ?? null);
    svg.style.cursor = found ? "pointer" : "";
    if (found) showTip(event.clientX, event.clientY, ...tipLines(measure, found.row));
    else hideTip();
  };
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerdown", hover);
  svg.addEventListener("pointerleave", () => { light(null); hideTip(); });
  svg.addEventListener("click", (event) => { const found = nearest(event); if (found) openDetail(found.row); });
  return { element: svg, light };
}

function layerTicks(svg, range, x, y, inner) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 1000].find((size) => (range.count / size) * 30 <= inner) ?? 4096;
  for (let place = 0; place < range.count; place += step) {
    svg.append(draw("text", { x: x(place), y, "text-anchor": "middle" }, String(range.layer(place))));
  }
}

function cellMap({ measure, shown, scale, roles, width }, light) {
  const range = layerRange(shown);
  const longest = Math.max(...roles.map(({ label }) => label.length));
  const left = Math.min(longest * 7 + 12, width < 600 ? 128 : 300);
  const cell = Math.max(width < 600 ? 7 : 6, Math.min(40, (width - 26 - left) / range.count)), line = 19;
  const svg = draw("svg", { width: left + cell * range.count + 2, height: roles.length * line + 24, tabindex: 0, role: "application",
    "aria-label": `${measure.label} of each role in each layer. Arrow keys move, Enter shows the object.` });
  const letters = Math.floor((left - 12) / 7);
  const grid = [];
  const cursor = draw("rect", { class: "cursor", width: cell, height: line - 1, visibility: "hidden" });
  const spoken = make("div", { class: "hidden-text", role: "status", "aria-live": "polite" });
  roles.forEach(({ role, members, label }, index) => {
    const cut = label.length > letters ? `\u2026${label.slice(1 - letters)}` : label;
    svg.append(draw("text", { class: "role-label", x: left - 8, y: index * line + 13, "text-anchor": "end" }, draw("title", {}, role), cut));
    grid.push(new Map());
    for (const row of members) {
      const place = range.place(row.layer);
      const at = scale.place(measure.value(row));
      const heat = Math.round(100 * (measure.bad < 0 ? 1 - at : at));
      const rect = draw("rect", { class: "cell", x: left + place * cell, y: index * line, width: cell - Math.min(1, cell / 8), height: line - 1,
        style: { fill: `color-mix(in oklab, var(${measure.bad ? "--hot" : "--accent"}) ${heat}%, var(--cold))` } });
      rect.dataset.role = index;
      rect.dataset.place = place;
      grid[index].set(place, row);
      svg.append(rect);
    }
  });
  layerTicks(svg, range, (place) => left + (place + 0.5) * cell, roles.length * line + 16, cell * range.count);
  svg.append(cursor);
  const rowAt = (event) => {
    const { role, place } = event.target.dataset ?? {};
    return role === undefined ? null : grid[role].get(Number(place));
  };
  const hover = (event) => {
    const row = rowAt(event);
    light(row);
    if (row) showTip(event.clientX, event.clientY, ...tipLines(measure, row));
    else hideTip();
  };
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerdown", hover);
  svg.addEventListener("pointerleave", () => { light(null); hideTip(); });
  svg.addEventListener("click", (event) => { const row = rowAt(event); if (row) openDetail(row); });
  keyboard({ svg, grid, range, cursor, spoken, left, cell, line, measure, light });
  const [low, high] = [measure.text(scale.low), measure.text(scale.high)];
  const key = make("div", { class: "scale" }, measure.bad < 0 ? high : low, make("i", measure.bad ? {} : { style: { background: "linear-gradient(to right, var(--cold), var(--accent))" } }), measure.bad < 0 ? low : high);
  return [make("div", { class: "scroll" }, svg), key, spoken];
}

function keyboard({ svg, grid, range, cursor, spoken, left, cell, line, measure, light }) {
  let at = null;
  const move = (down, right) => {
    if (!at) at = [0, grid[0].keys().next().value];
    else {
      const next = [at[0] + down, at[1] + right];
      while (next[0] >= 0 && next[0] < grid.length && next[1] >= 0 && next[1] < range.count && !grid[next[0]].has(next[1])) {
        next[0] += down;
        next[1] += right;
      }
      if (grid[next[0]]?.has(next[1])) at = next;
    }
    const row = grid[at[0]].get(at[1]);
    cursor.setAttribute("x", left + at[1] * cell);
    cursor.setAttribute("y", at[0] * line);
    cursor.setAttribute("visibility", "visible");
    spoken.textContent = tipLines(measure, row).map((part) => part.text ?? part).join(", ");
    light(row);
    const box = cursor.getBoundingClientRect();
    showTip(box.right, box.bottom - 8, ...tipLines(measure, row));
  };
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  svg.addEventListener("keydown", (event) => {
    if (moves[event.key]) {
      event.preventDefault();
      move(...moves[event.key]);
    } else if (event.key === "Enter" && at) {
      // The key must not go on to press the dialog's first button.
      event.preventDefault();
      openDetail(grid[at[0]].get(at[1]));
    }
  });
  svg.addEventListener("blur", () => { cursor.setAttribute("visibility", "hidden"); light(null); hideTip(); });
}

function showWorst(measure) {
  const used = measure.bad ? measure : MEASURES[["relative_l2", "zero"].find((id) => measured.includes(MEASURES[id]))];
  const worst = used ? own.filter((row) => usable(used, row) && (used.bad < 0 || used.value(row) > 0))
    .sort((a, b) => used.bad * (used.value(b) - used.value(a))).slice(0, 12) : [];
  byId("worst").hidden = !worst.length;
  byId("worst-title").textContent = `Worst objects by ${used?.label}`;
  byId("worst-body").replaceChildren(...worst.map((row) => {
    const most = Math.max(...worst.map(used.value));
    return make("li", {},
      make("button", { class: "plain name", onclick: () => openDetail(row) }, row.name),
      make("div", { class: "bar" }, make("span", { style: { width: `${(100 * used.value(row)) / most}%`, background: formatColor(formatOf(row)) } })),
      make("div", { class: "amount" }, used.text(used.value(row))));
  }));
}
