"use strict";
(() => {
  const answers = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, cls) => {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    if (cls) element.className = cls;
    return element;
  };
  const drawn = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  // The same formats as in words.py: four significant digits
  const short = (x) => {
    if (x === 0) return "0";
    if (x >= 1e-4 && x < 1e6) return x >= 1000 ? Math.round(x).toString() : Number(x.toPrecision(4)).toString();
    const [mantissa, exponent] = x.toExponential(3).split("e");
    return `${Number(mantissa)}e${exponent.replace("+", "").replace("-", "−")}`;
  };
  const number = (x, plus = "") => (x === null || x === undefined ? "—" : (x > 0 ? plus : x < 0 ? "−" : "") + short(Math.abs(x)));
  const signed = (x) => number(x, "+");
  const percent = (x) => {
    const size = Math.abs(100 * x);
    return size > 0 && size < 0.001 ? "less than 0.001 %" : `${size >= 10 ? Math.round(size) : Number(size.toPrecision(2))} %`;
  };
  const side = (x) => (x > 0 ? "up" : x < 0 ? "down" : "none");
  const narrow = () => matchMedia("(max-width: 52rem)").matches;
  const ticks = (low, high) => {
    const rough = (high - low) / 5 || Math.abs(high) || 1;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 2.5, 5, 10].find((k) => k * unit >= rough);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    return found.map((v) => [v, Math.abs(v) < 1e-9 * step ? "0" : number(Number(v.toPrecision(6)))]);
  };

  // The report that is open, and what follows from it

  let report, samples, retrained, pictured, views, relative, columns, words, order, chosen, limit;
  const open = (k) => {
    report = answers[k];
    samples = report.samples;
    retrained = samples.some((s) => s.actual !== undefined && s.actual !== null);
    pictured = samples.some((s) => s.image);
    views = samples.length ? Object.keys(samples[0].losses) : [];
    const largest = Math.max(0, ...samples.map((s) => Math.abs(s.score || 0)));
    relative = report.value !== null && largest > 0 && Math.abs(report.value) >= largest; // a percentage says something
    const grouped = samples.some((s) => s.group !== null);
    const share = (x) => (x === null || x === undefined ? null : x / Math.abs(report.value));
    columns = [
      { key: "name", words: "sample", of: (s) => s.name, text: true },
      ...(grouped ? [{ key: "group", words: "group", of: (s) => s.group || "", text: true, minor: true }] : []),
      { key: "score", words: "score", of: (s) => s.score },
      ...(relative ? [{ key: "share", words: "in per cent", of: (s) => share(s.score), percent: true, minor: retrained }] : []),
      ...(retrained ? [{ key: "actual", words: "retrained", of: (s) => (s.actual === undefined ? null : s.actual) }] : []),
      ...views.map((name) => ({ key: `loss ${name}`, words: lossName(name), of: (s) => s.losses[name], minor: true, plain: true })),
    ];
    words = new Map(samples.map((s) => [s, [s.name, s.group || "", ...Object.entries(s.features).flat()].join(" ").toLowerCase()]));
    order = { key: "score", down: true, size: true };
    chosen = null;
    limit = 50;
    for (const element of document.querySelectorAll("[data-answer]")) element.hidden = Number(element.dataset.answer) !== k;
    for (const button of document.querySelectorAll("[data-choice]")) button.setAttribute("aria-pressed", Number(button.dataset.choice) === k);
    explain();
    heading();
    scatter();
    histogram();
    groups();
    show();
    byId("detail").replaceChildren();
    if (samples.length) choose(samples[0]);
  };
  const lossName = (name) => (name === views[0] ? "its loss" : name); // the first is that of the removed samples
  const written = (text) => (/^-?\d*\.\d+(e[+-]?\d+)?$/.test(text) ? number(Number(text)) : text);
  const explain = () => {
    const kinds = report.loss ? { up: "helpful", down: "harmful" } : { up: "lowers the target", down: "raises the target" };
    const means = { up: `${report.target} would rise without it`, down: `${report.target} would fall without it` };
    for (const kind of ["up", "down"]) {
      byId(`l-${kind}`).textContent = `${kinds[kind]}: ${means[kind]}`;
      byId("kind").querySelector(`[value=${kind}]`).textContent = `${kinds[kind]} (${means[kind]})`;
    }
    byId("l-line").hidden = !retrained;
    byId("l-doubt").hidden = !samples.some((s) => s.doubtful);
    byId("how").textContent =
      (samples.length < report.total ? `The ${samples.length} of ${report.total} samples with the largest effect on ${report.target}.` : `All ${report.total} samples, those with the largest effect on ${report.target} first.`) +
      ` A score of +0.02 means ` +
      "that the target would be about 0.02 higher without this sample." +
      (relative ? ` Percentages are of its present value, ${number(report.value)}.` : "") +
      (report.loss ? " The target is a loss, so samples with a positive score are helpful and those with a negative score harmful." : "");
  };

  // The table

  const heading = () => {
    const head = make("tr");
    if (pictured) head.append(make("th", ""));
    for (const column of columns) {
      const cell = make("th", null, (column.text ? "" : "number") + (column.minor ? " minor" : ""));
      cell.scope = "col";
      const button = make("button", column.words);
      button.type = "button";
      button.addEventListener("click", () => {
        const again = order.key === column.key && !order.size;
        const whole = column.key === "score" && again && !order.down; // third click: sort by absolute value again
        order = { key: column.key, down: whole || (again ? !order.down : !column.text), size: whole };
        show();
      });
      cell.append(button);
      cell.dataset.key = column.key;
      head.append(cell);
    }
    document.querySelector("#table thead").replaceChildren(head);
  };
  const matching = () => {
    const phrase = byId("search").value.trim().toLowerCase();
    const exact = phrase && samples.some((s) => words.get(s).includes(phrase));
    const wanted = exact ? [phrase] : phrase.split(/\s+/).filter(Boolean);
    const kind = byId("kind").value;
    const found = samples.filter(
      (s) => wanted.every((word) => words.get(s).includes(word)) && (kind === "all" || side(s.score) === kind),
    );
    const column = columns.find((c) => c.key === order.key);
    // by size, those without a score come first: they may be the strongest
    const value = (s) => (order.size ? (column.of(s) === null ? Infinity : Math.abs(column.of(s))) : column.of(s));
    return found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return 0;
      if (x === null || y === null) return (x === null) - (y === null);
      const ascending = column.text ? String(x).localeCompare(String(y), undefined, { numeric: true }) : x - y;
      return order.down ? -ascending : ascending;
    });
  };
  const show = () => {
    const found = matching();
    const body = document.querySelector("#table tbody");
    body.replaceChildren(...found.slice(0, limit).map(row));
    byId("count").textContent = `${found.length} of ${samples.length}`;
    byId("more").hidden = found.length <= limit;
    for (const cell of document.querySelectorAll("#table thead th[data-key]")) {
      const mine = cell.dataset.key === order.key && !order.size;
      const size = cell.dataset.key === order.key && order.size;
      cell.setAttribute("aria-sort", mine ? (order.down ? "descending" : "ascending") : size ? "other" : "none");
    }
  };
  const row = (s) => {
    const line = make("tr");
    line.tabIndex = 0;
    line.dataset.index = s.index;
    line.setAttribute("aria-selected", s === chosen);
    if (pictured) {
      const cell = make("td");
      if (s.image) cell.append(picture(s.image, "thumb"));
      line.append(cell);
    }
    for (const column of columns) {
      const value = column.of(s);
      const written = column.text ? value : column.percent ? (value === null ? "—" : (value > 0 ? "+" : value < 0 ? "−" : "") + percent(value)) : column.plain ? number(value) : signed(value);
      const cell = make(column.key === "name" ? "th" : "td", written);
      cell.className = (column.text ? "" : "number") + (column.minor ? " minor" : "") + (column.text || column.plain || value === null ? "" : " " + side(value));
      if (column.key === "name" && s.group !== null) cell.dataset.group = s.group; // shown on a phone
      if (column.key === "name") cell.scope = "row";
      cell.classList.toggle("doubtful", column.key === "score" && s.score !== null && s.doubtful);
      line.append(cell);
    }
    line.addEventListener("click", () => {
      choose(s);
      if (narrow()) byId("detail").scrollIntoView({ block: "start" });
    });
    line.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(s); }
      const next = event.key === "ArrowDown" ? line.nextElementSibling : event.key === "ArrowUp" ? line.previousElementSibling : null;
      if (next) { event.preventDefault(); next.focus(); }
    });
    return line;
  };
  const picture = (image, cls) => {
    const canvas = make("canvas", null, cls);
    canvas.width = image.width;
    canvas.height = image.height;
    const bytes = Uint8Array.from(atob(image.data), (c) => c.charCodeAt(0));
    const pixels = new ImageData(image.width, image.height);
    for (let i = 0; i < image.width * image.height; i++) {
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = image.channels === 3 ? bytes[3 * i + c] : bytes[i];
      pixels.data[4 * i + 3] = 255;
    }
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  };

  // Details of one sample

  const bars = (entries) => {
    const box = make("div", null, "bars");
    const most = Math.max(...entries.map((e) => Math.abs(e.value || 0)), 1e-300);
    for (const entry of entries) {
      const bar = make("div", null, "bar" + (entry.rises ? " up" : ""));
      bar.style.width = `${(100 * Math.abs(entry.value || 0)) / most}%`;
      box.append(make("span", entry.name), bar, make("span", entry.words));
    }
    return box;
  };
  const choose = (s, scroll) => {
    chosen = s;
    for (const line of document.querySelectorAll("#table tbody tr")) line.setAttribute("aria-selected", Number(line.dataset.index) === s.index);
    for (const point of document.querySelectorAll("#scatter circle[data-index]")) point.classList.toggle("chosen", Number(point.dataset.index) === s.index);
    const detail = byId("detail");
    detail.replaceChildren(make("h3", s.name));
    if (s.image) detail.append(picture(s.image));
    const does = s.score === 0 ? "not change" : `${s.score > 0 ? "rise" : "fall"} by about ${short(Math.abs(s.score))}${relative ? ` (${percent(s.score / report.value)})` : ""}`;
    detail.append(make("p", s.score === null ? `This sample has no score. ${s.why || ""}` : `Without it, ${report.target} would ${does}.`));
    if (s.expected_error !== null && s.expected_error !== undefined) detail.append(make("p", `The expected relative error of this prediction is ${percent(s.expected_error)}.`));
    if (s.actual !== undefined && s.actual !== null) detail.append(make("p", `Retraining without it changed the target by ${signed(s.actual)}.`));
    if (s.failed) detail.append(make("p", `Retraining without it failed: ${s.failed}`));
    if (s.parts.length > 1) {
      detail.append(make("h3", "Through what it acts"));
      const entries = report.terms.map((name, k) => ({ name, value: s.parts[k], rises: s.parts[k] > 0, words: signed(s.parts[k]) }));
      detail.append(bars(entries.filter((entry) => entry.value !== 0)));
    }
    const list = make("dl");
    if (views.length > 1) for (const name of views) list.append(make("dt", lossName(name)), make("dd", number(s.losses[name])));
    for (const [name, value] of Object.entries(s.features)) list.append(make("dt", name), make("dd", written(value)));
    if (list.childElementCount) detail.append(make("h3", "Features"), list);
    if (scroll) {
      let line = document.querySelector(`#table tbody tr[data-index="${s.index}"]`);
      if (!line) {
        const place = matching().indexOf(s);
        if (place < 0) { byId("search").value = ""; byId("kind").value = "all"; }
        limit = Math.max(limit, matching().indexOf(s) + 1);
        show();
        line = document.querySelector(`#table tbody tr[data-index="${s.index}"]`);
      }
      if (line) line.scrollIntoView({ block: "nearest" });
    }
  };

  // Plots

  // Labels of a horizontal axis, from left to right; one that would touch the one before it is left out
  const label = (svg, y, labels) => {
    let end = -Infinity;
    for (const [x, anchor, text] of labels) {
      const element = drawn("text", { x, y, "text-anchor": anchor }, text);
      svg.append(element);
      const box = element.getBBox();
      if (box.x < end + 8) element.remove();
      else end = box.x + box.width;
    }
  };
  const scatter = () => {
    const svg = byId("scatter");
    const [W, H, left, bottom] = [460, 330, 82, 40];
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.replaceChildren();
    const x = retrained ? (s) => s.actual : (s) => s.loss;
    const points = samples.filter((s) => s.score !== null && x(s) !== null && x(s) !== undefined);
    byId("c-scatter").textContent = retrained ? "Predicted against retrained change; on the line they agree" : "Score against the loss of the sample";
    if (!points.length) return;
    const span = (values) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const room = 0.06 * (high - low || Math.abs(high) || 1);
      return [low - room, high + room];
    };
    const ys = span(retrained ? points.flatMap((s) => [s.score, s.actual]) : points.map((s) => s.score));
    const xs = retrained ? ys : span(points.map(x));
    const px = (v) => left + ((v - xs[0]) / (xs[1] - xs[0])) * (W - left - 12);
    const py = (v) => H - bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (H - bottom - 12);
    svg.append(drawn("line", { x1: left, x2: W - 12, y1: H - bottom, y2: H - bottom, class: "axis" }), drawn("line", { x1: left, x2: left, y1: 12, y2: H - bottom, class: "axis" }));
    label(svg, H - bottom + 15, ticks(...xs).map(([u, text]) => [px(u), px(u) > W - 30 ? "end" : "middle", text]));
    for (const [v, text] of ticks(...ys)) svg.append(drawn("text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, text));
    svg.append(drawn("text", { x: (W + left) / 2, y: H - 6, "text-anchor": "middle" }, retrained ? "retrained change" : "loss of the sample"));
    svg.append(drawn("text", { x: 14, y: H / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${H / 2})` }, "predicted change"));
    if (retrained) svg.append(drawn("line", { x1: px(ys[0]), y1: py(ys[0]), x2: px(ys[1]), y2: py(ys[1]), class: "one" }));
    else if (ys[0] < 0 && ys[1] > 0) svg.append(drawn("line", { x1: left, x2: W - 12, y1: py(0), y2: py(0), class: "one" }));
    const tip = byId("tip");
    const shown = [];
    for (const s of points) {
      const touch = drawn("circle", { cx: px(x(s)), cy: py(s.score), r: 12, class: "touch" }); // larger target for touch screens
      touch.addEventListener("click", () => choose(s, true));
      svg.append(touch);
    }
    for (const [place, s] of points.entries()) {
      const point = drawn("circle", { cx: px(x(s)), cy: py(s.score), r: 4.5, class: `fill-${side(s.score)}${s.doubtful ? " doubtful" : ""}`, tabindex: place ? -1 : 0, role: "button", "aria-label": `${s.name}, score ${signed(s.score)}`, "data-index": s.index });
      const reveal = () => {
        tip.textContent = `${s.name}: ${signed(s.score)}`;
        const box = point.getBoundingClientRect();
        tip.hidden = false;
        tip.style.left = `${Math.max(4, Math.min(box.left + 12, innerWidth - tip.offsetWidth - 4))}px`;
        tip.style.top = `${Math.max(4, box.top - tip.offsetHeight - 6)}px`;
      };
      for (const name of ["mouseenter", "focus"]) point.addEventListener(name, reveal);
      for (const name of ["mouseleave", "blur"]) point.addEventListener(name, () => { tip.hidden = true; });
      point.addEventListener("click", () => choose(s, true));
      point.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(s, true); }
        const next = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (next && shown[place + next]) { // Tab reaches one point, arrow keys move between points
          event.preventDefault();
          point.setAttribute("tabindex", -1);
          shown[place + next].setAttribute("tabindex", 0);
          shown[place + next].focus();
        }
      });
      shown.push(point);
      svg.append(point);
    }
  };
  const histogram = () => {
    const { counts, edges } = report.histogram;
    const svg = byId("histogram");
    const [W, H, bottom] = [460, 330, 40];
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.replaceChildren();
    if (!counts.length) return;
    const most = Math.log1p(Math.max(...counts));
    const wide = (W - 24) / counts.length;
    counts.forEach((count, k) => {
      const tall = most ? ((H - bottom - 16) * Math.log1p(count)) / most : 0;
      const bar = drawn("rect", { x: 12 + k * wide, y: H - bottom - tall, width: Math.max(wide - 1.5, 1), height: tall, class: `fill-${side(edges[k] + edges[k + 1])}` });
      bar.append(drawn("title", {}, `${count} samples from ${signed(edges[k])} to ${signed(edges[k + 1])}`));
      svg.append(bar);
    });
    const at = (v) => 12 + ((v - edges[0]) / (edges[counts.length] - edges[0])) * (W - 24);
    const marks = ticks(edges[0], edges[counts.length]);
    label(svg, H - bottom + 15, marks.map(([v, text]) => [at(v), at(v) < 40 ? "start" : at(v) > W - 40 ? "end" : "middle", text]));
    svg.append(drawn("text", { x: W / 2, y: H - 6, "text-anchor": "middle" }, `scores of all ${report.total} samples (bar height: log of the count)`));
  };
  const groups = () => {
    byId("groups").hidden = !report.by_group.length;
    const entries = report.by_group.map((g) => ({ name: `${g.group} (${g.samples})`, value: g.size, words: short(g.size) }));
    byId("groups").querySelector(".bars").replaceWith(bars(entries));
  };
  byId("search").addEventListener("input", () => { limit = 50; show(); });
  byId("kind").addEventListener("change", show);
  byId("more").addEventListener("click", () => { limit += 200; show(); });
  for (const button of document.querySelectorAll("[data-choice]")) button.addEventListener("click", () => open(Number(button.dataset.choice)));
  open(0);
})();
