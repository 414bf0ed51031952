// Identity, sizes by component and format, the second artifact beside the first, provenance.

function showFigures() {
  const { totals } = first;
  const [size, unit] = sizeParts(totals.file_bytes);
  const figures = [
    ["File", size, unit, `${whole.format(totals.file_bytes)} bytes`],
    ["Bits per weight", totals.bits_per_weight?.toFixed(3) ?? "\u2013", "", `${whole.format(totals.elements)} elements`],
    ["Objects", whole.format(totals.objects), "", `${whole.format(totals.tensors)} tensors, ${whole.format(totals.resources)} resources`],
  ];
  const lossy = own.filter((row) => row.stats?.relative_l2 > 0).sort((a, b) => b.stats.relative_l2 - a.stats.relative_l2);
  if (lossy.length) {
    const middle = lossy[Math.floor(lossy.length / 2)].stats.relative_l2;
    figures.push(["Median relative error", number(100 * middle), "%", `of ${whole.format(lossy.length)} lossy tensors`]);
    figures.push(["Largest relative error", number(100 * lossy[0].stats.relative_l2), "%", lossy[0].name]);
  }
  byId("figures").append(...figures.map(([label, value, unitText, note]) =>
    make("div", {}, make("dt", {}, label), make("dd", { class: "value" }, value, " ", make("span", { class: "unit" }, unitText)),
      make("dd", { class: "note" }, note))));
  const facts = Object.fromEntries(first.facts.map((group) => [group.title, Object.fromEntries(group.facts)]));
  const said = [first.path.split("/").pop()];
  if (facts.Recipe?.id) said.push(`made by recipe ${facts.Recipe.id}`);
  for (const group of first.facts) {
    const known = Object.fromEntries(group.facts);
    if (group.title.startsWith("Source ") && known.repository) {
      said.push(`from ${known.repository}${known.revision ? ` at ${known.revision.slice(0, 12)}` : ""}`);
    }
  }
  if (facts.Run?.finished) said.push(`on ${facts.Run.finished.slice(0, 10)}`);
  byId("summary").textContent = said.join(", ");
  for (const about of data.artifacts) {
    const texts = [...about.notes];
    if (about.report_problem) texts.push(`the conversion report is not of this artifact and is not used: ${about.report_problem}`);
    byId("notices").append(...texts.map((text) => make("p", { class: "notice" }, `${about.path}: ${text}`)));
  }
}

function bar(parts, total, label) {
  return make("div", { class: "bar", role: "img", "aria-label": label },
    ...parts.filter(([, nbytes]) => nbytes).map(([name, nbytes]) => make("span", {
      style: { flex: `0 0 ${(100 * nbytes) / total}%`, background: formatColor(name) },
      onpointermove: (event) => showTip(event.clientX, event.clientY, name, `${sizeText(nbytes)}`),
      onpointerleave: hideTip,
    })));
}

function sizeRow(name, members, largest, remark, isSecond = false) {
  const byFormat = groupBy(members, formatOf);
  const parts = [...FORMATS.keys()].map((format) => [format, sum(byFormat.get(format) ?? [], (row) => row.bytes)]);
  const said = parts.filter(([, size]) => size).map(([format, size]) => `${format} ${sizeText(size)}`).join(", ");
  return make("div", { class: isSecond ? "row second" : "row" }, make("div", { class: "label name" }, name),
    bar(parts, largest, `${name}: ${said}`), make("div", { class: "amount" }, `${sizeText(sum(members, (row) => row.bytes))} \u00b7 ${remark}`));
}

function showSizes() {
  const all = sum(own, (row) => row.bytes);
  const theirs = rows.filter((row) => row.other).map((row) => ({ ...row.other, component: row.component }));
  const mine = groupBy(own, (row) => row.component), others = groupBy(theirs, (row) => row.component);
  const sizeOf = (members) => sum(members ?? [], (row) => row.bytes);
  const names = [...new Set([...mine.keys(), ...others.keys()])].sort((a, b) => sizeOf(mine.get(b)) - sizeOf(mine.get(a)));
  const largest = Math.max(...names.flatMap((name) => [sizeOf(mine.get(name)), sizeOf(others.get(name))]));
  const share = make("div", { class: "share" });
  for (const name of names) {
    share.append(sizeRow(name, mine.get(name) ?? [], largest, percent(sizeOf(mine.get(name)) / all)));
    if (second) share.append(sizeRow("second", others.get(name) ?? [], largest, change(sizeOf(others.get(name)), sizeOf(mine.get(name))), true));
  }
  const byFormat = groupBy(own, formatOf);
  const body = [...FORMATS.keys()].filter((format) => byFormat.has(format)).map((format) => {
    const members = byFormat.get(format);
    const nbytes = sum(members, (row) => row.bytes);
    return make("tr", {},
      make("td", {}, make("span", { class: "swatch", style: { background: formatColor(format) } }), make("span", { class: "mono" }, format)),
      make("td", {}, whole.format(members.length)), make("td", { class: "wide" }, whole.format(sum(members, (row) => row.elements))),
      make("td", {}, sizeText(nbytes)), make("td", { class: "wide" }, percent(nbytes / all)),
      make("td", {}, bitsOf(members)?.toFixed(3) ?? "\u2013"));
  });
  const head = [["Format"], ["Objects"], ["Elements", "wide"], ["Size"], ["Share", "wide"], ["Bits/weight"]];
  byId("sizes-body").append(share, make("table", { class: "legend" },
    make("caption", { class: "hidden-text" }, "Objects, size and bits per weight of each format"),
    make("thead", {}, make("tr", {}, ...head.map(([text, kind]) => make("th", { scope: "col", class: kind }, text)))),
    make("tbody", {}, ...body)));
}

