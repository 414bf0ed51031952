// What everything else stands on: elements, numbers as people read them, words as values.

const data = JSON.parse(document.getElementById("data").textContent);
const [first, second = null] = data.artifacts;
const rows = data.objects;
const own = rows.filter((row) => row.kind);
const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element; texts never pass through a parser, so that a name is only ever a name. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const whole = new Intl.NumberFormat("en-US");

function sizeParts(nbytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(nbytes) >= size) return [(nbytes / size).toFixed(Math.abs(nbytes) >= 100 * size ? 0 : 2), unit];
  }
  return [String(nbytes), "B"];
}

const sizeText = (nbytes) => sizeParts(nbytes).join("\u00a0").replace("-", "\u2212");
const percent = (share) => (share === 0 ? "0" : share > 0 && share < 0.001 ? "< 0.1\u00a0%" : `${(100 * share).toFixed(1)}\u00a0%`);
const shapeText = (shape) => (shape.length ? shape.join(" \u00d7 ") : "scalar");

/** Returns a number with three significant digits, powers of ten where zeros would take over. */
function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.001 && size < 100000) return String(Number(value.toPrecision(3)));
  return value.toExponential(2).replace("e+", "e").replace("-", "\u2212").replace("e-", "e\u2212");
}

const FORMATS = new Map([
  ["Q4G64_F16S", "q4"], ["Q5G64_F16S", "q5"], ["Q6G64_F16S", "q6"], ["W8G32_F16S", "w8"], ["NVFP4", "nvfp4"],
  ["FP8_E4M3FN_ROW_BF16S", "fp8"], ["BF16", "bf16"], ["FP32", "fp32"], ["I32", "i32"], ["resource", "resource"],
]);
const formatOf = (row) => row.format ?? row.kind;
const formatColor = (name) => `var(--${FORMATS.get(name) ?? "resource"})`;

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}

const sum = (items, valueOf) => items.reduce((total, item) => total + (valueOf(item) ?? 0), 0);
const bitsOf = (items) => {
  const elements = sum(items, (row) => row.elements);
  return elements ? (8 * sum(items.filter((row) => row.elements), (row) => row.bytes)) / elements : null;
};

/** Returns the value of a nonnegative word: exponent and fraction bits with the format's own bias. */
function wordValue(kind, word) {
  const [fractionBits, bias] = { F16: [10, 15], BF16: [7, 127], E4M3FN: [3, 7] }[kind];
  const exponent = word >> fractionBits;
  const fraction = (word & ((1 << fractionBits) - 1)) / 2 ** fractionBits;
  return exponent ? (1 + fraction) * 2 ** (exponent - bias) : fraction * 2 ** (1 - bias);
}

// One tip for all plots: it follows the pointer and never takes part in layout.

const tip = byId("tip");

function showTip(x, y, ...lines) {
  // An open dialog covers everything that is not inside of it.
  const host = byId("detail").open ? byId("detail") : document.body;
  if (tip.parentNode !== host) host.append(tip);
  tip.replaceChildren(...lines.map((line) => make("div", line.name ? { class: "name" } : {}, line.text ?? line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), window.innerWidth - box.width - 8);
  const top = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}

function hideTip() {
  tip.hidden = true;
}

window.addEventListener("scroll", hideTip, { passive: true, capture: true });