function showAgainst() {
  if (!second) return;
  byId("against").hidden = false;
  const label = (about) => about.path.split("/").pop();
  const medianLoss = (pick) => {
    const losses = rows.map(pick).filter((stats) => stats?.relative_l2 > 0).map((stats) => stats.relative_l2).sort((a, b) => a - b);
    return losses.length ? `${number(100 * losses[Math.floor(losses.length / 2)])}\u00a0%` : "not recorded";
  };
  const digest = (about) => Object.fromEntries(about.facts.find((group) => group.title === "Artifact")?.facts ?? [])["SHA-256"] ?? "not recorded";
  const formats = (about) => Object.entries(about.totals.formats).map(([name, count]) => `${name} ${whole.format(count)}`).join(", ");
  const lines = [
    ["Identity", ...data.artifacts.map((about) => `${about.model_id} / ${about.weights_id}`)],
    ["File", sizeText(first.totals.file_bytes), `${sizeText(second.totals.file_bytes)} (${change(second.totals.file_bytes, first.totals.file_bytes)})`],
    ["Bits per weight", ...data.artifacts.map((about) => about.totals.bits_per_weight?.toFixed(3) ?? "\u2013")],
    ["Objects", ...data.artifacts.map((about) => whole.format(about.totals.objects))],
    ["Formats", ...data.artifacts.map(formats)],
    ["Median relative error", medianLoss((row) => row.stats), medianLoss((row) => row.other?.stats)],
    ["SHA-256", ...data.artifacts.map(digest)],
  ];
  const statuses = [...groupBy(rows, (row) => row.status)].sort((a, b) => b[1].length - a[1].length);
  byId("against-body").append(
    make("table", { class: "pairs" }, make("colgroup", {}, make("col"), make("col"), make("col")),
      make("thead", {}, make("tr", {}, make("td"), ...data.artifacts.map((about) => make("th", { scope: "col" }, label(about))))),
      make("tbody", {}, ...lines.map(([name, ...values]) => make("tr", {}, make("th", { scope: "row" }, name),
        ...values.map((value) => make("td", { class: name === "SHA-256" ? "mono" : null }, value)))))),
    make("div", { class: "chips" }, ...statuses.map(([status, members]) => make("button", {
      onclick: () => { filterBy("status", status); byId("objects").scrollIntoView(); },
    }, `${whole.format(members.length)} ${status}`))));
}

function change(after, before) {
  if (after === before) return "the same";
  if (!before) return "added";
  if (!after) return "gone";
  const share = (100 * (after - before)) / before;
  return `${share > 0 ? "+" : "\u2212"}${Math.abs(share).toFixed(Math.abs(share) < 10 ? 2 : 0)}\u00a0%`;
}

function factList(facts) {
  if (facts.every(([label]) => !label)) return make("ul", {}, ...facts.map(([, text]) => make("li", {}, text)));
  const files = facts.filter(([label]) => label === "file");
  if (files.length > 2) {
    return make("div", {}, factList(facts.filter(([label]) => label !== "file")),
      make("details", {}, make("summary", {}, `${whole.format(files.length)} files`), make("ul", { class: "mono" }, ...files.map(([, text]) => make("li", {}, text)))));
  }
  return make("dl", { class: "facts" }, ...facts.flatMap(([label, text]) => [
    make("dt", {}, label), make("dd", { class: /SHA|revision|command|path|location|repository|file/.test(label) ? "mono" : null }, text)]));
}

function showProvenance() {
  const body = byId("provenance-body");
  for (const about of data.artifacts) {
    if (second) body.append(make("h3", { class: "mono" }, about.path));
    if (!about.has_report) {
      body.append(make("p", { class: "quiet" }, "There is no conversion report of this artifact: sources, digests and losses are not known."));
    }
    body.append(make("div", { class: "cards" }, ...about.facts.map((group) =>
      make("div", { class: "card" }, make("h3", {}, group.title), factList(group.facts)))));
  }
}
